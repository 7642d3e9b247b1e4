/* See provider_infiniband.c. */
#ifndef PROVIDER_INFINIBAND_H
#define PROVIDER_INFINIBAND_H

#include <infiniband/verbs.h>

/* A context was opened. */
void infiniband_context(struct ibv_context *context);
/* What a port says of itself. */
void infiniband_port(struct ibv_port_attr *attr);
/* A GID of a device's table. */
void infiniband_gid(const char *device, union ibv_gid *gid);
/* Whether a packet leaves a device by that path, as it is for the copy then. 0: see errno. */
int infiniband_path(struct ibv_context *context, const char *device, struct ibv_ah_attr *path);

#endif
