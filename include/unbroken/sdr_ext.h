/*
 * Extensions of the SDR API: memory registration, error messages, attributes that the published
 * header does not have, and reliable writes.
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
 * Registers memory for sending and receiving. The program owns the memory, and must keep it mapped
 * until it is deregistered.
 */
struct sdr_mr *sdr_mr_reg(struct sdr_context *ctx, void *address, size_t length);
/* Memory in use by messages stays registered until they complete. */
int sdr_mr_dereg(struct sdr_mr *mr);

/*
 * The error message of this thread's last failed call, with what is valid; "" before the first.
 * Valid until the next failed call.
 */
const char *sdr_last_error(void);

struct sdr_qp_attr_ext {
    uint32_t generations;        /* generations of message IDs: 1 to 16 */
    uint32_t packet_lifetime_ms; /* the longest time that a packet may be in transit */
    uint8_t id_bits;             /* bits of the immediate: for the message, */
    uint8_t offset_bits;         /* for the packet, */
    uint8_t user_bits;           /* for the user; 32 bits in total */
};

/* Sets the values of sdr_qp_create: four generations, two seconds, 10 + 18 + 4 bits. */
void sdr_qp_attr_ext_init(struct sdr_qp_attr_ext *ext);
struct sdr_qp *sdr_qp_create_ext(struct sdr_context *ctx, struct sdr_qp_attr *qp_attr,
        const struct sdr_qp_attr_ext *ext);

struct sdr_qp_counters {
    uint64_t packets_sent;
    uint64_t packets_received;
    uint64_t duplicates;
    /*
     * packets that arrived after their message had completed, and had no effect. NICs with memory
     * windows drop them without counting
     */
    uint64_t late;
    uint64_t outside;   /* packets beyond the end of their message */
    /* a receive queue was empty: packets may have been lost */
    uint64_t under_runs;
    uint64_t strangers; /* control messages from unknown senders */
};

int sdr_qp_counters_get(struct sdr_qp *qp, struct sdr_qp_counters *counters);

/*
 * Reliable writes: each completes, with all bytes in place or with an error by its deadline. The
 * n-th write of one end is written into the n-th read of the other. Reliable writes need a
 * dedicated queue pair that sends and receives at both ends; do not use sdr_send_* and sdr_recv_*
 * on it.
 */
struct sdr_reliable;
struct sdr_transfer;

enum sdr_scheme {
    SDR_SCHEME_SR_RTO,  /* Selective Repeat: lost data is retransmitted after a timeout */
    SDR_SCHEME_SR_NACK, /* ... or as soon as the receiver reports it as missing */
    SDR_SCHEME_EC_MDS,  /* erasure coding, Reed-Solomon */
    SDR_SCHEME_EC_XOR,  /* erasure coding, XOR */
    /* the best scheme for each message, by the model, for the measured loss and round trip */
    SDR_SCHEME_ADAPTIVE
};

struct sdr_reliable_attr {
    enum sdr_scheme scheme;     /* for this end's writes; the other end may use another */
    uint32_t data_chunks;       /* with EC: chunks of a submessage, 1 to 128, */
    uint32_t parity_chunks;     /* and their parity chunks, 1 to 32 */
    /* adaptive: the quantile of the write time to minimise, in parts per million; 0: the mean */
    uint32_t objective_ppm;
    /*
     * the most parity chunks for 1000 chunks of a message: 0 to 1000, the same at both ends, and
     * enough for the codes of both
     */
    uint32_t parity_per_mille;
    uint32_t rate_limit;        /* for this end's writes, in Mbit/s; 0: none */
    uint32_t first_rtt_us;      /* the round trip until one has been measured */
    uint32_t least_rto_us;      /* the shortest timeout: longer than a busy receiver may wait */
    uint32_t deadline_ms;       /* how long a write or a read may take */
    /*
     * the most memory for parity, in messages; a write without parity memory uses Selective Repeat
     */
    uint32_t scratch_messages;
};

/* Sets defaults: SDR_SCHEME_SR_NACK, no parity, no rate, 50 ms, 5 ms, 10 s, 64. */
void sdr_reliable_attr_init(struct sdr_reliable_attr *attr);
struct sdr_reliable *sdr_reliable_create(struct sdr_qp *qp, const struct sdr_reliable_attr *attr);
/*
 * Releases the handle and those of its transfers. Outstanding transfers continue until the queue
 * pair is destroyed, which also releases all handles.
 */
int sdr_reliable_destroy(struct sdr_reliable *reliable);

struct sdr_reliable_wr {
    uint64_t address;
    uint64_t length;
    uint32_t lkey;
};

/* Writes into the peer's next read, which must be large enough. SDR_RETRY: too many are queued. */
int sdr_reliable_write_post(struct sdr_reliable *reliable, const struct sdr_reliable_wr *wr,
        struct sdr_transfer **transfer);
/* Receives the peer's next write. */
int sdr_reliable_read_post(struct sdr_reliable *reliable, const struct sdr_reliable_wr *wr,
        struct sdr_transfer **transfer);
/*
 * Waits up to timeout_ms for the completion of a transfer; 0: does not wait. SDR_RETRY: it has not
 * completed. SDR_SUCCESS, with its length in bytes (unless NULL), and SDR_ERROR: it has completed,
 * the handle is released, and its memory belongs to the program again. The memory stays registered
 * until then.
 */
int sdr_transfer_poll(struct sdr_transfer *transfer, uint32_t timeout_ms, uint64_t *bytes);

struct sdr_reliable_counters {
    uint64_t chunks_sent;      /* including parity */
    uint64_t chunks_repeated;  /* retransmitted chunks among them */
    uint64_t chunks_recovered; /* recovered from parity, at this end */
    uint64_t rtt_us;           /* 0: not measured yet */
    uint64_t loss_ppm;         /* the estimated loss, in chunks of a million */
};

int sdr_reliable_counters_get(struct sdr_reliable *reliable,
        struct sdr_reliable_counters *counters);

#ifdef __cplusplus
}
#endif

#endif
