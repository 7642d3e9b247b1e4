/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All verbs are thread-safe: one process, many threads, the same objects.
 *
 *   threads --seconds S --seed X [--faults]
 *
 * Two pairs of RC QPs in this process. Pair 0 completes in a plain CQ with a channel and has
 * receive queues of its own; pair 1 completes in an extended CQ and takes its receives from an SRQ.
 * Eight threads post on each pair (lists, single requests, builders), four post receives, pollers
 * poll, wait for events and use start_poll; others register and deregister regions, make and
 * destroy QPs that use the same CQs, CQs and address handles, modify and query what is in use,
 * resize the CQs, arm the SRQ. Each WR completes once, each message arrives once and intact, each
 * READ brings what is there, the adds add up.
 *
 * With --faults the NIC may die: no atomics then, which are not replayed. It prints "running" when
 * traffic flows, and a line of JSON.
 */
#include "threads_traffic.h"
#include <fcntl.h>
#include <pthread.h>

static atomic_ullong churned;

/* ---- everything else, at the same time ---- */

static void to_state(struct ibv_qp *qp, enum ibv_qp_state state, uint32_t peer,
                     const union ibv_gid *gid)
{
    struct ibv_qp_attr a = {
        .qp_state = state,
        .port_num = 1,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer,
        .max_rd_atomic = 4,
        .max_dest_rd_atomic = 4,
        .min_rnr_timer = 1,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .qp_access_flags =
            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
        .ah_attr = { .is_global = 1,
                     .port_num = 1,
                     .grh = { .dgid = *gid, .sgid_index = test_gid_index(), .hop_limit = 8 } }
    };
    static const int MASK[] = { [IBV_QPS_INIT] =
                                    IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
                                [IBV_QPS_RTR] = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                                IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                                IBV_QP_MIN_RNR_TIMER,
                                [IBV_QPS_RTS] = IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                                IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC };
    int e = ibv_modify_qp(qp, &a, IBV_QP_STATE | MASK[state]);

    /* a dead NIC says EIO, a QP that died with it before it was connected is in ERR */
    if (e && !(faults && (e == EIO || e == EINVAL)))
        fail("modify_qp to %d: %s", state, strerror(e));
}

static void connect_pair(struct ibv_qp *a, struct ibv_qp *b)
{
    union ibv_gid gid;
    int s;

    if (ibv_query_gid(context, 1, test_gid_index(), &gid))
        fail("ibv_query_gid");
    for (s = IBV_QPS_INIT; s <= IBV_QPS_RTS; s++) {
        to_state(a, s, b->qp_num, &gid);
        to_state(b, s, a->qp_num, &gid);
    }
}

/* A QP; NULL where a dead NIC makes none. */
static struct ibv_qp *make_qp(struct pair *p, int extended, int with_srq)
{
    struct ibv_qp_init_attr_ex init = {
        .send_cq = p->cq,
        .recv_cq = p->cq,
        .srq = with_srq ? p->srq : NULL,
        .qp_type = IBV_QPT_RC,
        .cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
        .pd = pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | (extended ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0),
        .send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
                          IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    };
    struct ibv_qp *qp = ibv_create_qp_ex(context, &init);

    if (!qp && !(faults && errno == EIO))
        fail("ibv_create_qp_ex: %s", strerror(errno));
    return qp;
}

#define CHECK(call) do { int e_ = (call); if (e_) fail("%s: %s", #call, strerror(e_)); } while (0)

static void churn_qps(struct pair *p, uint64_t *rng)
{
    struct ibv_qp *a = make_qp(p, 0, 0), *b = make_qp(p, 1, 0);

    if (a && b) {
        if (draw(rng) % 2)
            connect_pair(a, b);
        if (draw(rng) % 2) {
            /* unsignaled, to be forgotten with the QP; no receive meets it */
            struct ibv_send_wr wr = { .opcode = IBV_WR_SEND }, *bad;

            ibv_post_send(a, &wr, &bad);
        }
    }
    if (a)
        CHECK(ibv_destroy_qp(a));
    if (b)
        CHECK(ibv_destroy_qp(b));
}

static void churn_queries(struct pair *p, uint64_t *rng)
{
    struct ibv_qp_attr attr = { .min_rnr_timer = 1,
                                .qp_access_flags = IBV_ACCESS_REMOTE_READ |
                                                   IBV_ACCESS_REMOTE_WRITE |
                                                   IBV_ACCESS_REMOTE_ATOMIC };
    struct ibv_qp_init_attr init;
    struct ibv_qp *qp = draw(rng) % 2 ? p->from : p->to;
    struct ibv_sge sge = { (uintptr_t)p->remote, 64, 0 };
    struct ibv_send_wr wrong = { .opcode = IBV_WR_SEND,
                                 .send_flags = IBV_SEND_INLINE,
                                 .sg_list = &sge,
                                 .num_sge = 1 },
                       *bad;
    int e;

    /* not even where a switch keeps what is posted */
    if (ibv_post_send(p->to, &wrong, &bad) != EINVAL)
        fail("inline data is taken by a QP that was made without");
    e = ibv_modify_qp(qp, &attr, IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS);

    if (e && !(faults && e == EIO))
        fail("modify_qp of a QP in use: %s", strerror(e));
    CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
    if (attr.qp_state != IBV_QPS_RTS || init.cap.max_send_wr < DEPTH)
        fail("query_qp: state %d, max_send_wr %u", attr.qp_state, init.cap.max_send_wr);
    if (p->srq) {
        struct ibv_srq_attr srq = { .srq_limit = draw(rng) % 8 };

        CHECK(ibv_modify_srq(p->srq, &srq, IBV_SRQ_LIMIT));
        CHECK(ibv_query_srq(p->srq, &srq));
    }
    CHECK(ibv_resize_cq(p->cq, 4 * (SLOTS + BUFFERS) << draw(rng) % 3));
}

