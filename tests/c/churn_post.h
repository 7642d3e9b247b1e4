/* SPDX-License-Identifier: Apache-2.0 */
/* Work requests and completions of the churn, through either of the two interfaces that
 * libibverbs has for each. */
#ifndef UNBROKEN_TESTS_CHURN_POST_H
#define UNBROKEN_TESTS_CHURN_POST_H

#include "churn_round.h"

/* Puts one request into the batch that is being built. */
static void build_ex(struct ibv_qp_ex *q, const struct ibv_send_wr *wr, int ud)
{
    struct ibv_data_buf parts[2];
    int i;

    q->wr_id = wr->wr_id;
    q->wr_flags = wr->send_flags & ~IBV_SEND_INLINE;
    switch (wr->opcode) {
    case IBV_WR_SEND: ibv_wr_send(q); break;
    case IBV_WR_SEND_WITH_IMM: ibv_wr_send_imm(q, wr->imm_data); break;
    case IBV_WR_RDMA_WRITE: ibv_wr_rdma_write(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr); break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        ibv_wr_rdma_write_imm(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr, wr->imm_data);
        break;
    case IBV_WR_RDMA_READ: ibv_wr_rdma_read(q, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr); break;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        ibv_wr_atomic_fetch_add(q, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr,
                                wr->wr.atomic.compare_add);
        break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        ibv_wr_atomic_cmp_swp(q, wr->wr.atomic.rkey, wr->wr.atomic.remote_addr,
                              wr->wr.atomic.compare_add, wr->wr.atomic.swap);
        break;
    case IBV_WR_SEND_WITH_INV: ibv_wr_send_inv(q, wr->invalidate_rkey); break;
    case IBV_WR_LOCAL_INV: ibv_wr_local_inv(q, wr->invalidate_rkey); return;
    case IBV_WR_BIND_MW:
        ibv_wr_bind_mw(q, wr->bind_mw.mw, wr->bind_mw.rkey, &wr->bind_mw.bind_info);
        return;
    default: fail("opcode %d is not known here", wr->opcode);
    }
    if (ud)
        ibv_wr_set_ud_addr(q, wr->wr.ud.ah, wr->wr.ud.remote_qpn, wr->wr.ud.remote_qkey);
    for (i = 0; i < wr->num_sge; i++)
        parts[i] =
            (struct ibv_data_buf){ (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length };
    if (wr->send_flags & IBV_SEND_INLINE && wr->num_sge == 1)
        ibv_wr_set_inline_data(q, parts[0].addr, parts[0].length);
    else if (wr->send_flags & IBV_SEND_INLINE)
        ibv_wr_set_inline_data_list(q, wr->num_sge, parts);
    else if (wr->num_sge == 1)
        ibv_wr_set_sge(q, wr->sg_list->lkey, wr->sg_list->addr, wr->sg_list->length);
    else
        ibv_wr_set_sge_list(q, wr->num_sge, wr->sg_list);
}

/* ibv_post_send, or the same by builders, where nothing is posted if anything is wrong. */
static int post(struct round *r, struct conn *c, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct ibv_qp_ex *q = c->extended;
    struct ibv_send_wr *w;
    int e;

    if (!q || roll(r) % 4 == 0)
        return ibv_post_send(c->qp, wr, bad);
    if (roll(r) % 8 == 0) {
        ibv_wr_start(q);
        build_ex(q, wr, r->plan.type == IBV_QPT_UD);
        ibv_wr_abort(q);
        counts[C_wr_abort]++;
    }
    ibv_wr_start(q);
    for (w = wr; w; w = w->next)
        build_ex(q, w, r->plan.type == IBV_QPT_UD);
    e = ibv_wr_complete(q);
    if (e)
        *bad = wr;
    counts[C_wr_builders] += !e;
    return e;
}

/* The completion at hand. */
static struct ibv_wc read_ex(struct ibv_cq_ex *q)
{
    struct ibv_wc wc = { .wr_id = q->wr_id,
                         .status = q->status,
                         .qp_num = ibv_wc_read_qp_num(q),
                         .vendor_err = ibv_wc_read_vendor_err(q) };

    if (wc.status != IBV_WC_SUCCESS)
        return wc;
    wc.opcode = ibv_wc_read_opcode(q);
    wc.byte_len = ibv_wc_read_byte_len(q);
    wc.wc_flags = ibv_wc_read_wc_flags(q);
    wc.imm_data =
        wc.wc_flags & IBV_WC_WITH_INV ? ibv_wc_read_invalidated_rkey(q) : ibv_wc_read_imm_data(q);
    wc.src_qp = ibv_wc_read_src_qp(q);
    wc.slid = ibv_wc_read_slid(q);
    wc.sl = ibv_wc_read_sl(q);
    wc.dlid_path_bits = ibv_wc_read_dlid_path_bits(q);
    return wc;
}

/* ibv_poll_cq, or the same one by one. */
static int poll_some(struct round *r, struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
    struct ibv_cq_ex *q = (struct ibv_cq_ex *)cq;
    struct ibv_poll_cq_attr attr = { 0 };
    int n = 0, e;

    if (!r->extended_cqs)
        return ibv_poll_cq(cq, most, wc);
    for (e = ibv_start_poll(q, &attr); !e; e = ibv_next_poll(q)) {
        wc[n++] = read_ex(q);
        if (n == most)
            break;
    }
    if (n) {
        ibv_end_poll(q);
        counts[C_polls_ex]++;
    }
    return e && e != ENOENT ? -e : n;
}

#endif
