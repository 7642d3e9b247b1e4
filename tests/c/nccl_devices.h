/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for NCCL: devices. What it asks of each, in its order, and a thread for their events. */
#ifndef UNBROKEN_TESTS_NCCL_DEVICES_H
#define UNBROKEN_TESTS_NCCL_DEVICES_H

#include "nccl_verbs.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>

enum { MAX_DEVICES = 32, EVENT_TYPES = 32 };

/* Counted by threads of events, looked at by whoever posts or polls. QPs and CQs carry a pointer to
 * one as their context. */
struct stats {
    atomic_int fatal;
};

struct device {
    char name[64], pci_path[PATH_MAX];
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_port_attr port;
    struct stats stats;
    uint64_t mbps;
    int port_num, dmabuf_errno, adaptive_routing;
};

static struct device devices[MAX_DEVICES];
static int device_count;
/* How often each type of event came, on any device. */
static atomic_int events_heard[EVENT_TYPES], fatal_events;

static void fatal(struct stats *stats)
{
    atomic_fetch_add(&stats->fatal, 1);
    atomic_fetch_add(&fatal_events, 1);
}

/* Ends the program where an event of a device, QP or CQ has said that it is lost. */
static void check_fatal(struct stats *stats, const char *where)
{
    if (atomic_load_explicit(&stats->fatal, memory_order_relaxed))
        fail("a fatal event was heard before %s", where);
}

static void query_lost_qp(const struct device *d, struct ibv_qp *qp)
{
    struct ibv_qp_init_attr init = { 0 };
    struct ibv_qp_attr attr = { 0 };

    verbs.query_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_RQ_PSN, &init);
    fprintf(stderr, "%s: QP %u is in state %d\n", d->name, qp->qp_num, attr.qp_state);
}

static void hear(struct device *d, const struct ibv_async_event *event)
{
    fprintf(stderr, "%s: event '%s'\n", d->name, verbs.event_type_str(event->event_type));
    if ((int)event->event_type < EVENT_TYPES)
        atomic_fetch_add(&events_heard[event->event_type], 1);
    switch (event->event_type) {
    case IBV_EVENT_DEVICE_FATAL:
        fatal(&d->stats);
        break;
    case IBV_EVENT_CQ_ERR:
        fatal(event->element.cq->cq_context);
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
        query_lost_qp(d, event->element.qp);
        fatal(event->element.qp->qp_context);
        break;
    default:
        break;
    }
}

static void *hear_events(void *of)
{
    struct device *d = of;
    struct ibv_async_event event;

    while (!verbs.get_async_event(d->context, &event)) {
        hear(d, &event);
        verbs.ack_async_event(&event);
    }
    return NULL;
}

/* The text of a file; empty if there is none. */
static void read_text(const char *path, char *text, size_t room)
{
    int file = open(path, O_RDONLY);
    ssize_t n = file < 0 ? 0 : read(file, text, room - 1);

    text[n < 0 ? 0 : n] = 0;
    if (file >= 0)
        close(file);
}

/* The PCI device, and what the topology takes from it. */
static void read_pci(struct device *d)
{
    static const char *const files[] = { "class", "vendor", "device", "max_link_speed",
                                         "max_link_width", "numa_node" };
    char path[PATH_MAX + 32], bus[PATH_MAX + 32], text[64], *id;
    char *real;

    snprintf(path, sizeof path, "/sys/class/infiniband/%s/device", d->name);
    real = have(realpath(path, NULL), path);
    snprintf(d->pci_path, sizeof d->pci_path, "%s", real);
    free(real);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", d->pci_path, files[i]);
        read_text(path, text, sizeof text);
        if (!text[0])
            fail("nothing in %s", path);
    }
    /* Found by its bus ID again, as the topology is. */
    id = strrchr(d->pci_path, '/') + 1;
    snprintf(bus, sizeof bus, "/sys/class/pci_bus/%.*s/../../%s", 7, id, id);
    real = have(realpath(bus, NULL), bus);
    if (strcmp(real, d->pci_path))
        fail("%s is %s, not %s", bus, real, d->pci_path);
    free(real);
}

/* Asks for more than this libibverbs knows of (a longer port_attr), then for what it knows. */
static void query_port(struct ibv_context *context, int port, struct ibv_port_attr *attr)
{
    struct {
        struct ibv_port_attr attr;
        uint32_t active_speed_ex, guard[8];
    } more;
    const size_t size = offsetof(typeof(more), guard);
    struct verbs_context *extended = verbs_get_ctx_op(context, query_port);

    memset(&more, 0, sizeof more);
    memset(more.guard, 0x5a, sizeof more.guard);
    if (extended && !extended->query_port(context, port, &more.attr, size)) {
        for (size_t i = 0; i < 8; i++)
            if (more.guard[i] != 0x5a5a5a5a)
                fail("query_port wrote behind the %zu bytes that it was given", size);
        *attr = more.attr;
        return;
    }
    memset(attr, 0, sizeof *attr);
    need(verbs.query_port(context, port, attr), "ibv_query_port");
}

static uint64_t port_mbps(struct ibv_context *context, int port, const struct ibv_port_attr *attr)
{
    static const int lanes[] = { 1, 4, 8, 12, 2 };
    static const int mbps[] = { 2500, 5000, 10000, 10000, 14000, 25000, 50000, 100000, 200000 };
    size_t lane = 0, speed = 0;
    uint64_t of_100_mbps;

    if (verbs.query_port_speed && !verbs.query_port_speed(context, port, &of_100_mbps))
        return of_100_mbps * 100;
    while (lane < 4 && !(attr->active_width & 1 << lane))
        lane++;
    while (speed < 8 && !(attr->active_speed & 1 << speed))
        speed++;
    return (uint64_t)mbps[speed] * lanes[lane];
}

