/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A program that makes errors of its own all the time: messages longer than their receives, READs
 * that the peer does not allow. They are told to it, as a NIC tells them, and nothing else comes of
 * them. Another pair of QPs works beside them all the time.
 *
 *   own_errors SECONDS
 */
#include "pair.h"

enum { PAUSE_US = 4000, LONG = 512, SHORT = 64 };

static struct pair p;

static struct ibv_wc next(struct ibv_cq *cq, const char *what)
{
    uint64_t until = now_us() + 20 * 1000000;
    struct ibv_wc wc;

    while (!ibv_poll_cq(cq, 1, &wc))
        if (now_us() > until)
            fail("%s: no completion", what);
    return wc;
}

static void wants(struct ibv_wc wc, enum ibv_wc_status status, const char *what)
{
    if (wc.status != status)
        fail("%s: %s, not %s", what, ibv_wc_status_str(wc.status), ibv_wc_status_str(status));
}

/* A pair whose only message is an error. */
static void err_once(struct ibv_cq *sends, struct ibv_cq *receives, int too_long)
{
    struct ibv_qp_attr no_reads = { .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
    struct ibv_sge sge = { (uintptr_t)p.memory, LONG, p.mr->lkey };
    struct ibv_send_wr wr = { .wr_id = 1,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = too_long ? IBV_WR_SEND : IBV_WR_RDMA_READ },
                       *bad;
    struct ibv_qp *from = make_qp(&p, sends), *to = make_qp(&p, receives);

    connect_qp(&p, from, to, 1);
    connect_qp(&p, to, from, 1);
    wr.wr.rdma.remote_addr = (uintptr_t)p.memory + PAIR_BYTES / 2;
    wr.wr.rdma.rkey = p.mr->rkey;
    if (too_long)
        check(post_recv(&p, to, 2, SHORT), "ibv_post_recv");
    else
        check(ibv_modify_qp(to, &no_reads, IBV_QP_ACCESS_FLAGS), "rights without READs");
    check(ibv_post_send(from, &wr, &bad), "ibv_post_send");
    wants(next(sends, "the sender"), too_long ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_ACCESS_ERR,
          "the sender");
    if (too_long)
        wants(next(receives, "the receiver"), IBV_WC_LOC_LEN_ERR, "the receiver");
    check(ibv_destroy_qp(from), "ibv_destroy_qp");
    check(ibv_destroy_qp(to), "ibv_destroy_qp");
}

int main(int argc, char **argv)
{
    uint64_t until = now_us() + (argc == 2 ? atoi(argv[1]) : 1) * 1000000ull;
    struct ibv_cq *sends, *receives, *good;
    int errors = 0;

    open_first(&p, 1);
    p.sgid_index = test_gid_index();
    check(ibv_query_gid(p.context, 1, p.sgid_index, &p.gid), "ibv_query_gid");
    sends = ibv_create_cq(p.context, 64, NULL, NULL, 0);
    receives = ibv_create_cq(p.context, 64, NULL, NULL, 0);
    good = ibv_create_cq(p.context, 64, NULL, NULL, 0);
    p.from = make_qp(&p, good);
    p.to = make_qp(&p, good);
    connect_qp(&p, p.from, p.to, 1);
    connect_qp(&p, p.to, p.from, 1);
    while (now_us() < until) {
        check(post_write(&p, p.from, 7, 64), "ibv_post_send");
        wants(next(good, "the good pair"), IBV_WC_SUCCESS, "the good pair");
        err_once(sends, receives, errors % 2);
        errors++;
        usleep(PAUSE_US);
    }
    printf("%d errors\n", errors);
    fflush(stdout);
    pause(); /* the suite looks at what is left of it */
    return 0;
}
