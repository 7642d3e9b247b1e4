/* SPDX-License-Identifier: Apache-2.0 */
/* The objects of one round of the churn: made, connected, taken down in a random order. */
#ifndef UNBROKEN_TESTS_CHURN_ROUND_H
#define UNBROKEN_TESTS_CHURN_ROUND_H

#include "churn_plan.h"

struct area { /* memory of one QP; the same in all rounds of a thread, registered anew in each */
    uint8_t out[DEPTH][BYTES], in[DEPTH][GRH_BYTES + BYTES], slots[SLOTS][BYTES], source[BYTES], peer_source[BYTES];
    uint8_t stale[STALE_BYTES];
    uint64_t counters[2];
};

struct hello { /* what the ends tell each other of a QP */
    uint32_t qpn, psn, rkey, stale_rkey;
    uint64_t slots, source, counters, stale;
};

struct meeting {
    int32_t ok;
    union ibv_gid gid;
    struct hello qps[MAX_QPS];
};

struct done { /* told once all operations of a life have ended */
    int32_t failed[MAX_QPS], gone;
};

struct posted {
    uint32_t op;
    int signalled;
    uint64_t expect; /* what an atomic must return */
};

struct conn { /* a QP with its work */
    int id, life;
    struct ibv_qp *qp;
    struct ibv_ah *ah;
    struct ibv_mr *mr, *stale;
    struct area *area;
    uint32_t sq, rq, qpn;
    struct hello us, peer;

    uint64_t out_seed, in_seed;
    struct posted fifo[DEPTH];
    uint32_t head, tail, unsignalled, posted, ops; /* of fifo, and of operations */
    uint32_t last_write; /* number of the last WRITE posted, or UINT32_MAX */
    uint64_t added, swapped; /* what the peer's counters hold once all that is posted is done */
    int failed;          /* a send completed with this error */
    int refused;         /* its NIC is dead, and takes nothing any more */
    int gone;            /* ended abruptly: nothing more is posted */

    uint32_t in_next, recvs_posted, recvs_done; /* next operation of the peer; receives, as long as there is no SRQ */
    uint64_t moved_us;
};

struct round {
    struct plan plan;
    int thread, role, tcp, events;
    uint64_t number;
    struct ibv_context *context, *own;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    uint32_t acked[2]; /* events of the two CQs */
    struct conn conns[MAX_QPS];
    union ibv_gid gid, peer_gid;
    uint8_t shared[MAX_QPS * DEPTH]; /* this buffer is in the SRQ, or a QP has it */
    char why[200]; /* the first thing that could not be made */
    uint64_t random;
    int peer_dead, patient;
};

/* Numbers that the peer need not know. */
static inline uint64_t roll(struct round *r)
{
    return r->random = mix(r->random);
}

#define BROKEN(r, c, ...) broken(r, c, __LINE__, __VA_ARGS__)
/* Ends the program with what is wrong, and where. */
__attribute__((noreturn, format(printf, 4, 5))) static void broken(struct round *r, struct conn *c, int line, const char *format, ...)
{
    char text[400];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail("thread %d, round %llu (seed %#llx, %s, device %d%s%s), QP %d (%#x, life %d, sent %u of %u): %s [line %d]", r->thread,
         (unsigned long long)r->number, (unsigned long long)r->plan.seed,
         r->plan.type == IBV_QPT_RC ? "RC" : r->plan.type == IBV_QPT_UC ? "UC" : "UD", r->plan.device, r->srq ? ", SRQ" : "",
         r->channel ? ", events" : "", c ? c->id : -1, c ? c->qpn : 0, c ? c->life : 0, c ? c->posted : 0, c ? c->ops : 0, text, line);
}

/* Notes that something could not be made, as happens on a dead NIC. Gives -1. */
__attribute__((format(printf, 2, 3))) static int cannot(struct round *r, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(r->why, sizeof r->why, format, args);
    va_end(args);
    return -1;
}

