/* What InfiniBand's ports of provider.c are like, beyond what the copy's are: an HCA sends by LID
 * alone, so a path without one is refused, and so is a global route to a GID that no port has.
 *
 * TEST_PROVIDER_LMC: ports have 2 to this power of LIDs. TEST_PROVIDER_SUBNETS: each device of a
 * host is in a subnet of its own, with a prefix of its own, and nothing leads from one to another.
 * (The global headers that arrive keep the copy's prefix.) */
#include "provider_infiniband.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* In the copy's LIDs: the NIC of a port. */
#define NIC_OF_LID 0x3f
/* Where the number of a subnet is in a GID. */
#define SUBNET_BYTE 7

static unsigned lmc(void)
{
    const char *text = getenv("TEST_PROVIDER_LMC");
    return text ? atoi(text) : 0;
}

/* The number of a device's subnet; 0: there is one subnet. */
static unsigned subnet(const char *device)
{
    return getenv("TEST_PROVIDER_SUBNETS") ? atoi(device + strlen(device) - 1) + 1 : 0;
}

static int is_infiniband(struct ibv_context *context, uint8_t port)
{
    struct ibv_port_attr attr;
    return !ibv_query_port(context, port, &attr) && attr.link_layer == IBV_LINK_LAYER_INFINIBAND;
}

void infiniband_port(struct ibv_port_attr *attr)
{
    if (attr->link_layer != IBV_LINK_LAYER_INFINIBAND)
        return;
    attr->lmc = lmc();
    attr->lid <<= lmc();
}

void infiniband_gid(const char *device, union ibv_gid *gid)
{
    if (gid->raw[0] == 0xfe && subnet(device))
        gid->raw[SUBNET_BYTE] = subnet(device);
}

int infiniband_path(struct ibv_context *context, const char *device, struct ibv_ah_attr *path)
{
    unsigned own = subnet(device), to = path->grh.dgid.raw[SUBNET_BYTE];

    if (!is_infiniband(context, path->port_num))
        return 1;
    errno = EINVAL;
    if (!path->dlid || (path->is_global && memcmp(path->grh.dgid.raw, "\xfe\x80", 2)))
        return 0;
    path->dlid >>= lmc();
    errno = ETIMEDOUT;
    if (own && ((path->dlid & NIC_OF_LID) != own - 1 || (path->is_global && to && to != own)))
        return 0;
    path->grh.dgid.raw[SUBNET_BYTE] = 0;
    return 1;
}

static int (*real_poll)(struct ibv_cq *, int, struct ibv_wc *);

static int poll(struct ibv_cq *cq, int count, struct ibv_wc *wc)
{
    int n = real_poll(cq, count, wc);

    for (int i = 0; i < n; i++)
        wc[i].slid <<= lmc();
    return n;
}

void infiniband_context(struct ibv_context *context)
{
    if (!lmc() || context->ops.poll_cq == poll)
        return;
    real_poll = context->ops.poll_cq;
    context->ops.poll_cq = poll;
}
