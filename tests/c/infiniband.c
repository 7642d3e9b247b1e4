// Addresses of a port whose link layer is InfiniBand: address handles and connections by LID, with
// a GRH and without, and what completions and queries say of them. Run on host a of a fabric with
// link layer InfiniBand; both ends are in this process.

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "line %d: not so: %s (errno %d)\n", __LINE__, #what, errno); \
            exit(1); \
        } \
    } while (0)

enum { QKEY = 0x1234, BYTES = 64, GRH = sizeof(struct ibv_grh) };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_port_attr port;
static union ibv_gid gid;
static unsigned char memory[1024];

static struct ibv_qp *make(enum ibv_qp_type type)
{
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = type, .sq_sig_all = 0};
    init.cap = (struct ibv_qp_cap){
        .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1
    };
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    CHECK(qp);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY};
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    CHECK(ibv_modify_qp(qp, &attr,
                        mask | (type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)) == 0);
    return qp;
}

static struct ibv_wc completion(void)
{
    struct ibv_wc wc;
    for (time_t end = time(NULL) + 10; time(NULL) < end;)
        if (ibv_poll_cq(cq, 1, &wc) == 1) {
            CHECK(wc.status == IBV_WC_SUCCESS);
            return wc;
        }
    CHECK(!"a completion within ten seconds");
    exit(1);
}

// Sends a datagram to `to` through `ah` and gives the completion of its arrival.
static struct ibv_wc datagram(struct ibv_qp *from, struct ibv_qp *to, struct ibv_ah *ah)
{
    memset(memory, 0, GRH);
    struct ibv_sge room = {.addr = (uintptr_t)memory, .length = GRH + BYTES, .lkey = mr->lkey};
    struct ibv_recv_wr recv = {.sg_list = &room, .num_sge = 1}, *bad_recv;
    CHECK(ibv_post_recv(to, &recv, &bad_recv) == 0);
    struct ibv_sge data = {.addr = (uintptr_t)memory + 512, .length = BYTES, .lkey = mr->lkey};
    struct ibv_send_wr send = {.sg_list = &data, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad_send;
    send.wr.ud.ah = ah;
    send.wr.ud.remote_qpn = to->qp_num;
    send.wr.ud.remote_qkey = QKEY;
    CHECK(ibv_post_send(from, &send, &bad_send) == 0);
    struct ibv_wc wc = completion();
    CHECK(wc.opcode == IBV_WC_RECV && wc.byte_len == GRH + BYTES && wc.src_qp == from->qp_num);
    CHECK(memcmp(memory + GRH, memory + 512, BYTES) == 0);
    return wc;
}

static void datagrams(void)
{
    struct ibv_qp *qp = make(IBV_QPT_UD);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0);
    attr.qp_state = IBV_QPS_RTS;
    CHECK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN) == 0);

    struct ibv_ah_attr to = {.dlid = port.lid, .port_num = 1};
    struct ibv_ah *ah = ibv_create_ah(pd, &to);
    CHECK(ah);
    struct ibv_wc wc = datagram(qp, qp, ah);
    CHECK(wc.slid == port.lid && !(wc.wc_flags & IBV_WC_GRH));

    // The way back, as the completion tells it.
    struct ibv_ah *back = ibv_create_ah_from_wc(pd, &wc, NULL, 1);
    CHECK(back);
    CHECK(datagram(qp, qp, back).slid == port.lid);
    CHECK(ibv_destroy_ah(back) == 0 && ibv_destroy_ah(ah) == 0);

    to.is_global = 1;
    to.grh.dgid = gid;
    CHECK((ah = ibv_create_ah(pd, &to)));
    wc = datagram(qp, qp, ah);
    CHECK(wc.slid == port.lid && (wc.wc_flags & IBV_WC_GRH));
    struct ibv_grh *grh = (struct ibv_grh *)memory;
    CHECK(!memcmp(&grh->sgid, &gid, sizeof gid) && !memcmp(&grh->dgid, &gid, sizeof gid) &&
          grh->next_hdr == 0x1b);
    struct ibv_ah_attr found;
    CHECK(ibv_init_ah_from_wc(context, 1, &wc, grh, &found) == 0);
    CHECK(found.is_global && found.dlid == port.lid && !memcmp(&found.grh.dgid, &gid, sizeof gid));
    CHECK(ibv_destroy_ah(ah) == 0);

    // LIDs that lead nowhere.
    to.is_global = 0;
    for (unsigned lid = 0; lid < 0xc000; lid += 0x1fff) {
        to.dlid = lid;
        errno = 0;
        CHECK(!ibv_create_ah(pd, &to) && errno == EINVAL);
    }
    CHECK(ibv_destroy_qp(qp) == 0);
}

