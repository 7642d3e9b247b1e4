/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random verbs with random values: errors at most, never a crash, never a hang.
 *
 *   any_calls --seed X --seconds S
 *
 * Pointers are right (objects of ours, or NULL where libibverbs may be given NULL); every number is
 * drawn: small, huge, a power of two, off by one, or one that is right. Half of the QPs are brought
 * up the right way and then used wrongly. What was made is destroyed in some order; what is in use
 * must say so, and in the end all of it must go. A call that takes a second is a hang.
 */
#include "any_calls_draw.h"
#include <fcntl.h>
#include <signal.h>

static void access_memory(void)
{
    struct ibv_mr **mr = &PICK(mrs);
    struct ibv_pd *pd = PICK_PD;
    int access = mostly(chance(70) ? 15 : draw() % 32), flags = mostly(1 + draw() % 7);
    uint64_t start = chance(50) ? 0 : draw() % MEMORY;

    if (chance(40))
        END(*mr, ibv_dereg_mr(*mr));
    if (!pd)
        return;
    if (chance(20) && *mr) {
        DO(ibv_rereg_mr(*mr, flags, pd, memory + start, mostly(MEMORY - start), access));
        return;
    }
    /* The memory is the program's own: what lies behind it would be the program's mistake. */
    if (chance(80))
        MAKE(*mr, (ibv_reg_mr)(pd, memory + start,
                               chance(95) ? MEMORY - start - draw() % (MEMORY - start)
                                          : 1ULL << (48 + draw() % 16),
                               access));
    else if (chance(50))
        MAKE(*mr,
             (ibv_reg_mr_iova)(pd, memory + start, draw() % (MEMORY - start), number(), access));
    else
        MAKE(*mr, ibv_alloc_null_mr(pd));
}

static void windows(void)
{
    struct ibv_mw **mw = &PICK(mws);
    struct ibv_qp *qp = PICK(qps);
    struct ibv_mw_bind bind = { .wr_id = draw(),
                                .send_flags = mostly(draw() % 4 << 1),
                                .bind_info = { .mr = PICK(mrs),
                                               .addr = address(),
                                               .length = mostly(draw() % 256),
                                               .mw_access_flags = mostly(draw() % 64) } };

    if (chance(30))
        END(*mw, ibv_dealloc_mw(*mw));
    if (!*mw) {
        struct ibv_pd *pd = PICK_PD;

        if (pd)
            MAKE(*mw, ibv_alloc_mw(pd, mostly(1 + draw() % 2)));
    }
    if (*mw && qp)
        DO(ibv_bind_mw(qp, *mw, &bind));
}

static void queues(void)
{
    struct ibv_cq **cq = &PICK(cqs);
    struct ibv_srq **srq = &PICK(srqs);
    struct ibv_pd *pd = PICK_PD;
    struct ibv_srq_init_attr init = { .attr = { mostly(1 + draw() % 64), mostly(1 + draw() % 4),
                                                number() } };
    struct ibv_srq_attr attr = { mostly(1 + draw() % 64), number(), mostly(draw() % 16) };
    struct ibv_cq_init_attr_ex ex = { .cqe = mostly(1 + draw() % 200),
                                      .cq_context = memory,
                                      .channel = chance(50) ? channel : NULL,
                                      .comp_vector = mostly(0),
                                      .wc_flags = mostly(IBV_WC_STANDARD_FLAGS),
                                      .comp_mask = mostly(draw() % 2),
                                      .flags = mostly(draw() % 2) };

    if (chance(30))
        END(*cq, ibv_destroy_cq(*cq));
    if (chance(30))
        END(*srq, ibv_destroy_srq(*srq));
    /* half a gigabyte of queue is a right wish, which this test does not need */
    if (ex.cqe > 1 << 16 && ex.cqe <= 1 << 22)
        ex.cqe = 1 << 16;
    if (chance(50)) {
        struct ibv_cq_ex *made_ex = NULL;

        if (!*cq) {
            MAKE(made_ex, ibv_create_cq_ex(context, &ex));
            *cq = made_ex ? ibv_cq_ex_to_cq(made_ex) : NULL;
        }
    } else {
        MAKE(*cq, ibv_create_cq(context, ex.cqe, NULL, ex.channel, ex.comp_vector));
    }
    if (pd)
        MAKE(*srq, ibv_create_srq(pd, &init));
    if (*cq && chance(30))
        DO(ibv_resize_cq(*cq, mostly(1 + draw() % 300) & 0xfffff));
    if (*cq)
        DO(ibv_req_notify_cq(*cq, number()));
    if (*srq) {
        DO(ibv_modify_srq(*srq, &attr, mostly(draw() % 4)));
        DO(ibv_query_srq(*srq, &attr));
    }
}

