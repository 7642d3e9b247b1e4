/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Indices: of ports, of GIDs and P_Keys in the tables of a port, of completion vectors. Whatever
 * exists can be used; one beyond it is EINVAL; and all who tell of the tables (queries, sysfs) tell
 * the same.
 *
 *   indexes
 */
#include "pair.h"
#include <net/if.h>

enum { LIMIT_US = 20 * 1000000 };

static struct pair p;

static void expect(const char *what, int failed, int error)
{
    if (!failed || errno != error)
        fail("%s: %s, not %s", what, failed ? strerror(errno) : "it worked", strerror(error));
    errno = 0;
}

/* The first line of a file of the port in sysfs; false where there is none. */
static int sysfs(int port, const char *name, int index, char line[128])
{
    char path[256];
    FILE *file;

    snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/%d/%s/%d",
             ibv_get_device_name(p.context->device), port, name, index);
    file = fopen(path, "r");
    if (!file)
        return 0;
    if (!fgets(line, 128, file))
        fail("%s is empty", path);
    line[strcspn(line, "\n")] = 0;
    fclose(file);
    return 1;
}

static void one_gid(int port, int index, int *count)
{
    static const union ibv_gid none;
    struct ibv_gid_entry entry;
    union ibv_gid gid;
    char line[128], text[64] = "";
    int i;

    check(ibv_query_gid(p.context, port, index, &gid), "ibv_query_gid");
    for (i = 0; i < 16; i += 2)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%02x%02x", i ? ":" : "",
                 gid.raw[i], gid.raw[i + 1]);
    if (!sysfs(port, "gids", index, line) || strcmp(line, text))
        fail("port %d, GID %d: %s, sysfs says %s", port, index, text, line);
    if (!memcmp(&gid, &none, sizeof gid)) {
        expect("ibv_query_gid_ex of an empty entry",
               (errno = ibv_query_gid_ex(p.context, port, index, &entry, 0)) != 0, ENODATA);
        if (sysfs(port, "gid_attrs/types", index, line))
            fail("port %d: the empty GID %d is of type %s", port, index, line);
        return;
    }
    ++*count;
    check(ibv_query_gid_ex(p.context, port, index, &entry, 0), "ibv_query_gid_ex");
    if (memcmp(&entry.gid, &gid, sizeof gid) || entry.gid_index != (uint32_t)index ||
        entry.port_num != (uint32_t)port || entry.gid_type != IBV_GID_TYPE_ROCE_V2 ||
        !sysfs(port, "gid_attrs/ndevs", index, line) ||
        entry.ndev_ifindex != if_nametoindex(line) || entry.ndev_ifindex == 0)
        fail("port %d, GID %d: ibv_query_gid_ex tells something else", port, index);
    if (!sysfs(port, "gid_attrs/types", index, line) || strcmp(line, "RoCE v2"))
        fail("port %d, GID %d: its type is %s", port, index, line);
}

static void tables(int ports)
{
    struct ibv_gid_entry entries[64];
    struct ibv_port_attr attr;
    union ibv_gid gid;
    char line[128];
    uint16_t pkey;
    int port, i, count = 0;

    for (port = 1; port <= ports; port++) {
        check(ibv_query_port(p.context, port, &attr), "ibv_query_port");
        for (i = 0; i < attr.gid_tbl_len; i++)
            one_gid(port, i, &count);
        expect("a GID beyond the table", ibv_query_gid(p.context, port, i, &gid) == -1, EINVAL);
        if (sysfs(port, "gids", i, line))
            fail("sysfs has GID %d of %d", i, attr.gid_tbl_len);
        for (i = 0; i < attr.pkey_tbl_len; i++) {
            check(ibv_query_pkey(p.context, port, i, &pkey), "ibv_query_pkey");
            if (!sysfs(port, "pkeys", i, line) || strtoul(line, NULL, 16) != be16toh(pkey))
                fail("P_Key %d is %#x, sysfs says %s", i, be16toh(pkey), line);
        }
        expect("a P_Key beyond the table", ibv_query_pkey(p.context, port, i, &pkey) == -1, EINVAL);
    }
    expect("ibv_query_port of one port too many", ibv_query_port(p.context, port, &attr) != 0,
           EINVAL);
    i = ibv_query_gid_table(p.context, entries, 64, 0);
    if (i != count || count < 2 * ports)
        fail("ibv_query_gid_table has %d entries, the ports have %d GIDs", i, count);
}

