/* SPDX-License-Identifier: Apache-2.0 */
/* What befalls UC and UD QPs. */
#ifndef UNBROKEN_TESTS_OUTCOMES_OTHERS_H
#define UNBROKEN_TESTS_OUTCOMES_OTHERS_H

#include "outcomes_ends.h"

static void overrun_uc(void)
{
    struct shape s = { .type = IBV_QPT_UC, .a_entries = 4 };

    if (!connect_ends(&s))
        return;
    for (int i = 0; i < 32; i++)
        send_request(i, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 0, 0, 2 }, (struct due){ 0 });
}

static struct ibv_ah *address_of(const struct end *e)
{
    struct ibv_ah_attr to = { .is_global = 1,
                              .port_num = 1,
                              .grh = { .dgid = e->gid,
                                       .sgid_index = test_gid_index(),
                                       .hop_limit = 64 } };
    struct ibv_ah *ah = ibv_create_ah(a.pd, &to);

    if (!ah)
        fail("ibv_create_ah: %s", strerror(errno));
    return ah;
}

static struct request datagram(struct ibv_ah *ah, uint32_t bytes)
{
    struct request r = request(IBV_WR_SEND, bytes);

    r.wr.wr.ud.ah = ah;
    r.wr.wr.ud.remote_qpn = b.qp->qp_num;
    r.wr.wr.ud.remote_qkey = QKEY;
    return r;
}

static void overrun_ud(void)
{
    struct shape s = { .type = IBV_QPT_UD, .b_entries = 4 };
    struct ibv_ah *ah;

    if (!connect_ends(&s))
        return;
    ah = address_of(&b);
    for (int i = 0; i < 32; i++)
        recv_into(&b, i, 64);
    for (int i = 0; i < 32; i++)
        check(post(&a, i, datagram(ah, 8)), "ibv_post_send");
    finish((struct due){ 32, 0, 0 }, (struct due){ 0, 0, 2 });
    check(ibv_destroy_ah(ah), "ibv_destroy_ah");
}

static void bad_lkey_ud(void)
{
    struct shape s = { .type = IBV_QPT_UD };
    struct request r;
    struct ibv_ah *ah;

    if (!connect_ends(&s))
        return;
    ah = address_of(&b);
    r = datagram(ah, 8);
    r.sge.lkey ^= 0x5a5a5a5a;
    check(post(&a, 0, r), "ibv_post_send");
    check(post(&a, 1, datagram(ah, 8)), "ibv_post_send");
    finish((struct due){ 2, 0, 0 }, (struct due){ 0 });
    check(ibv_destroy_ah(ah), "ibv_destroy_ah");
}

static void bad_lkey_uc(void)
{
    struct shape s = { .type = IBV_QPT_UC };
    struct request r;

    if (!connect_ends(&s))
        return;
    r = request(IBV_WR_RDMA_WRITE, 8);
    r.sge.lkey ^= 0x5a5a5a5a;
    check(post(&a, 0, r), "ibv_post_send");
    send_request(1, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0 });
}

static void bad_recv_uc(void)
{
    struct shape s = { .type = IBV_QPT_UC };

    if (!connect_ends(&s))
        return;
    check(recv_by(&b, 0, 8, b.mr->lkey ^ 0x5a5a5a5a), "ibv_post_recv");
    recv_into(&b, 1, 8);
    send_request(0, IBV_WR_SEND, 8);
    finish((struct due){ 1, 0, 0 }, (struct due){ 0, 2, 0 });
}

static void bad_recv_ud(void)
{
    struct shape s = { .type = IBV_QPT_UD };
    struct ibv_ah *ah;

    if (!connect_ends(&s))
        return;
    ah = address_of(&b);
    check(recv_by(&b, 0, 64, b.mr->lkey ^ 0x5a5a5a5a), "ibv_post_recv");
    recv_into(&b, 1, 64);
    check(post(&a, 0, datagram(ah, 8)), "ibv_post_send");
    finish((struct due){ 1, 0, 0 }, (struct due){ 0, 2, 0 });
    check(ibv_destroy_ah(ah), "ibv_destroy_ah");
}

static void too_long_uc(void)
{
    struct shape s = { .type = IBV_QPT_UC };

    if (!connect_ends(&s))
        return;
    recv_into(&b, 0, 8);
    recv_into(&b, 1, 8);
    send_request(0, IBV_WR_SEND, 64);
    finish((struct due){ 1, 0, 0 }, (struct due){ 0 });
}

static void too_long_ud(void)
{
    struct shape s = { .type = IBV_QPT_UD };
    struct ibv_ah *ah;

    if (!connect_ends(&s))
        return;
    ah = address_of(&b);
    recv_into(&b, 0, 48);
    recv_into(&b, 1, 64);
    check(post(&a, 0, datagram(ah, 64)), "ibv_post_send");
    finish((struct due){ 1, 0, 0 }, (struct due){ 0 });
    check(ibv_destroy_ah(ah), "ibv_destroy_ah");
}

#endif
