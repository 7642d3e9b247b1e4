/* SPDX-License-Identifier: Apache-2.0 */
/* Two ends in one process, on the first two devices, and what each of them was told. */
#ifndef UNBROKEN_TESTS_OUTCOMES_ENDS_H
#define UNBROKEN_TESTS_OUTCOMES_ENDS_H

#include "common.h"
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdlib.h>

enum { BYTES = 4096, DEPTH = 64, ENTRIES = 512, MOST = 256, RECVS = 1000, QKEY = 0x1234 };
enum { LIMIT_MS = 20000, QUIET_MS = 40 };
enum { RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                IBV_ACCESS_REMOTE_ATOMIC };

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    union ibv_gid gid;
    struct ibv_cq *sends, *recvs;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    uint8_t *memory;
    /* What came, in the order in which it came. */
    struct ibv_wc sent[MOST], received[MOST];
    int sent_count, received_count;
    char events[MOST][64];
    int event_count;
    /* A poll has failed. */
    bool lost;
};

/* How the QPs of a case are made. */
struct shape {
    enum ibv_qp_type type;
    int a_entries, b_entries; /* of one CQ for all that the end completes; 0: enough */
    int srq, a_srq;           /* b, or a, takes its receives from one of so many; 0: it does not */
    int timeout, retry, rnr_retry, responder_reads;
    unsigned dest_flip; /* a is connected to another QPN than b's */
    bool b_stays_in_rtr;
};

static const struct shape rc = { .type = IBV_QPT_RC };
static struct end a, b;

/* Stops unless `error` is 0: a verb's errno, or -1 with errno. */
static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static struct ibv_context *open_device(int index)
{
    int count = 0;
    struct ibv_device **list = ibv_get_device_list(&count);
    struct ibv_context *context = index < count ? ibv_open_device(list[index]) : NULL;

    if (!context)
        fail("device %d cannot be opened", index);
    ibv_free_device_list(list);
    fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
    return context;
}

static void open_end(struct end *e, int index)
{
    e->context = open_device(index);
    e->pd = ibv_alloc_pd(e->context);
    e->memory = aligned_alloc(BYTES, BYTES);
    e->mr = e->pd && e->memory ? ibv_reg_mr(e->pd, e->memory, BYTES, RIGHTS) : NULL;
    if (!e->mr || ibv_query_gid(e->context, 1, test_gid_index(), &e->gid))
        fail("no protection domain, memory or GID");
}

static void make_end(struct end *e, const struct shape *s, int entries)
{
    struct ibv_srq_init_attr srq = { .attr = { e == &b ? s->srq : s->a_srq, 1, 0 } };
    struct ibv_qp_init_attr init = { .qp_type = s->type,
                                     .sq_sig_all = 1,
                                     .cap = { DEPTH, DEPTH, 1, 1, 0 } };

    e->sends = ibv_create_cq(e->context, entries ? entries : ENTRIES, NULL, NULL, 0);
    e->recvs = entries ? e->sends : ibv_create_cq(e->context, ENTRIES, NULL, NULL, 0);
    e->srq = srq.attr.max_wr ? ibv_create_srq(e->pd, &srq) : NULL;
    init.send_cq = e->sends;
    init.recv_cq = e->recvs;
    init.srq = e->srq;
    e->qp = e->sends && e->recvs ? ibv_create_qp(e->pd, &init) : NULL;
    e->sent_count = e->received_count = e->event_count = 0;
    e->lost = false;
}

static int to_init(struct end *e)
{
    bool ud = e->qp->qp_type == IBV_QPT_UD, rc = e->qp->qp_type == IBV_QPT_RC;
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT,
                                .port_num = 1,
                                .qkey = QKEY,
                                .qp_access_flags = rc ? RIGHTS : IBV_ACCESS_REMOTE_WRITE };

    return ibv_modify_qp(e->qp, &attr,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                             (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));
}