static void churn_others(struct pair *p, uint64_t *rng)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, p->receives, sizeof *p->receives * (1 + draw(rng) % BUFFERS),
                                   IBV_ACCESS_LOCAL_WRITE);
    struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, draw(rng) % 2 ? channel : NULL, 0);
    struct ibv_ah_attr to = { .is_global = 1,
                              .port_num = 1,
                              .grh = { .sgid_index = test_gid_index(), .hop_limit = 8 } };
    struct ibv_pd *other = ibv_alloc_pd(context);
    struct ibv_ah *ah;

    if (!mr || !cq || !other || ibv_query_gid(context, 1, test_gid_index(), &to.grh.dgid))
        fail("reg_mr, create_cq or alloc_pd: %s", strerror(errno));
    ah = ibv_create_ah(other, &to);
    if (!ah)
        fail("create_ah: %s", strerror(errno));
    if (!ibv_dealloc_pd(pd))
        fail("dealloc_pd of what is in use");
    if (!ibv_destroy_cq(p->cq))
        fail("destroy_cq of what is in use");
    CHECK(ibv_req_notify_cq(cq, draw(rng) % 2));
    CHECK(ibv_dereg_mr(mr));
    CHECK(ibv_destroy_cq(cq));
    CHECK(ibv_destroy_ah(ah));
    CHECK(ibv_dealloc_pd(other));
}

static void *churner(void *arg)
{
    static atomic_int ids;
    int id = atomic_fetch_add(&ids, 1);
    uint64_t rng = mix(seed * 77 + id);

    (void)arg;
    while (!atomic_load(&stop_sending)) {
        struct pair *p = pairs + draw(&rng) % PAIRS;

        switch (id % 3) {
        case 0: churn_qps(p, &rng); break;
        case 1: churn_queries(p, &rng); break;
        default: churn_others(p, &rng); break;
        }
        atomic_fetch_add(&churned, 1);
        usleep(draw(&rng) % 500);
    }
    return NULL;
}

static void *async_reader(void *arg)
{
    (void)arg;
    while (!atomic_load(&stop_all)) {
        struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
        struct ibv_async_event event;

        if (poll(&fd, 1, 50) <= 0 || ibv_get_async_event(context, &event))
            continue;
        if (event.event_type != IBV_EVENT_SRQ_LIMIT_REACHED &&
            event.event_type != IBV_EVENT_COMM_EST && !faults)
            fail("asynchronous event %s", ibv_event_type_str(event.event_type));
        ibv_ack_async_event(&event);
    }
    return NULL;
}

/* ---- set-up and end ---- */

static struct ibv_mr *region(void *p, size_t n)
{
    struct ibv_mr *mr = ibv_reg_mr(pd, p, n,
                                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                                       IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);

    if (!mr)
        fail("ibv_reg_mr: %s", strerror(errno));
    return mr;
}

static void set_up(struct pair *p, int id)
{
    struct ibv_srq_init_attr srq = { .attr = { .max_wr = BUFFERS / 2, .max_sge = 1 } };
    struct ibv_cq_init_attr_ex cq = { .cqe = 4 * (SLOTS + BUFFERS),
                                      .cq_context = p,
                                      .channel = channel,
                                      .wc_flags = IBV_WC_STANDARD_FLAGS };

    p->id = id;
    p->sends = calloc(SLOTS, sizeof *p->sends);
    p->receives = calloc(BUFFERS, sizeof *p->receives);
    p->remote = aligned_alloc(4096, 4096 * (BYTES / 4096 + 1));
    p->seen = calloc(NUMBERS, 1);
    memset(p->remote, 0, 64);
    content_make(p->remote + 64, BYTES, seed + id, 7);
    p->sends_mr = region(p->sends, SLOTS * sizeof *p->sends);
    p->receives_mr = region(p->receives, BUFFERS * sizeof *p->receives);
    p->remote_mr = region(p->remote, 64 + BYTES);
    if (id == 1) {
        p->cq_ex = ibv_create_cq_ex(context, &cq);
        p->cq = p->cq_ex ? ibv_cq_ex_to_cq(p->cq_ex) : NULL;
        p->srq = ibv_create_srq(pd, &srq);
    } else {
        p->cq = ibv_create_cq(context, cq.cqe, p, channel, 0);
    }
    if (!p->cq || (id == 1 && !p->srq))
        fail("no CQ or SRQ: %s", strerror(errno));
    p->from = make_qp(p, 1, 0);
    p->to = make_qp(p, 0, id == 1);
    p->builder = id == 1 ? ibv_qp_to_qp_ex(p->from) : NULL;
    connect_pair(p->from, p->to);
}

