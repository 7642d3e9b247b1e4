/*
 * Collective operations that continue when NICs, ports, cables and switches fail. The functions
 * follow NCCL's header.
 *
 * Differences from NCCL: buffers are in host memory, and operations take a pointer to a request
 * instead of a stream. If the pointer is NULL, the call returns when this rank's part is complete
 * (in a group, when the group ends). Otherwise the operation is queued behind earlier ones and
 * proceeds in the background; its buffers belong to the library until the request completes. See
 * docs/guide/collectives.md. Link with -lunbroken_coll.
 *
 * Functions may be called from any thread. If a function does not return ubcollSuccess,
 * ubcollGetLastError() says what was wrong and what is valid. A broken communicator stays broken at
 * all ranks: destroy it and create another.
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
/* The ID of a communicator, as text padded with zeros. It contains a secret. */
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
     * ranks did not find each other: wrong ID, duplicate rank, different settings, or a missing
     * rank
     */
    ubcollInvalidUsage = 5,
    ubcollRemoteError = 6,     /* the communicator is broken, at all ranks */
    ubcollQueueFull = 100      /* nothing was done: wait for an outstanding operation */
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

/* The bitwise operations accept only integers. */
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
 * Zeros and NULLs select defaults. All ranks must use the same timeoutMs, anyOrder, logical and
 * shape.
 */
typedef struct {
    size_t size;
    /* host of the emulated network; NULL: the one that `unbroken run` has set (UNBROKEN_HOST) */
    const char *host;
    /*
     * address of this machine at which others reach this process; NULL: UNBROKEN_COLL_ADDRESS, or
     * else 127.0.0.1
     */
    const char *address;
    /*
     * how long an operation may make no progress, and how long ubcollCommDestroy waits for a rank
     * that receives nothing [20,000]
     */
    uint32_t timeoutMs;
    /* how long to wait for all ranks at the start [60,000, or timeoutMs if that is longer] */
    uint32_t patienceMs;
    /* the most outstanding operations, of all ranks and with each peer [256] */
    uint32_t queue;
    /*
     * allow results to differ by rounding when NICs fail; otherwise they are bit-for-bit the same
     */
    int anyOrder;
    int logical;         /* use queue pairs with failover */
    /*
     * the shape of operations that support it, by its name in docs/guide/collectives.md; shapes
     * that do not reduce in rank order need anyOrder. NULL: UNBROKEN_COLL_SHAPE, or else the
     * planner chooses
     */
    const char *shape;
} ubcollConfig_t;

#define UBCOLL_CONFIG_INITIALIZER { sizeof(ubcollConfig_t), NULL, NULL, 0, 0, 0, 0, 0, NULL }

/* 10,000 * major + 100 * minor + patch */
ubcollResult_t ubcollGetVersion(int *version);
const char *ubcollGetErrorString(ubcollResult_t result);
/*
 * The error message of this thread's last failed call; "" before the first. Valid until the next
 * failed call.
 */
const char *ubcollGetLastError(void);

/*
 * Call this in one process, and pass the ID to all ranks by any means. The ranks connect to this
 * process, which must live until all have connected.
 */
ubcollResult_t ubcollGetUniqueId(ubcollUniqueId *uniqueId);
/* Returns when all ranks have connected. */
ubcollResult_t ubcollCommInitRank(ubcollComm_t *comm, int nranks, ubcollUniqueId commId, int rank);
ubcollResult_t ubcollCommInitRankConfig(ubcollComm_t *comm, int nranks, ubcollUniqueId commId,
        int rank, const ubcollConfig_t *config);
#define UBCOLL_SPLIT_NOCOLOR (-1)
/*
 * Splits the ranks of comm into new communicators. Ranks with the same color form one, ordered by
 * key and, for equal keys, by their ranks in comm. A rank with a negative color joins none, and
 * *newcomm is NULL. All ranks of comm must call it, in the same order relative to other operations
 * of all ranks, and not in groups. comm is not changed, and may be destroyed before the new ones.
 * config: NULL to use the settings of comm; zeros and NULLs in it also use those, except for
 * anyOrder and logical. host must be NULL, because a rank cannot move.
 */