static int make_shared(struct round *r, struct ibv_context *shared)
{
    struct plan *p = &r->plan;
    struct ibv_srq_init_attr srq = { .attr = { .max_wr = p->qps * DEPTH, .max_sge = 1 } };
    int entries = p->qps * DEPTH * 2 + 16;

    r->context = r->own ? r->own : shared;
    r->pd = ibv_alloc_pd(r->context);
    if (!r->pd)
        return cannot(r, "ibv_alloc_pd: %s", strerror(errno));
    if (r->events && !(r->channel = ibv_create_comp_channel(r->context)))
        return cannot(r, "ibv_create_comp_channel: %s", strerror(errno));
    r->send_cq = ibv_create_cq(r->context, entries, r, r->channel, 0);
    r->recv_cq = p->one_cq ? r->send_cq : ibv_create_cq(r->context, entries, r, r->channel, 0);
    if (!r->send_cq || !r->recv_cq)
        return cannot(r, "ibv_create_cq: %s", strerror(errno));
    if (p->srq && !(r->srq = ibv_create_srq(r->pd, &srq)))
        return cannot(r, "ibv_create_srq: %s", strerror(errno));
    if (ibv_query_gid(r->context, 1, 0, &r->gid))
        return cannot(r, "ibv_query_gid: %s", strerror(errno));
    return 0;
}

static int make_qp(struct round *r, struct conn *c)
{
    struct ibv_qp_init_attr init = { .qp_context = c, .send_cq = r->send_cq, .recv_cq = r->recv_cq, .srq = r->srq,
                                     .qp_type = r->plan.type, .cap = { c->sq, c->rq, 2, 1, MAX_INLINE } };

    c->qp = ibv_create_qp(r->pd, &init);
    if (!c->qp)
        return cannot(r, "ibv_create_qp: %s", strerror(errno));
    c->qpn = c->us.qpn = c->qp->qp_num;
    return 0;
}

static int make_conn(struct round *r, struct conn *c)
{
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    struct area *a = c->area;

    c->sq = 1 + roll(r) % DEPTH;
    c->rq = 1 + roll(r) % DEPTH;
    if (r->plan.stale) {
        /* Two keys of the same memory, one of which is no more when the peer hears of it. */
        c->stale = ibv_reg_mr(r->pd, a->stale, sizeof a->stale, access);
        if (!c->stale)
            return cannot(r, "ibv_reg_mr: %s", strerror(errno));
        c->us.stale_rkey = c->stale->rkey;
        c->us.stale = (uintptr_t)a->stale;
        if (ibv_dereg_mr(c->stale))
            return cannot(r, "ibv_dereg_mr fails");
        c->stale = NULL;
        memset(a->stale, 0x5a, sizeof a->stale);
    }
    c->mr = ibv_reg_mr(r->pd, a, sizeof *a, access);
    if (!c->mr)
        return cannot(r, "ibv_reg_mr: %s", strerror(errno));
    if (r->plan.stale && (c->mr->rkey == c->us.stale_rkey))
        BROKEN(r, c, "the key %#x is given again at once", c->mr->rkey);
    c->us.rkey = c->mr->rkey;
    c->us.slots = (uintptr_t)a->slots;
    c->us.source = (uintptr_t)a->source;
    c->us.counters = (uintptr_t)a->counters;
    return make_qp(r, c);
}

/* Content and counts of a new connection. */
static void begin_life(struct round *r, struct conn *c, int life)
{
    c->life = life;
    c->out_seed = qp_seed(&r->plan, r->role, c->id, life);
    c->in_seed = qp_seed(&r->plan, !r->role, c->id, life);
    c->head = c->tail = c->unsignalled = c->posted = c->in_next = c->recvs_posted = c->recvs_done = 0;
    c->ops = r->plan.ops;
    c->last_write = UINT32_MAX;
    c->added = c->swapped = c->failed = c->refused = c->gone = 0;
    c->us.psn = roll(r) & 0xffffff;
    memset(c->area->counters, 0, sizeof c->area->counters);
    content_make(c->area->source, BYTES, c->out_seed, 7);
    content_make(c->area->peer_source, BYTES, c->in_seed, 7);
    c->moved_us = now_us();
}

static int to_state(struct round *r, struct conn *c, struct ibv_qp_attr *a, int mask, const char *state)
{
    int e = ibv_modify_qp(c->qp, a, mask | IBV_QP_STATE);

    return e ? cannot(r, "QP %d to %s: %s", c->id, state, strerror(e)) : 0;
}

static int to_init(struct round *r, struct conn *c)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = (uint32_t)r->plan.seed & 0x7fffffff };
    int mask = IBV_QP_PKEY_INDEX | IBV_QP_PORT;

    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    if (r->plan.type == IBV_QPT_RC)
        a.qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    return to_state(r, c, &a, mask | (r->plan.type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS), "INIT");
}

