/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a lossy wire and a late receiver put to the test: two RC QPs in this process, connected to
 * each other.
 *
 *   late ROUNDS
 *
 * A round posts SENDs for which there is no receive yet, and posts the receives LATE_US later; then
 * a run of atomics, several at once, each of which must return the very value that those before it
 * have left; then READs and WRITEs whose bytes are compared. A round ends when all of it is
 * complete and right. Status 1 and a reason: something was wrong.
 */
#include "common.h"
#include <infiniband/verbs.h>

enum {
    SENDS = 8,
    ATOMICS = 32,
    LONG = 100000,
    DEPTH = 64,
    LATE_US = 20000,
    LIMIT_US = 30 * 1000000
};

static struct memory {
    uint64_t counter, found[ATOMICS];
    uint8_t out[SENDS][LONG / SENDS], in[SENDS][LONG / SENDS];
    uint8_t source[LONG], there[LONG], copy[LONG];
} m;

static struct ibv_qp *from, *to;
static struct ibv_cq *cq;
static struct ibv_mr *mr;

static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static void connect_qp(struct ibv_qp *qp, const struct ibv_qp *peer, const union ibv_gid *gid)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                                IBV_ACCESS_REMOTE_ATOMIC };

    check(
        ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer->qp_num,
                              .max_dest_rd_atomic = 8,
                              .min_rnr_timer = 12 /* 0.64 ms */,
                              .rq_psn = 0xffff00 };
    a.ah_attr = (struct ibv_ah_attr){ .is_global = 1,
                                      .port_num = 1,
                                      .grh = { .dgid = *gid, .hop_limit = 64 } };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "to RTR");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS,
                              .timeout = 14,
                              .retry_cnt = 7,
                              .rnr_retry = 7,
                              .max_rd_atomic = 8,
                              .sq_psn = 0xffff00 };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

static void set_up(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1,
                                     .cap = { DEPTH, DEPTH, 1, 1, 0 } };
    union ibv_gid gid;

    if (!pd || ibv_query_gid(context, 1, 0, &gid))
        fail("no device, protection domain or GID");
    cq = init.send_cq = init.recv_cq = ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0);
    mr = ibv_reg_mr(pd, &m, sizeof m,
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                        IBV_ACCESS_REMOTE_ATOMIC);
    from = cq ? ibv_create_qp(pd, &init) : NULL;
    to = from ? ibv_create_qp(pd, &init) : NULL;
    if (!mr || !to)
        fail("cannot make a CQ, a region and two QPs: %s", strerror(errno));
    connect_qp(from, to, &gid);
    connect_qp(to, from, &gid);
}

/* Takes `n` completions, of which the sends and the receives must each come in order. */
static void complete(int n, const char *what)
{
    uint64_t until = now_us() + LIMIT_US, next[2] = { 0, 0 };
    struct ibv_wc wc;

    while (n) {
        int got = ibv_poll_cq(cq, 1, &wc), received = got == 1 && wc.opcode & IBV_WC_RECV;

        if (got < 0 || now_us() > until)
            fail("%s: %d completions are missing", what, n);
        if (!got)
            continue;
        if (wc.status)
            fail("%s: WR %llu ends with '%s'", what, (unsigned long long)wc.wr_id,
                 ibv_wc_status_str(wc.status));
        if (wc.wr_id != next[received]++)
            fail("%s: WR %llu completes in place of %llu", what, (unsigned long long)wc.wr_id,
                 (unsigned long long)next[received] - 1);
        n--;
    }
}

static void post(enum ibv_wr_opcode opcode, uint64_t id, void *local, uint32_t len,
                 const void *remote, uint64_t compare_add, uint64_t swap)
{
    struct ibv_sge sge = { (uintptr_t)local, len, mr->lkey };
    struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = opcode }, *bad;

    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
        wr.wr.atomic.remote_addr = (uintptr_t)remote;
        wr.wr.atomic.rkey = mr->rkey;
        wr.wr.atomic.compare_add = compare_add;
        wr.wr.atomic.swap = swap;
    } else {
        wr.wr.rdma.remote_addr = (uintptr_t)remote;
        wr.wr.rdma.rkey = mr->rkey;
    }
    check(ibv_post_send(from, &wr, &bad), "post_send");
}

