/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The verifying program: plain verbs, two ends, every message checked.
 *
 * Both ends send at once, on each of --qps RC queue pairs, a stream of SENDs, WRITEs (each with and
 * without immediate) and READs of random sizes, signalled or not. What the stream holds follows
 * from --seed, so each end knows exactly what must come next from the other: number, kind, length,
 * immediate and every byte. Checked are
 *   - receives: each message once, in order, intact, into the buffers in the order in which they
 *     were posted; with --srq, into any buffer that is posted, and none of them is lost;
 *   - WRITEs: intact when the message behind them arrives; what was consumed is painted over and
 *     must stay so until its slot is given back, which a second WRITE would show;
 *   - READs: the version that they must see. The owner changes a region when told to by a fenced
 *     SEND, so a READ before it sees the old version, one after it was carried out the new one;
 *   - completions of sends: each signalled one once, in order, with the right opcode; unsignalled
 *     ones never, unless as errors;
 *   - counters that the peer WRITEs into our memory (its flow control): they never go back.
 *
 *   verifier --listen PORT | --connect HOST:PORT [--device unb0] [--gid-index 0] [--qps 1]
 *            [--seed 1] [--seconds N | --messages N] [--max-bytes 131072] [--stall-seconds 20]
 *            [--status-file PATH] [--stop-file PATH]
 *            [--corrupt] [--no-replay] [--srq] [--writes-repeat] [--events]
 *
 * Ends with 0 and a line of JSON, or with 1 and the first thing that was wrong. --corrupt spoils
 * one message on purpose: the other end must find it. --no-replay marks every work request
 * UNBROKEN_SEND_NO_REPLAY and succeeds if a failure of the network gives the original error at both
 * ends within a second of each other, and everything outstanding is flushed behind it, in order.
 * With --srq all QPs of an end take their receives from one shared queue, and say once that they
 * take no more when they have failed. With --writes-repeat a WRITE behind the last message that
 * consumed a receive may be carried out twice, as on devices with plain verbs: then a counter may
 * go back for a while. With --events an end that has nothing to do sleeps until its completion
 * channel has an event. SIGTERM, SIGINT or a file that appears at --stop-file end the run early,
 * with success if all was right.
 *
 * cc -std=gnu11 -O2 -Wall -Wextra -Werror -o verifier verifier.c -libverbs
 */
#include "verifier_send.h"
#include <poll.h>
#include <sys/stat.h>

static void on_signal(int number)
{
    (void)number;
    stop_signal = 1;
}

/* ---- receiving ---- */

static void check_write(struct qp *q, const struct step *t)
{
    uint8_t *slot = q->mem->ring[q->in_writes % RING];
    const char *wrong = content_wrong(slot, t->len, t->key, t->index);

    if (wrong)
        fail("QP %d: %s %llu of %u bytes into slot %llu: %s", q->id, kind_name[t->kind],
             (unsigned long long)t->index, t->len, (unsigned long long)(q->in_writes % RING),
             wrong);
    q->painted[q->in_writes % RING] = t->len < 64 ? 64 : t->len;
    memset(slot, PAINT, q->painted[q->in_writes % RING]);
    q->in_writes++;
    verified_messages++;
    verified_bytes += t->len;
}

/* Slots go back to the peer when nothing has touched the paint; the latest `keep` wait, so that
 * there is time for it to happen. */
static void free_writes(struct qp *q, uint64_t keep)
{
    for (; q->freed_writes + keep < q->in_writes; q->freed_writes++) {
        const uint8_t *slot = q->mem->ring[q->freed_writes % RING];

        if (slot[0] != PAINT || memcmp(slot, slot + 1, q->painted[q->freed_writes % RING] - 1))
            fail("QP %d: memory changed after its WRITE had been consumed: a WRITE was carried out "
                 "twice",
                 q->id);
    }
}

static void bump_region(struct qp *q, uint32_t region)
{
    q->own_version[region]++;
    content_make(q->mem->regions[region], MAX_BYTES,
                 region_key(role, q->id, region, q->own_version[region]), q->own_version[region]);
}

