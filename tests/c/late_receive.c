/* SPDX-License-Identifier: Apache-2.0 */
/* A message that waits for a receive, and an atomic behind it that must not run twice.
 *
 * late_receive SECONDS   the receive is posted so long after the message */
#include "pair.h"

static void done(struct ibv_cq *cq, const char *what)
{
    struct ibv_wc wc;
    uint64_t until = now_us() + 20 * 1000000;
    int n;

    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        if (now_us() > until)
            fail("%s does not complete", what);
    if (n < 0 || wc.status)
        fail("%s: %s", what, n < 0 ? "the CQ cannot be polled" : ibv_wc_status_str(wc.status));
}

int main(int argc, char **argv)
{
    static struct pair p;
    struct ibv_cq *sends, *recvs;
    struct ibv_sge sge;
    struct ibv_send_wr add, send, *bad;
    uint64_t *counter, *old;
    uint64_t until;
    struct ibv_wc wc;

    if (argc != 2)
        fail("give SECONDS");
    open_first(&p, 1);
    p.sgid_index = test_gid_index();
    check(ibv_query_gid(p.context, 1, p.sgid_index, &p.gid), "its GID");
    sends = ibv_create_cq(p.context, PAIR_DEPTH, NULL, NULL, 0);
    recvs = ibv_create_cq(p.context, PAIR_DEPTH, NULL, NULL, 0);
    if (!sends || !recvs)
        fail("no CQs");
    p.from = make_qp(&p, sends);
    p.to = make_qp(&p, recvs);
    connect_qp(&p, p.to, p.from, 1);
    connect_qp(&p, p.from, p.to, 1);
    counter = (uint64_t *)(((uintptr_t)p.memory + 1031) & ~(uintptr_t)7);
    old = counter + 1;
    *counter = 41;

    /* Something has come through before: nothing is new here but the wait. */
    check(post_recv(&p, p.to, 1, 64), "a receive");
    sge = (struct ibv_sge){ (uintptr_t)p.memory, 64, p.mr->lkey };
    send = (struct ibv_send_wr){
        .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND
    };
    check(ibv_post_send(p.from, &send, &bad), "a SEND");
    done(sends, "a SEND");
    done(recvs, "a receive");

    send.wr_id = 2;
    check(ibv_post_send(p.from, &send, &bad), "a SEND");
    sge = (struct ibv_sge){ (uintptr_t)old, 8, p.mr->lkey };
    add = (struct ibv_send_wr){
        .wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD
    };
    add.wr.atomic.remote_addr = (uintptr_t)counter;
    add.wr.atomic.rkey = p.mr->rkey;
    add.wr.atomic.compare_add = 1;
    check(ibv_post_send(p.from, &add, &bad), "an atomic");
    for (until = now_us() + 1000000 * atoll(argv[1]); now_us() < until;) {
        if (ibv_poll_cq(sends, 1, &wc))
            fail("a send is complete that waits: %s", ibv_wc_status_str(wc.status));
        usleep(1000);
    }
    check(post_recv(&p, p.to, 2, 64), "a receive");
    done(sends, "the SEND");
    done(sends, "the atomic");
    done(recvs, "the receive");
    if (*counter != 42 || *old != 41)
        fail("the counter is %llu and was %llu", (unsigned long long)*counter,
             (unsigned long long)*old);
    return 0;
}
