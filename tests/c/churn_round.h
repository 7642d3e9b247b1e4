/* SPDX-License-Identifier: Apache-2.0 */
/* The objects of one round of the churn: made, connected, taken down in a random order. */
#ifndef UNBROKEN_TESTS_CHURN_ROUND_H
#define UNBROKEN_TESTS_CHURN_ROUND_H

#include "churn_plan.h"
#include <stddef.h>

struct area { /* memory of one QP; the same in all rounds of a thread, registered anew in each */
    uint8_t out[DEPTH][BYTES], in[DEPTH][GRH_BYTES + BYTES], slots[SLOTS][BYTES], source[BYTES],
        peer_source[BYTES];
    uint8_t scratch[SCRATCH]; /* behind keys that change */
    uint64_t counters[2];
};

struct hello { /* what the ends tell each other of a QP */
    uint32_t qpn, psn, rkey;
    uint64_t slots, source, counters;
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
    enum ibv_wc_opcode local; /* of a binding, or of its end */
    uint64_t expect; /* what an atomic must return */
};

struct conn { /* a QP with its work */
    int id, life;
    struct ibv_qp *qp;
    struct ibv_qp_ex *extended; /* the same, if it was made with builders */
    struct ibv_ah *ah;
    struct ibv_mr *mr, *scratch;
    /* over part of `scratch`, over all of `mr`, and of operations in the traffic */
    struct ibv_mw *mw, *wide, *between;
    struct area *area;
    uint64_t start; /* the address of `area` under the keys of `mr` */
    uint32_t sq, rq, qpn;
    struct hello us, peer;

    uint64_t out_seed, in_seed;
    struct posted fifo[DEPTH];
    uint32_t head, tail, unsignalled, posted, ops; /* of fifo, and of operations */
    uint32_t last_write; /* number of the last WRITE posted, or UINT32_MAX */
    uint32_t between_key;
    int bound;           /* as far as posted */
    uint64_t added, swapped; /* what the peer's counters hold once all that is posted is done */
    int failed;          /* a send completed with this error */
    int refused;         /* its NIC is dead, and takes nothing any more */
    int gone;            /* ended abruptly: nothing more is posted */

    /* next operation of the peer; receives, as long as there is no SRQ */
    uint32_t in_next, recvs_posted, recvs_done;
    uint64_t moved_us;

    /* WRs that offer or use keys; the first that failed, and how */
    uint32_t keys_posted, keys_done;
    enum ibv_wc_status keys_status;
    uint32_t invalidated; /* the key that a SEND of the peer has taken away */
};

struct round {
    struct plan plan;
    int thread, role, tcp, events, extended_cqs, entries;
    uint64_t number;
    struct ibv_context *context, *own;
    struct ibv_pd *pd, *other_pd;
    struct ibv_mr *null;
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
    /* what the thread keeps on each device; the same of the round's, if the round uses it */
    struct kept *keeper, *kept;
};

struct kept { /* what a thread has on a device for longer than a round */
    struct ibv_pd *pd;
    struct ibv_mr *mrs[MAX_QPS];
    struct ibv_mr were[MAX_QPS]; /* what they were when they were made, since nothing changes it */
    uint64_t starts[MAX_QPS];
};

/* Numbers that the peer need not know. */
static inline uint64_t roll(struct round *r)
{
    return r->random = mix(r->random);
}

