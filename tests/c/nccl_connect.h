/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for NCCL: connections. One way each: a sender with a FIFO that the receiver writes into,
 * and a receiver with records of sizes that the sender writes into. */
#ifndef UNBROKEN_TESTS_NCCL_CONNECT_H
#define UNBROKEN_TESTS_NCCL_CONNECT_H

#include "nccl_devices.h"

enum {
    MAX_RECVS = 8,               /* messages of a group: one receive for several senders' tags */
    MAX_REQUESTS = 32 * MAX_RECVS,
    MAX_NIC_DEVICES = 8,
    MAX_QPS = 128,
    QP_TIMEOUT = 20,
    QP_RETRY_COUNT = 7,
};

/* What a run is asked for. */
static struct {
    const char *listen, *connect, *device, *status_file, *stop_file;
    uint64_t seconds, groups, stall_us;
    int qps, split, inlined, flush, adaptive_routing;
} opt = { .device = "unb0", .stall_us = 40000000, .qps = 1, .flush = 1, .adaptive_routing = -1 };

/* An entry of the FIFO: where a message may be written. The index comes last, as the last bytes of
 * 64: whoever sees it sees the rest. */
struct clear_to_send {
    uint64_t addr, size;
    uint32_t rkeys[MAX_NIC_DEVICES];
    uint32_t count, tag;
    uint64_t index;
};
_Static_assert(sizeof(struct clear_to_send) == 64, "an entry is a multiple of 32 bytes");

/* A group's record at the receiver: the sizes of its messages. */
struct record {
    int32_t sizes[MAX_RECVS];
    uint8_t completions[MAX_QPS];
};

enum request_type { UNUSED, SEND, RECV, FLUSH };

struct request {
    enum request_type type;
    uint64_t id;
    int events[MAX_NIC_DEVICES]; /* completions that are still due, on each device */
    int count;                   /* messages of its group */
    uint32_t size;
    uint8_t *data;
    struct record *record;
};

/* A device of a connection: NCCL makes one NIC of several, of the ports of a card by itself. */
struct part {
    struct device *device;
    struct ibv_cq *cq;
    struct ibv_mr *data_mr;
    union ibv_gid gid;
    int gid_index;
};

/* What both ends have. */
struct comm {
    struct part parts[MAX_NIC_DEVICES];
    struct ibv_qp *qps[MAX_QPS]; /* in turn on the devices */
    struct stats stats;
    struct request requests[MAX_REQUESTS];
    uint64_t head; /* groups begun */
    int part_count, qp_count, tcp, sends, adaptive_routing;
};

struct sender {
    struct comm base;
    struct clear_to_send fifo[MAX_REQUESTS][MAX_RECVS] __attribute__((aligned(64)));
    struct request *waiting[MAX_REQUESTS][MAX_RECVS];
    int waiting_count[MAX_REQUESTS];
    int32_t sizes[MAX_REQUESTS][MAX_RECVS];
    struct ibv_mr *fifo_mr[MAX_NIC_DEVICES], *sizes_mr[MAX_NIC_DEVICES];
    struct ibv_mr *scratch_mr[MAX_NIC_DEVICES];
    uint64_t scratch, records_addr;
    uint32_t records_rkeys[MAX_NIC_DEVICES];
};

struct receiver {
    struct comm base;
    struct clear_to_send fifo[MAX_REQUESTS][MAX_RECVS] __attribute__((aligned(64)));
    struct record records[MAX_REQUESTS];
    struct request *posted[MAX_REQUESTS];
    struct ibv_mr *fifo_mr[MAX_NIC_DEVICES], *records_mr[MAX_NIC_DEVICES];
    struct ibv_mr *flush_mr[MAX_NIC_DEVICES];
    struct ibv_qp *flush_qps[MAX_NIC_DEVICES];
    uint64_t fifo_addr;
    uint32_t fifo_rkeys[MAX_NIC_DEVICES];
    int flush_target;
};

/* What the ends tell each other of a connection. */
struct qp_words {
    uint32_t qpn, ece_supported;
    struct ibv_ece ece;
};
struct part_words {
    union ibv_gid gid;
    uint32_t rkey, mtu, lid, port_num, link_layer;
};
struct words {
    struct qp_words qps[MAX_QPS];
    struct part_words parts[MAX_NIC_DEVICES];
    uint64_t addr;
    uint32_t part_count;
};

