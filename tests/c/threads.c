/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All verbs are thread-safe: one process, many threads, the same objects.
 *
 *   threads --seconds S --seed X [--faults]
 *
 * Two pairs of RC QPs in this process. Pair 0 completes in a plain CQ with a channel and has receive queues of its own; pair 1
 * completes in an extended CQ and takes its receives from an SRQ. Eight threads post on each pair (lists, single requests, builders),
 * four post receives, pollers poll, wait for events and use start_poll; others register and deregister regions, make and destroy QPs
 * that use the same CQs, CQs and address handles, modify and query what is in use, resize the CQs, arm the SRQ.
 * Each WR completes once, each message arrives once and intact, each READ brings what is there, the adds add up.
 *
 * With --faults the NIC may die: no atomics then, which are not replayed. It prints "running" when traffic flows, and a line of JSON.
 */
#include "common.h"
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { PAIRS = 2, SENDERS = 8, RECEIVERS = 4, SLOTS = 256, BUFFERS = 512, BYTES = 8192, DEPTH = 64, BATCH = 7, DRAIN_US = 40 * 1000000 };
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
static atomic_ullong churned, events, full;

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
static void prepare(struct pair *p, struct slot *s, struct ibv_send_wr *wr, struct ibv_sge *sge, uint64_t *rng)
{
    static const enum ibv_wr_opcode KINDS[] = { IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ,
                                                IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_ATOMIC_FETCH_AND_ADD };
    uint64_t r = draw(rng);

    s->number = atomic_fetch_add(&p->next, 1);
    s->opcode = KINDS[r % (faults ? 5 : 6)];
    s->len = s->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : s->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? 0 : 16 + (r >> 8) % (BYTES - 16);
    if (s->opcode == IBV_WR_SEND_WITH_IMM)
        content_make(s->bytes, s->len, key_of(p, s->number), s->number);
    else
        memset(s->bytes, 0, 16);
    *sge = (struct ibv_sge){ (uintptr_t)s->bytes, s->len, p->sends_mr->lkey };
    *wr = (struct ibv_send_wr){ .wr_id = (uint64_t)s->number << 16 | (s - p->sends), .sg_list = sge, .num_sge = s->len != 0,
                                .opcode = s->opcode, .send_flags = IBV_SEND_SIGNALED, .imm_data = htonl(s->number) };
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
    case IBV_WR_RDMA_WRITE_WITH_IMM: ibv_wr_rdma_write_imm(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, wr->imm_data); break;
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
                if (wrs[i].opcode == IBV_WR_SEND_WITH_IMM || wrs[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
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

static void completed(struct pair *p, uint64_t wr_id, enum ibv_wc_status status, uint32_t qp_num, uint32_t len, uint32_t imm, int with_imm)
{
    int receive = (wr_id & IS_RECEIVE) != 0;
    uint32_t i = receive ? (uint32_t)wr_id : wr_id & 0xffff, number;
    struct slot *s = (receive ? p->receives : p->sends) + i;
    const char *wrong;

    if (i >= (uint32_t)(receive ? BUFFERS : SLOTS))
        fail("a completion of no WR: wr_id %#llx", (unsigned long long)wr_id);
    if (status != IBV_WC_SUCCESS)
        fail("pair %d: wr_id %#llx completes with %s", p->id, (unsigned long long)wr_id, ibv_wc_status_str(status));
    if (qp_num != (receive ? p->to : p->from)->qp_num)
        fail("pair %d: wr_id %#llx completes for QP %#x", p->id, (unsigned long long)wr_id, qp_num);
    if (!atomic_load(&s->posted) || (!receive && s->number != (uint32_t)(wr_id >> 16)))
        fail("pair %d: %s %u completes though it is not posted", p->id, receive ? "receive" : "send", i);
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
        completed(p, wc[i].wr_id, wc[i].status, wc[i].qp_num, wc[i].opcode == IBV_WC_RECV_RDMA_WITH_IMM ? 0 : wc[i].byte_len,
                  wc[i].imm_data, wc[i].wc_flags & IBV_WC_WITH_IMM);
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
        completed(p, wr_id, status, qp_num, opcode == IBV_WC_RECV_RDMA_WITH_IMM ? 0 : len, ibv_wc_read_imm_data(p->cq_ex),
                  ibv_wc_read_wc_flags(p->cq_ex) & IBV_WC_WITH_IMM);
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

/* ---- everything else, at the same time ---- */

static void to_state(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t peer, const union ibv_gid *gid)
{
    struct ibv_qp_attr a = { .qp_state = state, .port_num = 1, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .max_rd_atomic = 4,
                             .max_dest_rd_atomic = 4, .min_rnr_timer = 1, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
                             .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
                             .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = *gid, .hop_limit = 8 } } };
    static const int MASK[] = { [IBV_QPS_INIT] = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        [IBV_QPS_RTR] = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
        [IBV_QPS_RTS] = IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC };
    int e = ibv_modify_qp(qp, &a, IBV_QP_STATE | MASK[state]);

    /* a dead NIC says EIO, a QP that died with it before it was connected is in ERR */
    if (e && !(faults && (e == EIO || e == EINVAL)))
        fail("modify_qp to %d: %s", state, strerror(e));
}

static void connect_pair(struct ibv_qp *a, struct ibv_qp *b)
{
    union ibv_gid gid;
    int s;

    if (ibv_query_gid(context, 1, 0, &gid))
        fail("ibv_query_gid");
    for (s = IBV_QPS_INIT; s <= IBV_QPS_RTS; s++) {
        to_state(a, s, b->qp_num, &gid);
        to_state(b, s, a->qp_num, &gid);
    }
}

/* A QP; NULL where a dead NIC makes none. */
static struct ibv_qp *make_qp(struct pair *p, int extended, int with_srq)
{
    struct ibv_qp_init_attr_ex init = { .send_cq = p->cq, .recv_cq = p->cq, .srq = with_srq ? p->srq : NULL, .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 }, .pd = pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | (extended ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0), .send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM |
        IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD };
    struct ibv_qp *qp = ibv_create_qp_ex(context, &init);

    if (!qp && !(faults && errno == EIO))
        fail("ibv_create_qp_ex: %s", strerror(errno));
    return qp;
}

#define CHECK(call) do { int e_ = (call); if (e_) fail("%s: %s", #call, strerror(e_)); } while (0)

static void churn_qps(struct pair *p, uint64_t *rng)
{
    struct ibv_qp *a = make_qp(p, 0, 0), *b = make_qp(p, 1, 0);

    if (a && b) {
        if (draw(rng) % 2)
            connect_pair(a, b);
        if (draw(rng) % 2) {
            /* unsignaled, to be forgotten with the QP; no receive meets it */
            struct ibv_send_wr wr = { .opcode = IBV_WR_SEND }, *bad;

            ibv_post_send(a, &wr, &bad);
        }
    }
    if (a)
        CHECK(ibv_destroy_qp(a));
    if (b)
        CHECK(ibv_destroy_qp(b));
}

static void churn_queries(struct pair *p, uint64_t *rng)
{
    struct ibv_qp_attr attr = { .min_rnr_timer = 1, .qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC };
    struct ibv_qp_init_attr init;
    struct ibv_qp *qp = draw(rng) % 2 ? p->from : p->to;
    struct ibv_sge sge = { (uintptr_t)p->remote, 64, 0 };
    struct ibv_send_wr wrong = { .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE, .sg_list = &sge, .num_sge = 1 }, *bad;
    int e;

    if (ibv_post_send(p->to, &wrong, &bad) != EINVAL) /* not even where a switch keeps what is posted */
        fail("inline data is taken by a QP that was made without");
    e = ibv_modify_qp(qp, &attr, IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS);

    if (e && !(faults && e == EIO))
        fail("modify_qp of a QP in use: %s", strerror(e));
    CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
    if (attr.qp_state != IBV_QPS_RTS || init.cap.max_send_wr < DEPTH)
        fail("query_qp: state %d, max_send_wr %u", attr.qp_state, init.cap.max_send_wr);
    if (p->srq) {
        struct ibv_srq_attr srq = { .srq_limit = draw(rng) % 8 };

        CHECK(ibv_modify_srq(p->srq, &srq, IBV_SRQ_LIMIT));
        CHECK(ibv_query_srq(p->srq, &srq));
    }
    CHECK(ibv_resize_cq(p->cq, 4 * (SLOTS + BUFFERS) << draw(rng) % 3));
}

static void churn_others(struct pair *p, uint64_t *rng)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, p->receives, sizeof *p->receives * (1 + draw(rng) % BUFFERS), IBV_ACCESS_LOCAL_WRITE);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, draw(rng) % 2 ? channel : NULL, 0);
    struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh.hop_limit = 8 };
    struct ibv_pd *other = ibv_alloc_pd(context);
    struct ibv_ah *ah;

    if (!mr || !cq || !other || ibv_query_gid(context, 1, 0, &to.grh.dgid))
        fail("reg_mr, create_cq or alloc_pd: %s", strerror(errno));
    ah = ibv_create_ah(other, &to);
    if (!ah)
        fail("create_ah: %s", strerror(errno));
    if (!ibv_dealloc_pd(pd))
        fail("dealloc_pd of what is in use");
    if (!ibv_destroy_cq(p->cq))
        fail("destroy_cq of what is in use");
    CHECK(ibv_req_notify_cq(cq, draw(rng) % 2));
    CHECK(ibv_dereg_mr(mr));
    CHECK(ibv_destroy_cq(cq));
    CHECK(ibv_destroy_ah(ah));
    CHECK(ibv_dealloc_pd(other));
}

