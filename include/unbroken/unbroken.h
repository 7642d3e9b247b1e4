/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All headers of Unbroken but lab.h, its version, and what it adds to the verbs API. A program
 * needs none of it to survive the failure of a NIC. apm.h needs the headers of libibverbs; a
 * program without them includes coll.h, sdr.h or sdr_ext.h by itself.
 */
#ifndef UNBROKEN_H
#define UNBROKEN_H

#include "apm.h"
#include "coll.h"
#include "sdr.h"
#include "sdr_ext.h"

#define UNBROKEN_VERSION_MAJOR 0
#define UNBROKEN_VERSION_MINOR 1
#define UNBROKEN_VERSION_PATCH 0
/*
 * 10,000 times the major number, 100 times the minor, and the patch: as ubcollGetVersion() has it.
 */
#define UNBROKEN_VERSION \
    (UNBROKEN_VERSION_MAJOR * 10000 + UNBROKEN_VERSION_MINOR * 100 + UNBROKEN_VERSION_PATCH)

/*
 * A flag of ibv_send_wr.send_flags: never send this work request a second time. A NIC may fail
 * when it is not known whether the peer has run the request. With this flag the queue pair then
 * does not move to another NIC: the application gets the original error, at both ends, at once.
 */
#define UNBROKEN_SEND_NO_REPLAY (1U << 30)

#endif
