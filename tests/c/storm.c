/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hundreds or thousands of RC QPs in one process, all of them busy all the time.
 *
 *   storm --listen PORT | --connect HOST:PORT [-q QPS] [-m OUTSTANDING] [-s BYTES] [-t SECONDS]
 *         [-w | -r] [-b] [-f MS] [-d DEVICE]
 *
 * The connecting end keeps so many work requests outstanding on each QP, for so long: SENDs, WRITEs
 * with -w, READs with -r; with -b the listening end does the same. With -f both fork every so many
 * ms; the children have nothing to do with verbs, end after some ms, every other one through an
 * exec, and must end well. Every message has a number and content that both ends can compute. The
 * receiver of SENDs checks each as it comes, in its order on its QP; of WRITEs, what the last ones
 * left; and the reader checks what it reads. In the end both compare how many each QP has carried,
 * so nothing may be lost or come twice. "running" is printed when all QPs are busy, and a line of
 * JSON at the end; `worst_ms` is the longest that any work request was outstanding. Any error of a
 * completion ends the program.
 */
#include "common.h"
#include <infiniband/verbs.h>
#include <sys/wait.h>

enum {
    MAX_QPS = 4096,
    MAX_CHILDREN = 16,
    CHILD_US = 3000,
    MAX_DEPTH = 256,
    BATCH = 32,
    STALL_US = 40 * 1000000,
    PAINT = 0xa5
};

enum operation { SEND, WRITE, READ };

struct end { /* what the ends tell each other of a QP */
    uint64_t slots;
    uint32_t qpn, rkey;
    union ibv_gid gid;
};

struct qp {
    struct ibv_qp *qp;
    struct end us, peer;
    uint64_t posted, done, received;
    uint64_t *posted_us; /* of each slot */
    uint8_t *from;       /* DEPTH slots that are sent, or read into */
    uint8_t *into;       /* 2 * DEPTH receives, or DEPTH slots for the peer to write or read */
};