#define BROKEN(r, c, ...) broken(r, c, __LINE__, __VA_ARGS__)
/* Ends the program with what is wrong, and where. */
__attribute__((noreturn, format(printf, 4, 5))) static void
broken(struct round *r, struct conn *c, int line, const char *format, ...)
{
    char text[400];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail("thread %d, round %llu (seed %#llx, %s, device %d%s%s), QP %d (%#x, life %d, sent %u of "
         "%u): %s [line %d]",
         r->thread, (unsigned long long)r->number, (unsigned long long)r->plan.seed,
         r->plan.type == IBV_QPT_RC   ? "RC"
         : r->plan.type == IBV_QPT_UC ? "UC"
                                      : "UD",
         r->plan.device, r->srq ? ", SRQ" : "", r->channel ? ", events" : "", c ? c->id : -1,
         c ? c->qpn : 0, c ? c->life : 0, c ? c->posted : 0, c ? c->ops : 0, text, line);
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

static struct ibv_cq *make_cq(struct round *r)
{
    struct ibv_cq_init_attr_ex a = { .cqe = r->entries,
                                     .cq_context = r,
                                     .channel = r->channel,
                                     .wc_flags = IBV_WC_STANDARD_FLAGS,
                                     .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
                                     .flags =
                                         roll(r) % 2 ? IBV_CREATE_CQ_ATTR_SINGLE_THREADED : 0 };
    struct ibv_cq_ex *made;

    if (!r->extended_cqs)
        return ibv_create_cq(r->context, r->entries, r, r->channel, 0);
    made = ibv_create_cq_ex(r->context, &a);
    counts[C_create_cq_ex] += !!made;
    return made ? ibv_cq_ex_to_cq(made) : NULL;
}

static int make_shared(struct round *r, struct ibv_context *shared)
{
    struct plan *p = &r->plan;
    struct ibv_srq_init_attr srq = { .attr = { .max_wr = p->qps * DEPTH, .max_sge = 1 } };

    r->entries = p->qps * DEPTH * 2 + 16;
    r->context = r->own ? r->own : shared;
    r->pd = r->kept ? r->kept->pd : ibv_alloc_pd(r->context);
    r->other_pd = ibv_alloc_pd(r->context);
    if (!r->pd || !r->other_pd)
        return cannot(r, "ibv_alloc_pd: %s", strerror(errno));
    if (!chaos && !(r->null = ibv_alloc_null_mr(r->pd)))
        return cannot(r, "ibv_alloc_null_mr: %s", strerror(errno));
    if (r->events && !(r->channel = ibv_create_comp_channel(r->context)))
        return cannot(r, "ibv_create_comp_channel: %s", strerror(errno));
    r->send_cq = make_cq(r);
    r->recv_cq = p->one_cq ? r->send_cq : make_cq(r);
    if (!r->send_cq || !r->recv_cq)
        return cannot(r, "ibv_create_cq: %s", strerror(errno));
    if (p->srq && !(r->srq = ibv_create_srq(r->pd, &srq)))
        return cannot(r, "ibv_create_srq: %s", strerror(errno));
    if (ibv_query_gid(r->context, 1, test_gid_index(), &r->gid))
        return cannot(r, "ibv_query_gid: %s", strerror(errno));
    return 0;
}

static int make_qp(struct round *r, struct conn *c)
{
    static const uint64_t ud = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM,
                          uc = ud | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
                          rc = uc | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
                               IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD,
                          windows = rc | IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_LOCAL_INV |
                                    IBV_QP_EX_WITH_BIND_MW;
    enum ibv_qp_type type = r->plan.type;
    struct ibv_qp_init_attr init = { .qp_context = c,
                                     .send_cq = r->send_cq,
                                     .recv_cq = r->recv_cq,
                                     .srq = r->srq,
                                     .qp_type = type,
                                     .cap = { c->sq, c->rq, 2, 1, MAX_INLINE } };
    struct ibv_qp_init_attr_ex ex = { .qp_context = c,
                                      .send_cq = r->send_cq,
                                      .recv_cq = r->recv_cq,
                                      .srq = r->srq,
                                      .qp_type = type,
                                      .cap = init.cap,
                                      .pd = r->pd,
                                      .comp_mask =
                                          IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                                      .send_ops_flags = type == IBV_QPT_UD   ? ud
                                                        : type == IBV_QPT_UC ? uc
                                                        : chaos              ? rc
                                                                             : windows };

    c->extended = NULL;
    if (roll(r) % 2) {
        c->qp = ibv_create_qp(r->pd, &init);
    } else if ((c->qp = ibv_create_qp_ex(r->context, &ex))) {
        c->extended = ibv_qp_to_qp_ex(c->qp);
        if (!c->extended)
            BROKEN(r, c, "ibv_qp_to_qp_ex gives NULL for an extended QP");
        counts[C_create_qp_ex]++;
    }
    if (!c->qp)
        return cannot(r, "ibv_create_qp: %s", strerror(errno));
    c->qpn = c->us.qpn = c->qp->qp_num;
    return 0;
}

enum {
    ALL_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                 IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND
};
#define ACCESS (chaos ? ALL_ACCESS & ~IBV_ACCESS_MW_BIND : ALL_ACCESS)

/* The region of a QP's memory: by addresses, from 0 or from elsewhere on, or one that was
 * something else before. */
static struct ibv_mr *make_region(struct round *r, struct conn *c)
{
    struct area *a = c->area;
    struct ibv_mr *mr, was;

    c->start = (uintptr_t)a;
    switch (roll(r) % 4) {
    case 0: return ibv_reg_mr(r->pd, a, sizeof *a, ACCESS);
    case 1:
        counts[C_zero_based_mr]++;
        c->start = 0;
        return ibv_reg_mr(r->pd, a, sizeof *a, ACCESS | IBV_ACCESS_ZERO_BASED);
    case 2:
        counts[C_iova_mr]++;
        c->start = (roll(r) % (1 << 20) << 12) + c->start % 4096;
        return ibv_reg_mr_iova(r->pd, a, sizeof *a, c->start, ACCESS);
    }
    mr = ibv_reg_mr(r->other_pd, a->scratch, 1 + roll(r) % SCRATCH,
                    roll(r) % 2 ? IBV_ACCESS_LOCAL_WRITE : 0);
    if (!mr)
        return NULL;
    was = *mr;
    if (ibv_rereg_mr(mr,
                     IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD |
                         IBV_REREG_MR_CHANGE_ACCESS,
                     r->pd, a, sizeof *a, ACCESS))
        BROKEN(r, c, "ibv_rereg_mr: %s", strerror(errno));
    if (mr->lkey != was.lkey || mr->rkey != was.rkey || mr->pd != r->pd || mr->addr != a ||
        mr->length != sizeof *a)
        BROKEN(r, c, "ibv_rereg_mr leaves keys %#x and %#x, PD %p, %zu bytes at %p", mr->lkey,
               mr->rkey, (void *)mr->pd, mr->length, mr->addr);
    counts[C_rereg_mr]++;
    return mr;
}

/* The address of a place in a QP's memory under the keys of its region. */
static uint64_t at(const struct conn *c, const void *place)
{
    return c->start + ((const uint8_t *)place - (const uint8_t *)c->area);
}

/* What the peer is told of a QP's memory: its key, and where things are if the memory begins at
 * `start`. */
static void tell_of_memory(struct conn *c, uint32_t rkey, uint64_t start)
{
    c->us.rkey = rkey;
    c->us.slots = start + offsetof(struct area, slots);
    c->us.source = start + offsetof(struct area, source);
    c->us.counters = start + offsetof(struct area, counters);
}

/* A window for the operations of a new connection: where an earlier one has left its own nobody
 * knows. */
static int renew_between(struct round *r, struct conn *c)
{
    if (c->between && ibv_dealloc_mw(c->between))
        BROKEN(r, c, "ibv_dealloc_mw fails");
    c->bound = 0;
    c->between = ibv_alloc_mw(r->pd, IBV_MW_TYPE_2);
    if (!c->between)
        return cannot(r, "ibv_alloc_mw: %s", strerror(errno));
    c->between_key = c->between->rkey;
    return 0;
}

/* The region of a QP's memory that an earlier round has made, or will be kept from now on. */
static struct ibv_mr *kept_region(struct round *r, struct conn *c)
{
    struct kept *k = r->kept;
    struct ibv_mr *mr = k->mrs[c->id], *was = k->were + c->id;

    if (!mr) {
        mr = k->mrs[c->id] = make_region(r, c);
        if (mr)
            *was = *mr;
        k->starts[c->id] = c->start;
        return mr;
    }
    if (mr->lkey != was->lkey || mr->rkey != was->rkey || mr->addr != was->addr ||
        mr->length != was->length)
        BROKEN(r, c, "a region that is kept had keys %#x and %#x, and has %#x and %#x now",
               was->lkey, was->rkey, mr->lkey, mr->rkey);
    c->start = k->starts[c->id];
    counts[C_kept_mr]++;
    return mr;
}

static int make_conn(struct round *r, struct conn *c)
{
    c->sq = 1 + roll(r) % DEPTH;
    c->rq = 1 + roll(r) % DEPTH;
    c->mr = r->kept ? kept_region(r, c) : make_region(r, c);
    c->scratch = ibv_reg_mr(r->pd, c->area->scratch, SCRATCH, ACCESS);
    if (c->mr && c->scratch && r->plan.binds && renew_between(r, c))
        return -1;
    if (!c->mr || !c->scratch)
        return cannot(r, "ibv_reg_mr: %s", strerror(errno));
    memset(c->area->scratch, CANARY, SCRATCH);
    tell_of_memory(c, c->mr->rkey, c->start);
    return make_qp(r, c);
}

/* Content and counts of a new connection. */
static void begin_life(struct round *r, struct conn *c, int life)
{
    c->life = life;
    c->out_seed = qp_seed(&r->plan, r->role, c->id, life);
    c->in_seed = qp_seed(&r->plan, !r->role, c->id, life);
    c->head = c->tail = c->unsignalled = c->posted = c->in_next = c->recvs_posted = c->recvs_done =
        0;
    c->ops = r->plan.ops;
    c->last_write = UINT32_MAX;
    c->added = c->swapped = c->failed = c->refused = c->gone = 0;
    c->keys_posted = c->keys_done = c->keys_status = 0;
    c->us.psn = roll(r) & 0xffffff;
    memset(c->area->counters, 0, sizeof c->area->counters);
    if (chaos)
        memset(c->area->slots, 0, sizeof c->area->slots);
    content_make(c->area->source, BYTES, c->out_seed, 7);
    content_make(c->area->peer_source, BYTES, c->in_seed, 7);
    c->moved_us = now_us();
}

static int to_state(struct round *r, struct conn *c, struct ibv_qp_attr *a, int mask,
                    const char *state)
{
    int e = ibv_modify_qp(c->qp, a, mask | IBV_QP_STATE);

    return e ? cannot(r, "QP %d to %s: %s", c->id, state, strerror(e)) : 0;
}

/* Each life has its own: a datagram may be late, as on any network, and the QPN is the same. */
static uint32_t qkey_of(const struct round *r, const struct conn *c)
{
    return ((uint32_t)r->plan.seed + (uint32_t)c->life) & 0x7fffffff;
}

static int to_init(struct round *r, struct conn *c)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = qkey_of(r, c) };
    int mask = IBV_QP_PKEY_INDEX | IBV_QP_PORT;

    a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    if (r->plan.type == IBV_QPT_RC)
        a.qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    return to_state(
        r, c, &a, mask | (r->plan.type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS), "INIT");
}