static int is_end(struct qp *q, const struct ibv_wc *wc, const uint8_t *data)
{
    struct stream ahead = q->in;

    if (wc->opcode != IBV_WC_RECV || !(wc->wc_flags & IBV_WC_WITH_IMM) || wc->imm_data != END_IMM ||
        wc->byte_len != END_BYTES)
        return 0;
    /* It may come behind READs and WRITEs of the stream, which the receiver has not stepped over
     * yet. */
    while (content_wrong(data, END_BYTES, q->in.key, ahead.index))
        if (consumes_receive(stream_next(&ahead).kind))
            fail("QP %d: the stream ended before its message %llu", q->id,
                 (unsigned long long)ahead.index - 1);
    while (q->in.index < ahead.index) {
        struct step t = stream_next(&q->in);

        if (t.kind == WRITE)
            check_write(q, &t);
    }
    return 1;
}

static void check_message(struct qp *q, const struct ibv_wc *wc, const uint8_t *data)
{
    const char *wrong = NULL;
    struct step t;
    int with_imm;

    for (;;) {
        t = stream_next(&q->in);
        if (consumes_receive(t.kind))
            break;
        if (t.kind == WRITE)
            check_write(q, &t);
    }
    with_imm = t.kind != SEND;
    if (wc->opcode != (t.kind == WRITE_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV))
        wrong = "wrong opcode";
    else if (!(wc->wc_flags & IBV_WC_WITH_IMM) != !with_imm || (with_imm && wc->imm_data != t.imm))
        wrong = "wrong immediate";
    else if (wc->byte_len != t.len)
        wrong = "wrong length";
    else if (t.kind != WRITE_IMM)
        wrong = content_wrong(data, t.len, t.key, t.index);
    if (wrong)
        fail("QP %d: in place of message %llu (%s of %u bytes, immediate %#x) came opcode %d, %u "
             "bytes, immediate %#x: %s",
             q->id, (unsigned long long)t.index, kind_name[t.kind], t.len, t.imm, wc->opcode,
             wc->byte_len, wc->imm_data, wrong);
    if (t.kind == WRITE_IMM) {
        check_write(q, &t);
        return;
    }
    if (t.kind == BUMP)
        bump_region(q, t.region);
    verified_messages++;
    verified_bytes += t.len;
}

static void recv_completion(const struct ibv_wc *wc)
{
    uint64_t id = wc->wr_id >> 48, n = wc->wr_id & 0xffffffffffff;
    struct qp *owner = qps + id, *q = owner;

    if (id >= (uint64_t)opt.qps)
        fail("a completion of a receive that was never posted: wr_id %#llx",
             (unsigned long long)wc->wr_id);
    completions++;
    if (opt.srq)
        q = taker(wc, owner, n);
    if (wc->qp_num != q->us.qpn)
        fail("QP %d: a receive carries QPN %#x, not %#x", q->id, wc->qp_num, q->us.qpn);
    if (!opt.srq && (n != q->recvs_done || n >= q->recvs_posted))
        fail("QP %d: receive %llu completed in place of %llu", q->id, (unsigned long long)n,
             (unsigned long long)q->recvs_done);
    q->recvs_done++;
    moved_us = now_us();
    if (wc->status) {
        if (!opt.no_replay)
            fail("QP %d: a receive failed: %s", q->id, ibv_wc_status_str(wc->status));
        if (wc->status != IBV_WC_WR_FLUSH_ERR)
            fail("QP %d: a receive ended with '%s', a flush is right", q->id,
                 ibv_wc_status_str(wc->status));
        q->recv_failed = 1;
        first_error(wc->status);
        return;
    }
    if (q->recv_failed || q->end_received)
        fail("QP %d: a message after the end", q->id);
    if (is_end(q, wc, owner->mem->recvs[n % RECVS]))
        q->end_received = 1;
    else
        check_message(q, wc, owner->mem->recvs[n % RECVS]);
    q->in_messages++;
    post_receive(owner, n);
}

/* ---- the run ---- */

