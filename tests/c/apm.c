/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Automatic path migration, as any program over verbs uses it: QPs between two devices with two
 * ports each, loaded with an alternate path from port 2 to port 2, and armed. Then messages of all
 * kinds in turn, each verified: a WRITE that a READ brings back, a SEND that the server looks at, a
 * FETCH_ADD that must find its own number, so that none was lost or ran twice. What befalls the
 * ports meanwhile is somebody else's to do.
 *
 * apm PORT    the server
 * apm HOST:PORT QPS DEPTH BYTES MILLISECONDS [request|rearm]
 *           the client: DEPTH messages at a time on each QP
 *   request   half-way, the client asks for the migration of all QPs
 *   rearm     the same, and whoever has migrated loads the path that it left, time and again
 * The client writes a line of JSON; an `error` in it is the status of the first completion that
 * failed, and `least_us` the shortest times between two completions, both before the client asks,
 * or both after the first migration (or, where nobody asks, before and after that).
 */
#include "common.h"
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>

enum { MAX_QPS = 1024, RECVS = 64, PORTS = 2, SQ = 256, WAIT_MS = 20000 };

struct options {
    uint32_t qps, depth, bytes, ms, request, rearm;
};

struct end {
    union ibv_gid gid[PORTS];
    uint64_t addr;
    uint32_t rkey, qpn[MAX_QPS];
};

static struct options o;
static struct end own, peer;
static struct ibv_context *context;
static struct ibv_mr *mr;
static struct ibv_cq *cq;
static struct ibv_qp *qps[MAX_QPS];
static uint8_t *memory;
static uint32_t migrated, not_migrated;
static uint64_t asked_us, last_event_us;

static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

/* Memory of each QP: a counter, what was made, where the peer writes, what was read back; or as
 * many receives. */
static uint64_t stride(void) { return 64 + 3ull * SQ * o.bytes; }
static uint64_t offset(uint32_t qp, int part, uint64_t slot)
{
    return qp * stride() + 64 + (part * (uint64_t)SQ + slot) * o.bytes;
}

static struct ibv_ah_attr vector(int port)
{
    return (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = port,
        .grh = { .dgid = peer.gid[port - 1], .sgid_index = test_gid_index(), .hop_limit = 64 }
    };
}

static void connect_qp(struct ibv_qp *qp, uint32_t to)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                                IBV_ACCESS_REMOTE_ATOMIC };

    check(
        ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
        "to INIT");
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = to,
                              .max_dest_rd_atomic = 16,
                              .min_rnr_timer = 1,
                              .ah_attr = vector(1) };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER),
          "to RTR");
    a = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 12, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 16
    };
    check(ibv_modify_qp(qp, &a,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
          "to RTS");
}

static void arm(struct ibv_qp *qp, int port)
{
    struct ibv_qp_attr a = { .alt_ah_attr = vector(port),
                             .alt_port_num = port,
                             .alt_timeout = 12,
                             .path_mig_state = IBV_MIG_REARM };

    check(ibv_modify_qp(qp, &a, IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE),
          "to load the alternate path");
}

static struct ibv_qp_attr query(struct ibv_qp *qp)
{
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr a;

    check(ibv_query_qp(qp, &a, IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_AV | IBV_QP_PORT,
                       &init),
          "ibv_query_qp");
    return a;
}

static void take_events(void)
{
    struct ibv_async_event e;

    while (!ibv_get_async_event(context, &e)) {
        if (e.event_type == IBV_EVENT_PATH_MIG) {
            struct ibv_qp_attr a = query(e.element.qp);

            migrated++;
            last_event_us = now_us();
            if (a.ah_attr.port_num != a.port_num ||
                memcmp(&a.ah_attr.grh.dgid, &peer.gid[a.port_num - 1], 16))
                fail("ibv_query_qp tells another path than that of port %d", a.port_num);
            if (o.rearm)
                arm(e.element.qp, 3 - a.port_num);
            else if (a.port_num != 2 || a.path_mig_state != IBV_MIG_MIGRATED || a.alt_port_num)
                fail("migrated, but port %d, state %d, alternate port %d", a.port_num,
                     a.path_mig_state, a.alt_port_num);
        } else if (e.event_type == IBV_EVENT_PATH_MIG_ERR) {
            not_migrated++;
        }
        ibv_ack_async_event(&e);
    }
}

