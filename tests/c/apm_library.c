/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library of path migration (unbroken/apm.h) between two processes on devices with two ports:
 * its modules, how events are shared, what it refuses; and how long paths take to load and to
 * migrate. Every QP carries a FETCH_ADD in each stage, which must find its own number.
 *
 * apm_library PORT                                  the server
 * apm_library HOST:PORT QPS MODE [ROUNDS]           the client, which says what both do; it prints
 *                                                   each stage as it is reached
 *   event, query    load and migrate, there and back, noticed by the library's thread or by
 *                   queries; with ROUNDS, a line of JSON with the times
 *   port            somebody takes away port 1 of one end, and gives it back
 *   unhealthy       somebody takes away port 2 here, later port 1 of the peer
 *   own             the program reads the asynchronous events itself
 *   refuse          what is wrong gets an error that says so
 */
#include "apm_ends.h"

enum { MAX_ROUNDS = 1000 };

_Static_assert(sizeof(struct unbapm_path) == 40 && offsetof(struct unbapm_path, pkey_index) == 34,
               "unbapm_path");
_Static_assert(sizeof(struct unbapm_address) == 24 &&
                   offsetof(struct unbapm_address, sgid_index) == 22,
               "unbapm_address");
_Static_assert(sizeof(struct unbapm_event) == 72 && offsetof(struct unbapm_event, path) == 24 &&
                   offsetof(struct unbapm_event, asked) == 64,
               "unbapm_event");
_Static_assert(sizeof(struct unbapm_info) == 104 && offsetof(struct unbapm_info, alternate) == 64,
               "unbapm_info");
_Static_assert(sizeof(struct unbapm_options) == 64 &&
                   offsetof(struct unbapm_options, on_event) == 40,
               "unbapm_options");

struct job {
    uint32_t qps, rounds;
    char mode[16];
};

static struct job job;
/* By type, and those of ports that were passed on. */
static unsigned events[16], port_events;
static struct unbapm_event last[16];

