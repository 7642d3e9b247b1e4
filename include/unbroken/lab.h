/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lab for tests of RDMA programs, in one header: an emulated network of the test's own, programs
 * on its hosts, faults by call, and what each NIC has carried. It runs the command `unbroken`, and
 * links with nothing. docs/guide/lab.md has an example.
 *
 *     struct unblab lab;
 *     if (unblab_open(&lab, NULL, "a,b", 2))
 *         errx(1, "%s", lab.error);
 *     …
 *     unblab_close(&lab);
 *
 * Functions give 0 (or what they say), and -1 with the reason in lab.error. A lab is used by one
 * thread at a time; the thread that starts a program has to outlive it. Whatever becomes of the
 * test, abort() and SIGKILL included, its programs are killed and its folder is removed. It needs
 * Linux, and GNU C (-std=gnu11), C11 with _GNU_SOURCE, or C++17.
 */
#ifndef UNBROKEN_LAB_H
#define UNBROKEN_LAB_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* What glibc declares depends on what was asked for before the first of its headers. */
#if defined(__GLIBC__) && !defined(__USE_MISC)
#error "unbroken/lab.h: compile with -std=gnu11, or define _GNU_SOURCE before the first #include"
#endif

/* The most arguments of a program, and of a call of the command. */
#define UNBLAB_MAX_ARGS 128
/* The most programs of a lab, from beginning to end. */
#define UNBLAB_MAX_PROGRAMS 64
/* The most of what the command prints that is read. */
#define UNBLAB_MAX_OUTPUT (8u << 20)
/* How often a condition is looked at while it is waited for. */
#define UNBLAB_LOOK_US 10000
/* TCP ports for programs, below those that the kernel gives away. */
#define UNBLAB_FIRST_PORT 20000
#define UNBLAB_PORTS 12000

/* An emulated network of a test's own. */
struct unblab {
    char folder[64];           /* holds the runtime folder and the logs of programs */
    char command[PATH_MAX];    /* `unbroken`, found in PATH, or where it is */
    char error[1024];          /* what the last call that gave -1 has to say */
    char runtime[96];          /* the environment variable that names the runtime folder */
    char **env;                /* of programs and of the command */
    pid_t guard;               /* removes the folder when this process has ended or closes it */
    int guard_fd;
    pid_t pids[UNBLAB_MAX_PROGRAMS]; /* of programs that were not waited for; else 0 */
    unsigned programs;         /* how many were started */
    unsigned ports;            /* how many were given */
};

/* A program on a host of a lab. */
struct unblab_program {
    struct unblab *lab;
    unsigned number;   /* which of the lab's programs it is */
    pid_t pid;         /* the program's own; 0 once it was waited for */
    int status;        /* its exit status, or minus the signal that ended it */
    char log[96];      /* the file with its output, of both streams */
};

/* Bytes of payload that a NIC has carried since its network was made. */
struct unblab_traffic {
    uint64_t tx_bytes;
    uint64_t rx_bytes;
};

/* What follows up to unblab_open() is for this header alone. */

static inline __attribute__((format(printf, 2, 3))) int
unblab__fail(struct unblab *lab, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(lab->error, sizeof(lab->error), format, args);
    va_end(args);
    return -1;
}

