/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Connections made and destroyed without end, between two processes with several threads each.
 *
 *   churn --listen PORT [--impaired|--faults] [--chaos]     serves all who connect, until SIGTERM
 *   churn --connect HOST:PORT --threads N --seconds S --rounds R --seed X [--impaired|--faults]
 *         [--chaos]
 *
 * Each round of a thread makes its own objects, connects some QPs, does a random mix of all
 * operations in both directions, changes keys that the peer uses (churn_keys.h) and takes
 * everything down in a random order. In some rounds one end destroys or resets a QP, or moves it to
 * ERR, in mid-flight. What is checked: content, order and length of all that arrives; each WR
 * completes once, and within a bound; nothing arrives that was sent to an earlier QP; keys allow
 * what they were given for and nothing else; what is in use says EBUSY; no completion event is
 * missed. A peer that is killed is survived by the listener. With --impaired packets may be lost,
 * which UC and UD do not mend; with --faults, besides, paths may fail: RC survives, but for QPs
 * with atomics in flight or windows, which have the original error.
 *
 * With --chaos a round has only what plain devices have, too; its domain and regions are mostly
 * those of earlier rounds, its QPs are reset and connected anew, and both ends print a line of what
 * became of each QP (tests/e2e/test_chaos.py compares them).
 *
 * The connecting end prints a line of JSON when its time is up and waits for SIGTERM. Status 1 and
 * a reason: something was wrong.
 */
#include "churn_chaos.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

enum { MAX_DEVICES = 4, LINGER_US = 3000 };

static struct ibv_context *contexts[MAX_DEVICES];
static int devices, threads = 3;
static uint64_t seed = 1, seconds = 10, most_rounds = UINT64_MAX;
static volatile sig_atomic_t stopping;
static atomic_int serving;
static atomic_ullong rounds, abandoned, peers_lost;

/* ---- one life of some QPs ---- */

/* What is outstanding needs no completion: it succeeds in silence, if it does. */
static int silent(const struct conn *c)
{
    uint32_t i;

    for (i = c->head; i != c->tail; i++)
        if (c->fifo[i % DEPTH].signalled)
            return 0;
    return !c->failed || c->head == c->tail;
}

static int sent_all(struct round *r, struct conn *c)
{
    if (c->gone == TO_ERROR)
        return silent(c) && (r->srq || c->recvs_done == c->recvs_posted);
    if ((r->peer_dead || c->refused) && silent(c))
        return 1;
    return c->gone || (c->head == c->tail && (c->posted == c->ops || c->failed));
}

static int received_all(struct round *r, struct conn *c, const struct done *theirs)
{
    int excused = r->peer_dead || c->failed || c->gone || theirs->failed[c->id] ||
                  (theirs->gone && c->id == 0);

    return excused || r->plan.type != IBV_QPT_RC || next_consumer(r, c, c->in_next) >= r->plan.ops;
}

/* A QP cannot be reset that has moved to another NIC, or whose NIC is dead. */
static int may_refuse_reset(int e)
{
    return faults && (e == EOPNOTSUPP || e == EIO);
}

/* Ends QP 0 in mid-flight. */
static void strike(struct round *r)
{
    struct conn *c = r->conns;
    struct ibv_qp_attr a = { .qp_state = r->plan.abrupt == RESET ? IBV_QPS_RESET : IBV_QPS_ERR };
    enum abrupt how = r->plan.abrupt;
    int e = how == DESTROY ? 0 : ibv_modify_qp(c->qp, &a, IBV_QP_STATE);

    if (how == RESET && may_refuse_reset(e))
        how = DESTROY;
    else if (e && !(how == TO_ERROR && faults && e == EIO)) /* the NIC is dead, and so is the QP */
        BROKEN(r, c, "to %s in mid-flight: %s", how == RESET ? "RESET" : "ERR", strerror(e));
    if (how == DESTROY) {
        e = ibv_destroy_qp(c->qp);
        if (e)
            BROKEN(r, c, "ibv_destroy_qp in mid-flight: %s", strerror(e));
        c->qp = NULL;
    }
    c->gone = how;
    c->ops = c->posted;
    if (how != TO_ERROR) { /* no completion of it may come any more */
        c->head = c->tail;
        c->recvs_done = c->recvs_posted;
    }
}

