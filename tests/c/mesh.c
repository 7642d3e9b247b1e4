/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many processes on the same NICs, each connected to each, and many QPs in one.
 *
 *   mesh --folder F --rank R --ranks N [--seconds S]
 *                  one of N processes that meet in the folder F
 *   mesh --wrap    makes and destroys more QPs than a NIC has numbers for
 *   mesh --one     opens all devices, and the first one twice; QPs across all of them
 *   mesh --hold    makes a QP, prints its number and waits to be killed
 *
 * A process has a connected QP for each other, on device (R + other) modulo the devices there are,
 * and each sends every other numbered messages whose content follows from the two ranks. Each must
 * arrive once, in order, intact, and be of the right QP.
 */
#include "common.h"
#include <fcntl.h>
#include <infiniband/verbs.h>

enum {
    MOST = 64,
    DEVICES = 4,
    BYTES = 3000,
    RECEIVES = 8,
    WAIT_US = 40 * 1000000,
    WRAP = 70000,
    KEPT = 100
};

struct end {
    uint32_t qpn;
    union ibv_gid gid;
};

struct link {
    struct ibv_qp *qp;
    uint8_t (*in)[BYTES], (*out)[BYTES];
    uint32_t sent, done, received;
};

static struct ibv_context *contexts[DEVICES + 1];
static struct ibv_pd *pds[DEVICES + 1];
static struct ibv_cq *cqs[DEVICES + 1];
static struct ibv_mr *mrs[DEVICES + 1];
static struct link links[MOST];
static uint8_t *memory;
static int devices, rank, ranks = 2;
static uint64_t seconds = 2;

#define CHECK(call) do { int e_ = (call); if (e_) fail("%s: %s", #call, strerror(e_)); } while (0)

static void open_all(int most)
{
    struct ibv_device **list = ibv_get_device_list(&devices);
    size_t size = (size_t)MOST * 2 * RECEIVES * BYTES;
    int i;

    if (!list || devices < 1)
        fail("no device");
    devices = devices < most ? devices : most;
    memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    for (i = 0; i < devices + 1; i++) {
        contexts[i] = ibv_open_device(list[i % devices]);
        if (!contexts[i])
            fail("ibv_open_device %s: %s", ibv_get_device_name(list[i % devices]), strerror(errno));
        pds[i] = ibv_alloc_pd(contexts[i]);
        cqs[i] = ibv_create_cq(contexts[i], 2 * RECEIVES * MOST, NULL, NULL, 0);
        mrs[i] = ibv_reg_mr(pds[i], memory, size, IBV_ACCESS_LOCAL_WRITE);
        if (!pds[i] || !cqs[i] || !mrs[i])
            fail("cannot set up %s: %s", ibv_get_device_name(list[i % devices]), strerror(errno));
    }
    ibv_free_device_list(list);
}

static struct ibv_qp *make_qp(int device)
{
    struct ibv_qp_init_attr init = { .send_cq = cqs[device],
                                     .recv_cq = cqs[device],
                                     .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1,
                                     .cap = { .max_send_wr = RECEIVES,
                                              .max_recv_wr = RECEIVES,
                                              .max_send_sge = 1,
                                              .max_recv_sge = 1 } };
    struct ibv_qp *qp = ibv_create_qp(pds[device], &init);

    if (!qp)
        fail("ibv_create_qp: %s", strerror(errno));
    return qp;
}

static struct end end_of(int device, struct ibv_qp *qp)
{
    struct end e = { .qpn = qp->qp_num };

    CHECK(ibv_query_gid(contexts[device], 1, 0, &e.gid));
    return e;
}

