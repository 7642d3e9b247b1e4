/* A storage target and its initiator, with the calls of SPDK's NVMe-oF: a listener, one CQ and one
 * SRQ for all connections, RDMA READs and WRITEs of the target, events of rdma_cm and the device.
 *
 *     cm_storage PORT                        the target
 *     cm_storage PORT ADDRESS SECONDS        the initiator
 *
 * The initiator has some connections for the whole time, and makes and ends one more each half
 * second. Any event but those of these connections ends either program: a NIC that fails, or comes
 * back, must be seen by neither. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BLOCK = 16384, CONNECTIONS = 4, SLOTS = 64, DEPTH = 8 };
enum { NOTHING = -1 };
enum { RECEIVED, READ, WRITTEN, ANSWERED };

/* What is sent both ways. */
struct command {
    uint64_t address;
    uint64_t number;
    uint32_t rkey;
};

struct connection {
    struct rdma_cm_id *id;
    struct ibv_mr *mr;
    struct command command;
    uint64_t number;
    uint8_t block[BLOCK];
};

static struct rdma_event_channel *channel;
static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct command slots[SLOTS];
static struct ibv_mr *slots_mr;
static struct connection *connections[1024];
static int done;

static void fail(const char *what, const char *how)
{
    fprintf(stderr, "%s: %s\n", what, how);
    exit(1);
}

static void need(int right, const char *what)
{
    if (!right)
        fail(what, strerror(errno));
}

static uint64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000ull + t.tv_nsec / 1000000;
}

static void receive_into(uint64_t slot)
{
    struct ibv_sge sge = {(uintptr_t)&slots[slot], sizeof slots[slot], slots_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = slot << 32, .sg_list = &sge, .num_sge = 1}, *bad;
    need(!ibv_post_srq_recv(srq, &wr, &bad), "ibv_post_srq_recv");
}

/* What all connections share, made with the first. */
static void share(struct ibv_context *of)
{
    if (device)
        return;
    device = of;
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = SLOTS, .max_sge = 1}};
    need((pd = ibv_alloc_pd(device)) != NULL, "ibv_alloc_pd");
    need((cq = ibv_create_cq(device, 4096, NULL, NULL, 0)) != NULL, "ibv_create_cq");
    need((srq = ibv_create_srq(pd, &attr)) != NULL, "ibv_create_srq");
    slots_mr = ibv_reg_mr(pd, slots, sizeof slots, IBV_ACCESS_LOCAL_WRITE);
    need(slots_mr != NULL, "ibv_reg_mr");
    for (uint64_t slot = 0; slot < SLOTS; slot++)
        receive_into(slot);
    fcntl(device->async_fd, F_SETFL, O_NONBLOCK);
}

static struct connection *connection_of(struct rdma_cm_id *id)
{
    share(id->verbs);
    const int access =
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    struct ibv_qp_init_attr attr = {
        .send_cq = cq,
        .recv_cq = cq,
        .srq = srq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = DEPTH, .max_send_sge = 1, .max_inline_data = 64},
    };
    struct connection *c = calloc(1, sizeof *c);
    need(c != NULL, "memory");
    need(!rdma_create_qp(id, pd, &attr), "rdma_create_qp");
    need((c->mr = ibv_reg_mr(pd, c, sizeof *c, access)) != NULL, "ibv_reg_mr");
    (c->id = id)->context = c;
    size_t at = 0;
    while (connections[at])
        at++;
    connections[at] = c;
    return c;
}

static void end(struct connection *c)
{
    size_t at = 0;
    while (connections[at] != c)
        at++;
    connections[at] = NULL;
    rdma_destroy_qp(c->id);
    ibv_dereg_mr(c->mr);
    rdma_destroy_id(c->id);
    free(c);
}

static void post(struct connection *c, int opcode, int step)
{
    struct ibv_sge block = {(uintptr_t)c->block, BLOCK, c->mr->lkey};
    struct ibv_sge command = {(uintptr_t)&c->command, sizeof c->command, 0};
    struct ibv_send_wr wr = {
        .wr_id = step,
        .sg_list = opcode == IBV_WR_SEND ? &command : &block,
        .num_sge = 1,
        .opcode = opcode,
        .send_flags = IBV_SEND_SIGNALED | (opcode == IBV_WR_SEND ? IBV_SEND_INLINE : 0),
        .wr.rdma = {.remote_addr = c->command.address, .rkey = c->command.rkey},
    };
    struct ibv_send_wr *bad;
    need(!ibv_post_send(c->id->qp, &wr, &bad), "ibv_post_send");
}

static void check_device(void)
{
    struct ibv_async_event event;
    if (!device || ibv_get_async_event(device, &event))
        return;
    /* A QP with an SRQ that ends, since its peer has ended it. */
    if (event.event_type != IBV_EVENT_QP_LAST_WQE_REACHED)
        fail("an event of the device", ibv_event_type_str(event.event_type));
    ibv_ack_async_event(&event);
}

static struct connection *of_qp(uint32_t qpn)
{
    for (size_t i = 0; i < 1024; i++)
        if (connections[i] && connections[i]->id->qp->qp_num == qpn)
            return connections[i];
    return NULL;
}

/* What a side does with a completion. */
typedef void on_completion(struct connection *c, struct ibv_wc *wc, const struct command *came);

