/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What transitions of path migration cost a program that goes on meanwhile, with the thread of the
 * library (unbroken/apm.h) hearing of them: what "Automatic Path Migration over InfiniBand"
 * measures in its section 4. All queue pairs load at once, at both ends, and the client asks for
 * all to migrate.
 *
 * apm_cost PORT                                     the server
 * apm_cost HOST:PORT latency QPS BYTES ROUNDS FAULTS
 *   the client: ping-pong by SEND, over the queue pairs in turn. Before each fault the client
 *   prints `stage armed N` and waits for somebody to take away the port in use here (1 and 2 in
 *   turns); then it prints `stage migrated N`, and waits until that port is back. At the end there
 *   is a line of JSON for each transition, with all its iterations.
 * apm_cost HOST:PORT computation QPS ROUNDS MS
 *   the client: a computation of so many ms, without transitions and with them
 */
#include "apm_ends.h"
#include <pthread.h>
#include <semaphore.h>

enum { MAX_BYTES = 4096, MAX_ROUNDS = 1000, QUIET = 2000, BETWEEN = 200, RECEIVED_AT = MAX_BYTES };
/* Iterations that are kept, of which a window may be half: 0.6 s where one takes 5 us. */
enum { RING = 1 << 18 };
/* wr_id */
enum { SENT = 1u << 16 };

_Static_assert(2 * MAX_BYTES <= sizeof memory, "room to send from and to receive into");

struct job {
    uint32_t qps, bytes, rounds, faults, ms;
    int computation;
};

struct iteration {
    uint64_t began_ns, ended_ns;
};

/* A time of which the iterations are told. */
struct window {
    const char *name;
    uint64_t began_ns, ended_ns;
    struct iteration *iterations;
    uint64_t count;
};

static struct job job;
static struct iteration *ring;
static uint64_t iterations; /* so many are complete */
static int over;
static struct window windows[1 + MAX_ROUNDS];
static uint32_t window_count;

static uint64_t now_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* What the library's thread has heard, and when the last queue pair was where all are to go. */
static uint32_t heard[2]; /* ARMED, MIGRATED */
static uint64_t heard_ns;
static sem_t all_are_there, port_is_back;
static clockid_t thread_clock;

static void on_event(void *arg, const struct unbapm_event *event)
{
    (void)arg;
    if (event->type == UNBAPM_EVENT_ARMED || event->type == UNBAPM_EVENT_MIGRATED) {
        if (++heard[event->type] % job.qps == 0) {
            MUST(!pthread_getcpuclockid(pthread_self(), &thread_clock));
            heard_ns = now_ns(CLOCK_MONOTONIC);
            sem_post(&all_are_there);
        }
    } else if (event->type != UNBAPM_EVENT_LOAD_LATE) {
        fail("%s: %s", unbapm_event_str(event->type), strerror(event->error));
    }
}

static void on_other(void *arg, const struct ibv_async_event *event)
{
    (void)arg;
    if (event->event_type == IBV_EVENT_PORT_ACTIVE)
        sem_post(&port_is_back);
}

static void await(sem_t *what, const char *name)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += WAIT_MS / 1000;
    while (sem_clockwait(what, CLOCK_MONOTONIC, &until))
        if (errno != EINTR)
            fail("%s: not in time; %u ARMED and %u MIGRATED of %u queue pairs each time", name,
                 heard[0], heard[1], job.qps);
}

/* Ping-pong */

static void post_receive(uint32_t qp)
{
    struct ibv_sge sge = { (uintptr_t)memory + RECEIVED_AT, job.bytes, mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = qp, .sg_list = &sge, .num_sge = 1 }, *bad;

    OK(ibv_post_recv(qps[qp], &wr, &bad));
}

static void post_send(uint32_t qp, uint32_t at)
{
    struct ibv_sge sge = { (uintptr_t)memory + at, job.bytes, mr->lkey };
    struct ibv_send_wr wr = { .wr_id = SENT | qp,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = IBV_WR_SEND,
                              .send_flags = IBV_SEND_SIGNALED },
                       *bad;

    OK(ibv_post_send(qps[qp], &wr, &bad));
}

/* Takes a completion, if there is one: the QP of a message that has come, or -1. */
static int take(void)
{
    struct ibv_wc wc;

    if (ibv_poll_cq(cq, 1, &wc) != 1)
        return -1;
    if (wc.status != IBV_WC_SUCCESS)
        fail("QP %d: status %d", (int)(wc.wr_id & ~SENT), wc.status);
    if (wc.wr_id & SENT)
        return -1;
    MUST(wc.byte_len == job.bytes);
    post_receive(wc.wr_id);
    return wc.wr_id;
}

/* Its queue pairs in turn; a message carries the low bytes of its number. An iteration begins
 * when the one before it is over, so that no time is between. */
