/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A QP that uses memory windows is not protected: when its NIC dies, both ends have the original
 * error, and in bounded time; a QP beside it, on the same CQ, lives on; UC and UD QPs flush.
 *
 *   windows --listen PORT | --connect HOST:PORT
 *
 * Each end has four QPs: RC with a bound window of the peer's that it WRITEs through, RC without,
 * UC and UD. Both send on all of them until the one with the window has failed; then the plain one
 * must still carry REST messages, each once and intact. Prints "running" when all four carry, then
 * a line of JSON.
 */
#include "common.h"
#include <infiniband/verbs.h>

enum { WINDOW, PLAIN, UC, UD, QPS };
enum {
    BYTES = 2048,
    DEPTH = 16,
    GRH = 40,
    REST = 2000,
    RUN_US = 30 * 1000000,
    FAIL_US = 25 * 1000000,
    QKEY = 0x11
};

struct hello {
    uint32_t qpn[QPS], rkey;
    uint64_t addr;
    union ibv_gid gid;
};

static const char *const NAMES[] = { "RC with a window", "RC", "UC", "UD" };
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qps[QPS];
static struct ibv_mr *mr, *window_mr;
static struct ibv_mw *window;
static struct ibv_ah *ah;
static struct hello mine, theirs;
static uint8_t (*out)[DEPTH][BYTES], (*in)[DEPTH][GRH + BYTES], *behind;
static uint32_t sent[QPS], done[QPS], received[QPS], posted[QPS];
static int failed[QPS], tcp, listener, told_peer, heard_peer;
static uint64_t failed_us[QPS];
static enum ibv_wc_status status_of[QPS];

#define CHECK(call) do { int e_ = (call); if (e_) fail("%s: %s", #call, strerror(e_)); } while (0)

static void make(int i)
{
    static const enum ibv_qp_type TYPES[] = { IBV_QPT_RC, IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD };
    struct ibv_qp_init_attr init = { .send_cq = cq,
                                     .recv_cq = cq,
                                     .qp_type = TYPES[i],
                                     .sq_sig_all = 1,
                                     .cap = { .max_send_wr = DEPTH + 2,
                                              .max_recv_wr = DEPTH,
                                              .max_send_sge = 1,
                                              .max_recv_sge = 1 } };

    qps[i] = ibv_create_qp(pd, &init);
    if (!qps[i])
        fail("ibv_create_qp: %s", strerror(errno));
    mine.qpn[i] = qps[i]->qp_num;
}

