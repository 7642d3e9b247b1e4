/* Communicators that are split again and again, while NICs fail: who is in which one, as which
 * rank, and that its sums are those of its ranks alone.
 *
 * Usage: split RANK HOSTS ID_FILE GOES_FILE TIMEOUT_MS; a letter of HOSTS for each rank. Ends
 * well when the file GOES_FILE is gone; prints an error and ends with 1 if a call gives one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unbroken/coll.h>
#include <unistd.h>

#define COUNT 20000

static int me, ranks;
static unsigned long long failed;

static void check(ubcollResult_t result, const char *what)
{
    if (result != ubcollSuccess) {
        fprintf(stderr, "rank %d: %s: %s\n", me, what, ubcollGetLastError());
        exit(1);
    }
}

static void must(int is_so, const char *what, int round)
{
    if (!is_so) {
        fprintf(stderr, "rank %d, round %d: %s\n", me, round, what);
        exit(2);
    }
}

/* Rank 0 makes the id; the others find it in a file. */
static ubcollUniqueId meet(const char *path)
{
    char fresh[4096];
    ubcollUniqueId id;
    FILE *file;

    snprintf(fresh, sizeof fresh, "%s.new", path);
    if (me == 0) {
        check(ubcollGetUniqueId(&id), "an id");
        file = fopen(fresh, "w");
        must(file && fwrite(&id, sizeof id, 1, file) == 1 && fclose(file) == 0 &&
                 rename(fresh, path) == 0,
             "the id's file", 0);
        return id;
    }
    for (int looks = 0; !(file = fopen(path, "r")); looks++) {
        must(looks < 3000, "there is no id", 0);
        usleep(10000);
    }
    must(fread(&id, sizeof id, 1, file) == 1, "the id's file", 0);
    fclose(file);
    return id;
}

/* What a rank chooses in a round; ranks know it of each other. */
static int color_of(int rank, int round)
{
    int color = (rank * 7 + round * 5) % 4;

    return color == 3 ? UBCOLL_SPLIT_NOCOLOR : color % 2;
}

static int key_of(int rank, int round)
{
    return (rank * 11 + round) % 3 - 1;
}

/* Whether rank a comes before rank b. */
static int before(int a, int b, int round)
{
    int ka = key_of(a, round), kb = key_of(b, round);

    return ka != kb ? ka < kb : a < b;
}

/* How many paths of a communicator have failed. */
static void count(ubcollComm_t comm)
{
    ubcollCounters_t counters;

    check(ubcollCommGetCounters(comm, &counters), "counters");
    failed += counters.pathsFailed;
}

static void use(ubcollComm_t comm, int round)
{
    static int32_t numbers[COUNT];
    int color = color_of(me, round), count = 0, place = 0, sum = 0, number;

    for (int r = 0; r < ranks; r++) {
        if (color_of(r, round) != color)
            continue;
        count++;
        sum += r + 1;
        place += before(r, me, round);
    }
    check(ubcollCommCount(comm, &number), "count");
    must(number == count, "a wrong number of ranks", round);
    check(ubcollCommUserRank(comm, &number), "rank");
    must(number == place, "a wrong rank", round);
    for (int i = 0; i < COUNT; i++)
        numbers[i] = i + round + me + 1;
    check(ubcollAllReduce(numbers, numbers, COUNT, ubcollInt32, ubcollSum, comm, NULL),
          "a sum of some");
    for (int i = 0; i < COUNT; i++)
        must(numbers[i] == count * (i + round) + sum, "a wrong sum", round);
}

int main(int argc, char **argv)
{
    ubcollConfig_t config = UBCOLL_CONFIG_INITIALIZER;
    ubcollComm_t comm, some;
    int32_t over = 0;
    char host[2] = "";
    int round = 0;

    if (argc != 6)
        return 2;
    me = atoi(argv[1]);
    ranks = (int)strlen(argv[2]);
    host[0] = argv[2][me];
    config.host = host;
    config.timeoutMs = (uint32_t)atoi(argv[5]);
    check(ubcollCommInitRankConfig(&comm, ranks, meet(argv[3]), me, &config), "join");
    while (!over) {
        check(ubcollCommSplit(comm, color_of(me, round), key_of(me, round), &some, NULL), "split");
        must((some == NULL) == (color_of(me, round) < 0),
             "a communicator without a color, or none with one", round);
        if (some) {
            use(some, round);
            count(some);
            check(ubcollCommDestroy(some), "destroy");
        }
        round++;
        over = access(argv[4], F_OK) != 0;
        check(ubcollAllReduce(&over, &over, 1, ubcollInt32, ubcollMax, comm, NULL),
              "whether it is over");
        printf("round %d, %llu paths of new communicators failed\n", round, failed);
        fflush(stdout);
    }
    count(comm);
    check(ubcollCommDestroy(comm), "destroy");
    printf("%d splits are right, %llu paths failed\n", round, failed);
    return 0;
}
