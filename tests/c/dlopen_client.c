/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A verbs program that is not linked to libibverbs: it opens the library by name and takes each
 * function by dlvsym with a version, as NCCL does (and by dlsym where dlvsym has none). An RC
 * stream of SENDs and WRITEs goes from the connecting end to the listening one; every byte is
 * checked there.
 *
 *   dlopen_client --listen PORT | --connect HOST:PORT [--device unb0] [--seconds 3] [--gid-index 0]
 *
 * cc -O2 -Wall -Wextra -Werror -o dlopen_client dlopen_client.c -ldl
 */
#include "common.h"
#include <dlfcn.h>
#include <infiniband/verbs.h>

#undef ibv_reg_mr
#undef ibv_query_port

/* Messages that may be under way, and the size of each. */
#define WINDOW 16
#define BYTES 65536
/* As an immediate: no more will come. As a wr_id: an empty SEND. */
#define END 0xffffffffu
#define WORD UINT64_MAX

static struct ibv_device **(*get_device_list)(int *);
static void (*free_device_list)(struct ibv_device **);
static const char *(*get_device_name)(struct ibv_device *);
static struct ibv_context *(*open_device)(struct ibv_device *);
static int (*close_device)(struct ibv_context *);
static int (*query_gid)(struct ibv_context *, uint8_t, int, union ibv_gid *);
static struct ibv_pd *(*alloc_pd)(struct ibv_context *);
static int (*dealloc_pd)(struct ibv_pd *);
static struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
static int (*dereg_mr)(struct ibv_mr *);
static struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *,
                                   int);
static int (*destroy_cq)(struct ibv_cq *);
static struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
static int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
static int (*destroy_qp)(struct ibv_qp *);
static const char *(*wc_status_str)(enum ibv_wc_status);

static int by_version;

static void *take(void *lib, const char *name)
{
    void *f = dlvsym(lib, name, "IBVERBS_1.1");

    if (f)
        by_version++;
    else
        f = dlsym(lib, name);
    if (!f)
        fail("%s: %s", name, dlerror());
    return f;
}

static void take_all(void)
{
    void *lib = dlopen("libibverbs.so", RTLD_NOW);

    if (!lib)
        lib = dlopen("libibverbs.so.1", RTLD_NOW);
    if (!lib)
        fail("cannot open libibverbs: %s", dlerror());
#define TAKE(f) f = take(lib, "ibv_" #f)
    TAKE(get_device_list);
    TAKE(free_device_list);
    TAKE(get_device_name);
    TAKE(open_device);
    TAKE(close_device);
    TAKE(query_gid);
    TAKE(alloc_pd);
    TAKE(dealloc_pd);
    TAKE(reg_mr);
    TAKE(dereg_mr);
    TAKE(create_cq);
    TAKE(destroy_cq);
    TAKE(create_qp);
    TAKE(modify_qp);
    TAKE(destroy_qp);
    TAKE(wc_status_str);
#undef TAKE
    /* Whatever is not of verbs must still be found by whoever asks. */
    if (!dlsym(RTLD_DEFAULT, "strlen") || !dlsym(RTLD_NEXT, "malloc") ||
        dlsym(lib, "ibv_no_such_verb"))
        fail("dlsym answers wrongly for other names");
}

struct meeting {
    uint32_t qpn, psn, rkey, pad;
    uint64_t addr;
    union ibv_gid gid;
};