/* SENDs whose receives come late. */
static void late_receives(uint64_t round)
{
    uint64_t until = now_us() + LATE_US;
    uint32_t len[SENDS];
    struct ibv_wc wc;
    const char *wrong;
    int i;

    memset(m.in, 0, sizeof m.in);
    for (i = 0; i < SENDS; i++) {
        len[i] = i * sizeof m.out[i] / (SENDS - 1);
        content_make(m.out[i], len[i], mix(round * SENDS + i), i);
        post(IBV_WR_SEND, i, m.out[i], len[i], NULL, 0, 0);
    }
    while (now_us() < until)
        if (ibv_poll_cq(cq, 1, &wc))
            fail("a SEND ends (%s) before there is a receive", ibv_wc_status_str(wc.status));
    for (i = 0; i < SENDS; i++) {
        struct ibv_sge sge = { (uintptr_t)m.in[i], sizeof m.in[i], mr->lkey };
        struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;

        check(ibv_post_recv(to, &wr, &bad), "post_recv");
    }
    complete(2 * SENDS, "SENDs");
    for (i = 0; i < SENDS; i++) {
        wrong = content_wrong(m.in[i], len[i], mix(round * SENDS + i), i);
        if (wrong)
            fail("message %d of %u bytes: %s", i, len[i], wrong);
    }
}

/* Each must run once: the value that it finds is what those before it have left. */
static void atomics(uint64_t round)
{
    uint64_t value = m.counter, right[ATOMICS];
    int i;

    for (i = 0; i < ATOMICS; i++) {
        uint64_t r = mix(round * ATOMICS + i);

        right[i] = value;
        if (r % 3 == 0) {
            post(IBV_WR_ATOMIC_FETCH_AND_ADD, i, m.found + i, 8, &m.counter, r, 0);
            value += r;
        } else { /* every second one finds what it compares with */
            post(IBV_WR_ATOMIC_CMP_AND_SWP, i, m.found + i, 8, &m.counter, value + (r % 3 == 1), r);
            value = r % 3 == 1 ? value : r;
        }
    }
    complete(ATOMICS, "atomics");
    for (i = 0; i < ATOMICS; i++)
        if (m.found[i] != right[i])
            fail("atomic %d found %#llx in place of %#llx", i, (unsigned long long)m.found[i],
                 (unsigned long long)right[i]);
    if (m.counter != value)
        fail("the atomics have left %#llx in place of %#llx", (unsigned long long)m.counter,
             (unsigned long long)value);
}

/* A READ of what the WRITE before it has brought. */
static void there_and_back(uint64_t round)
{
    const char *wrong;

    content_make(m.source, LONG, mix(~round), round);
    memset(m.there, 0, LONG);
    memset(m.copy, 0, LONG);
    post(IBV_WR_RDMA_WRITE, 0, m.source, LONG, m.there, 0, 0);
    post(IBV_WR_RDMA_READ, 1, m.copy, LONG, m.there, 0, 0);
    complete(2, "a WRITE and a READ");
    wrong = content_wrong(m.there, LONG, mix(~round), round);
    if (wrong)
        fail("what was written: %s", wrong);
    wrong = content_wrong(m.copy, LONG, mix(~round), round);
    if (wrong)
        fail("what was read: %s", wrong);
}

int main(int argc, char **argv)
{
    uint64_t rounds = argc == 2 ? strtoull(argv[1], NULL, 0) : 0, i;

    if (!rounds)
        fail("usage: late ROUNDS");
    set_up();
    for (i = 0; i < rounds; i++) {
        late_receives(i);
        atomics(i);
        there_and_back(i);
    }
    printf("{\"rounds\": %llu}\n", (unsigned long long)rounds);
    return 0;
}
