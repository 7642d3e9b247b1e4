/* SPDX-License-Identifier: Apache-2.0 */
/* A server whose region lives long, and clients that connect a new queue pair to it again and again
 * and name that region by the key that it had at first. Its NICs die and are healed meanwhile.
 *
 * healed PORT            serves clients, one at a time, until it is ended
 * healed HOST:PORT N     connects for N seconds; each connection writes to the region, reads it
 *                        back, adds to a counter in it and sends a message
 *
 * TEST_SRQ: the server receives from a shared receive queue. TEST_LATE: it registers its region
 * anew for each client, and the first region is used all the same. TEST_NO_ATOMICS: the client adds
 * to no counter, since an atomic that a failure meets ends its queue pair. */
#include "common.h"
#include <infiniband/verbs.h>

enum { BYTES = 16384, DEPTH = 16, WAIT_US = 20000000 };
enum { COUNTER = BYTES - 8 };

/* What one end tells the other. */
struct there {
    union ibv_gid gid;
    uint32_t qpn, keys[2];
    uint64_t addr, counter;
};

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_srq *srq;
    struct ibv_mr *mr;
    struct ibv_qp *qp;
    union ibv_gid gid;
    uint8_t memory[BYTES] __attribute__((aligned(8)));
};

static struct ibv_mr *reg(struct end *e)
{
    struct ibv_mr *mr = ibv_reg_mr(e->pd, e->memory, BYTES,
                                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                       IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);

    if (!mr)
        fail("cannot register memory: %s", strerror(errno));
    return mr;
}

static void open_end(struct end *e, int srq)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_srq_init_attr init = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };

    e->context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    e->pd = e->context ? ibv_alloc_pd(e->context) : NULL;
    e->cq = e->pd ? ibv_create_cq(e->context, 4 * DEPTH, NULL, NULL, 0) : NULL;
    if (!e->cq || ibv_query_gid(e->context, 1, test_gid_index(), &e->gid))
        fail("no device, protection domain, CQ or GID");
    if (srq && !(e->srq = ibv_create_srq(e->pd, &init)))
        fail("cannot make an SRQ: %s", strerror(errno));
    e->mr = reg(e);
}

static void make_qp(struct end *e)
{
    struct ibv_qp_init_attr init = {
        .send_cq = e->cq,
        .recv_cq = e->cq,
        .srq = e->srq,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
    };
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT,
                                .port_num = 1,
                                .qp_access_flags = IBV_ACCESS_REMOTE_WRITE |
                                                   IBV_ACCESS_REMOTE_READ |
                                                   IBV_ACCESS_REMOTE_ATOMIC };

    e->qp = ibv_create_qp(e->pd, &init);
    if (!e->qp)
        fail("cannot make a QP: %s", strerror(errno));
    if (ibv_modify_qp(e->qp, &attr,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        fail("a QP does not go to INIT");
}

static void connect_qp(struct end *e, const struct there *to)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = to->qpn,
        .rq_psn = 7,
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = 12,
        .ah_attr = { .is_global = 1,
                     .port_num = 1,
                     .grh = { .dgid = to->gid,
                              .hop_limit = 64,
                              .sgid_index = test_gid_index() } },
    };

    if (ibv_modify_qp(e->qp, &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                          IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        fail("a QP does not go to RTR");
    attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS,
                                 .timeout = 14,
                                 .retry_cnt = 7,
                                 .rnr_retry = 7,
                                 .sq_psn = 7,
                                 .max_rd_atomic = 4 };
    if (ibv_modify_qp(e->qp, &attr,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        fail("a QP does not go to RTS");
}

static struct there here(const struct end *e, const struct ibv_mr *second)
{
    struct there t = { .gid = e->gid,
                       .qpn = e->qp->qp_num,
                       .keys = { e->mr->rkey, second->rkey },
                       .addr = (uintptr_t)e->memory };

    memcpy(&t.counter, e->memory + COUNTER, 8);
    return t;
}

static void wait_for(struct end *e, const char *what)
{
    struct ibv_wc wc;
    uint64_t until = now_us() + WAIT_US;
    int n;

    while ((n = ibv_poll_cq(e->cq, 1, &wc)) == 0)
        if (now_us() > until)
            fail("%s does not complete", what);
    if (n < 0 || wc.status)
        fail("%s: %s", what, n < 0 ? "the CQ cannot be polled" : ibv_wc_status_str(wc.status));
}

static void post_recv(struct end *e)
{
    struct ibv_sge sge = { (uintptr_t)e->memory, 8, e->mr->lkey };
    struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

    if (e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad))
        fail("a receive is not taken");
}

static void serve(const char *port)
{
    static struct end e;
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };
    int one = 1, s = socket(AF_INET, SOCK_STREAM, 0), c;

    open_end(&e, getenv("TEST_SRQ") != NULL);
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(s, (struct sockaddr *)&a, sizeof a) || listen(s, 8))
        fail("cannot listen on TCP port %s: %s", port, strerror(errno));
    printf("listening\n");
    fflush(stdout);
    while ((c = accept(s, NULL, NULL)) >= 0) {
        struct ibv_mr *second = getenv("TEST_LATE") ? reg(&e) : e.mr;
        struct there to, own;
        char done;

        make_qp(&e);
        tcp_read(c, &to, sizeof to);
        post_recv(&e);
        connect_qp(&e, &to);
        own = here(&e, second);
        tcp_write(c, &own, sizeof own);
        wait_for(&e, "a receive");
        tcp_write(c, "!", 1);
        tcp_read(c, &done, 1);
        close(c);
        if (ibv_destroy_qp(e.qp))
            fail("a QP cannot be destroyed");
        if (second != e.mr && ibv_dereg_mr(second))
            fail("a region cannot be ended");
    }
}

