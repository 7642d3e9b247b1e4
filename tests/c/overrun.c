/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A completion queue that overruns: IBV_EVENT_CQ_ERR with the queue, once; IBV_EVENT_QP_FATAL with
 * the QP whose completion was lost, which is in ERR then; the queue says so at each poll; and the
 * peer gets an error, not a silence.
 *
 *   overrun
 */
#include "pair.h"

enum { SMALL = 4, LARGE = 256, MESSAGES = 32, LIMIT_MS = 20000, QUIET_MS = 200 };

static struct pair p;

/* The next event, or -1 if none comes in `ms`. Its element is in `element`. */
static int event(int ms, void **element)
{
    struct pollfd readable = { .fd = p.context->async_fd, .events = POLLIN };
    struct ibv_async_event e;

    if (poll(&readable, 1, ms) != 1)
        return -1;
    check(ibv_get_async_event(p.context, &e), "ibv_get_async_event");
    *element = e.event_type == IBV_EVENT_CQ_ERR ? (void *)e.element.cq : (void *)e.element.qp;
    ibv_ack_async_event(&e);
    return e.event_type;
}

/* The events of an overrun in any order, each once, and no other. */
static void expect_events(struct ibv_cq *cq, struct ibv_qp *qp, const char *what)
{
    int of_cq = 0, of_qp = 0, type;
    void *element;

    while ((type = event(of_cq && of_qp ? QUIET_MS : LIMIT_MS, &element)) >= 0) {
        if (type == IBV_EVENT_CQ_ERR && element == cq)
            of_cq++;
        else if (type == IBV_EVENT_QP_FATAL && element == qp)
            of_qp++;
        else
            fail("%s: an event of type %d", what, type);
    }
    if (of_cq != 1 || of_qp != 1)
        fail("%s: IBV_EVENT_CQ_ERR came %d times, IBV_EVENT_QP_FATAL %d times", what, of_cq, of_qp);
}

static void expect_state(struct ibv_qp *qp, enum ibv_qp_state state, const char *what)
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;

    check(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), "ibv_query_qp");
    if (attr.qp_state != state)
        fail("%s: the QP is in state %d, not %d", what, attr.qp_state, state);
}

static enum ibv_wc_status completion(struct ibv_cq *cq)
{
    uint64_t until = now_us() + LIMIT_MS * 1000;
    struct ibv_wc wc;
    int n;

    while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
        if (now_us() > until)
            fail("no completion came");
    if (n < 0)
        fail("ibv_poll_cq: %d", n);
    return wc.status;
}

static void overrun(int at_receiver)
{
    const char *what = at_receiver ? "at the receiver" : "at the sender";
    struct ibv_cq *small = ibv_create_cq(p.context, SMALL, NULL, NULL, 0),
                  *large = ibv_create_cq(p.context, LARGE, NULL, NULL, 0);
    struct ibv_qp *from = make_qp(&p, at_receiver ? large : small),
                  *to = make_qp(&p, at_receiver ? small : large);
    struct ibv_sge sge = { (uintptr_t)p.memory, 16, p.mr->lkey };
    struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
    struct ibv_qp *lost = at_receiver ? to : from;
    enum ibv_wc_status status = IBV_WC_SUCCESS;
    struct ibv_wc wc;
    int i, good = 0;

    connect_qp(&p, from, to, 1);
    connect_qp(&p, to, from, 1);
    for (i = 0; i < MESSAGES; i++)
        check(post_recv(&p, to, i, 16), "ibv_post_recv");
    for (i = 0; i < MESSAGES; i++)
        check(ibv_post_send(from, &send, &bad), "ibv_post_send");
    expect_events(small, lost, what);
    expect_state(lost, IBV_QPS_ERR, what);
    for (i = 0; i < 3; i++)
        if (ibv_poll_cq(small, 1, &wc) >= 0)
            fail("%s: a poll of the queue that has overrun does not say so", what);
    if (at_receiver) {
        while (status == IBV_WC_SUCCESS && good < MESSAGES)
            good += (status = completion(large)) == IBV_WC_SUCCESS;
    } else {
        /* The other end is as it was, until it needs the one that is no more. */
        expect_state(to, IBV_QPS_RTS, what);
        check(ibv_post_send(to, &send, &bad), "ibv_post_send");
        for (i = 0; i <= MESSAGES && status == IBV_WC_SUCCESS; i++)
            status = completion(large);
    }
    if (status != IBV_WC_REM_OP_ERR)
        fail("%s: the peer ended with %s", what, ibv_wc_status_str(status));
    check(ibv_destroy_qp(from), "ibv_destroy_qp");
    check(ibv_destroy_qp(to), "ibv_destroy_qp");
    check(ibv_destroy_cq(small), "ibv_destroy_cq");
    check(ibv_destroy_cq(large), "ibv_destroy_cq");
}

int main(void)
{
    open_first(&p, 1);
    overrun(0);
    overrun(1);
    check(ibv_dereg_mr(p.mr), "ibv_dereg_mr");
    printf("two overruns, each told once\n");
    return 0;
}
