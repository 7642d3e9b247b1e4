#!/bin/bash
# Runs in the guest: iWARP (siw) under Unbroken is as without. $1 is the unbroken program, $2
# siw.ko.
set -u
run="$1 --runtime /tmp/siw run --devices"; failed=0
is() { if eval "$2"; then echo "ok    $1"; else echo "FAIL  $1: $2"; failed=1; fi; }
modprobe -a veth ib_uverbs rdma_ucm iw_cm libcrc32c rdma_rxe && insmod "$2" || exit 1
ip link add W0 mtu 4200 type veth peer name W1 mtu 4200
ip addr add 10.9.9.1/24 dev W0
ip link set W0 up; ip link set W1 up
rdma link add siw0 type siw netdev W0
within() { local end=$((SECONDS + 20)); until eval "$1" || [ $SECONDS -ge $end ]; do sleep 0.1; done; }
within 'rdma link show siw0/1 | grep -q ACTIVE'
for words in ibv_devices "ibv_devinfo -v"; do
    $words >/tmp/without; $run all -- $words >/tmp/with 2>/tmp/said
    is "$words is the same" '[ -s /tmp/with ] && diff /tmp/without /tmp/with'
    is "it says that siw0 is not protected" 'grep -q "siw0: iWARP, which is not protected" /tmp/said'
done
port=18810
for tool in ib_write_bw ib_send_bw ib_read_bw; do
    # Connections of iWARP are rdma_cm's (-R).
    port=$((port + 1)); words="$tool -d siw0 -R -F -n 200 -s 4096 -p $port"
    timeout 60 $run siw0 -- $words >/tmp/server 2>&1 & server=$!
    within 'grep -q "Waiting for client" /tmp/server'
    timeout 60 $run siw0 -- $words 10.9.9.1 >/tmp/client 2>&1; client=$?
    wait $server; server=$?
    is "$tool, passed through" '[ "$client $server" = "0 0" ] || { cat /tmp/client; false; }'
done
rdma link add rxe0 type rxe netdev W1
$run all -- ibv_devices >/tmp/with 2>/tmp/said
is "beside rxe it is left out, and that is said" 'grep -q "siw0: iWARP" /tmp/said && grep -q rxe0 /tmp/with'
$run siw0,rxe0 -- ibv_devices >/tmp/with 2>&1
is "both together are refused" 'grep -q "name only one kind" /tmp/with'
exit $failed
