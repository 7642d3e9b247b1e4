/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The verifier's options and the stream that follows from its seed: sizes, kinds and content of
 * every message, computed by the sender to send it and by the receiver to check it.
 */
#ifndef UNBROKEN_TESTS_VERIFIER_STREAM_H
#define UNBROKEN_TESTS_VERIFIER_STREAM_H

#include "common.h"

enum {
    MAX_BYTES = 128 * 1024,
    MAX_QPS = 64,
    SLOTS =
        32, /* buffers to send from and to read into; at most so many data WRs are outstanding */
    RECVS = 32, /* receives that are posted */
    RING = 16, /* slots that the peer writes into */
    REGIONS = 4, /* regions that the peer reads */
    SQ = 96, /* entries of the send queue; data and counters together */
    UNSIGNALLED_RUN = 12,
    STATUS_INTERVAL_US = 50000,
    SLEEP_MS = 2,
    END_BYTES = 16,
};

#define END_IMM 0x454e4421u
#define PAINT 0xa5
/* How far apart the first errors of the two ends may be. */
#define ERROR_SKEW_US 1000000

/* Opcode of a step of the stream. CREDIT is not part of it: a small inline WRITE of our counters
 * whenever the peer needs them. */
enum kind { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, BUMP, CREDIT, END };

static const char *kind_name[] = { "SEND", "SEND_IMM",    "WRITE",         "WRITE_IMM",
                                   "READ", "fenced SEND", "counter WRITE", "END" };

static struct {
    const char *listen_port, *where, *device, *status_file, *stop_file;
    uint64_t seconds, messages, seed, stall_us;
    uint32_t max_bytes;
    int qps, gid_index, corrupt, no_replay, srq, writes_repeat, events;
} opt = { .device = "unb0",
          .seconds = 0,
          .messages = 0,
          .seed = 1,
          .stall_us = 20000000,
          .max_bytes = MAX_BYTES,
          .qps = 1 };

/* A stream: both its sender and its receiver step through it. */
struct stream {
    uint64_t key;
    uint64_t index;       /* steps so far */
    uint64_t unannounced; /* WRITEs since the last message that consumes a receive */
    uint64_t since_bump;
};

struct step {
    enum kind kind;
    uint64_t index, key;
    uint32_t len, imm, region;
    int split, signalled;
};

static int role; /* 0 listens, 1 connects */

static uint64_t stream_key(int direction, int qp)
{
    return mix(opt.seed ^ mix(((uint64_t)direction << 32) + qp + 1));
}

/* Bytes of the peer's (or our own) region: a known function of who owns it, which it is, and its
 * version. */
static uint64_t region_key(int owner, int qp, uint32_t region, uint64_t version)
{
    return mix(stream_key(2 + owner, qp) ^ mix(((uint64_t)region << 48) + version));
}

static uint32_t random_length(uint64_t r)
{
    uint32_t max;

    /* Long messages, so that some of them are certainly under way whenever the failure comes. */
    if (opt.no_replay)
        return opt.max_bytes / 2 + (r >> 8) % (opt.max_bytes / 2 + 1);
    switch (r % 16) {
    case 0:
        return 0;
    case 1 ... 5:
        max = 64;
        break;
    case 6 ... 10:
        max = 4096;
        break;
    case 11 ... 13:
        max = 32768;
        break;
    default:
        max = MAX_BYTES;
    }
    if (max > opt.max_bytes)
        max = opt.max_bytes;
    return (r >> 8) % (max + 1);
}

static int consumes_receive(enum kind k)
{
    return k == SEND || k == SEND_IMM || k == WRITE_IMM || k == BUMP || k == END;
}

/* The next step of a stream. The same at both ends, whatever the timing. */
static struct step stream_next(struct stream *s)
{
    struct step t = { .index = s->index };
    uint64_t r = mix(s->key ^ mix(s->index)), dice = r % 100;

    t.key = mix(r ^ s->key);
    t.imm = (uint32_t)(t.key >> 16);
    if (t.imm == END_IMM)
        t.imm = 0;
    t.len = random_length(t.key);
    t.split = (r >> 20) & 1;
    t.signalled = ((r >> 21) & 3) == 0;
    t.region = (r >> 24) % REGIONS;
    if (s->unannounced >= RING / 2)
        dice %= 40; /* what was written must be announced before the ring is full */
    if (dice < 30)
        t.kind = SEND;
    else if (dice < 38)
        t.kind = SEND_IMM;
    else if (dice < 40 || s->since_bump > 200)
        t.kind = BUMP;
    else if (dice < 65)
        t.kind = WRITE;
    else if (dice < 82)
        t.kind = WRITE_IMM;
    else
        t.kind = READ;
    s->since_bump = t.kind == BUMP ? 0 : s->since_bump + 1;
    s->unannounced = t.kind == WRITE            ? s->unannounced + 1
                     : consumes_receive(t.kind) ? 0
                                                : s->unannounced;
    s->index++;
    return t;
}

/* ---- the command line ---- */

static uint64_t number(const char *name, const char *text, uint64_t min, uint64_t max)
{
    char *end;
    unsigned long long n = strtoull(text, &end, 10);

    if (*end || end == text || n < min || n > max)
        fail("%s %s: a number from %llu to %llu is right", name, text, (unsigned long long)min,
             (unsigned long long)max);
    return n;
}

static void parse(int argc, char **argv)
{
    int i;

    opt.gid_index = test_gid_index();
    for (i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";

        if (!strcmp(name, "--corrupt")) {
            opt.corrupt = 1;
            continue;
        }
        if (!strcmp(name, "--no-replay")) {
            opt.no_replay = 1;
            continue;
        }
        if (!strcmp(name, "--events")) {
            opt.events = 1;
            continue;
        }
        if (!strcmp(name, "--srq")) {
            opt.srq = 1;
            continue;
        }
        if (!strcmp(name, "--writes-repeat")) {
            opt.writes_repeat = 1;
            continue;
        }
        i++;
        if (!strcmp(name, "--listen"))
            opt.listen_port = value;
        else if (!strcmp(name, "--connect"))
            opt.where = value;
        else if (!strcmp(name, "--device"))
            opt.device = value;
        else if (!strcmp(name, "--status-file"))
            opt.status_file = value;
        else if (!strcmp(name, "--stop-file"))
            opt.stop_file = value;
        else if (!strcmp(name, "--seconds"))
            opt.seconds = number(name, value, 1, 1000000);
        else if (!strcmp(name, "--messages"))
            opt.messages = number(name, value, 1, UINT64_MAX >> 17);
        else if (!strcmp(name, "--seed"))
            opt.seed = number(name, value, 0, UINT64_MAX);
        else if (!strcmp(name, "--qps"))
            opt.qps = number(name, value, 1, MAX_QPS);
        else if (!strcmp(name, "--gid-index"))
            opt.gid_index = number(name, value, 0, 255);
        else if (!strcmp(name, "--max-bytes"))
            opt.max_bytes = number(name, value, 0, MAX_BYTES);
        else if (!strcmp(name, "--stall-seconds"))
            opt.stall_us = number(name, value, 1, 3600) * 1000000;
        else
            fail("unknown option %s; see the head of verifier.c", name);
    }
    if (!opt.listen_port == !opt.where)
        fail("give --listen PORT or --connect HOST:PORT");
    if (!opt.seconds && !opt.messages)
        opt.seconds = 5;
}

#endif
