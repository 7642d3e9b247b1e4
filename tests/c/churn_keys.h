/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys that change, after the traffic of a round: memory windows of both types, regions that are
 * registered anew. Both ends offer each other a key, use it, and take it away, in step; in the end
 * one of them tries what must be refused.
 *
 * Where paths may fail, a QP that has bound a window stays on its NIC, and so it may end with an
 * error at any time; but then at both ends, and nothing is done that was refused.
 */
#ifndef UNBROKEN_TESTS_CHURN_KEYS_H
#define UNBROKEN_TESTS_CHURN_KEYS_H

#include "churn_traffic.h"

enum {
    MIN_OFFER = 16,
    FORBIDDEN_BYTES = 64,
    TAKEN_BYTES = 8192,
    TAKEN_WRITES = 100,
    TAKEN_AFTER_US = 500
};

struct key { /* what an end tells of its part of a step */
    int32_t ok;
    uint32_t rkey, len;
    uint64_t addr;
};

struct offered { /* what stands behind it */
    enum offer what;
    enum ending ending;
    uint32_t off, len;
    struct key key;
};

/* ---- WRs that change or use keys: each is signalled, and the QP has no others ---- */

/* Waits until so many are outstanding at most. */
static void keys_wait(struct round *r, struct conn *c, uint32_t outstanding)
{
    uint64_t until = now_us() + bound_us;

    while (c->keys_posted - c->keys_done > outstanding) {
        if (!poll_cqs(r))
            usleep(20);
        if (now_us() > until)
            BROKEN(r, c, "stuck: WR %u of %u that change or use keys does not complete",
                   c->keys_done, c->keys_posted);
    }
}

static uint64_t keys_id(struct round *r, struct conn *c)
{
    keys_wait(r, c, c->sq - 1);
    return KEYS | (uint64_t)c->id << 48 | c->keys_posted++;
}

static void keys_posted(struct round *r, struct conn *c, int e)
{
    if (!e)
        return;
    if (!faults || e != EIO)
        BROKEN(r, c, "a WR that changes or uses keys cannot be posted: %s", strerror(e));
    c->keys_posted--;
    if (!c->keys_status)
        c->keys_status = IBV_WC_WR_FLUSH_ERR;
}

static void keys_post(struct round *r, struct conn *c, struct ibv_send_wr wr)
{
    struct ibv_send_wr *bad;

    wr.wr_id = keys_id(r, c);
    wr.send_flags = IBV_SEND_SIGNALED;
    keys_posted(r, c, post(r, c, &wr, &bad));
}

/* Whether all that was posted has succeeded. It must, where no path fails. */
static int keys_ok(struct round *r, struct conn *c)
{
    keys_wait(r, c, 0);
    if (!c->keys_status)
        return 1;
    if (!faults && !r->peer_dead && !hung_up(r))
        BROKEN(r, c, "WR %u of those that change or use keys fails: '%s'", c->keys_done - 1,
               ibv_wc_status_str(c->keys_status));
    if (faults && !c->failed) {
        keys_failed++;
        errors[c->keys_status]++;
    }
    c->failed = c->keys_status;
    return 0;
}

/* Tells the peer how it went, and what; whether both ends can go on. */
static int in_step(struct round *r, struct conn *c, struct key *mine, struct key *theirs)
{
    mine->ok = !c->failed;
    if (!exchange(r, mine, theirs, sizeof *mine) && mine->ok && theirs->ok)
        return 1;
    if (!c->failed)
        c->failed = IBV_WC_WR_FLUSH_ERR;
    return 0;
}

/* ---- windows ---- */

/* Binds a window on the QP `by`. It has the key `rkey` until then; gives that which it has
 * afterwards. */
static uint32_t bind_mw(struct round *r, struct conn *by, struct ibv_mw *mw, uint32_t rkey,
                        struct ibv_mw_bind_info info)
{
    struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW };
    struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED, .bind_info = info };

    if (mw->type == IBV_MW_TYPE_1) {
        bind.wr_id = keys_id(r, by);
        keys_posted(r, by, ibv_bind_mw(by->qp, mw, &bind));
        return mw->rkey;
    }
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = ibv_inc_rkey(rkey);
    wr.bind_mw.bind_info = info;
    keys_post(r, by, wr);
    return wr.bind_mw.rkey;
}

static struct ibv_mw *make_window(struct round *r, struct conn *c, enum ibv_mw_type type)
{
    struct ibv_mw *mw = ibv_alloc_mw(r->pd, type);

