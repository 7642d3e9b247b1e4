/* SPDX-License-Identifier: Apache-2.0 */
/* The traffic of a round of the churn: what is posted, and every check of what completes. */
#ifndef UNBROKEN_TESTS_CHURN_TRAFFIC_H
#define UNBROKEN_TESTS_CHURN_TRAFFIC_H

#include "churn_round.h"
#include <stdatomic.h>

enum { BATCH = 8 };
#define RECEIVE (1ULL << 62)
#define SHARED (1ULL << 61)
#define FORBIDDEN (1ULL << 60)

static int faults;
static atomic_ullong operations, bytes, lost, rc_failed, atomics_failed;

/* ---- the TCP connection beside the verbs; a peer that has gone is no error here ---- */

static int tell(struct round *r, const void *data, size_t n)
{
    const char *p = data;

    while (n) {
        ssize_t k = send(r->tcp, p, n, MSG_NOSIGNAL);

        if (k <= 0) {
            r->peer_dead = 1;
            return -1;
        }
        p += k;
        n -= k;
    }
    return 0;
}

static int hear(struct round *r, void *data, size_t n)
{
    char *p = data;

    while (n) {
        ssize_t k = recv(r->tcp, p, n, 0);

        if (k <= 0) {
            r->peer_dead = 1;
            return -1;
        }
        p += k;
        n -= k;
    }
    return 0;
}

static int exchange(struct round *r, const void *mine, void *theirs, size_t n)
{
    return tell(r, mine, n) || hear(r, theirs, n) ? -1 : 0;
}

/* Whether the peer has gone, though something that it told may not have been heard yet. */
static int hung_up(struct round *r)
{
    struct pollfd p = { r->tcp, POLLRDHUP, 0 };

    return poll(&p, 1, 0) > 0;
}

/* ---- receives ---- */

static uint8_t *receive_buffer(struct round *r, uint32_t n)
{
    return r->conns[n / DEPTH].area->in[n % DEPTH];
}

static void post_receive(struct round *r, struct conn *c, uint32_t buffer)
{
    uint32_t n = r->srq ? buffer : c->recvs_posted;
    uint32_t b = r->srq ? buffer : c->id * DEPTH + n % c->rq;
    struct ibv_sge sge = { (uintptr_t)receive_buffer(r, b), GRH_BYTES + BYTES, r->conns[b / DEPTH].mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = RECEIVE | (r->srq ? SHARED | n : (uint64_t)c->id << 48 | (uint64_t)c->life << 40 | n),
                              .sg_list = &sge, .num_sge = 1 }, *bad;
    int e;

    if (!r->srq && (!c->qp || c->gone))
        return;
    memset(receive_buffer(r, b), 0xaa, 64);
    e = r->srq ? ibv_post_srq_recv(r->srq, &wr, &bad) : ibv_post_recv(c->qp, &wr, &bad);
    if (e && !(faults && e == EIO))
        BROKEN(r, c, "post_recv: %s", strerror(e));
    if (r->srq)
        r->shared[b] = !e;
    else
        c->recvs_posted += !e;
}

/* The next operation of the peer that takes a receive, from `i` on. */
static uint32_t next_consumer(struct round *r, struct conn *c, uint32_t i)
{
    while (i < r->plan.ops && !consumes_receive(op_of(&r->plan, c->in_seed, i).kind))
        i++;
    return i;
}

static void check_message(struct round *r, struct conn *c, const struct ibv_wc *wc, const uint8_t *data)
{
    int ud = r->plan.type == IBV_QPT_UD, rc = r->plan.type == IBV_QPT_RC;
    uint32_t expected = next_consumer(r, c, c->in_next), i = expected, len = wc->byte_len - (ud ? GRH_BYTES : 0);
    uint64_t number = 0;
    const char *wrong;
    struct op o;

    if (!rc) { /* those before it may be lost */
        memcpy(&number, data + (ud ? GRH_BYTES : 0), 8);
        i = wc->wc_flags & IBV_WC_WITH_IMM ? ntohl(wc->imm_data) : number;
    }
    if (!rc && faults && i < expected) /* overtaken, which such transports do not see */
        expected = i;
    if (i < expected || i >= r->plan.ops)
        BROKEN(r, c, "a message arrives that is none of those to come: %u, expected %u, length %u", i, expected, len);
    o = op_of(&r->plan, c->in_seed, i);
    if ((wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) != (o.kind == WRITE_IMM) || !(wc->wc_flags & IBV_WC_WITH_IMM) != (o.kind == SEND))
        BROKEN(r, c, "message %u is a %s and completes as opcode %d with flags %#x", i, KIND[o.kind], wc->opcode, wc->wc_flags);
    if (o.kind != SEND && ntohl(wc->imm_data) != i)
        BROKEN(r, c, "message %u (%s) carries immediate %u", i, KIND[o.kind], ntohl(wc->imm_data));
    if (len != o.len)
        BROKEN(r, c, "message %u (%s) has %u bytes, %u are right", i, KIND[o.kind], len, o.len);
    wrong = o.kind != WRITE_IMM ? content_wrong(data + (ud ? GRH_BYTES : 0), len, o.key, i)
            : rc ? NULL : content_wrong(c->area->slots[o.slot], len, o.key, i);
    if (wrong)
        BROKEN(r, c, "message %u (%s, %u bytes): %s", i, KIND[o.kind], len, wrong);
    lost += i - expected;
    if (i >= c->in_next)
        c->in_next = i + 1;
}

