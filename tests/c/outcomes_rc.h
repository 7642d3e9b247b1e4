/* SPDX-License-Identifier: Apache-2.0 */
/* What befalls connected RC QPs, and what their program does to them. */
#ifndef UNBROKEN_TESTS_OUTCOMES_RC_H
#define UNBROKEN_TESTS_OUTCOMES_RC_H

#include "outcomes_ends.h"

static void success(void)
{
    static const enum ibv_wr_opcode opcodes[] = {
        IBV_WR_SEND,           IBV_WR_SEND_WITH_IMM,      IBV_WR_RDMA_WRITE,
        IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ,    IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD
    };

    if (!connect_ends(&rc))
        return;
    for (int i = 0; i < 3; i++)
        recv_into(&b, i, 8);
    for (int i = 0; i < 7; i++)
        send_request(i, opcodes[i], 8);
    finish((struct due){ 7, 0, 0 }, (struct due){ 0, 3, 0 });
}

static void comm_est(void)
{
    struct shape s = rc;

    s.b_stays_in_rtr = true;
    if (!connect_ends(&s))
        return;
    recv_into(&b, 0, 8);
    send_request(0, IBV_WR_SEND, 8);
    finish((struct due){ 1, 0, 0 }, (struct due){ 0, 1, 1 });
}

static void send_too_long(void)
{
    if (!connect_ends(&rc))
        return;
    recv_into(&b, 0, 8);
    recv_into(&b, 1, 8);
    send_request(0, IBV_WR_SEND, 64);
    send_request(1, IBV_WR_SEND, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0, 2, 1 });
}

static void bad_lkey_of_send(void)
{
    struct request r;

    if (!connect_ends(&rc))
        return;
    r = request(IBV_WR_RDMA_WRITE, 8);
    r.sge.lkey ^= 0x5a5a5a5a;
    check(post(&a, 0, r), "ibv_post_send");
    send_request(1, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0 });
}

static void bad_lkey_of_recv(void)
{
    if (!connect_ends(&rc))
        return;
    check(recv_by(&b, 0, 8, b.mr->lkey ^ 0x5a5a5a5a), "ibv_post_recv");
    recv_into(&b, 1, 8);
    send_request(0, IBV_WR_SEND, 8);
    send_request(1, IBV_WR_SEND, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0, 2, 1 });
}

static void with_bad_rkey(enum ibv_wr_opcode opcode)
{
    struct request r;

    if (!connect_ends(&rc))
        return;
    r = request(opcode, 8);
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
        r.wr.wr.atomic.rkey ^= 0x5a5a5a5a;
    else
        r.wr.wr.rdma.rkey ^= 0x5a5a5a5a;
    recv_into(&b, 0, 8);
    check(post(&a, 0, r), "ibv_post_send");
    send_request(1, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0, 1, 1 });
}

static void bad_rkey_of_write(void)
{
    with_bad_rkey(IBV_WR_RDMA_WRITE);
}

static void bad_rkey_of_read(void)
{
    with_bad_rkey(IBV_WR_RDMA_READ);
}

static void bad_rkey_of_atomic(void)
{
    with_bad_rkey(IBV_WR_ATOMIC_FETCH_AND_ADD);
}

static void odd_atomic(void)
{
    struct request r;

    if (!connect_ends(&rc))
        return;
    r = request(IBV_WR_ATOMIC_FETCH_AND_ADD, 8);
    r.wr.wr.atomic.remote_addr += 4;
    recv_into(&b, 0, 8);
    check(post(&a, 0, r), "ibv_post_send");
    finish((struct due){ 1, 0, 0 }, (struct due){ 0, 1, 1 });
}

static void too_many_reads(void)
{
    struct shape s = rc;

    s.responder_reads = -1;
    if (!connect_ends(&s))
        return;
    recv_into(&b, 0, 8);
    send_request(0, IBV_WR_RDMA_READ, 8);
    finish((struct due){ 1, 0, 0 }, (struct due){ 0, 1, 1 });
}

