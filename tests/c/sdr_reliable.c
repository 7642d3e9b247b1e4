/* Reliable writes by the C API: every scheme, each byte checked, between two processes; what is
 * refused and with which words; deadlines.
 *
 * Usage: sdr_reliable [MESSAGES]; two hosts of the emulated network that UNBROKEN_RUNTIME names.
 * Each process prints what it has done. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unbroken/sdr_ext.h>
#include <unistd.h>

#define LONGEST (600 * 1024) /* three segments */
#define AT_ONCE 4
#define PATIENCE_MS 30000

static unsigned char buffer[AT_ONCE * LONGEST];
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

/* Both ends are here. */
static void meet(int fd)
{
    char word = 'x';

    all(fd, &word, 1, 1);
    all(fd, &word, 1, 0);
}

static unsigned char byte_of(unsigned message, size_t i)
{
    return (i * 2654435761u >> 13) + message * 7 + i;
}

static size_t length_of(unsigned message)
{
    return 1 + (message * 104729u + 200000) % LONGEST;
}

static const struct sdr_qp_attr ATTR = { .bitmap_chunk_size_log_bytes = 12,
                                         .max_in_flight_log_bytes = 22,
                                         .max_log_num_msgs = 4,
                                         .mtu = SDR_MTU_4096,
                                         .send_enable = 1,
                                         .recv_enable = 1 };

static struct sdr_qp *connected(struct sdr_context *ctx, int fd)
{
    static char mine[65536], theirs[65536];
    struct sdr_qp_attr attr = ATTR;
    struct sdr_qp_attr_ext ext;
    size_t size;

    sdr_qp_attr_ext_init(&ext);
    ext.packet_lifetime_ms = 100;
    ext.generations = 16;
    struct sdr_qp *qp = sdr_qp_create_ext(ctx, &attr, &ext);
    MUST(qp && sdr_qp_info_size_get(qp, &size) == SDR_SUCCESS && size < sizeof mine &&
         sdr_qp_info_get(qp, mine) == SDR_SUCCESS);
    all(fd, mine, size, 1);
    all(fd, theirs, size, 0);
    MUST(sdr_qp_connect(qp, theirs) == SDR_SUCCESS);
    return qp;
}

static struct sdr_reliable_attr attr_of(enum sdr_scheme scheme)
{
    struct sdr_reliable_attr attr;

    sdr_reliable_attr_init(&attr);
    attr.scheme = scheme;
    attr.data_chunks = 16;
    attr.parity_chunks = 8;
    attr.parity_per_mille = 500;
    attr.rate_limit = 400;
    attr.deadline_ms = 20000;
    return attr;
}

static struct sdr_reliable_wr wr_of(const struct sdr_mr *mr, unsigned message, size_t length)
{
    return (struct sdr_reliable_wr){ .address = mr->address + message % AT_ONCE * LONGEST,
                                     .length = length,
                                     .lkey = mr->lkey };
}

static void refusals(struct sdr_context *ctx, struct sdr_mr *mr, int fd)
{
    struct sdr_qp *qp = connected(ctx, fd);
    struct sdr_reliable_attr attr = attr_of(SDR_SCHEME_SR_NACK);
    struct sdr_reliable_wr wr = wr_of(mr, 0, sizeof buffer + 1);
    struct sdr_reliable_counters counters;
    struct sdr_transfer *transfer;

    NO_POINTER(sdr_reliable_create(qp, NULL), "attr is NULL");
    NO_POINTER(sdr_reliable_create((void *)ctx, &attr), "is no queue pair");
    attr.scheme = 5;
    NO_POINTER(sdr_reliable_create(qp, &attr), "SDR_SCHEME_ADAPTIVE (4)");
    attr = attr_of(SDR_SCHEME_EC_MDS);
    attr.parity_per_mille = 499;
    NO_POINTER(sdr_reliable_create(qp, &attr), "8 chunks of parity for 16 of data need 500");
    attr.parity_per_mille = 1001;
    NO_POINTER(sdr_reliable_create(qp, &attr), "0 to 1000");
    attr = attr_of(SDR_SCHEME_EC_XOR);
    attr.data_chunks = 0;
    NO_POINTER(sdr_reliable_create(qp, &attr), "chunks");
    attr = attr_of(SDR_SCHEME_ADAPTIVE);
    attr.objective_ppm = 1000000;
    NO_POINTER(sdr_reliable_create(qp, &attr), "999000");
    attr = attr_of(SDR_SCHEME_SR_RTO);
    attr.deadline_ms = 0;
    NO_POINTER(sdr_reliable_create(qp, &attr), "deadline_ms of 0");
    attr.deadline_ms = 300;
    struct sdr_reliable *reliable = sdr_reliable_create(qp, &attr);
    MUST(reliable);
    NO_POINTER(sdr_reliable_create(qp, &attr), "carries reliable writes already");
    REFUSED(sdr_reliable_write_post(reliable, &wr, &transfer), "not inside of the memory");
    REFUSED(sdr_reliable_write_post(reliable, NULL, &transfer), "wr is NULL");
    REFUSED(sdr_reliable_read_post(reliable, &wr, NULL), "transfer is NULL");
    REFUSED(sdr_reliable_read_post((void *)qp, &wr, &transfer), "is no end of reliable writes");
    wr.lkey++;
    REFUSED(sdr_reliable_read_post(reliable, &wr, &transfer), "sdr_mr_reg");
    REFUSED(sdr_transfer_poll((void *)reliable, 0, NULL), "is no transfer");
    REFUSED(sdr_reliable_counters_get(reliable, NULL), "counters is NULL");
    /* Nobody writes: the read ends by its deadline, and not before. */
    wr = wr_of(mr, 0, 100);
    MUST(sdr_reliable_read_post(reliable, &wr, &transfer) == SDR_SUCCESS);
    MUST(sdr_transfer_poll(transfer, 0, NULL) == SDR_RETRY &&
         sdr_transfer_poll(transfer, 100, NULL) == SDR_RETRY);
    REFUSED(sdr_transfer_poll(transfer, PATIENCE_MS, NULL), "deadline has passed");
    REFUSED(sdr_transfer_poll(transfer, 0, NULL), "has been given back");
    /* A transfer goes with its end. */
    MUST(sdr_reliable_read_post(reliable, &wr, &transfer) == SDR_SUCCESS);
    MUST(sdr_reliable_destroy(reliable) == SDR_SUCCESS);
    REFUSED(sdr_transfer_poll(transfer, 0, NULL), "has been given back");
    REFUSED(sdr_reliable_counters_get(reliable, &counters), "has been given back");
    MUST(sdr_qp_destroy(qp) == SDR_SUCCESS);
}

