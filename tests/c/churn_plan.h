/* SPDX-License-Identifier: Apache-2.0 */
/* What a round of the churn does. All of it follows from the round's seed, so both ends know it
 * without telling each other. */
#ifndef UNBROKEN_TESTS_CHURN_PLAN_H
#define UNBROKEN_TESTS_CHURN_PLAN_H

#include "common.h"
#include <infiniband/verbs.h>
#include <stdatomic.h>

enum {
    MAX_QPS = 4,
    DEPTH = 60,
    SLOTS = 64,
    BYTES = 32768,
    UD_BYTES = 1024,
    GRH_BYTES = 40,
    MAX_INLINE = 128,
    SCRATCH = 16384,
    CANARY = 0x5a
};

enum kind { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, READ_BACK, FETCH_ADD, COMPARE_SWAP, BIND };

/* How one end treats QP 0 in mid-flight. */
enum abrupt { GENTLE, DESTROY, TO_ERROR, RESET };

/* A key that a peer is given for a while, and then not any more. */
enum offer { WINDOW_1, WINDOW_2, REREGISTERED };

/* How a window ends. One of type 1 knows neither of the first two. */
enum ending { LOCAL_INV, SEND_INV, REBOUND, FREED };

/* What must be refused: what is wrong with the key that the peer WRITEs with (it is TAKEN away
 * meanwhile), or with a binding. */
enum forbidden {
    NOTHING,
    DEREGISTERED,
    RIGHTS_TAKEN,
    MOVED,
    OTHER_PD,
    WINDOW_GONE,
    WINDOW_END,
    WINDOW_RIGHTS,
    WINDOW_QP,
    TAKEN,
    BAD_BIND
};

/* All that must have been done, and checked, once the test is over. The first ones are in the
 * order of `kind`. */
#define COUNTS(X) \
    X(send) X(send_imm) X(write) X(write_imm) X(read) X(read_back) X(fetch_add) X(compare_swap) \
    X(bind_between) X(from_null_mr) X(into_null_mr) X(zero_based_mr) X(iova_mr) X(rereg_mr) \
    X(create_qp_ex) X(wr_builders) X(wr_abort) X(create_cq_ex) X(polls_ex) X(resize_cq) \
    X(resize_waiting) X(new_ah) X(ah_from_wc) X(bystanders) X(windowed_qp) X(window_1) X(window_2) \
    X(window_zero_based) X(rereg_offered) X(local_inv) X(send_inv) X(rebound) X(freed_bound) \
    X(no_deregistered) X(no_rights_taken) X(no_moved) X(no_other_pd) X(no_window_gone) \
    X(no_window_end) X(no_window_rights) X(no_window_qp) X(taken_in_use) X(no_bad_bind) \
    X(kept_mr) X(connected_anew)
#define ENTRY(name) C_##name,
enum count { COUNTS(ENTRY) COUNTERS };
#undef ENTRY
static atomic_ullong counts[COUNTERS];

struct plan {
    uint64_t seed;
    enum ibv_qp_type type;
    int qps, device, srq, one_cq, atomics;
    uint32_t ops;          /* of each QP and end */
    enum abrupt abrupt;
    int abrupt_role;       /* who does it … */
    uint32_t abrupt_after; /* … once so many operations are posted */
    int binds;             /* among the operations a window is bound and invalidated in turns */
    int windowed;          /* WRITEs, READs and atomics go through windows */
    int keys_qp;           /* the QP that keys are changed on, … */
    int offers;            /* … so often, … */
    enum forbidden forbidden; /* … and what must be refused is tried in the end */
    int flush;             /* QPs go to ERR before the end, and every WR must be accounted for */
    int kept;              /* the domain and the regions are those of earlier rounds, … */
    int renewed;           /* … but are made anew first */
    int lives;             /* so often all QPs are reset and connected anew */
};

/* Rounds whose outcome follows from their seed, on any kind of device: nothing that only some have,
 * and keys that outlive their rounds. */
static int chaos;

struct op {
    enum kind kind;
    uint32_t len, slot, offset;
    uint64_t key;
    int is_inline, signalled, fence;
    int null; /* the data comes from the null region: zeros; of a READ, the first bytes go there */
};

/* Number `what` of a sequence that follows from a seed. */
static inline uint64_t draw(uint64_t seed, uint64_t what)
{
    return mix(seed ^ mix(what + 1));
}

/* Turns a plan into one that any kind of device can follow. */
static void make_chaos(struct plan *p)
{
    uint64_t h = draw(p->seed, 3);

    p->type = IBV_QPT_RC;
    p->binds = p->windowed = 0;
    p->srq = h % 2;
    p->atomics = (h >> 4) % 3 == 0;
    p->offers = p->abrupt || (h >> 8) % 2 ? 0 : 1 + (h >> 12) % 2;
    p->forbidden = p->abrupt || (h >> 16) % 3 ? NOTHING : DEREGISTERED + (h >> 20) % 4;
    p->kept = (h >> 24) % 4 != 0;
    p->renewed = (h >> 28) % 8 == 0;
    p->lives = p->abrupt ? 0 : (h >> 32) % 3;
}

static struct plan plan_of(uint64_t seed, int devices, int faults)
{
    struct plan p = { .seed = seed };
    uint64_t h = draw(seed, 0);