static void vectors(void)
{
    struct ibv_cq_init_attr_ex attr = { .cqe = 4 };
    struct ibv_cq *cq;
    int i;

    for (i = 0; i < p.context->num_comp_vectors; i++) {
        cq = ibv_create_cq(p.context, 4, NULL, NULL, i);
        if (!cq || ibv_destroy_cq(cq))
            fail("completion vector %d: %s", i, strerror(errno));
    }
    if (i < 2)
        fail("%d completion vectors", i);
    expect("a completion vector too many", !ibv_create_cq(p.context, 4, NULL, NULL, i), EINVAL);
    expect("completion vector -1", !ibv_create_cq(p.context, 4, NULL, NULL, -1), EINVAL);
    attr.comp_vector = i;
    expect("a completion vector too many", !ibv_create_cq_ex(p.context, &attr), EINVAL);
}

/* A connection over this port whose ends name each other by this GID. */
static void connection(int port, int index)
{
    struct ibv_cq *cq = ibv_create_cq(p.context, 16, NULL, NULL, p.context->num_comp_vectors - 1);
    struct ibv_qp *from = make_qp(&p, cq), *to = make_qp(&p, cq);
    struct ibv_qp_init_attr init;
    struct ibv_qp_attr attr;
    struct ibv_wc wc;
    uint64_t until;
    int n;

    check(ibv_query_gid(p.context, port, index, &p.gid), "ibv_query_gid");
    p.sgid_index = index;
    connect_qp(&p, from, to, port);
    connect_qp(&p, to, from, port);
    memset(p.memory, 16 * port + index, 64);
    memset(p.memory + PAIR_BYTES / 2, 0, 64);
    check(post_write(&p, from, 1, 64), "ibv_post_send");
    for (until = now_us() + LIMIT_US; (n = ibv_poll_cq(cq, 1, &wc)) == 0 && now_us() < until;)
        ;
    if (n != 1 || wc.status || memcmp(p.memory, p.memory + PAIR_BYTES / 2, 64))
        fail("port %d, GID %d: %d completions, %s", port, index, n,
             n == 1 ? ibv_wc_status_str(wc.status) : "");
    check(ibv_query_qp(from, &attr, IBV_QP_AV | IBV_QP_PORT, &init), "ibv_query_qp");
    if (attr.port_num != port || attr.ah_attr.grh.sgid_index != index)
        fail("port %d, GID %d: the QP says %d and %d", port, index, attr.port_num,
             attr.ah_attr.grh.sgid_index);
    check(ibv_destroy_qp(from), "ibv_destroy_qp");
    check(ibv_destroy_qp(to), "ibv_destroy_qp");
    check(ibv_destroy_cq(cq), "ibv_destroy_cq");
}

static void addresses(int ports)
{
    struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = ports + 1 };
    struct ibv_cq *cq = ibv_create_cq(p.context, 16, NULL, NULL, 0);
    struct ibv_qp *qp = make_qp(&p, cq);
    struct ibv_gid_entry entry;
    struct ibv_port_attr attr;
    struct ibv_ah *ah;
    int port, i, exists;

    for (port = 1; port <= ports; port++) {
        check(ibv_query_port(p.context, port, &attr), "ibv_query_port");
        for (i = 0; i <= attr.gid_tbl_len; i++) {
            struct ibv_ah_attr to = { .is_global = 1,
                                      .port_num = port,
                                      .grh = { .dgid = p.gid, .sgid_index = i } };

            exists = i < attr.gid_tbl_len && !ibv_query_gid_ex(p.context, port, i, &entry, 0);
            errno = 0;
            ah = ibv_create_ah(p.pd, &to);
            if (!exists) {
                expect("an address handle from a GID that there is not", !ah, EINVAL);
                continue;
            }
            if (!ah || ibv_destroy_ah(ah))
                fail("an address handle from port %d, GID %d: %s", port, i, strerror(errno));
            connection(port, i);
        }
    }
    expect("a QP of one port too many",
           (errno = ibv_modify_qp(
                qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)) !=
               0,
           EINVAL);
    check(ibv_destroy_qp(qp), "ibv_destroy_qp");
    check(ibv_destroy_cq(cq), "ibv_destroy_cq");
}

int main(void)
{
    struct ibv_device_attr attr;

    open_first(&p, 1);
    check(ibv_query_device(p.context, &attr), "ibv_query_device");
    if (attr.phys_port_cnt != 2)
        fail("%d ports", attr.phys_port_cnt);
    tables(attr.phys_port_cnt);
    vectors();
    addresses(attr.phys_port_cnt);
    printf("2 ports, %d completion vectors\n", p.context->num_comp_vectors);
    return 0;
}
