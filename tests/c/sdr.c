/* The C API of SDR: every function, what it refuses and with which words, RETRY, and messages with
 * their bitmaps, between two processes.
 *
 * Usage: sdr [MESSAGES [BYTES]]; messages of that length, or of each another; two hosts of the
 * emulated network that UNBROKEN_RUNTIME names. Each process prints what it has done. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unbroken/sdr_ext.h>
#include <unistd.h>

#define CHUNK 4096
#define LONGEST (64 * CHUNK)
#define SLOTS 4

static unsigned char buffer[SLOTS * LONGEST];
static const char *who;

static void fail(int line, const char *what)
{
    fprintf(stderr, "%s: line %d: %s; last error: %s\n", who, line, what, sdr_last_error());
    exit(1);
}
#define MUST(condition) \
    do { \
        if (!(condition)) \
            fail(__LINE__, #condition); \
    } while (0)
/* The call fails, and the error has these words. */
#define REFUSED(call, words) \
    do { \
        MUST((call) == SDR_ERROR); \
        MUST(strstr(sdr_last_error(), words)); \
    } while (0)
#define NO_POINTER(call, words) \
    do { \
        MUST((call) == NULL); \
        MUST(strstr(sdr_last_error(), words)); \
    } while (0)

static void all(int fd, void *data, size_t size, int out)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = out ? write(fd, (char *)data + done, size - done)
                        : read(fd, (char *)data + done, size - done);
        MUST(n > 0);
        done += n;
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static unsigned char byte_of(unsigned message, size_t i)
{
    return (i * 2654435761u >> 13) + message * 7 + i;
}

static const struct sdr_qp_attr ATTR = { .bitmap_chunk_size_log_bytes = 12,
                                         .max_in_flight_log_bytes = 20,
                                         .max_log_num_msgs = 2,
                                         .mtu = SDR_MTU_1024,
                                         .send_enable = 1,
                                         .recv_enable = 1,
                                         .rate_limit = 400 };