static int connect_qp(struct round *r, struct conn *c)
{
    struct ibv_ah_attr ah = { .is_global = 1,
                              .port_num = 1,
                              .grh = { .dgid = r->peer_gid,
                                       .hop_limit = 64,
                                       .sgid_index = test_gid_index() } };
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR,
                             .path_mtu = 1 + roll(r) % 5,
                             .dest_qp_num = c->peer.qpn,
                             .rq_psn = c->peer.psn,
                             .max_dest_rd_atomic = 4,
                             .min_rnr_timer = 1,
                             .ah_attr = ah };
    int rc = r->plan.type == IBV_QPT_RC, ud = r->plan.type == IBV_QPT_UD;
    int rtr = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    int rts = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;

    a.path_mtu = 1 + draw(r->plan.seed, 50 + c->id) % 5; /* the same at both ends */
    if (to_state(r, c, &a,
                 rc   ? rtr | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER
                 : ud ? 0
                      : rtr,
                 "RTR"))
        return -1;
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS,
                              .retry_cnt = 7,
                              .rnr_retry = 7,
                              .sq_psn = c->us.psn,
                              .max_rd_atomic = 4 };
    /* where nothing may fail, a busy machine must not either */
    a.timeout = r->patient && !(r->plan.abrupt && c->id == 0) ? 15 : 12;
    if (to_state(r, c, &a, IBV_QP_SQ_PSN | (rc ? rts : 0), "RTS"))
        return -1;
    if (ud && !c->ah && !(c->ah = ibv_create_ah(r->pd, &ah)))
        return cannot(r, "ibv_create_ah: %s", strerror(errno));
    return 0;
}