static void peer_destroyed_with(int a_srq)
{
    struct shape s = { .type = IBV_QPT_RC, .timeout = 10, .retry = 2, .a_srq = a_srq };

    if (!connect_ends(&s))
        return;
    check(ibv_destroy_qp(b.qp), "ibv_destroy_qp");
    b.qp = NULL;
    send_request(0, IBV_WR_RDMA_WRITE, 8);
    send_request(1, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 2, 0, a_srq ? 1 : 0 }, (struct due){ 0 });
}

static void peer_destroyed(void)
{
    peer_destroyed_with(0);
}

static void peer_destroyed_srq(void)
{
    peer_destroyed_with(8);
}

static void peer_in_err(void)
{
    struct shape s = rc;

    s.timeout = 10;
    s.retry = 2;
    if (!connect_ends(&s))
        return;
    check(to_state(&b, IBV_QPS_ERR), "b to ERR");
    send_request(0, IBV_WR_RDMA_WRITE, 8);
    send_request(1, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0 });
}

static void wrong_qpn_with(int a_srq)
{
    struct shape s = { .type = IBV_QPT_RC, .timeout = 10, .retry = 2, .a_srq = a_srq };

    s.dest_flip = 0xff00;
    if (!connect_ends(&s))
        return;
    send_request(0, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 1, 0, a_srq ? 1 : 0 }, (struct due){ 0 });
}

static void wrong_qpn(void)
{
    wrong_qpn_with(0);
}

static void wrong_qpn_srq(void)
{
    wrong_qpn_with(8);
}

static void no_receive(void)
{
    struct shape s = rc;

    s.rnr_retry = 2;
    if (!connect_ends(&s))
        return;
    send_request(0, IBV_WR_SEND, 8);
    send_request(1, IBV_WR_SEND, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0 });
}

static void own_err(void)
{
    if (!connect_ends(&rc))
        return;
    for (int i = 0; i < 3; i++) {
        recv_into(&a, i, 8);
        send_request(i, IBV_WR_SEND, 8);
    }
    check(to_state(&a, IBV_QPS_ERR), "a to ERR");
    recv_into(&a, 3, 8);
    send_request(3, IBV_WR_SEND, 8);
    finish((struct due){ 4, 4, 0 }, (struct due){ 0 });
}

static void drained(void)
{
    if (!connect_ends(&rc))
        return;
    send_request(0, IBV_WR_RDMA_WRITE, 8);
    check(to_state(&a, IBV_QPS_SQD), "a to SQD");
    finish((struct due){ 1, 0, 1 }, (struct due){ 0 });
}

/* Of a QP that takes its receives from an SRQ, in ERR by its own wish; it was used before, and is
 * idle. */
static void last_wqe_of(enum ibv_qp_type type)
{
    struct shape s = { .type = type, .srq = 8 };

    if (!connect_ends(&s))
        return;
    recv_into(&b, 0, 64);
    recv_into(&b, 1, 64);
    if (type != IBV_QPT_UD) {
        send_request(0, IBV_WR_SEND, 8);
        collect((struct due){ 1, 0, 0 }, (struct due){ 0, 1, 0 });
    }
    check(to_state(&b, IBV_QPS_ERR), "b to ERR");
    finish((struct due){ 0 }, (struct due){ 0, 0, 1 });
}

static void last_wqe(void)
{
    last_wqe_of(IBV_QPT_RC);
}

static void last_wqe_uc(void)
{
    last_wqe_of(IBV_QPT_UC);
}

static void last_wqe_ud(void)
{
    last_wqe_of(IBV_QPT_UD);
}

static void last_wqe_by_error(void)
{
    struct shape s = { .type = IBV_QPT_RC, .srq = 8 };
    struct request r;

    if (!connect_ends(&s))
        return;
    recv_into(&b, 0, 8);
    r = request(IBV_WR_RDMA_WRITE, 8);
    r.wr.wr.rdma.rkey ^= 0x5a5a5a5a;
    check(post(&a, 0, r), "ibv_post_send");
    finish((struct due){ 1, 0, 0 }, (struct due){ 0, 0, 2 });
}

static void srq_recv_too_short(void)
{
    struct shape s = { .type = IBV_QPT_RC, .srq = 8 };

    if (!connect_ends(&s))
        return;
    recv_into(&b, 0, 8);
    send_request(0, IBV_WR_SEND, 64);
    finish((struct due){ 1, 0, 0 }, (struct due){ 0, 1, 2 });
}