static void refusals(struct sdr_context *ctx)
{
    struct sdr_dev_attr dev = { .num_channels = 1, .log_max_qps = 2 };
    struct sdr_qp_attr attr = ATTR;
    struct sdr_qp_attr_ext ext;
    struct sdr_qp *qp = sdr_qp_create(ctx, &attr);
    struct sdr_recv_wr recv = { .max_length = 1, .lkey = 1 };
    struct sdr_send_wr send = { .opcode = SDR_WR_WRITE };
    struct sdr_recv_handle *recv_handle;
    struct sdr_send_handle *send_handle;
    char info[65536] = { 0 };
    size_t size;
    int done;

    MUST(qp);
    NO_POINTER(sdr_context_create("unb99", &dev), "unb99");
    NO_POINTER(sdr_context_create("mlx5_0", &dev), "'mlx5_0' names no devices");
    NO_POINTER(sdr_context_create("unb0", NULL), "dev_attr is NULL");
    dev.num_channels = 65;
    NO_POINTER(sdr_context_create("unb0", &dev), "1 to 64 channels");
    NO_POINTER(sdr_qp_create((void *)qp, &attr), "is no context");
    attr.bitmap_chunk_size_log_bytes = 4097;
    NO_POINTER(sdr_qp_create(ctx, &attr), "the logarithm of a size is meant");
    attr.bitmap_chunk_size_log_bytes = 9;
    NO_POINTER(sdr_qp_create(ctx, &attr), "from the MTU, 1024 bytes");
    attr = ATTR;
    attr.mtu = 7;
    NO_POINTER(sdr_qp_create(ctx, &attr), "SDR_MTU_4096 (6)");
    attr = ATTR;
    sdr_qp_attr_ext_init(&ext);
    ext.user_bits = 5;
    NO_POINTER(sdr_qp_create_ext(ctx, &attr, &ext), "10 + 18 + 4");
    REFUSED(sdr_context_destroy(ctx), "has queue pairs");
    REFUSED(sdr_qp_info_get((void *)ctx, info), "is no queue pair");
    REFUSED(sdr_qp_info_get(qp, NULL), "info is NULL");
    REFUSED(sdr_qp_info_size_get(qp, NULL), "info_size is NULL");
    REFUSED(sdr_qp_connect(qp, info), "no information of a queue pair");
    REFUSED(sdr_send_post(qp, &send, &send_handle), "no memory is registered under lkey 0x0");
    REFUSED(sdr_recv_post(qp, &recv, &recv_handle), "sdr_mr_reg");
    struct sdr_mr *mr = sdr_mr_reg(ctx, buffer, sizeof buffer);
    MUST(mr && mr->length == sizeof buffer);
    NO_POINTER(sdr_mr_reg(ctx, NULL, 1), "memory at NULL");
    recv = (struct sdr_recv_wr){ .max_length = 2,
                                 .lkey = mr->lkey,
                                 .address = mr->address + sizeof buffer - 1 };
    REFUSED(sdr_recv_post(qp, &recv, &recv_handle), "not inside of the memory");
    recv =
        (struct sdr_recv_wr){ .max_length = LONGEST + 1, .lkey = mr->lkey, .address = mr->address };
    REFUSED(sdr_recv_post(qp, &recv, &recv_handle), "262144 is the most");
    REFUSED(sdr_recv_post(qp, &recv, NULL), "handle is NULL");
    REFUSED(sdr_recv_post(qp, NULL, &recv_handle), "wr is NULL");
    send = (struct sdr_send_wr){
        .opcode = 5, .length = 1, .lkey = mr->lkey, .local_addr = mr->address
    };
    REFUSED(sdr_send_post(qp, &send, &send_handle), "opcode 5");
    send.opcode = SDR_WR_WRITE;
    send.remote_offset = 64;
    REFUSED(sdr_send_post(qp, &send, &send_handle), "beyond the longest message");
    send.remote_offset = ~0ull;
    REFUSED(sdr_send_post(qp, &send, &send_handle), "counted in chunks");
    send.remote_offset = 0;
    REFUSED(sdr_send_post(qp, &send, &send_handle), "not connected");
    REFUSED(sdr_send_poll((void *)&send, &done, NULL), "is no send");
    REFUSED(sdr_recv_complete(NULL), "is no receive");
    MUST(sdr_qp_info_size_get(qp, &size) == SDR_SUCCESS && size < sizeof info &&
         sdr_qp_info_get(qp, info) == SDR_SUCCESS);
    attr.max_log_num_msgs = 3;
    struct sdr_qp *other = sdr_qp_create(ctx, &attr);
    MUST(other);
    REFUSED(sdr_qp_connect(other, info), "messages in flight (log2) is 2, ours is 3");
    MUST(sdr_qp_destroy(qp) == SDR_SUCCESS && sdr_qp_destroy(other) == SDR_SUCCESS);
    REFUSED(sdr_qp_destroy(qp), "has been given back");
    MUST(sdr_mr_dereg(mr) == SDR_SUCCESS);
    REFUSED(sdr_mr_dereg(mr), "no registered memory");
}

/* Bytes of a message: of all the same, or of each another. */
static size_t fixed;

static size_t length_of(unsigned message)
{
    return fixed ? fixed : 1 + (message * 7919u + 100000) % LONGEST;
}

/* For a message that does not become whole: what has come, and what the queue pair has counted. */
static void say_what_came(struct sdr_qp *qp, unsigned m, const uint8_t *have, uint32_t chunks)
{
    struct sdr_qp_counters c = { 0 };

    sdr_qp_counters_get(qp, &c);
    fprintf(stderr, "message %u, chunks missing:", m);
    for (uint32_t chunk = 0; chunk < chunks; chunk++)
        if (!(have[chunk / 8] >> chunk % 8 & 1))
            fprintf(stderr, " %u", chunk);
    fprintf(stderr,
            " of %u; packets %llu, late %llu, duplicates %llu, outside %llu, under-runs %llu\n",
            chunks, (unsigned long long)c.packets_received, (unsigned long long)c.late,
            (unsigned long long)c.duplicates, (unsigned long long)c.outside,
            (unsigned long long)c.under_runs);
}