/* The peer's read is too short: both ends are told. */
static void too_long(struct sdr_reliable *reliable, struct sdr_mr *mr, int writes)
{
    struct sdr_reliable_wr wr = wr_of(mr, 0, writes ? 101 : 100);
    struct sdr_transfer *transfer;

    MUST((writes ? sdr_reliable_write_post : sdr_reliable_read_post)(reliable, &wr, &transfer) ==
         SDR_SUCCESS);
    REFUSED(sdr_transfer_poll(transfer, PATIENCE_MS, NULL), "longer than the peer's read");
}

/* So many messages by a scheme, some of them at once. */
static void traffic(struct sdr_context *ctx, struct sdr_mr *mr, int fd, int writes,
                    enum sdr_scheme scheme, unsigned messages)
{
    struct sdr_qp *qp = connected(ctx, fd);
    struct sdr_reliable_attr attr = attr_of(scheme);
    struct sdr_reliable *reliable = sdr_reliable_create(qp, &attr);
    struct sdr_transfer *transfers[AT_ONCE];
    struct sdr_reliable_counters counters;

    MUST(reliable);
    for (unsigned m = 0; m < messages + AT_ONCE; m++) {
        if (m >= AT_ONCE) {
            unsigned done = m - AT_ONCE;
            uint64_t bytes = 0;
            unsigned char *place = buffer + done % AT_ONCE * LONGEST;

            MUST(sdr_transfer_poll(transfers[done % AT_ONCE], PATIENCE_MS, &bytes) == SDR_SUCCESS);
            MUST(bytes == length_of(done));
            for (size_t i = 0; !writes && i < bytes; i++)
                MUST(place[i] == byte_of(done, i));
            for (size_t i = bytes; !writes && i < LONGEST; i++)
                MUST(place[i] == 0xee);
        }
        if (m < messages) {
            unsigned char *place = buffer + m % AT_ONCE * LONGEST;
            struct sdr_reliable_wr wr = wr_of(mr, m, length_of(m));
            int posted;

            memset(place, 0xee, LONGEST);
            for (size_t i = 0; writes && i < wr.length; i++)
                place[i] = byte_of(m, i);
            posted = (writes ? sdr_reliable_write_post
                             : sdr_reliable_read_post)(reliable, &wr, &transfers[m % AT_ONCE]);
            MUST(posted == SDR_SUCCESS);
        }
    }
    too_long(reliable, mr, writes);
    MUST(sdr_reliable_counters_get(reliable, &counters) == SDR_SUCCESS);
    MUST((counters.chunks_sent > 0) == writes &&
         (writes || counters.rtt_us == 0 || counters.rtt_us < 10000000));
    printf("%s scheme %d: %u messages, %llu chunks again, %llu recovered\n",
           writes ? "wrote by" : "read by", (int)scheme, messages,
           (unsigned long long)counters.chunks_repeated,
           (unsigned long long)counters.chunks_recovered);
    fflush(stdout);
    /* What one end says last may be lost, and is said again while the queue pair is there. */
    meet(fd);
    MUST(sdr_qp_destroy(qp) == SDR_SUCCESS);
    REFUSED(sdr_reliable_destroy(reliable), "has been given back");
}

int main(int argc, char **argv)
{
    struct sdr_dev_attr dev = { .num_channels = 1, .log_max_qps = 2 };
    unsigned messages = argc > 1 ? atoi(argv[1]) : 20;
    int fds[2], status = 0;

    who = "both";
    MUST(messages >= AT_ONCE && socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    pid_t child = fork();
    int fd = fds[child == 0];
    close(fds[child != 0]);
    who = child ? "writer" : "reader";
    setenv("UNBROKEN_HOST", child ? "a" : "b", 1);
    struct sdr_context *ctx = sdr_context_create("unb0", &dev);
    MUST(ctx);
    struct sdr_mr *mr = sdr_mr_reg(ctx, buffer, sizeof buffer);
    MUST(mr);
    refusals(ctx, mr, fd);
    for (int scheme = SDR_SCHEME_SR_RTO; scheme <= SDR_SCHEME_ADAPTIVE; scheme++)
        traffic(ctx, mr, fd, child != 0, scheme, messages);
    MUST(sdr_mr_dereg(mr) == SDR_SUCCESS && sdr_context_destroy(ctx) == SDR_SUCCESS);
    if (child)
        MUST(waitpid(child, &status, 0) == child && status == 0);
    return 0;
}
