/* Two ends of UCX that connect by address: `ucx_sockaddr PORT` serves one client, and
 * `ucx_sockaddr PORT ADDRESS SECONDS` is one. The client sends messages of all sizes, the server
 * sends them back, and the client compares them. */
#include <arpa/inet.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucp/api/ucp.h>

enum { LARGEST = 1 << 20, MESSAGE = 1, END = 2 };

static ucp_worker_h worker;
static ucp_conn_request_h asked;
static int closed;

static void fail(const char *what, ucs_status_t status)
{
    fprintf(stderr, "%s: %s\n", what, ucs_status_string(status));
    exit(1);
}

static void check(const char *what, ucs_status_t status)
{
    if (status != UCS_OK)
        fail(what, status);
}

static void on_request(ucp_conn_request_h request, void *arg)
{
    (void)arg;
    asked = request;
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)ep;
    /* The client is done. */
    if (!arg || status != UCS_ERR_CONNECTION_RESET)
        fail("the endpoint", status);
    closed = 1;
}

/* Waits for what a call has begun. */
static void finish(const char *what, ucs_status_ptr_t request)
{
    ucs_status_t status = UCS_PTR_STATUS(request);
    if (UCS_PTR_IS_PTR(request)) {
        do
            ucp_worker_progress(worker);
        while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS);
        ucp_request_free(request);
    }
    check(what, status);
}

static void begin(void)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_worker_params_t single = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_context_h context;
    check("ucp_init", ucp_init(&params, NULL, &context));
    check("ucp_worker_create", ucp_worker_create(context, &single, &worker));
}

static struct sockaddr_in address(const char *ip, const char *port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    inet_pton(AF_INET, ip, &to.sin_addr);
    return to;
}

static ucp_ep_h endpoint(ucp_ep_params_t *params, void *may_close)
{
    ucp_ep_h ep;
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler = (ucp_err_handler_t){.cb = on_error, .arg = may_close};
    check("ucp_ep_create", ucp_ep_create(worker, params, &ep));
    return ep;
}

static void send_to(ucp_ep_h ep, ucp_tag_t tag, const void *bytes, size_t len)
{
    ucp_request_param_t none = {0};
    finish("a send", ucp_tag_send_nbx(ep, bytes, len, tag, &none));
}

static void on_message(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info,
                       void *to)
{
    (void)request;
    (void)status;
    *(ucp_tag_recv_info_t *)to = *info;
}

/* Gives the tag of the message. */
static ucp_tag_t receive(void *bytes, size_t *len)
{
    ucp_tag_recv_info_t info;
    ucp_request_param_t param = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                        UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
        .cb = {.recv = on_message},
        .user_data = &info,
    };
    finish("a receive", ucp_tag_recv_nbx(worker, bytes, LARGEST, 0, 0, &param));
    *len = info.length;
    return info.sender_tag;
}

static void serve(const char *port)
{
    static uint8_t bytes[LARGEST];
    struct sockaddr_in any = address("0.0.0.0", port);
    ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {.addr = (struct sockaddr *)&any, .addrlen = sizeof any},
        .conn_handler = {.cb = on_request},
    };
    ucp_listener_h listener;
    check("ucp_listener_create", ucp_listener_create(worker, &params, &listener));
    while (!asked)
        ucp_worker_progress(worker);
    ucp_ep_params_t accepted = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST,
                                .conn_request = asked};
    ucp_ep_h ep = endpoint(&accepted, &closed);
    size_t len;
    while (receive(bytes, &len) == MESSAGE)
        send_to(ep, MESSAGE, bytes, len);
    send_to(ep, END, bytes, 0);
    while (!closed)
        ucp_worker_progress(worker);
}

static void ask(const char *port, const char *ip, int seconds)
{
    static uint8_t sent[LARGEST], came[LARGEST];
    struct sockaddr_in to = address(ip, port);
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
        .sockaddr = {.addr = (struct sockaddr *)&to, .addrlen = sizeof to},
    };
    ucp_ep_h ep = endpoint(&params, NULL);
    time_t until = time(NULL) + seconds;
    unsigned long messages = 0;
    size_t len;
    for (; time(NULL) < until; messages++) {
        /* From nothing to what goes by rendezvous. */
        size_t n = messages % 4 ? (size_t)1 << messages % 21 : messages % LARGEST;
        memset(sent, (int)messages, n);
        if (n >= sizeof messages)
            memcpy(sent, &messages, sizeof messages);
        send_to(ep, MESSAGE, sent, n);
        if (receive(came, &len) != MESSAGE || len != n || memcmp(sent, came, n)) {
            fprintf(stderr, "message %lu of %zu bytes came back as another\n", messages, n);
            exit(1);
        }
    }
    send_to(ep, END, sent, 0);
    receive(came, &len);
    ucp_request_param_t none = {0};
    finish("ucp_ep_close_nbx", ucp_ep_close_nbx(ep, &none));
    printf("%lu messages came back\n", messages);
}

int main(int argc, char **argv)
{
    begin();
    if (argc == 2)
        serve(argv[1]);
    else if (argc == 4)
        ask(argv[1], argv[2], atoi(argv[3]));
    else
        return 2;
    return 0;
}