/* Objects that have nothing to do with the traffic, made and destroyed beside it. */
static void bystanders(struct round *r)
{
    struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 },
                       err = { .qp_state = IBV_QPS_ERR };
    struct ibv_pd *pd = ibv_alloc_pd(r->context);
    struct ibv_comp_channel *channel = ibv_create_comp_channel(r->context);
    struct ibv_cq *cq =
        channel ? ibv_create_cq(r->context, 1 + roll(r) % 500, NULL, channel, 0) : NULL;
    struct ibv_mr *mr =
        pd ? ibv_reg_mr(pd, r->conns[0].area->scratch, SCRATCH, IBV_ACCESS_LOCAL_WRITE) : NULL;
    enum ibv_mw_type type = roll(r) % 2 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2;
    struct ibv_mw *mw = pd && !chaos ? ibv_alloc_mw(pd, type) : NULL;
    struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 10, .max_sge = 1 } };
    struct ibv_srq *srq = pd ? ibv_create_srq(pd, &srq_init) : NULL;
    struct ibv_qp_init_attr qp_init = {
        .send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC, .cap = { 10, 0, 1, 1, 0 }
    };
    struct ibv_qp *qp = cq && srq ? ibv_create_qp(pd, &qp_init) : NULL;
    int e = 0;

    /* a dead NIC makes no QP, */
    if (!pd || !channel || !cq || !mr || (!mw && !chaos) || !srq || (!qp && r->patient))
        BROKEN(r, NULL, "objects beside the traffic cannot be made: %s", strerror(errno));
    if (qp) { /* and may die while it has one */
        e = ibv_modify_qp(qp, &init,
                          IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
        e = e ? e : ibv_modify_qp(qp, &err, IBV_QP_STATE);
        if (e && r->patient)
            BROKEN(r, NULL, "a QP beside the traffic to INIT and ERR: %s", strerror(e));
        if (ibv_destroy_cq(cq) != EBUSY || ibv_destroy_srq(srq) != EBUSY || ibv_destroy_qp(qp))
            BROKEN(r, NULL,
                   "a QP beside the traffic keeps its CQ or SRQ not, or cannot be destroyed");
    }
    if (ibv_destroy_comp_channel(channel) != EBUSY || ibv_destroy_cq(cq) ||
        ibv_destroy_comp_channel(channel))
        BROKEN(r, NULL, "a channel beside the traffic is destroyed before its CQ, or not at all");
    if (ibv_destroy_srq(srq) || ibv_dereg_mr(mr) ||
        (mw && (ibv_dealloc_pd(pd) != EBUSY || ibv_dealloc_mw(mw))) || ibv_dealloc_pd(pd))
        BROKEN(r, NULL, "a PD beside the traffic is freed before its window, or not at all");
    counts[C_bystanders]++;
}

