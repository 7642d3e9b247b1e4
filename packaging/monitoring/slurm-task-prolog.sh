#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Slurm's TaskProlog: each job has a runtime folder of its own, where the job asks for Unbroken
# (UNBROKEN_DEVICES set). What it prints as `export` is set for the task.
[ -n "${UNBROKEN_DEVICES:-}" ] || exit 0
echo "export UNBROKEN_RUNTIME=/dev/shm/unbroken-$(id -u)-job-$SLURM_JOB_ID"
