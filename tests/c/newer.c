/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Functions that a program which was built against a newer libibverbs calls with objects of ours:
 * registration by attributes, buffers and the speed of a port work; the others answer EOPNOTSUPP,
 * and none crashes. They are taken by dlsym, as the installed header may lack them.
 *
 *   newer NAME...    also: each function NAME is there
 */
#include "pair.h"
#include <dlfcn.h>

enum { IOVA = 1, ADDR = 2, FD = 4, FD_OFFSET = 8, DMAH = 16, BUF = 32, BUFFER_BYTES = 10000 };

/* struct ibv_mr_init_attr. */
struct attributes {
    size_t length;
    int access;
    uint64_t comp_mask, iova;
    void *addr;
    int fd;
    uint64_t fd_offset;
    void *dmah, *buf;
};

static struct pair p;

static void *function(const char *name)
{
    void *f = dlsym(RTLD_DEFAULT, name);

    if (!f)
        fail("there is no %s", name);
    return f;
}

static void expect(const char *what, int error, int expected)
{
    if (error != expected)
        fail("%s: %d (%s), not %d", what, error, strerror(error), expected);
}

/* Calls NAME with so many zeros behind our context: a pointer with errno, or an error number. */
static void absent_object(const char *name)
{
    void *(*f)(void *, void *) = function(name);

    errno = 0;
    if (f(p.context, NULL))
        fail("%s made something", name);
    expect(name, errno, EOPNOTSUPP);
}

static void absent_verb(const char *name)
{
    int (*f)(void *, void *, void *) = function(name);

    expect(name, f(p.context, NULL, NULL), EOPNOTSUPP);
}

static void registration(void)
{
    struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct attributes *) = function("ibv_reg_mr_ex");
    struct attributes a = {
        .length = 64, .access = IBV_ACCESS_LOCAL_WRITE, .comp_mask = ADDR, .addr = p.memory
    };
    struct ibv_mr *mr = reg_mr_ex(p.pd, &a);
    int wrong[][2] = { { FD | FD_OFFSET | IOVA, EOPNOTSUPP },
                       { FD, EINVAL },
                       { FD | ADDR, EINVAL },
                       { ADDR | DMAH, EOPNOTSUPP },
                       { ADDR | 1 << 20, EOPNOTSUPP },
                       { 0, EINVAL },
                       { IOVA, EINVAL } };
    size_t i;

    if (!mr || mr->addr != p.memory || mr->length != 64 || !mr->lkey)
        fail("ibv_reg_mr_ex: %s", strerror(errno));
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    a.comp_mask |= IOVA;
    a.iova = 0x1000;
    mr = reg_mr_ex(p.pd, &a);
    if (!mr)
        fail("ibv_reg_mr_ex with iova: %s", strerror(errno));
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    for (i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        a.comp_mask = wrong[i][0];
        errno = 0;
        if (reg_mr_ex(p.pd, &a))
            fail("ibv_reg_mr_ex took comp_mask %#x", wrong[i][0]);
        expect("ibv_reg_mr_ex", errno, wrong[i][1]);
    }
}

static void buffers(void)
{
    void *(*alloc_buf)(struct ibv_pd *, size_t, void **) = function("ibv_alloc_buf");
    struct ibv_mr *(*reg_buf_mr)(struct ibv_pd *, void *, void *, size_t, int) =
        function("ibv_reg_buf_mr");
    struct ibv_mr *(*reg_mr_ex)(struct ibv_pd *, struct attributes *) = function("ibv_reg_mr_ex");
    int (*export)(void *) = function("ibv_export_buf_dmabuf_fd");
    void (*free_buf)(void *) = function("ibv_free_buf");
    struct ibv_pd *other = ibv_alloc_pd(p.context);
    struct attributes a = { .length = 1, .comp_mask = ADDR | BUF };
    void *buf, *memory = alloc_buf(p.pd, BUFFER_BYTES, &buf);
    struct ibv_mr *mr;

    if (!memory || (uintptr_t)memory % 4096)
        fail("ibv_alloc_buf: %p, %s", memory, strerror(errno));
    memset(memory, 1, BUFFER_BYTES);
    mr = reg_buf_mr(p.pd, buf, (char *)memory + 100, BUFFER_BYTES - 100, IBV_ACCESS_LOCAL_WRITE);
    if (!mr)
        fail("ibv_reg_buf_mr: %s", strerror(errno));
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    a.addr = memory;
    a.buf = buf;
    mr = reg_mr_ex(p.pd, &a);
    if (!mr)
        fail("ibv_reg_mr_ex of a buffer: %s", strerror(errno));
    check(ibv_dereg_mr(mr), "ibv_dereg_mr");
    errno = 0;
    if (reg_buf_mr(p.pd, buf, memory, BUFFER_BYTES + 1, 0) || errno != EINVAL)
        fail("ibv_reg_buf_mr beyond the buffer: %s", strerror(errno));
    errno = 0;
    if (reg_buf_mr(other, buf, memory, 1, 0) || errno != EINVAL)
        fail("ibv_reg_buf_mr with another domain: %s", strerror(errno));
    errno = 0;
    if (export(buf) != -1 || errno != ENODATA)
        fail("ibv_export_buf_dmabuf_fd: %s", strerror(errno));
    errno = 0;
    if (alloc_buf(p.pd, 0, &buf) || errno != EINVAL)
        fail("ibv_alloc_buf of nothing: %s", strerror(errno));
    free_buf(buf);
    free_buf(NULL);
    check(ibv_dealloc_pd(other), "ibv_dealloc_pd");
}

static void speed(void)
{
    int (*query)(struct ibv_context *, uint32_t, uint64_t *) = function("ibv_query_port_speed");
    uint64_t units = 0;

    expect("ibv_query_port_speed", query(p.context, 1, &units), 0);
    if (units != 1000)
        fail("a port of %d times 100 Mbit/s", (int)units);
    expect("ibv_query_port_speed of port 9", query(p.context, 9, &units), EINVAL);
    expect("ibv_query_port_speed of port 257", query(p.context, 257, &units), EINVAL);
}

int main(int argc, char **argv)
{
    int (*export)(void *) = function("ibv_dm_export_dmabuf_fd");
    int i;

    open_first(&p, 1);
    registration();
    buffers();
    speed();
    absent_object("ibv_alloc_dmah");
    absent_object("ibv_create_comp_cntr");
    for (i = 0; i < 10; i++)
        absent_verb((const char *[]){ "ibv_dealloc_dmah", "_ibv_query_comp_cntr_caps",
                                      "ibv_destroy_comp_cntr", "ibv_set_comp_cntr",
                                      "ibv_set_err_comp_cntr", "ibv_inc_comp_cntr",
                                      "ibv_inc_err_comp_cntr", "ibv_read_comp_cntr",
                                      "ibv_read_err_comp_cntr", "ibv_qp_attach_comp_cntr" }[i]);
    errno = 0;
    if (export(NULL) != -1 || errno != EOPNOTSUPP)
        fail("ibv_dm_export_dmabuf_fd: %s", strerror(errno));
    for (i = 1; i < argc; i++)
        function(argv[i]);
    printf("%d functions are there\n", argc - 1);
    return 0;
}