/* Objects of a round in the order in which the take-down tries them; those of a QP come first,
 * for each. */
enum {
    QP,
    WIDE,
    BETWEEN,
    MR,
    AH,
    MW,
    KEYS_MR,
    OF_QP,
    RECV_CQ = MAX_QPS * OF_QP,
    SEND_CQ,
    SRQ,
    CHANNEL,
    NULL_MR,
    PD_2,
    PD_1,
    OBJECTS
};

/* Whether regions or windows of the domain are left. */
static int pd_in_use(const struct round *r, const struct ibv_pd *pd)
{
    int i, used = r->null && r->null->pd == pd;

    for (i = 0; i < MAX_QPS; i++) {
        const struct conn *c = r->conns + i;

        used |= (c->mr && c->mr->pd == pd) || (c->scratch && c->scratch->pd == pd) ||
                (c->mw && c->mw->pd == pd) || (c->wide && c->wide->pd == pd) ||
                (c->between && c->between->pd == pd);
    }
    return used; /* address handles hold no PD, as with most hardware */
}

static void ack_events(struct ibv_cq *cq, uint32_t *events)
{
    ibv_ack_cq_events(cq, *events);
    *events = 0;
}

/* Tries to destroy one object in one of three turns, but no region while a window may be bound
 * to it. Gives whether it, or what depends on it, is left. */
