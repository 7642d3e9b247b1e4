/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions that are registered anew and completion queues that change their size, between and during
 * the transfers of two ends whose NICs may die at any time.
 *
 *   remap listen PORT SECONDS
 *   remap connect HOST:PORT
 *
 * Both ends do the same, round by round: offer a region; WRITE into the region of the peer and READ
 * from it; say so by a SEND behind them (with a fence, so that the READ is done too). Who receives
 * that SEND owns its region again, at once, whatever has become of the acknowledgements: it checks
 * the data, moves the region to other memory with ibv_rereg_mr, and marks the memory that it has
 * left. A request that is sent again, through another NIC, must neither touch that memory nor fail.
 * Meanwhile the completion queue, with completions in it, gets another size again and again; they
 * must come complete and in order.
 *
 * Prints a line of JSON with what was done. Status 1 and a reason: something was wrong.
 */
#include "common.h"
#include <infiniband/verbs.h>

enum { WRITES = 16, BYTES = 12000, DEPTH = 64, LIMIT_US = 40 * 1000000, MARK = 0xa5 };
enum { SENDS_OF_A_ROUND = WRITES + 3 };
static const int CQ_SIZES[] = { 64, 100, 255, 1000 };

/* What a region may lie over; it is on one of two in turns. */
struct area {
    uint8_t written[WRITES][BYTES], read[BYTES];
};

struct message {
    uint64_t round, addr;
    uint32_t rkey, last;
};

static struct area areas[2];
static struct own {
    uint8_t source[WRITES][BYTES], answer[BYTES];
    struct message out[2], in[4];
} own;

static struct ibv_pd *pd, *other_pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *open_mr, *own_mr;
static uint64_t sends_done, recvs_done, sends_posted, recvs_posted, reregs, resizes;

static uint64_t key_of(int end, uint64_t round, int i)
{
    return mix(round * 64 + i) ^ (uint64_t)end;
}

static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static void move_to(struct area *area, int access)
{
    check(ibv_rereg_mr(open_mr, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, NULL,
                       area, sizeof *area, access),
          "rereg_mr");
    reregs++;
}

static void move_to_domain(struct ibv_pd *to)
{
    check(ibv_rereg_mr(open_mr, IBV_REREG_MR_CHANGE_PD, to, NULL, 0, 0),
          "rereg_mr to another domain");
    reregs++;
}

static void set_up(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1,
                                     .cap = { DEPTH, DEPTH, 1, 1, 0 } };

    pd = context ? ibv_alloc_pd(context) : NULL;
    other_pd = pd ? ibv_alloc_pd(context) : NULL;
    cq = init.send_cq = init.recv_cq =
        other_pd ? ibv_create_cq(context, CQ_SIZES[0], NULL, NULL, 0) : NULL;
    qp = cq ? ibv_create_qp(pd, &init) : NULL;
    open_mr = qp ? ibv_reg_mr(pd, areas, sizeof areas[0], IBV_ACCESS_LOCAL_WRITE) : NULL;
    own_mr = open_mr ? ibv_reg_mr(pd, &own, sizeof own, IBV_ACCESS_LOCAL_WRITE) : NULL;
    if (!own_mr)
        fail("cannot make a device's objects: %s", strerror(errno));
}