/* Whether the kernel has dma-buf for this device: a region of no file fails in one way or another.
 * Gives the errno: EBADF if it has, EOPNOTSUPP or EPROTONOSUPPORT if not. */
static int probe_dmabuf(struct ibv_context *context)
{
    struct ibv_pd *pd = have(verbs.alloc_pd(context), "ibv_alloc_pd");
    int error;

    errno = EOPNOTSUPP;
    if (verbs.reg_dmabuf_mr && verbs.reg_dmabuf_mr(pd, 0, 0, 0, -1, 0))
        fail("ibv_reg_dmabuf_mr made a region of no file");
    error = errno;
    need(verbs.dealloc_pd(pd), "ibv_dealloc_pd");
    if (error != EOPNOTSUPP && error != EPROTONOSUPPORT && error != EBADF)
        fail("ibv_reg_dmabuf_mr of no file: %s", strerror(error));
    return error;
}

static void take_port(struct ibv_context *context, const char *name, int port_num)
{
    struct device *d = &devices[device_count];
    pthread_t thread;

    memset(d, 0, sizeof *d);
    query_port(context, port_num, &d->port);
    if (d->port.state != IBV_PORT_ACTIVE || (d->port.link_layer != IBV_LINK_LAYER_ETHERNET &&
                                             d->port.link_layer != IBV_LINK_LAYER_INFINIBAND))
        return;
    d->mbps = port_mbps(context, port_num, &d->port);
    d->context = context;
    d->port_num = port_num;
    d->adaptive_routing = d->port.link_layer == IBV_LINK_LAYER_INFINIBAND;
    snprintf(d->name, sizeof d->name, "%s", name);
    read_pci(d);
    if (pthread_create(&thread, NULL, hear_events, d) || pthread_detach(thread))
        fail("no thread for events");
    device_count++;
}

static void open_devices(void)
{
    struct ibv_device **list;
    int count = 0;

    find_verbs();
    find_mlx5();
    need(verbs.fork_init(), "ibv_fork_init");
    list = have(verbs.get_device_list(&count), "ibv_get_device_list");
    for (int i = 0; i < count && device_count < MAX_DEVICES; i++) {
        struct ibv_context *context = have(verbs.open_device(list[i]), "ibv_open_device");
        struct ibv_device_attr attr = { 0 };
        int before = device_count;

        if (mlx5dv_is_ours && mlx5dv_is_ours(list[i]))
            fail("libmlx5 takes %s for its own", list[i]->name);
        need(verbs.query_device(context, &attr), "ibv_query_device");
        for (int port = 1; port <= attr.phys_port_cnt && device_count < MAX_DEVICES; port++)
            take_port(context, verbs.get_device_name(list[i]), port);
        if (device_count == before)
            need(verbs.close_device(context), "ibv_close_device");
    }
    verbs.free_device_list(list);
    if (!device_count)
        fail("no port of %d devices is active", count);
    for (int i = 0; i < device_count; i++)
        devices[i].dmabuf_errno = probe_dmabuf(devices[i].context);
}

/* The ports of `names`, as in "unb0" or "unb0:1+unb0:2", with a NULL behind the last. Without a
 * number it is the first port. */
static void find_devices(const char *names, struct device **found, int room)
{
    char copy[256], *rest = copy, *name;
    int n = 0;

    snprintf(copy, sizeof copy, "%s", names);
    while ((name = strsep(&rest, "+"))) {
        char *colon = strchr(name, ':');
        int port = colon ? atoi(colon + 1) : 1, i = 0;

        if (colon)
            *colon = 0;
        while (i < device_count && (strcmp(devices[i].name, name) || devices[i].port_num != port))
            i++;
        if (i == device_count)
            fail("no device '%s' whose port %d is active", name, port);
        if (n == room - 1)
            fail("'%s' are more than %d devices", names, room - 1);
        found[n++] = &devices[i];
    }
    found[n] = NULL;
}

/* 1 or 2: the version of RoCE of a GID; 0 if nothing says so. */
static int roce_version(const struct device *d, int index)
{
    char path[PATH_MAX], text[16];

    snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/%d/gid_attrs/types/%d", d->name,
             d->port_num, index);
    read_text(path, text, sizeof text);
    return strstr(text, "RoCE v2") ? 2 : strstr(text, "RoCE v1") ? 1 : 0;
}

static int is_ipv4(const union ibv_gid *gid)
{
    static const uint8_t mapped[12] = { [10] = 0xff, 0xff };

    return !memcmp(gid->raw, mapped, sizeof mapped);
}

static int is_usable(const union ibv_gid *gid)
{
    static const union ibv_gid none;

    return memcmp(gid, &none, sizeof none) && !(gid->raw[0] == 0xfe && gid->raw[1] == 0x80);
}

/* The GID that connections use: of IPv4 and RoCE v2 where there is one. Every entry is asked. */
static int choose_gid(const struct device *d)
{
    int chosen = 0;

    if (d->port.link_layer == IBV_LINK_LAYER_INFINIBAND)
        return 0;
    for (int i = 1; i < d->port.gid_tbl_len; i++) {
        union ibv_gid now, next;

        need(verbs.query_gid(d->context, d->port_num, chosen, &now), "ibv_query_gid");
        need(verbs.query_gid(d->context, d->port_num, i, &next), "ibv_query_gid");
        if (!is_ipv4(&next))
            continue;
        if (!is_ipv4(&now))
            chosen = i;
        else if (is_usable(&next) && roce_version(d, i) == 2 &&
                 (roce_version(d, chosen) != 2 || !is_usable(&now)))
            chosen = i;
    }
    return chosen;
}

#endif
