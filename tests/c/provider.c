/* A libibverbs for UNBROKEN_LIBIBVERBS whose devices are softnic's plain ones: it hands calls on to
 * a copy of libunbroken.so beside it, which it opens with an environment of its own. So what
 * Unbroken does with devices of the machine can be tested on a machine that has none.
 *
 * TEST_PROVIDER_LIBRARY: the copy. TEST_PROVIDER_RUNTIME, TEST_PROVIDER_HOST: its runtime folder
 * and its host. TEST_PROVIDER_RAILS_MS: device N reaches the devices N of other hosts only. An
 * address handle of it that leads elsewhere takes so long, and is not made: nobody there
 * answers. TEST_PROVIDER_AH_MS: what each other address handle takes; one more byte is in
 * TEST_PROVIDER_AH_FILE then. It registers dma-bufs, which softnic does not: files that can be
 * mapped stand for them. What its devices can be told to be like: provider_knobs.c.
 *
 * TEST_PROVIDER_HANG: a file. While it is there, verbs of control of TEST_PROVIDER_HANG_DEVICE take
 * TEST_PROVIDER_HANG_MS; with TEST_PROVIDER_HANG_VERBS only those that are named there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PREFIX "UNBROKEN_"

typedef long function(long, long, long, long, long, long);
typedef void *symbol_of(void *, const char *);

/* Arguments and results of all of these are integers and pointers, six at most. First those that
 * are no verbs of control of a device, then those of a context, then those of what is in one. */
#define QUICK(F) \
    F(get_device_list) F(free_device_list) F(get_device_name) F(get_async_event) \
    F(ack_async_event) F(query_pkey) F(create_comp_channel) \
    F(get_cq_event) F(ack_cq_events) F(fork_init) F(node_type_str) F(port_state_str) \
    F(event_type_str) F(wc_status_str)
#define OF_CONTEXT(F) F(close_device) F(alloc_pd)
#define OF_OBJECT(F) \
    F(dealloc_pd) F(reg_mr) F(reg_mr_iova) F(rereg_mr) F(dereg_mr) F(destroy_cq) F(create_srq) \
    F(modify_srq) F(query_srq) F(destroy_srq) F(query_qp) F(destroy_qp) F(destroy_ah)
#define FUNCTIONS(F) QUICK(F) OF_CONTEXT(F) OF_OBJECT(F)

/* Not when this library is opened: the copy waits for a thread that it starts, which needs the
 * loader. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void open_copy(void);
static void *copy;
static symbol_of *look_up;
#define DECLARE(name) static function *real_##name;
FUNCTIONS(DECLARE)

/* A device whose firmware answers no command: a verb of its control takes as long as the file is
 * there, HANG_MS at most. A context begins with its device. */
void provider_hang(const char *verb, void **context)
{
    const char *file = getenv("TEST_PROVIDER_HANG"), *ms = getenv("TEST_PROVIDER_HANG_MS");
    const char *device = getenv("TEST_PROVIDER_HANG_DEVICE");
    const char *verbs = getenv("TEST_PROVIDER_HANG_VERBS");

    if (!file || !device || access(file, F_OK))
        return;
    if (verbs && !strstr(verbs, verb))
        return;
    if (strcmp((const char *)real_get_device_name((long)*context, 0, 0, 0, 0, 0), device))
        return;
    for (long left = ms ? atol(ms) : 60000; left > 0 && !access(file, F_OK); left -= 5)
        usleep(5000);
}

#define ENTRY(name, before) \
    long ibv_##name(long a, long b, long c, long d, long e, long f) \
    { \
        pthread_once(&once, open_copy); \
        before; \
        return real_##name(a, b, c, d, e, f); \
    }
#define FORWARD(name) ENTRY(name, (void)0)
#define FORWARD_OF_CONTEXT(name) ENTRY(name, provider_hang(#name, (void **)a))
#define FORWARD_OF_OBJECT(name) ENTRY(name, provider_hang(#name, *(void ***)a))
QUICK(FORWARD)
OF_CONTEXT(FORWARD_OF_CONTEXT)
OF_OBJECT(FORWARD_OF_OBJECT)

