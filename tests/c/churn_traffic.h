/* SPDX-License-Identifier: Apache-2.0 */
/* The traffic of a round of the churn: what is posted, and every check of what completes. */
#ifndef UNBROKEN_TESTS_CHURN_TRAFFIC_H
#define UNBROKEN_TESTS_CHURN_TRAFFIC_H

#include "churn_post.h"

enum { BATCH = 8 };
#define RECEIVE (1ULL << 62)
#define SHARED (1ULL << 61)
#define KEYS (1ULL << 60)

/* paths may fail; packets may be lost, which they may with faults, too */
static int faults, impaired;
static uint64_t bound_us = 20 * 1000000;
static atomic_ullong operations, bytes, lost, rc_failed, atomics_failed, keys_failed;
/* of QPs with atomics and windows, which have the original one */
static atomic_ullong errors[IBV_WC_GENERAL_ERR + 1];

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
    struct conn *owner = r->conns + b / DEPTH;
    struct ibv_sge sge = { at(owner, receive_buffer(r, b)), GRH_BYTES + BYTES, owner->mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = RECEIVE | (r->srq ? SHARED | n
                                                         : (uint64_t)c->id << 48 |
                                                               (uint64_t)c->life << 40 | n),
                              .sg_list = &sge,
                              .num_sge = 1 },
                       *bad;
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

/* An address handle made from what has come leads back to the sender. */
static void answer_handle(struct round *r, struct conn *c, const struct ibv_wc *wc,
                          const uint8_t *data)
{
    struct ibv_wc copy = *wc;
    struct ibv_grh grh;
    struct ibv_ah_attr a;
    struct ibv_ah *ah;

    memcpy(&grh, data, sizeof grh);
    if (ibv_init_ah_from_wc(r->context, 1, &copy, &grh, &a))
        BROKEN(r, c, "ibv_init_ah_from_wc: %s", strerror(errno));
    if (!a.is_global || memcmp(&a.grh.dgid, &r->peer_gid, sizeof r->peer_gid))
        BROKEN(r, c, "ibv_init_ah_from_wc leads to another NIC than that of the sender");
    ah = ibv_create_ah_from_wc(r->pd, &copy, &grh, 1);
    if (!ah && faults && errno == EIO)
        return;
    if (!ah || ibv_destroy_ah(ah))
        BROKEN(r, c, "ibv_create_ah_from_wc or ibv_destroy_ah: %s", strerror(errno));
    counts[C_ah_from_wc]++;
}

static void check_message(struct round *r, struct conn *c, const struct ibv_wc *wc,
                          const uint8_t *data)
{
    int ud = r->plan.type == IBV_QPT_UD, rc = r->plan.type == IBV_QPT_RC;
    uint32_t expected = next_consumer(r, c, c->in_next), i = expected,
             len = wc->byte_len - (ud ? GRH_BYTES : 0);
    uint64_t number = 0;
    const char *wrong;
    struct op o;

    if (!rc) { /* those before it may be lost */
        memcpy(&number, data + (ud ? GRH_BYTES : 0), 8);
        i = wc->wc_flags & IBV_WC_WITH_IMM ? ntohl(wc->imm_data) : number;
    }
    if (!rc && impaired && i < expected) /* overtaken, which such transports do not see */
        expected = i;
    if (i < expected || i >= r->plan.ops)
        BROKEN(r, c, "a message arrives that is none of those to come: %u, expected %u, length %u",
               i, expected, len);
    o = op_of(&r->plan, c->in_seed, i);
    memcpy(&number, data + (ud ? GRH_BYTES : 0), 8);
    if ((wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM) != (o.kind == WRITE_IMM) ||
        !(wc->wc_flags & IBV_WC_WITH_IMM) != (o.kind == SEND))
        BROKEN(r, c, "message %u is a %s and completes as opcode %d with flags %#x, number %llu",
               i, KIND[o.kind], wc->opcode, wc->wc_flags, (unsigned long long)number);
    if (o.kind != SEND && ntohl(wc->imm_data) != i)
        BROKEN(r, c, "message %u (%s) carries immediate %u", i, KIND[o.kind], ntohl(wc->imm_data));
    if (len != o.len)
        BROKEN(r, c, "message %u (%s) has %u bytes, %u are right; it has number %llu", i,
               KIND[o.kind], len, o.len, (unsigned long long)number);
    wrong = o.kind != WRITE_IMM ? data_wrong(&o, data + (ud ? GRH_BYTES : 0), i)
            : rc                ? NULL
                                : data_wrong(&o, c->area->slots[o.slot], i);
    if (wrong)
        BROKEN(r, c, "message %u (%s, %u bytes): %s", i, KIND[o.kind], len, wrong);
    if (ud && roll(r) % 8 == 0)
        answer_handle(r, c, wc, data);
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
            BROKEN(r, c,
                   "receive %u of the SRQ completes for QP %#x: not posted, or for none of our QPs",
                   n, wc->qp_num);
        r->shared[n] = 0;
    } else {
        if (!c->qp || wc->qp_num != c->qpn || (int)(wc->wr_id >> 40 & 255) != c->life ||
            n != c->recvs_done || n >= c->recvs_posted)
            BROKEN(r, c, "receive %u (life %d) completes for QP %#x, expected is %u of %u", n,
                   (int)(wc->wr_id >> 40 & 255), wc->qp_num, c->recvs_done, c->recvs_posted);
        c->recvs_done++;
        b = c->id * DEPTH + n % c->rq;
    }
    c->moved_us = now_us();
    if (wc->status == IBV_WC_SUCCESS && wc->wc_flags & IBV_WC_WITH_INV)
        c->invalidated = wc->invalidated_rkey;
    else if (wc->status == IBV_WC_SUCCESS)
        check_message(r, c, wc, receive_buffer(r, b));
    else if (wc->status != IBV_WC_WR_FLUSH_ERR)
        BROKEN(r, c, "a receive ends with '%s'", ibv_wc_status_str(wc->status));
    if (wc->status == IBV_WC_SUCCESS)
        post_receive(r, c, n);
}

