/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an address handle says of the packet's header is in the header that the receiver gets:
 * traffic class and hop limit.
 *
 *   grh
 */
#include "pair.h"

enum { QKEY = 0x1234, GRH = 40 };

static struct pair p;

static struct ibv_qp *ud(struct ibv_cq *cq)
{
    struct ibv_qp_init_attr init = { .send_cq = cq,
                                     .recv_cq = cq,
                                     .qp_type = IBV_QPT_UD,
                                     .sq_sig_all = 1,
                                     .cap = { 8, 8, 1, 1, 0 } };
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
    struct ibv_qp *qp = ibv_create_qp(p.pd, &init);

    if (!qp)
        fail("ibv_create_qp: %s", strerror(errno));
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
          "to INIT");
    a.qp_state = IBV_QPS_RTR;
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE), "to RTR");
    a.qp_state = IBV_QPS_RTS;
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
    return qp;
}

static void arrives(struct ibv_cq *cq, uint8_t class, uint8_t hops)
{
    struct ibv_ah_attr attr = { .is_global = 1,
                                .port_num = 1,
                                .grh = { .dgid = p.gid,
                                         .sgid_index = p.sgid_index,
                                         .traffic_class = class,
                                         .hop_limit = hops } };
    struct ibv_sge sge = { (uintptr_t)p.memory + 1024, 64, p.mr->lkey };
    struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND },
                       *bad;
    struct ibv_ah *ah = ibv_create_ah(p.pd, &attr);
    uint64_t until = now_us() + 20 * 1000000;
    const uint8_t *ip4 = p.memory + 20, *ip6 = p.memory;
    uint8_t got_class, got_hops;
    struct ibv_wc wc;

    if (!ah)
        fail("ibv_create_ah: %s", strerror(errno));
    memset(p.memory, 0xee, GRH);
    check(post_recv(&p, p.to, 2, 512), "ibv_post_recv");
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = p.to->qp_num;
    wr.wr.ud.remote_qkey = QKEY;
    check(ibv_post_send(p.from, &wr, &bad), "ibv_post_send");
    for (int done = 0; done < 2; done += ibv_poll_cq(cq, 1, &wc)) {
        if (now_us() > until)
            fail("the datagram does not arrive");
    }
    if (ip4[0] == 0x45) {
        got_class = ip4[1];
        got_hops = ip4[8];
    } else {
        got_class = (uint8_t)(ip6[0] << 4 | ip6[1] >> 4);
        got_hops = ip6[7];
    }
    if (got_class != class || got_hops != hops)
        fail("class %u and %u hops, not %u and %u", got_class, got_hops, class, hops);
    check(ibv_destroy_ah(ah), "ibv_destroy_ah");
}

int main(void)
{
    struct ibv_cq *cq;

    open_first(&p, 1);
    p.sgid_index = test_gid_index();
    check(ibv_query_gid(p.context, 1, p.sgid_index, &p.gid), "ibv_query_gid");
    cq = ibv_create_cq(p.context, 32, NULL, NULL, 0);
    p.from = ud(cq);
    p.to = ud(cq);
    arrives(cq, 0, 64);
    arrives(cq, 0x68, 7);
    arrives(cq, 0, 255);
    arrives(cq, 32, 64);
    printf("the header is as the address handle says\n");
    return 0;
}