static int to_rtr(struct end *e, const struct end *peer, uint32_t qpn, int reads)
{
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR,
                                .path_mtu = IBV_MTU_1024,
                                .dest_qp_num = qpn,
                                .max_dest_rd_atomic = reads,
                                .min_rnr_timer = 1 };
    int mask = IBV_QP_STATE;

    attr.ah_attr = (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = 1,
        .grh = { .dgid = peer->gid, .sgid_index = test_gid_index(), .hop_limit = 64 }
    };
    if (e->qp->qp_type != IBV_QPT_UD)
        mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (e->qp->qp_type == IBV_QPT_RC)
        mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    return ibv_modify_qp(e->qp, &attr, mask);
}

static int to_rts(struct end *e, const struct shape *s)
{
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS,
                                .timeout = s->timeout ? s->timeout : 14,
                                .retry_cnt = s->retry ? s->retry : 7,
                                .rnr_retry = s->rnr_retry ? s->rnr_retry : 7,
                                .max_rd_atomic = 4 };
    int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;

    if (e->qp->qp_type == IBV_QPT_RC)
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    return ibv_modify_qp(e->qp, &attr, mask);
}

static int to_state(struct end *e, enum ibv_qp_state state)
{
    struct ibv_qp_attr attr = { .qp_state = state, .en_sqd_async_notify = 1 };

    return ibv_modify_qp(e->qp, &attr,
                         IBV_QP_STATE |
                             (state == IBV_QPS_SQD ? IBV_QP_EN_SQD_ASYNC_NOTIFY : 0));
}

/* Waits until failover protects all connected RC QPs, where the suite says how that is asked. */
static void wait_until_protected(void)
{
    const char *command = getenv("TEST_PROTECTED");
    uint64_t until = now_us() + LIMIT_MS * 1000;

    while (command && system(command)) {
        if (now_us() > until)
            fail("the queue pairs are not protected");
        usleep(5000);
    }
}

/* Says why a case is not possible here. */
static void impossible(const char *verb, int error)
{
    printf("%s: %s | ", verb, strerror(error));
}

/* Makes and connects both ends. False: that is not possible here, and why is printed. */
static bool connect_ends(const struct shape *s)
{
    int reads = s->responder_reads < 0 ? 0 : 4;

    make_end(&a, s, s->a_entries);
    if (a.qp)
        make_end(&b, s, s->b_entries);
    if (!a.qp || !b.qp) {
        impossible("ibv_create_qp", errno);
        return false;
    }
    check(to_init(&a), "a to INIT");
    check(to_init(&b), "b to INIT");
    check(to_rtr(&a, &b, b.qp->qp_num ^ s->dest_flip, reads), "a to RTR");
    check(to_rtr(&b, &a, a.qp->qp_num, reads), "b to RTR");
    check(to_rts(&a, s), "a to RTS");
    if (!s->b_stays_in_rtr)
        check(to_rts(&b, s), "b to RTS");
    if (s->type == IBV_QPT_RC && !s->dest_flip)
        wait_until_protected();
    return true;
}

static void drop_end(struct end *e)
{
    if (e->qp)
        check(ibv_destroy_qp(e->qp), "ibv_destroy_qp");
    if (e->srq)
        check(ibv_destroy_srq(e->srq), "ibv_destroy_srq");
    if (e->recvs != e->sends)
        check(ibv_destroy_cq(e->recvs), "ibv_destroy_cq");
    if (e->sends)
        check(ibv_destroy_cq(e->sends), "ibv_destroy_cq");
    e->qp = NULL;
    e->srq = NULL;
    e->sends = e->recvs = NULL;
}

/* Posts a receive, into a region of that key. */
static int recv_by(struct end *e, uint64_t number, uint32_t bytes, uint32_t lkey)
{
    struct ibv_sge sge = { (uintptr_t)e->memory + BYTES / 2, bytes, lkey };
    struct ibv_recv_wr wr = { .wr_id = RECVS + number, .sg_list = &sge, .num_sge = 1 }, *bad;

    return e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad);
}