/* ---- sends ---- */

/* Of a READ that begins with the null region: so much goes there. */
static uint32_t null_part(const struct op *o)
{
    return o->len < 13 ? o->len : 13;
}

static void check_result(struct round *r, struct conn *c, const struct posted *p)
{
    struct op o = op_of(&r->plan, c->out_seed, p->op), w;
    uint8_t *have = c->area->out[p->op % DEPTH];
    const char *wrong = NULL;
    uint32_t skipped = o.null ? null_part(&o) : 0;
    uint64_t value;

    if (o.kind == READ &&
        memcmp(have + skipped, c->area->peer_source + o.offset + skipped, o.len - skipped))
        wrong = "other bytes than the peer has";
    if (o.kind == READ_BACK && p->expect != UINT64_MAX) {
        w = op_of(&r->plan, c->out_seed, p->expect);
        wrong = data_wrong(&w, have, p->expect);
    }
    if (o.kind == FETCH_ADD || o.kind == COMPARE_SWAP) {
        memcpy(&value, have, 8);
        if (value != p->expect)
            BROKEN(r, c, "operation %u (%s) returns %llu, right is %llu", p->op, KIND[o.kind],
                   (unsigned long long)value, (unsigned long long)p->expect);
    }
    if (wrong)
        BROKEN(r, c, "operation %u (%s, %u bytes): %s", p->op, KIND[o.kind], o.len, wrong);
    counts[o.kind]++;
    counts[o.kind == READ ? C_into_null_mr : C_from_null_mr] += o.null && o.len;
    operations++;
    bytes += o.len;
}

/* What a WC of success says beside that. */
static void check_completion(struct round *r, struct conn *c, const struct posted *p,
                             const struct ibv_wc *wc)
{
    static const enum ibv_wc_opcode opcode[] = { IBV_WC_SEND,       IBV_WC_SEND,
                                                 IBV_WC_RDMA_WRITE, IBV_WC_RDMA_WRITE,
                                                 IBV_WC_RDMA_READ,  IBV_WC_RDMA_READ,
                                                 IBV_WC_FETCH_ADD,  IBV_WC_COMP_SWAP };
    struct op o = op_of(&r->plan, c->out_seed, p->op);

    if (wc->opcode != (o.kind == BIND ? p->local : opcode[o.kind]))
        BROKEN(r, c, "operation %u (%s) completes as opcode %d", p->op, KIND[o.kind], wc->opcode);
    if (((o.kind == READ || o.kind == FETCH_ADD || o.kind == COMPARE_SWAP) &&
         wc->byte_len != o.len))
        BROKEN(r, c, "operation %u (%s, %u bytes) completes with %u bytes", p->op, KIND[o.kind],
               o.len, wc->byte_len);
}