static void srq_limit(void)
{
    struct shape s = { .type = IBV_QPT_RC, .srq = 8 };
    struct ibv_srq_attr limit = { .srq_limit = 3 };

    if (!connect_ends(&s))
        return;
    for (int i = 0; i < 4; i++)
        recv_into(&b, i, 8);
    check(ibv_modify_srq(b.srq, &limit, IBV_SRQ_LIMIT), "ibv_modify_srq");
    collect((struct due){ 0 }, (struct due){ 0 });
    if (b.event_count)
        printf("early: ");
    for (int i = 0; i < 2; i++)
        send_request(i, IBV_WR_SEND, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0, 2, 1 });
}

/* A CQ that overruns: its end has lost completions, and ends; the other end hears of it. */
static void overrun_of_recvs(void)
{
    struct shape s = { .type = IBV_QPT_RC, .b_entries = 4, .timeout = 10, .retry = 2 };

    if (!connect_ends(&s))
        return;
    for (int i = 0; i < 32; i++)
        recv_into(&b, i, 8);
    for (int i = 0; i < 32; i++)
        send_request(i, IBV_WR_SEND, 8);
    collect((struct due){ 0 }, (struct due){ 0, 0, 2 });
    /* What is behind the overrun fails at the sender, too. */
    check(post(&a, 32, request(IBV_WR_SEND, 8)), "ibv_post_send");
    check(post(&a, 33, request(IBV_WR_SEND, 8)), "ibv_post_send");
    without_counts = true;
    finish((struct due){ 34, 0, 0 }, (struct due){ 0, 0, 2 });
}

static void overrun_of_sends(void)
{
    struct shape s = { .type = IBV_QPT_RC, .a_entries = 4 };

    if (!connect_ends(&s))
        return;
    for (int i = 0; i < 32; i++)
        send_request(i, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 0, 0, 2 }, (struct due){ 0 });
}

static void migrated(void)
{
    struct ibv_qp_attr attr = { .alt_port_num = 1, .alt_timeout = 14 };
    int error;

    if (!connect_ends(&rc))
        return;
    attr.alt_ah_attr = (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = 1,
        .grh = { .dgid = b.gid, .sgid_index = test_gid_index(), .hop_limit = 64 }
    };
    attr.path_mig_state = IBV_MIG_REARM;
    error = ibv_modify_qp(a.qp, &attr, IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE);
    if (error) {
        impossible("ibv_modify_qp with an alternate path", error);
        return;
    }
    attr.path_mig_state = IBV_MIG_REARM;
    attr.alt_ah_attr.grh.dgid = a.gid;
    check(ibv_modify_qp(b.qp, &attr, IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE), "b: REARM");
    send_request(0, IBV_WR_RDMA_WRITE, 8);
    collect((struct due){ 1, 0, 0 }, (struct due){ 0 });
    attr.path_mig_state = IBV_MIG_MIGRATED;
    check(ibv_modify_qp(a.qp, &attr, IBV_QP_PATH_MIG_STATE), "a: MIGRATED");
    send_request(1, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 2, 0, 1 }, (struct due){ 0 });
}

static void bad_window(void)
{
    struct ibv_mw_bind bind = { .wr_id = 0, .send_flags = IBV_SEND_SIGNALED };
    struct ibv_mw *window;
    int error;

    if (!connect_ends(&rc))
        return;
    window = ibv_alloc_mw(a.pd, IBV_MW_TYPE_1);
    if (!window) {
        impossible("ibv_alloc_mw", errno);
        return;
    }
    bind.bind_info = (struct ibv_mw_bind_info){ .mr = a.mr,
                                                .addr = (uintptr_t)a.memory,
                                                .length = BYTES,
                                                .mw_access_flags = IBV_ACCESS_REMOTE_READ };
    error = ibv_bind_mw(a.qp, window, &bind);
    check(error, "ibv_bind_mw");
    finish((struct due){ 1, 0, 0 }, (struct due){ 0 });
    check(ibv_dealloc_mw(window), "ibv_dealloc_mw");
}

#endif
