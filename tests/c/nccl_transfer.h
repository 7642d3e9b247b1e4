/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for NCCL: transfers. Non-blocking sends and receives, and tests of what became of them;
 * a CQ is polled where a request is tested, four completions at a time. */
#ifndef UNBROKEN_TESTS_NCCL_TRANSFER_H
#define UNBROKEN_TESTS_NCCL_TRANSFER_H

#include "nccl_connect.h"

/* wr_ids of flushes begin above those of slots. */
enum { FLUSH_WR_ID = 0x1000, CHUNK_ALIGNMENT = 128, ADAPTIVE_BYTES = 8192, POLLED = 4 };

static struct request *take_request(struct comm *c, enum request_type type)
{
    for (int i = 0; i < MAX_REQUESTS; i++) {
        struct request *q = &c->requests[i];

        if (q->type == UNUSED) {
            *q = (struct request){ .type = type, .id = c->head };
            return q;
        }
    }
    fail("all %d requests are in use", MAX_REQUESTS);
}

/* QPs that carry a request, and which is the i-th of them. */
static int qps_of_request(const struct comm *c)
{
    return opt.split ? c->qp_count : c->part_count;
}

static int qp_of_request(const struct comm *c, uint64_t id, int i)
{
    return (id * qps_of_request(c) + i) % c->qp_count;
}

/* A completion is due on each of a request's QPs. */
static void expect_events(const struct comm *c, struct request *q)
{
    for (int i = 0; i < qps_of_request(c); i++)
        q->events[part_of_qp(c, qp_of_request(c, q->id, i))]++;
}

/* Posts a group: of each message a WRITE, the last of all with an immediate and a completion. The
 * immediate is the size of a single message; sizes of several are written into the receiver's
 * record. Each QP has an equal part of each message, or nothing where a message is short. */
static void post_group(struct sender *s, int slot)
{
    struct request **q = s->waiting[slot];
    const volatile struct clear_to_send *to = s->fifo[slot];
    int count = to[0].count, qps = qps_of_request(&s->base), lone = count == 1;
    struct ibv_send_wr wrs[MAX_RECVS + 1] = { 0 }, *last = &wrs[count - 1], *bad;
    struct ibv_sge sges[MAX_RECVS] = { 0 };
    struct ibv_sge sizes = { (uintptr_t)s->sizes[slot], count * sizeof(int32_t), 0 };
    uint32_t chunk[MAX_RECVS], sent[MAX_RECVS] = { 0 };
    uint64_t wr_id = 0;

    for (int i = 0; i < count; i++) {
        wr_id += (uint64_t)(slot & 0xff) << (i * 8);
        chunk[i] = ((q[i]->size + qps - 1) / qps + CHUNK_ALIGNMENT - 1) & -CHUNK_ALIGNMENT;
        sges[i] = (struct ibv_sge){ (uintptr_t)q[i]->data, chunk[i], 0 };
        wrs[i] = (struct ibv_send_wr){ .wr_id = wr_id, .next = &wrs[i + 1], .sg_list = &sges[i],
                                       .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE };
        wrs[i].wr.rdma.remote_addr = to[i].addr;
    }
    if (!lone || (s->base.adaptive_routing && q[0]->size > ADAPTIVE_BYTES)) {
        last++;
        if (!lone) {
            last->sg_list = &sizes;
            last->num_sge = 1;
            last->wr.rdma.remote_addr = s->records_addr + slot * sizeof(struct record);
        }
    }
    last->wr_id = wr_id;
    last->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    last->imm_data = htonl(q[0]->size);
    last->next = NULL;
    last->send_flags = IBV_SEND_SIGNALED;
    for (int i = 0; i < qps; i++) {
        int qp = qp_of_request(&s->base, q[0]->id, i), part = part_of_qp(&s->base, qp);

        for (int r = 0; r < count; r++) {
            uint32_t left = q[r]->size - sent[r];

            sges[r].length = left < chunk[r] ? left : chunk[r];
            sges[r].lkey = s->base.parts[part].data_mr->lkey;
            wrs[r].num_sge = sges[r].length > 0;
            wrs[r].wr.rdma.rkey = to[r].rkeys[part];
        }
        if (!lone) {
            sizes.lkey = s->sizes_mr[part]->lkey;
            last->wr.rdma.rkey = s->records_rkeys[part];
        }
        need(ibv_post_send(s->base.qps[qp], wrs, &bad), "ibv_post_send");
        for (int r = 0; r < count; r++) {
            sent[r] += sges[r].length;
            sges[r].addr += sges[r].length;
            wrs[r].wr.rdma.remote_addr += sges[r].length;
        }
    }
}

