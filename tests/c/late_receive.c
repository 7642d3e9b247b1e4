/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A receiver that posts its receive late: the sender's RNR retries wait for it, and what stands
 * behind the SEND is done once.
 *
 *   late_receive atomic | write | read MILLISECONDS
 */
#include "pair.h"

static struct pair p;
static struct {
    uint64_t from[8], to[8], word;
} data;

static void await(struct ibv_cq *cq, uint64_t wr_id)
{
    uint64_t until = now_us() + 20 * 1000000;
    struct ibv_wc wc;

    while (!ibv_poll_cq(cq, 1, &wc))
        if (now_us() > until)
            fail("WR %llu does not complete", (unsigned long long)wr_id);
    if (wc.status || wc.wr_id != wr_id)
        fail("WR %llu in place of %llu: %s", (unsigned long long)wc.wr_id,
             (unsigned long long)wr_id, ibv_wc_status_str(wc.status));
}

int main(int argc, char **argv)
{
    const char *what = argc == 3 ? argv[1] : "";
    uint64_t late_us = argc == 3 ? atoi(argv[2]) * 1000 : 0, until;
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                 IBV_ACCESS_REMOTE_ATOMIC;
    struct ibv_qp_attr rights = { .qp_access_flags = access };
    struct ibv_cq *sends, *receives;
    struct ibv_send_wr send = { .wr_id = 1, .num_sge = 1, .opcode = IBV_WR_SEND };
    struct ibv_send_wr behind = { .wr_id = 2, .num_sge = 1 }, *bad;
    struct ibv_recv_wr receive = { .wr_id = 3, .num_sge = 1 }, *bad_receive;
    struct ibv_sge sge[3];
    struct ibv_mr *mr;
    struct ibv_wc wc;

    open_first(&p, 1);
    p.sgid_index = test_gid_index();
    check(ibv_query_gid(p.context, 1, p.sgid_index, &p.gid), "ibv_query_gid");
    mr = ibv_reg_mr(p.pd, &data, sizeof data, access);
    sends = ibv_create_cq(p.context, 64, NULL, NULL, 0);
    receives = ibv_create_cq(p.context, 64, NULL, NULL, 0);
    if (!mr || !sends || !receives)
        fail("cannot make memory or CQs: %s", strerror(errno));
    p.from = make_qp(&p, sends);
    p.to = make_qp(&p, receives);
    connect_qp(&p, p.from, p.to, 1);
    connect_qp(&p, p.to, p.from, 1);
    check(ibv_modify_qp(p.to, &rights, IBV_QP_ACCESS_FLAGS), "rights for atomics");

    data.from[0] = 0x1234;
    sge[0] = (struct ibv_sge){ (uintptr_t)data.from, 8, mr->lkey };
    sge[1] = (struct ibv_sge){ (uintptr_t)&data.from[1], 8, mr->lkey };
    sge[2] = (struct ibv_sge){ (uintptr_t)data.to, 64, mr->lkey };
    send.sg_list = &sge[0];
    behind.sg_list = &sge[1];
    receive.sg_list = &sge[2];
    send.next = &behind;
    behind.wr.rdma.remote_addr = (uintptr_t)&data.word;
    behind.wr.rdma.rkey = mr->rkey;
    if (!strcmp(what, "atomic")) {
        behind.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        behind.wr.atomic.remote_addr = (uintptr_t)&data.word;
        behind.wr.atomic.rkey = mr->rkey;
        behind.wr.atomic.compare_add = 1;
    } else if (!strcmp(what, "write")) {
        behind.opcode = IBV_WR_RDMA_WRITE;
        data.from[1] = 1;
    } else if (!strcmp(what, "read")) {
        behind.opcode = IBV_WR_RDMA_READ;
    } else {
        fail("usage: late_receive atomic | write | read MILLISECONDS");
    }
    check(ibv_post_send(p.from, &send, &bad), "ibv_post_send");
    for (until = now_us() + late_us; now_us() < until; usleep(1000))
        if (ibv_poll_cq(sends, 1, &wc))
            fail("before the receive is posted WR %llu completes: %s",
                 (unsigned long long)wc.wr_id, ibv_wc_status_str(wc.status));
    check(ibv_post_recv(p.to, &receive, &bad_receive), "ibv_post_recv");
    await(receives, 3);
    await(sends, 1);
    await(sends, 2);
    if (data.to[0] != 0x1234 || data.word != (behind.opcode != IBV_WR_RDMA_READ))
        fail("received %llx, and the word is %llu", (unsigned long long)data.to[0],
             (unsigned long long)data.word);
    printf("done once\n");
    return 0;
}
