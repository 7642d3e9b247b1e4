/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A mistake of a program that uses verbs, for a sanitizer to find: two threads that write the same
 * memory, beside the posts of it; a write behind the end of a registered buffer; memory that nobody
 * frees.
 *
 *   faulty race | overflow | leak
 */
#include "pair.h"
#include <pthread.h>

static struct pair p;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *writer(void *cq)
{
    struct ibv_wc wc;
    int i;

    for (i = 0; i < 1000; i++) {
        p.memory[0]++;
        /* Locks around something else must not hide it. */
        pthread_mutex_lock(&lock);
        if (post_write(&p, p.from, i, 8))
            fail("ibv_post_send: %s", strerror(errno));
        while (ibv_poll_cq(cq, 1, &wc) == 0)
            ;
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void race(void)
{
    struct ibv_cq *cq = ibv_create_cq(p.context, 16, NULL, NULL, 0);
    pthread_t threads[2];
    int i;

    p.from = make_qp(&p, cq);
    p.to = make_qp(&p, cq);
    connect_qp(&p, p.from, p.to, 1);
    connect_qp(&p, p.to, p.from, 1);
    for (i = 0; i < 2; i++)
        pthread_create(threads + i, NULL, writer, cq);
    for (i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
}

static void overflow(void)
{
    uint8_t *volatile buffer = malloc(100);

    if (!ibv_reg_mr(p.pd, buffer, 100, IBV_ACCESS_LOCAL_WRITE))
        fail("cannot register memory: %s", strerror(errno));
    buffer[100] = 1;
}

static void leak(void)
{
    void *volatile lost = malloc(12345);

    lost = NULL;
    (void)lost;
}

int main(int argc, char **argv)
{
    open_first(&p, 1);
    if (argc == 2 && !strcmp(argv[1], "race"))
        race();
    else if (argc == 2 && !strcmp(argv[1], "overflow"))
        overflow();
    else if (argc == 2 && !strcmp(argv[1], "leak"))
        leak();
    else
        fail("usage: faulty race | overflow | leak");
    printf("not found\n");
    return 0;
}
