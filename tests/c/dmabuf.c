/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions of dma-bufs. A file in memory stands for a GPU's: what is registered is its descriptor,
 * and the addresses that work requests name are those of the network alone.
 *
 * usage: dmabuf SECONDS   writes from one such region to another, and looks at each; prints `flows`
 * when it begins, and the number of writes at the end. With 0 seconds it prints what the probe of
 * NCCL says: the errno of a region of no descriptor.
 */
#define _GNU_SOURCE
#include "pair.h"
#include <sys/mman.h>

enum { BYTES = 65536, LIMIT_US = 60 * 1000000 };
/* Where no memory of this process is. */
static const uint64_t FROM = 1ull << 40, TO = 1ull << 41;

static struct pair pair;

/* A region of a file's second part, and where this process sees it. */
static struct ibv_mr *make(uint64_t iova, uint64_t **seen)
{
    int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_RELAXED_ORDERING;
    int fd = memfd_create("dma-buf", MFD_CLOEXEC);
    struct ibv_mr *mr;

    if (fd < 0 || ftruncate(fd, 2 * BYTES))
        fail("memfd_create: %s", strerror(errno));
    *seen = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, BYTES);
    mr = ibv_reg_dmabuf_mr(pair.pd, BYTES, BYTES, iova, fd, rights);
    if (*seen == MAP_FAILED || !mr)
        fail("ibv_reg_dmabuf_mr: %s", strerror(errno));
    if (mr->addr != (void *)iova || mr->length != BYTES)
        fail("the region has address %p and %zu bytes", mr->addr, mr->length);
    close(fd); /* as programs do once it is registered */
    return mr;
}

int main(int argc, char **argv)
{
    int seconds = argc > 1 ? atoi(argv[1]) : 0;
    uint64_t *from, *to, until, sent = 0;
    struct ibv_mr *source, *target;
    struct ibv_cq *cq;
    struct ibv_wc wc;
    int n;

    pair.sgid_index = test_gid_index();
    open_first(&pair, 1);
    if (ibv_query_gid(pair.context, 1, pair.sgid_index, &pair.gid))
        fail("no GID at index %d", pair.sgid_index);
    errno = 0;
    if (ibv_reg_dmabuf_mr(pair.pd, 0, 0, 0, -1, 0))
        fail("a region of no descriptor was made");
    printf("probe: %s\n", strerrorname_np(errno));
    if (!seconds)
        return 0;
    source = make(FROM, &from);
    target = make(TO, &to);
    cq = ibv_create_cq(pair.context, 2 * PAIR_DEPTH, NULL, NULL, 0);
    pair.from = make_qp(&pair, cq);
    pair.to = make_qp(&pair, cq);
    connect_qp(&pair, pair.from, pair.to, 1);
    connect_qp(&pair, pair.to, pair.from, 1);
    puts("flows");
    fflush(stdout);
    for (until = now_us() + seconds * 1000000ull; now_us() < until; sent++) {
        struct ibv_sge sge = { FROM + 64, BYTES - 64, source->lkey };
        struct ibv_send_wr wr = { .wr_id = sent, .sg_list = &sge, .num_sge = 1 }, *bad;
        uint64_t limit = now_us() + LIMIT_US;

        from[8] = from[BYTES / 8 - 1] = sent + 1;
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.wr.rdma.remote_addr = TO + 64;
        wr.wr.rdma.rkey = target->rkey;
        check(ibv_post_send(pair.from, &wr, &bad), "ibv_post_send");
        while (!(n = ibv_poll_cq(cq, 1, &wc)))
            if (now_us() > limit)
                fail("no completion of write %llu", (unsigned long long)sent);
        if (n != 1 || wc.status || wc.wr_id != sent)
            fail("write %llu: poll gives %d, status '%s'", (unsigned long long)sent, n,
                 ibv_wc_status_str(wc.status));
        if (to[8] != sent + 1 || to[BYTES / 8 - 1] != sent + 1 || to[7])
            fail("write %llu has not arrived", (unsigned long long)sent);
    }
    check(ibv_dereg_mr(source), "ibv_dereg_mr");
    check(ibv_dereg_mr(target), "ibv_dereg_mr");
    printf("%llu writes\n", (unsigned long long)sent);
    return 0;
}