/* The device of a QP. */
static int part_of_qp(const struct comm *c, int i)
{
    return i % c->part_count;
}

static struct ibv_mr *reg_plain(struct part *p, void *addr, size_t length, int access)
{
    return have(verbs.reg_mr(p->device->pd, addr, length, access), "ibv_reg_mr");
}

/* A region of data: whole pages, in relaxed order where libibverbs has it. */
static void reg_data(struct part *p, void *addr, size_t length)
{
    uint64_t page = sysconf(_SC_PAGESIZE), first = (uintptr_t)addr & -page;
    size_t bytes = ((uintptr_t)addr + length - first + page - 1) & -page;
    unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                      IBV_ACCESS_REMOTE_ATOMIC;

    if (!verbs.reg_mr_iova2) {
        p->data_mr = reg_plain(p, (void *)first, bytes, access);
        return;
    }
    access |= IBV_ACCESS_RELAXED_ORDERING;
    p->data_mr = have(verbs.reg_mr_iova2(p->device->pd, (void *)first, bytes, first, access),
                      "ibv_reg_mr_iova2");
}

/* The devices of a connection: as many as there are up to the first NULL. */
static void init_comm(struct comm *c, struct device *const *of, int tcp, int entries)
{
    c->tcp = tcp;
    c->adaptive_routing = 1;
    for (; c->part_count < MAX_NIC_DEVICES && of[c->part_count]; c->part_count++) {
        struct part *p = &c->parts[c->part_count];
        struct device *d = p->device = of[c->part_count];

        if (!d->pd)
            d->pd = have(verbs.alloc_pd(d->context), "ibv_alloc_pd");
        p->cq = have(verbs.create_cq(d->context, entries, &c->stats, NULL, 0), "ibv_create_cq");
        p->gid_index = choose_gid(d);
        need(verbs.query_gid(d->context, d->port_num, p->gid_index, &p->gid), "ibv_query_gid");
        c->adaptive_routing &= d->adaptive_routing;
    }
    c->qp_count = opt.qps * c->part_count;
    if (c->qp_count > MAX_QPS)
        fail("%d QPs for a connection; %d can be", c->qp_count, MAX_QPS);
}

static struct ibv_qp *make_qp(struct comm *c, struct part *p, int sends, int receives, int access)
{
    struct ibv_qp_init_attr init = {
        .qp_context = &c->stats,
        .send_cq = p->cq,
        .recv_cq = p->cq,
        .qp_type = IBV_QPT_RC,
        .cap = { sends, receives, 1, 1, opt.inlined ? sizeof(struct clear_to_send) : 0 },
    };
    struct ibv_qp *qp = have(verbs.create_qp(p->device->pd, &init), "ibv_create_qp");
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .port_num = p->device->port_num,
        .qp_access_flags = access,
    };
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;

    need(verbs.modify_qp(qp, &attr, mask), "ibv_modify_qp to INIT");
    return qp;
}

static void connect_qp(struct part *p, struct ibv_qp *qp, const struct part_words *peer,
                       uint32_t qpn)
{
    uint32_t mtu = p->device->port.active_mtu;
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = peer->mtu < mtu ? peer->mtu : mtu,
        .dest_qp_num = qpn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr.port_num = peer->port_num,
    };
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;

    if (peer->link_layer == IBV_LINK_LAYER_ETHERNET) {
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid = peer->gid;
        attr.ah_attr.grh.sgid_index = p->gid_index;
        attr.ah_attr.grh.hop_limit = 255;
    } else {
        attr.ah_attr.dlid = peer->lid;
    }
    need(verbs.modify_qp(qp, &attr, mask), "ibv_modify_qp to RTR");
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .timeout = QP_TIMEOUT,
        .retry_cnt = QP_RETRY_COUNT,
        .rnr_retry = 7,
        .max_rd_atomic = 1,
    };
    mask = IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
           IBV_QP_MAX_QP_RD_ATOMIC;
    need(verbs.modify_qp(qp, &attr, mask), "ibv_modify_qp to RTS");
}

