/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A UD ping-pong that is to outlive the NICs of both ends.
 *
 *   datagram server PORT CLIENTS     serves so many clients, one after the other, with one QP
 *   datagram client HOST:PORT SECONDS
 *
 * A client sends numbered datagrams and the server answers each. A datagram may be lost: the client
 * sends one again that is not answered for RESEND_US. All else must be right: no completion fails,
 * the content is what was sent, and each datagram shows the addresses that both ends had at first,
 * in its completion and in its GRH, wherever they are by now. The server answers to the address
 * that it reads there. Status 1 and a reason: something was wrong. The client prints its rounds,
 * what it sent again, and the longest wait.
 */
#include "common.h"
#include <infiniband/verbs.h>

enum {
    DEPTH = 64,
    BYTES = 1000,
    GRH = 40,
    RESEND_US = 5000,
    LIMIT_US = 20 * 1000000,
    QKEY = 0x1d0d
};

struct address {
    union ibv_gid gid;
    uint32_t qpn, lid;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct address own, peer;
static struct memory {
    uint8_t in[DEPTH][GRH + BYTES], out[BYTES];
} m;
static int sending;

static void check(int error, const char *what)
{
    if (error)
        fail("%s: %s", what, strerror(error > 0 ? error : errno));
}

static void post_recv(int slot)
{
    struct ibv_sge sge = { (uintptr_t)m.in[slot], sizeof m.in[slot], mr->lkey };
    struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

    check(ibv_post_recv(qp, &wr, &bad), "post_recv");
}

static void set_up(void)
{
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_UD,
                                     .sq_sig_all = 1,
                                     .cap = { DEPTH, DEPTH, 1, 1, 0 } };
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
    struct ibv_port_attr port;
    int i;

    context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    pd = context ? ibv_alloc_pd(context) : NULL;
    if (!pd || ibv_query_gid(context, 1, 0, &own.gid) || ibv_query_port(context, 1, &port))
        fail("no device, protection domain, GID or port");
    cq = init.send_cq = init.recv_cq = ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0);
    mr = ibv_reg_mr(pd, &m, sizeof m, IBV_ACCESS_LOCAL_WRITE);
    qp = cq && mr ? ibv_create_qp(pd, &init) : NULL;
    if (!qp)
        fail("cannot make a CQ, a region and a QP: %s", strerror(errno));
    own.qpn = qp->qp_num;
    own.lid = port.link_layer == IBV_LINK_LAYER_INFINIBAND ? port.lid : 0;
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
          "to INIT");
    a.qp_state = IBV_QPS_RTR;
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE), "to RTR");
    a.qp_state = IBV_QPS_RTS;
    check(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS");
    for (i = 0; i < DEPTH; i++)
        post_recv(i);
}

/* Whether a datagram shows the addresses of both ends, and its number. */
static uint64_t number_of(const struct ibv_wc *wc)
{
    const uint8_t *grh = m.in[wc->wr_id];
    const union ibv_gid *gids[2] = { &peer.gid, &own.gid };
    const char *wrong;
    uint64_t number;
    int i;

    if (wc->byte_len != GRH + BYTES || wc->src_qp != peer.qpn || wc->slid != peer.lid ||
        wc->qp_num != own.qpn)
        fail("a datagram of %u bytes from QP %#x (LID %u) at QP %#x; right is QP %#x (LID %u) and "
             "%#x",
             wc->byte_len, wc->src_qp, wc->slid, wc->qp_num, peer.qpn, peer.lid, own.qpn);
    for (i = 0; i < 2; i++) {
        const uint8_t *have = own.lid ? grh + 8 + 16 * i : grh + 32 + 4 * i,
                      *right = own.lid ? gids[i]->raw : gids[i]->raw + 12;

        if (memcmp(have, right, own.lid ? 16 : 4))
            fail("the GRH has another %s than the QP's first", i ? "destination" : "source");
    }
    memcpy(&number, grh + GRH, 8);
    wrong = content_wrong(grh + GRH, BYTES, number * 7, number);
    if (wrong)
        fail("datagram %llu: %s", (unsigned long long)number, wrong);
    return number;
}

