/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The verifier's sending side: posts the stream and the counters as there is room, and checks every
 * completion of a send. Each WR is in `fifo` from its post until it, or one behind it, completes;
 * what was posted unsignalled is done when that happens.
 */
#ifndef UNBROKEN_TESTS_VERIFIER_SEND_H
#define UNBROKEN_TESTS_VERIFIER_SEND_H

#include "verifier_qp.h"
/* After common.h, which says what is wanted of the system's headers. */
#include "../../include/unbroken/unbroken.h"

/* The peer's counters, as it last wrote them. Where a WRITE may be carried out twice they may go
 * back for a while. */
static void look_at_counters(struct qp *q)
{
    struct counters now = { q->mem->from_peer.received, q->mem->from_peer.consumed };

    if (now.received < q->peer_has.received || now.consumed < q->peer_has.consumed) {
        if (!opt.writes_repeat)
            fail("QP %d: a counter of the peer went back: an old WRITE was carried out again",
                 q->id);
        return;
    }
    if (now.received > q->sent_messages || now.consumed > q->sent_writes)
        fail("QP %d: the peer counts more than was sent", q->id);
    q->peer_has = now;
}

/* Whether the step may be posted now. */
static int has_room(struct qp *q, const struct step *t)
{
    /* One entry stays free for counters, which must never wait: the peer may need them to go on. */
    if (q->tail - q->head >= SQ - 2 || q->data_posted - q->data_done >= SLOTS)
        return 0;
    if ((t->kind == WRITE || t->kind == WRITE_IMM) && q->sent_writes - q->peer_has.consumed >= RING)
        return 0;
    if (t->kind == READ && q->pending_until[t->region] > q->peer_has.received)
        return 0;
    if (t->kind == BUMP && q->pending_until[t->region] > q->peer_has.received)
        return 0;
    return 1;
}

static void post(struct qp *q, struct ibv_send_wr *wr, struct posted p)
{
    struct ibv_send_wr *bad;
    int e;

    if (opt.no_replay)
        wr->send_flags |= UNBROKEN_SEND_NO_REPLAY;
    if (p.signalled)
        wr->send_flags |= IBV_SEND_SIGNALED;
    q->unsignalled = p.signalled ? 0 : q->unsignalled + 1;
    p.wr_id = wr->wr_id = (uint64_t)q->id << 48 | q->tail;
    e = ibv_post_send(q->qp, wr, &bad);
    if (e && !first_error_us)
        fail("QP %d: post_send of a %s: %s", q->id, kind_name[p.kind], strerror(e));
    if (e)
        return;
    q->fifo[q->tail++ % SQ] = p;
    moved_us = now_us();
}

static void post_step(struct qp *q, const struct step *t)
{
    struct memory *m = q->mem;
    uint32_t slot = q->data_posted % SLOTS, half = t->split ? t->len / 2 : 0;
    uint8_t *buf = m->slots[slot];
    struct ibv_sge sge[2] = { { (uintptr_t)buf, half, q->mr->lkey },
                              { (uintptr_t)buf + half, t->len - half, q->mr->lkey } };
    struct ibv_send_wr wr = { .sg_list = half ? sge : sge + 1,
                              .num_sge = t->len ? half ? 2 : 1 : 0,
                              .imm_data = t->imm };
    struct posted p = {
        .kind = t->kind, .len = t->len, .slot = slot, .key = t->key, .number = t->index
    };

    p.signalled = t->signalled || q->unsignalled + 1 >= UNSIGNALLED_RUN || t->kind == END;
    wr.wr.rdma.rkey = q->peer.rkey;
    switch (t->kind) {
    case SEND:
        wr.opcode = IBV_WR_SEND;
        break;
    case SEND_IMM:
    case END:
        wr.opcode = IBV_WR_SEND_WITH_IMM;
        break;
    case BUMP:
        wr.opcode = IBV_WR_SEND_WITH_IMM;
        wr.send_flags = IBV_SEND_FENCE;
        q->version[t->region]++;
        q->pending_until[t->region] = q->sent_messages + 1;
        break;
    case WRITE:
    case WRITE_IMM:
        wr.opcode = t->kind == WRITE ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_WRITE_WITH_IMM;
        wr.wr.rdma.remote_addr = q->peer.ring + q->sent_writes % RING * MAX_BYTES;
        q->sent_writes++;
        break;
    case READ:
        wr.opcode = IBV_WR_RDMA_READ;
        wr.wr.rdma.remote_addr = q->peer.regions + (uint64_t)t->region * MAX_BYTES;
        p.key = region_key(!role, q->id, t->region, q->version[t->region]);
        p.number = q->version[t->region];
        memset(buf, PAINT, t->len);
        break;
    default:
        break;
    }
    if (t->kind != READ)
        content_make(buf, t->len, t->key, t->index);
    if (opt.corrupt && t->kind == SEND && t->len > 32 && t->index > 50) {
        buf[t->len / 2] ^= 0x10;
        opt.corrupt = 0;
    }
    q->sent_messages += consumes_receive(t->kind);
    q->data_posted++;
    post(q, &wr, p);
}

/* Tells the peer how far we are, so that it may go on. */
static void post_counters(struct qp *q)
{
    struct counters c = { q->in_messages, q->freed_writes };
    struct ibv_sge sge = { (uintptr_t)&c, sizeof c, 0 };
    struct ibv_send_wr wr = {
        .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_INLINE
    };
    struct posted p = { .kind = CREDIT,
                        .len = sizeof c,
                        .signalled = q->unsignalled + 1 >= UNSIGNALLED_RUN };

    if (q->tail - q->head >= SQ - 1)
        return;
    wr.wr.rdma.remote_addr = q->peer.counters;
    wr.wr.rdma.rkey = q->peer.rkey;
    q->told_messages = q->in_messages;
    q->told_writes = q->freed_writes;
    post(q, &wr, p);
}