static void on_receive(struct round *r, const struct ibv_wc *wc)
{
    uint32_t n = (uint32_t)wc->wr_id, b = n;
    struct conn *c = r->conns + (wc->wr_id >> 48 & 15);
    int i;

    if (wc->wr_id & SHARED) {
        for (i = 0, c = NULL; i < r->plan.qps; i++)
            if (r->conns[i].qp && r->conns[i].qpn == wc->qp_num)
                c = r->conns + i;
        if (!c || n >= (uint32_t)r->plan.qps * DEPTH || !r->shared[n])
            BROKEN(r, c, "receive %u of the SRQ completes for QP %#x: not posted, or for none of our QPs", n, wc->qp_num);
        r->shared[n] = 0;
    } else {
        if (!c->qp || wc->qp_num != c->qpn || (int)(wc->wr_id >> 40 & 255) != c->life || n != c->recvs_done || n >= c->recvs_posted)
            BROKEN(r, c, "receive %u (life %d) completes for QP %#x, expected is %u of %u", n, (int)(wc->wr_id >> 40 & 255), wc->qp_num,
                   c->recvs_done, c->recvs_posted);
        c->recvs_done++;
        b = c->id * DEPTH + n % c->rq;
    }
    c->moved_us = now_us();
    if (wc->status == IBV_WC_SUCCESS)
        check_message(r, c, wc, receive_buffer(r, b));
    else if (wc->status != IBV_WC_WR_FLUSH_ERR)
        BROKEN(r, c, "a receive ends with '%s'", ibv_wc_status_str(wc->status));
    if (wc->status == IBV_WC_SUCCESS)
        post_receive(r, c, n);
}

/* ---- sends ---- */

static void check_result(struct round *r, struct conn *c, const struct posted *p)
{
    struct op o = op_of(&r->plan, c->out_seed, p->op), w;
    uint8_t *have = c->area->out[p->op % DEPTH];
    const char *wrong = NULL;
    uint64_t value;

    if (o.kind == READ && memcmp(have, c->area->peer_source + o.offset, o.len))
        wrong = "other bytes than the peer has";
    if (o.kind == READ_BACK && p->expect != UINT64_MAX) {
        w = op_of(&r->plan, c->out_seed, p->expect);
        wrong = content_wrong(have, w.len, w.key, p->expect);
    }
    if (o.kind == FETCH_ADD || o.kind == COMPARE_SWAP) {
        memcpy(&value, have, 8);
        if (value != p->expect)
            BROKEN(r, c, "operation %u (%s) returns %llu, right is %llu", p->op, KIND[o.kind], (unsigned long long)value,
                   (unsigned long long)p->expect);
    }
    if (wrong)
        BROKEN(r, c, "operation %u (%s, %u bytes): %s", p->op, KIND[o.kind], o.len, wrong);
    operations++;
    bytes += o.len;
}