static void progress(on_completion *on)
{
    struct ibv_wc wc;
    check_device();
    while (cq && ibv_poll_cq(cq, 1, &wc) > 0) {
        struct connection *c = of_qp(wc.qp_num);
        if (!c)
            continue;
        if (wc.status != IBV_WC_SUCCESS)
            fail("a completion", ibv_wc_status_str(wc.status));
        struct command came = slots[wc.wr_id >> 32];
        on(c, &wc, wc.opcode == IBV_WC_RECV ? &came : NULL);
        if (wc.opcode == IBV_WC_RECV)
            receive_into(wc.wr_id >> 32);
    }
}

static void at_target(struct connection *c, struct ibv_wc *wc, const struct command *came)
{
    if (came) {
        c->command = *came;
        post(c, IBV_WR_RDMA_READ, READ);
    } else if (wc->wr_id == READ) {
        for (size_t i = 0; i < BLOCK; i++)
            c->block[i]++;
        post(c, IBV_WR_RDMA_WRITE, WRITTEN);
    } else if (wc->wr_id == WRITTEN) {
        post(c, IBV_WR_SEND, ANSWERED);
    }
}

static void target_event(struct rdma_cm_event *event)
{
    struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1,
                                    .rnr_retry_count = 7};
    struct rdma_cm_id *id = event->id;
    enum rdma_cm_event_type type = event->event;
    rdma_ack_cm_event(event);
    switch (type) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        connection_of(id);
        need(!rdma_accept(id, &param), "rdma_accept");
        break;
    case RDMA_CM_EVENT_ESTABLISHED:
    case RDMA_CM_EVENT_TIMEWAIT_EXIT:
        break;
    case RDMA_CM_EVENT_DISCONNECTED:
        rdma_disconnect(id);
        end(id->context);
        done = 1;
        for (size_t i = 0; i < 1024; i++)
            done &= !connections[i];
        break;
    default:
        fail("an event of rdma_cm", rdma_event_str(type));
    }
}

static void serve(struct sockaddr_in *address)
{
    struct rdma_cm_event *event;
    struct rdma_cm_id *listener;
    address->sin_addr.s_addr = 0;
    need(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
    need(!rdma_bind_addr(listener, (struct sockaddr *)address), "rdma_bind_addr");
    need(!rdma_listen(listener, 16), "rdma_listen");
    fcntl(channel->fd, F_SETFL, O_NONBLOCK);
    while (!done) {
        if (!rdma_get_cm_event(channel, &event))
            target_event(event);
        progress(at_target);
    }
}

static void await(int type)
{
    struct rdma_cm_event *event;
    need(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
    if ((int)event->event != type)
        fail(type == NOTHING ? "an event of rdma_cm" : rdma_event_str(type),
             rdma_event_str(event->event));
    rdma_ack_cm_event(event);
}

static struct connection *connect_to(struct sockaddr_in *to)
{
    struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1,
                                    .retry_count = 7, .rnr_retry_count = 7};
    struct rdma_cm_id *id;
    need(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
    need(!rdma_resolve_addr(id, NULL, (struct sockaddr *)to, 2000), "rdma_resolve_addr");
    await(RDMA_CM_EVENT_ADDR_RESOLVED);
    need(!rdma_resolve_route(id, 2000), "rdma_resolve_route");
    await(RDMA_CM_EVENT_ROUTE_RESOLVED);
    struct connection *c = connection_of(id);
    need(!rdma_connect(id, &param), "rdma_connect");
    await(RDMA_CM_EVENT_ESTABLISHED);
    return c;
}

static void disconnect(struct connection *c)
{
    need(!rdma_disconnect(c->id), "rdma_disconnect");
    await(RDMA_CM_EVENT_DISCONNECTED);
    end(c);
}

static void ask(struct connection *c)
{
    c->number++;
    memset(c->block, (int)c->number, BLOCK);
    c->command = (struct command){(uintptr_t)c->block, c->number, c->mr->rkey};
    post(c, IBV_WR_SEND, ANSWERED);
}

static int ending, outstanding;
static unsigned long answers;

static void at_initiator(struct connection *c, struct ibv_wc *wc, const struct command *came)
{
    (void)wc;
    if (!came)
        return;
    for (size_t i = 0; i < BLOCK; i++)
        if (came->number != c->number || c->block[i] != (uint8_t)(c->number + 1))
            fail("a block", "it came back as another");
    answers++;
    outstanding--;
    if (!ending) {
        ask(c);
        outstanding++;
    }
}

static void initiate(struct sockaddr_in *to, int seconds)
{
    uint64_t until = now_ms() + seconds * 1000ull, again = now_ms() + 500;
    struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
    struct connection *all[CONNECTIONS];
    unsigned long made = 0;
    for (int i = 0; i < CONNECTIONS; i++)
        all[i] = connect_to(to);
    for (; outstanding < CONNECTIONS; outstanding++)
        ask(all[outstanding]);
    while (now_ms() < until) {
        progress(at_initiator);
        /* Nothing is awaited. */
        if (poll(&fd, 1, 0) > 0)
            await(NOTHING);
        if (now_ms() >= again) {
            disconnect(connect_to(to));
            made++;
            again = now_ms() + 500;
        }
    }
    ending = 1;
    while (outstanding)
        progress(at_initiator);
    for (int i = 0; i < CONNECTIONS; i++)
        disconnect(all[i]);
    printf("%lu blocks, %lu connections\n", answers, made);
}

int main(int argc, char **argv)
{
    if (argc != 2 && argc != 4)
        return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    need((channel = rdma_create_event_channel()) != NULL, "rdma_create_event_channel");
    if (argc == 2) {
        serve(&address);
    } else {
        inet_pton(AF_INET, argv[2], &address.sin_addr);
        initiate(&address, atoi(argv[3]));
    }
    return 0;
}
