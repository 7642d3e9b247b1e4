/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What Open MPI and UCX do to a process: the C library's functions for memory are overwritten with
 * jumps to functions of the program's own, as soon as a device is open and while no other thread is
 * stopped. A thread that is inside of one of them returns into the middle of another instruction,
 * and the process dies.
 *
 *   patched NIC DELAY_US
 *
 * Opens the device, overwrites so much later, registers memory, closes. Status 77: only x86-64 is
 * known here.
 */
#include "common.h"
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#ifndef __x86_64__
int main(void)
{
    return 77;
}
#else

enum { BYTES = 1 << 20, PAGE = 4096 };

static volatile unsigned calls;

static long raw(long nr, long a, long b, long c, long d, long e, long f)
{
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;

    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    if (result < 0 && result > -4096) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

static void *own_mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    return (void *)raw(SYS_mmap, (long)at, (long)n, prot, flags, fd, offset);
}

static int own_munmap(void *at, size_t n)
{
    return (int)raw(SYS_munmap, (long)at, (long)n, 0, 0, 0, 0);
}

static int own_madvise(void *at, size_t n, int advice)
{
    return (int)raw(SYS_madvise, (long)at, (long)n, advice, 0, 0, 0);
}

/* The thirteen bytes of Open MPI's patcher: movabs $to, %r11; jmp *%r11. */
static void overwrite(void *function, void *to)
{
    unsigned char jump[13] = { 0x49, 0xbb, 0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0xff, 0xe3 };
    char *page = (char *)((uintptr_t)function & ~(uintptr_t)(PAGE - 1));

    memcpy(jump + 2, &to, sizeof to);
    if (mprotect(page, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC))
        fail("the C library's code cannot be written: %s", strerror(errno));
    memcpy(function, jump, sizeof jump);
    if (mprotect(page, 2 * PAGE, PROT_READ | PROT_EXEC))
        fail("mprotect: %s", strerror(errno));
}

int main(int argc, char **argv)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_context *context = NULL;
    struct ibv_pd *pd;
    struct ibv_mr *mr;
    void *at;

    for (int i = 0; argc == 3 && list && list[i]; i++)
        if (!strcmp(ibv_get_device_name(list[i]), argv[1]))
            context = ibv_open_device(list[i]);
    if (!context)
        fail("usage: patched NIC DELAY_US; the NIC opens");
    for (uint64_t until = now_us() + (uint64_t)atoi(argv[2]); now_us() < until;)
        ;
    overwrite((void *)madvise, (void *)own_madvise);
    overwrite((void *)munmap, (void *)own_munmap);
    overwrite((void *)mmap, (void *)own_mmap);

    pd = ibv_alloc_pd(context);
    at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mr = pd && at != MAP_FAILED ? ibv_reg_mr(pd, at, BYTES, IBV_ACCESS_LOCAL_WRITE) : NULL;
    if (!mr || !calls)
        fail("registration behind the patches: %s, %u calls came by them", strerror(errno), calls);
    if (ibv_dereg_mr(mr) || munmap(at, BYTES) || ibv_dealloc_pd(pd) || ibv_close_device(context))
        fail("tear-down: %s", strerror(errno));
    ibv_free_device_list(list);
    return 0;
}
#endif