static void set_up(int tcp)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { SQ, RECVS, 1, 1, 0 } };
    struct ibv_device_attr device;
    struct ibv_pd *pd;
    uint32_t i;

    context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    pd = context ? ibv_alloc_pd(context) : NULL;
    memory = calloc(o.qps, stride());
    mr = pd && memory ? ibv_reg_mr(pd, memory, o.qps * stride(),
                                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                       IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
                      : NULL;
    cq = mr ? ibv_create_cq(context, o.qps * (SQ + RECVS), NULL, NULL, 0) : NULL;
    if (!cq)
        fail("no device, domain, region or CQ: %s", strerror(errno));
    check(ibv_query_device(context, &device), "ibv_query_device");
    if (device.phys_port_cnt != PORTS || !(device.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG))
        fail("the device has %d ports, flags %#x", device.phys_port_cnt, device.device_cap_flags);
    fcntl(context->async_fd, F_SETFL, O_NONBLOCK);
    init.send_cq = init.recv_cq = cq;
    for (i = 0; i < PORTS; i++)
        check(ibv_query_gid(context, i + 1, test_gid_index(), &own.gid[i]), "ibv_query_gid");
    for (i = 0; i < o.qps; i++) {
        qps[i] = ibv_create_qp(pd, &init);
        if (!qps[i])
            fail("QP %u: %s", i, strerror(errno));
        own.qpn[i] = qps[i]->qp_num;
    }
    own.addr = (uintptr_t)memory;
    own.rkey = mr->rkey;
    tcp_write(tcp, &own, sizeof own);
    tcp_read(tcp, &peer, sizeof peer);
    for (i = 0; i < o.qps; i++) {
        connect_qp(qps[i], peer.qpn[i]);
        arm(qps[i], 2);
    }
}

static void wait_armed(int tcp)
{
    uint64_t until = now_us() + WAIT_MS * 1000ull;
    char c = 'a';
    uint32_t i;

    for (i = 0; i < o.qps; i++)
        while (query(qps[i]).path_mig_state != IBV_MIG_ARMED)
            if (now_us() > until)
                fail("QP %u is in state %d after %d s", i, query(qps[i]).path_mig_state,
                     WAIT_MS / 1000);
    tcp_write(tcp, &c, 1);
    tcp_read(tcp, &c, 1);
}

static void post_recv(uint32_t qp, uint64_t n)
{
    struct ibv_sge sge = { (uintptr_t)memory + offset(qp, 2, n % RECVS), o.bytes, mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = (uint64_t)qp << 32 | (uint32_t)n,
                              .sg_list = &sge,
                              .num_sge = 1 },
                       *bad;

    check(ibv_post_recv(qps[qp], &wr, &bad), "ibv_post_recv");
}

static int serve(int tcp)
{
    static uint64_t received[MAX_QPS];
    uint32_t result[2], i, n, turns = 0;
    struct ibv_wc wc[16];
    int k;

    for (i = 0; i < o.qps; i++)
        for (n = 0; n < RECVS; n++)
            post_recv(i, n);
    wait_armed(tcp);
    while (tcp_peek(tcp) == 0) {
        do {
            k = ibv_poll_cq(cq, 16, wc);
            for (int j = 0; j < k; j++) {
                uint32_t qp = wc[j].wr_id >> 32;
                uint64_t number = received[qp];
                const char *wrong;

                if (wc[j].status != IBV_WC_SUCCESS)
                    continue; /* the client says what came of it */
                wrong = content_wrong(memory + offset(qp, 2, number % RECVS), wc[j].byte_len, qp,
                                      number);
                if (wrong || wc[j].byte_len != o.bytes)
                    fail("SEND %llu of QP %u: %s", (unsigned long long)number, qp,
                         wrong ? wrong : "its length");
                post_recv(qp, number + RECVS);
                received[qp]++;
            }
            if (++turns % 64 == 0)
                take_events();
        } while (k > 0);
    }
    take_events();
    result[0] = migrated;
    result[1] = not_migrated;
    tcp_write(tcp, result, sizeof result);
    return 0;
}