static struct {
    const char *where, *device;
    int connecting, seconds, both, fork_ms;
    uint32_t qps, depth, size;
    enum operation operation;
} opt = { .device = "unb0", .qps = 500, .depth = 8, .seconds = 5, .size = 512 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static union ibv_gid gid;
static struct qp *qps;
static int tcp;
static uint64_t moved_us, worst_us, messages, children;

/* Content of what an end sends on a QP; what can be read does not change, so it follows from its
 * place alone. */
static uint64_t key_of(int sender_connects, int qp)
{
    return mix(0x53544f524dULL + 2 * (uint64_t)qp + sender_connects);
}

static int sends(void)
{
    return opt.connecting || opt.both;
}

static int peer_sends(void)
{
    return !opt.connecting || opt.both;
}

static void exchange(const void *mine, void *theirs, size_t n)
{
    tcp_write(tcp, mine, n);
    tcp_read(tcp, theirs, n);
}

static void meet(void)
{
    char token = 0;

    exchange(&token, &token, 1);
}

/* ---- setting up ---- */

static void open_device(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    size_t bytes = (size_t)opt.qps * 3 * opt.depth * opt.size;
    uint8_t *memory = malloc(bytes);
    uint32_t i;

    for (i = 0; list && list[i] && !context; i++)
        if (!strcmp(ibv_get_device_name(list[i]), opt.device))
            context = ibv_open_device(list[i]);
    if (!context)
        fail("cannot open %s: %s", opt.device, strerror(errno));
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 3 * opt.depth * opt.qps, NULL, NULL, 0);
    if (!pd || !cq || !memory || ibv_query_gid(context, 1, test_gid_index(), &gid))
        fail("cannot set up: %s", strerror(errno));
    memset(memory, PAINT, bytes);
    mr = ibv_reg_mr(pd, memory, bytes,
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
    qps = calloc(opt.qps, sizeof *qps);
    if (!mr || !qps)
        fail("cannot set up: %s", strerror(errno));
    for (i = 0; i < opt.qps; i++) {
        qps[i].from = memory + (size_t)i * 3 * opt.depth * opt.size;
        qps[i].into = qps[i].from + (size_t)opt.depth * opt.size;
        qps[i].posted_us = calloc(opt.depth, sizeof *qps[i].posted_us);
        if (!qps[i].posted_us)
            fail("no memory");
    }
}

static void make_qp(struct qp *q)
{
    struct ibv_qp_init_attr init = { .send_cq = cq,
                                     .recv_cq = cq,
                                     .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1,
                                     .cap = { opt.depth, 2 * opt.depth, 1, 1, 0 } };
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

    q->qp = ibv_create_qp(pd, &init);
    if (!q->qp)
        fail("ibv_create_qp: %s", strerror(errno));
    if (ibv_modify_qp(q->qp, &a,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        fail("to INIT: %s", strerror(errno));
    q->us = (struct end){ (uintptr_t)q->into, q->qp->qp_num, mr->rkey, gid };
}

static void connect_qp(struct qp *q)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR,
                             .path_mtu = IBV_MTU_4096,
                             .dest_qp_num = q->peer.qpn,
                             .max_dest_rd_atomic = 16,
                             .min_rnr_timer = 12 };
    int e;

    a.ah_attr = (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = 1,
        .grh = { .dgid = q->peer.gid, .sgid_index = test_gid_index(), .hop_limit = 64 }
    };
    e = ibv_modify_qp(q->qp, &a,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    a = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16
    };
    e = e ? e
          : ibv_modify_qp(q->qp, &a,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    if (e)
        fail("to RTR and RTS: %s", strerror(e));
}

/* ---- traffic ---- */

static uint64_t id_of(const struct qp *q, uint32_t slot, int receive)
{
    return (uint64_t)receive << 63 | (uint64_t)(q - qps) << 32 | slot;
}

static void post_receive(struct qp *q, uint32_t slot)
{
    struct ibv_sge sge = { (uintptr_t)q->into + (uint64_t)slot * opt.size, opt.size, mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = id_of(q, slot, 1), .sg_list = &sge, .num_sge = 1 }, *bad;
    int e = ibv_post_recv(q->qp, &wr, &bad);

    if (e)
        fail("QP %td: post_recv: %s", q - qps, strerror(e));
}

static void post(struct qp *q, uint64_t at_us)
{
    static const enum ibv_wr_opcode opcode[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ };
    uint32_t slot = q->posted % opt.depth;
    uint8_t *p = q->from + (size_t)slot * opt.size;
    struct ibv_sge sge = { (uintptr_t)p, opt.size, mr->lkey };
    struct ibv_send_wr wr = { .wr_id = id_of(q, slot, 0),
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = opcode[opt.operation] },
                       *bad;
    int e;

    wr.wr.rdma.remote_addr = q->peer.slots + (uint64_t)slot * opt.size;
    wr.wr.rdma.rkey = q->peer.rkey;
    if (opt.operation == READ)
        memset(p, PAINT, opt.size);
    else
        content_make(p, opt.size, key_of(opt.connecting, q - qps), q->posted);
    q->posted_us[slot] = at_us;
    q->posted++;
    e = ibv_post_send(q->qp, &wr, &bad);
    if (e)
        fail("QP %td: post_send: %s", q - qps, strerror(e));
}

static void check_content(struct qp *q, const uint8_t *p, uint64_t key, uint64_t number,
                          const char *what)
{
    const char *wrong = content_wrong(p, opt.size, key, number);

    if (wrong)
        fail("QP %td: %s %llu: %s", q - qps, what, (unsigned long long)number, wrong);
}

static void received(struct qp *q, uint32_t slot)
{
    if (slot != q->received % (2 * opt.depth))
        fail("QP %td: receive %u completed out of its order", q - qps, slot);
    check_content(q, q->into + (size_t)slot * opt.size, key_of(!opt.connecting, q - qps),
                  q->received, "message");
    q->received++;
    messages++;
    post_receive(q, slot);
}

static void sent(struct qp *q, uint32_t slot, uint64_t at_us)
{
    if (q->done == q->posted || slot != q->done % opt.depth)
        fail("QP %td: slot %u completed twice or out of its order", q - qps, slot);
    if (opt.operation == READ)
        check_content(q, q->from + (size_t)slot * opt.size, key_of(!opt.connecting, q - qps), slot,
                      "READ of slot");
    if (at_us > q->posted_us[slot] + worst_us)
        worst_us = at_us - q->posted_us[slot];
    q->done++;
    messages += opt.operation != SEND;
}

/* Forks where -f asks for it and its time has come, and takes children that have ended. */
static void fork_sometimes(uint64_t at_us)
{
    static uint64_t next_us;
    static int alive;
    int status;

    if (!opt.fork_ms || at_us < next_us)
        return;
    next_us = at_us + (uint64_t)opt.fork_ms * 1000;
    while (alive && waitpid(-1, &status, WNOHANG) > 0) {
        alive--;
        if (status)
            fail("a child ended with status %#x", status);
    }
    if (alive == MAX_CHILDREN)
        return;
    switch (fork()) {
    case -1:
        fail("fork: %s", strerror(errno));
    case 0:
        usleep(CHILD_US);
        if (children % 2)
            execl("/bin/true", "true", NULL);
        _exit(children % 2);
    default:
        alive++;
        children++;
    }
}

/* Takes what has completed; posts anew until `until_us`. Gives the number of completions. */
static int poll_once(uint64_t until_us)
{
    struct ibv_wc wc[BATCH];
    int i, n = ibv_poll_cq(cq, BATCH, wc);
    uint64_t at_us = now_us();

    fork_sometimes(at_us);
    if (n < 0)
        fail("ibv_poll_cq gives %d", n);
    if (n)
        moved_us = at_us;
    else if (at_us > moved_us + STALL_US)
        fail("nothing completed for %d s", STALL_US / 1000000);
    for (i = 0; i < n; i++) {
        uint64_t index = wc[i].wr_id << 1 >> 33;
        struct qp *q = qps + index;

        if (index >= opt.qps)
            fail("a completion of a WR that was never posted: wr_id %#llx",
                 (unsigned long long)wc[i].wr_id);
        if (wc[i].status)
            fail("QP %td: '%s'", q - qps, ibv_wc_status_str(wc[i].status));
        if (wc[i].qp_num != q->us.qpn)
            fail("QP %td: a completion carries QPN %#x, not %#x", q - qps, wc[i].qp_num, q->us.qpn);
        if (wc[i].wr_id >> 63) {
            received(q, (uint32_t)wc[i].wr_id);
            continue;
        }
        sent(q, (uint32_t)wc[i].wr_id, at_us);
        if (at_us < until_us)
            post(q, at_us);
    }
    return n;
}

/* Whether all that this end sent has completed, and all SENDs that the peer says it sent have
 * come (`theirs` is NULL: it has not said yet). */
static int complete(const uint64_t *theirs)
{
    uint32_t i;

    for (i = 0; i < opt.qps; i++)
        if (qps[i].done < qps[i].posted ||
            (theirs && opt.operation == SEND && qps[i].received < theirs[i]))
            return 0;
    return 1;
}

static void run(void)
{
    uint64_t until_us;
    uint32_t i, k;

    moved_us = now_us();
    until_us = moved_us + (uint64_t)opt.seconds * 1000000;
    for (i = 0; sends() && i < opt.qps; i++) {
        for (k = 0; k < opt.depth; k++)
            post(qps + i, now_us());
        poll_once(until_us);
    }
    printf("running\n");
    fflush(stdout);
    while (sends() && (now_us() < until_us || !complete(NULL)))
        poll_once(until_us);
}

/* Both ends tell how much each QP carried; what is missing must come, and nothing may be left
 * over. */
static void compare_counts(void)
{
    uint64_t *mine = calloc(opt.qps, sizeof *mine), *theirs = calloc(opt.qps, sizeof *theirs),
             number;
    int only_serves = opt.operation != SEND && !sends();
    uint32_t i, k;

    for (i = 0; i < opt.qps; i++)
        mine[i] = qps[i].posted;
    tcp_write(tcp, mine, opt.qps * sizeof *mine);
    /* The peer may still send; an end that only serves WRITEs or READs has nothing to take until
     * then. */
    while (!tcp_peek(tcp)) {
        if (only_serves)
            moved_us = now_us();
        poll_once(0);
    }
    tcp_read(tcp, theirs, opt.qps * sizeof *theirs);
    moved_us = now_us();
    while (!complete(theirs))
        poll_once(0);
    meet();
    /* One that came twice would be here by now, or come within the next polls. */
    for (i = 0; i < 100; i++)
        poll_once(0);
    for (i = 0; i < opt.qps; i++) {
        if (opt.operation == SEND && qps[i].received != theirs[i])
            fail("QP %u: %llu messages came, %llu were sent", i,
                 (unsigned long long)qps[i].received, (unsigned long long)theirs[i]);
        for (k = 0; opt.operation == WRITE && peer_sends() && k < opt.depth; k++) {
            /* the last that went into slot k */
            number = theirs[i] - 1 - (theirs[i] - 1 - k) % opt.depth;
            check_content(qps + i, qps[i].into + (size_t)k * opt.size, key_of(!opt.connecting, i),
                          number, "WRITE");
        }
    }
    free(mine), free(theirs);
}

/* ---- main ---- */

static int number(const char *name, const char *text, int min, int max)
{
    char *end;
    long n = text ? strtol(text, &end, 10) : 0;

    if (!text || *end || end == text || n < min || n > max)
        fail("%s %s: a number from %d to %d is right", name, text ? text : "", min, max);
    return n;
}

static void parse(int argc, char **argv)
{
    int i;

    for (i = 1; i < argc; i++) {
        const char *name = argv[i];

        if (!strcmp(name, "-w")) opt.operation = WRITE;
        else if (!strcmp(name, "-r")) opt.operation = READ;
        else if (!strcmp(name, "-b")) opt.both = 1;
        else if (!strcmp(name, "-q")) opt.qps = number(name, argv[++i], 1, MAX_QPS);
        else if (!strcmp(name, "-m")) opt.depth = number(name, argv[++i], 1, MAX_DEPTH);
        else if (!strcmp(name, "-t")) opt.seconds = number(name, argv[++i], 1, 3600);
        else if (!strcmp(name, "-s")) opt.size = number(name, argv[++i], 16, 1 << 20);
        else if (!strcmp(name, "-f")) opt.fork_ms = number(name, argv[++i], 1, 10000);
        else if (!strcmp(name, "-d") && i + 1 < argc) opt.device = argv[++i];
        else if ((!strcmp(name, "--listen") || !strcmp(name, "--connect")) && i + 1 < argc)
            opt.where = argv[++i], opt.connecting = name[2] == 'c';
        else fail("unknown option '%s', or its value is missing; see the head of storm.c", name);
    }
    if (!opt.where)
        fail("usage: storm --listen PORT | --connect HOST:PORT [-q QPS] [-m OUTSTANDING] [-s "
             "BYTES] [-t SECONDS] [-w | -r] [-b] [-f MS] [-d DEVICE]");
}

static void connect_all(void)
{
    struct end *mine = calloc(opt.qps, sizeof *mine), *theirs = calloc(opt.qps, sizeof *theirs);
    uint32_t i, k;

    for (i = 0; i < opt.qps; i++) {
        make_qp(qps + i);
        mine[i] = qps[i].us;
    }
    exchange(mine, theirs, opt.qps * sizeof *mine);
    for (i = 0; i < opt.qps; i++) {
        qps[i].peer = theirs[i];
        for (k = 0; opt.operation == SEND && k < 2 * opt.depth; k++)
            post_receive(qps + i, k);
        for (k = 0; opt.operation == READ && k < opt.depth; k++)
            content_make(qps[i].into + (size_t)k * opt.size, opt.size, key_of(opt.connecting, i),
                         k);
        connect_qp(qps + i);
    }
    meet();
    free(mine), free(theirs);
}

int main(int argc, char **argv)
{
    uint32_t i;

    parse(argc, argv);
    tcp = opt.connecting ? tcp_connect(opt.where) : tcp_listen(opt.where);
    open_device();
    connect_all();
    run();
    compare_counts();
    meet();
    for (i = 0; i < opt.qps; i++)
        if (ibv_destroy_qp(qps[i].qp))
            fail("cannot destroy QP %u", i);
    if (ibv_dereg_mr(mr) || ibv_destroy_cq(cq) || ibv_dealloc_pd(pd) || ibv_close_device(context))
        fail("cannot clean up");
    printf("{\"qps\": %u, \"outstanding\": %u, \"bytes\": %u, \"messages\": %llu, \"worst_ms\": "
           "%.1f, \"children\": %llu}\n",
           opt.qps, opt.depth, opt.size, (unsigned long long)messages, worst_us / 1000.0,
           (unsigned long long)children);
    return 0;
}
