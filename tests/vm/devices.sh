#!/bin/bash
# Runs in the guest: two "hosts" A and B in one namespace, each with two devices of rxe; A0 is
# joined with B0, A1 with B1. (rxe of Linux 6.1 works in the initial namespace only, so rules by the
# device that a packet leaves by keep the hosts apart.) Then the tests of devices of the machine;
# arguments are pytest's.
set -e
modprobe -a veth ib_uverbs rdma_ucm rdma_rxe sch_netem
ip rule add pref 200 lookup local
ip rule del pref 0
sysctl -qw net.ipv4.conf.all.accept_local=1 net.ipv4.conf.all.rp_filter=0 \
    net.ipv4.conf.default.rp_filter=0 net.ipv4.conf.default.accept_local=1
for i in 0 1; do
    ip link add A$i mtu 4200 address 02:00:00:00:0a:0$i type veth \
        peer name B$i mtu 4200 address 02:00:00:00:0b:0$i
    for h in A B; do
        if [ $h = A ]; then n=1 p=2; else n=2 p=1; fi
        ip addr add 10.0.$i.$n/24 dev $h$i
        ip link set $h$i up
        ip rule add pref 100 oif $h$i lookup 10$n$i
        ip route add 10.0.$i.$p dev $h$i src 10.0.$i.$n table 10$n$i
    done
done
# A namespace with two softnics, each with an rxe that it talks to over a wire of its own.
ip netns add soft
ip -n soft link set lo up
for i in 0 1; do
    ip link add S$i mtu 4200 netns soft type veth peer name R$i mtu 4200
    ip -n soft addr add 10.0.$((9 + i)).1/24 dev S$i
    ip -n soft link set S$i up
    ip addr add 10.0.$((9 + i)).2/24 dev R$i
    ip link set R$i up
done
for link in A0 A1 B0 B1 R0 R1; do rdma link add rxe$link type rxe netdev $link; done
cd "$(dirname "$(readlink -f "$0")")/../.."
names=(devices devices_collectives devices_sdr doctor softnic_and_rxe softnic_beside_rxe)
tests=("${names[@]/#/tests/e2e/test_}")
/usr/bin/python3 -m pytest -p no:cacheprovider --vm -v "${tests[@]/%/.py}" "$@" && status=0 || status=$?
logs=${CARGO_TARGET_DIR:-target}/test-logs
folders=("${names[@]/#/$logs/}")
[ $status = 0 ] || find "${folders[@]}" -name '*.log' 2>/dev/null | sort | while read -r log; do
    echo "-- $(basename "$(dirname "$log")")/$(basename "$log")"
    # What it said of errors comes first: its output may have been kept back behind that.
    [ ! -f "$log" ] || { grep -aiE 'fail|error|unbroken:' "$log" | head -n 5; tail -n 3 "$log"; } |
        cut -c1-200
done
exit $status