static void check_moving(struct round *r, uint32_t mask, int told, int got,
                         const struct done *theirs)
{
    uint64_t now = now_us();
    int i;

    for (i = 0; i < r->plan.qps; i++) {
        struct conn *c = r->conns + i;
        struct ibv_qp_attr a = { 0 };
        struct ibv_qp_init_attr init;

        if (!(mask >> i & 1) || now < c->moved_us + bound_us ||
            (sent_all(r, c) && (!got || received_all(r, c, theirs))))
            continue;
        if (c->qp)
            ibv_query_qp(c->qp, &a, IBV_QP_STATE, &init);
        BROKEN(r, c,
               "stuck for %llu s: %u sends outstanding from operation %u, failed %d, gone %d; "
               "receives %u of %u, next %u; state %d; told %d, heard %d, peer %s",
               (unsigned long long)(bound_us / 1000000), c->tail - c->head,
               c->fifo[c->head % DEPTH].op, c->failed, c->gone, c->recvs_done, c->recvs_posted,
               c->in_next, a.qp_state, told, got, r->peer_dead ? "dead" : "there");
    }
}

/* What the peer's WRITEs and atomics have left. */
static void check_memory(struct round *r, uint32_t mask, const struct done *theirs)
{
    int i;

    for (i = 0; i < r->plan.qps; i++) {
        struct conn *c = r->conns + i;
        uint64_t added = 0, swapped = 0;
        uint32_t n, last[SLOTS];

        if (!(mask >> i & 1) || theirs->failed[i] || (theirs->gone && i == 0) || c->failed ||
            c->gone)
            continue;
        memset(last, 0xff, sizeof last);
        for (n = 0; n < r->plan.ops; n++) {
            struct op o = op_of(&r->plan, c->in_seed, n);

            added += o.kind == FETCH_ADD ? o.key & 0xffff : 0;
            swapped = o.kind == COMPARE_SWAP ? o.key : swapped;
            if (o.kind == WRITE || o.kind == WRITE_IMM)
                last[o.slot] = n;
        }
        for (n = 0; n < SLOTS; n++) {
            struct op o = op_of(&r->plan, c->in_seed, last[n]);
            const char *wrong =
                last[n] == UINT32_MAX ? NULL : data_wrong(&o, c->area->slots[n], last[n]);

            if (wrong)
                BROKEN(r, c, "the peer's WRITE %u to slot %u: %s", last[n], n, wrong);
        }
        if (c->area->counters[0] != added || c->area->counters[1] != swapped)
            BROKEN(r, c, "atomics left %llu and %llu, right are %llu and %llu",
                   (unsigned long long)c->area->counters[0],
                   (unsigned long long)c->area->counters[1], (unsigned long long)added,
                   (unsigned long long)swapped);
    }
}

/* All operations of the QPs in `mask`, until both ends have ended theirs. */
static void work(struct round *r, uint32_t mask, int may_strike)
{
    struct done mine = { 0 }, theirs = { 0 };
    uint64_t heard_us = 0, began_us = now_us();
    int told = 0, got = 0, i, moved, ended;
    uint32_t idle = 0;

    for (;;) {
        moved = 0;
        for (i = 0; i < r->plan.qps; i++)
            if (mask >> i & 1)
                moved += post_sends(r, r->conns + i);
        /* it posts no more, so it never comes to that */
        if (may_strike && (r->peer_dead || r->conns[0].failed || r->conns[0].refused))
            may_strike = 0;
        if (may_strike && r->conns[0].posted >= r->plan.abrupt_after) {
            strike(r);
            may_strike = 0;
        }
        if (moved && roll(r) % 64 == 0)
            bystanders(r);
        moved += !moved || roll(r) % 16 ? poll_cqs(r) : resize(r);
        if (!got && (i = tcp_peek(r->tcp))) {
            got = 1;
            heard_us = now_us();
            if (i < 0 || hear(r, &theirs, sizeof theirs)) {
                r->peer_dead = 1;
                for (i = 0; i < r->plan.qps; i++)
                    r->conns[i].ops = r->conns[i].posted;
            }
        }
        for (i = 0, ended = 1; i < r->plan.qps; i++)
            ended &= !(mask >> i & 1) || (sent_all(r, r->conns + i) &&
                                          (!got || received_all(r, r->conns + i, &theirs)));
        if (ended && !may_strike && !told) {
            for (i = 0; i < r->plan.qps; i++)
                mine.failed[i] = r->conns[i].failed;
            mine.gone = r->conns[0].gone;
            tell(r, &mine, sizeof mine);
            told = 1;
        }
        if (ended && told && got && (r->plan.type == IBV_QPT_RC || now_us() > heard_us + LINGER_US))
            break;
        check_moving(r, mask, told, got, &theirs);
        if (ended && now_us() > began_us + 3 * bound_us)
            BROKEN(r, NULL, "the peer does not end its part");
        idle = moved ? 0 : idle + 1;
        if (!moved)
            rest(r, idle, got ? 1 : 1000);
    }
    if (r->plan.type == IBV_QPT_RC && !r->peer_dead)
        check_memory(r, mask, &theirs);
    tell_outcomes(r, mask, &theirs);
}