static void ping(void)
{
    uint32_t checked = job.bytes < 8 ? job.bytes : 8, turns;
    struct iteration it = { 0, now_ns(CLOCK_MONOTONIC) };

    for (uint64_t n = 0; !__atomic_load_n(&over, __ATOMIC_ACQUIRE); n++) {
        int from;

        memcpy(memory, &n, checked);
        it.began_ns = it.ended_ns;
        post_send(n % job.qps, 0);
        for (turns = 0; (from = take()) < 0;)
            if (++turns % 1024 == 0 && now_ns(CLOCK_MONOTONIC) - it.began_ns > WAIT_MS * 1000000ull)
                fail("message %llu has no answer", (unsigned long long)n);
        it.ended_ns = now_ns(CLOCK_MONOTONIC);
        if ((uint32_t)from != n % job.qps || memcmp((uint8_t *)memory + RECEIVED_AT, &n, checked))
            fail("message %llu has another's answer, from QP %d", (unsigned long long)n, from);
        ring[n % RING] = it;
        __atomic_store_n(&iterations, n + 1, __ATOMIC_RELEASE);
    }
}

static void pong(void)
{
    while (!__atomic_load_n(&over, __ATOMIC_ACQUIRE)) {
        int from = take();

        /* The next message comes when this answer is there. */
        if (from >= 0)
            post_send(from, RECEIVED_AT);
    }
}

/* Until so many more are complete. */
static void rest(uint64_t count)
{
    uint64_t until = __atomic_load_n(&iterations, __ATOMIC_ACQUIRE) + count;

    while (client && __atomic_load_n(&iterations, __ATOMIC_ACQUIRE) < until)
        usleep(500);
}

/* Keeps the iterations that a time has touched, once the last of them is complete. */
static void keep(const char *name, uint64_t began_ns, uint64_t ended_ns)
{
    struct window *w = &windows[window_count];
    uint64_t n, end, first;

    if (!client)
        return;
    MUST(window_count < sizeof windows / sizeof *windows);
    rest(2);
    end = __atomic_load_n(&iterations, __ATOMIC_ACQUIRE);
    first = end > RING / 2 ? end - RING / 2 : 0;
    while (end > first && ring[(end - 1) % RING].began_ns > ended_ns)
        end--;
    for (n = end; n > first && ring[(n - 1) % RING].ended_ns >= began_ns;)
        n--;
    if (n == first && n)
        fail("%s took more than %d iterations", name, RING / 2);
    *w = (struct window){ name, began_ns, ended_ns, malloc((end - n + 1) * sizeof *ring), end - n };
    MUST(w->iterations);
    for (uint64_t i = 0; i < w->count; i++)
        w->iterations[i] = ring[(n + i) % RING];
    MUST(__atomic_load_n(&iterations, __ATOMIC_ACQUIRE) - n < RING);
    window_count++;
}

static void print_windows(void)
{
    for (struct window *w = windows; w < windows + window_count; w++) {
        printf("{\"window\": \"%s\", \"began_us\": %.2f, \"ended_us\": %.2f, \"iterations\": [",
               w->name, w->began_ns / 1e3, w->ended_ns / 1e3);
        for (uint64_t i = 0; i < w->count; i++)
            printf("%s[%.2f, %.2f]", i ? ", " : "", w->iterations[i].began_ns / 1e3,
                   (w->iterations[i].ended_ns - w->iterations[i].began_ns) / 1e3);
        printf("]}\n");
    }
}

static uint64_t load(void)
{
    uint64_t began;

    meet();
    began = now_ns(CLOCK_MONOTONIC);
    OK(unbapm_load(apm, NULL, 0));
    return began;
}

static uint64_t migrate(void)
{
    uint64_t began;

    meet();
    began = now_ns(CLOCK_MONOTONIC);
    if (client)
        OK(unbapm_migrate(apm, NULL, 0));
    return began;
}

static void numbered_stage(const char *name, uint32_t n)
{
    char text[64];

    snprintf(text, sizeof text, "%s %u", name, n);
    stage(text);
}

/* What befalls the ping-pong, at both ends at once. */
static void *conduct(void *arg)
{
    uint64_t began_ns;
    char c;

    rest(BETWEEN);
    began_ns = now_ns(CLOCK_MONOTONIC);
    rest(QUIET);
    keep("quiet", began_ns, now_ns(CLOCK_MONOTONIC));
    for (uint32_t i = 0; i < job.faults; i++) {
        load();
        await(&all_are_there, "armed");
        meet();
        rest(BETWEEN);
        began_ns = now_ns(CLOCK_MONOTONIC);
        numbered_stage("armed", i);
        await(&all_are_there, "migrated by a fault");
        keep("fault", began_ns, heard_ns);
        numbered_stage("migrated", i);
        if (client)
            await(&port_is_back, "the port is back");
    }
    for (uint32_t i = 0; i < job.rounds; i++) {
        rest(BETWEEN);
        began_ns = load();
        await(&all_are_there, "armed");
        keep("armed", began_ns, heard_ns);
        rest(BETWEEN);
        began_ns = migrate();
        await(&all_are_there, "migrated by request");
        keep("migrated", began_ns, heard_ns);
    }
    meet();
    /* The server answers until the client has its last answer. */
    if (!client)
        tcp_read(tcp, &c, 1);
    __atomic_store_n(&over, 1, __ATOMIC_RELEASE);
    return arg;
}

