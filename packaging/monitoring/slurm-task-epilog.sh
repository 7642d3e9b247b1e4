#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Slurm's TaskEpilog: keeps what happened to the job, for `unbroken report`, and takes the runtime
# folder of the job away. JOB_LOGS: where to keep it (default: the job's working directory).
[ -n "${UNBROKEN_DEVICES:-}" ] || exit 0
runtime=/dev/shm/unbroken-$(id -u)-job-$SLURM_JOB_ID
unbroken=${UNBROKEN:-unbroken}
[ -d "$runtime" ] || exit 0
logs=${JOB_LOGS:-${SLURM_SUBMIT_DIR:-.}}
"$unbroken" --runtime "$runtime" events --json >"$logs/unbroken-$SLURM_JOB_ID-$(hostname -s).jsonl"
# The last task to end takes it away; others find it in use.
"$unbroken" --runtime "$runtime" reset >/dev/null 2>&1
exit 0
