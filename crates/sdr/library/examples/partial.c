/* A message over a lossy network: the receiver sees which chunks have come, says so over a socket,
 * and the sender sends the others again. Both ends are in this program, on two hosts of the
 * emulated network.
 *
 *   cc -Iinclude -o partial crates/sdr/library/examples/partial.c -Ltarget/release -lunbroken_sdr
 *   LD_LIBRARY_PATH=target/release UNBROKEN_RUNTIME=$(mktemp -d) ./partial */
#define _DEFAULT_SOURCE 1 /* POSIX, also with -std=c11 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unbroken/sdr_ext.h>
#include <unistd.h>

#define CHUNK 65536
#define CHUNKS 16

static unsigned char buffer[CHUNKS * CHUNK];

static void check(int ok, const char *what)
{
    if (!ok)
        exit(fprintf(stderr, "%s: %s\n", what, sdr_last_error()) > 0);
}

static void exchange(int fd, void *out, void *in, size_t size)
{
    check(write(fd, out, size) == (ssize_t)size, "write");
    for (size_t got = 0; got < size;) {
        ssize_t n = read(fd, (char *)in + got, size - got);
        check(n > 0, "read");
        got += n;
    }
}

static void receive(struct sdr_qp *qp, struct sdr_mr *mr, int fd)
{
    struct sdr_recv_wr wr = { .max_length = sizeof buffer,
                              .lkey = mr->lkey,
                              .address = mr->address };
    struct sdr_recv_handle *recv;
    uint8_t *bitmap, have[CHUNKS / 8];
    size_t bytes, whole;

    check(sdr_recv_post(qp, &wr, &recv) == SDR_SUCCESS, "sdr_recv_post");
    check(sdr_recv_bitmap_get(recv, &bitmap, &bytes) == SDR_SUCCESS, "sdr_recv_bitmap_get");
    do {
        usleep(20000); /* on a longer way: more than a round trip */
        for (size_t i = whole = 0; i < bytes; i++)
            whole += (have[i] = *(volatile uint8_t *)&bitmap[i]) == 0xff;
        check(write(fd, have, bytes) == (ssize_t)bytes, "write");
    } while (whole < CHUNKS / 8);
    check(sdr_recv_complete(recv) == SDR_SUCCESS, "sdr_recv_complete");
    for (size_t i = 0; i < sizeof buffer; i++)
        check(buffer[i] == (unsigned char)(i * 7), "a wrong byte");
    printf("%zu bytes are in their place\n", sizeof buffer);
}

static void send_all(struct sdr_qp *qp, struct sdr_mr *mr, int fd)
{
    struct sdr_send_start_wr start = { .opcode = SDR_WR_WRITE };
    struct sdr_send_handle *send;
    uint8_t have[CHUNKS / 8] = { 0 };
    int sent = 0, done = 0;
    for (size_t i = 0; i < sizeof buffer; i++)
        buffer[i] = i * 7;
    check(sdr_streaming_send_start(qp, &start, &send) == SDR_SUCCESS, "sdr_streaming_send_start");
    do {
        for (int c = 0; c < CHUNKS; c++) {
            struct sdr_send_continue_wr wr = { .length = CHUNK,
                                               .local_addr = mr->address + c * CHUNK,
                                               .lkey = mr->lkey,
                                               .remote_offset = c };
            if (!(have[c / 8] >> c % 8 & 1) && ++sent)
                check(sdr_streaming_send_continue(send, &wr) == SDR_SUCCESS,
                      "sdr_streaming_send_continue");
        }
        check(read(fd, have, sizeof have) == sizeof have, "read");
    } while (have[0] != 0xff || have[1] != 0xff);
    sdr_streaming_send_end(send);
    while (!done)
        check(sdr_send_poll(send, &done, NULL) != SDR_ERROR, "sdr_send_poll");
    printf("%d chunks sent for %d\n", sent, CHUNKS);
}

int main(void)
{
    struct sdr_dev_attr dev = { .num_channels = 1, .log_max_qps = 2 };
    struct sdr_qp_attr attr = { .bitmap_chunk_size_log_bytes = 16,
                                .max_in_flight_log_bytes = 22,
                                .max_log_num_msgs = 2,
                                .mtu = SDR_MTU_4096,
                                .send_enable = 1,
                                .recv_enable = 1,
                                .rate_limit = 400 };
    static char mine[65536], theirs[65536];
    int fds[2];
    size_t size;

    check(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0, "socketpair");
    int receiver = fork() == 0, fd = fds[receiver];
    setenv("UNBROKEN_HOST", receiver ? "b" : "a", 1);
    struct sdr_context *ctx = sdr_context_create("unb0", &dev);
    check(ctx != NULL, "sdr_context_create");
    struct sdr_qp *qp = sdr_qp_create(ctx, &attr);
    check(qp != NULL, "sdr_qp_create");
    struct sdr_mr *mr = sdr_mr_reg(ctx, buffer, sizeof buffer);
    check(mr && sdr_qp_info_size_get(qp, &size) == SDR_SUCCESS &&
              sdr_qp_info_get(qp, mine) == SDR_SUCCESS,
          "info");
    exchange(fd, mine, theirs, size);
    check(sdr_qp_connect(qp, theirs) == SDR_SUCCESS, "sdr_qp_connect");
    (receiver ? receive : send_all)(qp, mr, fd);
    return sdr_qp_destroy(qp) || sdr_mr_dereg(mr) || sdr_context_destroy(ctx);
}
