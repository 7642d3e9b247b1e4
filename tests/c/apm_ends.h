/* SPDX-License-Identifier: Apache-2.0 */
/* Two processes with the library of path migration (unbroken/apm.h): RC QPs between devices with
 * two ports, and a TCP connection beside them. */
#ifndef UNBROKEN_TESTS_APM_ENDS_H
#define UNBROKEN_TESTS_APM_ENDS_H

#include "common.h"
#include <infiniband/verbs.h>
#include <unbroken/apm.h>

enum { MAX_QPS = 1024, QP_DEPTH = 4, PORTS = 2, WAIT_MS = 30000 };

struct end {
    int ports;
    uint64_t addr;
    uint32_t rkey, qpn[MAX_QPS];
    struct unbapm_address addresses[PORTS];
};

static struct end own, peer;
static struct ibv_context *context;
static struct ibv_mr *mr;
static struct ibv_cq *cq;
static struct ibv_qp *qps[MAX_QPS];
static uint32_t qp_count;
static uint64_t memory[2 * MAX_QPS]; /* a test's own */
static unbapm_t apm;
static int tcp, client;

#define OK(call) \
    do { \
        int e_ = (call); \
        if (e_) \
            fail("line %d: %s: %s: %s", __LINE__, #call, strerror(e_), unbapm_last_error()); \
    } while (0)
#define MUST(what) do { if (!(what)) fail("line %d: %s", __LINE__, #what); } while (0)

/* Both are here. */
static inline void meet(void)
{
    char c = 'm';

    tcp_write(tcp, &c, 1);
    tcp_read(tcp, &c, 1);
}

static inline void stage(const char *name)
{
    if (client)
        printf("stage %s\n", name);
    fflush(stdout);
}

static inline struct ibv_ah_attr vector(int port, const struct unbapm_address *to)
{
    return (struct ibv_ah_attr){
        .is_global = 1,
        .port_num = port,
        .dlid = to->lid,
        .grh = { .dgid = to->gid, .sgid_index = test_gid_index(), .hop_limit = 64 }
    };
}

static inline void connect_qp(uint32_t i)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT,
                             .port_num = 1,
                             .qp_access_flags = IBV_ACCESS_REMOTE_ATOMIC };

    OK(ibv_modify_qp(qps[i], &a,
                     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR,
                              .path_mtu = IBV_MTU_1024,
                              .dest_qp_num = peer.qpn[i],
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 1,
                              .ah_attr = vector(1, &peer.addresses[0]) };
    OK(ibv_modify_qp(qps[i], &a,
                     IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                         IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    a = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1
    };
    OK(ibv_modify_qp(qps[i], &a,
                     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                         IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Opens the first device, makes queue pairs, opens the library for them (on all ports the GID
 * that leads to peers), and connects both ends. */
static inline void connect_ends(uint32_t count, struct unbapm_options *options)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_pd *pd;
    uint32_t i;

    qp_count = count;
    context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    pd = context ? ibv_alloc_pd(context) : NULL;
    mr = pd ? ibv_reg_mr(pd, memory, sizeof memory,
                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC)
            : NULL;
    cq = mr ? ibv_create_cq(context, 2 * MAX_QPS, NULL, NULL, 0) : NULL;
    MUST(cq);
    for (i = 0; i < count; i++) {
        struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
                                         .send_cq = cq,
                                         .recv_cq = cq,
                                         .cap = { QP_DEPTH, QP_DEPTH, 1, 1, 0 } };

        MUST((qps[i] = ibv_create_qp(pd, &init)));
        own.qpn[i] = qps[i]->qp_num;
    }
    options->gid_index = test_gid_index();
    OK(unbapm_open(context, options, &apm));
    own.ports = PORTS;
    OK(unbapm_addresses(apm, own.addresses, &own.ports));
    MUST(own.ports == PORTS && own.addresses[1].port == 2 && own.addresses[1].active);
    own.addr = (uintptr_t)memory;
    own.rkey = mr->rkey;
    tcp_write(tcp, &own, sizeof own);
    tcp_read(tcp, &peer, sizeof peer);
    for (i = 0; i < count; i++)
        connect_qp(i);
    OK(unbapm_add(apm, qps, count));
}

static inline struct unbapm_info info(uint32_t i)
{
    struct unbapm_info it;

    OK(unbapm_query(apm, qps[i], &it));
    return it;
}

/* All QPs use this port and reach that of the peer, and have migrated so often. */
static inline void check_paths(int port, int to, unsigned migrations)
{
    for (uint32_t i = 0; i < qp_count; i++) {
        struct unbapm_info it = info(i);
        struct ibv_qp_init_attr init;
        struct ibv_qp_attr a;

        OK(ibv_query_qp(qps[i], &a, IBV_QP_PORT | IBV_QP_AV, &init));
        if (it.primary.ah.port_num != port || a.port_num != port || it.migrations != migrations ||
            memcmp(&it.primary.ah.grh.dgid, &peer.addresses[to - 1].gid, 16) ||
            memcmp(&a.ah_attr.grh.dgid, &peer.addresses[to - 1].gid, 16))
            fail("QP %u: port %d, told %d, where %d is right; %d migrations where %u are", i,
                 a.port_num, it.primary.ah.port_num, port, (int)it.migrations, migrations);
    }
}

#endif
