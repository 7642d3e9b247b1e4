/* SPDX-License-Identifier: Apache-2.0 */
/* Two RC QPs of the first device, both in this process and connected to each other, with one
 * region for both. */
#ifndef UNBROKEN_TESTS_PAIR_H
#define UNBROKEN_TESTS_PAIR_H

#include "common.h"
#include <infiniband/verbs.h>

enum { PAIR_BYTES = 4096, PAIR_DEPTH = 64 };

struct pair {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    /* Of both ends, and its index. */
    union ibv_gid gid;
    uint8_t sgid_index;
    struct ibv_qp *from, *to;
    uint8_t memory[PAIR_BYTES];
};

/* Stops unless `error` is 0: a verb's errno, or -1 with errno. */
static inline void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static inline void open_first(struct pair *p, uint8_t port)
{
    struct ibv_device **list = ibv_get_device_list(NULL);

    p->context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    p->pd = p->context ? ibv_alloc_pd(p->context) : NULL;
    if (!p->pd || ibv_query_gid(p->context, port, 0, &p->gid))
        fail("no device, protection domain or GID");
    p->mr = ibv_reg_mr(p->pd, p->memory, sizeof p->memory,
                       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    if (!p->mr)
        fail("cannot register memory: %s", strerror(errno));
}

static inline struct ibv_qp *make_qp(struct pair *p, struct ibv_cq *cq)
{
    struct ibv_qp_init_attr init = { .send_cq = cq,
                                     .recv_cq = cq,
                                     .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1,
                                     .cap = { PAIR_DEPTH, PAIR_DEPTH, 1, 1, 0 } };
    struct ibv_qp *qp = cq ? ibv_create_qp(p->pd, &init) : NULL;

    if (!qp)
        fail("cannot make a QP: %s", strerror(errno));
    return qp;
}

static inline void connect_qp(struct pair *p, struct ibv_qp *qp, const struct ibv_qp *peer,
                              uint8_t port)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = port,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

    check(
        ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer->qp_num,
                              .max_dest_rd_atomic = 4,
                              .min_rnr_timer = 12 };
    a.ah_attr = (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = port,
        .grh = { .dgid = p->gid, .sgid_index = p->sgid_index, .hop_limit = 64 }
    };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "to RTR");
    a = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4
    };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

/* A WRITE of `bytes` from the first half of the memory to the second; gives the verb's answer. */
static inline int post_write(struct pair *p, struct ibv_qp *qp, uint64_t wr_id, uint32_t bytes)
{
    struct ibv_sge sge = { (uintptr_t)p->memory, bytes, p->mr->lkey };
    struct ibv_send_wr wr = { .wr_id = wr_id,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = IBV_WR_RDMA_WRITE },
                       *bad;

    wr.wr.rdma.remote_addr = (uintptr_t)p->memory + PAIR_BYTES / 2;
    wr.wr.rdma.rkey = p->mr->rkey;
    return ibv_post_send(qp, &wr, &bad);
}

static inline int post_recv(struct pair *p, struct ibv_qp *qp, uint64_t wr_id, uint32_t bytes)
{
    struct ibv_sge sge = { (uintptr_t)p->memory, bytes, p->mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad;

    return ibv_post_recv(qp, &wr, &bad);
}

#endif