/* Begins to send a message if the receiver has said where to: a request, or NULL for not yet. The
 * group is posted with the last of its messages. */
static struct request *isend(struct sender *s, void *data, uint32_t size, uint32_t tag)
{
    int slot = s->base.head % MAX_REQUESTS, count;
    const volatile struct clear_to_send *to = s->fifo[slot];
    uint64_t index = s->base.head + 1;
    struct request **q = s->waiting[slot];

    check_fatal(&s->base.stats, "a send");
    if (to[0].index != index)
        return NULL;
    count = to[0].count;
    if (count < 1 || count > MAX_RECVS)
        fail("group %llu has %d messages", (unsigned long long)s->base.head, count);
    for (int i = 1; i < count; i++)
        while (to[i].index != index)
            ;
    atomic_thread_fence(memory_order_seq_cst);
    for (int i = 0; i < count; i++) {
        if (q[i] || to[i].tag != tag)
            continue;
        if (!to[i].addr || !to[i].rkeys[0])
            fail("group %llu: the receiver gave no address", (unsigned long long)s->base.head);
        q[i] = take_request(&s->base, SEND);
        q[i]->count = count;
        expect_events(&s->base, q[i]);
        q[i]->size = size < to[i].size ? size : to[i].size;
        q[i]->data = data;
        s->sizes[slot][i] = q[i]->size;
        if (++s->waiting_count[slot] < count)
            return q[i];
        post_group(s, slot);
        s->base.head++;
        return q[i];
    }
    return NULL;
}

/* Writes a group's entries into the sender's FIFO, by the first QP of the devices in turn. One in
 * MAX_REQUESTS has a completion on each, so that the send queue empties. */
static void post_clear_to_send(struct receiver *r, const struct request *q, int slot)
{
    int part = q->id % r->base.part_count;
    struct ibv_sge sge = { (uintptr_t)r->fifo[slot], q->count * sizeof(struct clear_to_send),
                           r->fifo_mr[part]->lkey };
    struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE }, *bad;

    wr.wr.rdma.remote_addr = r->fifo_addr + slot * sizeof r->fifo[0];
    wr.wr.rdma.rkey = r->fifo_rkeys[part];
    wr.send_flags = opt.inlined ? IBV_SEND_INLINE : 0;
    if (slot == part) {
        wr.send_flags |= IBV_SEND_SIGNALED;
        wr.wr_id = slot;
    }
    need(ibv_post_send(r->base.qps[part], &wr, &bad), "ibv_post_send of a clear-to-send");
}

/* Receives a group of messages with tags from `tag` on into buffers that lie `room` bytes apart. */
static struct request *irecv(struct receiver *r, int count, uint8_t *data, uint32_t room,
                             uint32_t tag)
{
    int slot = r->base.head % MAX_REQUESTS;
    struct request *q = take_request(&r->base, RECV);

    check_fatal(&r->base.stats, "a receive");
    q->count = count;
    q->record = &r->records[slot];
    r->posted[slot] = q;
    expect_events(&r->base, q);
    for (int i = 0; i < qps_of_request(&r->base); i++) {
        struct ibv_recv_wr wr = { .wr_id = slot }, *bad;

        need(ibv_post_recv(r->base.qps[qp_of_request(&r->base, q->id, i)], &wr, &bad),
             "ibv_post_recv");
    }
    memset(q->record, 0, sizeof *q->record);
    for (int i = 0; i < count; i++) {
        struct clear_to_send *entry = &r->fifo[slot][i];

        *entry = (struct clear_to_send){ .addr = (uintptr_t)data + i * room, .size = room,
                                         .count = count, .tag = tag + i,
                                         .index = r->base.head + 1 };
        for (int j = 0; j < r->base.part_count; j++)
            entry->rkeys[j] = r->base.parts[j].data_mr->rkey;
    }
    post_clear_to_send(r, q, slot);
    r->base.head++;
    return q;
}

/* READs a byte of what was received, on each device through the QP that is connected to itself. */
static struct request *iflush(struct receiver *r, const uint8_t *data)
{
    struct request *q = take_request(&r->base, FLUSH);

    for (int i = 0; i < r->base.part_count; i++) {
        struct ibv_sge sge = { (uintptr_t)&r->flush_target, 1, r->flush_mr[i]->lkey };
        struct ibv_send_wr wr = { .wr_id = FLUSH_WR_ID + (q - r->base.requests), .sg_list = &sge,
                                  .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
                                  .send_flags = IBV_SEND_SIGNALED }, *bad;

        wr.wr.rdma.remote_addr = (uintptr_t)data;
        wr.wr.rdma.rkey = r->base.parts[i].data_mr->rkey;
        q->events[i] = 1;
        need(ibv_post_send(r->flush_qps[i], &wr, &bad), "ibv_post_send of a flush");
    }
    return q;
}