/* Every receive that is posted comes back once. */
static void flush(struct round *r)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
    uint64_t until = now_us() + bound_us;
    int i, e;

    for (i = 0; i < r->plan.qps; i++) {
        struct conn *c = r->conns + i;

        if (!c->qp || c->gone)
            continue;
        e = ibv_modify_qp(c->qp, &a, IBV_QP_STATE);
        if (e && !(faults && e == EIO))
            BROKEN(r, c, "to ERR: %s", strerror(e));
        c->gone = TO_ERROR;
        while (!sent_all(r, c)) {
            if (!poll_cqs(r))
                usleep(50);
            if (now_us() > until)
                BROKEN(r, c, "stuck in ERR: %u sends outstanding, %u of %u receives came back",
                       c->tail - c->head, c->recvs_done, c->recvs_posted);
        }
    }
}

/* ---- a round ---- */

/* Connects the QPs in `mask`, if both ends have come as far. Gives 0 if so. */
static int meet(struct round *r, uint32_t mask, int made)
{
    struct meeting us = { .ok = made == 0, .gid = r->gid }, them;
    int i, n, ok, peer_ok;

    for (i = 0; i < r->plan.qps; i++)
        us.qps[i] = r->conns[i].us;
    if (exchange(r, &us, &them, sizeof us))
        return -1;
    if (!us.ok || !them.ok)
        return -1;
    r->peer_gid = them.gid;
    for (i = 0, ok = 1; ok && i < r->plan.qps; i++) {
        struct conn *c = r->conns + i;

        if (!(mask >> i & 1))
            continue;
        c->peer = them.qps[i];
        ok = !to_init(r, c);
        for (n = 0; ok && !r->srq && n < (int)c->rq; n++)
            post_receive(r, c, 0);
        ok = ok && !connect_qp(r, c);
        c->moved_us = now_us();
    }
    return exchange(r, &ok, &peer_ok, sizeof ok) || !ok || !peer_ok ? -1 : 0;
}

/* A QP is used again for another connection. But for UC, which is made anew: a message that is late
 * begins with any PSN, and nothing tells it from one of this life. Gives 0 if there is one. */
static int begin_again(struct round *r, struct conn *c, int life)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_RESET };
    int made = 0, e = c->qp && !(c->gone == RESET) ? ibv_modify_qp(c->qp, &a, IBV_QP_STATE) : 0;

    if (e && !may_refuse_reset(e))
        BROKEN(r, c, "to RESET: %s", strerror(e));
    if (e || (c->qp && r->plan.type == IBV_QPT_UC)) {
        ibv_destroy_qp(c->qp);
        c->qp = NULL;
    }
    begin_life(r, c, life);
    if (r->plan.binds)
        made = renew_between(r, c);
    if (!c->qp && !made)
        made = make_qp(r, c);
    counts[C_connected_anew] += !made;
    return made;
}

/* The QPs in `mask` have another life. Gives 0 if they had. */
static int live_again(struct round *r, uint32_t mask, int life)
{
    int i, made = 0;

    for (i = 0; i < r->plan.qps; i++)
        if (mask >> i & 1)
            made |= begin_again(r, r->conns + i, life);
    if (meet(r, mask, made)) {
        tell_abandoned(r, life);
        return -1;
    }
    work(r, mask, 0);
    return 0;
}

