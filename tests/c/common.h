/* SPDX-License-Identifier: Apache-2.0 */
/* What the C test programs share: errors, time, a TCP connection beside the verbs, content that
 * both ends can compute. */
#ifndef UNBROKEN_TESTS_COMMON_H
#define UNBROKEN_TESTS_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Ends the program with a reason. */
__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...)
{
    va_list args;

    fflush(stdout);
    fprintf(stderr, "FAIL: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\n");
    exit(1);
}

static inline uint64_t now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* The index of the GID that leads to peers: 0, unless the suite says another. */
static inline int test_gid_index(void)
{
    const char *index = getenv("TEST_GID_INDEX");

    return index ? atoi(index) : 0;
}

/* Waits for one connection on a port of all addresses, or connects to HOST:PORT, trying for ten
 * seconds. */
static inline int tcp_listen(const char *port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };
    int one = 1, s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), c;

    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(s, (struct sockaddr *)&a, sizeof a) || listen(s, 1))
        fail("cannot listen on TCP port %s: %s", port, strerror(errno));
    c = accept4(s, NULL, NULL, SOCK_CLOEXEC);
    if (c < 0)
        fail("accept: %s", strerror(errno));
    close(s);
    setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return c;
}

static inline int tcp_connect(const char *where)
{
    char host[256];
    const char *colon = strrchr(where, ':');
    struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *a;
    uint64_t until = now_us() + 10 * 1000000;
    int one = 1;

    if (!colon || (size_t)(colon - where) >= sizeof host)
        fail("'%s' is not HOST:PORT", where);
    memcpy(host, where, colon - where);
    host[colon - where] = 0;
    if (getaddrinfo(host, colon + 1, &hints, &a))
        fail("cannot resolve %s", where);
    for (;;) {
        int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        if (connect(s, a->ai_addr, a->ai_addrlen) == 0) {
            setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            freeaddrinfo(a);
            return s;
        }
        close(s);
        if (now_us() > until)
            fail("cannot connect to %s: %s", where, strerror(errno));
        usleep(20000);
    }
}

static inline void tcp_write(int s, const void *data, size_t n)
{
    const char *p = data;

    while (n) {
        ssize_t k = send(s, p, n, MSG_NOSIGNAL);

        if (k <= 0)
            fail("the TCP connection to the peer broke: the peer ended early");
        p += k;
        n -= k;
    }
}

static inline void tcp_read(int s, void *data, size_t n)
{
    char *p = data;

    while (n) {
        ssize_t k = recv(s, p, n, 0);

        if (k <= 0)
            fail("the TCP connection to the peer broke: the peer ended early");
        p += k;
        n -= k;
    }
}

/* Whether the peer has written something (1), nothing yet (0), or has gone (-1). */
static inline int tcp_peek(int s)
{
    char c;
    ssize_t k = recv(s, &c, 1, MSG_PEEK | MSG_DONTWAIT);

    if (k > 0)
        return 1;
    return k < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

/* A well-mixed function of one number (splitmix64). */
static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

/*
 * Content: pseudo-random bytes that follow from a key. Where they fit, the first eight bytes are
 * the number of the message and the last eight a checksum of what is between.
 */
static inline uint64_t content_word(uint64_t key, size_t i)
{
    return mix(key ^ (i * 0xd6e8feb86659fd93ULL));
}

static inline void content_make(uint8_t *p, size_t n, uint64_t key, uint64_t number)
{
    uint64_t sum = key, w;
    size_t i, body = n >= 16 ? n - 8 : n;

    for (i = 0; i < body; i += 8) {
        size_t k = body - i < 8 ? body - i : 8;

        w = i == 0 && n >= 8 ? number : content_word(key, i);
        sum += k == 8 ? w : 0;
        memcpy(p + i, &w, k);
    }
    if (body < n)
        memcpy(p + body, &sum, 8);
}

/* Whether the first n bytes of a content of `total` bytes are right: NULL, or what is wrong with
 * them. */
static inline const char *content_part_wrong(const uint8_t *p, size_t n, size_t total, uint64_t key,
                                             uint64_t number)
{
    static char why[160];
    uint64_t sum = key, w, have;
    size_t i, whole = total >= 16 ? total - 8 : total, body = n < whole ? n : whole;

    if (n >= 8) {
        memcpy(&have, p, 8);
        if (have != number) {
            snprintf(why, sizeof why, "it has number %llu in place of %llu",
                     (unsigned long long)have, (unsigned long long)number);
            return why;
        }
    }
    for (i = 0; i < body; i += 8) {
        size_t k = body - i < 8 ? body - i : 8;

        w = i == 0 && total >= 8 ? number : content_word(key, i);
        sum += k == 8 ? w : 0;
        if (memcmp(p + i, &w, k)) {
            snprintf(why, sizeof why, "bytes %zu to %zu of %zu are wrong", i, i + k - 1, n);
            return why;
        }
    }
    if (body < n && memcmp(p + body, &sum, n - body))
        return "its checksum is wrong";
    return NULL;
}

static inline const char *content_wrong(const uint8_t *p, size_t n, uint64_t key, uint64_t number)
{
    return content_part_wrong(p, n, n, key, number);
}

#endif