static void others(void)
{
    struct ibv_pd **pd = &PICK_PD;
    struct ibv_ah **ah = &PICK(ahs);
    struct ibv_ah_attr to = {
        .dlid = mostly(0),
        .sl = mostly(0),
        .src_path_bits = mostly(0),
        .static_rate = mostly(0),
        .is_global = mostly(1),
        .port_num = mostly(1),
        .grh = { .flow_label = number(), .sgid_index = mostly(0), .hop_limit = number() }
    };
    struct ibv_device_attr_ex dev;
    struct ibv_query_device_ex_input in = { .comp_mask = mostly(0) };
    struct ibv_port_attr port;
    union ibv_gid gid;
    uint16_t pkey;

    if (chance(20))
        END(*pd, ibv_dealloc_pd(*pd));
    MAKE(*pd, ibv_alloc_pd(context));
    if (DO(ibv_query_gid(context, mostly(1), mostly(0), &to.grh.dgid)) || chance(10))
        to.grh.dgid.raw[draw() % 16] = draw();
    if (chance(30))
        END(*ah, ibv_destroy_ah(*ah));
    if (*pd)
        MAKE(*ah, ibv_create_ah(*pd, &to));
    DO(ibv_query_device_ex(context, chance(50) ? &in : NULL, &dev));
    DO(ibv_query_port(context, number(), &port));
    DO(ibv_query_gid(context, number(), number(), &gid));
    DO(ibv_query_pkey(context, number(), number(), &pkey));
}

static void make_qp(void)
{
    struct ibv_qp **qp = &PICK(qps), *was = *qp;
    struct ibv_qp_init_attr_ex init = { .qp_context = memory,
                                        .send_cq = PICK(cqs),
                                        .recv_cq = PICK(cqs),
                                        .srq = chance(30) ? PICK(srqs) : NULL,
                                        .cap = { mostly(1 + draw() % 32), mostly(1 + draw() % 32),
                                                 mostly(1 + draw() % 4), mostly(1 + draw() % 4),
                                                 mostly(draw() % 128) },
                                        .qp_type = mostly(chance(60) ? IBV_QPT_RC : 3 + draw() % 2),
                                        .sq_sig_all = mostly(draw() % 2),
                                        .comp_mask = mostly(IBV_QP_INIT_ATTR_PD),
                                        .pd = PICK_PD };

    if (chance(40))
        END(*qp, ibv_destroy_qp(*qp));
    if (*qp)
        return;
    if (was)
        builders[qp - qps] = NULL;
    if (chance(40)) {
        init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        init.send_ops_flags =
            mostly(draw() % 2048 &
                   (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ |
                    IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW));
    }
    MAKE(*qp, ibv_create_qp_ex(context, &init));
    if (*qp)
        builders[qp - qps] = ibv_qp_to_qp_ex(*qp);
}

static const int MASKS[] = { 0, [IBV_QPS_INIT] = IBV_QP_PKEY_INDEX | IBV_QP_PORT,
    [IBV_QPS_RTR] = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
    [IBV_QPS_RTS] = IBV_QP_SQ_PSN, [IBV_QPS_SQD] = 0, [IBV_QPS_SQE] = 0, [IBV_QPS_ERR] = 0 };

