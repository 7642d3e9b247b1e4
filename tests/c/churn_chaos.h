/* SPDX-License-Identifier: Apache-2.0 */
/* What only `churn --chaos` does: a thread keeps domains and regions beyond a round, and tells what
 * became of each QP. */
#ifndef UNBROKEN_TESTS_CHURN_CHAOS_H
#define UNBROKEN_TESTS_CHURN_CHAOS_H

#include "churn_keys.h"

/* Ends all that a thread has kept. */
static void end_kept(struct kept *k)
{
    int i;

    for (i = 0; i < MAX_QPS; i++)
        if (k->mrs[i] && ibv_dereg_mr(k->mrs[i]))
            fail("ibv_dereg_mr of a region that was kept: %s", strerror(errno));
    if (k->pd && ibv_dealloc_pd(k->pd))
        fail("ibv_dealloc_pd of a domain that was kept: %s", strerror(errno));
    *k = (struct kept){ 0 };
}

/* The round has the domain and the regions that its thread keeps on this device. */
static int keep(struct round *r, struct ibv_context *context)
{
    struct kept *k = r->keeper + r->plan.device;

    if (r->plan.renewed)
        end_kept(k);
    if (!k->pd && !(k->pd = ibv_alloc_pd(context)))
        return cannot(r, "ibv_alloc_pd: %s", strerror(errno));
    r->kept = k;
    return 0;
}

/* What became of each QP's operations: the same wherever the same round is done, unless it says
 * that its time matters, or atomics met a failure. */
static void tell_outcomes(struct round *r, uint32_t mask, const struct done *theirs)
{
    int i;

    if (!chaos)
        return;
    for (i = 0; i < r->plan.qps; i++) {
        struct conn *c = r->conns + i;
        const uint64_t *word = (const uint64_t *)c->area->slots;
        uint64_t digest = c->area->counters[0] ^ mix(c->area->counters[1]);
        size_t n;

        if (!(mask >> i & 1))
            continue;
        for (n = 0; n < sizeof c->area->slots / 8; n++)
            digest = (digest ^ word[n]) * 0x100000001b3ULL;
        printf("outcome {\"thread\": %d, \"round\": %llu, \"life\": %d, \"qp\": %d, "
               "\"timing\": %d, \"atomics\": %d, \"status\": \"%s\", \"peer\": \"%s\", "
               "\"sent\": %u, \"heard\": %u, \"digest\": \"%016llx\"}\n",
               r->thread, (unsigned long long)r->number, c->life, i,
               r->plan.abrupt && i == 0 && c->life == 0, r->plan.atomics,
               ibv_wc_status_str(c->failed), ibv_wc_status_str(theirs->failed[i]), c->posted,
               next_consumer(r, c, c->in_next), (unsigned long long)digest);
    }
}

/* Tells of a life of a round that could not begin, and why; nothing, if it was the peer. */
static void tell_abandoned(struct round *r, int life)
{
    if (chaos)
        printf("abandoned {\"thread\": %d, \"round\": %llu, \"life\": %d, \"device\": \"%s\", "
               "\"why\": \"%s\"}\n",
               r->thread, (unsigned long long)r->number, life,
               r->context ? ibv_get_device_name(r->context->device) : "", r->why);
    r->why[0] = 0;
}

#endif