static struct part_words words_of_part(const struct part *p)
{
    return (struct part_words){
        .gid = p->gid,
        .mtu = p->device->port.active_mtu,
        .lid = p->device->port.lid,
        .port_num = p->device->port_num,
        .link_layer = p->device->port.link_layer,
    };
}

/* The words of this end, but for what is made later. */
static struct words words_of(const struct comm *c)
{
    struct words us = { .part_count = c->part_count };

    for (int i = 0; i < c->part_count; i++)
        us.parts[i] = words_of_part(&c->parts[i]);
    return us;
}

static void check_peer(const struct words *us, const struct words *peer)
{
    if (peer->part_count != us->part_count)
        fail("the peer has %u devices, %u are here", peer->part_count, us->part_count);
    for (uint32_t i = 0; i < peer->part_count; i++)
        if (peer->parts[i].link_layer != us->parts[0].link_layer)
            fail("the peer has another link layer");
}

static int query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    return done_if_there(!!verbs.query_ece, verbs.query_ece ? verbs.query_ece(qp, ece) : 0,
                         "ibv_query_ece");
}

static int set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    return done_if_there(!!verbs.set_ece, verbs.set_ece ? verbs.set_ece(qp, ece) : 0,
                         "ibv_set_ece");
}

/* The sending end: QPs first, then what the peer is told of them, then on to RTS. */
static struct sender *connect_sender(struct device *const *of, int tcp, void *data, size_t length)
{
    struct sender *s = have(aligned_alloc(64, (sizeof *s + 63) & ~63UL), "memory");
    const int remote = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    struct comm *c = &s->base;
    struct words us, peer;
    int ready = 1;

    memset(s, 0, sizeof *s);
    c->sends = 1;
    init_comm(c, of, tcp, MAX_REQUESTS * opt.qps);
    us = words_of(c);
    for (int i = 0; i < c->qp_count; i++) {
        struct part *p = &c->parts[part_of_qp(c, i)];

        c->qps[i] = make_qp(c, p, 2 * MAX_REQUESTS, 0, IBV_ACCESS_REMOTE_WRITE);
        us.qps[i].qpn = c->qps[i]->qp_num;
        us.qps[i].ece_supported = query_ece(c->qps[i], &us.qps[i].ece);
    }
    for (int i = 0; i < c->part_count; i++) {
        struct part *p = &c->parts[i];

        s->scratch_mr[i] = reg_plain(p, &s->scratch, sizeof s->scratch, IBV_ACCESS_LOCAL_WRITE);
        s->fifo_mr[i] = reg_plain(p, s->fifo, sizeof s->fifo, remote);
        us.parts[i].rkey = s->fifo_mr[i]->rkey;
    }
    us.addr = (uintptr_t)s->fifo;
    tcp_write(tcp, &us, sizeof us);
    tcp_read(tcp, &peer, sizeof peer);
    check_peer(&us, &peer);
    s->records_addr = peer.addr;
    for (int i = 0; i < c->part_count; i++) {
        s->records_rkeys[i] = peer.parts[i].rkey;
        s->sizes_mr[i] = reg_plain(&c->parts[i], s->sizes, sizeof s->sizes, remote);
    }
    for (int i = 0; i < c->qp_count; i++) {
        int part = part_of_qp(c, i);

        if (us.qps[i].ece_supported && peer.qps[i].ece_supported)
            set_ece(c->qps[i], &peer.qps[i].ece);
        connect_qp(&c->parts[part], c->qps[i], &peer.parts[part], peer.qps[i].qpn);
    }
    tcp_write(tcp, &ready, sizeof ready);
    for (int i = 0; i < c->part_count; i++)
        reg_data(&c->parts[i], data, length);
    return s;
}

/* QPs that are connected to themselves: a READ through one flushes what was written before. */
static void connect_flush(struct receiver *r)
{
    for (int i = 0; i < r->base.part_count; i++) {
        struct part *p = &r->base.parts[i];
        struct part_words self = words_of_part(p);
        struct ibv_qp *qp = make_qp(&r->base, p, MAX_REQUESTS, 0,
                                    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);

        connect_qp(p, qp, &self, qp->qp_num);
        r->flush_qps[i] = qp;
        r->flush_mr[i] = reg_plain(p, &r->flush_target, sizeof(int), IBV_ACCESS_LOCAL_WRITE);
    }
}

