/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A stand-in for NCCL: two ranks that make the verbs calls of NCCL 2.30's net_ib, in its order, and
 * check every byte. It needs no GPU. docs/guide/nccl.md says what it does as NCCL does, and what
 * not.
 *
 *   nccl --listen PORT | --connect HOST:PORT   rank 0 | rank 1
 *        [--device unb0[:PORT][+...]] [--qps 1] [--split] [--inline] [--no-flush]
 *        [--adaptive-routing 0|1] [--groups 1000 | --seconds N] [--stop-file PATH]
 *        [--stall-seconds 40] [--status-file PATH] [--corrupt]
 *
 * Each rank sends groups of one to eight messages to the other, of mixed sizes. A receiver verifies
 * a message (its number, its content, and that nothing came behind it), overwrites it, and looks
 * before it offers the place again whether something was written there meanwhile. Both ranks have
 * the same options. With --seconds a file that appears at --stop-file ends the run early. --corrupt
 * spoils a byte of one message on purpose: the other rank must find it. Ends with 0 and a line of
 * JSON, or with 1 and the first thing that was wrong.
 *
 * cc -std=gnu11 -O2 -Wall -Wextra -Werror -o nccl nccl.c -ldl -lpthread
 */
#include "nccl_transfer.h"
#include <sched.h>
#include <sys/mman.h>

enum { WINDOW = 8, ROOM = 256 << 10, GUARD = 64, POISON = 0xa5 };
enum { LOOK_EVERY = 4096, STATUS_US = 20000, SPOILT_GROUP = 100 };
static const size_t DATA_BYTES = (size_t)WINDOW * MAX_RECVS * ROOM;

/* A group that is under way. */
struct group {
    uint64_t id;
    int count, begun; /* messages, and those of which the send has begun */
    struct request *requests[MAX_RECVS], *flush;
};

/* Groups of one direction: `next` begun, `done` ended, `total` in all once that is known. */
struct stream {
    struct group window[WINDOW];
    uint64_t next, done, total, messages, bytes, largest;
    uint8_t *data;
    uint32_t dirty[WINDOW][MAX_RECVS]; /* bytes of each place that are overwritten */
};

static struct sender *out;
static struct receiver *in;
static struct stream sends = { .total = UINT64_MAX }, recvs = { .total = UINT64_MAX };
static int rank, meeting, corrupt;
static uint64_t ends_at_us, longest_stall_us, stall_ended_us, multi_groups;

/* What group and message have, as both ends know: three groups in four have one message. (NCCL asks
 * for room for one inlined clear-to-send, so inlined ones are of one message.) */
static uint64_t dice(int of_rank, uint64_t id, int message)
{
    return mix(mix(id * 16 + message) + of_rank);
}

static int group_count(int of_rank, uint64_t id)
{
    uint64_t d = dice(of_rank, id, 15);

    return opt.inlined || d % 4 ? 1 : 2 + d / 4 % (MAX_RECVS - 1);
}

static uint32_t message_size(int of_rank, uint64_t id, int message)
{
    static const uint32_t most[] = { 16, 256, 4096, 8192, 65536, 65536, ROOM - GUARD, 0 };
    uint64_t d = dice(of_rank, id, message);
    uint32_t limit = most[d % 8];

    return limit ? 1 + d / 8 % limit : 0;
}

static uint32_t tag_of(uint64_t id)
{
    return 100 + id % 1000;
}

static uint8_t *place(struct stream *s, uint64_t id, int message)
{
    return s->data + (id % WINDOW * MAX_RECVS + message) * (size_t)ROOM;
}

static uint64_t key_of(int of_rank, uint64_t id, int message)
{
    return id * 16 + message * 2 + of_rank;
}

/* Sending */

static void fill(struct group *g, uint64_t id)
{
    *g = (struct group){ .id = id, .count = group_count(rank, id) };
    for (int i = 0; i < g->count; i++) {
        uint64_t key = key_of(rank, id, i);

        content_make(place(&sends, id, i), message_size(rank, id, i), key, key);
        if (corrupt && id >= SPOILT_GROUP && message_size(rank, id, i) > 1) {
            place(&sends, id, i)[message_size(rank, id, i) / 2] ^= 1;
            corrupt = 0;
        }
    }
}