static void connect_qp(struct ibv_qp *qp, const struct end *to)
{
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = to->qpn,
        .min_rnr_timer = 1,
        .max_rd_atomic = 1,
        .max_dest_rd_atomic = 1,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = to->gid, .hop_limit = 8 } }
    };

    CHECK(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    a.qp_state = IBV_QPS_RTR;
    CHECK(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    a.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                            IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

static uint64_t key_of(int from, int to, uint32_t n)
{
    return mix((uint64_t)from << 48 ^ (uint64_t)to << 32 ^ n);
}

static uint32_t len_of(int from, int to, uint32_t n)
{
    return 16 + key_of(from, to, n) % (BYTES - 16);
}

static int device_of(int from, int to)
{
    return (from + to) % devices;
}

static void receive(int from, int device, uint32_t n)
{
    struct link *l = links + from;
    struct ibv_sge sge = { (uintptr_t)l->in[n % RECEIVES], BYTES, mrs[device]->lkey };
    struct ibv_recv_wr wr = { .wr_id = 1ULL << 32 | from, .sg_list = &sge, .num_sge = 1 }, *bad;

    CHECK(ibv_post_recv(l->qp, &wr, &bad));
}

static void send_next(int to, int device)
{
    struct link *l = links + to;
    uint8_t *p = l->out[l->sent % RECEIVES];
    uint32_t n = l->sent++, len = len_of(rank, to, n);
    struct ibv_sge sge = { (uintptr_t)p, len, mrs[device]->lkey };
    struct ibv_send_wr wr = { .wr_id = to, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND },
                       *bad;

    content_make(p, len, key_of(rank, to, n), n);
    CHECK(ibv_post_send(l->qp, &wr, &bad));
}

static void completed(const struct ibv_wc *wc, int device)
{
    int other = wc->wr_id & 0xffff;
    struct link *l = links + other;
    const char *wrong;

    if (wc->status || !l->qp || wc->qp_num != l->qp->qp_num)
        fail("rank %d: %s for rank %d on QP %#x, its own is %#x", rank,
             ibv_wc_status_str(wc->status), other, wc->qp_num, l->qp ? l->qp->qp_num : 0);
    if (!(wc->wr_id >> 32)) {
        l->done++;
        return;
    }
    wrong = wc->byte_len != len_of(other, rank, l->received)
                ? "its length is wrong"
                : content_wrong(l->in[l->received % RECEIVES], wc->byte_len,
                                key_of(other, rank, l->received), l->received);
    if (wrong)
        fail("rank %d: message %u of rank %d: %s", rank, l->received, other, wrong);
    receive(other, device, l->received + RECEIVES);
    l->received++;
}

/* Writes a file that the others wait for, and reads one of theirs. */
static void tell(const char *folder, const char *what, const void *data, size_t n)
{
    char path[512], tmp[540];
    int fd;

    snprintf(path, sizeof path, "%s/%s-%d", folder, what, rank);
    snprintf(tmp, sizeof tmp, "%s.new", path);
    fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, data, n) != (ssize_t)n || close(fd) || rename(tmp, path))
        fail("cannot write %s: %s", path, strerror(errno));
}

static void hear(const char *folder, const char *what, int from, void *data, size_t n)
{
    uint64_t until = now_us() + WAIT_US;
    char path[512];
    int fd;

    snprintf(path, sizeof path, "%s/%s-%d", folder, what, from);
    while ((fd = open(path, O_RDONLY)) < 0) {
        struct ibv_wc wc;
        int i;

        if (now_us() > until)
            fail("rank %d did not come as far as %s", from, what);
        /* the others may still need our answers */
        for (i = 0; i < devices; i++)
            while (ibv_poll_cq(cqs[i], 1, &wc) > 0)
                completed(&wc, i);
        usleep(1000);
    }
    if (read(fd, data, n) != (ssize_t)n)
        fail("%s is too short", path);
    close(fd);
}

