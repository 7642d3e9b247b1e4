/*
 * Ranks add vectors again and again while NICs die; each sum is checked, and what one rank has goes
 * around in a ring. One process for each rank; docs/guide/collectives.md runs three.
 */
#define _DEFAULT_SOURCE 1 /* POSIX, also with -std=c11 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unbroken/coll.h>
#include <unistd.h>

#define COUNT (1 << 20)

static float numbers[COUNT], sums[COUNT];

static void check(ubcollResult_t result, const char *what)
{
    if (result != ubcollSuccess)
        exit(fprintf(stderr, "%s: %s\n", what, ubcollGetLastError()) > 0);
}

/* Rank 0 makes the id; the others find it in a file, which is for this job alone. */
static ubcollUniqueId meet(int rank, const char *path)
{
    char fresh[4200];
    ubcollUniqueId id;
    FILE *file;

    snprintf(fresh, sizeof fresh, "%s.new", path);
    if (rank == 0) {
        check(ubcollGetUniqueId(&id), "ubcollGetUniqueId");
        umask(077); /* whoever reads it can join */
        file = fopen(fresh, "wx");
        if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file) || rename(fresh, path))
            exit(1);
        return id;
    }
    for (int tries = 0; !(file = fopen(path, "r")); tries++) {
        if (tries == 3000)
            exit(1);
        usleep(10000);
    }
    if (fread(&id, sizeof id, 1, file) != 1)
        exit(1);
    fclose(file);
    return id;
}

int main(int argc, char **argv)
{
    int rank = argc > 5 ? atoi(argv[1]) : -1, ranks = argc > 5 ? atoi(argv[2]) : 0;
    int token, over = 0;
    char host[2] = { rank < 0 ? 0 : argv[3][rank], 0 };
    ubcollConfig_t config = UBCOLL_CONFIG_INITIALIZER;
    ubcollCounters_t counters;
    ubcollRequest_t request;
    ubcollComm_t comm;
    long rounds = 0;

    if (rank < 0 || rank >= ranks || ranks > (int)strlen(argv[3]))
        return fputs("usage: ring RANK RANKS HOSTS SECONDS ID-FILE\n", stderr) >= 0;
    config.host = host;
    check(ubcollCommInitRankConfig(&comm, ranks, meet(rank, argv[5]), rank, &config), "init");
    if (rank == 0)
        unlink(argv[5]); /* all have joined */
    for (time_t end = time(NULL) + atoi(argv[4]); !over; rounds++) {
        for (int i = 0; i < COUNT; i++)
            numbers[i] = (i + rounds) % 1000 + rank;
        memset(sums, 0, sizeof sums);
        /* The sum is under way while the token goes around. */
        check(ubcollAllReduce(numbers, sums, COUNT, ubcollFloat32, ubcollSum, comm, &request),
              "ubcollAllReduce");
        check(ubcollGroupStart(), "ubcollGroupStart");
        check(ubcollSend(&rank, 1, ubcollInt32, (rank + 1) % ranks, comm, NULL), "ubcollSend");
        check(ubcollRecv(&token, 1, ubcollInt32, (rank + ranks - 1) % ranks, comm, NULL),
              "ubcollRecv");
        check(ubcollGroupEnd(), "ubcollGroupEnd");
        check(ubcollRequestWait(request), "ubcollRequestWait");
        for (int i = 0; i < COUNT; i++)
            if (sums[i] != (float)(ranks * ((i + rounds) % 1000) + ranks * (ranks - 1) / 2))
                return fprintf(stderr, "round %ld: element %d is %f\n", rounds, i, sums[i]) > 0;
        if (token != (rank + ranks - 1) % ranks)
            return fprintf(stderr, "round %ld: the token is %d\n", rounds, token) > 0;
        /* All stop together. */
        over = time(NULL) >= end;
        check(ubcollAllReduce(&over, &over, 1, ubcollInt32, ubcollMax, comm, NULL),
              "ubcollAllReduce");
    }
    check(ubcollCommGetCounters(comm, &counters), "ubcollCommGetCounters");
    check(ubcollCommDestroy(comm), "ubcollCommDestroy");
    return printf("rank %d: %ld sums are right; %llu paths failed\n", rank, rounds,
              (unsigned long long)counters.pathsFailed) < 0;
}
