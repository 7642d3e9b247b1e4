/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Posting to a QP in any state: what is wrong in itself is refused, with the WR that it is, and
 * takes no part in the flushes, which come in order.
 *
 *   ended unconnected | connected
 */
#include "pair.h"

enum { SGES = 4, MOST_SGES = 64, OLD = 3, WRONG_OPCODE = 77 };

static struct pair p;
static struct ibv_sge sges[MOST_SGES];
static struct ibv_qp *qp;
/* One more than the QP has. */
static int wrong_sends, wrong_receives;

/* Three sends in a list, the second of them wrong: the first is posted, and the second named. */
static void post_three_sends(uint64_t first_id)
{
    struct ibv_send_wr wr[3], *bad = NULL;
    int error;

    for (int i = 0; i < 3; i++)
        wr[i] = (struct ibv_send_wr){ .wr_id = first_id + i,
                                      .next = i < 2 ? &wr[i + 1] : NULL,
                                      .sg_list = sges,
                                      .num_sge = i == 1 ? wrong_sends : 1,
                                      .opcode = IBV_WR_SEND,
                                      .send_flags = IBV_SEND_SIGNALED };
    error = ibv_post_send(qp, wr, &bad);
    if (error != EINVAL || bad != &wr[1])
        fail("the second of three sends has %d SGEs: %s, and bad_wr is the %s", wrong_sends,
             strerror(error), bad == &wr[0] ? "first" : bad == &wr[2] ? "third" : "second");
    wr[1].num_sge = 1;
    wr[1].opcode = (enum ibv_wr_opcode)WRONG_OPCODE;
    bad = NULL;
    error = ibv_post_send(qp, &wr[1], &bad);
    if (!error || bad != &wr[1])
        fail("opcode %d: %s", WRONG_OPCODE, strerror(error));
}

static void post_three_receives(uint64_t first_id)
{
    struct ibv_recv_wr wr[3], *bad = NULL;
    int error;

    for (int i = 0; i < 3; i++)
        wr[i] = (struct ibv_recv_wr){ .wr_id = first_id + i,
                                      .next = i < 2 ? &wr[i + 1] : NULL,
                                      .sg_list = sges,
                                      .num_sge = i == 1 ? wrong_receives : 1 };
    error = ibv_post_recv(qp, wr, &bad);
    if (error != EINVAL || bad != &wr[1])
        fail("the second of three receives has %d SGEs: %s", wrong_receives, strerror(error));
}

/* Work of before, all right; the peer has no receive for the sends. */
static void post_old(int sends)
{
    for (int i = 0; i < OLD; i++) {
        struct ibv_send_wr s = { .wr_id = i, .sg_list = sges, .num_sge = 1, .opcode = IBV_WR_SEND,
                                 .send_flags = IBV_SEND_SIGNALED },
                           *bad;
        struct ibv_recv_wr r = { .wr_id = i, .sg_list = sges, .num_sge = 1 }, *bad_receive;

        check(ibv_post_recv(qp, &r, &bad_receive), "ibv_post_recv");
        if (sends)
            check(ibv_post_send(qp, &s, &bad), "ibv_post_send");
    }
}

/* The flushes of a queue: these numbers in this order, and nothing else. */
static void flushes(struct ibv_cq *cq, const uint64_t *ids, int count, const char *queue)
{
    uint64_t until = now_us() + 20 * 1000000;
    struct ibv_wc wc;
    int got = 0;

    while (got < count) {
        if (!ibv_poll_cq(cq, 1, &wc)) {
            if (now_us() > until)
                fail("%d of %d %s were flushed", got, count, queue);
            continue;
        }
        if (wc.status != IBV_WC_WR_FLUSH_ERR || wc.wr_id != ids[got])
            fail("flush %d of the %s is WR %llu (%s), not %llu", got, queue,
                 (unsigned long long)wc.wr_id, ibv_wc_status_str(wc.status),
                 (unsigned long long)ids[got]);
        got++;
    }
    usleep(50000);
    if (ibv_poll_cq(cq, 1, &wc))
        fail("one more of the %s: WR %llu", queue, (unsigned long long)wc.wr_id);
}

int main(int argc, char **argv)
{
    int connected = argc == 2 && !strcmp(argv[1], "connected");
    struct ibv_qp_attr err = { .qp_state = IBV_QPS_ERR };
    struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
    struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC,
                                     .cap = { PAIR_DEPTH, PAIR_DEPTH, SGES, SGES, 0 } };
    uint64_t old_and_new[] = { 0, 1, 2, 10, 20 }, only_new[] = { 10, 20 };

    if (argc != 2 || (!connected && strcmp(argv[1], "unconnected")))
        fail("usage: ended unconnected | connected");
    open_first(&p, 1);
    p.sgid_index = test_gid_index();
    check(ibv_query_gid(p.context, 1, p.sgid_index, &p.gid), "ibv_query_gid");
    for (int i = 0; i < MOST_SGES; i++)
        sges[i] = (struct ibv_sge){ (uintptr_t)p.memory, 8, p.mr->lkey };
    attr.send_cq = ibv_create_cq(p.context, 256, NULL, NULL, 0);
    attr.recv_cq = ibv_create_cq(p.context, 256, NULL, NULL, 0);
    qp = ibv_create_qp(p.pd, &attr);
    if (!qp)
        fail("ibv_create_qp: %s", strerror(errno));
    wrong_sends = attr.cap.max_send_sge + 1;
    wrong_receives = attr.cap.max_recv_sge + 1;
    if (wrong_sends > MOST_SGES || wrong_receives > MOST_SGES)
        fail("a QP for %d SGEs has %d", SGES, wrong_sends - 1);
    if (connected) {
        p.to = make_qp(&p, attr.recv_cq);
        connect_qp(&p, qp, p.to, 1);
        connect_qp(&p, p.to, qp, 1);
    } else {
        check(ibv_modify_qp(qp, &init,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
              "to INIT");
    }
    post_old(connected);
    check(ibv_modify_qp(qp, &err, IBV_QP_STATE), "to ERR");
    post_three_sends(10);
    post_three_receives(10);
    post_three_sends(20);
    post_three_receives(20);
    flushes(attr.send_cq, connected ? old_and_new : only_new, connected ? 5 : 2, "sends");
    flushes(attr.recv_cq, old_and_new, 5, "receives");
    printf("refused, and flushed in order\n");
    return 0;
}