/* Takes a completion, if there is one: 1 and the number where a datagram has come. */
static int take(uint64_t *number, struct ibv_ah **answer_to)
{
    struct ibv_wc wc;
    int got = ibv_poll_cq(cq, 1, &wc);

    if (got < 0)
        fail("poll_cq: %d", got);
    if (!got)
        return 0;
    if (wc.status)
        fail("a %s ends with '%s'", wc.opcode & IBV_WC_RECV ? "receive" : "send",
             ibv_wc_status_str(wc.status));
    if (!(wc.opcode & IBV_WC_RECV)) {
        sending--;
        return 0;
    }
    *number = number_of(&wc);
    if (answer_to &&
        !(*answer_to = ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)m.in[wc.wr_id], 1)))
        fail("create_ah_from_wc: %s", strerror(errno));
    post_recv(wc.wr_id);
    return 1;
}

static void post_send(struct ibv_ah *ah, uint64_t number)
{
    struct ibv_sge sge = { (uintptr_t)m.out, BYTES, mr->lkey };
    struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
    uint64_t until = now_us() + LIMIT_US, late;

    while (sending)
        if (now_us() > until)
            fail("a send is not complete after %d s", LIMIT_US / 1000000);
        else
            take(&late, NULL);
    content_make(m.out, BYTES, number * 7, number);
    wr.wr.ud.ah = ah;
    wr.wr.ud.remote_qpn = peer.qpn;
    wr.wr.ud.remote_qkey = QKEY;
    check(ibv_post_send(qp, &wr, &bad), "post_send");
    sending++;
}

static void serve(const char *port, int clients)
{
    for (; clients; clients--) {
        int s = tcp_listen(port);
        uint64_t number;

        tcp_read(s, &peer, sizeof peer);
        tcp_write(s, &own, sizeof own);
        while (tcp_peek(s) == 0) {
            struct ibv_ah *ah;

            if (take(&number, &ah)) {
                post_send(ah, number);
                check(ibv_destroy_ah(ah), "destroy_ah");
            }
        }
        close(s);
    }
}

static void play(const char *where, int seconds)
{
    struct ibv_ah_attr a = { .port_num = 1 };
    int s = tcp_connect(where);
    uint64_t number = 0, again = 0, longest = 0, end = now_us() + seconds * 1000000ull, got;
    struct ibv_ah *ah;

    tcp_write(s, &own, sizeof own);
    tcp_read(s, &peer, sizeof peer);
    a.dlid = peer.lid;
    a.is_global = 1;
    a.grh.dgid = peer.gid;
    a.grh.hop_limit = 64;
    ah = ibv_create_ah(pd, &a);
    if (!ah)
        fail("create_ah: %s", strerror(errno));
    while (now_us() < end) {
        uint64_t begin = now_us(), sent = begin;

        post_send(ah, ++number);
        while (!take(&got, NULL) || got != number) {
            uint64_t now = now_us();

            if (now > begin + LIMIT_US)
                fail("no answer to datagram %llu", (unsigned long long)number);
            if (now > sent + RESEND_US) {
                post_send(ah, number);
                again++;
                sent = now;
            }
        }
        if (now_us() - begin > longest)
            longest = now_us() - begin;
    }
    printf("%llu rounds, %llu sent again, longest %.1f ms\n", (unsigned long long)number,
           (unsigned long long)again, longest / 1e3);
    tcp_write(s, "", 1);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        fail("usage: datagram server PORT CLIENTS, or datagram client HOST:PORT SECONDS");
    set_up();
    if (!strcmp(argv[1], "server"))
        serve(argv[2], atoi(argv[3]));
    else
        play(argv[2], atoi(argv[3]));
    check(ibv_destroy_qp(qp), "destroy_qp");
    return 0;
}
