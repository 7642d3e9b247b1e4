/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A process with many RC QPs, each connected to itself, that do nothing.
 *
 *   many QPS
 *
 * Prints "ready" when all are in RTS, and stays until it is ended. Status 1 and a reason: something
 * was wrong.
 */
#include "common.h"
#include <infiniband/verbs.h>
#include <unistd.h>

enum { MAX_QPS = 20000 };

static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static void make(struct ibv_pd *pd, struct ibv_cq *cq, const union ibv_gid *gid)
{
    struct ibv_qp_init_attr init = {
        .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 }
    };
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);

    if (!qp)
        fail("no QP: %s", strerror(errno));
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
          "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = qp->qp_num, .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12 };
    a.ah_attr = (struct ibv_ah_attr){ .is_global = 1, .port_num = 1,
                                      .grh = { .dgid = *gid, .hop_limit = 64 } };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "to RTR");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
                              .rnr_retry = 7, .max_rd_atomic = 1 };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

int main(int count, char **args)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
    struct ibv_cq *cq = pd ? ibv_create_cq(context, 16, NULL, NULL, 0) : NULL;
    long qps = count == 2 ? strtol(args[1], NULL, 10) : 0;
    union ibv_gid gid;

    if (qps < 1 || qps > MAX_QPS)
        fail("usage: many QPS, which are %d at most", MAX_QPS);
    if (!cq || ibv_query_gid(context, 1, 0, &gid))
        fail("no device, protection domain, CQ or GID");
    for (long i = 0; i < qps; i++)
        make(pd, cq, &gid);
    printf("ready\n");
    fflush(stdout);
    for (;;)
        pause();
}