static void connect_qp(int i)
{
    int rc = i <= PLAIN, ud = i == UD;
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = theirs.qpn[i],
        .min_rnr_timer = 1,
        .qkey = QKEY,
        .max_rd_atomic = 1,
        .max_dest_rd_atomic = 1,
        .timeout = 14,
        .retry_cnt = 7,
        .rnr_retry = 7,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
        .ah_attr = { .is_global = 1,
                     .port_num = 1,
                     .grh = { .dgid = theirs.gid, .sgid_index = test_gid_index(), .hop_limit = 8 } }
    };

    CHECK(ibv_modify_qp(qps[i], &a,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                            (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
    a.qp_state = IBV_QPS_RTR;
    CHECK(ibv_modify_qp(
        qps[i], &a,
        IBV_QP_STATE | (ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) |
            (rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)));
    a.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(
        qps[i], &a,
        IBV_QP_STATE | IBV_QP_SQ_PSN |
            (rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC
                : 0)));
}

static uint64_t key_of(int from, int i, uint32_t n)
{
    return mix((uint64_t)from << 40 ^ (uint64_t)i << 32 ^ n);
}

static void receive(int i)
{
    struct ibv_sge sge = { (uintptr_t)in[i][posted[i] % DEPTH], GRH + BYTES, mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = 1 << 8 | i, .sg_list = &sge, .num_sge = 1 }, *bad;
    int e = ibv_post_recv(qps[i], &wr, &bad);

    if (!e)
        posted[i]++;
    else if (i != UC && i != UD && !failed[i])
        fail("%s: ibv_post_recv: %s", NAMES[i], strerror(e));
}

static void send_one(int i)
{
    uint32_t n = sent[i];
    uint8_t *p = out[i][n % DEPTH];
    struct ibv_sge sge = { (uintptr_t)p, BYTES, mr->lkey };
    struct ibv_send_wr wr = { .wr_id = i,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode =
                                  i == WINDOW ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_SEND_WITH_IMM,
                              .imm_data = htonl(n) },
                       *bad;
    int e;

    content_make(p, BYTES, key_of(listener, i, n), n);
    if (i == WINDOW) {
        wr.wr.rdma.remote_addr = theirs.addr + n % DEPTH * BYTES;
        wr.wr.rdma.rkey = theirs.rkey;
    } else if (i == UD) {
        wr.wr.ud.ah = ah;
        wr.wr.ud.remote_qpn = theirs.qpn[i];
        wr.wr.ud.remote_qkey = QKEY;
    }
    e = ibv_post_send(qps[i], &wr, &bad);
    if (!e)
        sent[i]++;
    else if (i == PLAIN || e != EIO)
        fail("%s: ibv_post_send: %s", NAMES[i], strerror(e));
    else
        failed[i] |= i >= UC;
}

static void arrived(int i, const struct ibv_wc *wc)
{
    uint32_t n = ntohl(wc->imm_data), at = received[i] % DEPTH;
    const uint8_t *p = i == WINDOW ? behind + n % DEPTH * BYTES : in[i][at] + (i == UD ? GRH : 0);
    const char *wrong;

    if (i <= PLAIN && n != received[i])
        fail("%s: message %u, expected %u", NAMES[i], n, received[i]);
    wrong = content_wrong(p, BYTES, key_of(!listener, i, n), n);
    if (wrong)
        fail("%s: message %u: %s", NAMES[i], n, wrong);
    received[i]++;
    receive(i);
}

static void completed(const struct ibv_wc *wc)
{
    int i = wc->wr_id & 0xff, is_receive = wc->wr_id >> 8;

    if (wc->qp_num != mine.qpn[i])
        fail("%s: a completion of QP %#x", NAMES[i], wc->qp_num);
    if (wc->status) {
        if (i == PLAIN)
            fail("the protected QP fails: %s", ibv_wc_status_str(wc->status));
        if (!failed_us[i]) {
            failed_us[i] = now_us();
            status_of[i] = wc->status;
        }
        failed[i] = 1;
    } else if (failed_us[i] && i == WINDOW) {
        fail("%s: success after its error", NAMES[i]);
    }
    if (!is_receive)
        done[i]++;
    else if (!wc->status)
        arrived(i, wc);
}

static void poll_some(void)
{
    struct ibv_wc wc[16];
    int k, n = ibv_poll_cq(cq, 16, wc);

    if (n < 0)
        fail("ibv_poll_cq gives %d", n);
    for (k = 0; k < n; k++)
        completed(wc + k);
}

/* A window over what the peer may write, bound on the QP that it writes through. */
static void bind_window(void)
{
    struct ibv_send_wr wr = { .wr_id = WINDOW, .opcode = IBV_WR_BIND_MW }, *bad;
    uint64_t until = now_us() + 5000000;

    window = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    if (!window)
        fail("ibv_alloc_mw: %s", strerror(errno));
    mine.rkey = wr.bind_mw.rkey = ibv_inc_rkey(window->rkey);
    mine.addr = (uintptr_t)behind;
    wr.bind_mw.mw = window;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ window_mr, (uintptr_t)behind, DEPTH * BYTES,
                                                      IBV_ACCESS_REMOTE_WRITE };
    CHECK(ibv_post_send(qps[WINDOW], &wr, &bad));
    while (!done[WINDOW]) {
        poll_some();
        if (now_us() > until)
            fail("the window is not bound");
    }
    if (failed[WINDOW])
        fail("the window cannot be bound: %s", ibv_wc_status_str(status_of[WINDOW]));
    done[WINDOW] = 0;
}

static void exchange(const void *a, void *b, size_t n)
{
    tcp_write(tcp, a, n);
    tcp_read(tcp, b, n);
}

