/* What devices of provider.c can be told to be like: smaller, of other networks, another device.
 *
 * TEST_PROVIDER_LIMITS: words as `unb1.max_qp_wr=64` and `*.max_cqe=128`; also max_sge,
 * max_qp_rd_atom, and hidden_sends, which RC QPs have at most and attributes do not tell. Queues of
 * QPs are rounded up to powers of two first, as mlx5 does.
 * TEST_PROVIDER_FOREIGN_GIDS: so many GIDs of other networks stand before the third of each port;
 * nothing leads from or to them. TEST_PROVIDER_ALONE: a device from and to which nothing leads.
 * TEST_PROVIDER_GUID_FILE: while that file is there, devices have other GUIDs.
 * TEST_PROVIDER_FIXED_CQS: the size of a CQ cannot be changed. TEST_PROVIDER_VECTORS: a file that
 * gets a line with the completion vector of each CQ.
 * TEST_PROVIDER_NULL: RC QPs do nothing, see provider_null.c.
 * TEST_PROVIDER_LOG: a file that gets a line for each QP, CQ, region, address handle and connection
 * that a device is asked for: what it is, the device, and numbers; and for each channel that ends,
 * or that is kept since a CQ has it. */
#include "provider_infiniband.h"
#include "provider_null.h"
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr_iova

void *provider_real(const char *name);
int provider_rails(struct ibv_pd *pd, struct ibv_ah_attr *to);
void provider_hang(const char *verb, struct ibv_context *context);

/* Calls the copy's function of that name. */
#define REAL(name, ...) ((__typeof__(&name))provider_real(#name))(__VA_ARGS__)

/* The GIDs made of a port's GUID stand before those of other networks. */
#define OWN_FIRST 2

static const char *name_of(struct ibv_context *context)
{
    return REAL(ibv_get_device_name, context->device);
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
    const char *path = getenv("TEST_PROVIDER_LOG");
    char line[200];
    FILE *file;
    va_list words;

    if (!path || !(file = fopen(path, "a")))
        return;
    va_start(words, format);
    vsnprintf(line, sizeof line, format, words);
    va_end(words);
    fputs(line, file); /* one write, so that lines of threads stay whole */
    fclose(file);
}

/* The most of something that a device has; -1: what the copy has. */
static long limit(struct ibv_context *context, const char *what)
{
    const char *at = getenv("TEST_PROVIDER_LIMITS"), *device = name_of(context);
    char word[100], names[2][100];

    snprintf(names[0], sizeof names[0], "%s.%s", device, what);
    snprintf(names[1], sizeof names[1], "*.%s", what);
    for (; at && *at; at += strcspn(at, " "), at += strspn(at, " ")) {
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, "= "), at);
        if (!strcmp(word, names[0]) || !strcmp(word, names[1]))
            return atol(strchr(at, '=') + 1);
    }
    return -1;
}

static int passes(struct ibv_context *context, const char *what, unsigned long wanted)
{
    long most = limit(context, what);
    return most < 0 || wanted <= (unsigned long)most;
}

static unsigned rounded(unsigned entries)
{
    unsigned all = 1;
    while (all < entries)
        all <<= 1;
    return all;
}

static unsigned foreign(void)
{
    const char *count = getenv("TEST_PROVIDER_FOREIGN_GIDS");
    return count ? atoi(count) : 0;
}

static int is_foreign(unsigned index)
{
    return index >= OWN_FIRST && index < OWN_FIRST + foreign();
}

static unsigned own_index(unsigned index)
{
    return index < OWN_FIRST ? index : index - foreign();
}

/* ::ffff:10.99.x.x */
static int leads_nowhere(const union ibv_gid *gid)
{
    static const unsigned char prefix[14] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 99};
    return !memcmp(gid->raw, prefix, sizeof prefix);
}

/* Whether something leads there by that path; the copy's path then. */
static int reaches(struct ibv_context *context, struct ibv_ah_attr *path)
{
    const char *alone = getenv("TEST_PROVIDER_ALONE"), *name = name_of(context);
    int is_alone = alone && (!strcmp(alone, name)
                             || alone[strlen(alone) - 1] - '0' == path->grh.dgid.raw[15]);

    if (is_alone || is_foreign(path->grh.sgid_index) || leads_nowhere(&path->grh.dgid)) {
        errno = ETIMEDOUT;
        return 0;
    }
    path->grh.sgid_index = own_index(path->grh.sgid_index);
    return infiniband_path(context, name, path);
}