ubcollResult_t ubcollCommSplit(ubcollComm_t comm, int color, int key, ubcollComm_t *newcomm,
        const ubcollConfig_t *config);
/*
 * Announces to all ranks that this rank starts no more operations. Operations that need it and that
 * it has not started fail immediately, with an error that names it. If all ranks take part in such
 * an operation, the communicator is broken; if only two do, the others continue. Receives for which
 * nothing has arrived fail; other outstanding operations continue. Does not block.
 */
ubcollResult_t ubcollCommFinalize(ubcollComm_t comm);
/* Like ubcollCommFinalize, and waits for outstanding operations. */
ubcollResult_t ubcollCommDestroy(ubcollComm_t comm);
/*
 * Does not wait: all outstanding operations, here and at all other ranks, fail with an error that
 * names this rank.
 */
ubcollResult_t ubcollCommAbort(ubcollComm_t comm);
/* Replaces timeoutMs of the configuration at this rank, also for outstanding operations. */
ubcollResult_t ubcollCommSetTimeout(ubcollComm_t comm, uint32_t timeoutMs);
/*
 * ubcollSuccess, or the reason why the communicator is broken; ubcollGetLastError() has the text.
 */
ubcollResult_t ubcollCommGetAsyncError(ubcollComm_t comm, ubcollResult_t *asyncError);
ubcollResult_t ubcollCommCount(ubcollComm_t comm, int *count);
ubcollResult_t ubcollCommUserRank(ubcollComm_t comm, int *rank);

typedef struct {
    uint64_t operations;   /* completed */
    uint64_t pathsFailed;  /* failed paths to other ranks */
    uint64_t streamsMoved; /* moves of streams to another NIC, or back */
    uint64_t framesAgain;  /* frames sent again */
} ubcollCounters_t;

ubcollResult_t ubcollCommGetCounters(ubcollComm_t comm, ubcollCounters_t *counters);

/*
 * Operations of all ranks, which must call them in the same order. Counts are numbers of elements.
 * In-place operations are as in NCCL: sendbuff == recvbuff; for AllGather sendbuff == recvbuff +
 * rank * sendcount, for ReduceScatter recvbuff == sendbuff + rank * recvcount. Otherwise buffers
 * must not overlap.
 */
ubcollResult_t ubcollAllReduce(const void *sendbuff, void *recvbuff, size_t count,
        ubcollDataType_t datatype, ubcollRedOp_t op, ubcollComm_t comm, ubcollRequest_t *request);
/* recvbuff is used only at the root. */
ubcollResult_t ubcollReduce(const void *sendbuff, void *recvbuff, size_t count,
        ubcollDataType_t datatype, ubcollRedOp_t op, int root, ubcollComm_t comm,
        ubcollRequest_t *request);
/* sendbuff is used only at the root. */
ubcollResult_t ubcollBroadcast(const void *sendbuff, void *recvbuff, size_t count,
        ubcollDataType_t datatype, int root, ubcollComm_t comm, ubcollRequest_t *request);
ubcollResult_t ubcollAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
        ubcollDataType_t datatype, ubcollComm_t comm, ubcollRequest_t *request);
ubcollResult_t ubcollReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
        ubcollDataType_t datatype, ubcollRedOp_t op, ubcollComm_t comm, ubcollRequest_t *request);
/* count elements to and from each rank; not in place. */
ubcollResult_t ubcollAllToAll(const void *sendbuff, void *recvbuff, size_t count,
        ubcollDataType_t datatype, ubcollComm_t comm, ubcollRequest_t *request);
/* sendcounts[r] elements to rank r, recvcounts[r] from it; blocks are in rank order. */
ubcollResult_t ubcollAllToAllv(const void *sendbuff, const size_t *sendcounts, void *recvbuff,
        const size_t *recvcounts, ubcollDataType_t datatype, ubcollComm_t comm,
        ubcollRequest_t *request);
/* Completes at no rank before all have called it. */
ubcollResult_t ubcollBarrier(ubcollComm_t comm, ubcollRequest_t *request);

