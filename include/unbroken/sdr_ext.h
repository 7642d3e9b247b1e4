/*
 * What Unbroken adds to the SDR API: registration of memory, errors in words, attributes that the
 * published header does not have, and reliable writes.
 *
 * Licence: Apache-2.0
 */
#ifndef UNBROKEN_SDR_EXT_H
#define UNBROKEN_SDR_EXT_H

#include "sdr.h"

#ifdef __cplusplus
extern "C" {
#endif

struct sdr_mr {
    uint64_t address;
    uint64_t length;
    uint32_t lkey; /* for work requests */
};

/*
 * Memory that messages are sent from and received into. It stays the program's, and mapped, until
 * it is deregistered.
 */
struct sdr_mr *sdr_mr_reg(struct sdr_context *ctx, void *address, size_t length);
/* What is in use by messages stays registered until they are complete. */
int sdr_mr_dereg(struct sdr_mr *mr);

/*
 * What was wrong with this thread's last call that failed, and what would be right; "" before the
 * first. Valid until its next one.
 */
const char *sdr_last_error(void);

struct sdr_qp_attr_ext {
    uint32_t generations;        /* of message ids: 1 to 16 */
    uint32_t packet_lifetime_ms; /* how long a packet may be on its way */
    uint8_t id_bits;             /* the immediate's split: message, */
    uint8_t offset_bits;         /* packet, */
    uint8_t user_bits;           /* user; 32 bits together */
};

/* Four generations, two seconds, 10 + 18 + 4: what sdr_qp_create uses. */
void sdr_qp_attr_ext_init(struct sdr_qp_attr_ext *ext);
struct sdr_qp *sdr_qp_create_ext(struct sdr_context *ctx, struct sdr_qp_attr *qp_attr,
        const struct sdr_qp_attr_ext *ext);

struct sdr_qp_counters {
    uint64_t packets_sent;
    uint64_t packets_received;
    uint64_t duplicates;
    /*
     * came after their message was completed; nothing was changed by them. NICs with memory windows
     * drop them uncounted
     */
    uint64_t late;
    uint64_t outside;   /* beyond their message */
    /* a queue of receives was found empty: packets may have been lost for it */
    uint64_t under_runs;
    uint64_t strangers; /* control messages that were not the peer's */
};

int sdr_qp_counters_get(struct sdr_qp *qp, struct sdr_qp_counters *counters);

/*
 * Reliable writes: every one ends, with all bytes in their place or with an error by its deadline.
 * The n-th write of one end goes into the n-th read of the other. They need a queue pair for
 * themselves that sends and receives at both ends; sdr_send_* and sdr_recv_* are not for it.
 */
struct sdr_reliable;
struct sdr_transfer;

enum sdr_scheme {
    SDR_SCHEME_SR_RTO,  /* Selective Repeat: what is lost is sent again after a timeout */
    SDR_SCHEME_SR_NACK, /* ... or as soon as the receiver misses it */
    SDR_SCHEME_EC_MDS,  /* erasure coding, Reed-Solomon */
    SDR_SCHEME_EC_XOR,  /* erasure coding, XOR */
    /* the best for each message by the model, for the loss and the round trip that are seen */
    SDR_SCHEME_ADAPTIVE
};

struct sdr_reliable_attr {
    enum sdr_scheme scheme;     /* of this end's writes; the other end may have another */
    uint32_t data_chunks;       /* with EC: chunks of a submessage, 1 to 128, */
    uint32_t parity_chunks;     /* and parity beside them, 1 to 32 */
    /*
     * adaptive: the time by which so many of a million writes are done is to be short; 0: the mean
     */
    uint32_t objective_ppm;
    /*
     * the most parity beside a message, of 1000 of its chunks: 0 to 1000, no less at either end
     * than any code needs; both the same
     */
    uint32_t parity_per_mille;
    uint32_t rate_limit;        /* of this end's writes, in Mbit/s; 0: none */
    uint32_t first_rtt_us;      /* the round trip until one has been measured */
    uint32_t least_rto_us;      /* the least timeout: above what a busy receiver waits for a core */
    uint32_t deadline_ms;       /* how long a write or a read may take */
    /* the most memory for parity, in messages; a write that finds none goes by Selective Repeat */
    uint32_t scratch_messages;
};

/* SDR_SCHEME_SR_NACK, no parity, no rate, 50 ms, 5 ms, 10 s, 64. */
void sdr_reliable_attr_init(struct sdr_reliable_attr *attr);
struct sdr_reliable *sdr_reliable_create(struct sdr_qp *qp, const struct sdr_reliable_attr *attr);
/*
 * The handle and its transfers' are given back. What is under way goes on until the queue pair is
 * destroyed, which gives back all of them, too.
 */
int sdr_reliable_destroy(struct sdr_reliable *reliable);

struct sdr_reliable_wr {
    uint64_t address;
    uint64_t length;
    uint32_t lkey;
};

/*
 * Into the peer's next read, which must have room for it. SDR_RETRY: too many wait for their turn.
 */
int sdr_reliable_write_post(struct sdr_reliable *reliable, const struct sdr_reliable_wr *wr,
        struct sdr_transfer **transfer);
/* The peer's next write goes there. */
int sdr_reliable_read_post(struct sdr_reliable *reliable, const struct sdr_reliable_wr *wr,
        struct sdr_transfer **transfer);
/*
 * Waits for the end of a transfer, up to timeout_ms; 0 waits for nothing. SDR_RETRY: it has not
 * ended yet. Else it has, its memory is the program's, and the handle is given back: SDR_SUCCESS,
 * and its bytes (unless NULL), or SDR_ERROR. Its memory stays registered until then.
 */
int sdr_transfer_poll(struct sdr_transfer *transfer, uint32_t timeout_ms, uint64_t *bytes);

struct sdr_reliable_counters {
    uint64_t chunks_sent;      /* parity included */
    uint64_t chunks_repeated;  /* of these, sent again */
    uint64_t chunks_recovered; /* from parity, at this end */
    uint64_t rtt_us;           /* 0: not measured yet */
    uint64_t loss_ppm;         /* of a million chunks so many are taken to be lost */
};

int sdr_reliable_counters_get(struct sdr_reliable *reliable,
        struct sdr_reliable_counters *counters);

#ifdef __cplusplus
}
#endif

#endif