__be64 ibv_get_device_guid(struct ibv_device *device)
{
    const char *file = getenv("TEST_PROVIDER_GUID_FILE");
    __be64 guid = REAL(ibv_get_device_guid, device);
    return file && !access(file, F_OK) ? guid ^ 1 : guid;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    provider_hang("query_device", context);
    int code = REAL(ibv_query_device, context, attr);
    long most;
#define CLAMP(field) \
    if ((most = limit(context, #field)) >= 0) \
        attr->field = most;
    CLAMP(max_qp_wr)
    CLAMP(max_sge)
    CLAMP(max_cqe)
    CLAMP(max_qp_rd_atom)
    attr->max_qp_init_rd_atom = attr->max_qp_rd_atom;
    return code;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
    provider_hang("query_port", context);
    int code = REAL(ibv_query_port, context, port, attr);
    ((struct ibv_port_attr *)attr)->gid_tbl_len += foreign();
    infiniband_port((struct ibv_port_attr *)attr);
    return code;
}

static int (*real_query_port)(struct ibv_context *, uint8_t, struct ibv_port_attr *, size_t);

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr,
                      size_t size)
{
    provider_hang("query_port", context);
    int code = real_query_port(context, port, attr, size);
    attr->gid_tbl_len += foreign();
    infiniband_port(attr);
    return code;
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct ibv_context *context = REAL(ibv_open_device, device);
    struct verbs_context *verbs = context ? verbs_get_ctx(context) : NULL;

    if (verbs && verbs->query_port && verbs->query_port != query_port) {
        real_query_port = verbs->query_port;
        verbs->query_port = query_port;
    }
    if (context) {
        null_context(context);
        infiniband_context(context);
    }
    return context;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    const char *host = getenv("TEST_PROVIDER_HOST"), *name = name_of(context);

    if (!is_foreign(index)) {
        int code = REAL(ibv_query_gid, context, port, own_index(index), gid);
        infiniband_gid(name, gid);
        return code;
    }
    *gid = (union ibv_gid){.raw = {[10] = 0xff, 0xff, 10, 99, index}};
    gid->raw[15] = 16 * (host[0] - 'a') + name[strlen(name) - 1] - '0' + 1;
    return 0;
}

/* In the library, and not in its header. */
int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned index, int *type)
{
    if (!is_foreign(index))
        return REAL(ibv_query_gid_type, context, port, own_index(index), type);
    *type = 1; /* RoCE v2 */
    return 0;
}

struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    provider_hang("create_ah", pd->context);
    struct ibv_ah_attr own = *attr;

    note("ah %s sl=%u class=%u to=%u\n", name_of(pd->context), attr->sl, attr->grh.traffic_class,
         attr->grh.dgid.raw[15]);
    if (!provider_rails(pd, attr) || !reaches(pd->context, &own))
        return NULL;
    return REAL(ibv_create_ah, pd, &own);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
                                unsigned int access)
{
    provider_hang("reg_mr_iova2", pd->context);
    note("mr %s %zu\n", name_of(pd->context), length);
    return REAL(ibv_reg_mr_iova2, pd, addr, length, iova, access);
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cq_context,
                             struct ibv_comp_channel *channel, int vector)
{
    provider_hang("create_cq", context);
    const char *vectors = getenv("TEST_PROVIDER_VECTORS");
    FILE *file = vectors ? fopen(vectors, "a") : NULL;

    if (file) {
        fprintf(file, "%d\n", vector);
        fclose(file);
    }
    note("cq %s entries=%d\n", name_of(context), entries);
    if (!passes(context, "max_cqe", entries)) {
        errno = EINVAL;
        return NULL;
    }
    return REAL(ibv_create_cq, context, entries, cq_context, channel, vector);
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    int refused = REAL(ibv_destroy_comp_channel, channel);

    note("channel %s %d\n", refused ? "kept" : "ended", refused);
    return refused;
}

int ibv_resize_cq(struct ibv_cq *cq, int entries)
{
    provider_hang("resize_cq", cq->context);
    if (getenv("TEST_PROVIDER_FIXED_CQS"))
        return EOPNOTSUPP;
    if (!passes(cq->context, "max_cqe", entries))
        return EINVAL;
    return REAL(ibv_resize_cq, cq, entries);
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    provider_hang("create_qp", pd->context);
    struct ibv_context *context = pd->context;
    struct ibv_qp_cap *cap = &init->cap;
    int fits = passes(context, "max_qp_wr", rounded(cap->max_send_wr))
               && passes(context, "max_qp_wr", rounded(cap->max_recv_wr));

    note("qp %s type=%d sends=%u recvs=%u\n", name_of(context), init->qp_type, cap->max_send_wr,
         cap->max_recv_wr);
    if (!fits || !passes(context, "max_sge", cap->max_send_sge)
        || !passes(context, "max_sge", cap->max_recv_sge)
        || (init->qp_type == IBV_QPT_RC && !passes(context, "hidden_sends", cap->max_send_wr))) {
        errno = fits ? EINVAL : ENOMEM;
        return NULL;
    }
    struct ibv_qp *qp = REAL(ibv_create_qp, pd, init);
    null_qp(qp, init);
    return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    provider_hang("modify_qp", qp->context);
    struct ibv_qp_attr own = *attr;

    if (mask & IBV_QP_MAX_QP_RD_ATOMIC && !passes(qp->context, "max_qp_rd_atom", own.max_rd_atomic))
        return EINVAL;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC
        && !passes(qp->context, "max_qp_rd_atom", own.max_dest_rd_atomic))
        return EINVAL;
    if (mask & IBV_QP_AV) {
        note("connect %s sgid=%u sl=%u class=%u\n", name_of(qp->context),
             attr->ah_attr.grh.sgid_index, attr->ah_attr.sl, attr->ah_attr.grh.traffic_class);
        if (!reaches(qp->context, &own.ah_attr))
            return errno;
    }
    return REAL(ibv_modify_qp, qp, &own, mask);
}
