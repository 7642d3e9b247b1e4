/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Thousands of QPs and memory regions in one process, all used; and what idle ones cost the one
 * that works.
 *
 *   scale --listen PORT | --connect HOST:PORT [--qps 1000] [--mrs 10000] [--rounds 5] [--ms 300]
 *
 * Both ends make one RC QP that works, with 128+128 entries. In each round its bandwidth (WRITEs of
 * 64 KiB) and its latency (SENDs of 8 bytes, back and forth) are measured, then the other QPs are
 * made, connected and used once, it is measured again, and they are destroyed; every other round
 * measures among the others first. Then each of the regions is written by the peer. The connecting
 * end prints the figures of all rounds as a line of JSON.
 */
#include "common.h"
#include <infiniband/verbs.h>

enum {
    DEPTH = 128,
    SIZE = 65536,
    SLOTS = 16,
    PINGS = 20000,
    REGION = 64,
    LIMIT_US = 30 * 1000000,
    MAX_ROUNDS = 64
};

struct end { /* what the ends tell each other of a QP */
    uint32_t qpn, rkey;
    uint64_t addr;
    union ibv_gid gid;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static union ibv_gid gid;
/* SLOTS of SIZE bytes, eight bytes for each QP to receive into, eight to send from */
static uint8_t *memory;
static int qps = 1000, mrs = 10000, rounds = 5, ms = 300, tcp, connecting;

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

/* Bytes of memory that is this process's own. */
static uint64_t own_bytes(void)
{
    FILE *f = fopen("/proc/self/status", "r");
    char line[200];
    unsigned long long kb = 0;

    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "RssAnon: %llu", &kb) == 1)
            break;
    if (f)
        fclose(f);
    return kb * 1024;
}

static void wait_for(struct ibv_wc *wc, const char *what)
{
    uint64_t until = now_us() + LIMIT_US;
    int n;

    while ((n = ibv_poll_cq(cq, 1, wc)) != 1)
        if (n < 0 || now_us() > until)
            fail("%s: ibv_poll_cq gives %d, nothing came", what, n);
    if (wc->status)
        fail("%s: '%s'", what, ibv_wc_status_str(wc->status));
}

static void post_recv(struct ibv_qp *qp, uint32_t n)
{
    struct ibv_sge sge = { (uintptr_t)memory + (uint64_t)SLOTS * SIZE + n * 8, 8, mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = n, .sg_list = &sge, .num_sge = 1 }, *bad;
    int e = ibv_post_recv(qp, &wr, &bad);

    if (e)
        fail("post_recv: %s", strerror(e));
}

static void post_send(struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint64_t value, uint32_t size,
                      uint64_t addr, uint32_t rkey)
{
    uint64_t *small = (uint64_t *)(memory + (uint64_t)SLOTS * SIZE) + qps + 1 + value % qps;
    struct ibv_sge sge = { size == 8 ? (uintptr_t)small : (uintptr_t)memory, size, mr->lkey };
    struct ibv_send_wr wr = { .wr_id = value,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = opcode,
                              .send_flags = IBV_SEND_SIGNALED,
                              .wr.rdma = { addr, rkey } },
                       *bad;
    int e;

    if (size == 8)
        *small = value;
    e = ibv_post_send(qp, &wr, &bad);
    if (e)
        fail("post_send: %s", strerror(e));
}

static struct ibv_qp *make_qp(void)
{
    struct ibv_qp_init_attr init = {
        .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { DEPTH, DEPTH, 1, 1, 0 }
    };
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);

    if (!qp)
        fail("ibv_create_qp: %s", strerror(errno));
    if (ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        fail("to INIT");
    return qp;
}

static struct end end_of(struct ibv_qp *qp)
{
    return (struct end){ qp->qp_num, mr->rkey, (uintptr_t)memory, gid };
}

static void connect_qp(struct ibv_qp *qp, const struct end *peer)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR,
                             .path_mtu = IBV_MTU_4096,
                             .dest_qp_num = peer->qpn,
                             .max_dest_rd_atomic = 1,
                             .min_rnr_timer = 1 };
    int e;

    a.ah_attr = (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = 1,
        .grh = { .dgid = peer->gid, .sgid_index = test_gid_index(), .hop_limit = 64 }
    };
    e = ibv_modify_qp(qp, &a,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    a = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 15, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1
    };
    e = e ? e
          : ibv_modify_qp(qp, &a,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    if (e)
        fail("to RTR and RTS: %s", strerror(e));
}

