#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Slurm's HealthCheckProgram: a node whose jobs met a failure is drained, and so is one whose jobs
# survived with fewer NICs: draining ends no job, it keeps new ones away. In slurm.conf:
#   HealthCheckProgram=/usr/share/unbroken/monitoring/slurm-health-check.sh
#   HealthCheckInterval=60
#   HealthCheckNodeState=ANY,CYCLE
# It looks at the runtime folders that slurm-task-prolog.sh names, each as the user whose it is,
# since nothing else in /dev/shm is to be trusted by root. An argument is another folder than
# /dev/shm.
set -u
unbroken=${UNBROKEN:-unbroken}
scontrol=${SCONTROL:-scontrol}
node=${SLURMD_NODENAME:-$(hostname -s)}
worst=0
unknown=0
reason=
for runtime in "${1:-/dev/shm}"/unbroken-*-job-*; do
    [ -d "$runtime" ] && [ ! -L "$runtime" ] || continue
    uid=$(stat -c %u "$runtime") || continue
    case ${runtime##*/} in "unbroken-$uid-job-"*) ;; *) continue ;; esac
    if [ "$uid" = "$(id -u)" ]; then
        said=$(timeout 10 "$unbroken" --runtime "$runtime" health)
    else
        said=$(timeout 10 setpriv --reuid "$uid" --regid "$(stat -c %g "$runtime")" \
            --clear-groups "$unbroken" --runtime "$runtime" health)
    fi
    status=$?
    # 3 or a timeout: no verdict was possible. That is no reason to take a node away, nor to give
    # one back.
    [ "$status" -le 2 ] || unknown=1
    if [ "$status" -le 2 ] && [ "$status" -gt "$worst" ]; then
        worst=$status
        reason=$(printf '%s\n' "$said" | sed -n 2p | tr -cd '[:alnum:] .,;:%/_-' | cut -c 1-120)
    fi
done
drain() {
    "$scontrol" update NodeName="$node" State=DRAIN Reason="unbroken: $1: $reason"
}
case $worst in
    1) drain "degraded, survived" ;;
    2) drain failed ;;
    *)
        [ "$unknown" = 0 ] || exit 0
        # What this script has drained comes back when all is well; what others drained stays.
        case $("$scontrol" -o show node "$node" 2>/dev/null) in
            *Reason=unbroken:*) "$scontrol" update NodeName="$node" State=RESUME ;;
        esac
        ;;
esac
exit 0
