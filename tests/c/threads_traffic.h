/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pairs of QPs of threads.c and their traffic: the threads that post on them and those that
 * take completions and events, and every check of what completes. A slot is claimed by whoever
 * fills it and free again when its completion has been checked.
 */
#ifndef UNBROKEN_TESTS_THREADS_TRAFFIC_H
#define UNBROKEN_TESTS_THREADS_TRAFFIC_H

#include "common.h"
#include <infiniband/verbs.h>
#include <sched.h>
#include <stdatomic.h>

enum {
    PAIRS = 2,
    SENDERS = 8,
    RECEIVERS = 4,
    SLOTS = 256,
    BUFFERS = 512,
    BYTES = 8192,
    DEPTH = 64,
    BATCH = 7,
    DRAIN_US = 40 * 1000000
};
enum { NUMBERS = 1 << 22 };
#define IS_RECEIVE (1ULL << 63)

/* A send that is posted, or a receive; who holds the slot may touch the buffer. */
struct slot {
    atomic_int posted;
    uint32_t number, len, opcode;
    uint8_t bytes[BYTES];
};

struct pair {
    int id;
    struct ibv_qp *from, *to;
    struct ibv_qp_ex *builder;
    struct ibv_cq *cq;
    struct ibv_cq_ex *cq_ex;
    struct ibv_srq *srq;
    struct ibv_mr *sends_mr, *receives_mr, *remote_mr;
    struct slot *sends, *receives;
    uint8_t *remote; /* a counter, then what is read */
    atomic_uint next;
    atomic_ullong completed, received, posted, adds, expected;
    atomic_uchar *seen;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct pair pairs[PAIRS];
static int faults;
static uint64_t seed = 1, seconds = 5;
static atomic_int stop_sending, stop_all;
static atomic_ullong events, full;

static uint64_t draw(uint64_t *state)
{
    return mix((*state)++);
}

/* ---- posting ---- */

static struct slot *claim(struct slot *slots, int n, uint64_t *rng)
{
    int i, at = draw(rng) % n;

