/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long verbs take: each verb of the set-up once, and posts and empty polls in the mean of many
 * calls. Prints a line of JSON; times in ns.
 *
 *   verbs [--posts N] [--polls N]
 *
 * Two QPs of this process are connected to each other. WRITEs of 8 bytes are posted in runs that
 * the queue has room for, and polled uncounted.
 */
#include "pair.h"

enum { RUN = PAIR_DEPTH / 2, LIMIT_US = 30 * 1000000 };

static struct pair pair;

static uint64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Takes the time of a call and prints it. */
#define TIMED(name, call) \
    do { \
        uint64_t began = now_ns(); \
        call; \
        printf("\"%s\": %llu, ", name, (unsigned long long)(now_ns() - began)); \
    } while (0)

static void drain(struct ibv_cq *cq, int count)
{
    uint64_t until = now_us() + LIMIT_US;
    struct ibv_wc wc;
    int n;

    while (count > 0) {
        n = ibv_poll_cq(cq, 1, &wc);
        if (n < 0 || (n && wc.status) || now_us() > until)
            fail("poll gives %d, status '%s', %d completions to come", n,
                 n > 0 ? ibv_wc_status_str(wc.status) : "none", count);
        count -= n;
    }
}

static double sends_ns(struct ibv_cq *cq, int posts)
{
    uint64_t total = 0, began;
    int i, k;

    for (i = 0; i < posts; i += RUN) {
        began = now_ns();
        for (k = 0; k < RUN; k++)
            check(post_write(&pair, pair.from, i + k, 8), "ibv_post_send");
        total += now_ns() - began;
        drain(cq, RUN);
    }
    return (double)total / i;
}

static double polls_ns(struct ibv_cq *cq, int polls)
{
    uint64_t began = now_ns();
    struct ibv_wc wc;
    int i;

    for (i = 0; i < polls; i++)
        if (ibv_poll_cq(cq, 1, &wc))
            fail("an empty CQ had something");
    return (double)(now_ns() - began) / polls;
}

/* Receives are posted and not used: a queue full of them. */
static double recvs_ns(void)
{
    uint64_t began = now_ns();
    int i;

    for (i = 0; i < PAIR_DEPTH; i++)
        check(post_recv(&pair, pair.to, i, 8), "ibv_post_recv");
    return (double)(now_ns() - began) / PAIR_DEPTH;
}

static void to_init(struct ibv_qp *qp)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

    check(
        ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "to INIT");
}

static void to_rtr(struct ibv_qp *qp, const struct ibv_qp *peer)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR,
                             .path_mtu = IBV_MTU_1024,
                             .dest_qp_num = peer->qp_num,
                             .max_dest_rd_atomic = 4,
                             .min_rnr_timer = 12 };

    a.ah_attr = (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = 1,
        .grh = { .dgid = pair.gid, .sgid_index = pair.sgid_index, .hop_limit = 64 }
    };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "to RTR");
}

static void to_rts(struct ibv_qp *qp)
{
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4
    };

    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

int main(int argc, char **argv)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;
    struct ibv_cq *cq;
    int i, posts = 20000, polls = 200000;

    for (i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--posts")) posts = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--polls")) polls = atoi(argv[i + 1]);
        else fail("unknown option '%s'", argv[i]);
    }
    if (!list || !list[0] || posts < 1 || polls < 1)
        fail("no device, or nothing to do");
    pair.sgid_index = test_gid_index();
    printf("{");
    TIMED("open_device", pair.context = ibv_open_device(list[0]));
    if (!pair.context || ibv_query_gid(pair.context, 1, pair.sgid_index, &pair.gid))
        fail("cannot open the first device");
    TIMED("alloc_pd", pair.pd = ibv_alloc_pd(pair.context));
    TIMED("reg_mr", pair.mr = ibv_reg_mr(pair.pd, pair.memory, sizeof pair.memory,
                                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
    TIMED("create_cq", cq = ibv_create_cq(pair.context, 4 * PAIR_DEPTH, NULL, NULL, 0));
    if (!pair.pd || !pair.mr || !cq)
        fail("cannot set up: %s", strerror(errno));
    pair.to = make_qp(&pair, cq);
    TIMED("create_qp", pair.from = make_qp(&pair, cq));
    to_init(pair.to);
    TIMED("modify_qp_init", to_init(pair.from));
    to_rtr(pair.to, pair.from);
    TIMED("modify_qp_rtr", to_rtr(pair.from, pair.to));
    to_rts(pair.to);
    TIMED("modify_qp_rts", to_rts(pair.from));
    TIMED("query_qp", check(ibv_query_qp(pair.from, &attr, IBV_QP_STATE, &init), "ibv_query_qp"));
    sends_ns(cq, 2 * RUN); /* warm-up */
    printf("\"post_send\": %.2f, ", sends_ns(cq, posts));
    printf("\"poll_cq\": %.2f, ", polls_ns(cq, polls));
    printf("\"post_recv\": %.2f}\n", recvs_ns());
    if (ibv_destroy_qp(pair.from) || ibv_destroy_qp(pair.to) || ibv_destroy_cq(cq) ||
        ibv_dereg_mr(pair.mr) || ibv_dealloc_pd(pair.pd) || ibv_close_device(pair.context))
        fail("cannot clean up");
    ibv_free_device_list(list);
    return 0;
}