static void set_up(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_ah_attr to = { .is_global = 1,
                              .port_num = 1,
                              .grh = { .sgid_index = test_gid_index(), .hop_limit = 8 } };
    size_t in_bytes = sizeof *in * QPS, out_bytes = sizeof *out * QPS, all = in_bytes + out_bytes;
    uint8_t *memory = calloc(1, all);
    int i, k;

    if (!list || !list[0] || !(context = ibv_open_device(list[0])))
        fail("no device");
    in = (void *)memory;
    out = (void *)(memory + in_bytes);
    behind = calloc(DEPTH, BYTES);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 1024, NULL, NULL, 0);
    mr = ibv_reg_mr(pd, memory, all, IBV_ACCESS_LOCAL_WRITE);
    window_mr = ibv_reg_mr(pd, behind, DEPTH * BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    if (!pd || !cq || !mr || !window_mr || ibv_query_gid(context, 1, test_gid_index(), &mine.gid))
        fail("cannot set up: %s", strerror(errno));
    for (i = 0; i < QPS; i++)
        make(i);
    exchange(&mine, &theirs, sizeof mine);
    for (i = 0; i < QPS; i++)
        connect_qp(i);
    to.grh.dgid = theirs.gid;
    ah = ibv_create_ah(pd, &to);
    if (!ah)
        fail("ibv_create_ah: %s", strerror(errno));
    for (i = 0; i < QPS; i++)
        for (k = 0; k < DEPTH; k++)
            receive(i);
    exchange(&mine, &theirs, sizeof mine); /* both are in RTS */
    bind_window();
    exchange(&mine, &theirs, sizeof mine);
}

int main(int argc, char **argv)
{
    uint64_t until = now_us() + RUN_US;
    uint32_t rest = 0, limit = 0, end[2] = { 0 }, their_end[2];
    int i, running = 0;

    if (argc != 3)
        fail("usage: windows --listen PORT | --connect HOST:PORT");
    listener = !strcmp(argv[1], "--listen");
    tcp = listener ? tcp_listen(argv[2]) : tcp_connect(argv[2]);
    set_up();
    while (!limit || sent[PLAIN] < limit || received[PLAIN] < rest || sent[PLAIN] != done[PLAIN]) {
        /*
         * At most half of the peer's receives on the way, as far as we see. What is written through
         * the window must have been read before its place is used again: neither end is further
         * ahead of the other than DEPTH / 4 + 1, so no place is used again before twice that has
         * been read.
         */
        for (i = 0; i < QPS; i++)
            if (!failed[i] && sent[i] - done[i] < DEPTH / 2 &&
                (i <= PLAIN || sent[i] < received[PLAIN]) &&
                !(i == WINDOW && sent[i] > received[i] + DEPTH / 4) &&
                !(i == PLAIN && limit && sent[i] >= limit))
                send_one(i);
        poll_some();
        if (!running && received[WINDOW] > 50 && received[PLAIN] > 50 && received[UC] &&
            received[UD]) {
            printf("running\n");
            fflush(stdout);
            running = 1;
        }
        if (failed[WINDOW] && !told_peer) {
            end[0] = sent[PLAIN] + REST;
            tcp_write(tcp, end, sizeof end);
            limit = end[0];
            told_peer = 1;
        }
        if (told_peer && !heard_peer && tcp_peek(tcp) > 0) {
            tcp_read(tcp, their_end, sizeof their_end);
            rest = their_end[0];
            heard_peer = 1;
        }
        if (limit && !heard_peer)
            rest = UINT32_MAX;
        if (now_us() > until ||
            (told_peer && !heard_peer && now_us() > failed_us[WINDOW] + FAIL_US))
            fail("%s: failed here %d, there %d; plain: %u sent, %u done, %u of %u received",
                 NAMES[WINDOW], failed[WINDOW], heard_peer, sent[PLAIN], done[PLAIN],
                 received[PLAIN], rest);
    }
    exchange(&mine, &theirs, sizeof mine);
    if (status_of[WINDOW] == IBV_WC_SUCCESS)
        fail("no error");
    printf("{\"window\": \"%s\", \"before\": %u, \"plain\": %u, \"uc_failed\": %d, \"ud_failed\": "
           "%d}\n",
           ibv_wc_status_str(status_of[WINDOW]), received[WINDOW], received[PLAIN], failed[UC],
           failed[UD]);
    for (i = 0; i < QPS; i++)
        CHECK(ibv_destroy_qp(qps[i]));
    CHECK(ibv_dealloc_mw(window));
    CHECK(ibv_destroy_ah(ah));
    CHECK(ibv_destroy_cq(cq));
    CHECK(ibv_dereg_mr(mr));
    CHECK(ibv_dereg_mr(window_mr));
    CHECK(ibv_dealloc_pd(pd));
    return 0;
}