static void run_round(struct round *r)
{
    struct plan *p = &r->plan;
    uint32_t mask = (1u << p->qps) - 1;
    int i, made = 0;

    if (roll(r) % 4 == 0) {
        r->own = ibv_open_device(contexts[p->device]->device);
        if (!r->own)
            made = cannot(r, "ibv_open_device: %s", strerror(errno));
    }
    if (p->kept && !r->own && !made)
        made = keep(r, contexts[p->device]);
    r->events = roll(r) % 2;
    r->extended_cqs = roll(r) % 2;
    made = made || make_shared(r, contexts[p->device]);
    for (i = 0; !made && i < p->qps; i++) {
        made = make_conn(r, r->conns + i);
        begin_life(r, r->conns + i, 0);
    }
    for (i = 0; !made && r->srq && i < p->qps * DEPTH; i++)
        post_receive(r, r->conns, i);
    if (meet(r, mask, made) == 0) {
        if (p->windowed)
            window_all(r);
        work(r, mask, p->abrupt && p->abrupt_role == r->role);
        if (p->offers && !r->peer_dead)
            offer_keys(r);
        if (p->forbidden && !r->peer_dead)
            forbidden(r);
        if (p->flush)
            flush(r);
        if (p->abrupt == RESET && !r->peer_dead)
            live_again(r, 1, 1);
        for (i = 1; i <= p->lives && !r->peer_dead && !live_again(r, mask, i); i++)
            ;
        rounds++;
    } else if (!r->peer_dead) {
        if (!faults && r->why[0])
            BROKEN(r, NULL, "%s", r->why);
        tell_abandoned(r, 0);
        abandoned++;
    }
    take_down(r);
}

/* ---- threads ---- */

struct start { /* of a round, told by the end that has connected */
    uint64_t number, seed;
    int32_t thread, stop;
};

static void *serve(void *arg)
{
    int connecting = ((int *)arg)[0], thread = ((int *)arg)[1], tcp = ((int *)arg)[2], i;
    size_t size = MAX_QPS * sizeof(struct area);
    /* Shared, so that they do not count as memory of the process itself, which must not grow. */
    struct area *areas =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    uint64_t until = now_us() + seconds * 1000000, number;
    struct kept kept[MAX_DEVICES] = { 0 };
    struct round r;

    free(arg);
    if (areas == MAP_FAILED)
        fail("out of memory");
    for (number = 0;; number++) {
        struct start s = { number, draw(seed, (uint64_t)thread << 40 | number), thread,
                           stopping || now_us() > until || number == most_rounds };

        memset(&r, 0, sizeof r);
        r.tcp = tcp;
        if (connecting ? tell(&r, &s, sizeof s) : hear(&r, &s, sizeof s))
            break;
        if (s.stop)
            break;
        r.plan = plan_of(s.seed, devices, faults);
        r.keeper = kept;
        r.thread = s.thread;
        r.role = connecting;
        r.number = s.number;
        r.patient = !faults;
        r.random = s.seed + connecting;
        for (i = 0; i < MAX_QPS; i++) {
            r.conns[i].id = i;
            r.conns[i].area = areas + i;
        }
        run_round(&r);
        if (r.peer_dead)
            break;
    }
    if (connecting && r.peer_dead)
        fail("thread %d, round %llu: the peer has gone", thread, (unsigned long long)number);
    peers_lost += r.peer_dead;
    close(tcp);
    for (i = 0; i < MAX_DEVICES; i++)
        end_kept(kept + i);
    munmap(areas, size);
    serving--;
    return NULL;
}

static void spawn(int connecting, int thread, int tcp)
{
    int *arg = malloc(3 * sizeof *arg);
    pthread_attr_t attr;
    pthread_t id;

    arg[0] = connecting, arg[1] = thread, arg[2] = tcp;
    serving++;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&id, &attr, serve, arg))
        fail("cannot start a thread");
    pthread_attr_destroy(&attr);
}

static void on_signal(int number)
{
    (void)number;
    stopping = 1;
}

/* Asynchronous events are taken, so that they do not pile up. */
static void take_async_events(void)
{
    struct ibv_async_event event;
    int i;

    for (i = 0; i < devices; i++)
        while (!ibv_get_async_event(contexts[i], &event))
            ibv_ack_async_event(&event);
}

