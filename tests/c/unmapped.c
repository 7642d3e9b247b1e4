/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that is read-only, unmapped, protected or cut short, before or under a registration: an
 * error where a NIC would say one, and never a signal. A handler of the program's own gets its own
 * faults, installed before or after the registration.
 *
 *   unmapped
 */
#include "pair.h"
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

enum {
    SIZE = 64 * 1024,
    ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
          IBV_ACCESS_REMOTE_ATOMIC
};
enum how { UNMAP, READ_ONLY, NONE, TRUNCATE, HOWS };
enum what { SEND_FROM, SEND_TO, WRITE_FROM, WRITE_TO, READ_FROM, READ_TO, ADD_AT, SWAP_AT, WHATS };

static const char *how_name[] = { "unmapped", "read-only", "without rights", "cut short" };
static const char *what_name[] = {
    "SEND from", "SEND to", "WRITE from",       "WRITE to",
    "READ from", "READ to", "fetch and add at", "compare and swap at"
};
static struct pair p;
static sigjmp_buf out;
static volatile sig_atomic_t faults;

static void on_fault(int number)
{
    (void)number;
    faults++;
    siglongjmp(out, 1);
}

/* The program's own fault comes to its own handler. */
static void own_fault(void)
{
    volatile int *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int before = faults;

    if (!sigsetjmp(out, 1))
        *nowhere = 1;
    if (faults != before + 1)
        fail("the program's own fault did not come to its handler");
    munmap((void *)nowhere, 4096);
}

static void *fresh(int *fd)
{
    void *at;

    *fd = memfd_create("unmapped", MFD_CLOEXEC);
    if (*fd < 0 || ftruncate(*fd, SIZE))
        fail("memfd: %s", strerror(errno));
    at = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    if (at == MAP_FAILED)
        fail("mmap: %s", strerror(errno));
    return at;
}

static void spoil(void *at, int fd, enum how how)
{
    switch (how) {
    case UNMAP: check(munmap(at, SIZE), "munmap"); break;
    case READ_ONLY: check(mprotect(at, SIZE, PROT_READ), "mprotect"); break;
    case NONE: check(mprotect(at, SIZE, PROT_NONE), "mprotect"); break;
    default: check(ftruncate(fd, 0), "ftruncate"); break;
    }
}

static struct ibv_wc next(struct ibv_cq *cq, const char *what)
{
    uint64_t until = now_us() + 20 * 1000000;
    struct ibv_wc wc;

    while (!ibv_poll_cq(cq, 1, &wc))
        if (now_us() > until)
            fail("%s: no completion", what);
    return wc;
}

