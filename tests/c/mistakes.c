/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mistakes of a program that an RNIC answers with an error of its own: failover must not hide them,
 * nor take longer than the transport to tell.
 *
 *   mistakes psn-ahead | psn-behind | qpn    a WRITE over two QPs that do not fit fails after the
 *                                            transport's own retries
 *   mistakes qpn-other                       the same with a QP that is connected to another one
 *   mistakes psn-heard                       the same, though WRITEs of the peer have arrived
 *   mistakes psn-once                        the same without retries
 *   mistakes reads                           a READ with max_rd_atomic 0
 *   mistakes gid                             a peer that nobody is: to RTR, and an address handle
 *   mistakes length                          a message longer than max_msg_sz
 */
#include "pair.h"

enum { ERROR_WITHIN_US = 10 * 1000000, DEEP = 1 << 20 };

static struct pair p;
static int retry_cnt = 3, max_rd_atomic = 1;

static void connect_one(struct ibv_qp *qp, uint32_t dest_qpn, uint32_t sq_psn, union ibv_gid gid,
                        int error)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

    check(
        ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = dest_qpn,
                              .rq_psn = DEEP,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12 };
    a.ah_attr =
        (struct ibv_ah_attr){ .is_global = 1,
                              .port_num = 1,
                              .grh = { .dgid = gid, .sgid_index = p.sgid_index, .hop_limit = 64 } };
    errno = ibv_modify_qp(qp, &a,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                              IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (errno != error)
        fail("to RTR: %s, not %s", strerror(errno), strerror(error));
    if (error)
        return;
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS,
                              .timeout = 12,
                              .retry_cnt = retry_cnt,
                              .rnr_retry = 7,
                              .sq_psn = sq_psn,
                              .max_rd_atomic = max_rd_atomic };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

/* The one completion that comes. */
static void completes(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_status status)
{
    uint64_t since;
    struct ibv_wc wc;
    int n;

    for (since = now_us(); !(n = ibv_poll_cq(cq, 1, &wc));)
        if (now_us() - since > ERROR_WITHIN_US)
            fail("no completion within %d s", ERROR_WITHIN_US / 1000000);
    if (n != 1 || wc.wr_id != wr_id || wc.status != status)
        fail("it completes with %s", n == 1 ? ibv_wc_status_str(wc.status) : "no WC");
    printf("completes after %llu ms\n", (unsigned long long)(now_us() - since) / 1000);
}

static void does_not_fit(struct ibv_cq *cq, uint32_t dest_qpn, uint32_t sq_psn, int heard)
{
    connect_one(p.from, dest_qpn, sq_psn, p.gid, 0);
    connect_one(p.to, p.from->qp_num, DEEP, p.gid, 0);
    if (heard) {
        check(post_write(&p, p.to, 5, 64), "ibv_post_send of the peer");
        completes(cq, 5, IBV_WC_SUCCESS);
    }
    check(post_write(&p, p.from, 7, 64), "ibv_post_send");
    completes(cq, 7, IBV_WC_RETRY_EXC_ERR);
}

/* What it is sent it answers to another. */
static void is_of_another(struct ibv_cq *cq)
{
    struct ibv_qp *other = make_qp(&p, cq);

    connect_one(other, p.to->qp_num, DEEP, p.gid, 0);
    connect_one(p.to, other->qp_num, DEEP, p.gid, 0);
    connect_one(p.from, p.to->qp_num, DEEP + 5000, p.gid, 0);
    check(post_write(&p, p.from, 7, 64), "ibv_post_send");
    completes(cq, 7, IBV_WC_RETRY_EXC_ERR);
    check(post_write(&p, other, 8, 64), "ibv_post_send of the other");
    completes(cq, 8, IBV_WC_SUCCESS);
    check(ibv_destroy_qp(other), "ibv_destroy_qp");
}

static void reads(struct ibv_cq *cq)
{
    struct ibv_sge sge = { (uintptr_t)p.memory, 64, p.mr->lkey };
    struct ibv_send_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = 1,
                              .opcode = IBV_WR_RDMA_READ },
                       *bad;

    max_rd_atomic = 0;
    connect_one(p.from, p.to->qp_num, DEEP, p.gid, 0);
    connect_one(p.to, p.from->qp_num, DEEP, p.gid, 0);
    wr.wr.rdma.remote_addr = (uintptr_t)p.memory + PAIR_BYTES / 2;
    wr.wr.rdma.rkey = p.mr->rkey;
    check(ibv_post_send(p.from, &wr, &bad), "ibv_post_send");
    completes(cq, 7, IBV_WC_LOC_QP_OP_ERR);
}

static void gid(void)
{
    union ibv_gid nobody = p.gid;
    struct ibv_ah_attr ah = { .is_global = 1,
                              .port_num = 1,
                              .grh = { .sgid_index = p.sgid_index, .hop_limit = 64 } };

    nobody.raw[14] = 250; /* host number 250 */
    connect_one(p.from, p.to->qp_num, 0, nobody, ETIMEDOUT);
    ah.grh.dgid = nobody;
    errno = 0;
    if (ibv_create_ah(p.pd, &ah) || errno != ETIMEDOUT)
        fail("ibv_create_ah: %s, not ETIMEDOUT", strerror(errno));
    connect_one(p.to, p.from->qp_num, 0, p.gid, 0);
}

static void length(void)
{
    struct ibv_port_attr port;
    int error;

    connect_one(p.from, p.to->qp_num, DEEP, p.gid, 0);
    check(ibv_query_port(p.context, 1, &port), "ibv_query_port");
    error = post_write(&p, p.from, 1, port.max_msg_sz + 1);
    if (error != EINVAL)
        fail("a message of %u bytes: %s", port.max_msg_sz + 1, strerror(error));
    check(post_write(&p, p.from, 1, port.max_msg_sz), "one of max_msg_sz");
}

int main(int argc, char **argv)
{
    const char *what = argc == 2 ? argv[1] : "";
    struct ibv_cq *cq;

    p.sgid_index = getenv("TEST_GID_INDEX") ? atoi(getenv("TEST_GID_INDEX")) : 0;
    open_first(&p, 1);
    check(ibv_query_gid(p.context, 1, p.sgid_index, &p.gid), "ibv_query_gid");
    cq = ibv_create_cq(p.context, 64, NULL, NULL, 0);
    p.from = make_qp(&p, cq);
    p.to = make_qp(&p, cq);
    if (!strcmp(what, "psn-ahead"))
        does_not_fit(cq, p.to->qp_num, DEEP + 5000, 0);
    else if (!strcmp(what, "psn-behind"))
        does_not_fit(cq, p.to->qp_num, DEEP - 5000, 0);
    else if (!strcmp(what, "qpn"))
        does_not_fit(cq, p.to->qp_num ^ 0xff, DEEP, 0);
    else if (!strcmp(what, "qpn-other"))
        is_of_another(cq);
    else if (!strcmp(what, "psn-heard"))
        does_not_fit(cq, p.to->qp_num, DEEP + 5000, 1);
    else if (!strcmp(what, "psn-once"))
        does_not_fit(cq, p.to->qp_num, DEEP + 5000, retry_cnt = 0);
    else if (!strcmp(what, "reads"))
        reads(cq);
    else if (!strcmp(what, "gid"))
        gid();
    else if (!strcmp(what, "length"))
        length();
    else
        fail("usage: mistakes psn-ahead | psn-behind | psn-heard | psn-once | qpn | qpn-other | "
             "reads | gid | length");
    printf("done\n");
    return 0;
}
