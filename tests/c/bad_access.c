/*
 * What a peer must not be able to do. For each wrong request the requester must see the right
 * status, and the owner's memory, with canaries around it, must not change; then a right request on
 * a new pair of QPs must still work.
 *
 *   bad_access --listen PORT       the owner of the memory
 *   bad_access --connect HOST:PORT the requester
 *
 * Ends with 0 if all is as it must be, else with 1 and the first thing that is not.
 */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CANARY = 4096, REGION = 65536, WAIT_S = 20, LOCAL = REGION * 2 };
enum { ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("bad_access: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

/* What is wrong with a request. */
enum wrong {
    NOTHING,
    WRONG_RKEY,
    STALE_RKEY,
    OTHER_PD,
    BEYOND_END,
    BEFORE_START,
    WRAPS_AROUND,
    NOT_WRITABLE,
    NOT_READABLE,
    LOCAL_KEY,
    LOCAL_BEYOND
};

static const struct test {
    const char *name;
    enum wrong wrong;
    enum ibv_wr_opcode opcode;
    uint32_t length;
    int access; /* of the owner's region */
    enum ibv_wc_status status;
} tests[] = {
    { "a right WRITE", NOTHING, IBV_WR_RDMA_WRITE, REGION, ALL, IBV_WC_SUCCESS },
    { "a right READ", NOTHING, IBV_WR_RDMA_READ, REGION, ALL, IBV_WC_SUCCESS },
    { "WRITE with a wrong rkey", WRONG_RKEY, IBV_WR_RDMA_WRITE, 100, ALL, IBV_WC_REM_ACCESS_ERR },
    { "long WRITE with a wrong rkey", WRONG_RKEY, IBV_WR_RDMA_WRITE, REGION, ALL,
      IBV_WC_REM_ACCESS_ERR },
    { "READ with a wrong rkey", WRONG_RKEY, IBV_WR_RDMA_READ, 100, ALL, IBV_WC_REM_ACCESS_ERR },
    { "WRITE with the rkey of a deregistered region", STALE_RKEY, IBV_WR_RDMA_WRITE, 100, ALL,
      IBV_WC_REM_ACCESS_ERR },
    { "WRITE with the rkey of another PD", OTHER_PD, IBV_WR_RDMA_WRITE, 100, ALL,
      IBV_WC_REM_ACCESS_ERR },
    { "WRITE over the end", BEYOND_END, IBV_WR_RDMA_WRITE, 100, ALL, IBV_WC_REM_ACCESS_ERR },
    { "long WRITE over the end", BEYOND_END, IBV_WR_RDMA_WRITE, REGION, ALL,
      IBV_WC_REM_ACCESS_ERR },
    { "READ over the end", BEYOND_END, IBV_WR_RDMA_READ, REGION, ALL, IBV_WC_REM_ACCESS_ERR },
    { "WRITE before the start", BEFORE_START, IBV_WR_RDMA_WRITE, 100, ALL, IBV_WC_REM_ACCESS_ERR },
    { "WRITE whose addresses wrap around", WRAPS_AROUND, IBV_WR_RDMA_WRITE, 100, ALL,
      IBV_WC_REM_ACCESS_ERR },
    { "WRITE to what may not be written", NOT_WRITABLE, IBV_WR_RDMA_WRITE, 100,
      IBV_ACCESS_REMOTE_READ, IBV_WC_REM_ACCESS_ERR },
    { "READ of what may not be read", NOT_READABLE, IBV_WR_RDMA_READ, 100,
      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, IBV_WC_REM_ACCESS_ERR },
    { "WRITE from a wrong lkey", LOCAL_KEY, IBV_WR_RDMA_WRITE, 100, ALL, IBV_WC_LOC_PROT_ERR },
    { "WRITE from beyond the local region", LOCAL_BEYOND, IBV_WR_RDMA_WRITE, 100, ALL,
      IBV_WC_LOC_PROT_ERR },
    { "a right WRITE, in the end", NOTHING, IBV_WR_RDMA_WRITE, REGION, ALL, IBV_WC_SUCCESS },
};
enum { TESTS = sizeof(tests) / sizeof(tests[0]) };

/* What the two ends tell each other for each test. */
struct hello {
    uint32_t qpn, rkey;
    uint64_t addr;
    union ibv_gid gid;
};

static int tcp;
static struct ibv_context *context;
static struct ibv_pd *pd, *other_pd;
static struct ibv_cq *cq;
static union ibv_gid gid;
static uint8_t memory[CANARY + REGION + CANARY], pattern[LOCAL];

static void exchange(const void *mine, void *theirs, size_t length)
{
    if (write(tcp, mine, length) != (ssize_t)length) fail("cannot write to the peer");
    if (recv(tcp, theirs, length, MSG_WAITALL) != (ssize_t)length) fail("the peer is gone");
}

static void modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, const char *what)
{
    int error = ibv_modify_qp(qp, attr, mask);
    if (error) fail("ibv_modify_qp to %s: %s", what, strerror(error));
}

static struct ibv_qp *make_qp(void)
{
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    if (!qp) fail("ibv_create_qp failed");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
    modify(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
    return qp;
}

static void connect_qp(struct ibv_qp *qp, const struct hello *peer)
{
    struct ibv_port_attr port;
    if (ibv_query_port(context, 1, &port)) fail("ibv_query_port failed");
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = port.active_mtu,
        .dest_qp_num = peer->qpn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = peer->gid, .hop_limit = 64 } }
    };
    modify(qp, &attr,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
           "RTR");
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1
    };
    modify(qp, &attr,
           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
               IBV_QP_MAX_QP_RD_ATOMIC,
           "RTS");
}

