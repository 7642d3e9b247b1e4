/*
 * SDR: messages over unreliable RDMA whose receiver sees, chunk by chunk, what has come.
 *
 * The names are those of the published SDR header, so that programs written to it compile. What
 * they do where it leaves that open is said here; more is in docs/guide/sdr.md. Link with
 * -lunbroken_sdr. Functions may be called from any thread; one handle is used by one thread at a
 * time.
 *
 * Every int is an sdr_errcode. After SDR_ERROR or a NULL, sdr_last_error() of sdr_ext.h says what
 * was wrong and what would be right.
 *
 * Licence: Apache-2.0
 */
#ifndef UNBROKEN_SDR_H
#define UNBROKEN_SDR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct sdr_context;
struct sdr_qp;
struct sdr_send_handle;
struct sdr_recv_handle;

enum sdr_errcode {
    SDR_SUCCESS = 0,
    SDR_ERROR = 1, /* never so; a handle that was wrong stays wrong */
    SDR_RETRY = 2  /* not now: resources are in use, or it has not come yet */
};

enum sdr_mtu {
    SDR_MTU_64,
    SDR_MTU_128,
    SDR_MTU_256,
    SDR_MTU_512,
    SDR_MTU_1024,
    SDR_MTU_2048,
    SDR_MTU_4096
};

struct sdr_dev_attr {
    uint32_t num_channels; /* each has a worker; 1 to 64 */
    uint32_t log_max_qps;  /* log2 of the most queue pairs */
};

enum sdr_wr_opcode { SDR_WR_WRITE, SDR_WR_WRITE_WITH_IMM };

struct sdr_qp_attr {
    uint32_t bitmap_chunk_size_log_bytes;
    size_t max_in_flight_log_bytes; /* the longest message has 2^(this - max_log_num_msgs) bytes */
    uint32_t max_log_num_msgs;
    enum sdr_mtu mtu;
    uint8_t send_enable;
    uint8_t recv_enable;
    uint32_t rate_limit; /* of sends, in Mbit/s; 0: none */
};

struct sdr_send_wr {
    enum sdr_wr_opcode opcode;
    uint32_t imm_value; /* with SDR_WR_WRITE_WITH_IMM */
    uint32_t length;
    uint32_t lkey;
    uint64_t local_addr;
    uint64_t remote_offset; /* in chunks of the receive */
};

struct sdr_send_start_wr {
    enum sdr_wr_opcode opcode;
    uint32_t imm_value;
};

struct sdr_send_continue_wr {
    uint32_t length;
    uint64_t local_addr;
    uint32_t lkey;
    uint64_t remote_offset; /* in chunks of the receive */
};

struct sdr_recv_wr {
    uint32_t max_length;
    uint32_t lkey;
    uint64_t address;
};

struct sdr_send_status {
    uint32_t flags; /* always 0 */
};

/*
 * dev_name: unb0, unb1, ..., or several with commas: channel c is on the c-th of them, modulo their
 * number. NULL: unb0.
 */
struct sdr_context *sdr_context_create(const char *dev_name, struct sdr_dev_attr *dev_attr);
/* SDR_ERROR while it has queue pairs. */
int sdr_context_destroy(struct sdr_context *context);

/* Uses all channels of the context. */
struct sdr_qp *sdr_qp_create(struct sdr_context *ctx, struct sdr_qp_attr *qp_attr);
/* Ends all its sends and receives; their handles are wrong from then on. */
int sdr_qp_destroy(struct sdr_qp *qp);
int sdr_qp_info_size_get(struct sdr_qp *qp, size_t *info_size);
/* info: a buffer of that size, to be brought to the peer by any way. */
int sdr_qp_info_get(struct sdr_qp *qp, void *info);
/* SDR_ERROR where the peer's attributes differ; the error names the attribute. */
int sdr_qp_connect(struct sdr_qp *qp, void *remote_qp_info);

/*
 * The peer's send of the same number goes there. SDR_RETRY: all slots are in use, or this one's
 * earlier use is younger than the packet lifetime.
 */
int sdr_recv_post(struct sdr_qp *qp, struct sdr_recv_wr *wr, struct sdr_recv_handle **handle);
/* SDR_RETRY until all fragments of the immediate have come. */
int sdr_recv_imm_get(struct sdr_recv_handle *handle, uint32_t *immediate);
/*
 * Bit c % 8 of byte c / 8 is set once chunk c is whole. The bitmap is filled while the program
 * looks on, until the receive is completed; read it as volatile, and read memory behind a set bit
 * with acquire order.
 */
int sdr_recv_bitmap_get(struct sdr_recv_handle *handle, uint8_t **bitmap_bytes,
        size_t *bitmap_num_bytes);
/* The packets of a chunk: bit p % 64 of word p / 64. What a last chunk lacks counts as there. */
int sdr_recv_bitmap_chunk_expand(struct sdr_recv_handle *handle, uint32_t chunk_offset,
        uint64_t *bitmap);
/*
 * Whatever has come: when it returns SDR_SUCCESS, no late packet changes the buffer, and the handle
 * is gone.
 */
int sdr_recv_complete(struct sdr_recv_handle *handle);

int sdr_send_post(struct sdr_qp *qp, struct sdr_send_wr *wr, struct sdr_send_handle **handle);
int sdr_streaming_send_start(struct sdr_qp *qp, struct sdr_send_start_wr *wr,
        struct sdr_send_handle **handle);
/* A chunk may be sent again and again. SDR_RETRY: too many pieces wait for the receive. */
int sdr_streaming_send_continue(struct sdr_send_handle *handle, struct sdr_send_continue_wr *wr);
int sdr_streaming_send_end(struct sdr_send_handle *handle);
/*
 * SDR_SUCCESS and *completed 1: its buffer is the program's again, and the handle is gone. That
 * anything has arrived is not said. SDR_RETRY and *completed 0: not yet. After SDR_ERROR the handle
 * is gone, too. status may be NULL.
 */
int sdr_send_poll(struct sdr_send_handle *handle, int *completed, struct sdr_send_status *status);

#ifdef __cplusplus
}
#endif

#endif