static void *churner(void *arg)
{
    static atomic_int ids;
    int id = atomic_fetch_add(&ids, 1);
    uint64_t rng = mix(seed * 77 + id);

    (void)arg;
    while (!atomic_load(&stop_sending)) {
        struct pair *p = pairs + draw(&rng) % PAIRS;

        switch (id % 3) {
        case 0: churn_qps(p, &rng); break;
        case 1: churn_queries(p, &rng); break;
        default: churn_others(p, &rng); break;
        }
        atomic_fetch_add(&churned, 1);
        usleep(draw(&rng) % 500);
    }
    return NULL;
}

static void *async_reader(void *arg)
{
    (void)arg;
    while (!atomic_load(&stop_all)) {
        struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
        struct ibv_async_event event;

        if (poll(&fd, 1, 50) <= 0 || ibv_get_async_event(context, &event))
            continue;
        if (event.event_type != IBV_EVENT_SRQ_LIMIT_REACHED && event.event_type != IBV_EVENT_COMM_EST && !faults)
            fail("asynchronous event %s", ibv_event_type_str(event.event_type));
        ibv_ack_async_event(&event);
    }
    return NULL;
}

/* ---- set-up and end ---- */

static struct ibv_mr *region(void *p, size_t n)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, p, n, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);

    if (!mr)
        fail("ibv_reg_mr: %s", strerror(errno));
    return mr;
}