static enum ibv_wc_status request(struct ibv_qp *qp, const struct test *test,
                                  const struct hello *peer, struct ibv_mr *local)
{
    struct ibv_sge sge = {.addr = (uintptr_t)pattern, .length = test->length, .lkey = local->lkey};
    struct ibv_send_wr wr = { .wr_id = 42,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = test->opcode,
                              .send_flags = IBV_SEND_SIGNALED,
                              .wr.rdma = { .remote_addr = peer->addr, .rkey = peer->rkey } },
                       *bad;
    switch (test->wrong) {
    case WRONG_RKEY: wr.wr.rdma.rkey ^= 0x5a5a5a5a; break;
    case BEYOND_END: wr.wr.rdma.remote_addr += REGION - test->length + 1; break;
    case BEFORE_START: wr.wr.rdma.remote_addr -= 1; break;
    case WRAPS_AROUND: wr.wr.rdma.remote_addr = UINT64_MAX - 50; break;
    case LOCAL_KEY: sge.lkey ^= 0x5a5a5a5a; break;
    case LOCAL_BEYOND: sge.addr = (uintptr_t)pattern + LOCAL - test->length + 1; break;
    default: break;
    }
    int error = ibv_post_send(qp, &wr, &bad);
    if (error) fail("%s: ibv_post_send: %s", test->name, strerror(error));
    struct ibv_wc wc;
    time_t deadline = time(NULL) + WAIT_S;
    for (int n; (n = ibv_poll_cq(cq, 1, &wc)) != 1;) {
        if (n < 0) fail("%s: ibv_poll_cq gives %d", test->name, n);
        if (time(NULL) > deadline) fail("%s: no completion within %d s", test->name, WAIT_S);
    }
    if (wc.wr_id != 42 || wc.qp_num != qp->qp_num)
        fail("%s: the completion is of another WR", test->name);
    return wc.status;
}

/* The memory must hold what it held, but for a region that a right WRITE went to. */
static void check_memory(const struct test *test)
{
    bool written = test->wrong == NOTHING && test->opcode == IBV_WR_RDMA_WRITE;
    for (size_t i = 0; i < sizeof(memory); i++) {
        bool inside = i >= CANARY && i < CANARY + test->length;
        uint8_t right = written && inside ? pattern[i - CANARY] : 0xc5;
        if (memory[i] != right)
            fail("%s: byte %zd of the region is %#x, %#x is right", test->name, (ssize_t)i - CANARY,
                 memory[i], right);
    }
}

