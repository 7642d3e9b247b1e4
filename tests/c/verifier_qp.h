/* SPDX-License-Identifier: Apache-2.0 */
/* What the verifier keeps of a QP and of the run, and how its QPs are made and connected. */
#ifndef UNBROKEN_TESTS_VERIFIER_QP_H
#define UNBROKEN_TESTS_VERIFIER_QP_H

#include "verifier_stream.h"
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <signal.h>

struct counters { /* written by the peer, in one WRITE */
    uint64_t received; /* messages that consumed a receive and were checked */
    uint64_t consumed; /* WRITEs that were checked, and whose slots are free */
};

struct posted { /* a send WR that is outstanding */
    uint64_t wr_id, key, number;
    enum kind kind;
    uint32_t len, slot;
    int signalled;
};

struct meeting { /* what the ends tell each other of a QP */
    uint32_t qpn, psn, rkey, pad;
    uint64_t ring, counters, regions;
    union ibv_gid gid;
};

struct memory { /* one region for each QP */
    uint8_t slots[SLOTS][MAX_BYTES];
    uint8_t recvs[RECVS][MAX_BYTES];
    uint8_t ring[RING][MAX_BYTES];
    uint8_t regions[REGIONS][MAX_BYTES];
    volatile struct counters from_peer;
};

struct qp {
    int id;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    struct memory *mem;
    struct meeting us, peer;

    /* sending */
    struct stream out;
    struct step next;      /* the step that waits for room */
    int has_next, end_posted, end_done;
    struct posted fifo[SQ];
    uint64_t head, tail;   /* of fifo; tail is also the number of WRs posted, and the next wr_id */
    uint64_t data_posted, data_done, sent_messages, sent_writes;
    uint32_t unsignalled;
    struct counters peer_has; /* the highest counters seen */
    uint64_t version[REGIONS];     /* of the peer's regions, as told by our bumps */
    /* a bump is under way until the peer has checked so many messages */
    uint64_t pending_until[REGIONS];

    /* receiving */
    struct stream in;
    uint64_t in_messages, in_writes, freed_writes, told_messages, told_writes, recvs_done,
        recvs_posted;
    uint64_t own_version[REGIONS];
    uint32_t painted[RING]; /* bytes of each slot that were painted over when it was consumed */
    int end_received;
    uint8_t shared[RECVS]; /* with --srq: this buffer of ours is in the queue, or some QP has it */

    /* after a failure, with --no-replay */
    int send_failed, recv_failed, last_wqe;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_srq *srq;
static struct qp *qps;
static int tcp;
static volatile sig_atomic_t stop_signal;
static uint64_t verified_messages, verified_bytes, completions, events, started_us, moved_us,
    first_error_us;
static int stopping, first_error_status;

/* ---- set-up ---- */

static void open_device(void)
{
    int i, count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);

    for (i = 0; list && i < count && !context; i++)
        if (!strcmp(ibv_get_device_name(list[i]), opt.device))
            context = ibv_open_device(list[i]);
    if (!context)
        fail("no device %s among %d", opt.device, list ? count : 0);
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    if (opt.events) {
        channel = ibv_create_comp_channel(context);
        if (!channel || fcntl(channel->fd, F_SETFL, O_NONBLOCK))
            fail("cannot make a completion channel: %s", strerror(errno));
    }
    send_cq = pd ? ibv_create_cq(context, opt.qps * SQ, NULL, channel, 0) : NULL;
    recv_cq = send_cq ? ibv_create_cq(context, opt.qps * RECVS, NULL, channel, 0) : NULL;
    if (!recv_cq)
        fail("cannot make a protection domain and completion queues: %s", strerror(errno));
    if (opt.srq) {
        struct ibv_srq_init_attr init = { .attr = { .max_wr = opt.qps * RECVS, .max_sge = 1 } };

        srq = ibv_create_srq(pd, &init);
        if (!srq || fcntl(context->async_fd, F_SETFL, O_NONBLOCK))
            fail("cannot make a shared receive queue: %s", strerror(errno));
    }
}

/* Posts the next receive of a QP; with --srq, one into the buffer of QP `q` that is free again. */
static void post_receive(struct qp *q, uint32_t buffer)
{
    uint64_t n = opt.srq ? buffer : q->recvs_posted++;
    struct ibv_sge sge = { (uintptr_t)q->mem->recvs[n % RECVS], MAX_BYTES, q->mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = (uint64_t)q->id << 48 | n, .sg_list = &sge, .num_sge = 1 },
                       *bad;
    int e = opt.srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(q->qp, &wr, &bad);

    if (e && !first_error_us)
        fail("QP %d: post_recv: %s", q->id, strerror(e));
    q->shared[n % RECVS] = opt.srq;
}

/* The QP that a completion of a shared receive is of. The receive must be posted, and is free
 * again. */