/*
 * Transfers between two ranks, without the others. Messages from one rank to another arrive in
 * order; transfers wait for no other operation.
 */
ubcollResult_t ubcollSend(const void *sendbuff, size_t count, ubcollDataType_t datatype, int peer,
        ubcollComm_t comm, ubcollRequest_t *request);
ubcollResult_t ubcollRecv(void *recvbuff, size_t count, ubcollDataType_t datatype, int peer,
        ubcollComm_t comm, ubcollRequest_t *request);

/*
 * The same with a tag: a receive accepts a message with its tag. Of several receives from one rank,
 * the first one whose tag has arrived starts. A message that arrives before its receive blocks
 * later messages of the same rank. Functions without a tag use tag 0.
 */
ubcollResult_t ubcollSendTag(const void *sendbuff, size_t count, ubcollDataType_t datatype,
        int peer, uint64_t tag, ubcollComm_t comm, ubcollRequest_t *request);
/*
 * Receives from the rank that sends first with that tag, unless a receive from that rank accepts
 * the message. Not in groups, and always with a request. Fails if nothing arrives within the
 * timeout. ubcollRequestSource returns the sender after the request has completed and before it is
 * released.
 */
#define UBCOLL_ANY_SOURCE (-1)
ubcollResult_t ubcollRecvTag(void *recvbuff, size_t count, ubcollDataType_t datatype, int peer,
        uint64_t tag, ubcollComm_t comm, ubcollRequest_t *request);

/*
 * Operations that this thread calls in between, on any communicators, start when the outermost
 * group ends: all of them, or none if any is refused. Then ubcollGroupEnd waits for those without a
 * request.
 */
ubcollResult_t ubcollGroupStart(void);
ubcollResult_t ubcollGroupEnd(void);

/*
 * These release a completed request: *done is 1, or the result is not ubcollSuccess. Operations
 * proceed whether or not a thread waits. A thread that tests or waits drives them; otherwise a
 * thread of the communicator does, which sleeps between polls.
 */
ubcollResult_t ubcollRequestTest(ubcollRequest_t request, int *done);
ubcollResult_t ubcollRequestWait(ubcollRequest_t request);
/* Waits for all of them, also after errors; returns the first error. */
ubcollResult_t ubcollRequestWaitAll(const ubcollRequest_t *requests, size_t count);
/* Sleeps while it waits, so the core is free for other threads. */
ubcollResult_t ubcollRequestSleep(ubcollRequest_t request, uint32_t timeoutMs, int *done);

/*
 * For several threads that wait for one request: drives it until it completes, or for timeoutMs
 * (UINT32_MAX: no limit). Does not release the request; one of the functions above returns its
 * result and releases it.
 */
ubcollResult_t ubcollRequestDrive(ubcollRequest_t request, uint32_t timeoutMs, int *done);

/* The result of a completed request, which is not released. */
ubcollResult_t ubcollRequestResult(ubcollRequest_t request);
/*
 * The sender of a completed receive from any rank that has not been released; -1 for other
 * requests.
 */
ubcollResult_t ubcollRequestSource(ubcollRequest_t request, int *rank);

/*
 * A queue reports completed requests: each request adds its tag once, whatever its result. Any
 * number of threads may sleep on a queue; destroying it wakes them. A request can be reported to
 * one queue, and exists until one of the functions above releases it.
 */
typedef struct ubcollQueue *ubcollQueue_t;
ubcollResult_t ubcollQueueCreate(ubcollQueue_t *queue);
ubcollResult_t ubcollRequestNotify(ubcollRequest_t request, ubcollQueue_t queue, uint64_t tag);
/*
 * *got is 1 and *tag is the tag of a completed request; or *got is 0: the timeout has passed, or
 * the queue was destroyed. UINT32_MAX: no limit.
 */
ubcollResult_t ubcollQueueWait(ubcollQueue_t queue, uint32_t timeoutMs, uint64_t *tag, int *got);
ubcollResult_t ubcollQueueDestroy(ubcollQueue_t queue);

#ifdef __cplusplus
}
#endif

#endif
