/*
 * What Unbroken adds to the SDR API: registration of memory, errors in words, and attributes that the published header does not have.
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

/* Memory that messages are sent from and received into. It stays the program's, and mapped, until it is deregistered. */
struct sdr_mr *sdr_mr_reg(struct sdr_context *ctx, void *address, size_t length);
/* What is in use by messages stays registered until they are complete. */
int sdr_mr_dereg(struct sdr_mr *mr);

/* What was wrong with this thread's last call that failed, and what would be right; "" before the first. Valid until its next one. */
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
struct sdr_qp *sdr_qp_create_ext(struct sdr_context *ctx, struct sdr_qp_attr *qp_attr, const struct sdr_qp_attr_ext *ext);

struct sdr_qp_counters {
	uint64_t packets_sent;
	uint64_t packets_received;
	uint64_t duplicates;
	uint64_t late;      /* came after their message was completed; nothing was changed by them */
	uint64_t outside;   /* beyond their message */
	uint64_t under_runs; /* a queue of receives was found empty: packets may have been lost for it */
	uint64_t strangers; /* control messages that were not the peer's */
};

int sdr_qp_counters_get(struct sdr_qp *qp, struct sdr_qp_counters *counters);

#ifdef __cplusplus
}
#endif

#endif