/* Half a round trip of eight bytes, in µs. */
static double latency(struct ibv_qp *qp)
{
    struct ibv_wc wc;
    uint64_t began;
    int i, sent = 0, got = 0;

    for (i = 0; i < 8; i++)
        post_recv(qp, 0);
    meet();
    began = now_us();
    for (i = 0; i < PINGS; i++) {
        if (connecting)
            post_send(qp, IBV_WR_SEND, i, 8, 0, 0);
        while (got <= i) {
            wait_for(&wc, "ping-pong");
            got += wc.opcode == IBV_WC_RECV;
            sent += wc.opcode == IBV_WC_SEND;
        }
        if (i < PINGS - 8)
            post_recv(qp, 0);
        if (!connecting)
            post_send(qp, IBV_WR_SEND, i, 8, 0, 0);
    }
    for (; sent < PINGS; sent++)
        wait_for(&wc, "ping-pong");
    return (now_us() - began) / 2.0 / PINGS;
}

/* Gbit/s of WRITEs of SIZE bytes. The owner of the memory sleeps. */
static double bandwidth(struct ibv_qp *qp, const struct end *peer)
{
    uint64_t began, posted = 0, done = 0;
    struct ibv_wc wc;

    meet();
    began = now_us();
    while (connecting && (done < posted || now_us() < began + ms * 1000)) {
        while (posted < done + SLOTS && now_us() < began + ms * 1000) {
            post_send(qp, IBV_WR_RDMA_WRITE, posted, SIZE, peer->addr + posted % SLOTS * SIZE,
                      peer->rkey);
            posted++;
        }
        if (posted > done) {
            wait_for(&wc, "WRITE");
            done++;
        }
    }
    began = now_us() - began;
    meet();
    return began ? done * SIZE * 8.0 / began / 1000 : 0;
}

/* Makes and connects the others and sends a message over each, both ways. */
static void make_others(struct ibv_qp **others, int n, struct end *mine, struct end *theirs)
{
    struct ibv_wc wc;
    int i, done;

    for (i = 0; i < n; i++) {
        others[i] = make_qp();
        mine[i] = end_of(others[i]);
    }
    exchange(mine, theirs, n * sizeof *mine);
    for (i = 0; i < n; i++) {
        post_recv(others[i], 1 + i);
        connect_qp(others[i], theirs + i);
    }
    memset(memory + (uint64_t)SLOTS * SIZE, 0, 8 * (1 + n));
    meet();
    for (i = done = 0; done < 2 * n;) {
        if (i < n && i < done + DEPTH) {
            post_send(others[i], IBV_WR_SEND, 0x1000000 + i, 8, 0, 0);
            i++;
            continue;
        }
        wait_for(&wc, "a message over each QP");
        done++;
    }
    for (i = 0; i < n; i++)
        if (((uint64_t *)(memory + (uint64_t)SLOTS * SIZE))[1 + i] != 0x1000000ULL + i)
            fail("QP %d of %d has received something else than was sent", i, n);
    meet();
}