static void mesh(const char *folder)
{
    struct end mine[MOST], theirs[MOST];
    uint64_t until, total = 0, at;
    uint32_t sent[MOST], of[MOST][MOST];
    int i, k, busy;

    open_all(DEVICES);
    for (i = 0; i < ranks; i++) {
        links[i].in = (void *)(memory + (size_t)i * 2 * RECEIVES * BYTES);
        links[i].out = links[i].in + RECEIVES;
        if (i == rank)
            continue;
        links[i].qp = make_qp(device_of(rank, i));
        mine[i] = end_of(device_of(rank, i), links[i].qp);
    }
    tell(folder, "ends", mine, sizeof mine);
    for (i = 0; i < ranks; i++) {
        if (i == rank)
            continue;
        hear(folder, "ends", i, theirs, sizeof theirs);
        connect_qp(links[i].qp, theirs + rank);
        for (k = 0; k < RECEIVES; k++)
            receive(i, device_of(rank, i), k);
    }
    tell(folder, "ready", "", 0);
    for (i = 0; i < ranks; i++)
        if (i != rank)
            hear(folder, "ready", i, mine, 0);
    until = now_us() + seconds * 1000000;
    at = 0;
    do {
        struct ibv_wc wc[8];
        int n, d;

        for (i = 0, busy = 0; i < ranks; i++) {
            if (links[i].qp && now_us() < until && links[i].sent - links[i].done < RECEIVES / 2)
                send_next(i, device_of(rank, i));
            busy |= links[i].sent != links[i].done;
        }
        for (d = 0; d < devices; d++)
            for (n = ibv_poll_cq(cqs[d], 8, wc), k = 0; k < n; k++)
                completed(wc + k, d);
        if (now_us() > until + WAIT_US)
            fail("rank %d: not all was sent", rank);
        if (at++ % 64 == 0)
            usleep(10);
    } while (busy || now_us() < until);
    for (i = 0; i < MOST; i++)
        sent[i] = links[i].sent;
    tell(folder, "sent", sent, sizeof sent);
    for (i = 0; i < ranks; i++)
        if (i != rank)
            hear(folder, "sent", i, of[i], sizeof sent);
    for (i = 0; i < ranks; i++)
        for (at = now_us(); i != rank && links[i].received != of[i][rank];) {
            struct ibv_wc wc;
            int d;

            for (d = 0; d < devices; d++)
                while (ibv_poll_cq(cqs[d], 1, &wc) > 0)
                    completed(&wc, d);
            if (now_us() > at + WAIT_US)
                fail("rank %d: %u of %u messages of rank %d", rank, links[i].received, of[i][rank],
                     i);
        }
    tell(folder, "end", "", 0);
    for (i = 0; i < ranks; i++) {
        if (i != rank)
            hear(folder, "end", i, mine, 0);
        total += links[i].received;
    }
    printf("{\"messages\": %llu}\n", (unsigned long long)total);
}

/* One message each way, from one QP to another of this process. */
static void both_ways(int a, int b)
{
    struct ibv_qp *qps[2] = { make_qp(a), make_qp(b) };
    int device[2] = { a, b }, i, left = 4;
    uint64_t until = now_us() + WAIT_US;
    struct end ends[2] = { end_of(a, qps[0]), end_of(b, qps[1]) };

    for (i = 0; i < 2; i++)
        connect_qp(qps[i], ends + !i);
    for (i = 0; i < 2; i++) {
        struct ibv_sge sge = { (uintptr_t)memory + (2 + i) * BYTES, BYTES, mrs[device[i]]->lkey };
        struct ibv_recv_wr recv = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad_recv;

        CHECK(ibv_post_recv(qps[i], &recv, &bad_recv));
    }
    for (i = 0; i < 2; i++) {
        struct ibv_sge sge = { (uintptr_t)memory + i * BYTES, BYTES, mrs[device[i]]->lkey };
        struct ibv_send_wr send = { .wr_id = i,
                                    .sg_list = &sge,
                                    .num_sge = 1,
                                    .opcode = IBV_WR_SEND },
                           *bad;

        content_make(memory + i * BYTES, BYTES, i + 1, 1);
        CHECK(ibv_post_send(qps[i], &send, &bad));
    }
    while (left) {
        struct ibv_wc wc;

        for (i = 0; i < 2; i++)
            while (ibv_poll_cq(cqs[device[i]], 1, &wc) > 0) {
                if (wc.status || wc.qp_num != qps[wc.wr_id]->qp_num)
                    fail("devices %d and %d: %s, QP %#x", a, b, ibv_wc_status_str(wc.status),
                         wc.qp_num);
                left--;
            }
        if (now_us() > until)
            fail("devices %d and %d: %d completions are missing", a, b, left);
    }
    for (i = 0; i < 2; i++) {
        const char *wrong = content_wrong(memory + (2 + i) * BYTES, BYTES, !i + 1, 1);

        if (wrong)
            fail("devices %d and %d: %s", a, b, wrong);
        CHECK(ibv_destroy_qp(qps[i]));
    }
}