static void write_status(int final)
{
    char text[512], path[4096];
    double seconds = (now_us() - started_us) / 1e6;
    int n = snprintf(text, sizeof text,
                     "{\"verified_messages\":%llu,\"verified_bytes\":%llu,\"completions\":%llu,"
                     "\"events\":%llu,\"errors\":0,\"qps\":%d,"
                     "\"seconds\":%.3f",
                     (unsigned long long)verified_messages, (unsigned long long)verified_bytes,
                     (unsigned long long)completions, (unsigned long long)events, opt.qps, seconds);

    if (first_error_us)
        n += snprintf(text + n, sizeof text - n, ",\"error_status\":\"%s\"",
                      ibv_wc_status_str(first_error_status));
    snprintf(text + n, sizeof text - n, "}\n");
    if (final)
        fputs(text, stdout);
    if (opt.status_file) {
        FILE *f;

        /* Renamed into place, so that a reader sees whole lines. */
        snprintf(path, sizeof path, "%s.new", opt.status_file);
        f = fopen(path, "we");
        if (!f || fputs(text, f) < 0 || fclose(f) || rename(path, opt.status_file))
            fail("cannot write %s: %s", opt.status_file, strerror(errno));
    }
}

/* What is not the data path: once in a while. */
static void housekeeping(void)
{
    static uint64_t next_us;
    uint64_t now = now_us();
    struct stat st;
    int i;

    if (now < next_us)
        return;
    next_us = now + STATUS_INTERVAL_US;
    write_status(0);
    /* Where nothing was outstanding, the event is all that tells of a failure. */
    if (srq && look_at_events())
        first_error(IBV_WC_WR_FLUSH_ERR);
    if (stop_signal || (opt.seconds && now > started_us + opt.seconds * 1000000) ||
        (opt.stop_file && stat(opt.stop_file, &st) == 0))
        stopping = 1;
    if (tcp_peek(tcp) < 0)
        fail("the peer ended early");
    if (now > moved_us + opt.stall_us) {
        for (i = 0; i < opt.qps; i++)
            fprintf(stderr,
                    "QP %d: outstanding %llu, steps %llu, sent %llu messages (peer checked %llu) "
                    "and %llu writes (peer freed %llu), "
                    "received %llu messages\n",
                    i, (unsigned long long)(qps[i].tail - qps[i].head),
                    (unsigned long long)qps[i].out.index, (unsigned long long)qps[i].sent_messages,
                    (unsigned long long)qps[i].peer_has.received,
                    (unsigned long long)qps[i].sent_writes,
                    (unsigned long long)qps[i].peer_has.consumed,
                    (unsigned long long)qps[i].in_messages);
        fail("nothing moved for %llu s", (unsigned long long)opt.stall_us / 1000000);
    }
}

static int drain(void)
{
    struct ibv_wc wc[16];
    int i, n, got = 0;

    n = ibv_poll_cq(recv_cq, 16, wc);
    for (i = 0; i < n; i++)
        recv_completion(wc + i);
    got = n;
    if (n >= 0) {
        n = ibv_poll_cq(send_cq, 16, wc);
        for (i = 0; i < n; i++)
            send_completion(wc + i);
        got += n;
    }
    if (n < 0)
        fail("poll_cq says %d", n);
    if (got)
        moved_us = now_us();
    return got;
}

/* Sleeps until a completion raises an event. What the peer has checked it WRITEs into memory,
 * without one: hence the limit. */
static void sleep_a_while(void)
{
    struct pollfd raised = { .fd = channel->fd, .events = POLLIN };
    struct ibv_cq *cq;
    void *cookie;

    if (ibv_req_notify_cq(send_cq, 0) || ibv_req_notify_cq(recv_cq, 0))
        fail("the completion queues cannot be armed: %s", strerror(errno));
    /* What came before they were armed raises none. */
    if (drain())
        return;
    poll(&raised, 1, SLEEP_MS);
    while (!ibv_get_cq_event(channel, &cq, &cookie)) {
        if (cq != send_cq && cq != recv_cq)
            fail("an event of a completion queue that was never made");
        ibv_ack_cq_events(cq, 1);
        events++;
    }
}

