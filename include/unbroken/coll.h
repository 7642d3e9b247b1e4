/*
 * Collective operations that go on when NICs, ports, cables and switches fail under them, in the
 * manner of NCCL's header.
 *
 * What differs from NCCL: memory is the host's; instead of a stream an operation has a place for a
 * request. With NULL there the call returns when this rank's part is done (in a group, when the
 * group ends). With a request the operation is queued behind those before it and goes on by itself;
 * its memory is the library's until the request is over. More is in docs/guide/collectives.md. Link
 * with -lunbroken_coll.
 *
 * Functions may be called from any thread. A result other than ubcollSuccess is explained by
 * ubcollGetLastError(): what was wrong, and what would be right. A communicator that is broken
 * stays broken at all ranks: destroy it and make another.
 *
 * Licence: Apache-2.0
 */
#ifndef UNBROKEN_COLL_H
#define UNBROKEN_COLL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ubcollComm *ubcollComm_t;
typedef struct ubcollRequest *ubcollRequest_t;

#define UBCOLL_UNIQUE_ID_BYTES 128
/* A communicator's, as text with zeros behind it; it holds a secret. */
typedef struct {
    char internal[UBCOLL_UNIQUE_ID_BYTES];
} ubcollUniqueId;

typedef enum {
    ubcollSuccess = 0,
    ubcollVerbsError = 1,      /* a NIC or its memory */
    ubcollSystemError = 2,     /* sockets, threads */
    ubcollInternalError = 3,   /* a defect of the library */
    ubcollInvalidArgument = 4, /* nothing was done */
    /*
     * ranks did not find each other: another job's id, a rank twice, other settings, one that did
     * not come
     */
    ubcollInvalidUsage = 5,
    ubcollRemoteError = 6,     /* the communicator is broken, at all ranks */
    ubcollQueueFull = 100      /* nothing was done: wait for an operation that is under way */
} ubcollResult_t;

typedef enum {
    ubcollInt8 = 0,
    ubcollUint8 = 1,
    ubcollInt32 = 2,
    ubcollUint32 = 3,
    ubcollInt64 = 4,
    ubcollUint64 = 5,
    ubcollFloat16 = 6,
    ubcollFloat32 = 7,
    ubcollFloat64 = 8,
    ubcollBfloat16 = 9,
    ubcollInt16 = 10,
    ubcollUint16 = 11
} ubcollDataType_t;

/* The bitwise ones take integers alone. */
typedef enum {
    ubcollSum = 0,
    ubcollProd = 1,
    ubcollMax = 2,
    ubcollMin = 3,
    ubcollAvg = 4,
    ubcollBitAnd = 5,
    ubcollBitOr = 6,
    ubcollBitXor = 7
} ubcollRedOp_t;

/*
 * Zeros and NULLs stand for what is usual. All ranks give the same timeoutMs, anyOrder, logical and
 * shape.
 */
typedef struct {
    size_t size;
    /* of the emulated network; NULL: as `unbroken run` has set it (UNBROKEN_HOST) */
    const char *host;
    /*
     * of this machine, at which others reach this process; NULL: UNBROKEN_COLL_ADDRESS, else
     * 127.0.0.1
     */
    const char *address;
    /*
     * how long an operation may stand still, and ubcollCommDestroy wait for one who takes nothing:
     * 20,000
     */
    uint32_t timeoutMs;
    /* how long to wait for all ranks at the beginning: 60,000, or timeoutMs if that is more */
    uint32_t patienceMs;
    /* operations that may be under way, of all ranks and to or from each one: 256 */
    uint32_t queue;
    /* results may differ by rounding when NICs are lost; without, they are the same bits */
    int anyOrder;
    int logical;         /* queue pairs that fail over by themselves beneath */
    /*
     * of operations that can have it, a name of docs/guide/collectives.md; those that reduce
     * otherwise than in order need anyOrder. NULL: UNBROKEN_COLL_SHAPE, else the planner chooses
     */
    const char *shape;
} ubcollConfig_t;

#define UBCOLL_CONFIG_INITIALIZER { sizeof(ubcollConfig_t), NULL, NULL, 0, 0, 0, 0, 0, NULL }

/* 10,000 times the major number, 100 times the minor, and the patch */
ubcollResult_t ubcollGetVersion(int *version);
const char *ubcollGetErrorString(ubcollResult_t result);
/* Of this thread's last call that failed; "" before the first. Valid until the next one. */
const char *ubcollGetLastError(void);

/*
 * In one process, whose ranks and others are given the id by whatever means the job has. They meet
 * at that process, which must live until then.
 */