static void one(enum how how, enum what what, uint32_t bytes)
{
    struct ibv_cq *sends = ibv_create_cq(p.context, 8, NULL, NULL, 0),
                  *receives = ibv_create_cq(p.context, 8, NULL, NULL, 0);
    struct ibv_qp_init_attr init = { .send_cq = sends,
                                     .recv_cq = receives,
                                     .qp_type = IBV_QPT_RC,
                                     .sq_sig_all = 1,
                                     .cap = { 8, 8, 1, 1, 0 } };
    int at_peer = what == SEND_TO || what == WRITE_TO || what == READ_FROM || what >= ADD_AT, fd,
        good_fd;
    uint8_t *bad = fresh(&fd), *good = fresh(&good_fd), *local = at_peer ? good : bad,
            *remote = at_peer ? bad : good;
    struct ibv_mr *bad_mr = ibv_reg_mr(p.pd, bad, SIZE, ALL),
                  *good_mr = ibv_reg_mr(p.pd, good, SIZE, ALL);
    struct ibv_mr *local_mr = at_peer ? good_mr : bad_mr, *remote_mr = at_peer ? bad_mr : good_mr;
    struct ibv_sge sge = { (uintptr_t)local, bytes, local_mr->lkey },
                   to = { (uintptr_t)remote, bytes, remote_mr->lkey };
    struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad_wr;
    struct ibv_recv_wr recv = { .sg_list = &to, .num_sge = 1 }, *bad_recv;
    enum ibv_wc_status right = at_peer ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_PROT_ERR;
    /* What only reads does not mind that it must not write. */
    int fine = how == READ_ONLY && (what == SEND_FROM || what == WRITE_FROM || what == READ_FROM);
    struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
    char name[100];
    struct ibv_wc wc;

    (void)attr;
    snprintf(name, sizeof name, "%s %s memory, %u bytes", what_name[what], how_name[how], bytes);
    p.from = ibv_create_qp(p.pd, &init);
    p.to = ibv_create_qp(p.pd, &init);
    connect_qp(&p, p.from, p.to, 1);
    connect_qp(&p, p.to, p.from, 1);
    attr = (struct ibv_qp_attr){ .qp_access_flags = ALL };
    check(ibv_modify_qp(p.to, &attr, IBV_QP_ACCESS_FLAGS), "access flags");
    wr.opcode = what <= SEND_TO    ? IBV_WR_SEND
                : what <= WRITE_TO ? IBV_WR_RDMA_WRITE
                : what <= READ_TO  ? IBV_WR_RDMA_READ
                : what == ADD_AT   ? IBV_WR_ATOMIC_FETCH_AND_ADD
                                   : IBV_WR_ATOMIC_CMP_AND_SWP;
    if (what >= ADD_AT) {
        sge.length = 8;
        wr.wr.atomic.remote_addr = (uintptr_t)remote;
        wr.wr.atomic.rkey = remote_mr->rkey;
    } else {
        wr.wr.rdma.remote_addr = (uintptr_t)remote;
        wr.wr.rdma.rkey = remote_mr->rkey;
    }
    spoil(bad, fd, how);
    if (what <= SEND_TO)
        check(ibv_post_recv(p.to, &recv, &bad_recv), "ibv_post_recv");
    check(ibv_post_send(p.from, &wr, &bad_wr), "ibv_post_send");
    wc = next(sends, name);
    if (what == SEND_TO)
        right = IBV_WC_REM_OP_ERR;
    if (fine)
        right = IBV_WC_SUCCESS;
    if (wc.status != right)
        fail("%s: %s, %s is right", name, ibv_wc_status_str(wc.status), ibv_wc_status_str(right));
    if (what == SEND_TO && (wc = next(receives, name)).status != IBV_WC_LOC_PROT_ERR)
        fail("%s: the receive says %s", name, ibv_wc_status_str(wc.status));
    check(ibv_destroy_qp(p.from), "ibv_destroy_qp");
    check(ibv_destroy_qp(p.to), "ibv_destroy_qp");
    check(ibv_destroy_cq(sends), "ibv_destroy_cq");
    check(ibv_destroy_cq(receives), "ibv_destroy_cq");
    check(ibv_dereg_mr(bad_mr), "ibv_dereg_mr");
    check(ibv_dereg_mr(good_mr), "ibv_dereg_mr");
    if (how != UNMAP)
        munmap(bad, SIZE);
    munmap(good, SIZE);
    close(fd);
    close(good_fd);
}

static void expect_efault(void *at, int access, const char *what)
{
    errno = 0;
    if (ibv_reg_mr(p.pd, at, SIZE, access) || errno != EFAULT)
        fail("registration of %s: %s, not EFAULT", what, strerror(errno));
}

static void registration(void)
{
    int fd;
    void *at = fresh(&fd);
    struct ibv_mr *mr;

    check(mprotect(at, SIZE, PROT_READ), "mprotect");
    expect_efault(at, IBV_ACCESS_LOCAL_WRITE, "read-only memory to write");
    mr = ibv_reg_mr(p.pd, at, SIZE, IBV_ACCESS_REMOTE_READ);
    if (!mr)
        fail("read-only memory cannot be registered to be read: %s", strerror(errno));
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    check(mprotect((char *)at + SIZE / 2, 4096, PROT_NONE), "mprotect");
    expect_efault(at, 0, "memory with a page in it that has no rights");
    munmap((char *)at + SIZE / 2, 4096);
    expect_efault(at, 0, "memory with a hole");
    munmap(at, SIZE);
    at = fresh(&fd);
    check(ftruncate(fd, SIZE / 2), "ftruncate");
    expect_efault(at, 0, "memory behind the end of a file");
}

int main(void)
{
    struct sigaction action = { .sa_handler = on_fault }, old;
    int how, what;

    signal(SIGBUS, on_fault);
    open_first(&p, 1);
    registration();
    /* SIGSEGV's handler comes late: it is the program's, and ours stays before it. */
    check(sigaction(SIGSEGV, &action, &old), "sigaction");
    if (old.sa_handler != SIG_DFL || sigaction(SIGSEGV, NULL, &old) || old.sa_handler != on_fault ||
        signal(SIGBUS, on_fault) != on_fault)
        fail("sigaction tells of another handler than the program's");
    own_fault();
    for (how = 0; how < HOWS; how++)
        for (what = 0; what < WHATS; what++) {
            one(how, what, 8);
            if (what < ADD_AT) {
                one(how, what, 1000);
                one(how, what, SIZE);
            }
            own_fault();
        }
    printf("%d own faults, none of the network's\n", (int)faults);
    return faults == 1 + HOWS * WHATS ? 0 : 1;
}