/* The next state of a QP with right or wrong attributes, or any other change. */
static void modify(struct ibv_qp *qp)
{
    struct ibv_qp *peer = PICK(qps);
    int rc = qp->qp_type == IBV_QPT_RC, ud = qp->qp_type == IBV_QPT_UD;
    struct ibv_qp_attr a = { .qp_state = mostly(chance(80) ? qp->state + 1 : draw() % 8),
                             .cur_qp_state = number(),
                             .path_mtu = mostly(1 + draw() % 5),
                             .qkey = mostly(0x11),
                             .rq_psn = mostly(7),
                             .sq_psn = mostly(7),
                             .dest_qp_num = mostly(peer ? peer->qp_num : 5),
                             .qp_access_flags = mostly(15),
                             .pkey_index = mostly(0),
                             .max_rd_atomic = mostly(4),
                             .max_dest_rd_atomic = mostly(4),
                             .min_rnr_timer = mostly(1),
                             .port_num = mostly(1),
                             .timeout = mostly(8),
                             .retry_cnt = mostly(3),
                             .rnr_retry = mostly(1),
                             .alt_port_num = number(),
                             .alt_timeout = number(),
                             .rate_limit = number(),
                             .path_mig_state = mostly(0),
                             .en_sqd_async_notify = number(),
                             .ah_attr = { .is_global = mostly(1),
                                          .port_num = mostly(1),
                                          .sl = mostly(0),
                                          .dlid = mostly(0),
                                          .grh = { .sgid_index = mostly(0), .hop_limit = 3 } } };
    int mask, s = a.qp_state;

    if (chance(15))
        s = a.qp_state = chance(90) ? IBV_QPS_RESET : IBV_QPS_ERR;
    mask = IBV_QP_STATE | (s > 0 && s < 7 ? MASKS[s] : 0);
    if (s == IBV_QPS_INIT)
        mask |= ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
    if (s == IBV_QPS_RTR && ud)
        mask = IBV_QP_STATE;
    if (rc && s == IBV_QPS_RTR)
        mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    if (rc && s == IBV_QPS_RTS)
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    if (chance(10))
        mask ^= 1 << draw() % 31;
    if (chance(2))
        mask = draw();
    ibv_query_gid(context, 1, 0, &a.ah_attr.grh.dgid);
    if (chance(5))
        a.ah_attr.grh.dgid.raw[draw() % 16] = draw();
    DO(ibv_modify_qp(qp, &a, mask));
}

/* Brings two QPs up the right way, so that there is something to go wrong. */
static void connect_right(struct ibv_qp *a, struct ibv_qp *b)
{
    struct ibv_qp *ends[2] = { a, b };
    int i, s;

    if (a->qp_type != b->qp_type)
        return;
    for (s = IBV_QPS_RESET; s <= IBV_QPS_RTS; s++)
        for (i = 0; i < 2; i++) {
            int rc = a->qp_type == IBV_QPT_RC, ud = a->qp_type == IBV_QPT_UD;
            struct ibv_qp_attr attr = { .qp_state = s,
                                        .path_mtu = 1 + draw() % 5,
                                        .qkey = 0x11,
                                        .dest_qp_num = ends[!i]->qp_num,
                                        .qp_access_flags = 15,
                                        .max_rd_atomic = 4,
                                        .max_dest_rd_atomic = 4,
                                        .min_rnr_timer = 1,
                                        .port_num = 1,
                                        .timeout = 8,
                                        .retry_cnt = 3,
                                        .rnr_retry = 1,
                                        .ah_attr = {
                                            .is_global = 1, .port_num = 1, .grh.hop_limit = 3 } };
            int mask = IBV_QP_STATE | (s == IBV_QPS_RTR && ud ? 0 : MASKS[s]);

            if (s == IBV_QPS_INIT)
                mask |= ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
            if (rc && s == IBV_QPS_RTR)
                mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
            if (rc && s == IBV_QPS_RTS)
                mask |=
                    IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
            ibv_query_gid(ends[!i]->context, 1, 0, &attr.ah_attr.grh.dgid);
            DO(ibv_modify_qp(ends[i], &attr, mask));
        }
}