enum { WRITE_READ, SEND, ADD, KINDS };

/* Posts message `n` of a QP: one work request, or two of which the second completes. */
static void post(uint32_t qp, uint64_t n)
{
    uint64_t slot = n % SQ, id = (uint64_t)qp << 48 | n, counter = peer.addr + qp * stride();
    uint8_t *made = memory + offset(qp, 0, slot);
    struct ibv_sge from = { (uintptr_t)made, o.bytes, mr->lkey },
                   to = { (uintptr_t)memory + offset(qp, 1, slot), o.bytes, mr->lkey };
    struct ibv_send_wr second = { .wr_id = id,
                                  .sg_list = &to,
                                  .num_sge = 1,
                                  .send_flags = IBV_SEND_SIGNALED,
                                  .opcode = IBV_WR_RDMA_READ };
    struct ibv_send_wr wr = { .wr_id = id, .sg_list = &from, .num_sge = 1 }, *bad;

    second.wr.rdma.remote_addr = peer.addr + offset(qp, 0, slot);
    second.wr.rdma.rkey = peer.rkey;
    switch (n % KINDS) {
    case WRITE_READ:
        content_make(made, o.bytes, qp, n);
        memset(memory + offset(qp, 1, slot), 0, o.bytes);
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.wr.rdma = second.wr.rdma;
        wr.next = &second;
        break;
    case SEND:
        content_make(made, o.bytes, qp, n / KINDS);
        wr.opcode = IBV_WR_SEND;
        wr.send_flags = IBV_SEND_SIGNALED;
        break;
    default:
        to.length = 8;
        wr.sg_list = &to;
        wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        wr.send_flags = IBV_SEND_SIGNALED;
        wr.wr.atomic.remote_addr = counter;
        wr.wr.atomic.compare_add = 1;
        wr.wr.atomic.rkey = peer.rkey;
    }
    check(ibv_post_send(qps[qp], &wr, &bad), "ibv_post_send");
}

static void verify(uint32_t qp, uint64_t n)
{
    uint8_t *read = memory + offset(qp, 1, n % SQ);
    const char *wrong = n % KINDS == WRITE_READ ? content_wrong(read, o.bytes, qp, n) : NULL;
    uint64_t found;

    memcpy(&found, read, 8);
    if (wrong)
        fail("WRITE %llu of QP %u came back: %s", (unsigned long long)n, qp, wrong);
    if (n % KINDS == ADD && found != n / KINDS)
        fail("FETCH_ADD %llu of QP %u found %llu", (unsigned long long)(n / KINDS), qp,
             (unsigned long long)found);
}

static void ask(void)
{
    struct ibv_qp_attr a = { .path_mig_state = IBV_MIG_MIGRATED };
    uint32_t i;

    asked_us = now_us();
    for (i = 0; i < o.qps; i++)
        if (query(qps[i]).path_mig_state == IBV_MIG_ARMED)
            check(ibv_modify_qp(qps[i], &a, IBV_QP_PATH_MIG_STATE), "to ask for migration");
}

/* Which path messages take: 0 the first, 1 the other, 2 either (asked for, and no event yet). */
static unsigned side(void)
{
    return migrated ? 1 : asked_us ? 2 : 0;
}