static inline uint64_t unblab__now_us(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static inline void unblab__pause(void)
{
    struct timespec pause = { 0, UNBLAB_LOOK_US * 1000L };

    nanosleep(&pause, NULL);
}

/* This process's environment without UNBROKEN_*, which would lead programs elsewhere. */
static inline char **unblab__environment(char *runtime)
{
    extern char **environ;
    size_t count = 0, kept = 0, n;
    char **env;

    while (environ[count])
        count++;
    env = (char **)calloc(count + 2, sizeof(*env));
    for (n = 0; env && n < count; n++)
        if (strncmp(environ[n], "UNBROKEN_", 9))
            env[kept++] = environ[n];
    if (env)
        env[kept] = runtime;
    return env;
}

/* Starts a program whose standard streams are these; it is killed when this thread has ended. */
static inline pid_t unblab__spawn(struct unblab *lab, char **args, int in, int out, int err)
{
    extern char **environ;
    pid_t parent = getpid(), child = fork();

    if (child)
        return child;
    if (in >= 0)
        dup2(in, 0);
    dup2(out, 1);
    dup2(err, 2);
    if (in < 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(127);
    }
    environ = lab->env;
    execvp(args[0], args);
    _exit(127);
}

static inline int unblab__status(int status)
{
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/* Reads all that comes, up to a limit; what it gives is the caller's to free. */
static inline char *unblab__read_all(int fd)
{
    size_t count = 0, length = 0;
    char *text = NULL, some[4096];
    FILE *all = open_memstream(&text, &length);

    while (all && count < UNBLAB_MAX_OUTPUT) {
        ssize_t n = read(fd, some, sizeof(some));

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        count += fwrite(some, 1, (size_t)n, all);
    }
    if (all)
        fclose(all);
    return text;
}

/* Adds words, which end with NULL, to a command line; gives how many it has then, or -1. */
static inline int unblab__add(struct unblab *lab, char **line, int count, const char *const *words)
{
    for (; *words; words++) {
        if (count == UNBLAB_MAX_ARGS)
            return unblab__fail(lab, "more than %d arguments", UNBLAB_MAX_ARGS);
        line[count++] = (char *)*words;
    }
    return count;
}

/* Runs `unbroken WORDS`, which end with NULL. What it prints is the caller's to free, or NULL. */
static inline char *unblab__command(struct unblab *lab, const char *const *words)
{
    char *args[UNBLAB_MAX_ARGS + 1] = { lab->command }, *text;
    int out[2], status = 0;
    pid_t child;

    if (unblab__add(lab, args, 1, words) < 0)
        return NULL;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, out)) {
        unblab__fail(lab, "no pair of sockets: %s", strerror(errno));
        return NULL;
    }
    child = unblab__spawn(lab, args, -1, out[1], out[1]);
    close(out[1]);
    text = child < 0 ? NULL : unblab__read_all(out[0]);
    close(out[0]);
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    if (child < 0 || !text || unblab__status(status)) {
        if (child > 0 && unblab__status(status) == 127)
            unblab__fail(lab, "there is no command %s; put it into PATH", lab->command);
        else
            unblab__fail(lab, "unbroken %s %s: %.900s", words[0] ? words[0] : "",
                     words[0] && words[1] ? words[1] : "", text ? text : "failed");
        free(text);
        return NULL;
    }
    return text;
}

static inline int unblab__run(struct unblab *lab, const char *const *words)
{
    char *text = unblab__command(lab, words);

    free(text);
    return text ? 0 : -1;
}

/* A shell that waits until nobody can write to its input any more, and then takes all away. */
static inline int unblab__start_guard(struct unblab *lab)
{
    static const char script[] = "trap '' INT HUP TERM; cat >/dev/null; "
                     "\"$0\" reset --force >/dev/null 2>&1; rm -rf -- \"$1\"";
    char *args[] = { (char *)"sh",  (char *)"-c", (char *)script, lab->command,
             lab->folder, NULL };
    int ends[2], null = open("/dev/null", O_WRONLY | O_CLOEXEC);

    if (null < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) {
        if (null >= 0)
            close(null);
        return unblab__fail(lab, "no pair of sockets: %s", strerror(errno));
    }
    lab->guard = unblab__spawn(lab, args, ends[0], null, null);
    lab->guard_fd = ends[1];
    close(ends[0]);
    close(null);
    return lab->guard < 0 ? unblab__fail(lab, "no process: %s", strerror(errno)) : 0;
}

/* A counter of a NIC in what `unbroken metrics` prints. Whether it is there. */
static inline int unblab__counter(const char *text, const char *nic, const char *direction,
                  uint64_t *value)
{
    char what[192];
    const char *found;

    snprintf(what, sizeof(what),
         "\nunbroken_nic_payload_bytes_total{nic=\"%s\",direction=\"%s\"} ",
         nic, direction);
    found = strstr(text, what);
    *value = found ? strtoull(found + strlen(what), NULL, 10) : 0;
    return found != NULL;
}