ubcollResult_t ubcollGetUniqueId(ubcollUniqueId *uniqueId);
/* Returns when all ranks have come. */
ubcollResult_t ubcollCommInitRank(ubcollComm_t *comm, int nranks, ubcollUniqueId commId, int rank);
ubcollResult_t ubcollCommInitRankConfig(ubcollComm_t *comm, int nranks, ubcollUniqueId commId,
        int rank, const ubcollConfig_t *config);
#define UBCOLL_SPLIT_NOCOLOR (-1)
/*
 * Makes communicators of the ranks of comm: those that give the same color are together, in the
 * order of their keys, and of their ranks in comm where keys are equal. With a negative color a
 * rank takes part in none, and *newcomm is NULL. All ranks of comm call it, and it has its turn
 * among the other operations of all ranks; it is not for groups. comm stays as it is, and need not
 * outlive the new ones. config: NULL for what comm has; what is zero or NULL in it is as comm has
 * it, but anyOrder and logical are as given, and host is NULL: a rank stays where it is.
 */
ubcollResult_t ubcollCommSplit(ubcollComm_t comm, int color, int key, ubcollComm_t *newcomm,
        const ubcollConfig_t *config);
/*
 * This rank begins nothing more, and the others are told how much it has begun: an operation that
 * it has no part in ends at once, with an error that names it. If that is one of all ranks, the
 * communicator is broken; if it is between two, the others go on. Receives of which nothing has
 * come are given up, and end with an error; what else is under way goes on. Does not wait.
 */
ubcollResult_t ubcollCommFinalize(ubcollComm_t comm);
/* Does the same, and waits for what is under way. */
ubcollResult_t ubcollCommDestroy(ubcollComm_t comm);
/*
 * Does not: all that is under way, here and at all other ranks, ends with an error that names this
 * rank.
 */
ubcollResult_t ubcollCommAbort(ubcollComm_t comm);
/*
 * Instead of the configuration's timeoutMs, from now on and at this rank alone; what is under way
 * is meant, too.
 */
ubcollResult_t ubcollCommSetTimeout(ubcollComm_t comm, uint32_t timeoutMs);
/* ubcollSuccess, or why the communicator is broken; ubcollGetLastError() has the words. */
ubcollResult_t ubcollCommGetAsyncError(ubcollComm_t comm, ubcollResult_t *asyncError);
ubcollResult_t ubcollCommCount(ubcollComm_t comm, int *count);
ubcollResult_t ubcollCommUserRank(ubcollComm_t comm, int *rank);

typedef struct {
    uint64_t operations;   /* that were done */
    uint64_t pathsFailed;  /* to other ranks */
    uint64_t streamsMoved; /* to another NIC, or back */
    uint64_t framesAgain;  /* that were sent again */
} ubcollCounters_t;

ubcollResult_t ubcollCommGetCounters(ubcollComm_t comm, ubcollCounters_t *counters);

/*
 * Operations of all ranks, which ask for them in the same order. Counts are of elements. In place
 * is what it is in NCCL: sendbuff == recvbuff; of AllGather sendbuff == recvbuff + rank *
 * sendcount, of ReduceScatter recvbuff == sendbuff + rank * recvcount. Otherwise buffers do not
 * overlap.
 */
ubcollResult_t ubcollAllReduce(const void *sendbuff, void *recvbuff, size_t count,
        ubcollDataType_t datatype, ubcollRedOp_t op, ubcollComm_t comm, ubcollRequest_t *request);
/* recvbuff is the root's alone. */
ubcollResult_t ubcollReduce(const void *sendbuff, void *recvbuff, size_t count,
        ubcollDataType_t datatype, ubcollRedOp_t op, int root, ubcollComm_t comm,
        ubcollRequest_t *request);
/* sendbuff is the root's alone. */
ubcollResult_t ubcollBroadcast(const void *sendbuff, void *recvbuff, size_t count,
        ubcollDataType_t datatype, int root, ubcollComm_t comm, ubcollRequest_t *request);
ubcollResult_t ubcollAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
        ubcollDataType_t datatype, ubcollComm_t comm, ubcollRequest_t *request);
ubcollResult_t ubcollReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
        ubcollDataType_t datatype, ubcollRedOp_t op, ubcollComm_t comm, ubcollRequest_t *request);
/* count to and from each rank; never in place. */
ubcollResult_t ubcollAllToAll(const void *sendbuff, void *recvbuff, size_t count,
        ubcollDataType_t datatype, ubcollComm_t comm, ubcollRequest_t *request);
