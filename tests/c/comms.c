/* What communicators of one process cost: descriptors, threads and memory, after each that was made
 * and has done an operation.
 *
 * Usage: comms HOSTS COUNT; a letter of HOSTS for each rank, a process each. Rank 0 prints a
 * line "N DESCRIPTORS THREADS KIB" for none and for each. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unbroken/coll.h>
#include <unistd.h>

#define MOST 64

static struct shared {
    ubcollUniqueId ids[MOST];
    volatile int made;
} *shared;

static void check(ubcollResult_t result, const char *what)
{
    if (result != ubcollSuccess) {
        fprintf(stderr, "%s: %s\n", what, ubcollGetLastError());
        exit(1);
    }
}

static int entries(const char *path)
{
    DIR *folder = opendir(path);
    int count = 0;

    if (!folder)
        return -1;
    while (readdir(folder))
        count++;
    closedir(folder);
    return count - 2;
}

static long resident_kib(void)
{
    char line[256];
    long kib = -1;
    FILE *file = fopen("/proc/self/status", "r");

    while (file && fgets(line, sizeof line, file))
        sscanf(line, "VmRSS: %ld", &kib);
    if (file)
        fclose(file);
    return kib;
}

static void show(int rank, int number)
{
    if (rank == 0)
        printf("%d %d %d %ld\n", number, entries("/proc/self/fd"), entries("/proc/self/task"),
               resident_kib());
}

static int run(int rank, int ranks, char host, int count)
{
    char name[2] = { host, 0 };
    ubcollConfig_t config = UBCOLL_CONFIG_INITIALIZER;
    ubcollComm_t comms[MOST];
    int32_t number;

    config.host = name;
    show(rank, 0);
    for (int i = 0; i < count; i++) {
        if (rank == 0) {
            check(ubcollGetUniqueId(&shared->ids[i]), "an id");
            __sync_synchronize();
            shared->made = i + 1;
        }
        while (shared->made <= i)
            usleep(100);
        check(ubcollCommInitRankConfig(&comms[i], ranks, shared->ids[i], rank, &config),
              "a communicator");
        number = rank + i;
        check(ubcollAllReduce(&number, &number, 1, ubcollInt32, ubcollSum, comms[i], NULL),
              "a sum");
        if (number != ranks * i + ranks * (ranks - 1) / 2) {
            fprintf(stderr, "rank %d: the sum of communicator %d is %d\n", rank, i, number);
            return 1;
        }
        show(rank, i + 1);
    }
    for (int i = 0; i < count; i++)
        check(ubcollCommDestroy(comms[i]), "the end");
    show(rank, 0);
    return 0;
}

int main(int argc, char **argv)
{
    pid_t pids[MOST];
    int ranks = argc == 3 ? (int)strlen(argv[1]) : 0, count = argc == 3 ? atoi(argv[2]) : 0,
        bad = 0, status;

    if (ranks < 1 || ranks > MOST || count < 1 || count > MOST)
        return 2;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 2;
    for (int rank = 0; rank < ranks; rank++)
        if ((pids[rank] = fork()) == 0)
            exit(run(rank, ranks, argv[1][rank], count));
    for (int rank = 0; rank < ranks; rank++)
        if (wait(&status) < 0 || status != 0) {
            /* The others would wait for it. */
            for (int other = 0; other < ranks && !bad; other++)
                kill(pids[other], SIGKILL);
            bad = 1;
        }
    return bad;
}