static void recv_into(struct end *e, uint64_t number, uint32_t bytes)
{
    check(recv_by(e, number, bytes, e->mr->lkey), "ibv_post_recv");
}

/* A request of a's, for memory of b's; what is not usual is changed before it is posted. */
struct request {
    struct ibv_sge sge;
    struct ibv_send_wr wr;
};

static struct request request(enum ibv_wr_opcode opcode, uint32_t bytes)
{
    struct request r = { { (uintptr_t)a.memory, bytes, a.mr->lkey }, { .opcode = opcode } };
    bool atomic = opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;

    if (atomic) {
        r.wr.wr.atomic.remote_addr = (uintptr_t)b.memory;
        r.wr.wr.atomic.rkey = b.mr->rkey;
    } else if (opcode != IBV_WR_SEND && opcode != IBV_WR_SEND_WITH_IMM) {
        r.wr.wr.rdma.remote_addr = (uintptr_t)b.memory;
        r.wr.wr.rdma.rkey = b.mr->rkey;
    }
    return r;
}

static int post(struct end *e, uint64_t number, struct request r)
{
    struct ibv_send_wr *bad;

    r.wr.wr_id = number;
    r.wr.sg_list = &r.sge;
    r.wr.num_sge = 1;
    return ibv_post_send(e->qp, &r.wr, &bad);
}

static void send_request(uint64_t number, enum ibv_wr_opcode opcode, uint32_t bytes)
{
    check(post(&a, number, request(opcode, bytes)), "ibv_post_send");
}

/* --- what came */

static const char *event_name(enum ibv_event_type type)
{
    static const char *const names[] = {
        "CQ_ERR",       "QP_FATAL",      "QP_REQ_ERR",  "QP_ACCESS_ERR", "COMM_EST",
        "SQ_DRAINED",   "PATH_MIG",      "PATH_MIG_ERR", "DEVICE_FATAL", "PORT_ACTIVE",
        "PORT_ERR",     "LID_CHANGE",    "PKEY_CHANGE", "SM_CHANGE",     "SRQ_ERR",
        "SRQ_LIMIT_REACHED", "QP_LAST_WQE_REACHED", "CLIENT_REREGISTER", "GID_CHANGE"
    };

    return type < sizeof names / sizeof *names ? names[type] : "?";
}

static void take_events(struct end *e)
{
    struct ibv_async_event event;

    while (e->event_count < MOST && !ibv_get_async_event(e->context, &event)) {
        int type = event.event_type;
        bool of_qp = (type >= IBV_EVENT_QP_FATAL && type <= IBV_EVENT_PATH_MIG_ERR) ||
                     type == IBV_EVENT_QP_LAST_WQE_REACHED;
        bool of_srq = type == IBV_EVENT_SRQ_ERR || type == IBV_EVENT_SRQ_LIMIT_REACHED;
        bool is_ours = of_qp                    ? event.element.qp == e->qp
                       : of_srq                 ? event.element.srq == e->srq
                       : type == IBV_EVENT_CQ_ERR
                           ? event.element.cq == e->sends || event.element.cq == e->recvs
                           : true;

        snprintf(e->events[e->event_count++], sizeof e->events[0], "%s%s",
                 event_name(type), is_ours ? "" : " of another");
        ibv_ack_async_event(&event);
    }
}

static void take_completions(struct end *e)
{
    struct ibv_cq *of[2] = { e->sends, e->recvs };
    struct ibv_wc wc;
    int n;

    for (int i = 0; i < 2 && of[i]; i++) {
        while ((n = ibv_poll_cq(of[i], 1, &wc)) == 1) {
            if (wc.wr_id < RECVS && e->sent_count < MOST)
                e->sent[e->sent_count++] = wc;
            else if (e->received_count < MOST)
                e->received[e->received_count++] = wc;
        }
        e->lost |= n < 0;
    }
}