static void latency(void)
{
    uint32_t migrations = job.rounds + job.faults, port = migrations % 2 ? 2 : 1;
    pthread_t conductor;

    for (uint32_t i = 0; i < job.qps; i++)
        for (int n = 0; n < 2; n++)
            post_receive(i);
    MUST(ring = calloc(RING, sizeof *ring));
    meet();
    MUST(!pthread_create(&conductor, NULL, conduct, NULL));
    client ? ping() : pong();
    if (client)
        tcp_write(tcp, "o", 1);
    MUST(!pthread_join(conductor, NULL));
    check_paths(port, port, migrations);
    print_windows();
}

/* Computation */

static uint64_t units;

/* So many units; how long they took. */
static uint64_t compute(void)
{
    static volatile uint64_t result;
    uint64_t began = now_ns(CLOCK_MONOTONIC), x = began;

    for (uint64_t i = 0; i < units; i++)
        x = mix(x);
    result = x;
    (void)result;
    return now_ns(CLOCK_MONOTONIC) - began;
}

/* As many units as take so long, by the fastest of some. */
static void calibrate(void)
{
    uint64_t fastest_ns = UINT64_MAX, ns;

    units = 1 << 20;
    for (int i = 0; i < 20; i++)
        fastest_ns = (ns = compute()) < fastest_ns ? ns : fastest_ns;
    units = units * job.ms * 1000000 / fastest_ns;
}

/* A computation, which begins when `ask` has asked for a transition; the server takes part in
 * that. */
static void computation_with(const char *name, uint64_t (*ask)(void), int told)
{
    uint64_t thread_ns = told && client ? now_ns(thread_clock) : 0, began_ns, asked_ns,
             computed_ns = 0;

    began_ns = ask ? ask() : now_ns(CLOCK_MONOTONIC);
    asked_ns = now_ns(CLOCK_MONOTONIC);
    if (client)
        computed_ns = compute();
    if (ask)
        await(&all_are_there, name);
    if (told && client)
        printf("{\"window\": \"%s\", \"computed_us\": %.2f, \"asked_us\": %.2f, \"lasted_us\": "
               "%.2f, \"thread_us\": %.2f}\n",
               name, computed_ns / 1e3, (asked_ns - began_ns) / 1e3,
               ask ? (heard_ns - began_ns) / 1e3 : 0, (now_ns(thread_clock) - thread_ns) / 1e3);
}

static void computation(void)
{
    if (client)
        calibrate();
    /* The first round is not told: the thread's clock is known after it. */
    for (uint32_t i = 0; i <= job.rounds; i++) {
        if (client)
            computation_with("none", NULL, i > 0);
        computation_with("armed", load, i > 0);
        computation_with("migrated", migrate, i > 0);
    }
}

static struct job asked_for(int argc, char **argv)
{
    struct job j = { .qps = argc > 3 ? atoi(argv[3]) : 0 };

    if (argc == 7 && !strcmp(argv[2], "latency"))
        j.bytes = atoi(argv[4]), j.rounds = atoi(argv[5]), j.faults = atoi(argv[6]);
    else if (argc == 6 && !strcmp(argv[2], "computation"))
        j.computation = 1, j.rounds = atoi(argv[4]), j.ms = atoi(argv[5]);
    else
        fail("usage: apm_cost PORT | apm_cost HOST:PORT latency QPS BYTES ROUNDS FAULTS | apm_cost "
             "HOST:PORT computation QPS ROUNDS MS");
    if (!j.qps || j.qps > MAX_QPS || j.rounds > MAX_ROUNDS / 4 || j.faults > MAX_ROUNDS / 4 ||
        (j.computation ? !j.ms || j.ms > 10000 : !j.bytes || j.bytes > MAX_BYTES))
        fail("1 to %d queue pairs, 0 to %d rounds and faults, 1 to %d bytes, and 1 to 10,000 ms "
             "are right",
             MAX_QPS, MAX_ROUNDS / 4, MAX_BYTES);
    return j;
}

int main(int argc, char **argv)
{
    struct unbapm_options options = UNBAPM_OPTIONS_INITIALIZER;

    client = argc != 2;
    if (client)
        job = asked_for(argc, argv);
    tcp = client ? tcp_connect(argv[1]) : tcp_listen(argv[1]);
    if (client)
        tcp_write(tcp, &job, sizeof job);
    else
        tcp_read(tcp, &job, sizeof job);
    MUST(!sem_init(&all_are_there, 0, 0) && !sem_init(&port_is_back, 0, 0));
    options.manual = 1;
    options.on_event = on_event, options.on_other = on_other;
    connect_ends(job.qps, &options);
    OK(unbapm_choose(apm, NULL, 0, peer.addresses, peer.ports));
    job.computation ? computation() : latency();
    meet();
    OK(unbapm_close(apm));
    for (uint32_t i = 0; i < job.qps; i++)
        OK(ibv_destroy_qp(qps[i]));
    printf("all is well\n");
    return 0;
}
