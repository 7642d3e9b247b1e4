/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What Unbroken adds to the verbs API. A program needs none of it to survive the failure of a NIC.
 */
#ifndef UNBROKEN_H
#define UNBROKEN_H

/*
 * A flag of ibv_send_wr.send_flags: never send this work request a second time. When a NIC fails while it may have run at the peer
 * and it is not known whether it did, the queue pair does not move to another NIC: the application gets the original error, at
 * both ends, at once.
 */
#define UNBROKEN_SEND_NO_REPLAY (1U << 30)

#endif