    p.type = h % 10 < 7 ? IBV_QPT_RC : h % 10 == 7 ? IBV_QPT_UD : IBV_QPT_UC;
    p.qps = 1 + (h >> 8) % MAX_QPS;
    p.device = (h >> 16) % devices;
    p.srq = (h >> 24) % 4 == 0;
    p.one_cq = (h >> 28) % 2;
    p.ops = (h >> 32) % 8 == 0 ? 400 : 1 + (h >> 36) % 60;
    if (p.type != IBV_QPT_RC && p.ops > SLOTS) /* each WRITE has a slot of its own */
        p.ops = SLOTS;
    h = draw(seed, 1);
    /* The original error is what atomics in flight get where a path fails. */
    p.atomics = p.type == IBV_QPT_RC && (!faults || h % 4 == 0);
    p.abrupt = (h >> 8) % 3 ? GENTLE : 1 + (h >> 12) % 3;
    p.abrupt_role = (h >> 16) % 2;
    p.abrupt_after = (h >> 20) % p.ops;
    p.flush = (h >> 40) % 2;
    h = draw(seed, 2);
    p.keys_qp = h % p.qps;
    p.binds = p.type == IBV_QPT_RC && (h >> 48) % (faults ? 6 : 2) == 0;
    if (p.type == IBV_QPT_RC && !p.abrupt) {
        p.windowed = (h >> 40) % (faults ? 6 : 3) == 0;
        p.offers = (h >> 8) % 2 ? 0 : 1 + (h >> 16) % 3;
        p.forbidden = (h >> 24) % 3 == 0 ? NOTHING : 1 + (h >> 32) % BAD_BIND;
        if (p.forbidden == WINDOW_QP && p.qps == 1)
            p.forbidden = WINDOW_GONE;
    }
    if (chaos)
        make_chaos(&p);
    return p;
}

/* Where content of a QP begins: `life` tells the connections of one QP apart. */
static inline uint64_t qp_seed(const struct plan *p, int role, int qp, int life)
{
    return draw(p->seed, 1000 + role * 100 + qp * 10 + life);
}

static inline struct op op_of(const struct plan *p, uint64_t seed, uint32_t i)
{
    static const enum kind rc[] = { SEND, SEND_IMM,  WRITE, WRITE,     WRITE_IMM,
                                    READ, READ_BACK, SEND,  FETCH_ADD, COMPARE_SWAP };
    static const enum kind uc[] = { SEND, SEND_IMM, WRITE, WRITE_IMM };
    uint64_t h = draw(seed, i), l = h >> 20;
    struct op o = { .key = h, .slot = i % SLOTS, .signalled = (h >> 60) % 4 == 0 };

    o.kind = p->type == IBV_QPT_RC   ? rc[h % (p->atomics ? 10 : 8)]
             : p->type == IBV_QPT_UC ? uc[h % 4]
                                     : uc[h % 2];
    if (p->binds && (h >> 44) % 8 == 0)
        o.kind = BIND;
    o.fence = p->type == IBV_QPT_RC && (h >> 52) % 8 == 0;
    if (o.kind == BIND)
        return o;
    if (o.kind == FETCH_ADD || o.kind == COMPARE_SWAP) {
        o.len = 8;
        return o;
    }
    if (p->type == IBV_QPT_UD)
        o.len = 16 + l % (UD_BYTES - 15);
    else if (p->type == IBV_QPT_UC)
        /* has its number, by which a message after a lost one is known */
        o.len = 16 + l % (l >> 20 & 1 ? 4096 : BYTES - 16);
    else
        o.len = l >> 20 & 1 ? l % 257 : l >> 21 & 1 ? l % 4097 : l % (BYTES + 1);
    o.is_inline = o.kind <= WRITE_IMM && o.len <= MAX_INLINE && (h >> 50 & 1);
    if (p->type == IBV_QPT_RC && !chaos)
        o.null = o.kind <= READ && !o.is_inline && (h >> 56) % 8 == 0;
    if (o.kind == READ)
        o.offset = (h >> 33) % (BYTES - o.len + 1);
    return o;
}

/* What key is offered as number `n`, and how a window ends. */
static inline enum offer offer_of(const struct plan *p, int n, enum ending *ending)
{
    uint64_t h = draw(p->seed, 200 + n);
    enum offer what = chaos ? REREGISTERED : h % 3;

    *ending = what == WINDOW_2 ? (h >> 8) % 4 : REBOUND + (h >> 8) % 2;
    return what;
}

/* Whether the first bytes of the data of operation `i` are wrong: NULL, or what is. */
static inline const char *data_wrong(const struct op *o, const uint8_t *data, uint32_t i)
{
    uint32_t n;

    if (!o->null)
        return content_wrong(data, o->len, o->key, i);
    for (n = 0; n < o->len; n++)
        if (data[n])
            return "not all zero, as it comes from the null region";
    return NULL;
}

static inline int consumes_receive(enum kind kind)
{
    return kind == SEND || kind == SEND_IMM || kind == WRITE_IMM;
}

static const char *const KIND[] = { "SEND",
                                    "SEND with immediate",
                                    "WRITE",
                                    "WRITE with immediate",
                                    "READ",
                                    "READ of a WRITE",
                                    "fetch-and-add",
                                    "compare-and-swap",
                                    "binding or LOCAL_INV" };

#endif