    if (!mw)
        BROKEN(r, c, "ibv_alloc_mw: %s", strerror(errno));
    return mw;
}

/* Binds c's window, made if there is none, to a part of its scratch region, on the QP `by`. Its
 * key and address come in `key`. */
static void bind_window(struct round *r, struct conn *c, struct conn *by, enum ibv_mw_type type,
                        uint32_t off, uint32_t len, int access, struct key *key)
{
    struct ibv_mw_bind_info info = { c->scratch, (uintptr_t)c->area->scratch + off, len, access };

    if (!c->mw) {
        c->mw = make_window(r, c, type);
        key->rkey = c->mw->rkey;
    }
    key->addr = access & IBV_ACCESS_ZERO_BASED ? 0 : info.addr;
    key->len = len;
    key->rkey = bind_mw(r, by, c->mw, key->rkey, info);
}

/* Puts a window over all memory of each QP, for the peer to use in place of the region's key. */
static void window_all(struct round *r)
{
    struct hello us[MAX_QPS] = { 0 }, them[MAX_QPS];
    int i;

    for (i = 0; i < r->plan.qps; i++) {
        struct conn *c = r->conns + i;
        enum ibv_mw_type type = roll(r) % 2 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2;
        int zero = type == IBV_MW_TYPE_2 && roll(r) % 2;
        /* those of type 1 are for all QPs */
        struct conn *by = type == IBV_MW_TYPE_1 ? r->conns + roll(r) % r->plan.qps : c;
        struct ibv_mw_bind_info info = { c->mr, c->start, sizeof *c->area,
                                         (ACCESS & ~IBV_ACCESS_MW_BIND) |
                                             (zero ? IBV_ACCESS_ZERO_BASED : 0) };
        uint32_t rkey;

        c->wide = make_window(r, c, type);
        rkey = bind_mw(r, by, c->wide, c->wide->rkey, info);
        if (!keys_ok(r, by))
            continue;
        tell_of_memory(c, rkey, zero ? 0 : c->start);
        us[i] = c->us;
        counts[C_windowed_qp]++;
    }
    if (exchange(r, us, them, sizeof us))
        return;
    for (i = 0; i < r->plan.qps; i++)
        if (them[i].qpn)
            r->conns[i].peer = them[i];
}

static void invalidate(struct round *r, struct conn *c, const struct key *key)
{
    keys_post(r, c,
              (struct ibv_send_wr){ .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = key->rkey });
}

static void free_window(struct round *r, struct conn *c)
{
    int e = c->mw ? ibv_dealloc_mw(c->mw) : 0;

    if (e)
        BROKEN(r, c, "ibv_dealloc_mw: %s", strerror(e));
    c->mw = NULL;
}

/* ---- offers ---- */

/* Changes of the scratch region what the flags name. */
static void reregister(struct round *r, struct conn *c, int flags, struct ibv_pd *pd, void *addr,
                       size_t len, int access)
{
    if (ibv_rereg_mr(c->scratch, flags, pd, addr, len, access))
        BROKEN(r, c, "ibv_rereg_mr with flags %d: %s", flags, strerror(errno));
}

static void make_offer(struct round *r, struct conn *c, int n, struct offered *o)
{
    static const enum ibv_mw_type TYPE[] = { IBV_MW_TYPE_1, IBV_MW_TYPE_2 };
    int access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

    o->what = offer_of(&r->plan, n, &o->ending);
    o->off = roll(r) % (SCRATCH / 2);
    o->len = MIN_OFFER + roll(r) % (SCRATCH / 2 - MIN_OFFER);
    if (o->what == REREGISTERED) {
        int pd = roll(r) % 2 ? IBV_REREG_MR_CHANGE_PD : 0;
        uint8_t *addr = c->area->scratch + o->off;

        if (pd)
            reregister(r, c, pd, r->other_pd, NULL, 0, 0);
        reregister(r, c, IBV_REREG_MR_CHANGE_TRANSLATION | pd | IBV_REREG_MR_CHANGE_ACCESS,
                   pd ? r->pd : NULL, addr, o->len, access | IBV_ACCESS_LOCAL_WRITE);
        o->key = (struct key){ .rkey = c->scratch->rkey, .len = o->len, .addr = (uintptr_t)addr };
        return;
    }
    if (o->what == WINDOW_2 && roll(r) % 2) {
        access |= IBV_ACCESS_ZERO_BASED;
        counts[C_window_zero_based]++;
    }
    bind_window(r, c, c, TYPE[o->what], o->off, o->len, access, &o->key);
    if (!keys_ok(r, c))
        return;
    if (ibv_dereg_mr(c->scratch) != EBUSY)
        BROKEN(r, c, "ibv_dereg_mr of a region with a window on it does not say EBUSY");
    if (!ibv_rereg_mr(c->scratch, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
                      IBV_ACCESS_LOCAL_WRITE) ||
        errno != EBUSY)
        BROKEN(r, c, "ibv_rereg_mr of a region with a window on it does not say EBUSY");
}

