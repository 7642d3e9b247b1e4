#!/bin/bash
# Runs in the guest: the suite of the host edge with real FRR, its rules as flower rules of Debian's kernel, and with rxe as well as softnic.
# Words given are those of tests/edge/run.py. BFD is slow, since the guest is.
modprobe -a veth vxlan bridge sch_ingress cls_flower act_mirred act_tunnel_key nf_tables
tests=$(dirname "$(readlink -f "$0")")/..
"$tests/edge/run.py" --vm --rules skip_hw --bfd-ms 300 "$@"; status=$?
# The logs go with the guest.
[ $status = 0 ] || tail -n 6 "${CARGO_TARGET_DIR:-$tests/../target}"/test-logs/edge/lab/*.log | cut -c1-200
exit $status