/* UC and UD QPs that rest in SQD say so, and go on. */
static void drained(enum ibv_qp_type type)
{
    struct ibv_qp_init_attr init = {
        .send_cq = cqs[0], .recv_cq = cqs[0], .qp_type = type, .cap = { 4, 4, 1, 1, 0 }
    };
    struct ibv_qp *qp = ibv_create_qp(pds[0], &init);
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .dest_qp_num = qp ? qp->qp_num : 0,
                             .path_mtu = IBV_MTU_1024,
                             .en_sqd_async_notify = 1,
                             .ah_attr = { .is_global = 1, .port_num = 1, .grh.hop_limit = 8 } };
    struct ibv_async_event event;
    int ud = type == IBV_QPT_UD;

    CHECK(ibv_query_gid(contexts[0], 1, 0, &a.ah_attr.grh.dgid));
    CHECK(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX |
                            (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
    a.qp_state = IBV_QPS_RTR;
    CHECK(ibv_modify_qp(
        qp, &a,
        IBV_QP_STATE | (ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN)));
    a.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN));
    a.qp_state = IBV_QPS_SQD;
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
    alarm(20);
    CHECK(ibv_get_async_event(contexts[0], &event));
    alarm(0);
    if (event.event_type != IBV_EVENT_SQ_DRAINED || event.element.qp != qp)
        fail("QP type %d: event '%s'", type, ibv_event_type_str(event.event_type));
    ibv_ack_async_event(&event);
    a.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(qp, &a, IBV_QP_STATE));
    CHECK(ibv_destroy_qp(qp));
}

static void one(void)
{
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
    int a, b;

    open_all(DEVICES);
    for (a = 0; a <= devices; a++)
        for (b = 0; b <= devices; b++)
            both_ways(a, b);
    drained(IBV_QPT_UC);
    drained(IBV_QPT_UD);
    init.send_cq = init.recv_cq = cqs[0];
    if (ibv_create_qp(pds[1], &init) || errno != EINVAL)
        fail("a QP with another context's CQ is made");
    /* one of the two contexts of the first device ends; the other one works on */
    CHECK(ibv_dereg_mr(mrs[devices]));
    CHECK(ibv_destroy_cq(cqs[devices]));
    CHECK(ibv_dealloc_pd(pds[devices]));
    CHECK(ibv_close_device(contexts[devices]));
    both_ways(0, 0);
    printf("{\"pairs\": %d}\n", (devices + 1) * (devices + 1) + 1);
}

static void wrap(void)
{
    static uint8_t used[1 << 24];
    struct ibv_qp *kept[KEPT];
    int i;

    open_all(1);
    for (i = 0; i < KEPT; i++) {
        kept[i] = make_qp(0);
        used[kept[i]->qp_num] = 1;
    }
    for (i = 0; i < WRAP; i++) {
        struct ibv_qp *qp = make_qp(0);
        uint32_t qpn = qp->qp_num;

        if (qpn < 2 || qpn == 0xffffff || used[qpn] == 1)
            fail("QPN %#x after %d QPs: it is %s", qpn, i, used[qpn] == 1 ? "in use" : "reserved");
        if (i % 10000 == 0)
            both_ways(0, 0);
        CHECK(ibv_destroy_qp(qp));
    }
    both_ways(0, 0);
    for (i = 0; i < KEPT; i++)
        CHECK(ibv_destroy_qp(kept[i]));
    printf("{\"made\": %d}\n", WRAP + KEPT);
}

int main(int argc, char **argv)
{
    const char *folder = NULL;
    int i;

    for (i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--wrap"))
            return wrap(), 0;
        if (!strcmp(argv[i], "--one"))
            return one(), 0;
        if (!strcmp(argv[i], "--hold")) {
            open_all(1);
            printf("%u\n", make_qp(0)->qp_num);
            fflush(stdout);
            pause();
        }
        if (i + 1 < argc && !strcmp(argv[i], "--folder"))
            folder = argv[++i];
        else if (i + 1 < argc && !strcmp(argv[i], "--rank"))
            rank = atoi(argv[++i]);
        else if (i + 1 < argc && !strcmp(argv[i], "--ranks"))
            ranks = atoi(argv[++i]);
        else if (i + 1 < argc && !strcmp(argv[i], "--seconds"))
            seconds = atoi(argv[++i]);
    }
    if (!folder || ranks < 2 || ranks > MOST || rank < 0 || rank >= ranks)
        fail("usage: mesh --folder F --rank R --ranks N [--seconds S] | --wrap | --one | --hold");
    mesh(folder);
    return 0;
}
