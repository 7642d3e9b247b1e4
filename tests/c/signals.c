/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A signal whose handler was installed without SA_RESTART ends ibv_get_cq_event and
 * ibv_get_async_event with EINTR, as it ends read(2), which libibverbs calls there; one with
 * SA_RESTART does not. Programs end their tests by SIGALRM that way (qperf).
 *
 *   signals
 */
#include "pair.h"
#include <signal.h>
#include <sys/time.h>

enum { RESTARTED = 3, EVERY_US = 20000 };

static volatile sig_atomic_t handled;

static void install(int flags);

/* The first times the wait goes on; then it ends. */
static void handler(int signal)
{
    (void)signal;
    if (++handled == RESTARTED)
        install(0);
}

static void install(int flags)
{
    struct sigaction action = { .sa_handler = handler, .sa_flags = flags };

    sigaction(SIGALRM, &action, NULL);
}

static void tick(long us)
{
    struct itimerval every = { { 0, us }, { 0, us } };

    handled = 0;
    install(SA_RESTART);
    setitimer(ITIMER_REAL, &every, NULL);
}

static void expect_interrupted(int result, const char *what)
{
    int error = errno;

    tick(0);
    if (result != -1 || error != EINTR)
        fail("%s: %d, %s", what, result, strerror(error));
}

int main(void)
{
    struct pair p;
    struct ibv_comp_channel *channel;
    struct ibv_async_event event;
    struct ibv_cq *cq;
    void *context;
    int interrupted;

    open_first(&p, 1);
    channel = ibv_create_comp_channel(p.context);
    cq = channel ? ibv_create_cq(p.context, 16, NULL, channel, 0) : NULL;
    if (!cq || ibv_req_notify_cq(cq, 0))
        fail("no CQ with a channel");
    tick(EVERY_US);
    interrupted = ibv_get_cq_event(channel, &cq, &context);
    if (handled <= RESTARTED)
        fail("ibv_get_cq_event ended after %d signals, of which %d have SA_RESTART", handled,
             RESTARTED);
    expect_interrupted(interrupted, "ibv_get_cq_event");
    tick(EVERY_US);
    interrupted = ibv_get_async_event(p.context, &event);
    if (handled <= RESTARTED)
        fail("ibv_get_async_event ended after %d signals, of which %d have SA_RESTART", handled,
             RESTARTED);
    expect_interrupted(interrupted, "ibv_get_async_event");
    printf("both waits ended by the signal\n");
    return 0;
}