static void listen_at(const char *port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };
    int one = 1, s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), c;

    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(s, (struct sockaddr *)&a, sizeof a) || listen(s, 64))
        fail("cannot listen on TCP port %s: %s", port, strerror(errno));
    while (!stopping) {
        take_async_events();
        if (!readable(s, 200) || (c = accept4(s, NULL, NULL, SOCK_CLOEXEC)) < 0)
            continue;
        setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        spawn(0, -1, c);
    }
    close(s);
}

static void wait_for_threads(void)
{
    while (serving) {
        take_async_events();
        usleep(50000);
    }
}

static void report(void)
{
    static const char *const NAMES[] = {
#define NAME(name) #name,
        COUNTS(NAME)
#undef NAME
    };
    int i, comma = 0;

    printf("{\"rounds\": %llu, \"abandoned\": %llu, \"operations\": %llu, \"bytes\": %llu, "
           "\"lost\": %llu, \"rc_failed\": %llu, "
           "\"atomics_failed\": %llu, \"keys_failed\": %llu, \"peers_lost\": %llu, \"counts\": {",
           (unsigned long long)rounds, (unsigned long long)abandoned,
           (unsigned long long)operations, (unsigned long long)bytes, (unsigned long long)lost,
           (unsigned long long)rc_failed, (unsigned long long)atomics_failed,
           (unsigned long long)keys_failed, (unsigned long long)peers_lost);
    for (i = 0; i < COUNTERS; i++)
        printf("%s\"%s\": %llu", i ? ", " : "", NAMES[i], (unsigned long long)counts[i]);
    printf("}, \"errors\": {");
    for (i = 0; i <= IBV_WC_GENERAL_ERR; i++)
        if (errors[i])
            printf("%s\"%s\": %llu", comma++ ? ", " : "", ibv_wc_status_str(i),
                   (unsigned long long)errors[i]);
    printf("}}\n");
    fflush(stdout);
}

/* All; one whose NIC is dead now is done without, if some may be. */
static void open_devices(void)
{
    int n, i;
    struct ibv_device **list = ibv_get_device_list(&n);

    for (i = 0; i < n && devices < MAX_DEVICES; i++) {
        struct ibv_context *context = ibv_open_device(list[i]);

        if (!context && chaos && faults)
            continue;
        if (!context || fcntl(context->async_fd, F_SETFL, O_NONBLOCK))
            fail("cannot open device %d: %s", i, strerror(errno));
        contexts[devices++] = context;
    }
    ibv_free_device_list(list);
}

int main(int argc, char **argv)
{
    struct sigaction on_term = { .sa_handler = on_signal };
    const char *port = NULL, *where = NULL;
    int i;

    setvbuf(stdout, NULL, _IOLBF, 0);
    for (i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";

        if (!strcmp(argv[i], "--faults")) { faults = impaired = 1; continue; }
        if (!strcmp(argv[i], "--impaired")) { impaired = 1; continue; }
        if (!strcmp(argv[i], "--chaos")) { chaos = 1; continue; }
        if (!strcmp(argv[i], "--listen")) port = value;
        else if (!strcmp(argv[i], "--connect")) where = value;
        else if (!strcmp(argv[i], "--threads")) threads = atoi(value);
        else if (!strcmp(argv[i], "--seconds")) seconds = strtoull(value, NULL, 10);
        else if (!strcmp(argv[i], "--rounds")) most_rounds = strtoull(value, NULL, 10);
        else if (!strcmp(argv[i], "--seed")) seed = strtoull(value, NULL, 10);
        else fail("unknown option '%s'", argv[i]);
        i++;
    }
    if (!port == !where)
        fail("one of --listen PORT and --connect HOST:PORT is needed");
    if (faults) /* the promise of a switch is 30 s */
        bound_us = 45 * 1000000;
    sigaction(SIGTERM, &on_term, NULL);
    open_devices();
    if (!devices)
        fail("no device");
    if (port) {
        listen_at(port);
        wait_for_threads();
        report();
    } else {
        for (i = 0; i < threads; i++)
            spawn(1, i, tcp_connect(where));
        wait_for_threads();
        report();
        while (!stopping) {
            take_async_events();
            usleep(50000);
        }
    }
    for (i = 0; i < devices; i++)
        if (ibv_close_device(contexts[i]))
            fail("ibv_close_device fails");
    return 0;
}
