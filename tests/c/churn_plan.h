/* SPDX-License-Identifier: Apache-2.0 */
/* What a round of the churn does. All of it follows from the round's seed, so both ends know it without telling each other. */
#ifndef UNBROKEN_TESTS_CHURN_PLAN_H
#define UNBROKEN_TESTS_CHURN_PLAN_H

#include "common.h"
#include <infiniband/verbs.h>

enum { MAX_QPS = 4, DEPTH = 60, SLOTS = 64, BYTES = 32768, UD_BYTES = 1024, GRH_BYTES = 40, MAX_INLINE = 128, STALE_BYTES = 256 };

enum kind { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, READ_BACK, FETCH_ADD, COMPARE_SWAP };

/* How one end treats QP 0 in mid-flight. */
enum abrupt { GENTLE, DESTROY, TO_ERROR, RESET };

struct plan {
    uint64_t seed;
    enum ibv_qp_type type;
    int qps, device, srq, one_cq, atomics;
    uint32_t ops;          /* of each QP and end */
    enum abrupt abrupt;
    int abrupt_role;       /* who does it … */
    uint32_t abrupt_after; /* … once so many operations are posted */
    int stale;             /* a key of a region that is no more is tried */
    int flush;             /* QPs go to ERR before the end, and every WR must be accounted for */
};

struct op {
    enum kind kind;
    uint32_t len, slot, offset;
    uint64_t key;
    int is_inline, signalled, fence;
};

/* Number `what` of a sequence that follows from a seed. */
static inline uint64_t draw(uint64_t seed, uint64_t what)
{
    return mix(seed ^ mix(what + 1));
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
    p.stale = p.type == IBV_QPT_RC && !p.abrupt && (h >> 32) % 3 == 0;
    p.flush = (h >> 40) % 2;
    return p;
}

/* Where content of a QP begins: `life` tells the connections of one QP apart. */
static inline uint64_t qp_seed(const struct plan *p, int role, int qp, int life)
{
    return draw(p->seed, 1000 + role * 100 + qp * 10 + life);
}

static inline struct op op_of(const struct plan *p, uint64_t seed, uint32_t i)
{
    static const enum kind rc[] = { SEND, SEND_IMM, WRITE, WRITE, WRITE_IMM, READ, READ_BACK, SEND, FETCH_ADD, COMPARE_SWAP };
    static const enum kind uc[] = { SEND, SEND_IMM, WRITE, WRITE_IMM };
    uint64_t h = draw(seed, i), l = h >> 20;
    struct op o = { .key = h, .slot = i % SLOTS, .signalled = (h >> 60) % 4 == 0 };

    o.kind = p->type == IBV_QPT_RC ? rc[h % (p->atomics ? 10 : 8)] : p->type == IBV_QPT_UC ? uc[h % 4] : uc[h % 2];
    if (o.kind == FETCH_ADD || o.kind == COMPARE_SWAP) {
        o.len = 8;
        return o;
    }
    if (p->type == IBV_QPT_UD)
        o.len = 16 + l % (UD_BYTES - 15);
    else if (p->type == IBV_QPT_UC) /* has its number, by which a message after a lost one is known */
        o.len = 16 + l % (l >> 20 & 1 ? 4096 : BYTES - 16);
    else
        o.len = l >> 20 & 1 ? l % 257 : l >> 21 & 1 ? l % 4097 : l % (BYTES + 1);
    o.is_inline = o.kind <= WRITE_IMM && o.len <= MAX_INLINE && (h >> 50 & 1);
    o.fence = p->type == IBV_QPT_RC && (h >> 52) % 8 == 0;
    if (o.kind == READ)
        o.offset = (h >> 33) % (BYTES - o.len + 1);
    return o;
}

static inline int consumes_receive(enum kind kind)
{
    return kind == SEND || kind == SEND_IMM || kind == WRITE_IMM;
}

static const char *const KIND[] = { "SEND", "SEND with immediate", "WRITE", "WRITE with immediate", "READ", "READ of a WRITE",
                                    "fetch-and-add", "compare-and-swap" };

#endif
