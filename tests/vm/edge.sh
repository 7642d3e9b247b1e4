#!/bin/bash
# Runs in the guest: the tests of the host edge with real FRR, its rules as flower rules of Debian's
# kernel, and with rxe as well as softnic. Arguments are pytest's, as in `edge.sh -k rxe`.
modprobe -a veth vxlan bridge sch_ingress cls_flower act_mirred act_tunnel_key nf_tables
cd "$(dirname "$(readlink -f "$0")")/../.." || exit 1
tests=(tests/e2e/test_edge.py tests/e2e/test_edge_two_hosts.py)
/usr/bin/python3 -m pytest -p no:cacheprovider --vm -v "${tests[@]}" "$@"; status=$?
# The logs go with the guest: where errors are (stderr first, what was buffered last).
[ $status = 0 ] || for log in "${CARGO_TARGET_DIR:-target}"/test-logs/edge/lab/*.log; do
    echo "-- $(basename "$log")"; { sed -n 2,5p "$log"; tail -n 3 "$log"; } | cut -c1-200
done
exit $status