static void run(const struct test *test, bool owner)
{
    memset(memory, 0xc5, sizeof(memory));
    struct ibv_mr *local = ibv_reg_mr(pd, pattern, sizeof(pattern), ALL), *region = NULL;
    if (!local) fail("%s: ibv_reg_mr failed", test->name);
    struct ibv_qp *qp = make_qp();
    struct hello mine = {.qpn = qp->qp_num, .addr = (uintptr_t)memory + CANARY, .gid = gid}, peer;
    if (owner) {
        region = ibv_reg_mr(test->wrong == OTHER_PD ? other_pd : pd, memory + CANARY, REGION,
                            test->access);
        if (!region) fail("%s: ibv_reg_mr failed", test->name);
        mine.rkey = region->rkey;
        if (test->wrong == STALE_RKEY) {
            ibv_dereg_mr(region);
            region = NULL;
        }
    }
    exchange(&mine, &peer, sizeof(mine));
    connect_qp(qp, &peer);
    char token = 0;
    exchange(&token, &token, 1);
    if (!owner) {
        enum ibv_wc_status status = request(qp, test, &peer, local);
        if (status != test->status)
            fail("%s: status '%s', right is '%s'", test->name, ibv_wc_status_str(status),
                 ibv_wc_status_str(test->status));
        if (test->opcode == IBV_WR_RDMA_READ && test->wrong == NOTHING)
            for (size_t i = 0; i < test->length; i++)
                if (pattern[i] != 0xc5) fail("%s: byte %zu was not read", test->name, i);
    }
    exchange(&token, &token, 1);
    if (owner) check_memory(test);
    if (ibv_destroy_qp(qp) || ibv_dereg_mr(local) || (region && ibv_dereg_mr(region)))
        fail("%s: cannot clean up", test->name);
    if (!owner) printf("ok %s\n", test->name);
}

static void meet(int argc, char **argv, bool *owner)
{
    if (argc != 3) fail("usage: bad_access --listen PORT | --connect HOST:PORT");
    *owner = !strcmp(argv[1], "--listen");
    char *colon = strrchr(argv[2], ':');
    struct sockaddr_in addr = { .sin_family = AF_INET,
                                .sin_port = htons(atoi(colon ? colon + 1 : argv[2])),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (*owner) {
        if (bind(listener, (struct sockaddr *)&addr, sizeof(addr)) || listen(listener, 1))
            fail("cannot listen at port %s", argv[2]);
        tcp = accept(listener, NULL, NULL);
    } else {
        tcp = listener;
        if (connect(tcp, (struct sockaddr *)&addr, sizeof(addr)))
            fail("cannot connect to %s", argv[2]);
    }
    if (tcp < 0) fail("no connection");
}

int main(int argc, char **argv)
{
    bool owner;
    meet(argc, argv, &owner);
    struct ibv_device **devices = ibv_get_device_list(NULL);
    if (!devices || !devices[0]) fail("no verbs device");
    context = ibv_open_device(devices[0]);
    if (!context) fail("ibv_open_device failed");
    pd = ibv_alloc_pd(context);
    other_pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 64, NULL, NULL, 0);
    if (!pd || !other_pd || !cq || ibv_query_gid(context, 1, 0, &gid)) fail("cannot set up");
    for (int i = 0; i < TESTS; i++) {
        for (size_t j = 0; j < sizeof(pattern); j++) pattern[j] = (uint8_t)(j * 31 + i + 1);
        run(&tests[i], owner);
    }
    printf("%d requests, all as they must be\n", TESTS);
    ibv_destroy_cq(cq);
    ibv_dealloc_pd(other_pd);
    ibv_dealloc_pd(pd);
    ibv_close_device(context);
    ibv_free_device_list(devices);
    return 0;
}