static int drained(void)
{
    int i;

    for (i = 0; i < PAIRS; i++)
        if (atomic_load(&pairs[i].completed) != atomic_load(&pairs[i].posted) ||
            atomic_load(&pairs[i].received) != atomic_load(&pairs[i].expected))
            return 0;
    return 1;
}

static uint64_t sum_of(int what)
{
    uint64_t sum = 0;
    int i;

    for (i = 0; i < PAIRS; i++)
        sum += atomic_load(what ? &pairs[i].received : &pairs[i].completed);
    return sum;
}

static void tear_down(struct pair *p)
{
    CHECK(ibv_destroy_qp(p->from));
    CHECK(ibv_destroy_qp(p->to));
    if (p->srq)
        CHECK(ibv_destroy_srq(p->srq));
    CHECK(ibv_destroy_cq(p->cq));
    CHECK(ibv_dereg_mr(p->sends_mr));
    CHECK(ibv_dereg_mr(p->receives_mr));
    CHECK(ibv_dereg_mr(p->remote_mr));
}

static void run_threads(void)
{
    enum { CHURNERS = 6, MOST = PAIRS * (SENDERS + RECEIVERS + 4) + 2 + CHURNERS + 1 };
    pthread_t sending[PAIRS * SENDERS + CHURNERS], rest[MOST];
    int i, p, s = 0, r = 0;
    uint64_t until, told = 0;

    for (p = 0; p < PAIRS; p++) {
        for (i = 0; i < RECEIVERS; i++)
            pthread_create(rest + r++, NULL, receiver, pairs + p);
        for (i = 0; i < 4; i++)
            pthread_create(rest + r++, NULL, poller, pairs + p);
        for (i = 0; i < SENDERS; i++)
            pthread_create(sending + s++, NULL, sender, pairs + p);
    }
    for (i = 0; i < 2; i++)
        pthread_create(rest + r++, NULL, waiter, NULL);
    pthread_create(rest + r++, NULL, async_reader, NULL);
    for (i = 0; i < CHURNERS; i++)
        pthread_create(sending + s++, NULL, churner, NULL);
    for (until = now_us() + seconds * 1000000; now_us() < until; usleep(10000))
        if (!told && sum_of(1) > 100) {
            printf("running\n");
            fflush(stdout);
            told = 1;
        }
    atomic_store(&stop_sending, 1);
    for (i = 0; i < s; i++)
        pthread_join(sending[i], NULL);
    for (until = now_us() + DRAIN_US; !drained(); usleep(1000))
        if (now_us() > until)
            fail("not all completes: pair 0: %llu of %llu sends, %llu of %llu messages; pair 1: "
                 "%llu of %llu, %llu of %llu",
                 pairs[0].completed, pairs[0].posted, pairs[0].received, pairs[0].expected,
                 pairs[1].completed, pairs[1].posted, pairs[1].received, pairs[1].expected);
    usleep(20000); /* for what completes once too often */
    atomic_store(&stop_all, 1);
    for (i = 0; i < r; i++)
        pthread_join(rest[i], NULL);
    if (!drained())
        fail("more completes than was posted");
}

int main(int argc, char **argv)
{
    struct ibv_device **list;
    int i;

    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--faults"))
            faults = 1;
        else if (!strcmp(argv[i], "--seconds") && i + 1 < argc)
            seconds = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--seed") && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 0);
        else
            fail("usage: threads [--seconds S] [--seed X] [--faults]");
    }
    list = ibv_get_device_list(NULL);
    if (!list || !list[0] || !(context = ibv_open_device(list[0])))
        fail("no device");
    pd = ibv_alloc_pd(context);
    channel = ibv_create_comp_channel(context);
    if (!pd || !channel || fcntl(channel->fd, F_SETFL, O_NONBLOCK) ||
        fcntl(context->async_fd, F_SETFL, O_NONBLOCK))
        fail("no protection domain or channel");
    for (i = 0; i < PAIRS; i++)
        set_up(pairs + i, i);
    run_threads();
    for (i = 0; i < PAIRS; i++) {
        uint64_t count;

        memcpy(&count, pairs[i].remote, 8);
        if (count != atomic_load(&pairs[i].adds))
            fail("pair %d: the counter is %llu after %llu adds", i, (unsigned long long)count,
                 pairs[i].adds);
        tear_down(pairs + i);
    }
    CHECK(ibv_destroy_comp_channel(channel));
    CHECK(ibv_dealloc_pd(pd));
    CHECK(ibv_close_device(context));
    ibv_free_device_list(list);
    printf("{\"sends\": %llu, \"messages\": %llu, \"events\": %llu, \"churned\": %llu, \"full\": "
           "%llu}\n",
           (unsigned long long)sum_of(0), (unsigned long long)sum_of(1), events, churned, full);
    return 0;
}