static void on_send(struct round *r, const struct ibv_wc *wc)
{
    struct conn *c = r->conns + (wc->wr_id >> 48 & 15);
    uint32_t op = (uint32_t)wc->wr_id;

    if (!c->qp || wc->qp_num != c->qpn || (int)(wc->wr_id >> 40 & 255) != c->life || c->head == c->tail)
        BROKEN(r, c, "operation %u of QP %#x completes ('%s'), which is not outstanding", op, wc->qp_num, ibv_wc_status_str(wc->status));
    for (;;) {
        struct posted *p = &c->fifo[c->head % DEPTH];

        if (c->head == c->tail)
            BROKEN(r, c, "operation %u completes, which is not outstanding", op);
        c->head++;
        if (p->op != op && (p->signalled || c->failed))
            BROKEN(r, c, "operation %u completes ('%s') before %u, which is signalled or flushed", op, ibv_wc_status_str(wc->status), p->op);
        if (p->op != op || wc->status == IBV_WC_SUCCESS)
            check_result(r, c, p);
        if (p->op == op)
            break;
    }
    c->moved_us = now_us();
    if (wc->status == IBV_WC_SUCCESS) {
        if (c->failed)
            BROKEN(r, c, "operation %u succeeds after one that failed", op);
        return;
    }
    if (c->failed || c->gone) {
        if (wc->status != IBV_WC_WR_FLUSH_ERR)
            BROKEN(r, c, "operation %u of a QP that has failed ends with '%s'", op, ibv_wc_status_str(wc->status));
        return;
    }
    c->failed = wc->status;
    c->ops = c->posted;
    if (r->peer_dead || hung_up(r) || (r->plan.abrupt && c->id == 0))
        return;
    if (!faults)
        BROKEN(r, c, "operation %u fails: '%s'", op, ibv_wc_status_str(wc->status));
    if (r->plan.type == IBV_QPT_RC) {
        *(r->plan.atomics ? &atomics_failed : &rc_failed) += 1;
        if (!r->plan.atomics)
            printf("rc-failed {\"time_us\": %llu, \"thread\": %d, \"round\": %llu, \"qpn\": %u, \"peer\": %u, \"device\": %d, \"op\": %u, \"status\": \"%s\"}\n",
                   (unsigned long long)now_us(), r->thread, (unsigned long long)r->number, c->qpn, c->peer.qpn, r->plan.device, op,
                   ibv_wc_status_str(wc->status));
    }
}

/* Fills the WR of the next operation. */
static void build(struct round *r, struct conn *c, struct ibv_send_wr *wr, struct ibv_sge *sge)
{
    static const enum ibv_wr_opcode opcode[] = { IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
                                                 IBV_WR_RDMA_READ, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP };
    uint32_t i = c->posted;
    struct op o = op_of(&r->plan, c->out_seed, i), w;
    struct posted *p = &c->fifo[c->tail % DEPTH];
    uint8_t *buffer = c->area->out[i % DEPTH];

    *p = (struct posted){ .op = i, .expect = UINT64_MAX };
    p->signalled = o.signalled || i + 1 == c->ops || c->unsignalled + 1 >= (c->sq + 1) / 2;
    c->unsignalled = p->signalled ? 0 : c->unsignalled + 1;
    *wr = (struct ibv_send_wr){ .wr_id = (uint64_t)c->id << 48 | (uint64_t)c->life << 40 | i, .sg_list = sge, .num_sge = 1,
                                .opcode = opcode[o.kind], .imm_data = htonl(i) };
    wr->send_flags = (p->signalled ? IBV_SEND_SIGNALED : 0) | (o.is_inline ? IBV_SEND_INLINE : 0) | (o.fence ? IBV_SEND_FENCE : 0);
    wr->wr.rdma.rkey = c->peer.rkey;
    if (o.kind <= WRITE_IMM)
        content_make(buffer, o.len, o.key, i);
    if (o.kind == WRITE || o.kind == WRITE_IMM) {
        wr->wr.rdma.remote_addr = c->peer.slots + (uint64_t)o.slot * BYTES;
        c->last_write = i;
    }
    if (o.kind == READ)
        wr->wr.rdma.remote_addr = c->peer.source + o.offset;
    if (o.kind == READ_BACK) {
        wr->wr.rdma.remote_addr = c->peer.source;
        /* A slot is written again after SLOTS operations, by when this one is complete. */
        if (c->last_write != UINT32_MAX && i - c->last_write < SLOTS - DEPTH) {
            p->expect = c->last_write;
            w = op_of(&r->plan, c->out_seed, c->last_write);
            wr->wr.rdma.remote_addr = c->peer.slots + (uint64_t)w.slot * BYTES;
            o.len = w.len;
        }
    }
    if (o.kind == FETCH_ADD) {
        wr->wr.atomic.remote_addr = c->peer.counters;
        wr->wr.atomic.compare_add = o.key & 0xffff;
        wr->wr.atomic.rkey = c->peer.rkey;
        p->expect = c->added;
        c->added += o.key & 0xffff;
    }
    if (o.kind == COMPARE_SWAP) {
        wr->wr.atomic.remote_addr = c->peer.counters + 8;
        wr->wr.atomic.compare_add = c->swapped;
        wr->wr.atomic.swap = o.key;
        wr->wr.atomic.rkey = c->peer.rkey;
        p->expect = c->swapped;
        c->swapped = o.key;
    }
    if (r->plan.type == IBV_QPT_UD) {
        wr->wr.ud.ah = c->ah;
        wr->wr.ud.remote_qpn = c->peer.qpn;
        wr->wr.ud.remote_qkey = (uint32_t)r->plan.seed & 0x7fffffff;
    }
    sge[0] = (struct ibv_sge){ (uintptr_t)buffer, o.len, o.is_inline ? 0 : c->mr->lkey };
    if (o.len > 20 && o.key & 1 << 16) {
        sge[1] = (struct ibv_sge){ (uintptr_t)buffer + 13, o.len - 13, sge[0].lkey };
        sge[0].length = 13;
        wr->num_sge = 2;
    }
    c->tail++;
    c->posted++;
}

