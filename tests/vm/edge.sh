#!/bin/bash
# Runs in the guest: the suite of the host edge with real FRR, its rules as flower rules of Debian's kernel, and with rxe as well as softnic.
# Words given are those of tests/edge/run.py. BFD is slow, since the guest is.
modprobe -a veth vxlan bridge sch_ingress cls_flower act_mirred act_tunnel_key nf_tables
tests=$(dirname "$(readlink -f "$0")")/..
"$tests/edge/run.py" --vm --rules skip_hw --bfd-ms 300 "$@"; status=$?
# The logs go with the guest: where errors are (stderr first, what was buffered last).
[ $status = 0 ] || for log in "${CARGO_TARGET_DIR:-$tests/../target}"/test-logs/edge/lab/*.log; do
    echo "-- $(basename "$log")"; { sed -n 2,5p "$log"; tail -n 3 "$log"; } | cut -c1-200
done
exit $status
