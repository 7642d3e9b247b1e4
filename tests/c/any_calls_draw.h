/* SPDX-License-Identifier: Apache-2.0 */
/* Random verbs: the objects there are, the values drawn for them, and what each call counts. */
#ifndef UNBROKEN_TESTS_ANY_CALLS_DRAW_H
#define UNBROKEN_TESTS_ANY_CALLS_DRAW_H

#include "common.h"
#include <infiniband/verbs.h>

enum { MANY = 12, MEMORY = 1 << 16, HANG_US = 5 * 1000000, LEAST_ROUNDS = 10 };

static uint64_t seed = 1, seconds = 5, rng;
static struct ibv_context *contexts[2], *context;
static struct ibv_comp_channel *channel;
static struct ibv_pd *pds[MANY];
static struct ibv_mr *mrs[MANY];
static struct ibv_mw *mws[MANY];
static struct ibv_cq *cqs[MANY];
static struct ibv_srq *srqs[MANY];
static struct ibv_qp *qps[MANY];
static struct ibv_qp_ex *builders[MANY];
static struct ibv_ah *ahs[MANY];
static uint8_t *memory;
static uint64_t calls, good, completions, successes;
static const char *verb = "start";

static uint64_t draw(void)
{
    return mix(rng++);
}

static int chance(int percent)
{
    return draw() % 100 < (unsigned)percent;
}

/* A number: usually small, sometimes anything. */
static uint64_t number(void)
{
    uint64_t r = draw();

    switch (draw() % 8) {
    case 0: return 0;
    case 1: return r;
    case 2: return (1ULL << r % 64) - (draw() % 3 - 1);
    case 3: return (uint32_t)-1 - r % 3;
    default: return r % 40;
    }
}

/* `right` in most cases, else anything. */
static uint64_t mostly(uint64_t right)
{
    return chance(93) ? right : number();
}

#define PICK(array) (array[draw() % MANY])
/* Most objects are of one domain, or little would fit together. */
#define PICK_PD (pds[chance(85) ? 0 : draw() % MANY])

/* One call that gives 0 or an errno. */
static int done(int e)
{
    calls++;
    good += e == 0;
    if (e < 0 && e != -1)
        fail("seed %llu: %s gives %d", (unsigned long long)seed, verb, e);
    return e;
}

static void *made(void *p)
{
    calls++;
    good += p != NULL;
    if (!p && !errno)
        fail("seed %llu: %s gives NULL and no errno", (unsigned long long)seed, verb);
    return p;
}

#define MAKE(p, call) do { if (!(p)) { verb = #call; errno = 0; (p) = made(call); } } while (0)
#define DO(call) (verb = #call, done(call))
/* Destroys; what is in use stays. */
#define END(p, call) do { if (p) { verb = #call; if (!done(call)) (p) = NULL; } } while (0)

static uint64_t address(void)
{
    return chance(85) ? (uintptr_t)memory + draw() % MEMORY : number();
}

static uint32_t key(int remote)
{
    struct ibv_mr *mr = PICK(mrs);
    struct ibv_mw *mw = PICK(mws);

    if (remote && mw && chance(30))
        return mw->rkey;
    return mr && chance(90) ? (remote ? mr->rkey : mr->lkey) : number();
}

#endif