static void receive(struct sdr_qp *qp, struct sdr_mr *mr, int fd, unsigned messages)
{
    struct sdr_qp_counters counters;

    for (unsigned m = 0; m < messages; m++) {
        size_t length = length_of(m), bytes, place = m % SLOTS * LONGEST;
        struct sdr_recv_wr wr = { .max_length = length,
                                  .lkey = mr->lkey,
                                  .address = mr->address + place };
        struct sdr_recv_handle *recv;
        uint8_t *bitmap, have[LONGEST / CHUNK / 8] = { 0 };
        uint32_t imm = 0, chunks = (length + CHUNK - 1) / CHUNK, whole, before = 0;
        uint64_t packets;
        int posted, complete = 0;
        double began = now(), changed, wait = 0.02;

        while ((posted = sdr_recv_post(qp, &wr, &recv)) == SDR_RETRY)
            MUST(now() - began < 20);
        MUST(posted == SDR_SUCCESS);
        MUST(sdr_recv_bitmap_get(recv, &bitmap, &bytes) == SDR_SUCCESS &&
             bytes == (chunks + 7) / 8);
        REFUSED(sdr_recv_bitmap_chunk_expand(recv, chunks, &packets), "of a receive that has");
        /* What is missing is asked for when nothing has come for a while, and for longer and
         * longer: where the sender has no core, repetitions would be all that it sends when it
         * has one. */
        for (changed = now(); !complete;) {
            if (now() - began >= 20)
                say_what_came(qp, m, have, chunks);
            MUST(now() - began < 20);
            usleep(20000);
            whole = 0;
            for (unsigned c = 0; c < chunks; c++)
                whole += (((volatile uint8_t *)bitmap)[c / 8] >> c % 8 & 1);
            memcpy(have, bitmap, bytes);
            complete = whole == chunks;
            if (sdr_recv_imm_get(recv, &imm) != SDR_SUCCESS && complete) {
                have[0] &= 0xfe; /* a fragment is missing: it is sent again with its packets */
                complete = 0;
            }
            if (whole > before)
                before = whole, changed = now(), wait = 0.02;
            if (complete || now() - changed >= wait) {
                all(fd, have, sizeof have, 1);
                changed = now();
                wait = wait < 1 ? 2 * wait : wait;
            }
        }
        MUST(sdr_recv_bitmap_chunk_expand(recv, 0, &packets) == SDR_SUCCESS && packets == 15);
        MUST(imm == m * 0x01010101u);
        MUST(sdr_recv_complete(recv) == SDR_SUCCESS);
        REFUSED(sdr_recv_complete(recv), "has been given back");
        for (size_t i = 0; i < length; i++)
            MUST(buffer[place + i] == byte_of(m, i));
    }
    /* All slots in use. */
    struct sdr_recv_wr wr = { .max_length = 1, .lkey = mr->lkey, .address = mr->address };
    struct sdr_recv_handle *recv, *none;
    for (int i = 0; i < SLOTS; i++) {
        double began = now();
        while (sdr_recv_post(qp, &wr, &recv) == SDR_RETRY)
            MUST(now() - began < 20);
    }
    MUST(sdr_recv_post(qp, &wr, &none) == SDR_RETRY && !none && strstr(sdr_last_error(), "slots"));
    MUST(sdr_recv_imm_get(recv, (uint32_t *)buffer) == SDR_RETRY);
    MUST(sdr_qp_counters_get(qp, &counters) == SDR_SUCCESS && counters.outside == 0);
    printf("received %u messages, %llu packets, %llu of strangers\n", messages,
           (unsigned long long)counters.packets_received, (unsigned long long)counters.strangers);
}

