/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a call costs: posts and polls, for a test that counts instructions (tests/e2e/test_cost.py)
 * by running it under valgrind's callgrind.
 *
 * Two QPs of this process are connected to each other. One call is counted at a time, with nothing
 * outstanding: a post, and then whatever there is to poll; an empty poll. Each batch of calls is a
 * dump of its own, and a line `KIND CALLS` of output.
 */
#include "pair.h"
#include <valgrind/callgrind.h>

/* A poll in 256 does more than the others, so each batch has one of those. */
enum {
    BATCH = 256,
    BATCHES = 15,
    RECV_BATCH = 8,
    LIST = 8,
    LIMIT_US = 60 * 1000000,
    TURN_US = 2000
};

static struct pair pair;
static struct ibv_cq *cq, *other;

#define COUNTED(call) \
    do { \
        CALLGRIND_TOGGLE_COLLECT; \
        call; \
        CALLGRIND_TOGGLE_COLLECT; \
    } while (0)

/*
 * Ends a batch. Valgrind lets one thread run at a time, and may have stopped another in the middle
 * of its work on the NIC, which polls then find taken: it is given its turn, which it gets when
 * this one sleeps.
 */
static void counted(const char *kind, int calls)
{
    printf("%s %d\n", kind, calls);
    CALLGRIND_DUMP_STATS_AT(kind);
    usleep(TURN_US);
}

/* Polls until the completion of a send is there, uncounted. */
static void completed(uint64_t wr_id)
{
    uint64_t until = now_us() + LIMIT_US;
    struct ibv_wc wc;
    int n;

    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        if (now_us() > until)
            fail("no completion of send %llu", (unsigned long long)wr_id);
    if (n != 1 || wc.status || wc.wr_id != wr_id)
        fail("send %llu: poll gives %d, status '%s', wr_id %llu", (unsigned long long)wr_id, n,
             ibv_wc_status_str(wc.status), (unsigned long long)wc.wr_id);
}

static void sends(int calls)
{
    int i, e;

    for (i = 0; i < calls; i++) {
        COUNTED(e = post_write(&pair, pair.from, i, 8));
        check(e, "ibv_post_send");
        completed(i);
    }
}

/* One call for each completion, where it is there as soon as its send is posted. */
static void polls(int calls)
{
    struct ibv_wc wc;
    int i, n;

    for (i = 0; i < calls; i++) {
        check(post_write(&pair, pair.from, i, 8), "ibv_post_send");
        COUNTED(n = ibv_poll_cq(cq, 1, &wc));
        if (n != 1 || wc.status || wc.wr_id != (uint64_t)i)
            fail("the poll of send %d gives %d, wr_id %llu", i, n, (unsigned long long)wc.wr_id);
    }
}

/* Lists of LIST writes. */
static void lists(int calls)
{
    struct ibv_sge sge = { (uintptr_t)pair.memory, 8, pair.mr->lkey };
    struct ibv_send_wr wrs[LIST], *bad;
    int call, i, e;

    for (call = 0; call < calls; call++) {
        memset(wrs, 0, sizeof(wrs));
        for (i = 0; i < LIST; i++) {
            wrs[i].wr_id = call;
            wrs[i].next = i < LIST - 1 ? &wrs[i + 1] : NULL;
            wrs[i].sg_list = &sge;
            wrs[i].num_sge = 1;
            wrs[i].opcode = IBV_WR_RDMA_WRITE;
            wrs[i].wr.rdma.remote_addr = (uintptr_t)pair.memory + PAIR_BYTES / 2;
            wrs[i].wr.rdma.rkey = pair.mr->rkey;
        }
        COUNTED(e = ibv_post_send(pair.from, wrs, &bad));
        check(e, "ibv_post_send of a list");
        for (i = 0; i < LIST; i++)
            completed(call);
    }
}

static void empty_polls(int calls)
{
    struct ibv_wc wc;
    int i, n;

    for (i = 0; i < calls; i++) {
        COUNTED(n = ibv_poll_cq(cq, 1, &wc));
        if (n)
            fail("a poll of an empty CQ gives %d", n);
    }
}

/* Receives are posted and not used. */
static void recvs(int calls)
{
    int i, e;

    for (i = 0; i < calls; i++) {
        COUNTED(e = post_recv(&pair, pair.to, i, 8));
        check(e, "ibv_post_recv");
    }
}

int main(void)
{
    int i;

    pair.sgid_index = test_gid_index();
    open_first(&pair, 1);
    if (ibv_query_gid(pair.context, 1, pair.sgid_index, &pair.gid))
        fail("no GID at index %d", pair.sgid_index);
    cq = ibv_create_cq(pair.context, 2 * PAIR_DEPTH, NULL, NULL, 0);
    other = ibv_create_cq(pair.context, 2 * PAIR_DEPTH, NULL, NULL, 0);
    pair.from = make_qp(&pair, cq);
    pair.to = make_qp(&pair, other);
    connect_qp(&pair, pair.from, pair.to, 1);
    connect_qp(&pair, pair.to, pair.from, 1);
    sends(BATCH); /* what the first calls make is made */
    CALLGRIND_ZERO_STATS;
    for (i = 0; i < BATCHES; i++)
        sends(BATCH), counted("post_send", BATCH);
    for (i = 0; i < BATCHES; i++)
        lists(BATCH / LIST), counted("post_list", BATCH / LIST);
    for (i = 0; i < BATCHES; i++)
        empty_polls(BATCH), counted("empty_poll", BATCH);
    for (i = 0; i < BATCHES && getenv("TEST_PROVIDER_NULL"); i++)
        polls(BATCH), counted("poll", BATCH);
    for (i = 0; i < PAIR_DEPTH / RECV_BATCH; i++)
        recvs(RECV_BATCH), counted("post_recv", RECV_BATCH);
    puts("done");
    fflush(stdout);
    pause(); /* the suite looks at the QPs, and ends this */
    return 0;
}
