/* SPDX-License-Identifier: Apache-2.0 */
/* Faults of NICs, and what devices of the machine raise by themselves. */
#ifndef UNBROKEN_TESTS_OUTCOMES_FAULTS_H
#define UNBROKEN_TESTS_OUTCOMES_FAULTS_H

#include "outcomes_ends.h"

/* Whether a command of the suite's, with one more word, ends well. */
static bool runs(const char *variable, const char *what)
{
    char line[1024];
    const char *before = getenv(variable);

    if (!before)
        fail("%s is to be set", variable);
    snprintf(line, sizeof line, "%s '%s'", before, what);
    return !system(line);
}

static void command(const char *variable, const char *what)
{
    if (!runs(variable, what))
        fail("%s '%s' fails", getenv(variable), what);
}

/* So many, where failover does not spare the program. */
static int unless_moved(int events)
{
    return getenv("TEST_PROTECTED") ? 0 : events;
}

static void port_down_under(enum ibv_qp_type type)
{
    struct shape s = { .type = type, .timeout = 10, .retry = 2 };
    struct due none = { 0 };

    if (!connect_ends(&s))
        return;
    command("TEST_FAULT", "nic a/0 down");
    send_request(0, IBV_WR_RDMA_WRITE, 8);
    collect((struct due){ 1, 0, type == IBV_QPT_UC ? 1 : unless_moved(1) }, none);
    command("TEST_CLEAR", "nic a/0 down");
    finish((struct due){ 1, 0, type == IBV_QPT_UC ? 2 : unless_moved(2) }, none);
}

static void port_down(void)
{
    port_down_under(IBV_QPT_RC);
}

static void port_down_uc(void)
{
    port_down_under(IBV_QPT_UC);
}

/* A context with which nothing was ever made, beside those that are used. */
static void port_down_watched(void)
{
    struct end watcher = { .context = open_device(0) };
    uint64_t until = now_us() + LIMIT_MS * 1000;

    if (!connect_ends(&rc))
        return;
    command("TEST_FAULT", "nic a/0 down");
    while (watcher.event_count < 1 && now_us() < until)
        take_events(&watcher);
    command("TEST_CLEAR", "nic a/0 down");
    while (watcher.event_count < 2 && now_us() < until)
        take_events(&watcher);
    print_end(&watcher);
    check(ibv_close_device(watcher.context), "ibv_close_device");
    collect((struct due){ 0 }, (struct due){ 0 });
    printf(" | ");
    print_end(&b);
}

/* A SEND waits for a receive, and a receive for a message, as the NIC dies. */
static void device_fatal(void)
{
    if (!connect_ends(&rc))
        return;
    recv_into(&a, 0, 8);
    send_request(0, IBV_WR_SEND, 8);
    command("TEST_FAULT", "nic a/0 dead");
    collect((struct due){ 0, 0, unless_moved(1) }, (struct due){ 0 });
    recv_into(&b, 0, 8);
    finish((struct due){ 1, unless_moved(1), unless_moved(1) },
           (struct due){ 0, 1 - unless_moved(1), 0 });
}

/* a's device raises an event; then another one, which the program is told of behind it. */
static void raised(const char *name)
{
    static const char last[] = "SM_CHANGE";
    uint64_t until = now_us() + LIMIT_MS * 1000;
    char fault[64];
    bool came = false;

    if (!connect_ends(&rc))
        return;
    snprintf(fault, sizeof fault, "event unb0 %s", name);
    command("TEST_DEVICE_FAULT", fault);
    if (!strcmp(name, "DEVICE_FATAL")) {
        send_request(0, IBV_WR_RDMA_WRITE, 8);
        collect((struct due){ 1, 0, 0 }, (struct due){ 0 });
        came = true;
    } else if (strcmp(name, last)) {
        snprintf(fault, sizeof fault, "event unb0 %s", last);
        command("TEST_DEVICE_FAULT", fault);
    }
    while (!came && now_us() < until) {
        take_events(&a);
        for (int i = 0; i < a.event_count; i++)
            came |= !strcmp(a.events[i], last);
    }
    finish((struct due){ 0 }, (struct due){ 0 });
}

static bool has_switched(const struct ibv_qp *qp)
{
    char number[16];

    snprintf(number, sizeof number, "%u", qp->qp_num);
    return runs("TEST_SWITCHED", number);
}

/* A WRITE of a's completes with that status on its device: until it does, or until failover has
 * answered to it. */
static void struck(const char *status)
{
    uint64_t until = now_us() + LIMIT_MS * 1000;
    char fault[64];
    int number = 0;

    if (!connect_ends(&rc))
        return;
    snprintf(fault, sizeof fault, "wqe-error unb0 %s", status);
    command("TEST_DEVICE_FAULT", fault);
    do {
        a.sent_count = 0;
        send_request(number, IBV_WR_RDMA_WRITE, 8);
        while (!a.sent_count && now_us() < until)
            take_completions(&a);
        number++;
    } while (now_us() < until && a.sent_count && !a.sent[0].status &&
             (number % 16 || !has_switched(a.qp)));
    send_request(number, IBV_WR_RDMA_WRITE, 8);
    finish((struct due){ 2, 0, 0 }, (struct due){ 0 });
}

#endif
