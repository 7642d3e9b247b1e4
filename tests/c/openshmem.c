/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OpenSHMEM: each PE writes into the symmetric heap and into a static variable of the next one,
 * adds to a counter of the first, and reads what it wrote.
 *
 *   openshmem ROUNDS
 */
#include <shmem.h>
#include <stdio.h>
#include <stdlib.h>

enum { WORDS = 4096 };

static long variable = -1;

int main(int argc, char **argv)
{
    int rounds = argc == 2 ? atoi(argv[1]) : 1, me, all, next, before;
    static long sum;
    long *heap, *back, counted = 0;

    shmem_init();
    me = shmem_my_pe();
    all = shmem_n_pes();
    next = (me + 1) % all;
    before = (me + all - 1) % all;
    heap = shmem_malloc(WORDS * sizeof *heap);
    back = malloc(WORDS * sizeof *back);
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < WORDS; i++)
            back[i] = me + r * 1000 + i;
        shmem_long_put(heap, back, WORDS, next);
        shmem_long_p(&variable, me + r, next);
        shmem_long_atomic_add(&sum, 1, 0);
        shmem_barrier_all();
        if (variable != before + r || heap[WORDS - 1] != before + r * 1000 + WORDS - 1) {
            fprintf(stderr, "FAIL: round %d of PE %d: %ld, %ld\n", r, me, variable,
                    heap[WORDS - 1]);
            shmem_global_exit(1);
        }
        shmem_long_get(back, heap, WORDS, next);
        for (int i = 0; i < WORDS; i++)
            if (back[i] != me + r * 1000 + i) {
                fprintf(stderr, "FAIL: word %d of what PE %d reads is %ld\n", i, me, back[i]);
                shmem_global_exit(1);
            }
        shmem_barrier_all();
    }
    counted = shmem_long_atomic_fetch(&sum, 0);
    if (counted != (long)rounds * all) {
        fprintf(stderr, "FAIL: counted %ld\n", counted);
        shmem_global_exit(1);
    }
    printf("PE %d of %d: %d rounds\n", me, all, rounds);
    fflush(stdout);
    shmem_finalize();
    return 0;
}