static struct qp *taker(const struct ibv_wc *wc, struct qp *owner, uint64_t buffer)
{
    int i;

    if (buffer >= RECVS || !owner->shared[buffer])
        fail("receive %llu of the buffers of QP %d completed twice, or was never posted",
             (unsigned long long)buffer, owner->id);
    owner->shared[buffer] = 0;
    for (i = 0; i < opt.qps; i++)
        if (qps[i].us.qpn == wc->qp_num)
            return qps + i;
    fail("a receive carries QPN %#x, which is none of ours", wc->qp_num);
}

/* What has happened to the shared receive queue and its QPs. Gives the number of QPs that say
 * they have failed. */
static int look_at_events(void)
{
    struct ibv_async_event event;
    int failed = 0;

    while (!ibv_get_async_event(context, &event)) {
        if (event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED)
            fail("receives of the shared queue are lost");
        if (event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED) {
            struct qp *q = event.element.qp->qp_context;

            if (q->last_wqe || !opt.no_replay)
                fail("QP %d: IBV_EVENT_QP_LAST_WQE_REACHED, %s", q->id,
                     q->last_wqe ? "again" : "but it must not fail");
            q->last_wqe = ++failed;
        }
        ibv_ack_async_event(&event);
    }
    return failed;
}

/* With no QP left, every receive that has not completed must be in the queue: a limit of so many
 * is reached at once if one is not. */
static void check_shared(void)
{
    struct ibv_srq_attr attr = { .srq_limit = 0 };
    int i, b;

    for (i = 0; i < opt.qps; i++)
        for (b = 0; b < RECVS; b++)
            attr.srq_limit += qps[i].shared[b];
    if (ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT))
        fail("cannot arm the limit of the shared receive queue: %s", strerror(errno));
    look_at_events();
    b = attr.srq_limit;
    if (ibv_query_srq(srq, &attr) || attr.srq_limit != (uint32_t)b)
        fail("the limit of the shared receive queue is not armed any more");
}

static void make_qp(struct qp *q)
{
    struct ibv_qp_init_attr init = { .qp_context = q,
                                     .send_cq = send_cq,
                                     .recv_cq = recv_cq,
                                     .srq = srq,
                                     .qp_type = IBV_QPT_RC,
                                     .cap = { SQ, RECVS, 2, 1, sizeof(struct counters) } };
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    uint32_t r;

    q->mem = aligned_alloc(4096, (sizeof(struct memory) + 4095) / 4096 * 4096);
    if (!q->mem)
        fail("out of memory");
    memset(q->mem, 0, sizeof *q->mem);
    q->mr = ibv_reg_mr(pd, q->mem, sizeof *q->mem, access);
    q->qp = q->mr ? ibv_create_qp(pd, &init) : NULL;
    if (!q->qp)
        fail("cannot make QP %d: %s", q->id, strerror(errno));
    for (r = 0; r < REGIONS; r++)
        content_make(q->mem->regions[r], MAX_BYTES, region_key(role, q->id, r, 0), 0);
    q->out.key = stream_key(role, q->id);
    q->in.key = stream_key(!role, q->id);
    q->us = (struct meeting){ .qpn = q->qp->qp_num,
                              .psn = mix(opt.seed + q->id * 2 + role) & 0xffffff,
                              .rkey = q->mr->rkey,
                              .ring = (uintptr_t)q->mem->ring,
                              .regions = (uintptr_t)q->mem->regions,
                              .counters = (uintptr_t)&q->mem->from_peer };
    if (ibv_query_gid(context, 1, opt.gid_index, &q->us.gid))
        fail("no GID at index %d", opt.gid_index);
}

static void connect_qp(struct qp *q)
{
    struct ibv_port_attr port;
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
    int i, e;

    if (ibv_query_port(context, 1, &port))
        fail("query_port: %s", strerror(errno));
    e = ibv_modify_qp(q->qp, &a,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (e)
        fail("to INIT: %s", strerror(e));
    for (i = 0; i < RECVS; i++)
        post_receive(q, i);
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = port.active_mtu,
                              .dest_qp_num = q->peer.qpn,
                              .rq_psn = q->peer.psn,
                              .max_dest_rd_atomic = 4,
                              .min_rnr_timer = 1 };
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = q->peer.gid;
    a.ah_attr.grh.sgid_index = opt.gid_index;
    a.ah_attr.grh.hop_limit = 64;
    e = ibv_modify_qp(q->qp, &a,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (e)
        fail("to RTR: %s", strerror(e));
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS,
                              .timeout = 14,
                              .retry_cnt = 7,
                              .rnr_retry = 7,
                              .sq_psn = q->us.psn,
                              .max_rd_atomic = 4 };
    e = ibv_modify_qp(q->qp, &a,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    if (e)
        fail("to RTS: %s", strerror(e));
}

#endif
