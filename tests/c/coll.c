/* The C API of collectives: every function, what it refuses and with which words, requests, groups,
 * and the errors of all ranks, between three processes.
 *
 * Usage: coll; hosts a to c of the emulated network that UNBROKEN_RUNTIME names. Each process
 * prints what it has done. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unbroken/coll.h>
#include <unistd.h>

#define RANKS 3
#define COUNT 30000

static int me;

/* What the processes share: ids, and a count of those who have come to a place. */
static struct shared {
    ubcollUniqueId ids[5];
    volatile int ready;
} *shared;

static void fail(int line, const char *what)
{
    fprintf(stderr, "rank %d: line %d: %s; last error: %s\n", me, line, what, ubcollGetLastError());
    exit(1);
}
#define MUST(condition) \
    do { \
        if (!(condition)) \
            fail(__LINE__, #condition); \
    } while (0)
#define OK(call) MUST((call) == ubcollSuccess)
/* The call fails so, and the error has these words. */
#define REFUSED(call, result, words) \
    do { \
        MUST((call) == (result)); \
        MUST(strstr(ubcollGetLastError(), words)); \
    } while (0)
#define WRONG(call, words) REFUSED(call, ubcollInvalidArgument, words)

static int32_t in[RANKS * COUNT], out[RANKS * COUNT];

static void fill(int round)
{
    for (int i = 0; i < RANKS * COUNT; i++)
        in[i] = i * 3 + me * 1000 + round;
    memset(out, 0xa5, sizeof out);
}

static int32_t sum(int i, int round)
{
    return RANKS * (i * 3 + round) + 1000 * RANKS * (RANKS - 1) / 2;
}

static int32_t value(int i, int rank, int round)
{
    return i * 3 + rank * 1000 + round;
}

static void refusals(ubcollComm_t comm)
{
    ubcollRequest_t request = NULL;
    ubcollResult_t result;
    int number;

    WRONG(ubcollAllReduce(in, out, 4, 12, ubcollSum, comm, NULL), "type 12; ubcollInt8 (0)");
    WRONG(ubcollAllReduce(in, out, 4, ubcollInt32, 8, comm, NULL), "reduction 8; ubcollSum (0)");
    WRONG(ubcollAllReduce(in, out, 4, ubcollFloat32, ubcollBitXor, comm, NULL),
          "bitwise AND, OR and XOR take integers");
    WRONG(ubcollAllReduce(NULL, out, 4, ubcollInt32, ubcollSum, comm, NULL),
          "sendbuff is NULL; an address of 16 bytes");
    WRONG(ubcollAllReduce(in, NULL, 4, ubcollInt32, ubcollSum, comm, &request), "recvbuff is NULL");
    WRONG(ubcollAllReduce(in, in + 1, 4, ubcollInt32, ubcollSum, comm, NULL), "overlap");
    WRONG(ubcollAllReduce(in, out, (size_t)1 << 62, ubcollInt32, ubcollSum, comm, NULL),
          "more than memory can have");
    WRONG(ubcollAllReduce(in, out, 4, ubcollInt32, ubcollSum, NULL, NULL),
          "is no communicator, or has been given back");
    WRONG(ubcollBroadcast(in, out, 4, ubcollInt32, 3, comm, NULL),
          "rank 3 does not exist; the numbers are 0 to 2");
    WRONG(ubcollReduce(in, out, 4, ubcollInt32, ubcollSum, -1, comm, NULL),
          "root -1: ranks are counted from 0");
    WRONG(ubcollSend(in, 4, ubcollInt32, me, comm, NULL), "sends to itself");
    WRONG(ubcollRecv(out, 4, ubcollInt32, 7, comm, NULL), "rank 7 does not exist");
    WRONG(ubcollAllToAll(in, in, 4, ubcollInt32, comm, NULL), "overlap");
    WRONG(ubcollAllToAllv(in, NULL, out, NULL, ubcollInt32, comm, NULL), "sendcounts is NULL");
    WRONG(ubcollCommCount(comm, NULL), "count is NULL");
    WRONG(ubcollCommGetAsyncError((ubcollComm_t)&number, &result), "is no communicator");
    WRONG(ubcollRequestWait((ubcollRequest_t)comm), "is no request");
    WRONG(ubcollRequestTest(NULL, &number), "is no request");
    WRONG(ubcollRequestTest(NULL, NULL), "done is NULL");
    WRONG(ubcollRequestWaitAll(NULL, 2), "requests is NULL");
    WRONG(ubcollGroupEnd(), "no group is open");
    WRONG(ubcollGetUniqueId(NULL), "uniqueId is NULL");
    /* Of a group that has one wrong operation nothing is begun: the barrier behind it is not
     * confused by the other. */
    OK(ubcollGroupStart());
    OK(ubcollBarrier(comm, &request));
    WRONG(ubcollSend(in, 4, 99, (me + 1) % RANKS, comm, NULL), "type 99");
    WRONG(ubcollCommDestroy(comm), "a group is open");
    WRONG(ubcollGroupEnd(),
          "nothing of the group was begun, since an operation was refused: type 99");
    OK(ubcollCommGetAsyncError(comm, &result));
    MUST(result == ubcollSuccess && !request);
    MUST(strcmp(ubcollGetErrorString(ubcollRemoteError),
                "the communicator is broken at all ranks") == 0);
    OK(ubcollGetVersion(&number));
    MUST(number >= 100);
}

static void strangers(void)
{
    ubcollConfig_t config = UBCOLL_CONFIG_INITIALIZER;
    ubcollUniqueId none = { "nonsense" }, other = shared->ids[0];
    ubcollComm_t comm;

    WRONG(ubcollCommInitRank(NULL, 1, none, 0), "comm is NULL");
    REFUSED(ubcollCommInitRank(&comm, 1, none, 0), ubcollInvalidUsage,
            "is no id of a communicator");
    MUST(!comm);
    WRONG(ubcollCommInitRank(&comm, 0, other, 0), "rank 0 of 0");
    WRONG(ubcollCommInitRank(&comm, 2, other, -1), "rank -1 of 2");
    config.size = 8;
    WRONG(ubcollCommInitRankConfig(&comm, 1, other, 0, &config), "UBCOLL_CONFIG_INITIALIZER");
    config.size = sizeof config;
    config.address = "everywhere";
    WRONG(ubcollCommInitRankConfig(&comm, 1, other, 0, &config), "`everywhere` is no address");
    config.address = NULL;
    config.queue = 1 << 20;
    WRONG(ubcollCommInitRankConfig(&comm, 1, other, 0, &config), "1 to 65536");
    config.queue = 0;
    config.shape = "rings";
    WRONG(ubcollCommInitRankConfig(&comm, 1, other, 0, &config),
          "`rings` is no shape; there are one-shot");
    config.shape = "bridged-ring";
    WRONG(ubcollCommInitRankConfig(&comm, 1, other, 0, &config), "reduces in an order of its own");
    /* Another secret at the same address. */
    char *last = &other.internal[strlen(other.internal) - 1];
    *last = *last == '0' ? '1' : '0';
    REFUSED(ubcollCommInitRank(&comm, RANKS, other, 2), ubcollInvalidUsage,
            "the id is that of another job");
    REFUSED(ubcollCommInitRank(&comm, RANKS, shared->ids[0], 3), ubcollInvalidUsage, "rank 3 of 3");
}

static void operations(ubcollComm_t comm)
{
    size_t sends[RANKS], recvs[RANKS];
    int n = 0, number, at = 0;

    OK(ubcollCommCount(comm, &number));
    MUST(number == RANKS);
    OK(ubcollCommUserRank(comm, &number));
    MUST(number == me);
    /* In place at some ranks, and not at others: that is each one's own affair. */
    fill(++n);
    int32_t *to = me == 1 ? in : out;
    OK(ubcollAllReduce(in, to, COUNT, ubcollInt32, ubcollSum, comm, NULL));
    for (int i = 0; i < COUNT; i++)
        MUST(to[i] == sum(i, n));
    fill(++n);
    to = me == 2 ? in : out;
    OK(ubcollReduce(in, me == 2 ? to : NULL, COUNT, ubcollInt32, ubcollMax, 2, comm, NULL));
    for (int i = 0; i < COUNT; i++)
        MUST(to[i] == (me == 2 ? value(i, 2, n) : (int32_t)0xa5a5a5a5));
    fill(++n);
    OK(ubcollBroadcast(me == 1 ? in : NULL, me == 1 ? in : out, COUNT, ubcollInt32, 1, comm, NULL));
    for (int i = 0; i < COUNT; i++)
        MUST((me == 1 ? in : out)[i] == value(i, 1, n));
    fill(++n);
    if (me == 0)
        memcpy(out, in, COUNT * sizeof *in);
    OK(ubcollAllGather(me == 0 ? out : in, out, COUNT, ubcollInt32, comm, NULL));
    for (int i = 0; i < RANKS * COUNT; i++)
        MUST(out[i] == value(i % COUNT, i / COUNT, n));
    fill(++n);
    to = me == 2 ? in + 2 * COUNT : out;
    OK(ubcollReduceScatter(in, to, COUNT, ubcollInt32, ubcollSum, comm, NULL));
    for (int i = 0; i < COUNT; i++)
        MUST(to[i] == sum(i + me * COUNT, n));
    fill(++n);
    OK(ubcollAllToAll(in, out, COUNT, ubcollInt32, comm, NULL));
    for (int i = 0; i < RANKS * COUNT; i++)
        MUST(out[i] == value(me * COUNT + i % COUNT, i / COUNT, n));
    /* Rank r sends rank s 10 r + s elements. */
    fill(++n);
    for (int r = 0; r < RANKS; r++) {
        sends[r] = 10 * me + r;
        recvs[r] = 10 * r + me;
    }
    OK(ubcollAllToAllv(in, sends, out, recvs, ubcollInt32, comm, NULL));
    for (int r = 0; r < RANKS; r++) {
        int begins = 0;
        for (int s = 0; s < me; s++)
            begins += 10 * r + s;
        for (size_t k = 0; k < recvs[r]; k++)
            MUST(out[at++] == value(begins + k, r, n));
    }
    recvs[me]++;
    WRONG(ubcollAllToAllv(in, sends, out, recvs, ubcollInt32, comm, NULL), "sends itself");
    OK(ubcollBarrier(comm, NULL));
}

static void requests(ubcollComm_t comm)
{
    static int32_t many[40][100];
    ubcollRequest_t waiting[40], last;
    int done = 0;

    for (int k = 0; k < 40; k++) {
        for (int i = 0; i < 100; i++)
            many[k][i] = value(i, me, k);
        OK(ubcollAllReduce(many[k], many[k], 100, ubcollInt32, ubcollSum, comm, &waiting[k]));
    }
    /* What is in line is done in its order, so that the last one is done last. */
    last = waiting[39];
    while (!done)
        OK(ubcollRequestTest(last, &done));
    WRONG(ubcollRequestTest(last, &done), "is no request, or has been given back");
    OK(ubcollRequestWaitAll(waiting, 39));
    for (int k = 0; k < 40; k++)
        for (int i = 0; i < 100; i++)
            MUST(many[k][i] == sum(i, k));
    /* Nobody tests or waits: it is done all the same. */
    OK(ubcollBarrier(comm, &last));
    for (int looks = 0; !done || looks == 0; looks++) {
        MUST(looks < 200);
        OK(ubcollRequestSleep(last, 100, &done));
    }
}

/* Told of in a queue, by threads that sleep; driven without being ended. */
static void queues(ubcollComm_t comm)
{
    ubcollRequest_t waiting[10];
    ubcollQueue_t queue;
    uint64_t tag, sum = 0;
    int done, got;

    OK(ubcollQueueCreate(&queue));
    WRONG(ubcollQueueCreate(NULL), "queue is NULL");
    WRONG(ubcollQueueWait((ubcollQueue_t)comm, 0, &tag, &got), "is no completion queue");
    OK(ubcollQueueWait(queue, 0, &tag, &got));
    MUST(!got);
    for (int k = 0; k < 10; k++) {
        OK(ubcollBarrier(comm, &waiting[k]));
        OK(ubcollRequestNotify(waiting[k], queue, (uint64_t)k + 1));
    }
    for (int k = 0; k < 10; k++) {
        OK(ubcollQueueWait(queue, 20000, &tag, &got));
        MUST(got);
        sum += tag;
    }
    MUST(sum == 55);
    for (int k = 0; k < 10; k++) {
        OK(ubcollRequestDrive(waiting[k], UINT32_MAX, &done));
        MUST(done);
        OK(ubcollRequestResult(waiting[k]));
        OK(ubcollRequestWait(waiting[k]));
        WRONG(ubcollRequestDrive(waiting[k], 0, &done), "is no request");
    }
    OK(ubcollQueueDestroy(queue));
    WRONG(ubcollQueueDestroy(queue), "is no completion queue");
    WRONG(ubcollCommSetTimeout(comm, 0), "1 ms or more is right");
    OK(ubcollCommSetTimeout(comm, 20000));
    /* Bits, and 16 bits. */
    {
        uint16_t bits[3] = { (uint16_t)(1 << me), 0xffff, (uint16_t)(0xf0f0 + me) };

        OK(ubcollAllReduce(bits, bits, 1, ubcollUint16, ubcollBitOr, comm, NULL));
        OK(ubcollAllReduce(bits + 1, bits + 1, 1, ubcollInt16, ubcollSum, comm, NULL));
        OK(ubcollAllReduce(bits + 2, bits + 2, 1, ubcollUint16, ubcollBitAnd, comm, NULL));
        MUST(bits[0] == 7 && bits[1] == (uint16_t)-3 && bits[2] == 0xf0f0);
    }
}

static void full(ubcollComm_t comm)
{
    ubcollRequest_t waiting[8], one;

    /* Nobody sends: four receives wait, and a fifth finds no room. */
    if (me == 0) {
        for (int k = 0; k < 4; k++)
            OK(ubcollRecv(&out[k], 1, ubcollInt32, 1, comm, &waiting[k]));
        REFUSED(ubcollRecv(&out[4], 1, ubcollInt32, 1, comm, &one), ubcollQueueFull,
                "4 operations wait already");
        MUST(!one);
        OK(ubcollGroupStart());
        OK(ubcollBarrier(comm, NULL));
        OK(ubcollRecv(&out[4], 1, ubcollInt32, 1, comm, NULL));
        REFUSED(ubcollGroupEnd(), ubcollQueueFull, "wait for one of them");
    }
    OK(ubcollBarrier(comm, NULL));
    if (me == 1)
        for (int k = 0; k < 4; k++)
            OK(ubcollSend(&k, 1, ubcollInt32, 0, comm, NULL));
    if (me == 0) {
        OK(ubcollRequestWaitAll(waiting, 4));
        for (int k = 0; k < 4; k++)
            MUST(out[k] == k);
    }
}

/* All begin together what would stand still one after the other. */
static void groups(ubcollComm_t comm, ubcollComm_t other)
{
    static int32_t large[2][RANKS][COUNT];

    for (int round = 0; round < 20; round++) {
        fill(round);
        OK(ubcollGroupStart());
        for (int r = 0; r < RANKS; r++) {
            if (r == me)
                continue;
            /* More than slots hold, and receives behind sends at all ranks. */
            OK(ubcollSend(in, COUNT, ubcollInt32, r, comm, NULL));
            OK(ubcollSend(in + COUNT, COUNT, ubcollInt32, r, other, NULL));
            OK(ubcollRecv(large[0][r], COUNT, ubcollInt32, r, comm, NULL));
            OK(ubcollRecv(large[1][r], COUNT, ubcollInt32, r, other, NULL));
        }
        /* Two communicators, in another order at each other rank. */
        OK(ubcollAllReduce(in, out, COUNT, ubcollInt32, ubcollSum, me % 2 ? comm : other, NULL));
        OK(ubcollAllReduce(in, out + COUNT, COUNT, ubcollInt32, ubcollSum, me % 2 ? other : comm,
                           NULL));
        OK(ubcollGroupEnd());
        for (int i = 0; i < COUNT; i++) {
            MUST(out[i] == sum(i, round) && out[COUNT + i] == sum(i, round));
            for (int r = 0; r < RANKS; r++)
                MUST(r == me || (large[0][r][i] == value(i, r, round) &&
                                 large[1][r][i] == value(COUNT + i, r, round)));
        }
    }
}

/* Rank 0 receives by tags, in another order than was sent, and what any rank sends. */
static void tags(ubcollComm_t comm)
{
    ubcollRequest_t waiting[4], any[2];
    int32_t got[4], from_any[2];
    int seen = 0, rank, done;

    OK(ubcollGroupStart());
    WRONG(ubcollRecvTag(got, 1, ubcollInt32, UBCOLL_ANY_SOURCE, 7, comm, &any[0]),
          "not for groups");
    OK(ubcollGroupEnd());
    WRONG(ubcollRecvTag(got, 1, ubcollInt32, UBCOLL_ANY_SOURCE, 7, comm, NULL), "request is NULL");
    if (me != 0) {
        for (int32_t k = 3; k >= 0; k--) {
            int32_t number = 10 * me + k;

            OK(ubcollSendTag(&number, 1, ubcollInt32, 0, (uint64_t)k, comm, NULL));
        }
        OK(ubcollSendTag(&me, 1, ubcollInt32, 0, 7, comm, NULL));
        OK(ubcollBarrier(comm, NULL));
        return;
    }
    for (int k = 0; k < 2; k++)
        OK(ubcollRecvTag(&from_any[k], 1, ubcollInt32, UBCOLL_ANY_SOURCE, 7, comm, &any[k]));
    for (int from = 1; from < RANKS; from++) {
        for (int k = 0; k < 4; k++)
            OK(ubcollRecvTag(&got[k], 1, ubcollInt32, from, (uint64_t)k, comm, &waiting[k]));
        OK(ubcollRequestWaitAll(waiting, 4));
        for (int k = 0; k < 4; k++)
            MUST(got[k] == 10 * from + k);
    }
    for (int k = 0; k < 2; k++) {
        OK(ubcollRequestDrive(any[k], UINT32_MAX, &done));
        OK(ubcollRequestSource(any[k], &rank));
        MUST(done && rank == from_any[k] && rank > 0);
        seen += rank;
        OK(ubcollRequestWait(any[k]));
        WRONG(ubcollRequestSource(any[k], &rank), "is no request");
    }
    MUST(seen == 3);
    OK(ubcollBarrier(comm, NULL));
}

/* Two ranks disagree about what they exchange: all ranks hear it. */
static void disagree(ubcollComm_t comm)
{
    ubcollResult_t result = ubcollSuccess;

    if (me == 1)
        REFUSED(ubcollSend(in, COUNT, ubcollInt32, 2, comm, NULL) == ubcollSuccess
                    ? ubcollBarrier(comm, NULL)
                    : ubcollRemoteError,
                ubcollRemoteError,
                "rank 2 has SendRecv of 5 I32, from 1 to 2, rank 1 has SendRecv of 30000 I32, from "
                "1 to 2");
    if (me == 2)
        REFUSED(ubcollRecv(out, 5, ubcollInt32, 1, comm, NULL), ubcollRemoteError,
                "rank 2 has SendRecv of 5 I32, from 1 to 2");
    if (me == 0)
        REFUSED(ubcollBarrier(comm, NULL), ubcollRemoteError,
                "rank 2 has SendRecv of 5 I32, from 1 to 2");
    OK(ubcollCommGetAsyncError(comm, &result));
    MUST(result == ubcollRemoteError && strstr(ubcollGetLastError(), "SendRecv of 30000"));
}

/* Two of three, in the other order; all, with what a configuration changes; and what is refused
 * without anything being said. */
static void splits(ubcollComm_t comm)
{
    ubcollConfig_t config = UBCOLL_CONFIG_INITIALIZER;
    ubcollComm_t some, all, none = comm;
    ubcollRequest_t waiting[2];
    int number;

    WRONG(ubcollCommSplit(comm, 0, 0, NULL, NULL), "newcomm is NULL");
    WRONG(ubcollCommSplit((ubcollComm_t)&number, 0, 0, &none, NULL), "is no communicator");
    MUST(!none);
    config.size = 1;
    WRONG(ubcollCommSplit(comm, 0, 0, &none, &config), "UBCOLL_CONFIG_INITIALIZER");
    config.size = sizeof config;
    config.host = "a";
    WRONG(ubcollCommSplit(comm, 0, 0, &none, &config), "it stays where it is: NULL");
    config.host = NULL;
    config.address = "nowhere";
    WRONG(ubcollCommSplit(comm, 0, 0, &none, &config), "`nowhere` is no address");
    config.address = NULL;
    OK(ubcollGroupStart());
    WRONG(ubcollCommSplit(comm, 0, 0, &none, NULL), "outside of groups");
    OK(ubcollGroupEnd());

    OK(ubcollCommSplit(comm, me == 1 ? UBCOLL_SPLIT_NOCOLOR : 5, -me, &some, NULL));
    MUST((me == 1) == !some);
    if (some) {
        OK(ubcollCommCount(some, &number));
        MUST(number == 2);
        OK(ubcollCommUserRank(some, &number));
        MUST(number == (me == 0));
        fill(1);
        OK(ubcollAllGather(in, out, COUNT, ubcollInt32, some, NULL));
        for (int i = 0; i < 2 * COUNT; i++)
            MUST(out[i] == value(i % COUNT, i < COUNT ? 2 : 0, 1));
    }
    config.queue = 1;
    OK(ubcollCommSplit(comm, 0, 0, &all, &config));
    OK(ubcollBarrier(comm, NULL));
    OK(ubcollRecv(out, 1, ubcollInt32, (me + 2) % RANKS, all, &waiting[0]));
    REFUSED(ubcollRecv(out, 1, ubcollInt32, (me + 2) % RANKS, all, &waiting[1]), ubcollQueueFull,
            "1 operations wait already");
    OK(ubcollSend(in, 1, ubcollInt32, (me + 1) % RANKS, all, NULL));
    OK(ubcollRequestWait(waiting[0]));
    /* Ranks that want something else of it are refused by name, and it stays as it is. */
    config.anyOrder = me == 2;
    REFUSED(ubcollCommSplit(comm, 0, 0, &none, &config), ubcollInvalidUsage,
            "rank 2 cannot take part in the split: its settings");
    MUST(!none);
    /* What is left of the old one does not matter to the new ones. */
    OK(ubcollCommDestroy(comm));
    OK(ubcollBarrier(all, NULL));
    OK(ubcollCommDestroy(all));
    if (some)
        OK(ubcollCommDestroy(some));
}

static void aborts(ubcollComm_t comm)
{
    ubcollRequest_t request, all;

    /* Nobody aborts before all have begun the barrier. */
    if (me == 1) {
        OK(ubcollBarrier(comm, NULL));
        OK(ubcollBarrier(comm, &request));
        OK(ubcollCommAbort(comm));
        REFUSED(ubcollRequestWait(request), ubcollRemoteError,
                "rank 1 has aborted the communicator");
        WRONG(ubcollCommAbort(comm), "has been given back");
        return;
    }
    OK(ubcollRecv(out, 1, ubcollInt32, 1, comm, &request));
    OK(ubcollBarrier(comm, &all));
    /* Done, or ended by the abort, whichever was first. */
    ubcollResult_t ended = ubcollRequestWait(all);
    MUST(ended == ubcollSuccess || ended == ubcollRemoteError);
    REFUSED(ubcollRequestWait(request), ubcollRemoteError, "rank 1 has aborted the communicator");
    REFUSED(ubcollBarrier(comm, NULL), ubcollRemoteError, "rank 1 has aborted the communicator");
    OK(ubcollCommDestroy(comm));
}

static ubcollComm_t join(int k, uint32_t queue)
{
    ubcollConfig_t config = UBCOLL_CONFIG_INITIALIZER;
    char host[2] = { "abc"[me], 0 };
    ubcollComm_t comm;

    config.host = host;
    config.queue = queue;
    OK(ubcollCommInitRankConfig(&comm, RANKS, shared->ids[k], me, &config));
    return comm;
}

int main(void)
{
    int status, failed = 0;

    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(shared != MAP_FAILED);
    for (me = RANKS - 1; me > 0; me--)
        if (fork() == 0)
            break;
    MUST(strcmp(ubcollGetLastError(), "") == 0);
    if (me == 0) {
        for (int k = 0; k < 5; k++)
            OK(ubcollGetUniqueId(&shared->ids[k]));
        strangers();
        __sync_synchronize();
        shared->ready = 1;
    }
    for (int looks = 0; !shared->ready; looks++) {
        MUST(looks < 6000);
        usleep(10000);
    }
    ubcollComm_t comm = join(0, 0), other = join(1, 0), small = join(2, 4), last = join(3, 0),
                 splitting = join(4, 0);
    refusals(comm);
    operations(comm);
    requests(comm);
    queues(comm);
    tags(comm);
    groups(comm, other);
    full(small);
    disagree(other);
    aborts(last);
    splits(splitting);
    OK(ubcollBarrier(comm, NULL));
    OK(ubcollCommDestroy(comm));
    WRONG(ubcollCommDestroy(comm), "has been given back");
    OK(ubcollCommDestroy(small));
    OK(ubcollCommDestroy(other));
    printf("rank %d: all is as the header says\n", me);
    if (me > 0)
        return 0;
    for (int k = 1; k < RANKS; k++)
        failed |= wait(&status) < 0 || status != 0;
    return failed;
}