/* sendcounts[r] to rank r, recvcounts[r] from it; blocks lie in the order of ranks. */
ubcollResult_t ubcollAllToAllv(const void *sendbuff, const size_t *sendcounts, void *recvbuff,
        const size_t *recvcounts, ubcollDataType_t datatype, ubcollComm_t comm,
        ubcollRequest_t *request);
/* No rank is done before all have asked for it. */
ubcollResult_t ubcollBarrier(ubcollComm_t comm, ubcollRequest_t *request);

/*
 * Of two ranks; others have no part in it. What one sends another is received in its order; it
 * waits for nothing else.
 */
ubcollResult_t ubcollSend(const void *sendbuff, size_t count, ubcollDataType_t datatype, int peer,
        ubcollComm_t comm, ubcollRequest_t *request);
ubcollResult_t ubcollRecv(void *recvbuff, size_t count, ubcollDataType_t datatype, int peer,
        ubcollComm_t comm, ubcollRequest_t *request);

/*
 * The same with a tag: a receive takes what was sent with its tag. Of several that wait for one
 * rank, the first begins whose tag has come; what comes before its receive is asked for holds up
 * what the same rank sends behind it. Without a tag is with tag 0.
 */
ubcollResult_t ubcollSendTag(const void *sendbuff, size_t count, ubcollDataType_t datatype,
        int peer, uint64_t tag, ubcollComm_t comm, ubcollRequest_t *request);
/*
 * From whichever rank sends first with that tag, unless a receive from that rank takes it; not in
 * groups, and always with a request. It is an error if nothing comes for as long as an operation
 * may stand still. ubcollRequestSource says from whom it was, once the request is over and before
 * it is ended.
 */
#define UBCOLL_ANY_SOURCE (-1)
ubcollResult_t ubcollRecvTag(void *recvbuff, size_t count, ubcollDataType_t datatype, int peer,
        uint64_t tag, ubcollComm_t comm, ubcollRequest_t *request);

/*
 * What this thread asks for in between, on whatever communicators, is begun when the (outermost)
 * group ends: all of it, or, if anything was refused, nothing. Then those without a request are
 * waited for.
 */
ubcollResult_t ubcollGroupStart(void);
ubcollResult_t ubcollGroupEnd(void);

/*
 * A request that is over is gone: *done is 1, or the result is not ubcollSuccess. Operations go on
 * whether or not anybody waits; who tests or waits does their work, and otherwise a thread of the
 * communicator, which sleeps between looks, does.
 */
ubcollResult_t ubcollRequestTest(ubcollRequest_t request, int *done);
ubcollResult_t ubcollRequestWait(ubcollRequest_t request);
/* All of them, whatever comes of each; the first error. */
ubcollResult_t ubcollRequestWaitAll(const ubcollRequest_t *requests, size_t count);
/* Asleep: the core is free for others. */
ubcollResult_t ubcollRequestSleep(ubcollRequest_t request, uint32_t timeoutMs, int *done);

/*
 * For several threads that wait for one request: does its work until it is over, or for timeoutMs
 * (UINT32_MAX: no limit). The request stays; one of the functions above says what came of it and
 * ends it.
 */
ubcollResult_t ubcollRequestDrive(ubcollRequest_t request, uint32_t timeoutMs, int *done);

/* Of a request that is over: what the functions above would give, which it is still there for. */
ubcollResult_t ubcollRequestResult(ubcollRequest_t request);
/* Of a receive from any rank that is over, and was not ended: from whom it was. -1 of any other. */
ubcollResult_t ubcollRequestSource(ubcollRequest_t request, int *rank);

/*
 * A queue tells of requests that are over: each request puts its tag in once, whatever came of it.
 * Any number of threads may wait on a queue, asleep; destroying it wakes them. A request can be
 * told of in one queue, and stays until one of the functions above ends it.
 */
typedef struct ubcollQueue *ubcollQueue_t;
ubcollResult_t ubcollQueueCreate(ubcollQueue_t *queue);
ubcollResult_t ubcollRequestNotify(ubcollRequest_t request, ubcollQueue_t queue, uint64_t tag);
/*
 * *got is 1 and *tag one that was put in, or *got is 0: the time is over, or the queue was
 * destroyed. UINT32_MAX: no limit.
 */
ubcollResult_t ubcollQueueWait(ubcollQueue_t queue, uint32_t timeoutMs, uint64_t *tag, int *got);
ubcollResult_t ubcollQueueDestroy(ubcollQueue_t queue);

#ifdef __cplusplus
}
#endif

#endif