static void on_send(struct round *r, const struct ibv_wc *wc)
{
    struct conn *c = r->conns + (wc->wr_id >> 48 & 15);
    uint32_t op = (uint32_t)wc->wr_id;

    if (!c->qp || wc->qp_num != c->qpn || (int)(wc->wr_id >> 40 & 255) != c->life ||
        c->head == c->tail)
        BROKEN(r, c, "operation %u of QP %#x completes ('%s'), which is not outstanding", op,
               wc->qp_num, ibv_wc_status_str(wc->status));
    for (;;) {
        struct posted *p = &c->fifo[c->head % DEPTH];

        if (c->head == c->tail)
            BROKEN(r, c, "operation %u completes, which is not outstanding", op);
        c->head++;
        if (p->op != op && (p->signalled || c->failed))
            BROKEN(r, c, "operation %u completes ('%s') before %u, which is signalled or flushed",
                   op, ibv_wc_status_str(wc->status), p->op);
        if (p->op == op && wc->status == IBV_WC_SUCCESS)
            check_completion(r, c, p, wc);
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
        /* a NIC may have failed the QP before the program did, which is in its CQ */
        int first = faults && c->gone == TO_ERROR && !c->failed;

        if (wc->status == IBV_WC_WR_FLUSH_ERR)
            return;
        if (!first)
            BROKEN(r, c, "operation %u of a QP that has failed ends with '%s'", op,
                   ibv_wc_status_str(wc->status));
        c->failed = wc->status;
        return;
    }
    c->failed = wc->status;
    c->ops = c->posted;
    if (r->peer_dead || hung_up(r) || (r->plan.abrupt && c->id == 0))
        return;
    if (!faults)
        BROKEN(r, c, "operation %u fails: '%s'", op, ibv_wc_status_str(wc->status));
    if (r->plan.type == IBV_QPT_RC) {
        *(r->plan.windowed || r->plan.binds ? &keys_failed
          : r->plan.atomics                 ? &atomics_failed
                                            : &rc_failed) += 1;
        if (r->plan.atomics || r->plan.windowed || r->plan.binds)
            errors[wc->status]++;
        else
            printf("rc-failed {\"time_us\": %llu, \"thread\": %d, \"round\": %llu, \"qpn\": %u, "
                   "\"peer\": %u, \"device\": %d, \"op\": %u, \"status\": \"%s\"}\n",
                   (unsigned long long)now_us(), r->thread, (unsigned long long)r->number, c->qpn,
                   c->peer.qpn, r->plan.device, op, ibv_wc_status_str(wc->status));
    }
}

/* Binds the QP's window to its source, or takes it away again. */
static void build_local(struct round *r, struct conn *c, struct ibv_send_wr *wr, struct posted *p)
{
    p->local = c->bound ? IBV_WC_LOCAL_INV : IBV_WC_BIND_MW;
    wr->opcode = c->bound ? IBV_WR_LOCAL_INV : IBV_WR_BIND_MW;
    wr->num_sge = 0;
    if (c->bound) {
        wr->invalidate_rkey = c->between_key;
    } else {
        wr->bind_mw.mw = c->between;
        wr->bind_mw.rkey = c->between_key = ibv_inc_rkey(c->between_key);
        wr->bind_mw.bind_info =
            (struct ibv_mw_bind_info){ c->mr, at(c, c->area->source), 1 + roll(r) % BYTES,
                                       IBV_ACCESS_REMOTE_READ };
    }
    c->bound = !c->bound;
}

/* Fills the WR of the next operation. */
static void build(struct round *r, struct conn *c, struct ibv_send_wr *wr, struct ibv_sge *sge)
{
    static const enum ibv_wr_opcode opcode[] = { IBV_WR_SEND,
                                                 IBV_WR_SEND_WITH_IMM,
                                                 IBV_WR_RDMA_WRITE,
                                                 IBV_WR_RDMA_WRITE_WITH_IMM,
                                                 IBV_WR_RDMA_READ,
                                                 IBV_WR_RDMA_READ,
                                                 IBV_WR_ATOMIC_FETCH_AND_ADD,
                                                 IBV_WR_ATOMIC_CMP_AND_SWP };
    uint32_t i = c->posted;
    struct op o = op_of(&r->plan, c->out_seed, i), w;
    struct posted *p = &c->fifo[c->tail % DEPTH];
    uint8_t *buffer = c->area->out[i % DEPTH];

    *p = (struct posted){ .op = i, .expect = UINT64_MAX };
    p->signalled = o.signalled || i + 1 == c->ops || c->unsignalled + 1 >= (c->sq + 1) / 2;
    c->unsignalled = p->signalled ? 0 : c->unsignalled + 1;
    *wr = (struct ibv_send_wr){ .wr_id = (uint64_t)c->id << 48 | (uint64_t)c->life << 40 | i,
                                .sg_list = sge,
                                .num_sge = 1,
                                .opcode = o.kind == BIND ? IBV_WR_BIND_MW : opcode[o.kind],
                                .imm_data = htonl(i) };
    wr->send_flags = (p->signalled ? IBV_SEND_SIGNALED : 0) | (o.is_inline ? IBV_SEND_INLINE : 0) |
                     (o.fence ? IBV_SEND_FENCE : 0);
    if (o.kind == BIND) {
        build_local(r, c, wr, p);
        c->tail++;
        c->posted++;
        return;
    }
    wr->wr.rdma.rkey = c->peer.rkey;
    if (o.kind <= WRITE_IMM && !o.null)
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
        wr->wr.ud.remote_qkey = qkey_of(r, c);
    }
    sge[0] = (struct ibv_sge){ o.is_inline ? (uintptr_t)buffer : at(c, buffer), o.len,
                               o.is_inline ? 0 : c->mr->lkey };
    if (o.null && o.kind != READ)
        sge[0] = (struct ibv_sge){ o.key, o.len, r->null->lkey };
    else if (o.null || (o.len > 20 && o.key & 1 << 16)) {
        sge[0].length = null_part(&o);
        sge[1] =
            (struct ibv_sge){ sge[0].addr + sge[0].length, o.len - sge[0].length, sge[0].lkey };
        if (o.null)
            sge[0].lkey = r->null->lkey;
        wr->num_sge = 2;
    }
    c->tail++;
    c->posted++;
}

