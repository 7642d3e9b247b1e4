/* A thread that waits for an event of rdma_cm is cancelled, as libiscsi does. */
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <unistd.h>

static struct rdma_event_channel *channel;

static void *wait_for_event(void *arg)
{
    struct rdma_cm_event *event;
    rdma_get_cm_event(channel, &event);
    return arg;
}

int main(void)
{
    struct rdma_cm_id *id;
    channel = rdma_create_event_channel();
    if (!channel || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP))
        return 1;
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        void *gave;
        if (pthread_create(&thread, NULL, wait_for_event, NULL))
            return 2;
        usleep(i * 1000);
        if (pthread_cancel(thread) || pthread_join(thread, &gave) || gave != PTHREAD_CANCELED)
            return 3;
    }
    rdma_destroy_id(id);
    rdma_destroy_event_channel(channel);
    puts("right");
    return 0;
}