static void connect_receiving_qp(struct comm *c, int i, struct words *us, struct words *peer)
{
    int access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_REMOTE_READ;
    int part = part_of_qp(c, i);
    struct ibv_qp *qp = make_qp(c, &c->parts[part], 2 * MAX_REQUESTS, MAX_REQUESTS, access);
    struct qp_words *mine = &us->qps[i], *theirs = &peer->qps[i];

    c->qps[i] = qp;
    mine->qpn = qp->qp_num;
    if (theirs->ece_supported)
        mine->ece_supported = set_ece(qp, &theirs->ece);
    connect_qp(&c->parts[part], qp, &peer->parts[part], theirs->qpn);
    if (mine->ece_supported)
        mine->ece_supported = query_ece(qp, &mine->ece);
}

/* The receiving end: its QPs are in RTS before the sender is told of them. */
static struct receiver *accept_sender(struct device *const *of, int tcp, void *data,
                                      size_t length)
{
    struct receiver *r = have(aligned_alloc(64, (sizeof *r + 63) & ~63UL), "memory");
    const int remote = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    struct comm *c = &r->base;
    struct words us, peer;
    int ready;

    memset(r, 0, sizeof *r);
    tcp_read(tcp, &peer, sizeof peer);
    init_comm(c, of, tcp, 2 * MAX_REQUESTS * opt.qps);
    us = words_of(c);
    check_peer(&us, &peer);
    for (int i = 0; i < c->qp_count; i++)
        connect_receiving_qp(c, i, &us, &peer);
    if (opt.flush)
        connect_flush(r);
    r->fifo_addr = peer.addr;
    for (int i = 0; i < c->part_count; i++) {
        r->fifo_rkeys[i] = peer.parts[i].rkey;
        r->fifo_mr[i] = reg_plain(&c->parts[i], r->fifo, sizeof r->fifo, remote);
        r->records_mr[i] = reg_plain(&c->parts[i], r->records, sizeof r->records, remote);
        us.parts[i].rkey = r->records_mr[i]->rkey;
    }
    us.addr = (uintptr_t)r->records;
    tcp_write(tcp, &us, sizeof us);
    tcp_read(tcp, &ready, sizeof ready);
    for (int i = 0; i < c->part_count; i++)
        reg_data(&c->parts[i], data, length);
    return r;
}

static void close_base(struct comm *c)
{
    for (int i = 0; i < c->part_count; i++) {
        need(verbs.dereg_mr(c->parts[i].data_mr), "ibv_dereg_mr");
        need(verbs.destroy_cq(c->parts[i].cq), "ibv_destroy_cq");
    }
}

static void close_sender(struct sender *s)
{
    for (int i = 0; i < s->base.qp_count; i++)
        need(verbs.destroy_qp(s->base.qps[i]), "ibv_destroy_qp");
    for (int i = 0; i < s->base.part_count; i++) {
        need(verbs.dereg_mr(s->fifo_mr[i]), "ibv_dereg_mr");
        need(verbs.dereg_mr(s->sizes_mr[i]), "ibv_dereg_mr");
        need(verbs.dereg_mr(s->scratch_mr[i]), "ibv_dereg_mr");
    }
    close_base(&s->base);
    free(s);
}

static void close_receiver(struct receiver *r)
{
    for (int i = 0; i < r->base.qp_count; i++)
        need(verbs.destroy_qp(r->base.qps[i]), "ibv_destroy_qp");
    for (int i = 0; i < r->base.part_count; i++) {
        if (r->flush_qps[i]) {
            need(verbs.destroy_qp(r->flush_qps[i]), "ibv_destroy_qp");
            need(verbs.dereg_mr(r->flush_mr[i]), "ibv_dereg_mr");
        }
        need(verbs.dereg_mr(r->fifo_mr[i]), "ibv_dereg_mr");
        need(verbs.dereg_mr(r->records_mr[i]), "ibv_dereg_mr");
    }
    close_base(&r->base);
    free(r);
}

#endif
