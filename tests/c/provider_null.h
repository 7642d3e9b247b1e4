/* See provider_null.c. */
#ifndef PROVIDER_NULL_H
#define PROVIDER_NULL_H

#include <infiniband/verbs.h>

/* A context was opened, and a QP made: with TEST_PROVIDER_NULL they do nothing. */
void null_context(struct ibv_context *context);
void null_qp(struct ibv_qp *qp, const struct ibv_qp_init_attr *init);

#endif
