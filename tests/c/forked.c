/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A forked child has no verbs on what its parent made: each says EIO, at once, but for what needs
 * no NIC. What it inherits (sockets, descriptors, completions that wait) stays the parent's, which
 * goes on. It may open the device anew (see forks.c).
 *
 *   forked
 */
#include "pair.h"
#include <sys/wait.h>

enum { CHILD_SECONDS = 20, LIMIT_US = 20 * 1000000 };

static struct pair p;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_cq_ex *extended;

static void expect_eio(const char *what, int error)
{
    if (error != EIO)
        fail("%s in a child: %d (%s), not EIO", what, error, strerror(error));
}

/* For verbs that give -1 or NULL with errno. */
#define EXPECT_ERRNO(what, failed) \
    do { \
        errno = 0; \
        if (!(failed)) \
            fail("%s in a child worked", what); \
        expect_eio(what, errno); \
    } while (0)

static void child(void)
{
    struct ibv_poll_cq_attr poll_attr = { 0 };
    struct ibv_qp_init_attr init;
    struct ibv_async_event event;
    struct ibv_device_attr device;
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
    struct ibv_cq *got;
    struct ibv_wc wc;
    void *context;

    alarm(CHILD_SECONDS);
    expect_eio("ibv_poll_cq", -ibv_poll_cq(cq, 1, &wc));
    expect_eio("ibv_poll_cq again", -ibv_poll_cq(cq, 1, &wc));
    expect_eio("ibv_start_poll", ibv_start_poll(extended, &poll_attr));
    expect_eio("ibv_req_notify_cq", ibv_req_notify_cq(cq, 0));
    EXPECT_ERRNO("ibv_get_cq_event", ibv_get_cq_event(channel, &got, &context) == -1);
    EXPECT_ERRNO("ibv_get_async_event", ibv_get_async_event(p.context, &event) == -1);
    expect_eio("ibv_post_send", post_write(&p, p.from, 9, 8));
    expect_eio("ibv_post_recv", post_recv(&p, p.to, 9, 8));
    expect_eio("ibv_modify_qp", ibv_modify_qp(p.from, &attr, IBV_QP_STATE));
    expect_eio("ibv_query_qp", ibv_query_qp(p.from, &attr, IBV_QP_STATE, &init));
    expect_eio("ibv_destroy_qp", ibv_destroy_qp(p.from));
    expect_eio("ibv_destroy_cq", ibv_destroy_cq(cq));
    expect_eio("ibv_dereg_mr", ibv_dereg_mr(p.mr));
    EXPECT_ERRNO("ibv_create_cq", !ibv_create_cq(p.context, 4, NULL, NULL, 0));
    EXPECT_ERRNO("ibv_create_comp_channel", !ibv_create_comp_channel(p.context));
    EXPECT_ERRNO("ibv_alloc_pd", !ibv_alloc_pd(p.context));
    EXPECT_ERRNO("ibv_reg_mr", !ibv_reg_mr(p.pd, p.memory, 8, 0));
    if (!ibv_open_device(p.context->device))
        fail("ibv_open_device in a child: %s", strerror(errno));
    check(ibv_query_device(p.context, &device), "ibv_query_device in a child");
    _exit(0);
}

static void wait_for_child(pid_t pid)
{
    int status;

    if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status))
        fail("the child ended with status %#x", status);
}

/* Takes the event and the completion of WRITE `wr_id`. */
static void complete(uint64_t wr_id)
{
    uint64_t until = now_us() + LIMIT_US;
    struct ibv_cq *got;
    struct ibv_wc wc;
    void *context;
    int n;

    check(ibv_get_cq_event(channel, &got, &context), "ibv_get_cq_event");
    ibv_ack_cq_events(got, 1);
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0 && now_us() < until)
        ;
    if (n != 1 || wc.status || wc.wr_id != wr_id)
        fail("the parent's WRITE %d: %d completions, status %d", (int)wr_id, n,
             n == 1 ? (int)wc.status : 0);
}

int main(void)
{
    struct ibv_cq_init_attr_ex ex = { .cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS };
    struct pollfd readable;
    pid_t pid;
    int turn;

    open_first(&p, 1);
    channel = ibv_create_comp_channel(p.context);
    cq = channel ? ibv_create_cq(p.context, 16, NULL, channel, 0) : NULL;
    extended = ibv_create_cq_ex(p.context, &ex);
    if (!extended)
        fail("no extended CQ: %s", strerror(errno));
    p.from = make_qp(&p, cq);
    p.to = make_qp(&p, cq);
    connect_qp(&p, p.from, p.to, 1);
    connect_qp(&p, p.to, p.from, 1);
    /* Once with an empty CQ, once with an event and a completion that wait. */
    for (turn = 0; turn < 2; turn++) {
        check(ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
        if (turn) {
            check(post_write(&p, p.from, turn, 64), "ibv_post_send");
            readable = (struct pollfd){ .fd = channel->fd, .events = POLLIN };
            if (poll(&readable, 1, LIMIT_US / 1000) != 1)
                fail("no event came");
        }
        fflush(NULL);
        pid = fork();
        if (pid == 0)
            child();
        wait_for_child(pid);
        if (!turn)
            check(post_write(&p, p.from, turn, 64), "ibv_post_send");
        complete(turn);
    }
    printf("two children had no verbs on the objects of the parent, which goes on\n");
    return 0;
}
