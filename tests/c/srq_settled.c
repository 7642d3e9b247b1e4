/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Queue pairs that share receives while their NIC fails: each message arrives once, whole, and no
 * byte of a buffer changes once its completion could be polled, also behind the message's length.
 * What lies there by then is the device's: a message that was cut off may have begun to fill the
 * buffer.
 *
 *   srq_settled SEED       prints "moving" when messages have arrived over all QPs
 */
#include "common.h"
#include <infiniband/verbs.h>

enum {
    QPS = 8,
    BYTES = 16384,
    MESSAGES = 640,
    /* More than messages: a device may have some that another could use. */
    RECEIVES = MESSAGES + 256,
    WINDOW = 32,
    PAUSE_US = 2000
};

struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    union ibv_gid gid;
    struct ibv_qp *qp[QPS];
};

static struct end tx, rx;
static struct ibv_srq *srq;
static uint64_t seed;
static uint8_t *sent, *received, *settled;
static uint32_t length_of[MESSAGES];
static uint8_t done[RECEIVES], got[MESSAGES];

static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static void open_end(struct end *e, struct ibv_device *device, uint8_t *memory)
{
    e->context = device ? ibv_open_device(device) : NULL;
    e->pd = e->context ? ibv_alloc_pd(e->context) : NULL;
    e->cq = e->pd ? ibv_create_cq(e->context, 2 * RECEIVES, NULL, NULL, 0) : NULL;
    e->mr = e->cq ? ibv_reg_mr(e->pd, memory, (size_t)RECEIVES * BYTES, IBV_ACCESS_LOCAL_WRITE)
                  : NULL;
    if (!e->mr || ibv_query_gid(e->context, 1, test_gid_index(), &e->gid))
        fail("no device, CQ, region or GID: %s", strerror(errno));
}

static void make_qp(struct end *e, int i, struct ibv_srq *from)
{
    struct ibv_qp_init_attr init = { .send_cq = e->cq,
                                     .recv_cq = e->cq,
                                     .srq = from,
                                     .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1,
                                     .cap = { WINDOW, 1, 1, 1, 0 } };

    e->qp[i] = ibv_create_qp(e->pd, &init);
    if (!e->qp[i])
        fail("cannot make a QP: %s", strerror(errno));
}

static void connect_qp(struct end *e, int i, const struct end *peer)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

    check(ibv_modify_qp(e->qp[i], &a,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
          "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer->qp[i]->qp_num,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12 };
    a.ah_attr = (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = 1,
        .grh = { .dgid = peer->gid, .sgid_index = test_gid_index(), .hop_limit = 64 }
    };
    check(ibv_modify_qp(e->qp[i], &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "to RTR");
    a = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1
    };
    check(ibv_modify_qp(e->qp[i], &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

static void post_message(int number)
{
    uint8_t *at = sent + (size_t)number * BYTES;
    struct ibv_sge sge = { (uintptr_t)at, length_of[number], tx.mr->lkey };
    struct ibv_send_wr wr = { .wr_id = number,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = IBV_WR_SEND_WITH_IMM,
                              .imm_data = htonl(number) },
                       *bad;

    content_make(at, length_of[number], seed, number);
    check(ibv_post_send(tx.qp[number % QPS], &wr, &bad), "ibv_post_send");
}

/* What has arrived; each buffer is kept as it is when its completion is polled. */
static int receive(void)
{
    struct ibv_wc wc;
    int count = 0;

    while (ibv_poll_cq(rx.cq, 1, &wc)) {
        uint8_t *at = received + wc.wr_id * BYTES;
        uint32_t number = ntohl(wc.imm_data);
        const char *wrong;

        if (wc.status)
            fail("a receive: %s", ibv_wc_status_str(wc.status));
        memcpy(settled + wc.wr_id * BYTES, at, BYTES);
        if (number >= MESSAGES || got[number]++ || wc.byte_len != length_of[number])
            fail("message %u with %u bytes came %d times", number, wc.byte_len, got[number]);
        wrong = content_wrong(at, wc.byte_len, seed, number);
        if (wrong)
            fail("message %u: %s", number, wrong);
        done[wc.wr_id] = 1;
        count++;
    }
    return count;
}

static int sends_done(void)
{
    struct ibv_wc wc;
    int count = 0;

    while (ibv_poll_cq(tx.cq, 1, &wc)) {
        if (wc.status)
            fail("a send: %s", ibv_wc_status_str(wc.status));
        count++;
    }
    return count;
}

static void nothing_changed(void)
{
    for (int i = 0; i < RECEIVES; i++)
        if (done[i] && memcmp(settled + (size_t)i * BYTES, received + (size_t)i * BYTES, BYTES))
            fail("buffer %d has changed since its completion was polled", i);
}

int main(int argc, char **argv)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = RECEIVES, .max_sge = 1 } };
    uint64_t until, quiet;
    int posted = 0, completed = 0, arrived = 0;

    seed = argc == 2 ? strtoull(argv[1], NULL, 0) : 1;
    sent = malloc((size_t)RECEIVES * BYTES);
    received = calloc(RECEIVES, BYTES);
    settled = calloc(RECEIVES, BYTES);
    if (!list || !list[0] || !list[1] || !sent || !received || !settled)
        fail("two devices and memory are needed");
    open_end(&tx, list[0], sent);
    open_end(&rx, list[1], received);
    srq = ibv_create_srq(rx.pd, &srq_attr);
    if (!srq)
        fail("ibv_create_srq: %s", strerror(errno));
    for (int i = 0; i < MESSAGES; i++)
        length_of[i] = 16 + mix(seed + i) % (BYTES - 16);
    for (int i = 0; i < RECEIVES; i++) {
        struct ibv_sge sge = { (uintptr_t)received + (size_t)i * BYTES, BYTES, rx.mr->lkey };
        struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;

        check(ibv_post_srq_recv(srq, &wr, &bad), "ibv_post_srq_recv");
    }
    for (int i = 0; i < QPS; i++) {
        make_qp(&tx, i, NULL);
        make_qp(&rx, i, srq);
    }
    for (int i = 0; i < QPS; i++) {
        connect_qp(&rx, i, &tx);
        connect_qp(&tx, i, &rx);
    }
    for (until = now_us() + 50 * 1000000ull; completed < MESSAGES || arrived < MESSAGES;) {
        int before = arrived;

        /* All may be of one QP. */
        if (posted < MESSAGES && posted - completed < WINDOW)
            post_message(posted++);
        completed += sends_done();
        arrived += receive();
        if (before < 2 * QPS && arrived >= 2 * QPS) {
            printf("moving\n");
            fflush(stdout);
        }
        if (now_us() > until)
            fail("%d of %d messages arrived, %d sends completed", arrived, MESSAGES, completed);
        usleep(arrived == before ? PAUSE_US / 4 : PAUSE_US);
    }
    /* What the devices that were left still had on the way would come by now. */
    for (quiet = now_us() + 300000; now_us() < quiet; usleep(1000))
        if (receive() || sends_done())
            fail("a completion more");
    nothing_changed();
    printf("%d messages, no buffer changed after its completion\n", arrived);
    return 0;
}