/* Until every stream has ended, in both directions, and every WR is complete. */
static void run(void)
{
    int i, busy = 1;

    while (busy && !first_error_us) {
        int got = drain();

        busy = 0;
        for (i = 0; i < opt.qps && !first_error_us; i++) {
            struct qp *q = qps + i;

            push(q);
            free_writes(q, got ? RING / 4 : 0);
            if (q->in_messages - q->told_messages >= RECVS / 4 ||
                q->freed_writes - q->told_writes >= RING / 4 ||
                (!got && (q->in_messages != q->told_messages || q->freed_writes != q->told_writes)))
                post_counters(q);
            /* The tail may be unsignalled counters, which nothing waits for. */
            busy |= !q->end_done || !q->end_received;
        }
        housekeeping();
        if (channel && !got)
            sleep_a_while();
    }
}

/* Whether completions of sends are due on a failed QP. Unsignalled ones that were done before it
 * failed have none. */
static int sends_left(const struct qp *q)
{
    uint64_t i;

    for (i = q->head; i != q->tail; i++)
        if (q->send_failed || q->fifo[i % SQ].signalled)
            return 1;
    return 0;
}

/* After the first error: the peer must have its own within a second, and everything outstanding
 * here is flushed, in order. */
static void expect_failure_everywhere(void)
{
    uint64_t until = first_error_us + ERROR_SKEW_US;
    int i, left = 1, peer_failed = 0;
    char note;

    while (left || !peer_failed) {
        if (!drain() && now_us() > until)
            fail(peer_failed ? "not everything was flushed within a second"
                             : "the peer had no error within a second of ours");
        if (!peer_failed && tcp_peek(tcp) != 0) {
            tcp_read(tcp, &note, 1);
            if (note != 'E')
                fail("the peer ended without an error");
            peer_failed = 1;
        }
        if (srq)
            look_at_events();
        left = 0;
        for (i = 0; i < opt.qps; i++) {
            left |= !qps[i].send_failed && !qps[i].recv_failed && !qps[i].last_wqe;
            left |= sends_left(qps + i) ||
                    (srq ? !qps[i].last_wqe : qps[i].recvs_done != qps[i].recvs_posted);
        }
    }
}

static void barrier(void)
{
    char c = 'B';

    tcp_write(tcp, &c, 1);
    tcp_read(tcp, &c, 1);
    if (c != 'B')
        fail("the peer had an error");
}

static void close_all(void)
{
    int i;

    for (i = 0; i < opt.qps; i++)
        if (ibv_destroy_qp(qps[i].qp))
            fail("QP %d could not be destroyed", i);
    if (srq)
        check_shared();
    if (srq && ibv_destroy_srq(srq))
        fail("the shared receive queue could not be destroyed");
    for (i = 0; i < opt.qps; i++)
        if (ibv_dereg_mr(qps[i].mr))
            fail("the region of QP %d could not be deregistered", i);
    if (ibv_destroy_cq(send_cq) || ibv_destroy_cq(recv_cq) ||
        (channel && ibv_destroy_comp_channel(channel)) || ibv_dealloc_pd(pd) ||
        ibv_close_device(context))
        fail("a completion queue, the protection domain or the device could not be closed");
}

int main(int argc, char **argv)
{
    int i;

    parse(argc, argv);
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    role = !!opt.where;
    tcp = role ? tcp_connect(opt.where) : tcp_listen(opt.listen_port);
    {
        uint64_t mine[4] = { opt.seed, opt.qps, opt.max_bytes, opt.no_replay }, theirs[4];

        tcp_write(tcp, mine, sizeof mine);
        tcp_read(tcp, theirs, sizeof theirs);
        if (memcmp(mine, theirs, sizeof mine))
            fail("the peer runs with another --seed, --qps, --max-bytes or --no-replay");
    }
    open_device();
    qps = calloc(opt.qps, sizeof *qps);
    for (i = 0; i < opt.qps; i++) {
        qps[i].id = i;
        make_qp(qps + i);
        tcp_write(tcp, &qps[i].us, sizeof qps[i].us);
        tcp_read(tcp, &qps[i].peer, sizeof qps[i].peer);
        connect_qp(qps + i);
    }
    barrier();
    started_us = moved_us = now_us();
    run();
    if (first_error_us) {
        expect_failure_everywhere();
    } else {
        if (opt.no_replay)
            fail("no error came: without a fault, or where nothing was under way at that instant, "
                 "that is right");
        barrier();
        /* Whatever came twice would have come by now: the peer has all its completions. */
        drain();
    }
    barrier();
    close_all();
    write_status(1);
    return 0;
}