static void connect_qp(int tcp)
{
    struct { union ibv_gid gid; uint32_t qpn; } mine = { .qpn = qp->qp_num }, peers;
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

    check(ibv_query_gid(qp->context, 1, test_gid_index(), &mine.gid), "query_gid");
    tcp_write(tcp, &mine, sizeof mine);
    tcp_read(tcp, &peers, sizeof peers);
    check(
        ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peers.qpn,
                              .max_dest_rd_atomic = 4,
                              .min_rnr_timer = 12 };
    a.ah_attr = (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = 1,
        .grh = { .dgid = peers.gid, .sgid_index = test_gid_index(), .hop_limit = 64 }
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

static void receive(void)
{
    struct ibv_sge sge = { (uintptr_t)&own.in[recvs_posted % 4], sizeof own.in[0], own_mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = recvs_posted++, .sg_list = &sge, .num_sge = 1 }, *bad;

    check(ibv_post_recv(qp, &wr, &bad), "post_recv");
}

static void post(enum ibv_wr_opcode opcode, unsigned flags, void *local, uint32_t len,
                 uint64_t addr, uint32_t rkey)
{
    struct ibv_sge sge = { (uintptr_t)local, len, own_mr->lkey };
    struct ibv_send_wr wr = { .wr_id = sends_posted++,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = opcode,
                              .send_flags = flags,
                              .wr.rdma = { addr, rkey } },
                       *bad;

    check(ibv_post_send(qp, &wr, &bad), "post_send");
}

/* Another size for the queue, whatever waits in it: it always holds what can be outstanding. */
static void resize(void)
{
    int entries = CQ_SIZES[mix(resizes) % (sizeof CQ_SIZES / sizeof *CQ_SIZES)];

    check(ibv_resize_cq(cq, entries), "resize_cq");
    if (cq->cqe < entries)
        fail("a queue for %d completions has %d entries", entries, cq->cqe);
    resizes++;
}

/* Polls until so many sends and receives have completed since the beginning, each in order. */
static void complete(uint64_t sends, uint64_t recvs, const char *what)
{
    uint64_t until = now_us() + LIMIT_US;
    struct ibv_wc wc[4];
    int i, n;

    while (sends_done < sends || recvs_done < recvs) {
        resize();
        n = ibv_poll_cq(cq, 1 + mix(resizes) % 4, wc);
        if (n < 0 || now_us() > until)
            fail("%s: %llu of %llu sends and %llu of %llu receives are complete", what,
                 (unsigned long long)sends_done, (unsigned long long)sends,
                 (unsigned long long)recvs_done, (unsigned long long)recvs);
        for (i = 0; i < n; i++) {
            uint64_t *done = wc[i].opcode & IBV_WC_RECV ? &recvs_done : &sends_done;

            if (wc[i].status || wc[i].wr_id != *done)
                fail("%s: completion of WR %llu in place of %llu: %s", what,
                     (unsigned long long)wc[i].wr_id, (unsigned long long)*done,
                     ibv_wc_status_str(wc[i].status));
            ++*done;
        }
    }
}

/* The message that receive `n` has brought. */
static struct message *received(uint64_t n, uint64_t round, const char *what)
{
    struct message *m = &own.in[n % 4];

    if (m->round != round)
        fail("%s: it is of round %llu, not %llu", what, (unsigned long long)m->round,
             (unsigned long long)round);
    return m;
}

static void expect(const char *wrong, const char *what, uint64_t round, int i)
{
    if (wrong)
        fail("round %llu, %s %d: %s", (unsigned long long)round, what, i, wrong);
}

/* A round; whether it was the last. */
static int play(int end, uint64_t round, int last)
{
    const int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    struct area *here = &areas[round % 2], *left = &areas[1 - round % 2];
    uint64_t sends = sends_posted + SENDS_OF_A_ROUND;
    struct message *offer;
    size_t k;
    int i;

    content_make(here->read, BYTES, key_of(end, round, WRITES), round);
    if (round % 3 == 0) {
        move_to_domain(other_pd);
        move_to_domain(pd);
    }
    move_to(here, rights);
    receive();
    receive();
    own.out[0] = (struct message){ round, (uintptr_t)here, open_mr->rkey, last };
    post(IBV_WR_SEND, 0, &own.out[0], sizeof own.out[0], 0, 0);
    complete(0, 2 * round + 1, "the peer's offer");
    offer = received(2 * round, round, "the peer's offer");
    last |= offer->last;
    for (i = 0; i < WRITES; i++) {
        content_make(own.source[i], BYTES, key_of(end, round, i), round);
        post(IBV_WR_RDMA_WRITE, 0, own.source[i], BYTES,
             offer->addr + offsetof(struct area, written[i]), offer->rkey);
    }
    post(IBV_WR_RDMA_READ, 0, own.answer, BYTES, offer->addr + offsetof(struct area, read),
         offer->rkey);
    own.out[1] = (struct message){ .round = round };
    post(IBV_WR_SEND, IBV_SEND_FENCE, &own.out[1], sizeof own.out[1], 0, 0);

    complete(0, 2 * round + 2, "the peer's transfers");
    received(2 * round + 1, round, "the peer's word that it is done");
    for (i = 0; i < WRITES; i++)
        expect(content_wrong(here->written[i], BYTES, key_of(!end, round, i), round), "WRITE",
               round, i);
    /* What was left a round ago must be as it was left. */
    for (k = 0; round && k < sizeof *left; k++)
        if (((uint8_t *)left)[k] != MARK)
            fail("round %llu: byte %zu of memory that the region has left was changed",
                 (unsigned long long)round, k);
    move_to(left, IBV_ACCESS_LOCAL_WRITE);
    memset(here, MARK, sizeof *here);
    complete(sends, 0, "the round's sends");
    expect(content_wrong(own.answer, BYTES, key_of(!end, round, WRITES), round), "READ", round, 0);
    return last;
}

int main(int argc, char **argv)
{
    int listens = argc == 4 && !strcmp(argv[1], "listen");
    uint64_t until = 0, round;
    char byte = 0;
    int tcp;

    if (!listens && !(argc == 3 && !strcmp(argv[1], "connect")))
        fail("usage: remap listen PORT SECONDS | remap connect HOST:PORT");
    tcp = listens ? tcp_listen(argv[2]) : tcp_connect(argv[2]);
    set_up();
    connect_qp(tcp);
    tcp_write(tcp, &byte, 1);
    tcp_read(tcp, &byte, 1);
    printf("running\n");
    fflush(stdout);
    if (listens)
        until = now_us() + atoi(argv[3]) * 1000000ULL;
    for (round = 0; !play(listens, round, listens && now_us() > until); round++)
        ;
    /* Whoever is done first must not take its QP away from the other's acknowledgements. */
    tcp_write(tcp, &byte, 1);
    tcp_read(tcp, &byte, 1);
    printf("{\"rounds\": %llu, \"reregs\": %llu, \"resizes\": %llu}\n",
           (unsigned long long)round + 1, (unsigned long long)reregs, (unsigned long long)resizes);
    return 0;
}