/* Takes the network away: programs that still run are killed, the folder is removed. */
static inline void unblab_close(struct unblab *lab)
{
    unsigned n;

    for (n = 0; n < lab->programs; n++) {
        if (lab->pids[n] <= 0)
            continue;
        kill(lab->pids[n], SIGKILL);
        while (waitpid(lab->pids[n], NULL, 0) < 0 && errno == EINTR)
            ;
    }
    lab->programs = 0;
    if (lab->guard_fd >= 0)
        close(lab->guard_fd);
    while (lab->guard > 0 && waitpid(lab->guard, NULL, 0) < 0 && errno == EINTR)
        ;
    free(lab->env);
    lab->guard_fd = -1;
    lab->guard = 0;
    lab->env = NULL;
}

/*
 * Makes a network: hosts like "a,b" with so many NICs each; NIC n of all hosts is on rail n.
 * `command` is the path of `unbroken`; NULL: PATH has it. unblab_close() takes it away.
 */
static inline int unblab_open(struct unblab *lab, const char *command, const char *hosts, int nics)
{
    const char *root = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
    char count[16];
    const char *up[] = { "fabric", "up", "--hosts", hosts, "--nics", count, NULL };

    memset(lab, 0, sizeof(*lab));
    lab->guard_fd = -1;
    if (snprintf(lab->command, sizeof(lab->command), "%s", command ? command : "unbroken") >=
        (int)sizeof(lab->command))
        return unblab__fail(lab, "the path of the command is too long");
    snprintf(lab->folder, sizeof(lab->folder), "%s/unbroken-lab-XXXXXX", root);
    if (!mkdtemp(lab->folder))
        return unblab__fail(lab, "no folder in %s: %s", root, strerror(errno));
    snprintf(lab->runtime, sizeof(lab->runtime), "UNBROKEN_RUNTIME=%s/runtime", lab->folder);
    lab->env = unblab__environment(lab->runtime);
    if (!lab->env || unblab__start_guard(lab)) {
        rmdir(lab->folder);
        return lab->env ? -1 : unblab__fail(lab, "no memory");
    }
    snprintf(count, sizeof(count), "%d", nics);
    if (unblab__run(lab, up)) {
        unblab_close(lab);
        return -1;
    }
    return 0;
}

/*
 * Starts a program on a host, whose NICs are its devices unb0, unb1, …; `args` end with NULL.
 * Without failover it meets each failure itself.
 */
