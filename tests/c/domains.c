/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Domains that are in use cannot be given up: thread domains by parent domains, parent domains and
 * protection domains by what lies in them.
 *
 *   domains
 */
#include "pair.h"

static struct pair p;

static void busy(int error, const char *what)
{
    if (error != EBUSY)
        fail("%s: %s, not EBUSY", what, strerror(error));
}

static struct ibv_pd *parent_of(struct ibv_td *td)
{
    struct ibv_parent_domain_init_attr attr = { .pd = p.pd, .td = td };
    struct ibv_pd *pd = ibv_alloc_parent_domain(p.context, &attr);

    if (!pd)
        fail("ibv_alloc_parent_domain: %s", strerror(errno));
    return pd;
}

int main(void)
{
    struct ibv_td_init_attr none = { 0 };
    struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 8, .max_sge = 1 } };
    struct ibv_pd *parent, *plain;
    struct ibv_td *td;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    struct ibv_mw *mw;
    struct ibv_qp *qp;
    struct ibv_srq *srq;

    open_first(&p, 1);
    td = ibv_alloc_td(p.context, &none);
    cq = ibv_create_cq(p.context, 64, NULL, NULL, 0);
    if (!td || !cq)
        fail("no thread domain or CQ: %s", strerror(errno));
    parent = parent_of(td);
    busy(ibv_dealloc_td(td), "a thread domain of a parent domain");
    plain = p.pd;
    busy(ibv_dealloc_pd(plain), "a protection domain with a parent domain");

    mr = ibv_reg_mr(parent, p.memory, sizeof p.memory, IBV_ACCESS_LOCAL_WRITE);
    busy(ibv_dealloc_pd(parent), "a parent domain with a region");
    check(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, plain, NULL, 0, 0), "ibv_rereg_mr");
    check(ibv_dealloc_pd(parent), "a parent domain whose region went to another");
    check(ibv_dealloc_td(td), "ibv_dealloc_td");
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");

    parent = parent_of(NULL);
    p.pd = parent;
    qp = make_qp(&p, cq);
    busy(ibv_dealloc_pd(parent), "a parent domain with a QP");
    check(ibv_destroy_qp(qp), "ibv_destroy_qp");
    srq = ibv_create_srq(parent, &srq_attr);
    busy(ibv_dealloc_pd(parent), "a parent domain with an SRQ");
    check(ibv_destroy_srq(srq), "ibv_destroy_srq");
    mw = ibv_alloc_mw(parent, IBV_MW_TYPE_1);
    if (mw) {
        busy(ibv_dealloc_pd(parent), "a parent domain with a window");
        check(ibv_dealloc_mw(mw), "ibv_dealloc_mw");
    }
    check(ibv_dealloc_pd(parent), "a parent domain that is empty");

    busy(ibv_dealloc_pd(plain), "a protection domain with a region");
    check(ibv_dereg_mr(p.mr), "ibv_dereg_mr");
    check(ibv_dealloc_pd(plain), "a protection domain that is empty");
    printf("what is in use stays\n");
    return 0;
}
