/*
 * Automatic path migration of RC queue pairs in three modules: specify alternate paths, load them,
 * and migrate. A thread of the library receives migration events, specifies the next path and loads
 * it. The library needs only verbs, and works on any device with IBV_DEVICE_AUTO_PATH_MIG.
 *
 * Add a queue pair when it is in RTS, and remove it before you destroy it. Both ends need an
 * alternate path, and these must correspond: if one leads from port 2 to the peer's port 2, so must
 * the other. docs/guide/apm.md describes the steps of each end. Link with -lunbroken_apm and
 * -libverbs.
 *
 * Functions return 0 or a number of errno.h; unbapm_last_error() says what was wrong and what is
 * valid. They may be called from any thread. Callbacks may call all of them except unbapm_close and
 * unbapm_wait. In functions that take a list of queue pairs, NULL and 0 stand for all that were
 * added. These functions process the whole list, and return the first error.
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

/* A path, seen from this end. */
struct unbapm_path {
    /* port_num, sl, src_path_bits; dlid, or is_global with grh.dgid and grh.sgid_index */
    struct ibv_ah_attr ah;
    uint8_t timeout;       /* local ACK timeout as verbs code it; 0: that of the path in use */
    uint16_t pkey_index;
};

/*
 * The address of a port. Exchange addresses with the peer: the structure is the same on all
 * machines with the same byte order.
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
    UNBAPM_LOADING = 1,   /* an alternate path is being loaded */
    UNBAPM_REARM = 2,     /* it has one, and the peer is not ready yet */
    UNBAPM_ARMED = 3,     /* both ends are ready */
    UNBAPM_MIGRATING = 4, /* unbapm_migrate was called */
    /* the device refused the path, or the queue pair is in error; unbapm_load tries again */
    UNBAPM_FAILED = 5
};

enum unbapm_event_type {
    UNBAPM_EVENT_ARMED = 0,
    /*
     * path: the one now in use; asked: 1 after unbapm_migrate, 0 if the device or the peer migrated
     */
    UNBAPM_EVENT_MIGRATED = 1,
    UNBAPM_EVENT_MIGRATION_FAILED = 2, /* the QP stays on its path; path: the one that failed */
    UNBAPM_EVENT_UNHEALTHY = 3,        /* the port of the loaded path (path) went down */
    UNBAPM_EVENT_HEALTHY = 4,          /* that port is up again, and the path is still loaded */
    /*
     * path: the one that has replaced the loaded path. Inform the peer, which must specify and load
     * the corresponding path
     */
    UNBAPM_EVENT_RESPECIFIED = 5,
    /* not armed within load_timeout_ms; the library continues to wait */
    UNBAPM_EVENT_LOAD_LATE = 6,
    UNBAPM_EVENT_LOAD_FAILED = 7,      /* the device refused the path; error has its errno */
    UNBAPM_EVENT_QP_FAILED = 8         /* the queue pair is in error or reset */
};

struct unbapm_event {
    enum unbapm_event_type type;
    int error;
    struct ibv_qp *qp;
    uint64_t time_us; /* CLOCK_MONOTONIC time of detection */
    struct unbapm_path path;
    int asked;
};

/* Zeros and NULLs select defaults. */
struct unbapm_options {
    size_t size;
    /* 1: the program reads the asynchronous events itself, see unbapm_handle_event */
    int no_thread;
    int manual;                   /* 1: only unbapm_load loads paths */
    /*
     * 1: replace a path whose port is down by the next best. The program informs the peer, see
     * UNBAPM_EVENT_RESPECIFIED
     */
    int respecify;
    int gid_index;                /* for unbapm_addresses, on all ports */
    /*
     * the event_type with which the device reports that a queue pair is ARMED; libibverbs defines
     * none
     */
    int armed_event;
    uint32_t load_timeout_ms;     /* 10,000 */
    uint32_t migrate_timeout_ms;  /* 2,000 */
    /*
     * Replaces unbapm_poll_events. Called by the library's thread, one call at a time; without a
     * thread, by the function that detects the event.
     */
    void (*on_event)(void *arg, const struct unbapm_event *event);
    /*
     * Gets all asynchronous events that are not about migrations of the library's queue pairs, and
     * all port events. Do not acknowledge them.
     */
    void (*on_other)(void *arg, const struct ibv_async_event *event);
    void *arg;
};

#define UNBAPM_OPTIONS_INITIALIZER \
    { sizeof(struct unbapm_options), 0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL }

/*
 * The error message of this thread's last failed call; "" before the first. Valid until the next
 * failed call.
 */
const char *unbapm_last_error(void);
const char *unbapm_state_str(enum unbapm_state state);
const char *unbapm_event_str(enum unbapm_event_type type);

/*
 * Unless no_thread is set, a thread of the library reads all asynchronous events of the context
 * until unbapm_close; meanwhile, its async_fd is O_NONBLOCK. ENOSYS: the process has no libibverbs.
 * EOPNOTSUPP: the device does not support automatic path migration. options may be NULL.
 */