static void post(struct ibv_qp *qp)
{
    struct ibv_sge sges[8];
    struct ibv_recv_wr recv = { .wr_id = draw(), .sg_list = sges, .num_sge = mostly(draw() % 3) },
                       *bad_recv;
    struct ibv_send_wr wr[3] = { 0 }, *bad;
    struct ibv_srq *srq = PICK(srqs);
    int i, n = 1 + draw() % 3;

    for (i = 0; i < 8; i++)
        sges[i] = (struct ibv_sge){ address(), mostly(draw() % (chance(50) ? 64 : 8192)), key(0) };
    if (recv.num_sge > 8)
        recv.num_sge = 8;
    for (i = 0; i < n; i++) {
        wr[i] = (struct ibv_send_wr){ .wr_id = draw(),
                                      .next = i + 1 < n ? wr + i + 1 : NULL,
                                      .sg_list = sges,
                                      .num_sge = mostly(draw() % 3),
                                      .opcode = mostly(qp->qp_type == IBV_QPT_UD   ? 2 + draw() % 2
                                                       : qp->qp_type == IBV_QPT_UC ? draw() % 4
                                                                                   : draw() % 10),
                                      .send_flags = mostly(draw() % 16),
                                      .imm_data = key(1) };
        if (wr[i].num_sge > 8)
            wr[i].num_sge = 8;
        if (wr[i].opcode == IBV_WR_BIND_MW) {
            wr[i].bind_mw.mw = PICK(mws);
            wr[i].bind_mw.rkey = key(1);
            wr[i].bind_mw.bind_info = (struct ibv_mw_bind_info){ .mr = PICK(mrs),
                                                                 .addr = address(),
                                                                 .length = number(),
                                                                 .mw_access_flags = draw() % 64 };
        }
        if (wr[i].send_flags & IBV_SEND_INLINE)
            sges[0] = sges[1] = sges[2] =
                (struct ibv_sge){ (uintptr_t)memory, mostly(draw() % 600) & 0xffff, 0 };
        if (wr[i].send_flags & IBV_SEND_INLINE && wr[i].num_sge > 1)
            wr[i].num_sge = 1;
        if (qp->qp_type == IBV_QPT_UD) {
            wr[i].wr.ud.ah = PICK(ahs);
            wr[i].wr.ud.remote_qpn = chance(50) && PICK(qps) ? qp->qp_num : number();
            wr[i].wr.ud.remote_qkey = mostly(0x11);
        } else {
            wr[i].wr.atomic.remote_addr = address() & (chance(70) ? ~7ULL : ~0ULL);
            wr[i].wr.atomic.compare_add = draw();
            wr[i].wr.atomic.rkey = key(1);
            if (wr[i].opcode != IBV_WR_ATOMIC_CMP_AND_SWP &&
                wr[i].opcode != IBV_WR_ATOMIC_FETCH_AND_ADD)
                wr[i].wr.rdma.rkey = key(1);
        }
    }
    DO(ibv_post_send(qp, wr, &bad));
    DO(ibv_post_recv(qp, &recv, &bad_recv));
    if (srq)
        DO(ibv_post_srq_recv(srq, &recv, &bad_recv));
}