static uint64_t offer_key(uint64_t seed, int n)
{
    return draw(seed, 1000000 + n);
}

/* WRITEs all of what the peer offers in two parts, READs it back, and may take it away. */
static void use_offer(struct round *r, struct conn *c, int n, const struct offered *mine,
                      const struct key *theirs)
{
    uint8_t *out = c->area->out[0], *back = c->area->out[1];
    uint32_t half = theirs->len / 2, lkey = c->mr->lkey;
    struct ibv_sge sges[] = { { at(c, out), half, lkey },
                              { at(c, out + half), theirs->len - half, lkey },
                              { at(c, back), theirs->len, lkey },
                              { at(c, out), 8, lkey } };
    struct ibv_send_wr wr = { .num_sge = 1,
                              .opcode = IBV_WR_RDMA_WRITE,
                              .wr.rdma = { theirs->addr, theirs->rkey } };

    content_make(out, theirs->len, offer_key(c->out_seed, n), n);
    memset(back, 0, theirs->len);
    wr.sg_list = sges;
    keys_post(r, c, wr);
    wr.sg_list = sges + 1;
    wr.wr.rdma.remote_addr += half;
    keys_post(r, c, wr);
    wr.opcode = IBV_WR_RDMA_READ;
    wr.sg_list = sges + 2;
    wr.wr.rdma.remote_addr = theirs->addr;
    keys_post(r, c, wr);
    if (!keys_ok(r, c))
        return;
    if (memcmp(out, back, theirs->len))
        BROKEN(r, c, "what was written through the key %#x is read back otherwise", theirs->rkey);
    if (mine->what == WINDOW_2 && mine->ending == SEND_INV) {
        keys_post(r, c,
                  (struct ibv_send_wr){ .opcode = IBV_WR_SEND_WITH_INV,
                                        .invalidate_rkey = theirs->rkey,
                                        .sg_list = sges + 3,
                                        .num_sge = 1 });
        if (!keys_ok(r, c))
            return;
        counts[C_send_inv]++;
    }
    counts[mine->what == WINDOW_1   ? C_window_1
           : mine->what == WINDOW_2 ? C_window_2
                                    : C_rereg_offered]++;
    operations += 3;
    bytes += 2 * theirs->len;
}

/* The peer has written what was offered, and nothing else. */
static void check_offer(struct round *r, struct conn *c, int n, const struct offered *o)
{
    uint8_t *scratch = c->area->scratch;
    const char *wrong = content_wrong(scratch + o->off, o->len, offer_key(c->in_seed, n), n);
    uint32_t i;

    if (wrong)
        BROKEN(r, c, "behind the key %#x (offer %d, kind %d): %s", o->key.rkey, n, o->what, wrong);
    for (i = 0; i < SCRATCH; i++)
        if ((i < o->off || i >= o->off + o->len) && scratch[i] != CANARY)
            BROKEN(r, c, "byte %u was written, though bytes %u to %u were offered", i, o->off,
                   o->off + o->len - 1);
    memset(scratch, CANARY, SCRATCH);
}

/* Takes the key away, in the way that the plan says. */
static void end_offer(struct round *r, struct conn *c, struct offered *o)
{
    uint64_t until = now_us() + bound_us;

    if (o->what == REREGISTERED) {
        reregister(r, c, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, NULL,
                   c->area->scratch, SCRATCH, ACCESS);
        return;
    }
    if (o->ending == SEND_INV) {
        while (c->invalidated != o->key.rkey) {
            if (!poll_cqs(r))
                usleep(20);
            if (now_us() > until)
                BROKEN(r, c, "stuck: the peer's SEND that takes the key %#x away does not come",
                       o->key.rkey);
        }
        c->invalidated = 0;
    } else if (o->what == WINDOW_2 && o->ending != FREED) {
        invalidate(r, c, &o->key);
        counts[C_local_inv]++;
    }
    if (o->ending == REBOUND) {
        bind_window(r, c, c, c->mw->type, 0, MIN_OFFER, IBV_ACCESS_REMOTE_READ, &o->key);
        if (o->what == WINDOW_1)
            bind_window(r, c, c, IBV_MW_TYPE_1, 0, 0, 0, &o->key);
        else
            invalidate(r, c, &o->key);
        counts[C_rebound]++;
    }
    counts[C_freed_bound] += o->ending == FREED;
    if (keys_ok(r, c))
        free_window(r, c);
}