#define REFUSED(call, number, words) \
    do { \
        int e_ = (call); \
        if (e_ != (number) || !strstr(unbapm_last_error(), words)) \
            fail("line %d: %s: %s: %s", __LINE__, #call, strerror(e_), unbapm_last_error()); \
    } while (0)

static int mode(const char *name) { return !strcmp(job.mode, name); }

static void on_event(void *arg, const struct unbapm_event *event)
{
    MUST(arg == &job && event->type < 16);
    last[event->type] = *event;
    __atomic_add_fetch(&events[event->type], 1, __ATOMIC_SEQ_CST);
}

static void on_other(void *arg, const struct ibv_async_event *event)
{
    MUST(arg == &job);
    if (event->event_type == IBV_EVENT_PORT_ERR || event->event_type == IBV_EVENT_PORT_ACTIVE)
        __atomic_add_fetch(&port_events, 1, __ATOMIC_SEQ_CST);
}

static void await(const unsigned *count, unsigned least, const char *what)
{
    uint64_t until = now_us() + WAIT_MS * 1000ull;

    while (__atomic_load_n(count, __ATOMIC_SEQ_CST) < least) {
        if (now_us() > until)
            fail("%u of %u in time: %s", *count, least, what);
        usleep(200);
    }
}

static void set_up(void)
{
    struct unbapm_options options = UNBAPM_OPTIONS_INITIALIZER;

    options.no_thread = mode("query") || mode("own");
    if (!mode("refuse"))
        options.on_event = on_event, options.on_other = on_other, options.arg = &job;
    options.manual = job.rounds > 0;
    options.respecify = mode("unhealthy");
    options.armed_event = mode("own") ? 99 : 0;
    connect_ends(job.qps, &options);
}

/* One FETCH_ADD on each QP, by the client; both call it. */
static void carry(void)
{
    static uint64_t round;
    uint64_t until = now_us() + WAIT_MS * 1000ull;
    uint32_t i, done = 0;
    struct ibv_wc wc;

    meet();
    for (i = 0; client && i < job.qps; i++) {
        struct ibv_sge sge = { (uintptr_t)&memory[MAX_QPS + i], 8, mr->lkey };
        struct ibv_send_wr wr = { .wr_id = i,
                                  .sg_list = &sge,
                                  .num_sge = 1,
                                  .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
                                  .send_flags = IBV_SEND_SIGNALED },
                           *bad;

        wr.wr.atomic.remote_addr = peer.addr + 8 * i;
        wr.wr.atomic.rkey = peer.rkey;
        wr.wr.atomic.compare_add = 1;
        OK(ibv_post_send(qps[i], &wr, &bad));
    }
    while (client && done < job.qps) {
        if (ibv_poll_cq(cq, 1, &wc) == 1) {
            if (wc.status)
                fail("QP %d: status %d", (int)wc.wr_id, wc.status);
            done++;
        }
        if (now_us() > until)
            fail("%u of %u atomics are complete", done, job.qps);
    }
    for (i = 0; client && i < job.qps; i++)
        if (memory[MAX_QPS + i] != round)
            fail("QP %u: the counter is %llu, not %llu", i, (unsigned long long)memory[MAX_QPS + i],
                 (unsigned long long)round);
    round++;
    meet();
}

static enum unbapm_how how(void) { return mode("query") ? UNBAPM_BY_QUERY : UNBAPM_BY_EVENT; }

static uint64_t load(void)
{
    uint64_t began;

    meet();
    began = now_us();
    OK(unbapm_load(apm, NULL, 0));
    OK(unbapm_wait(apm, NULL, 0, UNBAPM_UNTIL_ARMED, how(), WAIT_MS));
    began = now_us() - began;
    meet();
    return began;
}

/* The peer has migrated all: without a thread only a query tells. */
static void follow(unsigned migrations)
{
    uint64_t until = now_us() + WAIT_MS * 1000ull;

    for (uint32_t i = 0; i < job.qps; i++)
        while (info(i).migrations < migrations) {
            usleep(100);
            if (how() == UNBAPM_BY_QUERY)
                OK(unbapm_wait(apm, &qps[i], 1, UNBAPM_UNTIL_MIGRATED, UNBAPM_BY_QUERY, WAIT_MS));
            if (now_us() > until)
                fail("QP %u has not followed its peer", i);
        }
}

/* When the last migration of the last time was noticed, after it was asked for. */
static uint64_t noticed_us;

static uint64_t migrate(unsigned migrations)
{
    uint64_t began = now_us(), took = 0;

    if (client) {
        OK(unbapm_migrate(apm, NULL, 0));
        OK(unbapm_wait(apm, NULL, 0, UNBAPM_UNTIL_MIGRATED, how(), WAIT_MS));
        took = now_us() - began;
        await(&events[UNBAPM_EVENT_MIGRATED], migrations * job.qps, "told of the migrations");
        noticed_us = last[UNBAPM_EVENT_MIGRATED].time_us - began;
    } else {
        follow(migrations);
    }
    return took;
}

static int by_number(const void *a, const void *b)
{
    return *(const uint64_t *)a < *(const uint64_t *)b
               ? -1
               : *(const uint64_t *)a > *(const uint64_t *)b;
}

/* There and back, time and again. */
static void bench(void)
{
    static uint64_t armed[MAX_ROUNDS], moved[MAX_ROUNDS], noticed[MAX_ROUNDS];
    uint32_t i;

    for (i = 0; i < job.rounds; i++) {
        armed[i] = load();
        moved[i] = migrate(i + 1);
        noticed[i] = noticed_us;
        carry();
        check_paths(i % 2 ? 1 : 2, i % 2 ? 1 : 2, i + 1);
    }
    qsort(armed, i, sizeof *armed, by_number);
    qsort(moved, i, sizeof *moved, by_number);
    qsort(noticed, i, sizeof *noticed, by_number);
    if (client)
        printf("{\"qps\": %u, \"rounds\": %u, \"by\": \"%s\", \"armed_us\": %llu, "
               "\"armed_least_us\": %llu, \"armed_most_us\": %llu, \"migrated_us\": %llu, "
               "\"migrated_least_us\": %llu, \"migrated_most_us\": %llu, \"noticed_us\": %llu, "
               "\"noticed_least_us\": %llu, \"noticed_most_us\": %llu}\n",
               job.qps, i, job.mode, (unsigned long long)armed[i / 2], (unsigned long long)armed[0],
               (unsigned long long)armed[i - 1], (unsigned long long)moved[i / 2],
               (unsigned long long)moved[0], (unsigned long long)moved[i - 1],
               (unsigned long long)noticed[i / 2], (unsigned long long)noticed[0],
               (unsigned long long)noticed[i - 1]);
}

/* Loaded by itself after each migration. */
static void there_and_back(void)
{
    carry();
    load();
    stage("armed");
    for (unsigned n = 1; n <= 2; n++) {
        migrate(n);
        carry();
        check_paths(3 - n, 3 - n, n);
        OK(unbapm_wait(apm, NULL, 0, UNBAPM_UNTIL_ARMED, how(), WAIT_MS));
        meet();
    }
    await(&events[UNBAPM_EVENT_ARMED], 3 * job.qps, "told of ARMED");
    MUST(events[UNBAPM_EVENT_MIGRATED] == 2 * job.qps && events[UNBAPM_EVENT_ARMED] == 3 * job.qps);
    MUST(last[UNBAPM_EVENT_MIGRATED].asked == client &&
         last[UNBAPM_EVENT_MIGRATED].path.ah.port_num == 1);
    stage("back");
}

static void port_dies(void)
{
    load();
    carry();
    stage("armed");
    await(&events[UNBAPM_EVENT_MIGRATED], job.qps, "migrations");
    carry();
    check_paths(2, 2, 1);
    stage("migrated");
    await(&events[UNBAPM_EVENT_ARMED], 2 * job.qps, "armed again");
    meet();
    stage("rearmed");
    migrate(2);
    carry();
    check_paths(1, 1, 2);
    /* Down and up, where it was. */
    tcp_write(tcp, &port_events, sizeof port_events);
    tcp_read(tcp, &events[15], sizeof events[15]);
    MUST(port_events + events[15] == 2);
    stage("back");
}

/* Whose alternate path is unhealthy takes another, and tells the peer, which takes the same. */
static void unhealthy(void)
{
    uint8_t way[2];

    load();
    carry();
    stage("armed");
    if (client) {
        await(&events[UNBAPM_EVENT_RESPECIFIED], job.qps, "respecified");
        MUST(events[UNBAPM_EVENT_UNHEALTHY] == job.qps &&
             last[UNBAPM_EVENT_UNHEALTHY].path.ah.port_num == 2);
        way[0] = last[UNBAPM_EVENT_RESPECIFIED].path.ah.port_num;
        way[1] =
            memcmp(&last[UNBAPM_EVENT_RESPECIFIED].path.ah.grh.dgid, &peer.addresses[0].gid, 16)
                ? 2
                : 1;
        MUST(way[0] == 1 && way[1] == 2);
        tcp_write(tcp, way, 2);
    } else {
        struct unbapm_path path = { .timeout = 14 };

        tcp_read(tcp, way, 2);
        path.ah = vector(way[1], &peer.addresses[way[0] - 1]);
        OK(unbapm_specify(apm, NULL, 0, &path, 1));
        OK(unbapm_load(apm, NULL, 0));
    }
    OK(unbapm_wait(apm, NULL, 0, UNBAPM_UNTIL_ARMED, UNBAPM_BY_EVENT, WAIT_MS));
    carry();
    stage("respecified");
    await(&events[UNBAPM_EVENT_MIGRATED], job.qps, "migrations");
    carry();
    check_paths(client ? 1 : 2, client ? 2 : 1, 1);
    stage("migrated");
}

/* The program's own loop: events, and what is due. */
static void turn(uint32_t *armed_events)
{
    struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
    struct ibv_async_event event;
    uint64_t next_us;
    int taken;

    OK(unbapm_progress(apm, &next_us));
    poll(&fd, 1, next_us < 10000 ? 1 : 10);
    if (fd.revents & POLLIN) {
        MUST(!ibv_get_async_event(context, &event));
        OK(unbapm_handle_event(apm, &event, &taken));
        MUST(taken == (event.event_type == IBV_EVENT_PATH_MIG));
        ibv_ack_async_event(&event);
    }
    /* As a device would that has an event for it. */
    event = (struct ibv_async_event){ .event_type = 99, .element.qp = qps[0] };
    OK(unbapm_handle_event(apm, &event, &taken));
    MUST(taken);
    ++*armed_events;
}

static void own_events(void)
{
    uint64_t until = now_us() + WAIT_MS * 1000ull;
    uint32_t turns = 0;

    meet();
    OK(unbapm_load(apm, NULL, 0));
    for (unsigned n = 1; n <= 2; n++) {
        while (events[UNBAPM_EVENT_ARMED] < n * job.qps && now_us() < until)
            turn(&turns);
        MUST(events[UNBAPM_EVENT_ARMED] == n * job.qps);
        carry();
        if (n == 1 && client)
            OK(unbapm_migrate(apm, NULL, 0));
        while (n == 1 && events[UNBAPM_EVENT_MIGRATED] < job.qps && now_us() < until)
            turn(&turns);
    }
    check_paths(2, 2, 1);
    stage("back");
}

/* Queue pairs lead to four processes in turns; those of two of them are loaded and migrated, and
 * no others. */
static void by_processes(void)
{
    enum { PROCESSES = 4 };
    static const uint64_t chosen[] = { 1, 3, 99 };
    struct ibv_qp *found[MAX_QPS];
    int count = 0;

    for (uint32_t i = 0; i < job.qps; i++)
        if (i % PROCESSES)
            OK(unbapm_set_process(apm, &qps[i], 1, i % PROCESSES));
    OK(unbapm_of_processes(apm, chosen, 3, NULL, &count));
    MUST(count == (int)job.qps / 2);
    count--;
    REFUSED(unbapm_of_processes(apm, chosen, 3, found, &count), ENOSPC, "queue pairs lead there");
    REFUSED(unbapm_of_processes(apm, &chosen[2], 1, NULL, &count), ENOENT,
            "unbapm_set_process says");
    count = MAX_QPS;
    OK(unbapm_of_processes(apm, chosen, 2, found, &count));
    MUST(count == (int)job.qps / 2);
    meet();
    OK(unbapm_load(apm, found, count));
    OK(unbapm_wait(apm, found, count, UNBAPM_UNTIL_ARMED, UNBAPM_BY_QUERY, WAIT_MS));
    meet();
    if (client) {
        OK(unbapm_migrate(apm, found, count));
        OK(unbapm_wait(apm, found, count, UNBAPM_UNTIL_MIGRATED, UNBAPM_BY_QUERY, WAIT_MS));
    }
    carry();
    OK(unbapm_wait(apm, found, count, UNBAPM_UNTIL_MIGRATED, UNBAPM_BY_QUERY, WAIT_MS));
    for (uint32_t i = 0; i < job.qps; i++) {
        int moves = i % PROCESSES == 1 || i % PROCESSES == 3;

        if (info(i).migrations != (uint64_t)moves || info(i).primary.ah.port_num != (moves ? 2 : 1))
            fail("QP %u of process %u: %llu migrations, port %d", i, i % PROCESSES,
                 (unsigned long long)info(i).migrations, info(i).primary.ah.port_num);
    }
    stage("processes");
}

static void refuse(void)
{
    struct unbapm_options options = UNBAPM_OPTIONS_INITIALIZER;
    struct unbapm_path path = { .ah = vector(2, &peer.addresses[1]) }, paths[17];
    struct unbapm_address stranger = peer.addresses[0];
    struct unbapm_event taken[8];
    struct ibv_async_event event = { .event_type = IBV_EVENT_COMM_EST };
    struct ibv_qp *none = NULL, *unknown = (struct ibv_qp *)own.addr;
    struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
    int count = 8, fd;
    unbapm_t other;

    stranger.gid.raw[15] ^= 0x55;
    options.size = 8;
    REFUSED(unbapm_open(context, &options, &other), EINVAL, "UNBAPM_OPTIONS_INITIALIZER");
    REFUSED(unbapm_open(NULL, NULL, &other), EINVAL, "context is NULL");
    REFUSED(unbapm_open(context, NULL, NULL), EINVAL, "apm is NULL");
    REFUSED(unbapm_load((unbapm_t)context, NULL, 0), EINVAL, "is no handle");
    REFUSED(unbapm_add(apm, NULL, 0), EINVAL, "qps is NULL");
    REFUSED(unbapm_add(apm, &none, 1), EINVAL, "qps[0] is NULL");
    REFUSED(unbapm_add(apm, qps, -1), EINVAL, "number of qps");
    REFUSED(unbapm_add(apm, qps, 1), EEXIST, "added already");
    REFUSED(unbapm_load(apm, &unknown, 1), ENOENT, "unbapm_add comes first");
    REFUSED(unbapm_set_process(apm, &unknown, 1, 5), ENOENT, "unbapm_add comes first");
    REFUSED(unbapm_of_processes(apm, NULL, 1, NULL, &count), EINVAL, "processes is NULL");
    REFUSED(unbapm_load(apm, qps, 1), EINVAL, "unbapm_specify or unbapm_choose comes first");
    REFUSED(unbapm_migrate(apm, qps, 1), EBUSY, "UNLOADED");
    path.ah.port_num = 3;
    REFUSED(unbapm_specify(apm, NULL, 0, &path, 1), EINVAL, "ports 1 to 2");
    path.ah.port_num = 2, path.ah.grh.sgid_index = 250;
    REFUSED(unbapm_specify(apm, NULL, 0, &path, 1), EINVAL, "gid_index 250");
    path.ah.grh.sgid_index = test_gid_index(), path.ah.is_global = 0;
    REFUSED(unbapm_specify(apm, NULL, 0, &path, 1), EINVAL, "is_global");
    path.ah.is_global = 1, path.ah.src_path_bits = 1;
    REFUSED(unbapm_specify(apm, NULL, 0, &path, 1), EINVAL, "src_path_bits is 1");
    path.ah.src_path_bits = 0, path.timeout = 32;
    REFUSED(unbapm_specify(apm, NULL, 0, &path, 1), EINVAL, "timeout is 32");
    path.timeout = 0;
    for (int i = 0; i < 17; i++)
        paths[i] = path;
    REFUSED(unbapm_specify(apm, NULL, 0, paths, 17), EINVAL, "1 to 16");
    REFUSED(unbapm_specify(apm, NULL, 0, paths, 0), EINVAL, "1 to 16");
    REFUSED(unbapm_choose(apm, NULL, 0, &stranger, 1), EINVAL, "unbapm_addresses are right");
    REFUSED(unbapm_wait(apm, NULL, 0, 7, UNBAPM_BY_QUERY, 1), EINVAL, "until is 7");
    REFUSED(unbapm_wait(apm, qps, 1, UNBAPM_UNTIL_ARMED, UNBAPM_BY_EVENT, 20), ETIMEDOUT,
            "the first is UNLOADED");
    REFUSED(unbapm_wait(apm, qps, 1, UNBAPM_UNTIL_ARMED, UNBAPM_BY_QUERY, 20), ETIMEDOUT,
            "the first is UNLOADED");
    REFUSED(unbapm_handle_event(apm, &event, NULL), EINVAL, "no_thread");
    REFUSED(unbapm_progress(apm, NULL), EINVAL, "no_thread");
    count = 1;
    REFUSED(unbapm_addresses(apm, own.addresses, &count), ENOSPC, "2 ports");
    /* Events are taken by hand. */
    OK(unbapm_specify(apm, NULL, 0, &path, 1));
    load();
    OK(unbapm_fd(apm, &fd));
    MUST(poll(&(struct pollfd){ .fd = fd, .events = POLLIN }, 1, WAIT_MS) == 1);
    count = 8;
    OK(unbapm_poll_events(apm, taken, &count));
    MUST(count == 1 && taken[0].type == UNBAPM_EVENT_ARMED && taken[0].qp == qps[0] &&
         info(0).state == UNBAPM_ARMED && info(0).loaded && info(0).healthy);
    MUST(poll(&(struct pollfd){ .fd = fd, .events = POLLIN }, 1, 0) == 0);
    OK(unbapm_remove(apm, NULL, 0));
    REFUSED(unbapm_query(apm, qps[0], &(struct unbapm_info){ 0 }), ENOENT,
            "unbapm_add comes first");
    OK(ibv_modify_qp(qps[0], &reset, IBV_QP_STATE));
    REFUSED(unbapm_add(apm, qps, 1), EINVAL, "in RTS it can be added");
    stage("refused");
}

int main(int argc, char **argv)
{
    client = argc >= 4;
    if (!client && argc != 2)
        fail("usage: apm_library PORT | apm_library HOST:PORT QPS MODE [ROUNDS]");
    tcp = client ? tcp_connect(argv[1]) : tcp_listen(argv[1]);
    if (client) {
        job = (struct job){ .qps = atoi(argv[2]), .rounds = argc > 4 ? atoi(argv[4]) : 0 };
        snprintf(job.mode, sizeof job.mode, "%s", argv[3]);
        if (!job.qps || job.qps > MAX_QPS || job.rounds > MAX_ROUNDS)
            fail("1 to %d QPs and 0 to %d rounds are right", MAX_QPS, MAX_ROUNDS);
        tcp_write(tcp, &job, sizeof job);
    } else {
        tcp_read(tcp, &job, sizeof job);
    }
    set_up();
    if (!mode("refuse"))
        OK(unbapm_choose(apm, NULL, 0, peer.addresses, peer.ports));
    if (mode("event") || mode("query"))
        job.rounds ? bench() : there_and_back();
    else if (mode("port"))
        port_dies();
    else if (mode("unhealthy"))
        unhealthy();
    else if (mode("own"))
        own_events();
    else if (mode("processes"))
        by_processes();
    else if (mode("refuse"))
        refuse();
    else
        fail("there is no mode '%s'", job.mode);
    meet();
    OK(unbapm_close(apm));
    for (uint32_t i = 0; i < job.qps; i++)
        OK(ibv_destroy_qp(qps[i]));
    REFUSED(unbapm_close(apm), EINVAL, "has been given back");
    printf("all is well\n");
    return 0;
}