/* Begins the sends of the next group, those with the last tags first. */
static int begin_send(void)
{
    struct group *g = &sends.window[sends.next % WINDOW];
    int moved = 0;

    if (!g->count || g->id != sends.next)
        fill(g, sends.next);
    for (int i = g->count - 1; i >= 0; i--) {
        if (g->requests[i])
            continue;
        g->requests[i] = isend(out, place(&sends, g->id, i), message_size(rank, g->id, i),
                               tag_of(g->id) + i);
        if (!g->requests[i])
            continue;
        moved = 1;
        if (g->requests[i]->count != g->count)
            fail("group %llu has %d messages at the receiver, %d here", (unsigned long long)g->id,
                 g->requests[i]->count, g->count);
        g->begun++;
    }
    if (g->begun == g->count)
        sends.next++;
    return moved;
}

static int end_send(void)
{
    struct group *g = &sends.window[sends.done % WINDOW];

    for (int i = 0; i < g->count; i++) {
        if (!g->requests[i])
            continue;
        if (!test(&out->base, g->requests[i]))
            return 0;
        sends.bytes += g->requests[i]->size;
        sends.messages++;
        free_request(&out->base, g->requests[i]);
        g->requests[i] = NULL;
    }
    multi_groups += g->count > 1;
    *g = (struct group){ 0 };
    sends.done++;
    return 1;
}

static int progress_sends(void)
{
    int moved = 0;

    if (sends.total == UINT64_MAX && now_us() >= ends_at_us) {
        sends.total = sends.next + WINDOW;
        tcp_write(meeting, &sends.total, sizeof sends.total);
    }
    if (sends.next < sends.total && sends.next - sends.done < WINDOW)
        moved |= begin_send();
    if (sends.done < sends.next)
        moved |= end_send();
    return moved;
}

/* Receiving */

/* Nothing may have been written where the program has been since its message was complete. */
static void still_mine(uint64_t id, int message)
{
    uint32_t dirty = recvs.dirty[id % WINDOW][message];
    const uint8_t *p = place(&recvs, id, message);

    for (uint32_t i = 0; i < dirty; i++)
        if (p[i] != POISON)
            fail("byte %u of the place of message %d of group %llu was written after its end", i,
                 message, (unsigned long long)(id - WINDOW));
}

static int begin_recv(void)
{
    struct group *g = &recvs.window[recvs.next % WINDOW];

    *g = (struct group){ .id = recvs.next, .count = group_count(!rank, recvs.next) };
    for (int i = 0; i < g->count; i++)
        still_mine(g->id, i);
    g->requests[0] = irecv(in, g->count, place(&recvs, g->id, 0), ROOM, tag_of(g->id));
    recvs.next++;
    return 1;
}

static void verify(struct group *g, int i, uint32_t size)
{
    uint32_t due = message_size(!rank, g->id, i);
    uint64_t key = key_of(!rank, g->id, i);
    uint8_t *p = place(&recvs, g->id, i);
    const char *wrong;

    if (size != due)
        fail("message %d of group %llu has %u bytes in place of %u", i, (unsigned long long)g->id,
             size, due);
    wrong = content_wrong(p, size, key, key);
    if (wrong)
        fail("message %d of group %llu (%u bytes): %s", i, (unsigned long long)g->id, size, wrong);
    for (int j = 0; j < GUARD; j++)
        if (p[size + j] != POISON)
            fail("message %d of group %llu: byte %d behind its end was written", i,
                 (unsigned long long)g->id, j);
    memset(p, POISON, size);
    recvs.dirty[g->id % WINDOW][i] = size;
    recvs.bytes += size;
    recvs.messages++;
    if (size > recvs.largest)
        recvs.largest = size;
}

/* The last message of a group that has any bytes; -1 if none has. */
static int last_with_bytes(const struct group *g, const struct record *record)
{
    int last = -1;

    for (int i = 0; i < g->count; i++)
        if (record->sizes[i])
            last = i;
    return last;
}

/* Tests the oldest receive, flushes it, and verifies it. */
static int end_recv(void)
{
    struct group *g = &recvs.window[recvs.done % WINDOW];
    struct request *q = g->requests[0];
    int last;

    if (!g->flush) {
        if (!test(&in->base, q))
            return 0;
        last = last_with_bytes(g, q->record);
        if (opt.flush && last >= 0) {
            g->flush = iflush(in, place(&recvs, g->id, last));
            return 1;
        }
    } else {
        if (!test(&in->base, g->flush))
            return 0;
        free_request(&in->base, g->flush);
    }
    for (int i = 0; i < g->count; i++)
        verify(g, i, q->record->sizes[i]);
    free_request(&in->base, q);
    recvs.done++;
    return 1;
}