static void send_all(struct sdr_qp *qp, struct sdr_mr *mr, int fd, unsigned messages)
{
    unsigned long sent = 0, repeated = 0;

    for (unsigned m = 0; m < messages; m++) {
        size_t length = length_of(m);
        uint32_t chunks = (length + CHUNK - 1) / CHUNK, whole;
        struct sdr_send_start_wr start = { .opcode = SDR_WR_WRITE_WITH_IMM,
                                           .imm_value = m * 0x01010101u };
        struct sdr_send_continue_wr part = { .length = length,
                                             .local_addr = mr->address,
                                             .lkey = mr->lkey };
        struct sdr_send_handle *send;
        uint8_t have[LONGEST / CHUNK / 8];
        int done = 0, polled;

        for (size_t i = 0; i < length; i++)
            buffer[i] = byte_of(m, i);
        MUST(sdr_streaming_send_start(qp, &start, &send) == SDR_SUCCESS);
        MUST(sdr_send_poll(send, &done, NULL) == SDR_RETRY && !done);
        MUST(sdr_streaming_send_continue(send, &part) == SDR_SUCCESS);
        sent += chunks;
        for (;;) {
            all(fd, have, sizeof have, 0);
            whole = 0;
            for (unsigned c = 0; c < chunks; c++)
                whole += have[c / 8] >> c % 8 & 1;
            if (whole == chunks)
                break;
            for (unsigned c = 0; c < chunks; c++) {
                if (have[c / 8] >> c % 8 & 1)
                    continue;
                part.length = length - c * CHUNK < CHUNK ? length - c * CHUNK : CHUNK;
                part.local_addr = mr->address + c * CHUNK;
                part.remote_offset = c;
                MUST(sdr_streaming_send_continue(send, &part) == SDR_SUCCESS);
                repeated++;
            }
        }
        MUST(sdr_streaming_send_end(send) == SDR_SUCCESS);
        double began = now();
        do {
            MUST(now() - began < 20);
            polled = sdr_send_poll(send, &done, NULL);
            MUST(polled == (done ? SDR_SUCCESS : SDR_RETRY));
        } while (!done);
        REFUSED(sdr_send_poll(send, &done, NULL), "has been given back");
    }
    printf("sent %u messages, %lu chunks, %lu again\n", messages, sent, repeated);
}

int main(int argc, char **argv)
{
    struct sdr_dev_attr dev = { .num_channels = 2, .log_max_qps = 2 };
    struct sdr_qp_attr attr = ATTR;
    struct sdr_qp_attr_ext ext;
    unsigned messages = argc > 1 ? atoi(argv[1]) : 20;
    fixed = argc > 2 ? atoi(argv[2]) : 0;
    static char mine[65536], theirs[65536];
    int fds[2], status = 0;
    size_t size;

    who = "both";
    MUST(strcmp(sdr_last_error(), "") == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    pid_t child = fork();
    int fd = fds[child == 0];
    close(fds[child != 0]);
    who = child ? "sender" : "receiver";
    setenv("UNBROKEN_HOST", child ? "a" : "b", 1);
    struct sdr_context *ctx = sdr_context_create("unb0", &dev);
    MUST(ctx);
    refusals(ctx);
    sdr_qp_attr_ext_init(&ext);
    ext.packet_lifetime_ms = 100;
    ext.generations = 16;
    struct sdr_qp *qp = sdr_qp_create_ext(ctx, &attr, &ext);
    MUST(qp);
    struct sdr_mr *mr = sdr_mr_reg(ctx, buffer, sizeof buffer);
    MUST(mr && sdr_qp_info_size_get(qp, &size) == SDR_SUCCESS &&
         sdr_qp_info_get(qp, mine) == SDR_SUCCESS);
    all(fd, mine, size, 1);
    all(fd, theirs, size, 0);
    MUST(sdr_qp_connect(qp, theirs) == SDR_SUCCESS);
    REFUSED(sdr_qp_connect(qp, theirs), "connected already");
    if (child)
        send_all(qp, mr, fd, messages);
    else
        receive(qp, mr, fd, messages);
    fflush(stdout);
    MUST(sdr_qp_destroy(qp) == SDR_SUCCESS && sdr_mr_dereg(mr) == SDR_SUCCESS &&
         sdr_context_destroy(ctx) == SDR_SUCCESS);
    if (child)
        MUST(waitpid(child, &status, 0) == child && status == 0);
    return 0;
}