static void set_up(struct pair *p, int id)
{
    struct ibv_srq_init_attr srq = { .attr = { .max_wr = BUFFERS / 2, .max_sge = 1 } };
    struct ibv_cq_init_attr_ex cq = { .cqe = 4 * (SLOTS + BUFFERS), .cq_context = p, .channel = channel, .wc_flags = IBV_WC_STANDARD_FLAGS };

    p->id = id;
    p->sends = calloc(SLOTS, sizeof *p->sends);
    p->receives = calloc(BUFFERS, sizeof *p->receives);
    p->remote = aligned_alloc(4096, 4096 * (BYTES / 4096 + 1));
    p->seen = calloc(NUMBERS, 1);
    memset(p->remote, 0, 64);
    content_make(p->remote + 64, BYTES, seed + id, 7);
    p->sends_mr = region(p->sends, SLOTS * sizeof *p->sends);
    p->receives_mr = region(p->receives, BUFFERS * sizeof *p->receives);
    p->remote_mr = region(p->remote, 64 + BYTES);
    if (id == 1) {
        p->cq_ex = ibv_create_cq_ex(context, &cq);
        p->cq = p->cq_ex ? ibv_cq_ex_to_cq(p->cq_ex) : NULL;
        p->srq = ibv_create_srq(pd, &srq);
    } else {
        p->cq = ibv_create_cq(context, cq.cqe, p, channel, 0);
    }
    if (!p->cq || (id == 1 && !p->srq))
        fail("no CQ or SRQ: %s", strerror(errno));
    p->from = make_qp(p, 1, 0);
    p->to = make_qp(p, 0, id == 1);
    p->builder = id == 1 ? ibv_qp_to_qp_ex(p->from) : NULL;
    connect_pair(p->from, p->to);
}

static int drained(void)
{
    int i;

    for (i = 0; i < PAIRS; i++)
        if (atomic_load(&pairs[i].completed) != atomic_load(&pairs[i].posted) ||
            atomic_load(&pairs[i].received) != atomic_load(&pairs[i].expected))
            return 0;
    return 1;
}

