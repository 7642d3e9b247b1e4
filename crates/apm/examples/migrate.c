/* Two ends exchange numbers over a queue pair. Its alternate path is chosen, loaded and migrated
 * to, and when a port dies it goes on over the other:
 *
 *   cc -Iinclude -o migrate crates/apm/examples/migrate.c -Ltarget/release -lunbroken_apm -libverbs
 *   export LD_LIBRARY_PATH=target/release
 *   unbroken fabric up --ports 2
 *   unbroken run --no-failover --host b -- ./migrate 5000 & sleep 1
 *   unbroken run --no-failover --host a -- ./migrate 5000 127.0.0.1 6 & sleep 3
 *   unbroken fault set 'nic a/0/2 down'; wait
 * GID_INDEX=3 in both environments where the first GID is not the one that leads to peers (many
 * RoCE NICs; --device plain).
 */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unbroken/apm.h>
#include <unistd.h>

#define NEED(what) do { if (!(what)) { perror(#what); exit(1); } } while (0)
#define CHECK(call) \
    do { \
        int e = (call); \
        if (e) \
            exit(fprintf(stderr, #call ": %s: %s\n", strerror(e), unbapm_last_error()) > 0); \
    } while (0)

struct end { uint32_t qpn; int ports; struct unbapm_address addresses[8]; };

static struct ibv_mr *mr;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static long numbers[2] /* sent, received */, gid_index;

static int meet(int port, const char *peer)
{
    struct sockaddr_in a = { .sin_family = AF_INET,
                             .sin_port = htons(port),
                             .sin_addr.s_addr = peer ? inet_addr(peer) : INADDR_ANY };
    int s = socket(AF_INET, SOCK_STREAM, 0);
    NEED(peer ? !connect(s, (struct sockaddr *)&a, sizeof a)
              : !bind(s, (struct sockaddr *)&a, sizeof a) && !listen(s, 1));
    return peer ? s : accept(s, NULL, NULL);
}

static void connect_qp(const struct end *peer)
{
    struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
    struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR,
                               .path_mtu = IBV_MTU_1024,
                               .dest_qp_num = peer->qpn,
                               .min_rnr_timer = 1,
                               .ah_attr = { .is_global = 1,
                                            .port_num = 1,
                                            .dlid = peer->addresses[0].lid,
                                            .grh = { .dgid = peer->addresses[0].gid,
                                                     .sgid_index = gid_index,
                                                     .hop_limit = 64 } } };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7
    };

    NEED(!ibv_modify_qp(qp, &init,
                        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
    NEED(!ibv_modify_qp(qp, &rtr,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                            IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    NEED(!ibv_modify_qp(qp, &rts,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                            IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

/* Sends a number and gives the peer's. */
static long exchange(long number)
{
    struct ibv_sge out = { (uintptr_t)&numbers[0], sizeof(long), mr->lkey },
                   in = { (uintptr_t)&numbers[1], sizeof(long), mr->lkey };
    struct ibv_send_wr send = { .sg_list = &out,
                                .num_sge = 1,
                                .opcode = IBV_WR_SEND,
                                .send_flags = IBV_SEND_SIGNALED },
                       *bad_send;
    struct ibv_recv_wr receive = { .sg_list = &in, .num_sge = 1 }, *bad_receive;
    struct ibv_wc wc = { 0 };
    numbers[0] = number;
    NEED(!ibv_post_recv(qp, &receive, &bad_receive) && !ibv_post_send(qp, &send, &bad_send));
    for (int n, done = 0; done < 2; done += n)
        if ((n = ibv_poll_cq(cq, 1, &wc)) < 0 || (n && wc.status))
            exit(fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc.status)) > 0);
    return numbers[1];
}

static void on_event(void *arg, const struct unbapm_event *event)
{
    fprintf(arg, "%s: port %d%s\n", unbapm_event_str(event->type), event->path.ah.port_num,
            event->asked ? ", by request" : "");
}

int main(int argc, char **argv)
{
    struct unbapm_options options = UNBAPM_OPTIONS_INITIALIZER;
    struct ibv_device **list = ibv_get_device_list(NULL);
    struct end own = { .ports = 8 }, peer;
    long n = 0, theirs = 0, seconds = argc > 3 ? atoi(argv[3]) : 0;
    unbapm_t apm;
    struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
    struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
    NEED(argc > 1 && pd && (cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
    struct ibv_qp_init_attr attr = {
        .qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .cap = { 4, 4, 1, 1, 0 }
    };
    NEED((mr = ibv_reg_mr(pd, numbers, sizeof numbers, IBV_ACCESS_LOCAL_WRITE)) &&
         (qp = ibv_create_qp(pd, &attr)));
    options.on_event = on_event, options.arg = stderr,
    options.gid_index = gid_index = atoi(getenv("GID_INDEX") ? getenv("GID_INDEX") : "0");
    CHECK(unbapm_open(context, &options, &apm));
    CHECK(unbapm_addresses(apm, own.addresses, &own.ports));
    own.qpn = qp->qp_num;
    int tcp = meet(atoi(argv[1]), argv[2]);
    NEED(write(tcp, &own, sizeof own) == sizeof own &&
         read(tcp, &peer, sizeof peer) == sizeof peer);
    connect_qp(&peer);
    CHECK(unbapm_add(apm, &qp, 1));
    /* alternate path specification */
    CHECK(unbapm_choose(apm, &qp, 1, peer.addresses, peer.ports));
    CHECK(unbapm_load(apm, &qp, 1));                               /* path loading */
    CHECK(unbapm_wait(apm, &qp, 1, UNBAPM_UNTIL_ARMED, UNBAPM_BY_EVENT, 10000));
    /* The client ends it, by a number below 0. */
    for (time_t ends = time(NULL) + seconds; theirs >= 0 && numbers[0] >= 0;
         n = seconds && time(NULL) >= ends ? -1 : n + 1) {
        if (seconds && n == 100) CHECK(unbapm_migrate(apm, &qp, 1)); /* path migration */
        theirs = exchange(n);
        NEED(theirs == n || theirs < 0 || n < 0);
    }
    NEED(write(tcp, "e", 1) == 1 && read(tcp, &own, 1) == 1);
    CHECK(unbapm_close(apm));
    return printf("all is well\n") < 0;
}