static int take_one(struct round *r, int i, int qps_left)
{
    struct conn *c = i < RECV_CQ ? r->conns + i / OF_QP : NULL;
    int e;
#define TAKE(object, destroy, busy) \
    do { \
        if (!(object)) return 0; \
        if (roll(r) % 3) return 1; \
        e = destroy(object); \
        if (e && e != EBUSY) BROKEN(r, c, #destroy ": %s", strerror(e)); \
        if (!e && (busy)) BROKEN(r, c, #destroy " succeeds, though others need it"); \
        if (e && !(busy)) BROKEN(r, c, #destroy ": EBUSY, though nobody needs it"); \
        if (!e) (object) = NULL; \
        return !!e; \
    } while (0)

    switch (c ? i % OF_QP : i) {
    case QP: TAKE(c->qp, ibv_destroy_qp, 0);
    case WIDE: TAKE(c->wide, ibv_dealloc_mw, 0);
    case BETWEEN: TAKE(c->between, ibv_dealloc_mw, 0);
    case MR:
        if (c->wide || c->between)
            return 1;
        TAKE(c->mr, ibv_dereg_mr, 0);
    case AH: TAKE(c->ah, ibv_destroy_ah, 0);
    case MW: TAKE(c->mw, ibv_dealloc_mw, 0);
    case KEYS_MR:
        if (c->mw)
            return 1;
        TAKE(c->scratch, ibv_dereg_mr, 0);
    case RECV_CQ:
        if (r->recv_cq == r->send_cq)
            r->recv_cq = NULL;
        if (!qps_left && r->recv_cq)
            ack_events(r->recv_cq, &r->acked[1]);
        TAKE(r->recv_cq, ibv_destroy_cq, qps_left);
    case SEND_CQ:
        if (!qps_left && r->send_cq)
            ack_events(r->send_cq, &r->acked[0]);
        TAKE(r->send_cq, ibv_destroy_cq, qps_left);
    case SRQ: TAKE(r->srq, ibv_destroy_srq, qps_left);
    case CHANNEL: TAKE(r->channel, ibv_destroy_comp_channel, r->send_cq || r->recv_cq);
    case NULL_MR: TAKE(r->null, ibv_dereg_mr, 0);
    case PD_2: TAKE(r->other_pd, ibv_dealloc_pd, pd_in_use(r, r->other_pd));
    case PD_1: TAKE(r->pd, ibv_dealloc_pd, qps_left || r->srq || pd_in_use(r, r->pd));
    }
#undef TAKE
    return 0;
}

/* A busy machine takes its time for each try. */
enum { TAKE_DOWN_US = 60 * 1000000 };

/* Tries everything in a random order until all is gone. What others still need must say EBUSY. */
static void take_down(struct round *r)
{
    uint64_t until = now_us() + TAKE_DOWN_US;
    int i, j, left = 1, qps_left, e;

    if (r->kept) { /* for others */
        r->pd = NULL;
        for (i = 0; i < MAX_QPS; i++)
            r->conns[i].mr = NULL;
    }
    while (left) {
        left = 0;
        for (i = 0; i < OBJECTS; i++) {
            for (j = qps_left = 0; j < MAX_QPS; j++)
                qps_left |= !!r->conns[j].qp;
            left |= take_one(r, i, qps_left);
        }
        if (now_us() > until)
            BROKEN(r, NULL, "cannot take everything down: PDs %p %p, CQs %p %p, SRQ %p, channel %p",
                   (void *)r->pd, (void *)r->other_pd, (void *)r->send_cq, (void *)r->recv_cq,
                   (void *)r->srq, (void *)r->channel);
    }
    if (r->own && (e = ibv_close_device(r->own)))
        BROKEN(r, NULL, "ibv_close_device: %s", strerror(e));
    r->own = NULL;
}

#endif
