#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Slurm's HealthCheckProgram: a node whose jobs met a failure is drained, and so is one whose jobs
# survived with fewer NICs: draining ends no job, it keeps new ones away. In slurm.conf:
#   HealthCheckProgram=/usr/share/unbroken/monitoring/slurm-health-check.sh
#   HealthCheckInterval=60
#   HealthCheckNodeState=ANY,CYCLE
# It looks at the runtime folders that slurm-task-prolog.sh names, each as the user whose it is,
# since nothing else in /dev/shm is to be trusted by root. An argument is another folder than
# /dev/shm. DRAIN_WHEN=failed, in a script of yours that starts this one: only a failure drains.
set -u
# slurmd gives no PATH, and `timeout` looks in other places than this shell then.
PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
export PATH
unbroken=${UNBROKEN:-unbroken}
scontrol=${SCONTROL:-scontrol}
node=${SLURMD_NODENAME:-$(hostname -s)}
worst=0
healthy=0
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
    case $status in
        0) healthy=1 ;;
        1) [ "${DRAIN_WHEN:-degraded}" = degraded ] || status=0 ;;
        2) ;;
        *) unknown=1 status=0 ;;
    esac
    if [ "$status" -gt "$worst" ]; then
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
            *Reason=unbroken:*) ;;
            *) exit 0 ;;
        esac
        # A job that has ended has taken its folder along, and the NIC may be as dead as before.
        if [ "$healthy" = 1 ] || timeout 30 "$unbroken" doctor >/dev/null 2>&1; then
            "$scontrol" update NodeName="$node" State=RESUME
        fi
        ;;
esac
exit 0