/* The peer says once how many groups it sends. */
static void learn_total(void)
{
    int there = recvs.total == UINT64_MAX ? tcp_peek(meeting) : 0;

    if (there < 0)
        fail("the peer ended early");
    if (there)
        tcp_read(meeting, &recvs.total, sizeof recvs.total);
}

static int progress_recvs(void)
{
    int moved = 0;

    if (recvs.next < recvs.total && recvs.next - recvs.done < WINDOW)
        moved |= begin_recv();
    if (recvs.done < recvs.next)
        moved |= end_recv();
    return moved;
}

/* The run */

static void write_status(void)
{
    char made[PATH_MAX];
    FILE *file;

    if (!opt.status_file)
        return;
    snprintf(made, sizeof made, "%s.new", opt.status_file);
    file = have(fopen(made, "w"), made);
    fprintf(file, "{\"sent\":%llu,\"received\":%llu}\n", (unsigned long long)sends.done,
            (unsigned long long)recvs.done);
    fclose(file);
    need(rename(made, opt.status_file) ? -1 : 0, opt.status_file);
}

/* Looked at now and then: the peer, the time since anything moved, and what others may see. */
static void look(uint64_t moved_at_us)
{
    static uint64_t written_at_us;
    uint64_t now = now_us();
    char peer;

    learn_total();
    if (recvs.total != UINT64_MAX && !recv(meeting, &peer, 1, MSG_PEEK | MSG_DONTWAIT))
        fail("the peer ended early");
    if (now - moved_at_us > opt.stall_us)
        fail("nothing moved for %llu s: %llu of %llu groups sent, %llu of %llu received",
             (unsigned long long)opt.stall_us / 1000000, (unsigned long long)sends.done,
             (unsigned long long)sends.next, (unsigned long long)recvs.done,
             (unsigned long long)recvs.next);
    if (now - written_at_us > STATUS_US) {
        write_status();
        if (opt.stop_file && !access(opt.stop_file, F_OK))
            ends_at_us = 0;
        written_at_us = now;
    }
}

static void run(void)
{
    uint64_t moved_at_us = now_us(), spins = 0;

    while (sends.done < sends.total || recvs.done < recvs.total) {
        int moved = progress_sends() | progress_recvs();

        if (moved) {
            uint64_t now = now_us();

            if (now - moved_at_us > longest_stall_us) {
                longest_stall_us = now - moved_at_us;
                stall_ended_us = now;
            }
            moved_at_us = now;
        } else {
            sched_yield();
        }
        if (!moved || ++spins % LOOK_EVERY == 0)
            look(moved_at_us);
    }
}

static void report(void)
{
    const struct device *d = out->base.parts[0].device;

    printf("{\"rank\":%d,\"groups_sent\":%llu,\"groups_received\":%llu,\"multi_groups\":%llu,",
           rank, (unsigned long long)sends.done, (unsigned long long)recvs.done,
           (unsigned long long)multi_groups);
    printf("\"messages_sent\":%llu,\"messages_verified\":%llu,\"bytes_sent\":%llu,"
           "\"bytes_verified\":%llu,\"largest\":%llu,", (unsigned long long)sends.messages,
           (unsigned long long)recvs.messages, (unsigned long long)sends.bytes,
           (unsigned long long)recvs.bytes, (unsigned long long)recvs.largest);
    printf("\"device\":\"%s\",\"devices\":%d,\"mbps\":%llu,\"pci\":\"%s\",\"gid_index\":%d,",
           opt.device, device_count, (unsigned long long)d->mbps, d->pci_path,
           out->base.parts[0].gid_index);
    printf("\"verbs_found\":%d,\"verbs_missing\":%d,\"mlx5\":%s,\"dmabuf\":\"%s\",\"qps\":%d,",
           verbs_found, verbs_missing, mlx5dv_is_ours ? "true" : "false",
           d->dmabuf_errno == EBADF ? "EBADF" : d->dmabuf_errno == EOPNOTSUPP ? "EOPNOTSUPP" :
           "EPROTONOSUPPORT", opt.qps);
    printf("\"longest_stall_us\":%llu,\"stall_ended_us\":%llu,\"fatal_events\":%d,\"events\":{",
           (unsigned long long)longest_stall_us, (unsigned long long)stall_ended_us, fatal_events);
    for (int i = 0, told = 0; i < EVENT_TYPES; i++)
        if (events_heard[i])
            printf("%s\"%s\":%d", told++ ? "," : "", verbs.event_type_str(i), events_heard[i]);
    printf("}}\n");
}