static void build(struct ibv_qp_ex *qp)
{
    struct ibv_sge sges[8];
    struct ibv_mw *mw = PICK(mws);
    struct ibv_ah *ah = PICK(ahs);
    int i, n = draw() % 5;
    uint64_t ops = qp->wr_send != NULL;

    if (!ops)
        return;
    for (i = 0; i < 8; i++)
        sges[i] = (struct ibv_sge){ address(), mostly(draw() % (chance(50) ? 64 : 8192)), key(0) };
    ibv_wr_start(qp);
    for (i = 0; i < n; i++) {
        qp->wr_id = draw();
        qp->wr_flags = mostly(draw() % 16);
        switch (draw() % 9) {
        case 0: ibv_wr_send(qp); break;
        case 1: ibv_wr_rdma_write(qp, key(1), address()); break;
        case 2: ibv_wr_rdma_read(qp, key(1), address()); break;
        case 3: ibv_wr_local_inv(qp, key(1)); break;
        case 4: ibv_wr_set_inline_data(qp, memory, mostly(draw() % 300) & 0xffff); break;
        case 5: ibv_wr_set_sge(qp, key(0), address(), mostly(100)); break;
        case 6: ibv_wr_set_sge_list(qp, draw() % 8, sges); break;
        case 7:
            if (ah)
                ibv_wr_set_ud_addr(qp, ah, number(), number());
            break;
        default:
            if (mw) {
                struct ibv_mw_bind_info info = { .mr = PICK(mrs),
                                                 .addr = address(),
                                                 .length = number(),
                                                 .mw_access_flags = number() };

                ibv_wr_bind_mw(qp, mw, number(), &info);
            }
        }
    }
    if (chance(20))
        ibv_wr_abort(qp);
    else
        DO(ibv_wr_complete(qp));
}

/* An SQ of invalid memory must not make us wait: what completes is taken, and nothing else is
 * known of it. */
static void poll_all(void)
{
    struct ibv_wc wc[16];
    struct ibv_async_event event;
    struct ibv_cq *cq;
    void *of;
    int i, n;

    for (i = 0; i < MANY; i++) {
        if (!cqs[i])
            continue;
        verb = "ibv_poll_cq";
        n = ibv_poll_cq(cqs[i], 1 + draw() % 16, wc);
        if (n > 16)
            fail("seed %llu: ibv_poll_cq gives %d of 16", (unsigned long long)seed, n);
        /* Below 0 it has overrun, as it may here, and is of no more use. */
        completions += n > 0 ? n : 0;
        while (n-- > 0)
            successes += wc[n].status == IBV_WC_SUCCESS;
    }
    for (i = 0; i < 4 && !ibv_get_cq_event(channel, &cq, &of); i++)
        ibv_ack_cq_events(cq, 1);
    for (i = 0; i < 4 && !ibv_get_async_event(context, &event); i++)
        ibv_ack_async_event(&event);
}

static void queries(struct ibv_qp *qp)
{
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;

    DO(ibv_query_qp(qp, &attr, number(), &init));
    if (attr.qp_state < 0 || attr.qp_state > IBV_QPS_ERR)
        fail("seed %llu: a QP in state %d", (unsigned long long)seed, attr.qp_state);
}

static void step(void)
{
    struct ibv_qp *qp = PICK(qps);
    int i = draw() % MANY;
    uint64_t began = now_us();

    context = contexts[chance(10)];
    switch (draw() % 16) {
    case 0: access_memory(); break;
    case 1: windows(); break;
    case 2: queues(); break;
    case 3: others(); break;
    case 4: make_qp(); break;
    case 5: case 6:
        if (qp && qps[i] && chance(70))
            connect_right(qp, qps[i]);
        else if (qp)
            modify(qp);
        break;
    case 7:
        if (qps[i] && builders[i])
            build(builders[i]);
        break;
    case 8: case 10: case 11: case 12: case 13:
        if (qp)
            post(qp);
        break;
    default:
        if (qp)
            queries(qp);
        poll_all();
    }
    if (now_us() - began > HANG_US)
        fail("seed %llu: %s took %llu ms", (unsigned long long)seed, verb,
             (unsigned long long)(now_us() - began) / 1000);
}