static inline int unblab_start(struct unblab *lab, struct unblab_program *program,
                   const char *host, int failover, const char *const *args)
{
    char *line[UNBLAB_MAX_ARGS + 1] = { lab->command, (char *)"run", (char *)"--host",
                        (char *)host };
    int count = 4, log;

    memset(program, 0, sizeof(*program));
    program->lab = lab;
    if (!failover)
        line[count++] = (char *)"--no-failover";
    line[count++] = (char *)"--";
    if (unblab__add(lab, line, count, args) < 0)
        return -1;
    if (lab->programs == UNBLAB_MAX_PROGRAMS)
        return unblab__fail(lab, "more than %d programs", UNBLAB_MAX_PROGRAMS);
    program->number = lab->programs;
    snprintf(program->log, sizeof(program->log), "%s/%u.log", lab->folder, program->number);
    log = open(program->log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (log < 0)
        return unblab__fail(lab, "%s: %s", program->log, strerror(errno));
    program->pid = unblab__spawn(lab, line, -1, log, log);
    close(log);
    if (program->pid < 0)
        return program->pid = 0, unblab__fail(lab, "no process: %s", strerror(errno));
    lab->pids[lab->programs++] = program->pid;
    return 0;
}

/* What a program has written so far, which is the caller's to free; NULL: it cannot be read. */
static inline char *unblab_output(struct unblab_program *program)
{
    int log = open(program->log, O_RDONLY | O_CLOEXEC);
    char *text = log < 0 ? NULL : unblab__read_all(log);

    if (!text)
        unblab__fail(program->lab, "%s: %s", program->log, strerror(errno));
    if (log >= 0)
        close(log);
    return text;
}

/* Looks whether a program has ended; with options 0 it waits for that. */
static inline void unblab__look(struct unblab_program *program, int options)
{
    int status = 0;
    pid_t ended;

    while ((ended = waitpid(program->pid, &status, options)) < 0 && errno == EINTR)
        ;
    if (ended != program->pid)
        return;
    program->lab->pids[program->number] = program->pid = 0;
    program->status = unblab__status(status);
}

/* Whether a program still runs; when it does not, program->status says how it ended. */
static inline int unblab_runs(struct unblab_program *program)
{
    if (program->pid > 0)
        unblab__look(program, WNOHANG);
    return program->pid > 0;
}

/* Ends a program, if it still runs. */
static inline void unblab_kill(struct unblab_program *program)
{
    if (program->pid <= 0)
        return;
    kill(program->pid, SIGKILL);
    unblab__look(program, 0);
}

/* Says what a program has done, with the end of its output. */
static inline int unblab__of_program(struct unblab_program *program, const char *what)
{
    char *text = unblab_output(program);
    size_t length = text ? strlen(text) : 0;

    unblab__fail(program->lab, "the program %s; the end of its output:\n%s", what,
             !text ? "" : length > 800 ? text + length - 800 : text);
    free(text);
    return -1;
}

/* Waits for a program's end; -1: it runs still. program->status says how it ended. */
static inline int unblab_wait(struct unblab_program *program, unsigned timeout_ms)
{
    uint64_t until_us = unblab__now_us() + timeout_ms * (uint64_t)1000;

    while (unblab_runs(program)) {
        if (unblab__now_us() > until_us)
            return unblab__of_program(program, "did not end in time");
        unblab__pause();
    }
    return 0;
}

/* Waits for a program's end with status 0. */
static inline int unblab_succeed(struct unblab_program *program, unsigned timeout_ms)
{
    char what[64];

    if (unblab_wait(program, timeout_ms))
        return -1;
    if (program->status == 0)
        return 0;
    snprintf(what, sizeof(what), "ended with %s %d",
         program->status < 0 ? "signal" : "status", abs(program->status));
    return unblab__of_program(program, what);
}

/* A TCP port on which nobody listens now. Hosts share this machine's network. */
static inline int unblab_free_port(struct unblab *lab)
{
    unsigned first = (unsigned)getpid() * 101u, n;

    for (n = 0; n < UNBLAB_PORTS; n++) {
        struct sockaddr_in at;
        int probe = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), taken, port;

        if (probe < 0)
            return unblab__fail(lab, "no socket: %s", strerror(errno));
        port = UNBLAB_FIRST_PORT + (int)((first + lab->ports++) % UNBLAB_PORTS);
        memset(&at, 0, sizeof(at));
        at.sin_family = AF_INET;
        at.sin_port = htons((uint16_t)port);
        taken = bind(probe, (struct sockaddr *)&at, sizeof(at));
        close(probe);
        if (!taken)
            return port;
    }
    return unblab__fail(lab, "no TCP port is free");
}

/* Whether a TCP port has a listener in a program's network. */
static inline int unblab__listens(pid_t pid, const char *table, int port)
{
    char path[64], entry[256];
    int found = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/net/%s", (int)pid, table);
    file = fopen(path, "re");
    while (file && !found && fgets(entry, sizeof(entry), file)) {
        unsigned local = 0, state = 0;

        /* "sl: ADDRESS:PORT ADDRESS:PORT STATE"; 10 is TCP_LISTEN. */
        if (sscanf(entry, " %*u: %*[0-9A-F]:%x %*[0-9A-F]:%*x %x", &local, &state) == 2)
            found = local == (unsigned)port && state == 10;
    }
    if (file)
        fclose(file);
    return found;
}

/* Waits until a TCP port has a listener; -1, too, where the program has ended. */
static inline int unblab_wait_for_listener(struct unblab_program *program, int port,
                       unsigned timeout_ms)
{
    uint64_t until_us = unblab__now_us() + timeout_ms * (uint64_t)1000;

    while (unblab_runs(program)) {
        if (unblab__listens(program->pid, "tcp", port) ||
            unblab__listens(program->pid, "tcp6", port))
            return 0;
        if (unblab__now_us() > until_us)
            return unblab__of_program(program, "does not listen");
        unblab__pause();
    }
    return unblab__of_program(program, "ended before it listened");
}