/* Registers many regions, and has the peer write to each with its own key. */
static void many_regions(struct ibv_qp *qp)
{
    struct region {
        uint64_t addr;
        uint32_t rkey, pad;
    } *mine = calloc(mrs, sizeof *mine), *theirs = calloc(mrs, sizeof *theirs);
    struct ibv_mr **all = calloc(mrs, sizeof *all);
    uint8_t *p = calloc(mrs, REGION);
    struct ibv_wc wc;
    int i;

    for (i = 0; i < mrs; i++) {
        all[i] = ibv_reg_mr(pd, p + (size_t)i * REGION, REGION,
                            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        if (!all[i])
            fail("ibv_reg_mr %d: %s", i, strerror(errno));
        mine[i].addr = (uintptr_t)p + (uint64_t)i * REGION;
        mine[i].rkey = all[i]->rkey;
    }
    exchange(mine, theirs, mrs * sizeof *mine);
    for (i = 0; i < mrs; i++) {
        post_send(qp, IBV_WR_RDMA_WRITE, 0x2000000 + i, 8, theirs[i].addr, theirs[i].rkey);
        wait_for(&wc, "a WRITE to each region");
    }
    meet();
    for (i = 0; i < mrs; i++)
        if (*(uint64_t *)(p + (size_t)i * REGION) != 0x2000000ULL + i || ibv_dereg_mr(all[i]))
            fail("region %d of %d was not written, or cannot be deregistered", i, mrs);
    free(p), free(all), free(theirs), free(mine);
}

static void destroy_others(struct ibv_qp **others, int n)
{
    int i;

    for (i = 0; i < n; i++)
        if (ibv_destroy_qp(others[i]))
            fail("cannot destroy QP %d", i);
    meet();
}

static void print_rounds(const char *name, const double *values)
{
    int i;

    printf(", \"%s\": [", name);
    for (i = 0; i < rounds; i++)
        printf("%s%.3f", i ? ", " : "", values[i]);
    printf("]");
}

static void open_all(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);

    context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    if (!context)
        fail("cannot open the first device: %s", strerror(errno));
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 4 * DEPTH + 2 * qps, NULL, NULL, 0);
    memory = calloc(1, (size_t)SLOTS * SIZE + 16 * (qps + 1));
    if (!pd || !cq || !memory || ibv_query_gid(context, 1, test_gid_index(), &gid))
        fail("cannot set up: %s", strerror(errno));
    memset(memory, 1, (size_t)SLOTS * SIZE);
    mr = ibv_reg_mr(pd, memory, (size_t)SLOTS * SIZE + 16 * (qps + 1),
                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!mr)
        fail("ibv_reg_mr: %s", strerror(errno));
}

int main(int argc, char **argv)
{
    double lat[2][MAX_ROUNDS], bw[2][MAX_ROUNDS], bytes = 0;
    struct end us, peer, *mine, *theirs;
    const char *where = NULL;
    struct ibv_qp *qp, **others;
    int i, k;

    for (i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--listen") || !strcmp(argv[i], "--connect"))
            where = argv[i + 1], connecting = argv[i][2] == 'c';
        else if (!strcmp(argv[i], "--qps")) qps = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--mrs")) mrs = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--rounds")) rounds = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--ms")) ms = atoi(argv[i + 1]);
        else fail("unknown option '%s'", argv[i]);
    }
    if (!where || qps < 2 || rounds < 1 || rounds > MAX_ROUNDS)
        fail("usage: scale --listen PORT | --connect HOST:PORT [--qps N] [--mrs N] [--rounds N] "
             "[--ms N]");
    tcp = connecting ? tcp_connect(where) : tcp_listen(where);
    open_all();
    others = calloc(qps, sizeof *others);
    mine = calloc(qps, sizeof *mine);
    theirs = calloc(qps, sizeof *theirs);
    qp = make_qp();
    us = end_of(qp);
    exchange(&us, &peer, sizeof us);
    connect_qp(qp, &peer);
    bandwidth(qp, &peer); /* warm-up */
    for (i = 0; i < rounds; i++) {
        /* Alone and then among the others, and in the next round the other way round: a drift
         * favours neither. */
        for (k = 0; k < 2; k++) {
            int many = k != i % 2;

            if (many) {
                uint64_t before = own_bytes();

                make_others(others, qps - 1, mine, theirs);
                if (i == 0) /* later rounds use what was freed */
                    bytes = (double)(own_bytes() - before) / (qps - 1);
            }
            lat[many][i] = latency(qp);
            bw[many][i] = bandwidth(qp, &peer);
            if (many)
                destroy_others(others, qps - 1);
        }
    }
    many_regions(qp);
    if (connecting) {
        printf("{\"qps\": %d, \"mrs\": %d, \"bytes_per_qp\": %.0f", qps, mrs, bytes);
        print_rounds("lat_one_us", lat[0]);
        print_rounds("lat_many_us", lat[1]);
        print_rounds("bw_one_gbps", bw[0]);
        print_rounds("bw_many_gbps", bw[1]);
        printf("}\n");
    }
    if (ibv_destroy_qp(qp) || ibv_dereg_mr(mr) || ibv_destroy_cq(cq) || ibv_dealloc_pd(pd) ||
        ibv_close_device(context))
        fail("cannot clean up");
    return 0;
}