/* One work request that names the peer's memory, or sends. */
static void work(struct end *e, enum ibv_wr_opcode opcode, void *at, uint32_t len, uint64_t remote,
                 uint32_t key, const char *what)
{
    struct ibv_sge sge = { (uintptr_t)at, len, e->mr->lkey };
    struct ibv_send_wr wr = { .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = opcode,
                              .send_flags = IBV_SEND_SIGNALED },
                       *bad;
    int error;

    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        wr.wr.atomic.remote_addr = remote;
        wr.wr.atomic.rkey = key;
        wr.wr.atomic.compare_add = 1;
    } else {
        wr.wr.rdma.remote_addr = remote;
        wr.wr.rdma.rkey = key;
    }
    error = ibv_post_send(e->qp, &wr, &bad);
    if (error)
        fail("%s cannot be posted: %s", what, strerror(error));
    wait_for(e, what);
}

int main(int argc, char **argv)
{
    static struct end e;
    uint64_t number = 1, until;

    if (argc == 2) {
        serve(argv[1]);
        return 0;
    }
    if (argc != 3)
        fail("give PORT, or HOST:PORT SECONDS");
    open_end(&e, 0);
    for (until = now_us() + 1000000 * atoll(argv[2]); now_us() < until; number++) {
        int c = tcp_connect(argv[1]);
        struct there to, own;
        uint64_t old;
        char sent;

        make_qp(&e);
        own = here(&e, e.mr);
        tcp_write(c, &own, sizeof own);
        tcp_read(c, &to, sizeof to);
        connect_qp(&e, &to);
        for (int k = 0; k < 2; k++) {
            uint8_t *out = e.memory, *back = e.memory + BYTES / 2;
            uint64_t at = to.addr + 64;

            content_make(out, 4096, number, number);
            work(&e, IBV_WR_RDMA_WRITE, out, 4096, at, to.keys[k], "a WRITE");
            work(&e, IBV_WR_RDMA_READ, back, 4096, at, to.keys[k], "a READ");
            if (content_wrong(back, 4096, number, number))
                fail("connection %llu: %s", (unsigned long long)number,
                     content_wrong(back, 4096, number, number));
        }
        if (!getenv("TEST_NO_ATOMICS")) {
            work(&e, IBV_WR_ATOMIC_FETCH_AND_ADD, &e.memory[COUNTER], 8, to.addr + COUNTER,
                 to.keys[0], "an atomic");
            memcpy(&old, e.memory + COUNTER, 8);
            if (old != to.counter)
                fail("the counter was %llu, and not %llu", (unsigned long long)old,
                     (unsigned long long)to.counter);
        }
        work(&e, IBV_WR_SEND, e.memory, 8, 0, 0, "a SEND");
        tcp_read(c, &sent, 1);
        tcp_write(c, "x", 1);
        close(c);
        if (ibv_destroy_qp(e.qp))
            fail("a QP cannot be destroyed");
    }
    printf("%llu connections\n", (unsigned long long)(number - 1));
    return number < 2;
}
