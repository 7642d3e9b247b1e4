/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A QP that is connected to itself and READs from its own memory, as NCCL makes one to flush what a
 * peer has written.
 *
 *   flush BUSY_MS IDLE_FILE
 *
 * READs a number that changes each time, one READ at a time, for BUSY_MS. Then it does nothing,
 * neither posts nor polls, until there is a file IDLE_FILE, and READs for BUSY_MS again. It prints
 * "idle" when it stops and ends with the number of READs and the longest one. Status 1 and a
 * reason: something was wrong.
 */
#include "common.h"
#include <infiniband/verbs.h>
#include <sys/stat.h>

enum { LIMIT_US = 20 * 1000000, LOOK_US = 1000, DEPTH = 4 };

static struct memory {
    volatile uint64_t source, copy;
} m;

static struct ibv_qp *qp;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint64_t reads, longest_us;

static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static void set_up(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1,
                                     .cap = { DEPTH, DEPTH, 1, 1, 0 } };
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_READ };
    union ibv_gid gid;

    if (!pd || ibv_query_gid(context, 1, 0, &gid))
        fail("no device, protection domain or GID");
    cq = init.send_cq = init.recv_cq = ibv_create_cq(context, DEPTH, NULL, NULL, 0);
    mr = ibv_reg_mr(pd, &m, sizeof m, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
    qp = cq ? ibv_create_qp(pd, &init) : NULL;
    if (!mr || !qp)
        fail("no region or QP: %s", strerror(errno));
    check(
        ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = qp->qp_num,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12 };
    a.ah_attr = (struct ibv_ah_attr){ .is_global = 1,
                                      .port_num = 1,
                                      .grh = { .dgid = gid, .hop_limit = 64 } };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "to RTR");
    a = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1
    };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

static void read_one(void)
{
    struct ibv_sge sge = { (uintptr_t)&m.copy, sizeof m.copy, mr->lkey };
    struct ibv_send_wr wr = { .wr_id = ++reads,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = IBV_WR_RDMA_READ },
                       *bad;
    uint64_t began_us = now_us(), took_us;
    struct ibv_wc wc;
    int n;

    wr.wr.rdma.remote_addr = (uintptr_t)&m.source;
    wr.wr.rdma.rkey = mr->rkey;
    m.source = reads * 0x9e3779b97f4a7c15;
    check(ibv_post_send(qp, &wr, &bad), "post");
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        if (now_us() - began_us > LIMIT_US)
            fail("READ %llu is not complete after %d s", (unsigned long long)reads,
                 LIMIT_US / 1000000);
    if (n < 0 || wc.status || wc.wr_id != reads)
        fail("READ %llu: %s", (unsigned long long)reads,
             n < 0 ? "the CQ failed" : ibv_wc_status_str(wc.status));
    if (m.copy != m.source)
        fail("READ %llu has not read what is there", (unsigned long long)reads);
    took_us = now_us() - began_us;
    if (took_us > longest_us)
        longest_us = took_us;
}

static void read_for(uint64_t us)
{
    for (uint64_t until = now_us() + us; now_us() < until;)
        read_one();
}

int main(int count, char **args)
{
    struct stat there;

    if (count != 3)
        fail("usage: flush BUSY_MS IDLE_FILE");
    set_up();
    printf("reading\n");
    fflush(stdout);
    read_for(strtoull(args[1], NULL, 10) * 1000);
    printf("idle\n");
    fflush(stdout);
    for (uint64_t until = now_us() + LIMIT_US; stat(args[2], &there); usleep(LOOK_US))
        if (now_us() > until)
            fail("no file %s after %d s", args[2], LIMIT_US / 1000000);
    read_for(strtoull(args[1], NULL, 10) * 1000);
    printf("{\"reads\":%llu,\"longest_us\":%llu}\n", (unsigned long long)reads,
           (unsigned long long)longest_us);
    return 0;
}