static int connect_qp(struct round *r, struct conn *c)
{
    struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1, .grh = { .dgid = r->peer_gid, .hop_limit = 64 } };
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = 1 + roll(r) % 5, .dest_qp_num = c->peer.qpn, .rq_psn = c->peer.psn,
                             .max_dest_rd_atomic = 4, .min_rnr_timer = 1, .ah_attr = ah };
    int rc = r->plan.type == IBV_QPT_RC, ud = r->plan.type == IBV_QPT_UD;
    int rtr = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    int rts = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;

    a.path_mtu = 1 + draw(r->plan.seed, 50 + c->id) % 5; /* the same at both ends */
    if (to_state(r, c, &a, rc ? rtr | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : ud ? 0 : rtr, "RTR"))
        return -1;
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = c->us.psn, .max_rd_atomic = 4 };
    a.timeout = r->patient ? 15 : 12; /* where nothing may fail, a busy machine must not either */
    if (to_state(r, c, &a, IBV_QP_SQ_PSN | (rc ? rts : 0), "RTS"))
        return -1;
    if (ud && !c->ah && !(c->ah = ibv_create_ah(r->pd, &ah)))
        return cannot(r, "ibv_create_ah: %s", strerror(errno));
    return 0;
}

/* Tries everything in a random order until all is gone. What others still need must say EBUSY. */
static void take_down(struct round *r)
{
    uint64_t until = now_us() + 10 * 1000000;
    int i, left = 1, e = 0;

    while (left) {
        left = 0;
        for (i = 0; i < 4 + 4 * MAX_QPS; i++) {
            struct conn *c = r->conns + i / 4 % MAX_QPS;
            int in_use = 0, j;

            for (j = 0; j < MAX_QPS; j++)
                in_use |= !!r->conns[j].qp;
#define TAKE(object, destroy, busy) \
    if (object) { \
        if (roll(r) % 3) { left = 1; continue; } \
        e = destroy(object); \
        if (e && e != EBUSY) BROKEN(r, c, #destroy ": %s", strerror(e)); \
        if (!e && (busy)) BROKEN(r, c, #destroy " succeeds, though others need it"); \
        if (e && !(busy)) BROKEN(r, c, #destroy ": EBUSY, though nobody needs it"); \
        if (e) left = 1; else object = NULL; \
    }
            if (i >= 4 * MAX_QPS) {
                int mrs = 0;

                for (j = 0; j < MAX_QPS; j++)
                    mrs |= !!r->conns[j].mr; /* address handles hold no PD, as with most hardware */
                switch (i % 4) {
                case 0: {
                    struct ibv_cq *two = r->recv_cq == r->send_cq ? NULL : r->recv_cq;

                    if (!two)
                        r->recv_cq = NULL;
                    if (!in_use && two) {
                        ibv_ack_cq_events(two, r->acked[1]);
                        r->acked[1] = 0;
                    }
                    TAKE(r->recv_cq, ibv_destroy_cq, in_use);
                    break;
                }
                case 1:
                    if (!in_use && r->send_cq) {
                        ibv_ack_cq_events(r->send_cq, r->acked[0]);
                        r->acked[0] = 0;
                    }
                    if (r->recv_cq == r->send_cq)
                        r->recv_cq = NULL;
                    TAKE(r->send_cq, ibv_destroy_cq, in_use);
                    break;
                case 2:
                    TAKE(r->srq, ibv_destroy_srq, in_use);
                    TAKE(r->channel, ibv_destroy_comp_channel, r->send_cq || r->recv_cq);
                    break;
                case 3: TAKE(r->pd, ibv_dealloc_pd, in_use || r->srq || mrs);
                }
                continue;
            }
            switch (i % 4) {
            case 0: TAKE(c->qp, ibv_destroy_qp, 0); break;
            case 1: TAKE(c->mr, ibv_dereg_mr, 0); break;
            case 2: TAKE(c->ah, ibv_destroy_ah, 0); break;
            case 3: TAKE(c->stale, ibv_dereg_mr, 0); break;
            }
#undef TAKE
        }
        if (now_us() > until)
            BROKEN(r, NULL, "cannot take everything down: PD %p, CQs %p %p, SRQ %p, channel %p", (void *)r->pd, (void *)r->send_cq,
                   (void *)r->recv_cq, (void *)r->srq, (void *)r->channel);
    }
    if (r->own && (e = ibv_close_device(r->own)))
        BROKEN(r, NULL, "ibv_close_device: %s", strerror(e));
    r->own = NULL;
}

#endif