static uint64_t sum_of(int what)
{
    uint64_t sum = 0;
    int i;

    for (i = 0; i < PAIRS; i++)
        sum += atomic_load(what ? &pairs[i].received : &pairs[i].completed);
    return sum;
}

static void tear_down(struct pair *p)
{
    CHECK(ibv_destroy_qp(p->from));
    CHECK(ibv_destroy_qp(p->to));
    if (p->srq)
        CHECK(ibv_destroy_srq(p->srq));
    CHECK(ibv_destroy_cq(p->cq));
    CHECK(ibv_dereg_mr(p->sends_mr));
    CHECK(ibv_dereg_mr(p->receives_mr));
    CHECK(ibv_dereg_mr(p->remote_mr));
}

static void run_threads(void)
{
    enum { CHURNERS = 6, MOST = PAIRS * (SENDERS + RECEIVERS + 4) + 2 + CHURNERS + 1 };
    pthread_t sending[PAIRS * SENDERS + CHURNERS], rest[MOST];
    int i, p, s = 0, r = 0;
    uint64_t until, told = 0;

    for (p = 0; p < PAIRS; p++) {
        for (i = 0; i < RECEIVERS; i++)
            pthread_create(rest + r++, NULL, receiver, pairs + p);
        for (i = 0; i < 4; i++)
            pthread_create(rest + r++, NULL, poller, pairs + p);
        for (i = 0; i < SENDERS; i++)
            pthread_create(sending + s++, NULL, sender, pairs + p);
    }
    for (i = 0; i < 2; i++)
        pthread_create(rest + r++, NULL, waiter, NULL);
    pthread_create(rest + r++, NULL, async_reader, NULL);
    for (i = 0; i < CHURNERS; i++)
        pthread_create(sending + s++, NULL, churner, NULL);
    for (until = now_us() + seconds * 1000000; now_us() < until; usleep(10000))
        if (!told && sum_of(1) > 100) {
            printf("running\n");
            fflush(stdout);
            told = 1;
        }
    atomic_store(&stop_sending, 1);
    for (i = 0; i < s; i++)
        pthread_join(sending[i], NULL);
    for (until = now_us() + DRAIN_US; !drained(); usleep(1000))
        if (now_us() > until)
            fail("not all completes: pair 0: %llu of %llu sends, %llu of %llu messages; pair 1: %llu of %llu, %llu of %llu",
                 pairs[0].completed, pairs[0].posted, pairs[0].received, pairs[0].expected, pairs[1].completed, pairs[1].posted,
                 pairs[1].received, pairs[1].expected);
    usleep(20000); /* for what completes once too often */
    atomic_store(&stop_all, 1);
    for (i = 0; i < r; i++)
        pthread_join(rest[i], NULL);
    if (!drained())
        fail("more completes than was posted");
}

int main(int argc, char **argv)
{
    struct ibv_device **list;
    int i;

    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--faults"))
            faults = 1;
        else if (!strcmp(argv[i], "--seconds") && i + 1 < argc)
            seconds = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--seed") && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 0);
        else
            fail("usage: threads [--seconds S] [--seed X] [--faults]");
    }
    list = ibv_get_device_list(NULL);
    if (!list || !list[0] || !(context = ibv_open_device(list[0])))
        fail("no device");
    pd = ibv_alloc_pd(context);
    channel = ibv_create_comp_channel(context);
    if (!pd || !channel || fcntl(channel->fd, F_SETFL, O_NONBLOCK) || fcntl(context->async_fd, F_SETFL, O_NONBLOCK))
        fail("no protection domain or channel");
    for (i = 0; i < PAIRS; i++)
        set_up(pairs + i, i);
    run_threads();
    for (i = 0; i < PAIRS; i++) {
        uint64_t count;

        memcpy(&count, pairs[i].remote, 8);
        if (count != atomic_load(&pairs[i].adds))
            fail("pair %d: the counter is %llu after %llu adds", i, (unsigned long long)count, pairs[i].adds);
        tear_down(pairs + i);
    }
    CHECK(ibv_destroy_comp_channel(channel));
    CHECK(ibv_dealloc_pd(pd));
    CHECK(ibv_close_device(context));
    ibv_free_device_list(list);
    printf("{\"sends\": %llu, \"messages\": %llu, \"events\": %llu, \"churned\": %llu, \"full\": %llu}\n", (unsigned long long)sum_of(0),
           (unsigned long long)sum_of(1), events, churned, full);
    return 0;
}