static void connection(enum ibv_qp_type type)
{
    struct ibv_qp *qps[2] = {make(type), make(type)};
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR,
                                    .path_mtu = port.active_mtu,
                                    .max_dest_rd_atomic = 1 };
        attr.dest_qp_num = qps[1 - i]->qp_num;
        attr.ah_attr = (struct ibv_ah_attr){.dlid = 77, .port_num = 1, .sl = 3};
        int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        mask |= type == IBV_QPT_RC ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0;
        CHECK(ibv_modify_qp(qps[i], &attr, mask) == EINVAL); // no port has LID 77
        attr.ah_attr.dlid = port.lid;
        CHECK(ibv_modify_qp(qps[i], &attr, mask) == 0);
        attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS,
                                     .timeout = 14,
                                     .retry_cnt = 7,
                                     .rnr_retry = 7,
                                     .max_rd_atomic = 1 };
        mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
        mask |= type == IBV_QPT_RC
                    ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC
                    : 0;
        CHECK(ibv_modify_qp(qps[i], &attr, mask) == 0);
        struct ibv_qp_init_attr init;
        CHECK(ibv_query_qp(qps[i], &attr, IBV_QP_AV, &init) == 0);
        CHECK(attr.ah_attr.dlid == port.lid && attr.ah_attr.sl == 3 && !attr.ah_attr.is_global &&
              attr.ah_attr.port_num == 1);
    }
    struct ibv_sge room = {.addr = (uintptr_t)memory, .length = BYTES, .lkey = mr->lkey};
    struct ibv_recv_wr recv = {.sg_list = &room, .num_sge = 1}, *bad_recv;
    CHECK(ibv_post_recv(qps[1], &recv, &bad_recv) == 0);
    struct ibv_sge data = {.addr = (uintptr_t)memory + 512, .length = BYTES, .lkey = mr->lkey};
    struct ibv_send_wr send = {.sg_list = &data, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad_send;
    CHECK(ibv_post_send(qps[0], &send, &bad_send) == 0);
    CHECK(completion().opcode == IBV_WC_RECV && !memcmp(memory, memory + 512, BYTES));
    CHECK(ibv_destroy_qp(qps[0]) == 0 && ibv_destroy_qp(qps[1]) == 0);
}

int main(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    CHECK((context = ibv_open_device(list[0])));
    CHECK(ibv_query_port(context, 1, &port) == 0 && port.link_layer == IBV_LINK_LAYER_INFINIBAND);
    CHECK(port.lid == 128 && port.sm_lid == 1 && port.lmc == 0 &&
          !(port.flags & IBV_QPF_GRH_REQUIRED));
    CHECK(ibv_query_gid(context, 1, 0, &gid) == 0 && gid.raw[0] == 0xfe && gid.raw[1] == 0x80);
    for (int i = 0; i < BYTES; i++)
        memory[512 + i] = i + 1;
    CHECK((pd = ibv_alloc_pd(context)));
    CHECK((cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
    CHECK((mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE)));
    datagrams();
    connection(IBV_QPT_RC);
    connection(IBV_QPT_UC);
    CHECK(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0 &&
          ibv_close_device(context) == 0);
    ibv_free_device_list(list);
    return 0;
}