/* Posts what there is room for, in one list. Gives how many. */
static int post_sends(struct round *r, struct conn *c)
{
    struct ibv_send_wr wr[BATCH], *bad = NULL;
    struct ibv_sge sge[BATCH][2];
    int n = 0, most = 1 + roll(r) % BATCH, i, e;

    if (!c->qp || c->gone || c->failed || c->refused)
        return 0;
    for (; n < most && c->posted < c->ops && c->tail - c->head < c->sq; n++) {
        build(r, c, wr + n, sge[n]);
        if (n)
            wr[n - 1].next = wr + n;
    }
    if (!n)
        return 0;
    e = ibv_post_send(c->qp, wr, &bad);
    if (e && !(faults && e == EIO && r->plan.type != IBV_QPT_RC))
        BROKEN(r, c, "post_send of operation %u: %s", bad ? (uint32_t)bad->wr_id : 0, strerror(e));
    if (e) { /* a dead NIC, and a QP that nothing protects */
        c->tail -= wr + n - bad;
        c->posted -= wr + n - bad;
        c->ops = c->posted;
        c->refused = 1;
        n = bad - wr;
    }
    for (i = 0; i < n; i++) /* inline data has been taken */
        if (wr[i].send_flags & IBV_SEND_INLINE)
            memset(c->area->out[(uint32_t)wr[i].wr_id % DEPTH], 0xee, MAX_INLINE);
    return n;
}

/* ---- completions ---- */

static int poll_one(struct round *r, struct ibv_cq *cq)
{
    struct ibv_wc wc[16];
    int i, n = ibv_poll_cq(cq, 1 + roll(r) % 16, wc);

    if (n < 0)
        BROKEN(r, NULL, "ibv_poll_cq gives %d", n);
    for (i = 0; i < n; i++) {
        if (wc[i].wr_id & FORBIDDEN)
            BROKEN(r, NULL, "the forbidden WRITE completes twice");
        if (wc[i].wr_id & RECEIVE)
            on_receive(r, wc + i);
        else
            on_send(r, wc + i);
    }
    return n;
}

static int poll_cqs(struct round *r)
{
    int n = poll_one(r, r->send_cq);

    return n + (r->recv_cq != r->send_cq ? poll_one(r, r->recv_cq) : 0);
}

static int readable(int fd, int ms)
{
    struct pollfd p = { fd, POLLIN, 0 };

    return poll(&p, 1, ms) > 0;
}

static void take_event(struct round *r)
{
    struct ibv_cq *cq;
    void *context;

    if (ibv_get_cq_event(r->channel, &cq, &context) || context != r || (cq != r->send_cq && cq != r->recv_cq))
        BROKEN(r, NULL, "ibv_get_cq_event: %s, or an event of another CQ", strerror(errno));
    r->acked[cq != r->send_cq]++;
}

/* Nothing to do: sleeps until something happens, by completion events in some rounds. */
static void rest(struct round *r, uint32_t idle, int ms)
{
    struct pollfd p[2] = { { r->tcp, POLLIN, 0 }, { r->channel ? r->channel->fd : -1, POLLIN, 0 } };

    if (!r->channel) {
        if (idle > 200)
            usleep(200);
        else
            sched_yield();
        return;
    }
    if (ibv_req_notify_cq(r->send_cq, 0) || (r->recv_cq != r->send_cq && ibv_req_notify_cq(r->recv_cq, 0)))
        BROKEN(r, NULL, "ibv_req_notify_cq fails");
    if (poll_cqs(r))
        return;
    if (poll(p, 2, ms) == 0 && poll_cqs(r) && !readable(r->channel->fd, 2000))
        BROKEN(r, NULL, "a completion comes without its event");
    if (readable(r->channel->fd, 0))
        take_event(r);
}

#endif