/* The copy's function of that name. */
void *provider_real(const char *name)
{
    pthread_once(&once, open_copy);
    return look_up(copy, name);
}

/* Whether an address handle can lead there, once that has taken its time. `ibv_pd` and
 * `ibv_context` begin with their context and their device; `ibv_ah_attr` with the GID. */
int provider_rails(void ***pd, const unsigned char *to)
{
    const char *ms = getenv("TEST_PROVIDER_RAILS_MS");
    pthread_once(&once, open_copy);
    const char *name = (const char *)real_get_device_name((long)**pd, 0, 0, 0, 0, 0);
    if (ms && name[strlen(name) - 1] - '0' != to[15]) {
        usleep(1000 * strtoul(ms, NULL, 10));
        errno = ETIMEDOUT;
        return 0;
    }
    if ((ms = getenv("TEST_PROVIDER_AH_MS"))) {
        const char *file = getenv("TEST_PROVIDER_AH_FILE");
        FILE *made;
        usleep(1000 * strtoul(ms, NULL, 10));
        if (file && (made = fopen(file, "a"))) {
            fputc('.', made);
            fclose(made);
        }
    }
    return 1;
}

/* A dma-buf is any file that can be mapped: its pages are what a device reaches. */
long ibv_reg_dmabuf_mr(long pd, unsigned long offset, unsigned long length, long iova, int fd,
                       int access)
{
    void *at;

    pthread_once(&once, open_copy);
    if (fd < 0) {
        errno = EBADF;
        return 0;
    }
    at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    if (at == MAP_FAILED)
        return 0;
    return ((function *)provider_real("ibv_reg_mr_iova2"))(pd, (long)at, length, iova, access, 0);
}

extern char **environ;

/* Takes all variables of ours out of the environment, and keeps them. */
static char **take_ours(void)
{
    size_t n = 0, kept = 0;
    while (environ[n])
        n++;
    char **ours = calloc(n + 1, sizeof *ours);
    for (size_t i = 0; ours && i < n; i++)
        if (!strncmp(environ[i], PREFIX, strlen(PREFIX)))
            ours[kept++] = strdup(environ[i]);
    for (size_t i = 0; i < kept; i++) {
        char *name = strndup(ours[i], strcspn(ours[i], "="));
        unsetenv(name);
        free(name);
    }
    return ours;
}

static void give_back(char **ours)
{
    unsetenv("UNBROKEN_RUNTIME");
    unsetenv("UNBROKEN_HOST");
    unsetenv("UNBROKEN_FAILOVER");
    for (size_t i = 0; ours && ours[i]; i++)
        putenv(ours[i]); /* it belongs to the environment now */
    free(ours);
}

static void open_copy(void)
{
    const char *library = getenv("TEST_PROVIDER_LIBRARY"),
               *runtime = getenv("TEST_PROVIDER_RUNTIME");
    const char *host = getenv("TEST_PROVIDER_HOST");
    if (!library || !runtime || !host) {
        fprintf(stderr, "provider.c: TEST_PROVIDER_LIBRARY, _RUNTIME and _HOST are to be set\n");
        abort();
    }
    char **ours = take_ours();
    setenv("UNBROKEN_RUNTIME", runtime, 1);
    setenv("UNBROKEN_HOST", host, 1);
    setenv("UNBROKEN_FAILOVER", "0", 1);
    copy = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!copy) {
        fprintf(stderr, "provider.c: %s\n", dlerror());
        abort();
    }
    /* By the copy's own `dlsym`: the process's may be that of the library above, which answers for
     * verbs itself. */
    look_up = (symbol_of *)dlsym(copy, "dlsym");
    look_up = look_up ? look_up : dlsym;
#define RESOLVE(name) real_##name = (function *)look_up(copy, "ibv_" #name);
    FUNCTIONS(RESOLVE)
    /* It reads its environment now. */
    long list = real_get_device_list(0, 0, 0, 0, 0, 0);
    if (list)
        real_free_device_list(list, 0, 0, 0, 0, 0);
    real_fork_init(0, 0, 0, 0, 0, 0);
    give_back(ours);
}