static int finished_sending(struct qp *q)
{
    return opt.messages ? q->out.index >= opt.messages : stopping;
}

/* Posts what there is room for. */
static void push(struct qp *q)
{
    int burst;

    if (q->end_posted)
        return;
    look_at_counters(q);
    for (burst = 0; burst < 16; burst++) {
        if (!q->has_next) {
            if (finished_sending(q) || stopping)
                q->next = (struct step){ .kind = END,
                                         .index = q->out.index,
                                         .len = END_BYTES,
                                         .imm = END_IMM,
                                         .key = q->out.key };
            else
                q->next = stream_next(&q->out);
            q->has_next = 1;
        }
        if (!has_room(q, &q->next))
            return;
        post_step(q, &q->next);
        q->has_next = 0;
        if (q->next.kind == END) {
            q->end_posted = 1;
            return;
        }
    }
}

/* ---- completions of sends ---- */

static enum ibv_wc_opcode expected_opcode(enum kind k)
{
    return k == READ                                     ? IBV_WC_RDMA_READ
           : k == WRITE || k == WRITE_IMM || k == CREDIT ? IBV_WC_RDMA_WRITE
                                                         : IBV_WC_SEND;
}

static void sent(struct qp *q, const struct posted *p)
{
    const char *wrong;

    if (p->kind == READ) {
        wrong = content_part_wrong(q->mem->slots[p->slot], p->len, MAX_BYTES, p->key, p->number);
        if (wrong)
            fail("QP %d: a READ of %u bytes (WR %llu): %s (the number of a region is its version)",
                 q->id, p->len, (unsigned long long)(p->wr_id & 0xffffffffffff), wrong);
        verified_messages++;
        verified_bytes += p->len;
    }
    if (p->kind == END)
        q->end_done = 1;
    if (p->kind != CREDIT)
        q->data_done++;
}

static void first_error(int status)
{
    /* A flush says only that there was an error; a QP without outstanding sends has nothing else
     * to say. */
    if (!first_error_status || first_error_status == IBV_WC_WR_FLUSH_ERR)
        first_error_status = status;
    if (first_error_us)
        return;
    first_error_us = now_us();
    tcp_write(tcp, "E", 1);
}

/* An error with --no-replay: the first of a QP says why, all others are flushed; nothing is left
 * out and nothing is out of order. */
static void send_error(struct qp *q, const struct ibv_wc *wc)
{
    if (!opt.no_replay)
        fail("QP %d: a %s failed: %s", q->id, kind_name[q->fifo[q->head % SQ].kind],
             ibv_wc_status_str(wc->status));
    if (!q->send_failed && wc->status != IBV_WC_RETRY_EXC_ERR && wc->status != IBV_WC_FATAL_ERR &&
        wc->status != IBV_WC_REM_ABORT_ERR && wc->status != IBV_WC_RESP_TIMEOUT_ERR)
        fail("QP %d: the first error is '%s', not one of the network", q->id,
             ibv_wc_status_str(wc->status));
    if (q->send_failed && wc->status != IBV_WC_WR_FLUSH_ERR)
        fail("QP %d: '%s' behind the first error, a flush is right", q->id,
             ibv_wc_status_str(wc->status));
    q->send_failed = 1;
    first_error(wc->status);
    q->head++;
}

static void send_completion(const struct ibv_wc *wc)
{
    uint64_t id = wc->wr_id >> 48;
    struct qp *q = qps + id;
    const struct posted *p;

    if (id >= (uint64_t)opt.qps)
        fail("a completion of a WR that was never posted: wr_id %#llx",
             (unsigned long long)wc->wr_id);
    completions++;
    if (wc->qp_num != q->us.qpn)
        fail("QP %d: a completion carries QPN %#x, not %#x", q->id, wc->qp_num, q->us.qpn);
    for (;;) {
        if (q->head == q->tail)
            fail("QP %d: a completion of WR %llu, which is not outstanding: it came twice or from "
                 "nowhere",
                 q->id, (unsigned long long)(wc->wr_id & 0xffffffffffff));
        p = &q->fifo[q->head % SQ];
        if (p->wr_id == wc->wr_id)
            break;
        if (p->signalled)
            fail("QP %d: WR %llu completed (%s) before signalled WR %llu (%s)", q->id,
                 (unsigned long long)(wc->wr_id & 0xffffffffffff), ibv_wc_status_str(wc->status),
                 (unsigned long long)(p->wr_id & 0xffffffffffff), kind_name[p->kind]);
        if (q->send_failed)
            fail("QP %d: WR %llu has no completion although the QP failed", q->id,
                 (unsigned long long)(p->wr_id & 0xffffffffffff));
        sent(q, p);
        q->head++;
    }
    if (wc->status)
        return send_error(q, wc);
    if (q->send_failed)
        fail("QP %d: WR %llu succeeded behind a failed one", q->id,
             (unsigned long long)(wc->wr_id & 0xffffffffffff));
    if (!p->signalled)
        fail("QP %d: an unsignalled %s completed", q->id, kind_name[p->kind]);
    if (wc->opcode != expected_opcode(p->kind))
        fail("QP %d: a %s completed with opcode %d", q->id, kind_name[p->kind], wc->opcode);
    sent(q, p);
    q->head++;
}

#endif
