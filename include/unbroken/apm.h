/*
 * Automatic path migration of RC queue pairs in three modules: alternate paths are specified,
 * loaded, and migrated to; and the thread that hears of a migration, specifies a path again and
 * loads it. It needs verbs alone, and works on any device that has IBV_DEVICE_AUTO_PATH_MIG.
 *
 * A queue pair is added when it is in RTS, and removed before it is destroyed. Both ends need an
 * alternate path, and the two must be the same way: where one goes from port 2 to the peer's port
 * 2, the other does. What each end does is in docs/guide/apm.md. Link with -lunbroken_apm and
 * -libverbs.
 *
 * Functions give 0 or a number of errno.h, and unbapm_last_error() says what was wrong and what
 * would be right. They may be called from any thread; callbacks may call all of them but
 * unbapm_close and unbapm_wait. Where a function takes a list of queue pairs, NULL and 0 stand for
 * all that were added; all of a list are tried, and the first error is the one that is told.
 *
 * Licence: Apache-2.0
 */
#ifndef UNBROKEN_APM_H
#define UNBROKEN_APM_H

#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct unbapm *unbapm_t;

/* A path as seen from here. */
struct unbapm_path {
    /* port_num, sl, src_path_bits; dlid, or is_global with grh.dgid and grh.sgid_index */
    struct ibv_ah_attr ah;
    uint8_t timeout;       /* local ACK timeout as verbs code it; 0: that of the path in use */
    uint16_t pkey_index;
};

/*
 * Where a port is reached. Give the peer yours, and take its: the structure is the same on all
 * machines of one byte order.
 */
struct unbapm_address {
    union ibv_gid gid;
    uint16_t lid;
    uint8_t port;
    uint8_t lmc;        /* InfiniBand: this port has 2^lmc LIDs */
    uint8_t ethernet;   /* 1: RoCE */
    uint8_t active;     /* 1: the port is up */
    uint8_t sgid_index; /* the owner's index of that GID */
    uint8_t reserved;
};

enum unbapm_state {
    UNBAPM_UNLOADED = 0,  /* the device has no alternate path */
    UNBAPM_LOADING = 1,   /* it is being given one */
    UNBAPM_REARM = 2,     /* it has one, and waits for the peer */
    UNBAPM_ARMED = 3,     /* both ends are ready */
    UNBAPM_MIGRATING = 4, /* unbapm_migrate has asked */
    /* the device refused the path, or the queue pair is in error; unbapm_load tries anew */
    UNBAPM_FAILED = 5
};

enum unbapm_event_type {
    UNBAPM_EVENT_ARMED = 0,
    /* path: the one in use now; asked: unbapm_migrate was why, else the device or the peer */
    UNBAPM_EVENT_MIGRATED = 1,
    UNBAPM_EVENT_MIGRATION_FAILED = 2, /* it stays where it was; path: that it could not go to */
    UNBAPM_EVENT_UNHEALTHY = 3,        /* the port of the loaded path went down; path: that one */
    UNBAPM_EVENT_HEALTHY = 4,          /* and is up again, with the same path still loaded */
    /*
     * path: another one, loaded in place of the one before. Tell the peer, which specifies and
     * loads the same way
     */
    UNBAPM_EVENT_RESPECIFIED = 5,
    /* not armed within load_timeout_ms; it is still waited for */
    UNBAPM_EVENT_LOAD_LATE = 6,
    UNBAPM_EVENT_LOAD_FAILED = 7,      /* the device has refused the path, by the number in error */
    UNBAPM_EVENT_QP_FAILED = 8         /* the queue pair is in error or reset */
};

struct unbapm_event {
    enum unbapm_event_type type;
    int error;
    struct ibv_qp *qp;
    uint64_t time_us; /* CLOCK_MONOTONIC, when it was noticed */
    struct unbapm_path path;
    int asked;
};

/* Zeros and NULLs stand for what is usual. */
struct unbapm_options {
    size_t size;
    /* 1: the program reads the asynchronous events itself, see unbapm_handle_event */
    int no_thread;
    int manual;                   /* 1: nothing is loaded but what unbapm_load asks for */
    /*
     * 1: for a path whose port is down the next best is loaded. The program tells the peer, see
     * UNBAPM_EVENT_RESPECIFIED
     */
    int respecify;
    int gid_index;                /* of unbapm_addresses, on all ports */
    /* the event_type by which the device says that a queue pair is ARMED; libibverbs knows none */
    int armed_event;
    uint32_t load_timeout_ms;     /* 10,000 */
    uint32_t migrate_timeout_ms;  /* 2,000 */
    /*
     * Instead of unbapm_poll_events. From the library's thread, one call at a time; without it,
     * from the function that noticed.
     */
    void (*on_event)(void *arg, const struct unbapm_event *event);
    /*
     * The asynchronous events that are not of the library's queue pairs' migration; ports' come
     * here, too. Not to be acknowledged.
     */
    void (*on_other)(void *arg, const struct ibv_async_event *event);
    void *arg;
};

#define UNBAPM_OPTIONS_INITIALIZER \
    { sizeof(struct unbapm_options), 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL }

/* Of this thread's last call that failed; "" before the first. Valid until the next one. */
const char *unbapm_last_error(void);
const char *unbapm_state_str(enum unbapm_state state);
const char *unbapm_event_str(enum unbapm_event_type type);

/*
 * Without no_thread a thread of the library reads the context's asynchronous events, all of them,
 * until unbapm_close; its async_fd is made O_NONBLOCK meanwhile. ENOSYS: there is no libibverbs in
 * this process. EOPNOTSUPP: the device has no automatic path migration. options may be NULL.
 */
int unbapm_open(struct ibv_context *context, const struct unbapm_options *options, unbapm_t *apm);
/* The queue pairs stay as they are. After it no callback runs. */
int unbapm_close(unbapm_t apm);

/* Asks the device for the path in use, and for what the program has loaded itself. */
int unbapm_add(unbapm_t apm, struct ibv_qp *const *qps, int count);
/* After it no callback is about these, but one that calls this. */
int unbapm_remove(unbapm_t apm, struct ibv_qp *const *qps, int count);

/*
 * Processes: to which one (an MPI rank, say; the number is the program's own) queue pairs lead; 0
 * until that is said. Lists of queue pairs are then had for lists of processes. *count: room in the
 * list, and then how many there are, in no order; ENOSPC: there are more. NULL and 0: only how
 * many. No process listed has a queue pair: ENOENT.
 */
int unbapm_set_process(unbapm_t apm, struct ibv_qp *const *qps, int count, uint64_t process);
int unbapm_of_processes(unbapm_t apm, const uint64_t *processes, int process_count,
        struct ibv_qp **qps, int *count);

/*
 * Alternate path specification. At most 16 paths of a queue pair, the best first. The one in use is
 * the best, where it is not among them.
 */
int unbapm_specify(unbapm_t apm, struct ibv_qp *const *qps, int count,
        const struct unbapm_path *paths, int path_count);
/*
 * The same, chosen from this device's ports and the peer's addresses, which must have that of the
 * path in use: other ports at both ends first, then at one, then (InfiniBand) other path bits. Both
 * ends choose the same way. EHOSTUNREACH: there is no other path.
 */
int unbapm_choose(unbapm_t apm, struct ibv_qp *const *qps, int count,
        const struct unbapm_address *peer, int address_count);
/* This device's, one for each port. *count: room in the list, and then how many there are. */
int unbapm_addresses(unbapm_t apm, struct unbapm_address *list, int *count);

/*
 * Path loading. The best path but the one in use is given to the device with IBV_MIG_REARM, if it
 * is healthy: its port is up. From then on, but with `manual`, the library keeps it loaded after
 * each migration, as soon as it is healthy. Other paths than the best are taken with `respecify`
 * alone: two ends that load different ways cannot follow each other, and one does not know of the
 * other's ports. ENETDOWN: it is not healthy now.
 */
int unbapm_load(unbapm_t apm, struct ibv_qp *const *qps, int count);

/* Path migration. Of queue pairs that are ARMED, else EBUSY. */
int unbapm_migrate(unbapm_t apm, struct ibv_qp *const *qps, int count);

enum unbapm_until {
    UNBAPM_UNTIL_ARMED = 0,   /* each has been ARMED since the call */
    UNBAPM_UNTIL_MIGRATED = 1 /* no migration that was asked for is under way */
};
enum unbapm_how {
    UNBAPM_BY_EVENT = 0, /* asleep, until the library's thread has noticed */
    /* asking the device in this thread, at least once: so what the peer has done is noticed, too */
    UNBAPM_BY_QUERY = 1
};
/* ETIMEDOUT; EIO: a queue pair has failed. */
int unbapm_wait(unbapm_t apm, struct ibv_qp *const *qps, int count, enum unbapm_until until,
        enum unbapm_how how, uint32_t timeout_ms);

struct unbapm_info {
    enum unbapm_state state;
    int loaded;                   /* 1: `alternate` is in the device */
    int healthy;                  /* 1: and its port is up */
    int paths;                    /* that were specified or chosen, that in use included */
    uint64_t migrations;
    /* in use, as the device told when it was added, or as it was migrated to */
    struct unbapm_path primary;
    struct unbapm_path alternate; /* loaded */
};
/* What the library knows; the device is not asked. */
int unbapm_query(unbapm_t apm, struct ibv_qp *qp, struct unbapm_info *info);

/* Readable while there are events; for poll(2) only. With on_event there are never any. */
int unbapm_fd(unbapm_t apm, int *fd);
/*
 * *count: room in the list, and then how many were taken. ENOBUFS: more than 65,536 were not taken,
 * and the oldest are lost.
 */
int unbapm_poll_events(unbapm_t apm, struct unbapm_event *events, int *count);

/*
 * For programs with no_thread. Of each event of ibv_get_async_event: *taken is 1 if it was about
 * the library's queue pairs' migration. Acknowledge it yourself, afterwards. taken may be NULL.
 */
int unbapm_handle_event(unbapm_t apm, const struct ibv_async_event *event, int *taken);
/*
 * What is due; *next_us: call again within so many microseconds, UINT64_MAX: nothing is to come.
 * NULL if that is not of interest.
 */
int unbapm_progress(unbapm_t apm, uint64_t *next_us);

#ifdef __cplusplus
}
#endif

#endif