/* All that the plan offers. */
static void offer_keys(struct round *r)
{
    struct conn *c = r->conns + r->plan.keys_qp;
    struct offered mine = { 0 };
    struct key theirs, word = { 0 };
    int n;

    for (n = 0; n < r->plan.offers; n++) {
        if (!c->failed)
            make_offer(r, c, n, &mine);
        if (!in_step(r, c, &mine.key, &theirs))
            return;
        use_offer(r, c, n, &mine, &theirs);
        if (!in_step(r, c, &word, &theirs))
            return;
        check_offer(r, c, n, &mine);
        end_offer(r, c, &mine);
    }
}

/* ---- what must be refused ---- */

/* Makes a key that does not allow what the peer is about to do. */
static void forbid(struct round *r, struct conn *c, struct key *key)
{
    struct conn *other = r->conns + (c->id + 1) % r->plan.qps,
                *by = r->plan.forbidden == WINDOW_QP ? other : c;
    enum ibv_mw_type type =
        r->plan.forbidden == WINDOW_GONE || by != c || roll(r) % 2 ? IBV_MW_TYPE_2 : IBV_MW_TYPE_1;
    int access =
        r->plan.forbidden == WINDOW_RIGHTS ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    struct ibv_mr *mr;

    *key = (struct key){ .rkey = c->scratch->rkey, .addr = (uintptr_t)c->area->scratch };
    switch (r->plan.forbidden) {
    case DEREGISTERED:
        mr = ibv_reg_mr(r->pd, c->area->scratch, SCRATCH, ACCESS);
        if (!mr)
            BROKEN(r, c, "ibv_reg_mr: %s", strerror(errno));
        key->rkey = mr->rkey;
        if (ibv_dereg_mr(mr) || !(mr = ibv_reg_mr(r->pd, c->area->scratch, SCRATCH, ACCESS)))
            BROKEN(r, c, "ibv_dereg_mr or ibv_reg_mr: %s", strerror(errno));
        if (mr->rkey == key->rkey)
            BROKEN(r, c, "the key %#x is given again at once", mr->rkey);
        if (ibv_dereg_mr(mr))
            BROKEN(r, c, "ibv_dereg_mr fails");
        break;
    case RIGHTS_TAKEN:
        reregister(r, c, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
        break;
    case MOVED:
        reregister(r, c, IBV_REREG_MR_CHANGE_TRANSLATION, NULL,
                   c->area->scratch + FORBIDDEN_BYTES / 2, SCRATCH / 2, 0);
        break;
    case TAKEN: break;
    case OTHER_PD: reregister(r, c, IBV_REREG_MR_CHANGE_PD, r->other_pd, NULL, 0, 0); break;
    default:
        if (by->failed) {
            c->failed = by->failed;
            return;
        }
        bind_window(r, c, by, type, 0, SCRATCH / 2, access, key);
        if (r->plan.forbidden == WINDOW_GONE)
            invalidate(r, c, key);
        if (r->plan.forbidden == WINDOW_END)
            key->addr += SCRATCH / 2 - FORBIDDEN_BYTES / 2;
        if (!keys_ok(r, by))
            c->failed = by->failed;
    }
}

/*
 * Takes a key away while the peer WRITEs with it, in one of four ways. From then on no byte
 * changes, though packets are on their way: what the memory holds comes in `then`. Gives 0 if the
 * ends do not come so far.
 */
static int take_in_use(struct round *r, struct conn *c, struct key *key, uint8_t *then)
{
    struct key theirs;
    int way = roll(r) % 4;

    if (way >= 2 && !c->failed)
        bind_window(r, c, c, way == 2 || roll(r) % 2 ? IBV_MW_TYPE_2 : IBV_MW_TYPE_1, 0,
                    TAKEN_BYTES, IBV_ACCESS_REMOTE_WRITE, key);
    keys_ok(r, c);
    if (!in_step(r, c, key, &theirs))
        return 0;
    usleep(roll(r) % TAKEN_AFTER_US);
    switch (way) {
    case 0:
        if (ibv_dereg_mr(c->scratch))
            BROKEN(r, c, "ibv_dereg_mr fails");
        c->scratch = NULL;
        break;
    case 1:
        reregister(r, c, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE);
        break;
    case 2:
        invalidate(r, c, key);
        keys_wait(r, c, 0);
        /* the peer's next WRITE may have ended the QP */
        if (c->keys_status && c->keys_status != IBV_WC_WR_FLUSH_ERR && !faults)
            BROKEN(r, c, "LOCAL_INV ends with '%s'", ibv_wc_status_str(c->keys_status));
        if (c->keys_status)
            free_window(r, c);
        break;
    case 3: free_window(r, c);
    }
    memcpy(then, c->area->scratch, TAKEN_BYTES);
    return 1;
}

/* WRITEs until it is refused, or often enough; each time other bytes. */
static void use_taken(struct round *r, struct conn *c, const struct key *theirs)
{
    uint32_t i;

    for (i = 0; i < TAKEN_WRITES && !c->keys_status; i++) {
        uint8_t *out = c->area->out[i % DEPTH]; /* at most as many are outstanding */
        struct ibv_sge sge = { at(c, out), TAKEN_BYTES, c->mr->lkey };

        keys_wait(r, c, c->sq - 1);
        memset(out, i, TAKEN_BYTES);
        keys_post(r, c,
                  (struct ibv_send_wr){ .opcode = IBV_WR_RDMA_WRITE,
                                        .sg_list = &sge,
                                        .num_sge = 1,
                                        .wr.rdma = { theirs->addr, theirs->rkey } });
    }
    keys_wait(r, c, 0);
    if (c->keys_status && c->keys_status != IBV_WC_REM_ACCESS_ERR && !faults && !r->peer_dead &&
        !hung_up(r))
        BROKEN(r, c, "a WRITE with a key that is taken away ends with '%s'",
               ibv_wc_status_str(c->keys_status));
    counts[C_taken_in_use] += c->keys_status == IBV_WC_REM_ACCESS_ERR;
}

/* The WR that must fail: the WRITE, or a binding to more than the region. */
static void try_forbidden(struct round *r, struct conn *c, const struct key *theirs)
{
    enum ibv_wc_status right =
        r->plan.forbidden == BAD_BIND ? IBV_WC_MW_BIND_ERR : IBV_WC_REM_ACCESS_ERR;
    struct ibv_sge sge = { at(c, c->area->out[0]), FORBIDDEN_BYTES, c->mr->lkey };
    struct key none;

    memset(c->area->out[0], 0x77, FORBIDDEN_BYTES);
    if (r->plan.forbidden == BAD_BIND)
        bind_window(r, c, c, roll(r) % 2 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2, SCRATCH / 2, SCRATCH,
                    IBV_ACCESS_REMOTE_WRITE, &none);
    else
        keys_post(r, c,
                  (struct ibv_send_wr){ .opcode = IBV_WR_RDMA_WRITE,
                                        .sg_list = &sge,
                                        .num_sge = 1,
                                        .wr.rdma = { theirs->addr, theirs->rkey } });
    keys_wait(r, c, 0);
    if (c->keys_status == IBV_WC_SUCCESS ||
        (c->keys_status != right && !faults && !r->peer_dead && !hung_up(r)))
        BROKEN(r, c, "what must be refused (%d, key %#x) ends with '%s'", r->plan.forbidden,
               theirs->rkey, ibv_wc_status_str(c->keys_status));
    counts[C_no_deregistered + r->plan.forbidden - DEREGISTERED] += c->keys_status == right;
}

/* One end does what must be refused, and no byte of the other changes. */
static void forbidden(struct round *r)
{
    struct conn *c = r->conns + r->plan.keys_qp;
    int i, attacks = r->role == (int)(r->plan.seed & 1), taken = r->plan.forbidden == TAKEN;
    uint8_t then[TAKEN_BYTES];
    struct key mine = { 0 }, theirs;

    memset(then, CANARY, sizeof then);
    if (!attacks && !c->failed && r->plan.forbidden != BAD_BIND)
        forbid(r, c, &mine);
    if (!attacks && taken ? !take_in_use(r, c, &mine, then) : !in_step(r, c, &mine, &theirs))
        return;
    if (attacks)
        (taken ? use_taken : try_forbidden)(r, c, &theirs);
    c->failed = IBV_WC_REM_ACCESS_ERR;
    if (exchange(r, &mine, &theirs, sizeof mine))
        return;
    for (i = 0; i < SCRATCH; i++)
        if (c->area->scratch[i] != (i < TAKEN_BYTES ? then[i] : CANARY))
            BROKEN(r, c, "byte %d was written by a WRITE that must be refused (%d)", i,
                   r->plan.forbidden);
}

#endif
