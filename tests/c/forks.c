/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forked processes that use verbs themselves: each opens everything anew, and has traffic between
 * two QPs of its own until the stop file appears. What was made before the fork says EIO in the
 * child.
 *
 *   forks list | closed | live | nested STOP-FILE
 *
 * list: the parent has only looked at the devices when it forks; closed: it has had traffic and
 * closed all; live: it has traffic, and several threads, and goes on; nested: as live, and the
 * child forks in turn.
 */
#include "pair.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

enum { LIMIT_US = 60 * 1000000, STALL_US = 25 * 1000000 };

static const char *stop_file;
static atomic_int stop;

struct end {
    struct pair p;
    struct ibv_cq *cq;
    unsigned long long messages;
};

static void set_up(struct end *e)
{
    memset(e, 0, sizeof *e);
    open_first(&e->p, 1);
    e->cq = ibv_create_cq(e->p.context, 16, NULL, NULL, 0);
    e->p.from = make_qp(&e->p, e->cq);
    e->p.to = make_qp(&e->p, e->cq);
    connect_qp(&e->p, e->p.from, e->p.to, 1);
    connect_qp(&e->p, e->p.to, e->p.from, 1);
}

/* One WRITE, and a look at what it wrote. */
static void write_one(struct end *e)
{
    uint64_t until = now_us() + STALL_US;
    uint8_t *to = e->p.memory + PAIR_BYTES / 2;
    const char *wrong;
    struct ibv_wc wc;
    int n;

    content_make(e->p.memory, 1000, 7, e->messages);
    check(post_write(&e->p, e->p.from, e->messages, 1000), "ibv_post_send");
    while ((n = ibv_poll_cq(e->cq, 1, &wc)) == 0)
        if (now_us() > until)
            fail("process %d: WRITE %llu does not complete", getpid(), e->messages);
    if (n < 0 || wc.status || wc.wr_id != e->messages)
        fail("process %d: WRITE %llu: poll gives %d, status %d", getpid(), e->messages, n,
             n > 0 ? (int)wc.status : 0);
    if ((wrong = content_wrong(to, 1000, 7, e->messages)))
        fail("process %d: WRITE %llu: %s", getpid(), e->messages, wrong);
    e->messages++;
}

static void tear_down(struct end *e)
{
    check(ibv_destroy_qp(e->p.from), "ibv_destroy_qp");
    check(ibv_destroy_qp(e->p.to), "ibv_destroy_qp");
    check(ibv_destroy_cq(e->cq), "ibv_destroy_cq");
    check(ibv_dereg_mr(e->p.mr), "ibv_dereg_mr");
    check(ibv_dealloc_pd(e->p.pd), "ibv_dealloc_pd");
    check(ibv_close_device(e->p.context), "ibv_close_device");
}

static void *traffic(void *end)
{
    struct end *e = end;
    uint64_t until = now_us() + LIMIT_US;

    while (!atomic_load(&stop)) {
        write_one(e);
        if (e->messages % 64 == 0 && !access(stop_file, F_OK))
            break;
        if (now_us() > until)
            fail("process %d: nobody says stop", getpid());
    }
    return NULL;
}

static void expect_dead(struct end *e)
{
    struct ibv_wc wc;

    if (ibv_poll_cq(e->cq, 1, &wc) != -EIO || post_write(&e->p, e->p.from, 1, 8) != EIO ||
        ibv_destroy_qp(e->p.from) != EIO || ibv_destroy_cq(e->cq) != EIO ||
        ibv_dereg_mr(e->p.mr) != EIO || ibv_close_device(e->p.context) != EIO)
        fail("an object of the parent does not say EIO");
}

static void run_here(struct end *e)
{
    printf("{\"running\": %d}\n", getpid());
    fflush(stdout);
    traffic(e);
    printf("{\"pid\": %d, \"messages\": %llu}\n", getpid(), e->messages);
    fflush(stdout);
}

static void wait_for(pid_t child)
{
    int status;

    if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status))
        fail("child %d ended with status %#x", child, status);
}

/* A child: its own end, with traffic; `depth` more children of its own. `old`: its parent's. */
static void child(struct end *old, int depth)
{
    static struct end ends[4];
    struct end *e = ends + depth;
    pid_t below = 0;

    if (old)
        expect_dead(old);
    set_up(e);
    write_one(e);
    if (depth > 0 && (below = fork()) == 0) {
        child(e, depth - 1);
        exit(0);
    }
    run_here(e);
    if (below)
        wait_for(below);
    if (old)
        expect_dead(old);
    tear_down(e);
}

int main(int argc, char **argv)
{
    static struct end e;
    struct ibv_device **list;
    pthread_t thread;
    pid_t pid;
    int live, nested;

    if (argc != 3)
        fail("usage: forks list | closed | live | nested STOP-FILE");
    stop_file = argv[2];
    nested = !strcmp(argv[1], "nested");
    live = nested || !strcmp(argv[1], "live");
    list = ibv_get_device_list(NULL);
    if (!list || !list[0])
        fail("no device");
    if (strcmp(argv[1], "list")) {
        set_up(&e);
        write_one(&e);
    }
    if (!strcmp(argv[1], "closed"))
        tear_down(&e);
    if (live && pthread_create(&thread, NULL, traffic, &e))
        fail("no thread");
    pid = fork();
    if (pid == 0) {
        child(live ? &e : NULL, nested ? 2 : 0);
        exit(0);
    }
    if (!live) {
        set_up(&e);
        run_here(&e);
    } else {
        printf("{\"running\": %d}\n", getpid());
        fflush(stdout);
        pthread_join(thread, NULL);
        printf("{\"pid\": %d, \"messages\": %llu}\n", getpid(), e.messages);
    }
    wait_for(pid);
    tear_down(&e);
    ibv_free_device_list(list);
    return 0;
}