/* Sets a fault (docs/reference/faults.md), like "nic a/0 dead", until it is cleared. */
static inline int unblab_fault(struct unblab *lab, const char *fault)
{
    const char *words[] = { "fault", "set", fault, NULL };

    return unblab__run(lab, words);
}

/* Clears a fault, or those that begin so ("nic a/0"); NULL: all. */
static inline int unblab_clear(struct unblab *lab, const char *fault)
{
    const char *words[] = { "fault", "clear", fault, NULL };

    return unblab__run(lab, words);
}

/* What a NIC like "a/0" has carried so far. */
static inline int unblab_traffic(struct unblab *lab, const char *nic,
                 struct unblab_traffic *traffic)
{
    const char *words[] = { "metrics", NULL };
    char *text = unblab__command(lab, words);
    int there;

    memset(traffic, 0, sizeof(*traffic));
    there = text && unblab__counter(text, nic, "tx", &traffic->tx_bytes) &&
        unblab__counter(text, nic, "rx", &traffic->rx_bytes);
    if (text && !there)
        unblab__fail(lab, "there is no NIC %s", nic);
    free(text);
    return there ? 0 : -1;
}

/* Waits until a NIC has sent and received so many bytes of payload more, in all. */
static inline int unblab_wait_for_traffic(struct unblab *lab, const char *nic, uint64_t more_bytes,
                      unsigned timeout_ms)
{
    uint64_t until_us = unblab__now_us() + timeout_ms * (uint64_t)1000;
    struct unblab_traffic before, now;

    if (unblab_traffic(lab, nic, &before))
        return -1;
    for (;;) {
        uint64_t bytes;

        if (unblab_traffic(lab, nic, &now))
            return -1;
        bytes = now.tx_bytes + now.rx_bytes - before.tx_bytes - before.rx_bytes;
        if (bytes >= more_bytes)
            return 0;
        if (unblab__now_us() > until_us)
            return unblab__fail(lab, "NIC %s carried %llu bytes more, not %llu", nic,
                        (unsigned long long)bytes,
                        (unsigned long long)more_bytes);
        unblab__pause();
    }
}

/* Fails unless a NIC has carried so many bytes of payload, sent and received together. */
static inline int unblab_assert_carried(struct unblab *lab, const char *nic, uint64_t at_least,
                    uint64_t at_most)
{
    struct unblab_traffic traffic;
    uint64_t bytes;

    if (unblab_traffic(lab, nic, &traffic))
        return -1;
    bytes = traffic.tx_bytes + traffic.rx_bytes;
    if (bytes >= at_least && bytes <= at_most)
        return 0;
    return unblab__fail(lab, "NIC %s carried %llu bytes, not %llu to %llu", nic,
                (unsigned long long)bytes, (unsigned long long)at_least,
                (unsigned long long)at_most);
}

/* How often queue pairs of a host have gone to another path, or back; NULL: of all hosts. */
static inline int unblab_switches(struct unblab *lab, const char *host)
{
    const char *words[] = { "events", "--json", NULL };
    char of_host[128], *text = unblab__command(lab, words), *line, *rest = NULL;
    int count = 0;

    if (!text)
        return -1;
    snprintf(of_host, sizeof(of_host), "\"host\":\"%s\"", host ? host : "");
    for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        count += strstr(line, "\"event\":\"switch\"") && (!host || strstr(line, of_host));
    free(text);
    return count;
}

/* Waits until a queue pair of a host has gone to another path; NULL: of any host. */
static inline int unblab_wait_for_switch(struct unblab *lab, const char *host, unsigned timeout_ms)
{
    uint64_t until_us = unblab__now_us() + timeout_ms * (uint64_t)1000;

    for (;;) {
        int count = unblab_switches(lab, host);

        if (count)
            return count < 0 ? -1 : 0;
        if (unblab__now_us() > until_us)
            return unblab__fail(lab, "no switch in time at host %s",
                        host ? host : "any");
        unblab__pause();
    }
}

#endif