/* Of a QP of this connection, as every completion must be. */
static void check_qp(const struct comm *c, int part, uint32_t qpn)
{
    for (int i = part; i < c->qp_count; i += c->part_count)
        if (c->qps[i]->qp_num == qpn)
            return;
    fail("a completion is of QP %u, which this device does not have", qpn);
}

static void sent(struct sender *s, int part, const struct ibv_wc *wc)
{
    int slot = wc->wr_id & 0xff;
    struct request **q = s->waiting[slot];

    if (wc->opcode != IBV_WC_RDMA_WRITE || !q[0] || q[0]->type != SEND)
        fail("a completion of a send has opcode %d and wr_id %llx", wc->opcode,
             (unsigned long long)wc->wr_id);
    check_qp(&s->base, part, wc->qp_num);
    for (int i = 0, count = q[0]->count; i < count; i++)
        if (--q[i]->events[part] < 0)
            fail("group %llu: a send is complete twice", (unsigned long long)q[i]->id);
}

static void received(struct receiver *r, int part, const struct ibv_wc *wc)
{
    struct request *q;

    if (wc->opcode == IBV_WC_RDMA_WRITE) {
        if (wc->wr_id != (uint64_t)part)
            fail("a clear-to-send is complete that has no completion");
        return;
    }
    if (wc->opcode == IBV_WC_RDMA_READ) {
        if (wc->wr_id - FLUSH_WR_ID >= MAX_REQUESTS)
            fail("a flush has wr_id %llx", (unsigned long long)wc->wr_id);
        q = &r->base.requests[wc->wr_id - FLUSH_WR_ID];
        if (q->type != FLUSH || --q->events[part] < 0)
            fail("a flush is complete twice");
        return;
    }
    if (wc->opcode != IBV_WC_RECV_RDMA_WITH_IMM || !(wc->wc_flags & IBV_WC_WITH_IMM))
        fail("a receive has opcode %d, flags %x", wc->opcode, wc->wc_flags);
    if (wc->wr_id >= MAX_REQUESTS)
        fail("a receive has wr_id %llx", (unsigned long long)wc->wr_id);
    q = r->posted[wc->wr_id];
    if (!q || q->type != RECV || --q->events[part] < 0)
        fail("slot %llu: a receive is complete twice", (unsigned long long)wc->wr_id);
    check_qp(&r->base, part, wc->qp_num);
    if (q->count == 1)
        q->record->sizes[0] = ntohl(wc->imm_data);
}

static int is_done(const struct comm *c, const struct request *q)
{
    for (int i = 0; i < c->part_count; i++)
        if (q->events[i])
            return 0;
    return 1;
}

static int poll_part(struct comm *c, int part)
{
    struct ibv_wc wc[POLLED];
    int n = ibv_poll_cq(c->parts[part].cq, POLLED, wc);

    if (n < 0)
        fail("ibv_poll_cq: %d", n);
    for (int i = 0; i < n; i++) {
        if (wc[i].status)
            fail("a completion of QP %u (wr_id %llx) has status %d, vendor_err %u", wc[i].qp_num,
                 (unsigned long long)wc[i].wr_id, wc[i].status, wc[i].vendor_err);
        if (c->sends)
            sent((struct sender *)c, part, &wc[i]);
        else
            received((struct receiver *)c, part, &wc[i]);
    }
    check_fatal(&c->parts[part].device->stats, "a test");
    return n;
}

/* Takes completions until the request is done or there are none, on the devices from which some
 * are due. Gives whether it is done; the sizes of its messages are in its record then. */
static int test(struct comm *c, struct request *q)
{
    int taken = 1;

    while (taken) {
        check_fatal(&c->stats, "a test");
        if (is_done(c, q))
            return 1;
        taken = 0;
        for (int i = 0; i < c->part_count; i++)
            if (q->events[i])
                taken += poll_part(c, i);
    }
    return 0;
}

static void free_request(struct comm *c, struct request *q)
{
    if (c->sends) {
        struct sender *s = (struct sender *)c;
        int slot = q->id % MAX_REQUESTS;

        if (!--s->waiting_count[slot])
            memset(s->waiting[slot], 0, sizeof s->waiting[slot]);
    }
    q->type = UNUSED;
}

#endif