/* How much an end is to be told: sends, receives, events. */
struct due {
    int sent, received, events;
};

/* Waits for events with no poll of a CQ, then for completions; then for what is too much. */
static void collect(struct due of_a, struct due of_b)
{
    uint64_t until = now_us() + LIMIT_MS * 1000, quiet;

    while (a.event_count < of_a.events || b.event_count < of_b.events) {
        take_events(&a);
        take_events(&b);
        if (now_us() > until)
            break;
        usleep(500);
    }
    while (a.sent_count < of_a.sent || a.received_count < of_a.received ||
           b.sent_count < of_b.sent || b.received_count < of_b.received) {
        take_completions(&a);
        take_completions(&b);
        if (now_us() > until)
            break;
    }
    for (quiet = now_us() + QUIET_MS * 1000; now_us() < quiet;) {
        take_completions(&a);
        take_completions(&b);
        take_events(&a);
        take_events(&b);
    }
}

/* --- what is printed: for each end its sends, receives, events and state */

static const char *status_name(enum ibv_wc_status status)
{
    static const char *const names[] = {
        "SUCCESS",      "LOC_LEN_ERR",     "LOC_QP_OP_ERR",   "LOC_EEC_OP_ERR",
        "LOC_PROT_ERR", "WR_FLUSH_ERR",    "MW_BIND_ERR",     "BAD_RESP_ERR",
        "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR",  "REM_OP_ERR",
        "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR", "REM_INV_RD_REQ_ERR",
        "REM_ABORT_ERR", "INV_EECN_ERR",    "INV_EEC_STATE_ERR", "FATAL_ERR",
        "RESP_TIMEOUT_ERR", "GENERAL_ERR"
    };

    return status < sizeof names / sizeof *names ? names[status] : "?";
}

/* Statuses are printed without numbers: how far the other end had come is a matter of time. */
static bool without_counts;

static void print_completions(const char *what, const struct ibv_wc *wcs, int count)
{
    for (int i = 0, same; i < count; i += same) {
        for (same = 1; i + same < count && wcs[i + same].status == wcs[i].status;)
            same++;
        printf("%s%s", i ? ", " : what, status_name(wcs[i].status));
        if (same > 1 && !without_counts)
            printf(" x%d", same);
    }
    for (int i = 1; i < count; i++)
        if (wcs[i].wr_id <= wcs[i - 1].wr_id)
            printf(" (%llu after %llu)", (unsigned long long)wcs[i].wr_id,
                   (unsigned long long)wcs[i - 1].wr_id);
}

static int by_text(const void *one, const void *other)
{
    return strcmp(one, other);
}

static void print_end(struct end *e)
{
    static const char *const states[] = { "RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR" };
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;
    const char *comma = "";

    print_completions("send ", e->sent, e->sent_count);
    if (e->sent_count && e->received_count)
        printf("; ");
    print_completions("receive ", e->received, e->received_count);
    if (e->sent_count || e->received_count)
        printf("; ");
    qsort(e->events, e->event_count, sizeof e->events[0], by_text);
    for (int i = 0; i < e->event_count; i++, comma = ", ")
        printf("%s%s", i ? comma : "event ", e->events[i]);
    if (e->event_count)
        printf("; ");
    if (e->lost)
        printf("polls fail; ");
    if (e->qp && !ibv_query_qp(e->qp, &attr, IBV_QP_STATE, &init))
        printf("in %s", attr.qp_state < 7 ? states[attr.qp_state] : "?");
    else
        printf("gone");
}

static void print_both(void)
{
    print_end(&a);
    printf(" | ");
    print_end(&b);
}

static void finish(struct due of_a, struct due of_b)
{
    collect(of_a, of_b);
    print_both();
}

#endif
