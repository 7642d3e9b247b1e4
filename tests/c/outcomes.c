/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a program is told: it provokes each WC status and each asynchronous event that a program can
 * cause, and prints a line for each case with what both ends got.
 *
 *   outcomes [CASE...]       all cases without any; "event NAME", "status NAME": one that a device
 *                            raises, or completes a send with
 *
 * A line is: case | the first end | the second. docs/reference/errors.md has them.
 *
 * TEST_PROTECTED: a command that succeeds when failover protects all QPs. TEST_FAULT: a command
 * that sets a fault of the network; TEST_CLEAR clears it; TEST_DEVICE_FAULT sets one of a device of
 * the machine. TEST_SWITCHED succeeds once the QP of a number has switched.
 */
#include "outcomes_faults.h"
#include "outcomes_others.h"
#include "outcomes_rc.h"

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    { "all succeed", success },
    { "first message in RTR", comm_est },
    { "message longer than the receive", send_too_long },
    { "send with a wrong lkey", bad_lkey_of_send },
    { "receive with a wrong lkey", bad_lkey_of_recv },
    { "WRITE with a wrong rkey", bad_rkey_of_write },
    { "READ with a wrong rkey", bad_rkey_of_read },
    { "atomic with a wrong rkey", bad_rkey_of_atomic },
    { "atomic at an odd address", odd_atomic },
    { "READ that the peer has no room for", too_many_reads },
    { "peer destroyed", peer_destroyed },
    { "peer destroyed, with an SRQ", peer_destroyed_srq },
    { "peer in ERR", peer_in_err },
    { "wrong QPN of the peer", wrong_qpn },
    { "wrong QPN of the peer, with an SRQ", wrong_qpn_srq },
    { "no receive", no_receive },
    { "to ERR", own_err },
    { "to SQD", drained },
    { "to ERR with an SRQ", last_wqe },
    { "to ERR with an SRQ, UC", last_wqe_uc },
    { "to ERR with an SRQ, UD", last_wqe_ud },
    { "wrong rkey at an SRQ", last_wqe_by_error },
    { "message longer than the receive of an SRQ", srq_recv_too_short },
    { "limit of an SRQ", srq_limit },
    { "overrun by receives", overrun_of_recvs },
    { "overrun by sends", overrun_of_sends },
    { "overrun by sends, UC", overrun_uc },
    { "overrun by receives, UD", overrun_ud },
    { "send with a wrong lkey, UC", bad_lkey_uc },
    { "send with a wrong lkey, UD", bad_lkey_ud },
    { "receive with a wrong lkey, UC", bad_recv_uc },
    { "receive with a wrong lkey, UD", bad_recv_ud },
    { "message longer than the receive, UC", too_long_uc },
    { "message longer than the receive, UD", too_long_ud },
    { "migration", migrated },
    { "window of a region without rights", bad_window },
    { "port down and up", port_down },
    { "port down and up, UC", port_down_uc },
    { "port down and up, watched", port_down_watched },
    { "device dead", device_fatal },
};

static const char event[] = "event ", status[] = "status ";

static bool begins(const char *name, const char *with)
{
    return !strncmp(name, with, strlen(with));
}

static void run_case(const char *name, void (*run)(void))
{
    without_counts = false;
    printf("%s | ", name);
    if (run)
        run();
    else if (begins(name, event))
        raised(name + strlen(event));
    else
        struck(name + strlen(status));
    printf("\n");
    fflush(stdout);
    drop_end(&a);
    drop_end(&b);
}

int main(int argc, char **argv)
{
    size_t count = sizeof cases / sizeof *cases;

    open_end(&a, 0);
    open_end(&b, 1);
    for (size_t i = 0; i < count && argc < 2; i++)
        run_case(cases[i].name, cases[i].run);
    for (int k = 1; k < argc; k++) {
        size_t i = 0;

        while (i < count && strcmp(argv[k], cases[i].name))
            i++;
        if (i == count && !begins(argv[k], event) && !begins(argv[k], status))
            fail("no case is called '%s'", argv[k]);
        run_case(argv[k], i < count ? cases[i].run : NULL);
    }
    return 0;
}
