/* A test of somebody else's program in the lab of unbroken/lab.h, as docs/guide/lab.md shows it. */
#include <err.h>
#include <unbroken/lab.h>

#define ENOUGH 10000000u

/* Ends the test where a call of the lab has failed. */
static void must(struct unblab *lab, int result)
{
    if (result < 0)
        errx(1, "%s", lab->error);
}

/* ibv_rc_pingpong from host a to host b, over NIC 0 of each. */
static void start(struct unblab *lab, struct unblab_program ends[2], int failover)
{
    char port[16];
    const char *server[] = { "ibv_rc_pingpong", "-d", "unb0", "-g", "0", "-s", "65536",
                 "-n", "15000", "-p", port, NULL };
    const char *client[] = { "ibv_rc_pingpong", "-d", "unb0", "-g", "0", "-s", "65536",
                 "-n", "15000", "-p", port, "127.0.0.1", NULL };
    int number = unblab_free_port(lab);

    must(lab, number);
    snprintf(port, sizeof(port), "%d", number);
    must(lab, unblab_start(lab, &ends[1], "b", failover, server));
    must(lab, unblab_wait_for_listener(&ends[1], number, 20000));
    must(lab, unblab_start(lab, &ends[0], "a", failover, client));
    must(lab, unblab_wait_for_traffic(lab, "a/0", ENOUGH, 20000));
    must(lab, unblab_fault(lab, "nic a/0 dead"));
}

/* The program outlives its NIC; the other one carries what is left. */
static void with_failover(const char *command)
{
    struct unblab_program ends[2];
    struct unblab_traffic traffic;
    struct unblab lab;

    must(&lab, unblab_open(&lab, command, "a,b", 2));
    start(&lab, ends, 1);
    must(&lab, unblab_wait_for_switch(&lab, "a", 20000));
    must(&lab, unblab_succeed(&ends[0], 60000));
    must(&lab, unblab_succeed(&ends[1], 60000));
    must(&lab, unblab_assert_carried(&lab, "a/1", ENOUGH, UINT64_MAX));
    must(&lab, unblab_traffic(&lab, "a/1", &traffic));
    printf("%llu bytes by the other NIC\n",
           (unsigned long long)(traffic.tx_bytes + traffic.rx_bytes));
    unblab_close(&lab);
}

/* Without failover it ends with an error, and the other NIC is unused. */
static void without_failover(const char *command)
{
    struct unblab_program ends[2];
    struct unblab lab;

    must(&lab, unblab_open(&lab, command, "a,b", 2));
    start(&lab, ends, 0);
    must(&lab, unblab_wait(&ends[0], 60000));
    if (ends[0].status <= 0)
        errx(1, "status %d, where an error was due", ends[0].status);
    unblab_kill(&ends[1]);
    must(&lab, unblab_assert_carried(&lab, "a/1", 0, 0));
    /* What does not hold is told. */
    if (unblab_succeed(&ends[0], 0) == 0 || !strstr(lab.error, "ended with status"))
        errx(1, "a failed program has succeeded: %s", lab.error);
    if (unblab_assert_carried(&lab, "a/1", 1, UINT64_MAX) == 0 ||
        !strstr(lab.error, "NIC a/1 carried 0 bytes, not 1 to"))
        errx(1, "an unused NIC has carried something: %s", lab.error);
    unblab_close(&lab);
}

/* A program that still runs when its lab is closed is ended. */
static void closed(const char *command)
{
    const char *sleeps[] = { "sleep", "600", NULL };
    struct unblab_program program;
    struct unblab lab;

    must(&lab, unblab_open(&lab, command, "a", 1));
    must(&lab, unblab_start(&lab, &program, "a", 1, sleeps));
    if (!unblab_runs(&program))
        errx(1, "sleep has ended with %d", program.status);
    unblab_close(&lab);
    if (kill(program.pid, 0) == 0 || access(lab.folder, F_OK) == 0)
        errx(1, "%s or process %d is left", lab.folder, (int)program.pid);
}

/* What is wrong is said. */
static void mistakes(const char *command)
{
    struct unblab_traffic traffic;
    struct unblab lab;

    if (unblab_open(&lab, "/no/such/unbroken", "a,b", 2) == 0 ||
        !strstr(lab.error, "there is no command"))
        errx(1, "no command: %s", lab.error);
    if (unblab_open(&lab, command, "a,b", 1000) == 0 || !strstr(lab.error, "1000"))
        errx(1, "1000 NICs: %s", lab.error);
    must(&lab, unblab_open(&lab, command, "a,b", 1));
    if (unblab_traffic(&lab, "c/0", &traffic) == 0 || !strstr(lab.error, "no NIC c/0"))
        errx(1, "c/0: %s", lab.error);
    if (unblab_fault(&lab, "nic c/0 dead") == 0 || !strstr(lab.error, "c"))
        errx(1, "fault of c/0: %s", lab.error);
    unblab_close(&lab);
}

/* Dies in the middle; who started it looks whether anything is left. */
static void aborted(const char *command)
{
    const char *sleeps[] = { "sleep", "600", NULL };
    struct unblab_program program;
    struct unblab lab;

    must(&lab, unblab_open(&lab, command, "a,b", 1));
    must(&lab, unblab_start(&lab, &program, "a", 1, sleeps));
    printf("%s %d\n", lab.folder, (int)program.pid);
    fflush(stdout);
    abort();
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : NULL;

    if (argc > 2) {
        aborted(command);
        return 1;
    }
    with_failover(command);
    without_failover(command);
    closed(command);
    mistakes(command);
    return 0;
}
