/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that a program has unmapped and not deregistered: nothing of the library is ever mapped
 * there, whatever the library does meanwhile, so a peer's WRITE finds no memory, and fails.
 *
 *   holes
 */
#include "pair.h"
#include <sys/mman.h>

enum { HOLE = 1 << 20, HOLES = 8, BIG_QUEUE = 16384 };

static struct pair p;

/* What is mapped in a hole, or nothing. */
static void stays_empty(const uint8_t *hole, const char *after)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];

    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;

        if (sscanf(line, "%lx-%lx", &from, &to) == 2 && from < (uintptr_t)hole + HOLE &&
            to > (uintptr_t)hole)
            fail("after %s there is a mapping in unmapped memory at %p: %s", after, hole, line);
    }
    if (!maps || fclose(maps))
        fail("/proc/self/maps: %s", strerror(errno));
}

/* A WRITE of a fresh pair of QPs into the hole. */
static void write_into(uint64_t at, uint32_t rkey)
{
    struct ibv_cq *cq = ibv_create_cq(p.context, BIG_QUEUE, NULL, NULL, 0);
    struct ibv_sge sge = { (uintptr_t)p.memory, 4096, p.mr->lkey };
    struct ibv_send_wr wr = { .sg_list = &sge,
                              .num_sge = 1,
                              .opcode = IBV_WR_RDMA_WRITE,
                              .wr.rdma = { at, rkey } },
                       *bad;
    uint64_t until = now_us() + 20 * 1000000;
    struct ibv_wc wc;

    p.from = make_qp(&p, cq);
    p.to = make_qp(&p, cq);
    connect_qp(&p, p.from, p.to, 1);
    connect_qp(&p, p.to, p.from, 1);
    check(ibv_post_send(p.from, &wr, &bad), "ibv_post_send");
    while (!ibv_poll_cq(cq, 1, &wc))
        if (now_us() > until)
            fail("no completion");
    if (wc.status != IBV_WC_REM_ACCESS_ERR)
        fail("a WRITE into unmapped memory: %s", ibv_wc_status_str(wc.status));
    check(ibv_destroy_qp(p.from), "ibv_destroy_qp");
    check(ibv_destroy_qp(p.to), "ibv_destroy_qp");
    check(ibv_destroy_cq(cq), "ibv_destroy_cq");
}

int main(void)
{
    int devices = 0;
    struct ibv_device **list = ibv_get_device_list(&devices);
    struct ibv_context *other;

    open_first(&p, 1);
    p.sgid_index = test_gid_index();
    check(ibv_query_gid(p.context, 1, p.sgid_index, &p.gid), "ibv_query_gid");
    for (int i = 0; i < HOLES; i++) {
        uint8_t *hole =
            mmap(NULL, HOLE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        struct ibv_mr *mr =
            hole == MAP_FAILED
                ? NULL
                : ibv_reg_mr(p.pd, hole, HOLE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);

        if (!mr)
            fail("cannot register memory: %s", strerror(errno));
        check(munmap(hole, HOLE), "munmap");
        other = devices > 1 ? ibv_open_device(list[1 + i % (devices - 1)]) : NULL;
        stays_empty(hole, "opening a device");
        write_into((uintptr_t)hole + 8192, mr->rkey);
        stays_empty(hole, "a WRITE");
        if (other && ibv_close_device(other))
            fail("ibv_close_device");
        stays_empty(hole, "closing a device");
        check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    }
    printf("%d holes stayed empty\n", HOLES);
    return 0;
}