    for (i = 0; i < n; i++) {
        struct slot *s = slots + (at + i) % n;
        int none = 0;

        if (atomic_load(&s->posted) == 0 && atomic_compare_exchange_strong(&s->posted, &none, 1))
            return s;
    }
    return NULL;
}

static uint64_t key_of(const struct pair *p, uint32_t number)
{
    return mix(seed ^ (uint64_t)p->id << 40 ^ number);
}

/* Fills a slot and its work request. */
static void prepare(struct pair *p, struct slot *s, struct ibv_send_wr *wr, struct ibv_sge *sge,
                    uint64_t *rng)
{
    static const enum ibv_wr_opcode KINDS[] = {
        IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM,       IBV_WR_SEND_WITH_IMM,
        IBV_WR_RDMA_READ,     IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_ATOMIC_FETCH_AND_ADD
    };
    uint64_t r = draw(rng);

    s->number = atomic_fetch_add(&p->next, 1);
    s->opcode = KINDS[r % (faults ? 5 : 6)];
    s->len = s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD  ? 8
             : s->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? 0
                                                       : 16 + (r >> 8) % (BYTES - 16);
    if (s->opcode == IBV_WR_SEND_WITH_IMM)
        content_make(s->bytes, s->len, key_of(p, s->number), s->number);
    else
        memset(s->bytes, 0, 16);
    *sge = (struct ibv_sge){ (uintptr_t)s->bytes, s->len, p->sends_mr->lkey };
    *wr = (struct ibv_send_wr){ .wr_id = (uint64_t)s->number << 16 | (s - p->sends),
                                .sg_list = sge,
                                .num_sge = s->len != 0,
                                .opcode = s->opcode,
                                .send_flags = IBV_SEND_SIGNALED,
                                .imm_data = htonl(s->number) };
    if (s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr->wr.atomic.remote_addr = (uintptr_t)p->remote;
        wr->wr.atomic.rkey = p->remote_mr->rkey;
        wr->wr.atomic.compare_add = 1;
    } else {
        wr->wr.rdma.remote_addr = (uintptr_t)p->remote + 64;
        wr->wr.rdma.rkey = p->remote_mr->rkey;
    }
}

static void count_posted(struct pair *p, const struct ibv_send_wr *wr)
{
    atomic_fetch_add(&p->posted, 1);
    if (wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
        atomic_fetch_add(&p->adds, 1);
    if (wr->opcode == IBV_WR_SEND_WITH_IMM || wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        atomic_fetch_add(&p->expected, 1);
}

static void build(struct ibv_qp_ex *qp, const struct ibv_send_wr *wr)
{
    qp->wr_id = wr->wr_id;
    qp->wr_flags = IBV_SEND_SIGNALED;
    switch (wr->opcode) {
    case IBV_WR_SEND_WITH_IMM: ibv_wr_send_imm(qp, wr->imm_data); break;
    case IBV_WR_RDMA_READ: ibv_wr_rdma_read(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr); break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        ibv_wr_rdma_write_imm(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, wr->imm_data);
        break;
    default: ibv_wr_atomic_fetch_add(qp, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr, 1); break;
    }
    if (wr->num_sge)
        ibv_wr_set_sge(qp, wr->sg_list->lkey, wr->sg_list->addr, wr->sg_list->length);
}

/* Posts some; gives how many were. */
static int post_some(struct pair *p, struct ibv_send_wr *wrs, int n, int by_builder)
{
    struct ibv_send_wr *bad = NULL;
    int i, e;

    if (by_builder) {
        ibv_wr_start(p->builder);
        for (i = 0; i < n; i++)
            build(p->builder, wrs + i);
        e = ibv_wr_complete(p->builder);
        if (e && e != ENOMEM)
            fail("ibv_wr_complete: %s", strerror(e));
        return e ? 0 : n;
    }
    e = ibv_post_send(p->from, wrs, &bad);
    if (e && e != ENOMEM)
        fail("ibv_post_send: %s", strerror(e));
    return e ? bad - wrs : n;
}

static void *sender(void *arg)
{
    static atomic_int ids;
    int id = atomic_fetch_add(&ids, 1), n, done, i;
    struct pair *p = arg;
    uint64_t rng = mix(seed + id);
    struct ibv_send_wr wrs[BATCH];
    struct ibv_sge sges[BATCH];
    struct slot *slots[BATCH];

    while (!atomic_load(&stop_sending) && atomic_load(&p->next) < NUMBERS - 1000) {
        int want = 1 + draw(&rng) % BATCH;

        for (n = 0; n < want && (slots[n] = claim(p->sends, SLOTS, &rng)); n++) {
            prepare(p, slots[n], wrs + n, sges + n, &rng);
            if (n)
                wrs[n - 1].next = wrs + n;
        }
        for (done = 0; done < n && !atomic_load(&stop_sending);) {
            int k;

            /* counted first: a poller may be faster than we are */
            for (i = done; i < n; i++)
                count_posted(p, wrs + i);
            k = post_some(p, wrs + done, n - done, p->builder && id % 2);
            for (i = done + k; i < n; i++) {
                atomic_fetch_sub(&p->posted, 1);
                if (wrs[i].opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
                    atomic_fetch_sub(&p->adds, 1);
                if (wrs[i].opcode == IBV_WR_SEND_WITH_IMM ||
                    wrs[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
                    atomic_fetch_sub(&p->expected, 1);
            }
            done += k;
            if (done < n) {
                atomic_fetch_add(&full, 1);
                usleep(50);
            }
        }
        for (i = done; i < n; i++)
            atomic_store(&slots[i]->posted, 0);
        if (!n)
            usleep(50);
    }
    return NULL;
}

static void *receiver(void *arg)
{
    static atomic_int ids;
    uint64_t rng = mix(seed * 31 + atomic_fetch_add(&ids, 1));
    struct pair *p = arg;

    while (!atomic_load(&stop_all)) {
        struct slot *s = claim(p->receives, BUFFERS, &rng);
        struct ibv_sge sge;
        struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
        int e;

        if (!s) {
            usleep(50);
            continue;
        }
        sge = (struct ibv_sge){ (uintptr_t)s->bytes, BYTES, p->receives_mr->lkey };
        wr.wr_id = IS_RECEIVE | (s - p->receives);
        e = p->srq ? ibv_post_srq_recv(p->srq, &wr, &bad) : ibv_post_recv(p->to, &wr, &bad);
        if (e) {
            atomic_store(&s->posted, 0);
            if (e != ENOMEM)
                fail("posting a receive: %s", strerror(e));
            usleep(100);
        }
    }
    return NULL;
}

/* ---- completions ---- */

static void completed(struct pair *p, uint64_t wr_id, enum ibv_wc_status status, uint32_t qp_num,
                      uint32_t len, uint32_t imm, int with_imm)
{
    int receive = (wr_id & IS_RECEIVE) != 0;
    uint32_t i = receive ? (uint32_t)wr_id : wr_id & 0xffff, number;
    struct slot *s = (receive ? p->receives : p->sends) + i;
    const char *wrong;

    if (i >= (uint32_t)(receive ? BUFFERS : SLOTS))
        fail("a completion of no WR: wr_id %#llx", (unsigned long long)wr_id);
    if (status != IBV_WC_SUCCESS)
        fail("pair %d: wr_id %#llx completes with %s", p->id, (unsigned long long)wr_id,
             ibv_wc_status_str(status));
    if (qp_num != (receive ? p->to : p->from)->qp_num)
        fail("pair %d: wr_id %#llx completes for QP %#x", p->id, (unsigned long long)wr_id, qp_num);
    if (!atomic_load(&s->posted) || (!receive && s->number != (uint32_t)(wr_id >> 16)))
        fail("pair %d: %s %u completes though it is not posted", p->id,
             receive ? "receive" : "send", i);
    if (!receive) {
        if (s->opcode == IBV_WR_RDMA_READ && memcmp(s->bytes, p->remote + 64, s->len))
            fail("pair %d: READ %u brings wrong bytes", p->id, s->number);
        atomic_fetch_add(&p->completed, 1);
        atomic_store(&s->posted, 0);
        return;
    }
    if (!with_imm)
        fail("a receive without immediate");
    number = ntohl(imm);
    if (number >= NUMBERS || atomic_fetch_add(&p->seen[number], 1))
        fail("pair %d: message %u arrives twice", p->id, number);
    if (len) {
        wrong = content_wrong(s->bytes, len, key_of(p, number), number);
        if (wrong)
            fail("pair %d: message %u of %u bytes: %s", p->id, number, len, wrong);
    }
    atomic_fetch_add(&p->received, 1);
    atomic_store(&s->posted, 0);
}

static int poll_plain(struct pair *p, int most)
{
    struct ibv_wc wc[16];
    int i, n = ibv_poll_cq(p->cq, most, wc);

    if (n < 0)
        fail("ibv_poll_cq gives %d", n);
    for (i = 0; i < n; i++)
        completed(p, wc[i].wr_id, wc[i].status, wc[i].qp_num,
                  wc[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM ? 0 : wc[i].byte_len, wc[i].imm_data,
                  wc[i].wc_flags & IBV_WC_WITH_IMM);
    return n;
}

static int poll_extended(struct pair *p)
{
    struct ibv_poll_cq_attr attr = { 0 };
    int n = 0, e = ibv_start_poll(p->cq_ex, &attr);

    if (e == ENOENT)
        return 0;
    for (; !e && n < 16; n++, e = ibv_next_poll(p->cq_ex)) {
        uint64_t wr_id = p->cq_ex->wr_id;
        enum ibv_wc_status status = p->cq_ex->status;
        int opcode = ibv_wc_read_opcode(p->cq_ex);
        uint32_t qp_num = ibv_wc_read_qp_num(p->cq_ex), len = ibv_wc_read_byte_len(p->cq_ex);

        sched_yield(); /* others poll meanwhile, if they can */
        completed(p, wr_id, status, qp_num, opcode == IBV_WC_RECV_RDMA_WITH_IMM ? 0 : len,
                  ibv_wc_read_imm_data(p->cq_ex), ibv_wc_read_wc_flags(p->cq_ex) & IBV_WC_WITH_IMM);
        if (p->cq_ex->wr_id != wr_id)
            fail("the completion at hand changed");
        if (n == 15) {
            n++;
            break;
        }
    }
    if (e && e != ENOENT)
        fail("ibv_next_poll: %s", strerror(e));
    ibv_end_poll(p->cq_ex);
    return n;
}

static void *poller(void *arg)
{
    static atomic_int ids;
    int id = atomic_fetch_add(&ids, 1);
    struct pair *p = arg;

    while (!atomic_load(&stop_all)) {
        int n = p->cq_ex && id % 4 ? poll_extended(p) : poll_plain(p, 1 + id % 16);

        if (!n)
            usleep(id % 3 * 20);
    }
    return NULL;
}

/* Waits for events of both CQs, which others poll at the same time. */
static void *waiter(void *arg)
{
    (void)arg;
    while (!atomic_load(&stop_all)) {
        struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
        struct ibv_cq *cq;
        void *of;
        int i;

        for (i = 0; i < PAIRS; i++)
            if (ibv_req_notify_cq(pairs[i].cq, 0))
                fail("ibv_req_notify_cq");
        for (i = 0; i < PAIRS; i++)
            poll_plain(pairs + i, 4);
        if (poll(&fd, 1, 20) <= 0)
            continue;
        if (ibv_get_cq_event(channel, &cq, &of)) {
            if (errno != EAGAIN)
                fail("ibv_get_cq_event: %s", strerror(errno));
            continue;
        }
        if (((struct pair *)of)->cq != cq)
            fail("an event of an unknown CQ");
        atomic_fetch_add(&events, 1);
        ibv_ack_cq_events(cq, 1);
    }
    return NULL;
}

#endif