/* All must go, in the right order. */
static void end_all(void)
{
    int i;

    for (i = 0; i < MANY; i++)
        END(qps[i], ibv_destroy_qp(qps[i]));
    for (i = 0; i < MANY; i++) {
        END(mws[i], ibv_dealloc_mw(mws[i]));
        END(ahs[i], ibv_destroy_ah(ahs[i]));
        END(srqs[i], ibv_destroy_srq(srqs[i]));
        END(cqs[i], ibv_destroy_cq(cqs[i]));
    }
    for (i = 0; i < MANY; i++)
        END(mrs[i], ibv_dereg_mr(mrs[i]));
    for (i = 0; i < MANY; i++)
        END(pds[i], ibv_dealloc_pd(pds[i]));
    for (i = 0; i < MANY; i++)
        if (qps[i] || mws[i] || ahs[i] || srqs[i] || cqs[i] || mrs[i] || pds[i])
            fail("seed %llu: an object cannot be destroyed: qp %p mw %p ah %p srq %p cq %p mr %p "
                 "pd %p",
                 (unsigned long long)seed, (void *)qps[i], (void *)mws[i], (void *)ahs[i],
                 (void *)srqs[i], (void *)cqs[i], (void *)mrs[i], (void *)pds[i]);
    memset(builders, 0, sizeof builders);
}

/* Opens a device; one that is dead may be healed soon. */
static struct ibv_context *open_device(struct ibv_device *device)
{
    struct ibv_context *c;
    uint64_t until = now_us() + HANG_US;

    while (!(c = ibv_open_device(device)) && errno == EIO && now_us() < until)
        usleep(1000);
    return c;
}

static void hung(int signal)
{
    (void)signal;
    fprintf(stderr, "FAIL: seed %llu: %s does not return\n", (unsigned long long)seed, verb);
    abort();
}

int main(int argc, char **argv)
{
    struct ibv_device **list;
    uint64_t until, rounds = 0, first;
    int i;

    for (i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--seconds"))
            seconds = strtoull(argv[i + 1], NULL, 0);
        else if (!strcmp(argv[i], "--seed"))
            seed = strtoull(argv[i + 1], NULL, 0);
        else
            fail("usage: any_calls [--seconds S] [--seed X]");
    }
    first = seed;
    signal(SIGALRM, hung);
    list = ibv_get_device_list(NULL);
    if (!list || !list[0] || !list[1])
        fail("two devices are needed");
    memory = aligned_alloc(4096, MEMORY);
    memset(memory, 1, MEMORY);
    for (until = now_us() + seconds * 1000000; now_us() < until || rounds < LEAST_ROUNDS;
         seed++, rounds++) {
        rng = mix(seed);
        for (i = 0; i < 2; i++)
            if (!(contexts[i] = open_device(list[draw() % 2])) ||
                fcntl(contexts[i]->async_fd, F_SETFL, O_NONBLOCK))
                fail("ibv_open_device: %s", strerror(errno));
        context = contexts[0];
        channel = ibv_create_comp_channel(context);
        if (!channel || fcntl(channel->fd, F_SETFL, O_NONBLOCK))
            fail("no channel");
        alarm(HANG_US / 1000000 + 5);
        for (i = 0; i < 3000; i++)
            step();
        end_all();
        if (ibv_destroy_comp_channel(channel) || ibv_close_device(contexts[0]) ||
            ibv_close_device(contexts[1]))
            fail("seed %llu: the channel or the device cannot be closed: %s",
                 (unsigned long long)seed, strerror(errno));
    }
    alarm(0);
    ibv_free_device_list(list);
    printf("{\"calls\": %llu, \"good\": %llu, \"completions\": %llu, \"successes\": %llu, "
           "\"rounds\": %llu, \"first_seed\": %llu}\n",
           (unsigned long long)calls, (unsigned long long)good, (unsigned long long)completions,
           (unsigned long long)successes, (unsigned long long)rounds, (unsigned long long)first);
    return 0;
}