static void connect_qp(struct ibv_qp *qp, int gid_index, uint32_t psn, const struct meeting *peer)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

    if (modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        fail("to INIT: %s", strerror(errno));
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer->qpn,
                              .rq_psn = peer->psn,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 1 };
    a.ah_attr.is_global = 1;
    a.ah_attr.port_num = 1;
    a.ah_attr.grh.dgid = peer->gid;
    a.ah_attr.grh.sgid_index = gid_index;
    a.ah_attr.grh.hop_limit = 64;
    if (modify_qp(qp, &a,
                  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        fail("to RTR: %s", strerror(errno));
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS,
                              .timeout = 14,
                              .retry_cnt = 7,
                              .rnr_retry = 7,
                              .sq_psn = psn,
                              .max_rd_atomic = 1 };
    if (modify_qp(qp, &a,
                  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        fail("to RTS: %s", strerror(errno));
}

/* Odd messages go by SEND. Even ones are written into the peer's slot, and the write's immediate
 * announces them. */
static void post_message(struct ibv_qp *qp, uint8_t *slot, struct ibv_mr *mr, uint64_t number,
                         const struct meeting *peer)
{
    struct ibv_sge sge = { .addr = (uintptr_t)slot, .length = BYTES, .lkey = mr->lkey };
    struct ibv_send_wr wr = { .wr_id = number,
                              .sg_list = &sge,
                              .num_sge = 1,
                              .send_flags = IBV_SEND_SIGNALED },
                       *bad;

    content_make(slot, BYTES, number, number);
    wr.opcode = number % 2 ? IBV_WR_SEND_WITH_IMM : IBV_WR_RDMA_WRITE_WITH_IMM;
    wr.imm_data = htonl((uint32_t)number);
    wr.wr.rdma.remote_addr = peer->addr + (WINDOW + number % WINDOW) * BYTES;
    wr.wr.rdma.rkey = peer->rkey;
    if (ibv_post_send(qp, &wr, &bad))
        fail("post_send: %s", strerror(errno));
}

static void post_receive(struct ibv_qp *qp, uint8_t *mem, struct ibv_mr *mr, uint64_t slot)
{
    struct ibv_sge sge = { .addr = (uintptr_t)(mem + slot * BYTES),
                           .length = BYTES,
                           .lkey = mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

    if (ibv_post_recv(qp, &wr, &bad))
        fail("post_recv: %s", strerror(errno));
}

/* An empty SEND that says how many messages were checked, or that no more will come. */
static void post_word(struct ibv_qp *qp, uint32_t word)
{
    struct ibv_send_wr wr = { .wr_id = WORD,
                              .opcode = IBV_WR_SEND_WITH_IMM,
                              .imm_data = htonl(word),
                              .send_flags = IBV_SEND_SIGNALED },
                       *bad;

    if (ibv_post_send(qp, &wr, &bad))
        fail("post_send: %s", strerror(errno));
}

/* The next completion; every one must be good. */
static struct ibv_wc poll_one(struct ibv_cq *cq, int tcp)
{
    struct ibv_wc wc;
    uint64_t until = now_us() + 20 * 1000000, spins = 0;
    int n;

    while (!(n = ibv_poll_cq(cq, 1, &wc))) {
        if (++spins % 4096 == 0 && (now_us() > until || tcp_peek(tcp) < 0))
            fail(now_us() > until ? "no completion for 20 s" : "the peer ended early");
    }
    if (n < 0)
        fail("poll_cq: %d", n);
    if (wc.status)
        fail("a completion says: %s", wc_status_str(wc.status));
    return wc;
}

/* The sending end: at most WINDOW messages are unchecked by the peer, so a slot is free when its
 * turn comes. */
static uint64_t send_stream(struct ibv_qp *qp, struct ibv_cq *cq, uint8_t *mem, struct ibv_mr *mr,
                const struct meeting *peer, int tcp, int seconds)
{
    uint64_t posted = 0, sent = 0, checked = 0, until = now_us() + seconds * 1000000ULL,
             tick = now_us();

    for (;;) {
        int more = now_us() < until;
        struct ibv_wc wc;

        for (; more && posted - checked < WINDOW && posted - sent < WINDOW; posted++)
            post_message(qp, mem + posted % WINDOW * BYTES, mr, posted, peer);
        if (!more && checked == posted && sent == posted)
            break;
        wc = poll_one(cq, tcp);
        if (wc.opcode & IBV_WC_RECV) {
            if (ntohl(wc.imm_data) != (uint32_t)++checked)
                fail("the peer has checked %u messages, it should be %llu", ntohl(wc.imm_data),
                     (unsigned long long)checked);
            post_receive(qp, mem, mr, wc.wr_id);
        } else if (wc.wr_id != sent++) {
            fail("completions are out of order");
        }
        if (now_us() > tick + 500000) {
            printf("%llu messages\n", (unsigned long long)checked);
            fflush(stdout);
            tick = now_us();
        }
    }
    post_word(qp, END);
    poll_one(cq, tcp);
    return checked;
}

/* The receiving end: checks each message, then says so. */
static uint64_t receive_stream(struct ibv_qp *qp, struct ibv_cq *cq, uint8_t *mem,
                               struct ibv_mr *mr, int tcp)
{
    uint64_t checked = 0, unsent = 0;

    for (;;) {
        struct ibv_wc wc = poll_one(cq, tcp);
        const uint8_t *data;
        const char *wrong;

        if (!(wc.opcode & IBV_WC_RECV)) {
            unsent--;
            continue;
        }
        if (ntohl(wc.imm_data) == END && wc.byte_len == 0)
            break;
        if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM)
            data = mem + (WINDOW + checked % WINDOW) * BYTES;
        else
            data = mem + (2 * WINDOW + wc.wr_id % WINDOW) * BYTES;
        wrong = content_wrong(data, BYTES, checked, checked);
        if (wrong || wc.byte_len != BYTES || ntohl(wc.imm_data) != (uint32_t)checked)
            fail("message %llu: %s", (unsigned long long)checked,
                 wrong ? wrong : "wrong length or number");
        checked++;
        post_receive(qp, mem, mr, wc.wr_id);
        post_word(qp, (uint32_t)checked);
        unsent++;
    }
    while (unsent) {
        poll_one(cq, tcp);
        unsent--;
    }
    return checked;
}

static struct ibv_context *open_named(const char *name)
{
    int i, count;
    struct ibv_context *context = NULL;
    struct ibv_device **list = get_device_list(&count);

    for (i = 0; list && i < count; i++)
        if (!strcmp(get_device_name(list[i]), name))
            context = open_device(list[i]);
    if (!context)
        fail("no device %s among %d", name, list ? count : 0);
    free_device_list(list);
    return context;
}

int main(int argc, char **argv)
{
    const char *listen_port = NULL, *where = NULL, *device = "unb0";
    int i, tcp, seconds = 3, gid_index = test_gid_index();
    struct meeting us = { 0 }, peer;
    uint64_t messages;
    uint8_t *mem, bye = 0;

    for (i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--listen"))
            listen_port = argv[i + 1];
        else if (!strcmp(argv[i], "--connect"))
            where = argv[i + 1];
        else if (!strcmp(argv[i], "--device"))
            device = argv[i + 1];
        else if (!strcmp(argv[i], "--seconds"))
            seconds = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--gid-index"))
            gid_index = atoi(argv[i + 1]);
        else
            break;
    }
    if (i < argc || !listen_port == !where)
        fail("usage: %s --listen PORT | --connect HOST:PORT [--device unb0] [--seconds 3] "
             "[--gid-index 0]",
             argv[0]);
    take_all();

    struct ibv_context *context = open_named(device);
    struct ibv_pd *pd = alloc_pd(context);
    /* WINDOW slots each to send from, to be written to and to receive into. */
    mem = aligned_alloc(4096, 3 * WINDOW * BYTES);
    memset(mem, 0, 3 * WINDOW * BYTES);
    struct ibv_mr *mr =
        pd ? reg_mr(pd, mem, 3 * WINDOW * BYTES, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
           : NULL;
    struct ibv_cq *cq = mr ? create_cq(context, 8 * WINDOW, NULL, NULL, 0) : NULL;
    struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                     .cap = { 3 * WINDOW, WINDOW, 1, 1, 0 } };
    struct ibv_qp *qp = cq ? create_qp(pd, &init) : NULL;

    if (!qp)
        fail("cannot make the queues: %s", strerror(errno));
    us.qpn = qp->qp_num;
    us.psn = mix(us.qpn) & 0xffffff;
    us.rkey = mr->rkey;
    us.addr = (uintptr_t)mem;
    if (query_gid(context, 1, gid_index, &us.gid))
        fail("no GID at index %d", gid_index);

    tcp = listen_port ? tcp_listen(listen_port) : tcp_connect(where);
    tcp_write(tcp, &us, sizeof us);
    tcp_read(tcp, &peer, sizeof peer);
    connect_qp(qp, gid_index, us.psn, &peer);
    for (i = 0; i < WINDOW; i++)
        post_receive(qp, mem, mr, 2 * WINDOW + i);
    tcp_write(tcp, &bye, 1);
    tcp_read(tcp, &bye, 1);

    messages = where ? send_stream(qp, cq, mem, mr, &peer, tcp, seconds)
                     : receive_stream(qp, cq, mem, mr, tcp);
    tcp_write(tcp, &bye, 1);
    tcp_read(tcp, &bye, 1);
    if (!messages)
        fail("no message came");
    if (destroy_qp(qp) || destroy_cq(cq) || dereg_mr(mr) || dealloc_pd(pd) || close_device(context))
        fail("something could not be destroyed: %s", strerror(errno));
    printf("{\"verified_messages\":%llu,\"verified_bytes\":%llu,\"functions_by_version\":%d,"
           "\"errors\":0}\n",
           (unsigned long long)messages, (unsigned long long)messages * BYTES, by_version);
    return 0;
}
