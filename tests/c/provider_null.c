/* A provider that does nothing, with TEST_PROVIDER_NULL: RC QPs of provider.c take what is
 * posted and complete it at once, without a network. What a call costs beyond that is the cost of
 * whoever calls it. Completions are polled by the thread that posts. */
#include "provider_null.h"
#include <errno.h>
#include <stdlib.h>

/* Completions that wait, of each of the first CQs that RC QPs send by. */
enum { CQS = 16, DEPTH = 4096 };

static struct null_cq {
    struct ibv_cq *cq;
    int all; /* its QPs tell of every send */
    unsigned head, tail;
    struct ibv_wc wcs[DEPTH];
} *null_cqs[CQS];

static int (*real_post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
static int (*real_post_recv)(struct ibv_qp *, struct ibv_recv_wr *, struct ibv_recv_wr **);
static int (*real_poll)(struct ibv_cq *, int, struct ibv_wc *);

static struct null_cq *of(struct ibv_cq *cq)
{
    for (int i = 0; i < CQS && null_cqs[i]; i++)
        if (null_cqs[i]->cq == cq)
            return null_cqs[i];
    return NULL;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct null_cq *one = qp->qp_type == IBV_QPT_RC ? of(qp->send_cq) : NULL;

    if (!one)
        return real_post_send(qp, wr, bad);
    for (; wr; wr = wr->next) {
        if (one->tail - one->head == DEPTH) {
            *bad = wr;
            return ENOMEM;
        }
        if (one->all || wr->send_flags & IBV_SEND_SIGNALED) {
            struct ibv_wc *wc = &one->wcs[one->tail++ % DEPTH];
            wc->wr_id = wr->wr_id;
            wc->qp_num = qp->qp_num;
            wc->opcode = IBV_WC_RDMA_WRITE;
        }
    }
    return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return qp->qp_type == IBV_QPT_RC ? 0 : real_post_recv(qp, wr, bad);
}

static int poll(struct ibv_cq *cq, int count, struct ibv_wc *wc)
{
    struct null_cq *one = of(cq);
    int n = 0;

    if (!one)
        return real_poll(cq, count, wc);
    for (; n < count && one->head != one->tail; n++)
        wc[n] = one->wcs[one->head++ % DEPTH];
    return n;
}

void null_context(struct ibv_context *context)
{
    if (!getenv("TEST_PROVIDER_NULL") || context->ops.poll_cq == poll)
        return;
    real_post_send = context->ops.post_send;
    real_post_recv = context->ops.post_recv;
    real_poll = context->ops.poll_cq;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    context->ops.poll_cq = poll;
}

void null_qp(struct ibv_qp *qp, const struct ibv_qp_init_attr *init)
{
    int i = 0;

    if (!qp || !getenv("TEST_PROVIDER_NULL") || qp->qp_type != IBV_QPT_RC || of(qp->send_cq))
        return;
    while (i < CQS && null_cqs[i])
        i++;
    if (i == CQS || !(null_cqs[i] = calloc(1, sizeof(*null_cqs[i]))))
        return;
    null_cqs[i]->cq = qp->send_cq;
    null_cqs[i]->all = init->sq_sig_all;
}
