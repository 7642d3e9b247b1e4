/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists of sends: all of a list is posted in its order; up to the first that is wrong, or does not
 * fit, all is posted, and nothing behind it.
 *
 * Two QPs of this process are connected to each other. Each send writes 8 bytes of its own to a
 * place of its own.
 */
#include "pair.h"

enum { LONG = PAIR_DEPTH + 10, AT = 5, LIMIT_US = 60 * 1000000 };

static struct pair pair;
static struct ibv_cq *cq;
static struct ibv_sge sges[LONG][2];
static struct ibv_send_wr wrs[LONG];
/* Each list writes other values. */
static uint64_t round_of_list;

static uint64_t *source(int i)
{
    return (uint64_t *)pair.memory + i;
}

static uint64_t *target(int i)
{
    return (uint64_t *)(pair.memory + PAIR_BYTES / 2) + i;
}

static void make_list(int count)
{
    int i;

    round_of_list++;
    memset(wrs, 0, sizeof(wrs));
    for (i = 0; i < count; i++) {
        *source(i) = round_of_list << 32 | i;
        sges[i][0] = sges[i][1] = (struct ibv_sge){ (uintptr_t)source(i), 8, pair.mr->lkey };
        wrs[i].wr_id = i;
        wrs[i].next = i < count - 1 ? &wrs[i + 1] : NULL;
        wrs[i].sg_list = sges[i];
        wrs[i].num_sge = 1;
        wrs[i].opcode = IBV_WR_RDMA_WRITE;
        wrs[i].wr.rdma.remote_addr = (uintptr_t)target(i);
        wrs[i].wr.rdma.rkey = pair.mr->rkey;
    }
}

/* Posts the list, of which so many are to be taken; fewer than `count` with an error. */
static void post(const char *what, int count, int least, int most)
{
    struct ibv_send_wr *bad = NULL;
    int e = ibv_post_send(pair.from, wrs, &bad), taken = e ? (int)(bad - wrs) : count, i, n;
    uint64_t until = now_us() + LIMIT_US;
    struct ibv_wc wc;

    if (taken < least || taken > most)
        fail("%s: %d of %d sends were posted (%s); %d to %d are right", what, taken, count,
             strerror(e), least, most);
    for (i = 0; i < taken; i += n) {
        if ((n = ibv_poll_cq(cq, 1, &wc)) == 0 && now_us() > until)
            fail("%s: no completion of send %d", what, i);
        if (n < 0 || (n && (wc.status || wc.wr_id != (uint64_t)i)))
            fail("%s: send %d: poll gives %d, status '%s', wr_id %llu", what, i, n,
                 ibv_wc_status_str(wc.status), (unsigned long long)wc.wr_id);
    }
    for (i = 0; i < count; i++)
        if ((*target(i) == *source(i)) != (i < taken))
            fail("%s: send %d of %d that were posted has %s", what, i, taken,
                 i < taken ? "written nothing" : "written");
    if (ibv_poll_cq(cq, 1, &wc))
        fail("%s: a completion too many", what);
    printf("%s: %d of %d\n", what, taken, count);
}

int main(void)
{
    int last_vector;

    pair.sgid_index = test_gid_index();
    open_first(&pair, 1);
    if (ibv_query_gid(pair.context, 1, pair.sgid_index, &pair.gid))
        fail("no GID at index %d", pair.sgid_index);
    last_vector = pair.context->num_comp_vectors - 1;
    cq = ibv_create_cq(pair.context, 2 * PAIR_DEPTH, NULL, NULL, last_vector);
    pair.from = make_qp(&pair, cq);
    pair.to = make_qp(&pair, cq);
    connect_qp(&pair, pair.from, pair.to, 1);
    connect_qp(&pair, pair.to, pair.from, 1);

    make_list(40);
    post("all", 40, 40, 40);
    make_list(20);
    wrs[AT].opcode = 99;
    post("an unknown opcode", 20, AT, AT);
    make_list(20);
    wrs[AT].num_sge = 2;
    post("too many entries", 20, AT, AT);
    make_list(20);
    wrs[0].send_flags = 1 << 20;
    post("unknown flags at the head", 20, 0, 0);
    make_list(20);
    wrs[AT].send_flags = IBV_SEND_INLINE;
    post("inline data that does not fit", 20, AT, AT);
    /* One that completes while others are posted makes room. */
    make_list(LONG);
    post("more than fit", LONG, PAIR_DEPTH, LONG);
    make_list(40);
    post("all again", 40, 40, 40);
    return 0;
}
