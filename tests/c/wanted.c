/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a program wants of its paths: two RC QPs of one NIC, connected to each other, of which one
 * has a path with values that nobody else has (service level, flow label, hop limit, traffic class,
 * rate). They are told as they were set, on whatever NIC the QPs are, can be set anew there, and
 * what no packet can carry is EINVAL.
 *
 *   wanted MOVED_FILE   says "connected", and goes on when there is that file
 *   wanted              connects one QP to a peer that nobody knows, which works on whatever NIC it
 *                       is
 */
#include "pair.h"
#include <sys/stat.h>

enum { LIMIT_US = 20 * 1000000, LOOK_US = 1000, SL = 5 };

static struct pair p;
static struct ibv_cq *cq;

/* Of the flow label 20 bits count; UCX sets the others, too. */
static struct ibv_ah_attr wanted(int sl)
{
    return (struct ibv_ah_attr){ .is_global = 1,
                                 .port_num = 1,
                                 .sl = sl,
                                 .static_rate = IBV_RATE_10_GBPS,
                                 .grh = { .dgid = p.gid,
                                          .sgid_index = p.sgid_index,
                                          .flow_label = 0xfffabcde,
                                          .hop_limit = 9,
                                          .traffic_class = 0x68 } };
}

static struct ibv_qp_attr query(void)
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    check(ibv_query_qp(p.from, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PORT | IBV_QP_PKEY_INDEX,
                       &init),
          "ibv_query_qp");
    return attr;
}

static void is(int sl)
{
    struct ibv_qp_attr attr = query();
    struct ibv_ah_attr *a = &attr.ah_attr;

    if (memcmp(&a->grh.dgid, &p.gid, sizeof p.gid) || a->grh.sgid_index != p.sgid_index ||
        a->grh.flow_label != 0xabcde || a->grh.hop_limit != 9 || a->grh.traffic_class != 0x68)
        fail("the global route is another: GID index %d, flow label %#x, hop limit %d, traffic "
             "class %#x",
             a->grh.sgid_index, a->grh.flow_label, a->grh.hop_limit, a->grh.traffic_class);
    if (a->sl != sl || a->static_rate != IBV_RATE_10_GBPS || a->dlid || a->src_path_bits ||
        !a->is_global || a->port_num != 1 || attr.port_num != 1 || attr.pkey_index)
        fail("the path is another: SL %d, rate %d, LID %d, port %d", a->sl, a->static_rate, a->dlid,
             a->port_num);
}

static void change_state(enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = { .qp_state = state };
    uint64_t until = now_us() + LIMIT_US;

    check(ibv_modify_qp(p.from, &attr, IBV_QP_STATE), "to SQD or RTS");
    while (state == IBV_QPS_SQD && query().sq_draining)
        if (now_us() > until)
            fail("the send queue is not drained");
}

/* In SQD alone a path may be changed. */
static void set(struct ibv_ah_attr ah, int error)
{
    struct ibv_qp_attr attr = { .ah_attr = ah };
    int got = ibv_modify_qp(p.from, &attr, IBV_QP_AV);

    if (got != error)
        fail("SL %d: %s, not %s", ah.sl, strerror(got), strerror(error));
}

static void change(int sl)
{
    change_state(IBV_QPS_SQD);
    set(wanted(sl), 0);
    set(wanted(16), EINVAL);
    change_state(IBV_QPS_RTS);
    is(sl);
}

static void write_one(void)
{
    uint64_t until = now_us() + LIMIT_US;
    struct ibv_wc wc;
    int n;

    check(post_write(&p, p.from, 1, 64), "ibv_post_send");
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        if (now_us() > until)
            fail("a WRITE is not complete");
    if (n < 0 || wc.status)
        fail("a WRITE: %s", n < 0 ? "the CQ failed" : ibv_wc_status_str(wc.status));
}

static void handles(void)
{
    struct ibv_ah_attr to = wanted(SL);
    struct ibv_ah *ah = ibv_create_ah(p.pd, &to);

    if (!ah || ibv_destroy_ah(ah))
        fail("an address handle: %s", strerror(errno));
    to.sl = 16;
    errno = 0;
    if (ibv_create_ah(p.pd, &to) || errno != EINVAL)
        fail("an address handle with SL 16: %s", strerror(errno));
}

int main(int count, char **args)
{
    const struct ibv_qp nobody = { .qp_num = 0xabcdef };
    struct stat there;
    uint64_t until;

    open_first(&p, 1);
    p.sgid_index = test_gid_index();
    check(ibv_query_gid(p.context, 1, p.sgid_index, &p.gid), "ibv_query_gid");
    cq = ibv_create_cq(p.context, 16, NULL, NULL, 0);
    p.from = make_qp(&p, cq);
    if (count != 2) {
        connect_qp(&p, p.from, &nobody, 1);
        change(SL);
        return 0;
    }
    p.to = make_qp(&p, cq);
    connect_qp(&p, p.from, p.to, 1);
    connect_qp(&p, p.to, p.from, 1);
    handles();
    change(SL);
    write_one();
    printf("connected\n");
    fflush(stdout);
    for (until = now_us() + LIMIT_US; stat(args[1], &there); usleep(LOOK_US))
        if (now_us() > until)
            fail("no file %s after %d s", args[1], LIMIT_US / 1000000);
    is(SL);
    write_one();
    change(SL + 1);
    write_one();
    return 0;
}