/* Another address handle of the same peer, while nothing uses the one that there is. */
static void renew_ah(struct round *r, struct conn *c, struct ibv_send_wr *wr)
{
    struct ibv_ah_attr a = { .is_global = 1,
                             .port_num = 1,
                             .grh = { .dgid = r->peer_gid, .hop_limit = 64 } };
    struct ibv_ah *fresh = ibv_create_ah(r->pd, &a);

    if (!fresh && faults && errno == EIO)
        return;
    if (!fresh || ibv_destroy_ah(c->ah))
        BROKEN(r, c, "ibv_create_ah or ibv_destroy_ah: %s", strerror(errno));
    c->ah = fresh;
    for (; wr; wr = wr->next)
        wr->wr.ud.ah = fresh;
    counts[C_new_ah]++;
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
    if (r->plan.type == IBV_QPT_UD && c->head + n == c->tail && roll(r) % 4 == 0)
        renew_ah(r, c, wr);
    e = post(r, c, wr, &bad);
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

/* A WR that offers or uses a key. */
static void on_keys(struct round *r, const struct ibv_wc *wc)
{
    struct conn *c = r->conns + (wc->wr_id >> 48 & 15);

    if (!c->qp || wc->qp_num != c->qpn || (uint32_t)wc->wr_id != c->keys_done ||
        c->keys_done == c->keys_posted)
        BROKEN(r, c, "WR %u that changes or uses keys completes, expected is %u of %u",
               (uint32_t)wc->wr_id, c->keys_done, c->keys_posted);
    c->keys_done++;
    if (wc->status == IBV_WC_SUCCESS && c->keys_status)
        BROKEN(r, c, "WR %u that changes or uses keys succeeds after one that failed",
               (uint32_t)wc->wr_id);
    if (!c->keys_status)
        c->keys_status = wc->status;
}

static int poll_one(struct round *r, struct ibv_cq *cq)
{
    struct ibv_wc wc[16];
    int i, n = poll_some(r, cq, 1 + roll(r) % 16, wc);

    if (n < 0)
        BROKEN(r, NULL, "ibv_poll_cq gives %d", n);
    for (i = 0; i < n; i++) {
        if (wc[i].wr_id & KEYS)
            on_keys(r, wc + i);
        else if (wc[i].wr_id & RECEIVE)
            on_receive(r, wc + i);
        else
            on_send(r, wc + i);
    }
    return n;
}

/* Gives a queue another size; what waits in it stays. */
static int resize(struct round *r)
{
    struct ibv_cq *cq = roll(r) % 2 ? r->send_cq : r->recv_cq;
    int entries = r->entries + roll(r) % (3 * r->entries), e = ibv_resize_cq(cq, entries), found;

    if (e || cq->cqe < entries)
        BROKEN(r, NULL, "ibv_resize_cq to %d: %s, %d entries", entries, strerror(e), cq->cqe);
    counts[C_resize_cq]++;
    found = poll_one(r, cq);
    counts[C_resize_waiting] += !!found;
    return found;
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

    if (ibv_get_cq_event(r->channel, &cq, &context) || context != r ||
        (cq != r->send_cq && cq != r->recv_cq))
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
    if (ibv_req_notify_cq(r->send_cq, 0) ||
        (r->recv_cq != r->send_cq && ibv_req_notify_cq(r->recv_cq, 0)))
        BROKEN(r, NULL, "ibv_req_notify_cq fails");
    if (poll_cqs(r))
        return;
    if (poll(p, 2, ms) == 0 && poll_cqs(r) && !readable(r->channel->fd, 2000))
        BROKEN(r, NULL, "a completion comes without its event");
    if (readable(r->channel->fd, 0))
        take_event(r);
}

#endif