static const char *value_of(char **args, int count, int *i)
{
    if (*i + 1 >= count)
        fail("%s needs a value", args[*i]);
    return args[++*i];
}

static void parse(int count, char **args)
{
    for (int i = 1; i < count; i++) {
        const char *name = args[i];

        if (!strcmp(name, "--listen"))
            opt.listen = value_of(args, count, &i);
        else if (!strcmp(name, "--connect"))
            opt.connect = value_of(args, count, &i);
        else if (!strcmp(name, "--device"))
            opt.device = value_of(args, count, &i);
        else if (!strcmp(name, "--status-file"))
            opt.status_file = value_of(args, count, &i);
        else if (!strcmp(name, "--stop-file"))
            opt.stop_file = value_of(args, count, &i);
        else if (!strcmp(name, "--seconds"))
            opt.seconds = strtoull(value_of(args, count, &i), NULL, 10);
        else if (!strcmp(name, "--groups"))
            opt.groups = strtoull(value_of(args, count, &i), NULL, 10);
        else if (!strcmp(name, "--stall-seconds"))
            opt.stall_us = strtoull(value_of(args, count, &i), NULL, 10) * 1000000;
        else if (!strcmp(name, "--qps"))
            opt.qps = atoi(value_of(args, count, &i));
        else if (!strcmp(name, "--adaptive-routing"))
            opt.adaptive_routing = atoi(value_of(args, count, &i));
        else if (!strcmp(name, "--split"))
            opt.split = 1;
        else if (!strcmp(name, "--inline"))
            opt.inlined = 1;
        else if (!strcmp(name, "--no-flush"))
            opt.flush = 0;
        else if (!strcmp(name, "--corrupt"))
            corrupt = 1;
        else
            fail("'%s' is no option; the head of nccl.c has them", name);
    }
    if (!opt.listen == !opt.connect)
        fail("one of --listen PORT and --connect HOST:PORT is needed");
    if (opt.qps < 1 || opt.qps > MAX_QPS)
        fail("--qps is 1 to %d", MAX_QPS);
}

static uint8_t *make_data(int value)
{
    uint8_t *data = mmap(NULL, DATA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                         -1, 0);

    if (data == MAP_FAILED)
        fail("no memory for data: %s", strerror(errno));
    memset(data, value, DATA_BYTES);
    return data;
}

/* A TCP connection for each way: rank 0 connects its sender first, then rank 1 does. */
static void connect_both(struct device *const *of)
{
    for (int turn = 0; turn < 2; turn++) {
        int tcp = dup(meeting);

        if (tcp < 0)
            fail("dup: %s", strerror(errno));
        if (turn == rank)
            out = connect_sender(of, tcp, sends.data, DATA_BYTES);
        else
            in = accept_sender(of, tcp, recvs.data, DATA_BYTES);
    }
}

int main(int count, char **args)
{
    struct device *of[MAX_NIC_DEVICES + 1];
    uint8_t bye = 0;

    parse(count, args);
    rank = !!opt.connect;
    open_devices();
    find_devices(opt.device, of, MAX_NIC_DEVICES + 1);
    for (int i = 0; i < device_count && opt.adaptive_routing >= 0; i++)
        devices[i].adaptive_routing = opt.adaptive_routing;
    sends.data = make_data(0);
    recvs.data = make_data(POISON);
    meeting = opt.listen ? tcp_listen(opt.listen) : tcp_connect(opt.connect);
    connect_both(of);
    ends_at_us = opt.seconds ? now_us() + opt.seconds * 1000000 : UINT64_MAX;
    if (opt.groups || !opt.seconds)
        sends.total = recvs.total = opt.groups ? opt.groups : 1000;
    run();
    write_status();
    tcp_write(meeting, &bye, 1);
    tcp_read(meeting, &bye, 1);
    report();
    close_sender(out);
    close_receiver(in);
    for (int i = 0; of[i]; i++)
        need(verbs.dealloc_pd(of[i]->pd), "ibv_dealloc_pd");
    return 0;
}
