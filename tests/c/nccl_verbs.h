/* SPDX-License-Identifier: Apache-2.0 */
/* The verbs that the stand-in for NCCL calls, found as NCCL finds them: by dlopen and dlvsym. */
#ifndef UNBROKEN_TESTS_NCCL_VERBS_H
#define UNBROKEN_TESTS_NCCL_VERBS_H

#include "common.h"
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdbool.h>

#undef ibv_reg_mr
#undef ibv_query_port

static struct {
    struct ibv_device **(*get_device_list)(int *);
    void (*free_device_list)(struct ibv_device **);
    const char *(*get_device_name)(struct ibv_device *);
    struct ibv_context *(*open_device)(struct ibv_device *);
    int (*close_device)(struct ibv_context *);
    int (*get_async_event)(struct ibv_context *, struct ibv_async_event *);
    void (*ack_async_event)(struct ibv_async_event *);
    int (*query_device)(struct ibv_context *, struct ibv_device_attr *);
    int (*query_port)(struct ibv_context *, uint8_t, struct ibv_port_attr *);
    int (*query_gid)(struct ibv_context *, uint8_t, int, union ibv_gid *);
    int (*query_qp)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *);
    int (*dealloc_pd)(struct ibv_pd *);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
    int (*dereg_mr)(struct ibv_mr *);
    struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
    int (*destroy_cq)(struct ibv_cq *);
    struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
    int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
    int (*destroy_qp)(struct ibv_qp *);
    int (*fork_init)(void);
    const char *(*event_type_str)(enum ibv_event_type);
    /* These may be missing. */
    struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *, void *, size_t, uint64_t, unsigned int);
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
    int (*query_ece)(struct ibv_qp *, struct ibv_ece *);
    int (*set_ece)(struct ibv_qp *, struct ibv_ece *);
    int (*query_port_speed)(struct ibv_context *, uint32_t, uint64_t *);
} verbs;

/* Of libmlx5, which may be missing, too: whether a device is one of its own. */
static bool (*mlx5dv_is_ours)(struct ibv_device *);

/* The verbs that were found, and the optional ones that were not. */
static int verbs_found, verbs_missing;

/* Ends the program if a verb has failed that gives 0 or an errno. */
static inline void need(int error, const char *what)
{
    if (error)
        fail("%s: %s (%d)", what, strerror(error < 0 ? errno : error), error);
}

/* ... that gives a pointer, or NULL and errno. */
static inline void *have(void *made, const char *what)
{
    if (!made)
        fail("%s: %s", what, strerror(errno));
    return made;
}

static void find(void *library, const char *name, const char *version, void *function, int needed)
{
    void *found = dlvsym(library, name, version);

    if (!found && needed)
        fail("no %s of version %s: %s", name, version, dlerror());
    memcpy(function, &found, sizeof found);
    verbs_found += !!found;
    verbs_missing += !found;
}

static void find_verbs(void)
{
    void *library = dlopen("libibverbs.so", RTLD_NOW);

    if (!library)
        library = dlopen("libibverbs.so.1", RTLD_NOW);
    if (!library)
        fail("no libibverbs: %s", dlerror());
#define NEEDED(verb) find(library, "ibv_" #verb, "IBVERBS_1.1", &verbs.verb, 1)
#define OPTIONAL(verb, version) find(library, "ibv_" #verb, version, &verbs.verb, 0)
    NEEDED(get_device_list);
    NEEDED(free_device_list);
    NEEDED(get_device_name);
    NEEDED(open_device);
    NEEDED(close_device);
    NEEDED(get_async_event);
    NEEDED(ack_async_event);
    NEEDED(query_device);
    NEEDED(query_port);
    NEEDED(query_gid);
    NEEDED(query_qp);
    NEEDED(alloc_pd);
    NEEDED(dealloc_pd);
    NEEDED(reg_mr);
    OPTIONAL(reg_mr_iova2, "IBVERBS_1.8");
    OPTIONAL(reg_dmabuf_mr, "IBVERBS_1.12");
    NEEDED(dereg_mr);
    NEEDED(create_cq);
    NEEDED(destroy_cq);
    NEEDED(create_qp);
    NEEDED(modify_qp);
    NEEDED(destroy_qp);
    NEEDED(fork_init);
    NEEDED(event_type_str);
    OPTIONAL(query_ece, "IBVERBS_1.10");
    OPTIONAL(set_ece, "IBVERBS_1.10");
    OPTIONAL(query_port_speed, "IBVERBS_1.16");
#undef NEEDED
#undef OPTIONAL
}

static void find_mlx5(void)
{
    void *library = dlopen("libmlx5.so", RTLD_NOW), *found;

    if (!library)
        library = dlopen("libmlx5.so.1", RTLD_NOW);
    found = library ? dlvsym(library, "mlx5dv_is_supported", "MLX5_1.0") : NULL;
    if (library && !found)
        found = dlsym(library, "mlx5dv_is_supported");
    memcpy(&mlx5dv_is_ours, &found, sizeof found);
}

/* A verb that need not be there, or may be unsupported: whether it was done. */
static inline int done_if_there(int found, int error, const char *what)
{
    if (!found || error == ENOTSUP || error == EOPNOTSUPP)
        return 0;
    need(error, what);
    return 1;
}

#endif