int unbapm_open(struct ibv_context *context, const struct unbapm_options *options, unbapm_t *apm);
/* Does not change the queue pairs. No callback runs after it has returned. */
int unbapm_close(unbapm_t apm);

/* Queries the device for the path in use, and for a path that the program has loaded itself. */
int unbapm_add(unbapm_t apm, struct ibv_qp *const *qps, int count);
/*
 * After it has returned, no callback is about these queue pairs, except one that calls this
 * function.
 */
int unbapm_remove(unbapm_t apm, struct ibv_qp *const *qps, int count);

/*
 * unbapm_set_process records to which process queue pairs lead (for example an MPI rank; the
 * program chooses the number); the default is 0. unbapm_of_processes returns the queue pairs of a
 * list of processes, in no particular order. *count is the capacity of the list, and then the
 * number of queue pairs. ENOSPC: there are more. NULL and 0: return only the number. ENOENT: no
 * process in the list has a queue pair.
 */
int unbapm_set_process(unbapm_t apm, struct ibv_qp *const *qps, int count, uint64_t process);
int unbapm_of_processes(unbapm_t apm, const uint64_t *processes, int process_count,
        struct ibv_qp **qps, int *count);

/*
 * Alternate path specification: at most 16 paths for a queue pair, the best first. If the path in
 * use is not among them, it counts as the best.
 */
int unbapm_specify(unbapm_t apm, struct ibv_qp *const *qps, int count,
        const struct unbapm_path *paths, int path_count);
/*
 * The same, with paths chosen from this device's ports and the peer's addresses, which must include
 * that of the path in use. Paths with other ports at both ends come first, then those with another
 * port at one end, then (InfiniBand) other path bits. Both ends choose corresponding paths.
 * EHOSTUNREACH: there is no other path.
 */
int unbapm_choose(unbapm_t apm, struct ibv_qp *const *qps, int count,
        const struct unbapm_address *peer, int address_count);
/*
 * The addresses of this device, one for each port. *count is the capacity of the list, and then the
 * number of addresses.
 */
int unbapm_addresses(unbapm_t apm, struct unbapm_address *list, int *count);

/*
 * Path loading: loads the best path that is not in use into the device, with IBV_MIG_REARM, if the
 * path is healthy, that is, if its port is up. From then on, the library loads it again after each
 * migration as soon as it is healthy, unless `manual` is set. Other paths than the best are loaded
 * only with `respecify`: ends that load different paths cannot follow each other, and neither knows
 * the state of the other's ports. ENETDOWN: the path is not healthy now.
 */
int unbapm_load(unbapm_t apm, struct ibv_qp *const *qps, int count);

/* Path migration of queue pairs in state ARMED; EBUSY: one is in another state. */
int unbapm_migrate(unbapm_t apm, struct ibv_qp *const *qps, int count);

enum unbapm_until {
    UNBAPM_UNTIL_ARMED = 0,   /* each has been ARMED at some time since the call */
    UNBAPM_UNTIL_MIGRATED = 1 /* no requested migration is in progress */
};
enum unbapm_how {
    UNBAPM_BY_EVENT = 0, /* sleep until the library's thread gets the event */
    /* query the device in this thread, at least once; this also detects what the peer has done */
    UNBAPM_BY_QUERY = 1
};
/* ETIMEDOUT; EIO: a queue pair has failed. */
int unbapm_wait(unbapm_t apm, struct ibv_qp *const *qps, int count, enum unbapm_until until,
        enum unbapm_how how, uint32_t timeout_ms);

struct unbapm_info {
    enum unbapm_state state;
    int loaded;                   /* 1: `alternate` is in the device */
    int healthy;                  /* 1: and its port is up */
    int paths;                    /* specified or chosen paths, including the one in use */
    uint64_t migrations;
    /*
     * the path in use: the device's when the queue pair was added, or the one after the last
     * migration
     */
    struct unbapm_path primary;
    struct unbapm_path alternate; /* loaded */
};
/* The library's own state; does not query the device. */
int unbapm_query(unbapm_t apm, struct ibv_qp *qp, struct unbapm_info *info);

/*
 * A descriptor for poll(2), which is readable while there are events. With on_event there are none.
 */
int unbapm_fd(unbapm_t apm, int *fd);
/*
 * *count is the capacity of the list, and then the number of events. ENOBUFS: there were more than
 * 65,536 events, and the oldest are lost.
 */
int unbapm_poll_events(unbapm_t apm, struct unbapm_event *events, int *count);

/*
 * For programs with no_thread: pass each event of ibv_get_async_event. *taken is 1 if it was about
 * a migration of the library's queue pairs. Acknowledge the event afterwards. taken may be NULL.
 */
int unbapm_handle_event(unbapm_t apm, const struct ibv_async_event *event, int *taken);
/*
 * Does the work that is due. *next_us: call again within this time; UINT64_MAX: there is no further
 * work. next_us may be NULL.
 */
int unbapm_progress(unbapm_t apm, uint64_t *next_us);

#ifdef __cplusplus
}
#endif

#endif
