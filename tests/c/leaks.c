/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes and destroys everything, many times, in one process: for a leak checker. Each round
 * connects two RC QPs of its own to each other, sends a message with each way of posting, leaves
 * completions, receives and events that nobody takes, and takes all down.
 *
 *   leaks ROUNDS [--leak]     --leak: loses a device list, which the checker must find
 */
#include "common.h"
#include <infiniband/verbs.h>

enum { SIZE = 4096, LIMIT_US = 60 * 1000000 };

static uint8_t memory[2 * SIZE];

static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static void *made(void *object, const char *what)
{
    if (!object)
        fail("%s: %s", what, strerror(errno));
    return object;
}

static void connect_qp(struct ibv_qp *qp, uint32_t peer, const union ibv_gid *gid)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

    check(
        ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 1 };
    a.ah_attr = (struct ibv_ah_attr){ .is_global = 1,
                                      .port_num = 1,
                                      .grh = { .dgid = *gid, .hop_limit = 64 } };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "to RTR");
    a = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1
    };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

static void send_one(struct ibv_qp *qp, struct ibv_cq *cq, uint32_t lkey, int flags)
{
    struct ibv_sge sge = { (uintptr_t)memory, 16, lkey };
    struct ibv_send_wr wr = { .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = IBV_WR_SEND,
                              .send_flags = IBV_SEND_SIGNALED | flags },
                       *bad;
    uint64_t until = now_us() + LIMIT_US;
    struct ibv_wc wc;

    check(ibv_post_send(qp, &wr, &bad), "post_send");
    for (;;) {
        int n = ibv_poll_cq(cq, 1, &wc);

        if (n == 1 && wc.status)
            fail("a send ends with '%s'", ibv_wc_status_str(wc.status));
        if (n == 1 && wc.opcode == IBV_WC_SEND)
            return;
        if (n < 0 || now_us() > until)
            fail("a send does not end");
    }
}

static void round_of(struct ibv_device *device)
{
    struct ibv_context *context = made(ibv_open_device(device), "ibv_open_device");
    struct ibv_pd *pd = made(ibv_alloc_pd(context), "ibv_alloc_pd");
    struct ibv_comp_channel *channel =
        made(ibv_create_comp_channel(context), "ibv_create_comp_channel");
    struct ibv_cq *cq = made(ibv_create_cq(context, 64, NULL, channel, 0), "ibv_create_cq");
    struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 16, .max_sge = 1 } };
    struct ibv_srq *srq = made(ibv_create_srq(pd, &srq_init), "ibv_create_srq");
    struct ibv_mr *mr = made(
        ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE),
        "ibv_reg_mr");
    struct ibv_qp_init_attr init = {
        .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 8, 8, 1, 1, 64 }
    };
    struct ibv_qp *a = made(ibv_create_qp(pd, &init), "ibv_create_qp"), *b, *ud;
    struct ibv_sge sge = { (uintptr_t)memory + SIZE, 64, mr->lkey };
    struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad;
    struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
    struct ibv_ah *ah;
    union ibv_gid gid;
    int i;

    check(ibv_query_gid(context, 1, 0, &gid), "ibv_query_gid");
    to.grh.dgid = gid;
    ah = made(ibv_create_ah(pd, &to), "ibv_create_ah");
    init.srq = srq;
    b = made(ibv_create_qp(pd, &init), "ibv_create_qp with an SRQ");
    init.srq = NULL;
    init.qp_type = IBV_QPT_UD;
    ud = made(ibv_create_qp(pd, &init), "ibv_create_qp UD");
    check(ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
    connect_qp(a, b->qp_num, &gid);
    connect_qp(b, a->qp_num, &gid);
    for (i = 0; i < 4; i++)
        check(ibv_post_srq_recv(srq, &recv, &bad), "ibv_post_srq_recv");
    check(ibv_post_recv(a, &recv, &bad), "ibv_post_recv");
    send_one(a, cq, mr->lkey, 0);
    send_one(a, cq, mr->lkey, IBV_SEND_INLINE);
    /* An event, receives and completions are left to be forgotten. */
    check(ibv_destroy_qp(ud), "ibv_destroy_qp");
    check(ibv_destroy_qp(a), "ibv_destroy_qp");
    check(ibv_destroy_qp(b), "ibv_destroy_qp");
    check(ibv_destroy_ah(ah), "ibv_destroy_ah");
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    check(ibv_destroy_srq(srq), "ibv_destroy_srq");
    check(ibv_destroy_cq(cq), "ibv_destroy_cq");
    check(ibv_destroy_comp_channel(channel), "ibv_destroy_comp_channel");
    check(ibv_dealloc_pd(pd), "ibv_dealloc_pd");
    check(ibv_close_device(context), "ibv_close_device");
}

/* Loses a device list, and with it every pointer to it. */
__attribute__((noinline)) static void lose_list(void)
{
    if (!ibv_get_device_list(NULL))
        fail("ibv_get_device_list");
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 100, i;

    for (i = 0; i < rounds; i++) {
        struct ibv_device **list = made(ibv_get_device_list(NULL), "ibv_get_device_list");

        round_of(list[i % 2 && list[1] ? 1 : 0]);
        ibv_free_device_list(list);
        if (argc > 2 && !strcmp(argv[2], "--leak"))
            lose_list();
    }
    printf("%d rounds\n", rounds);
    return 0;
}