static int work(int tcp)
{
    static uint64_t posted[MAX_QPS], done[MAX_QPS];
    uint64_t began = now_us(), ends, next_ask, total = 0, pending = 0, beat = 0, longest = 0,
             least[2] = { UINT64_MAX, UINT64_MAX }, last;
    uint32_t server[2] = { 0, 0 }, i, turns = 0, error = 0, asks = 0;
    struct ibv_wc wc[16];
    unsigned path = 0;
    int k;

    wait_armed(tcp);
    printf("armed\n");
    fflush(stdout);
    began = last = now_us();
    ends = began + o.ms * 1000ull;
    next_ask = began + o.ms * (o.rearm ? 100ull : 500ull);
    while (!error && (now_us() < ends || pending)) {
        for (i = 0; i < o.qps && now_us() < ends; i++)
            while (posted[i] - done[i] < o.depth) {
                post(i, posted[i]++);
                pending++;
            }
        k = ibv_poll_cq(cq, 16, wc);
        for (int j = 0; j < k; j++) {
            uint32_t qp = wc[j].wr_id >> 48;
            uint64_t n = wc[j].wr_id & 0xffffffffffff;

            if (wc[j].status != IBV_WC_SUCCESS) {
                error = wc[j].status;
                break;
            }
            if (n != done[qp])
                fail("message %llu of QP %u completed after %llu", (unsigned long long)n, qp,
                     (unsigned long long)done[qp]);
            verify(qp, n);
            done[qp]++;
            total++;
            pending--;
        }
        if (k > 0) {
            uint64_t now = now_us();

            longest = now - last > longest ? now - last : longest;
            if (path == side() && path < 2)
                least[path] = now - last < least[path] ? now - last : least[path];
            last = now;
            path = side();
        }
        if (++turns % 64 == 0)
            take_events();
        if ((o.request || o.rearm) && now_us() > next_ask) {
            ask();
            asks++;
            next_ask = o.rearm ? next_ask + o.ms * 100ull : UINT64_MAX;
        }
        if (now_us() > beat) {
            beat = now_us() + 50000;
            printf("messages %llu\n", (unsigned long long)total);
            fflush(stdout);
        }
        if (now_us() > ends + WAIT_MS * 1000ull)
            fail("%llu messages are not complete", (unsigned long long)pending);
    }
    take_events();
    /* Why the path failed is told by an event, which may come a moment after the completion. */
    for (last = now_us();
         error && migrated + not_migrated == 0 && now_us() < last + WAIT_MS * 1000ull;) {
        struct pollfd asynchronous = { .fd = context->async_fd, .events = POLLIN };

        poll(&asynchronous, 1, 100);
        take_events();
    }
    tcp_write(tcp, "e", 1);
    tcp_read(tcp, server, sizeof server);
    printf("{\"messages\": %llu, \"error\": %u, \"migrated\": %u, \"not_migrated\": %u, "
           "\"peer_migrated\": %u, \"peer_not_migrated\": %u, "
           "\"asks\": %u, \"event_us\": %lld, \"longest_us\": %llu, \"least_us\": [%lld, %lld]}\n",
           (unsigned long long)total, error, migrated, not_migrated, server[0], server[1], asks,
           asked_us && last_event_us > asked_us ? (long long)(last_event_us - asked_us) : -1,
           (unsigned long long)longest, (long long)least[0], (long long)least[1]);
    return 0;
}

int main(int argc, char **argv)
{
    int client = argc >= 6, tcp;

    if (!client && argc != 2)
        fail("usage: apm PORT | apm HOST:PORT QPS DEPTH BYTES MILLISECONDS [request|rearm]");
    tcp = client ? tcp_connect(argv[1]) : tcp_listen(argv[1]);
    if (client) {
        o = (struct options){ .qps = atoi(argv[2]),
                              .depth = atoi(argv[3]),
                              .bytes = atoi(argv[4]),
                              .ms = atoi(argv[5]) };
        o.request = argc > 6 && !strcmp(argv[6], "request");
        o.rearm = argc > 6 && !strcmp(argv[6], "rearm");
        if (!o.qps || o.qps > MAX_QPS || !o.depth || o.depth > SQ / 2 || o.bytes < 16)
            fail("1 to %d QPs, 1 to %d messages of at least 16 bytes are right", MAX_QPS, SQ / 2);
        tcp_write(tcp, &o, sizeof o);
    } else {
        tcp_read(tcp, &o, sizeof o);
    }
    set_up(tcp);
    return client ? work(tcp) : serve(tcp);
}
