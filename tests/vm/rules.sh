#!/bin/bash
# Runs in the guest, with Debian's own kernel. Two hosts (namespaces) with one uplink; forwarding
# entries as EVPN would make them; the daemon turns them into flower rules, the rules carry the
# traffic, and what others do to them is undone. $1 is the unbroken program.
set -u
U=$1; failed=0
modprobe -a veth vxlan bridge sch_ingress cls_flower act_mirred act_tunnel_key
is() { if eval "$2"; then echo "ok    $1"; else echo "FAIL  $1: $2"; failed=1; fi; }
# within SECONDS NAME CONDITION: waits until it holds
within() { local end=$((SECONDS + $1)); while ! eval "$3" && [ $SECONDS -lt $end ]; do sleep 0.2; done; is "$2" "$3"; }
ip netns add hA; ip netns add hB
ip link add p1 netns hA mtu 4400 type veth peer name p1 netns hB mtu 4400
config() { # host number, peer number
    cat <<T
name = "h$1"
loopback = "10.255.0.$2"
asn = 65001
mtu = 4300
frr = false
rules = "skip_hw"
resync_s = 5
[[uplink]]
device = "p1"
address = "10.1.0.$(($2 - 1))/31"
peer = "10.1.0.$(($3 - 1))"
peer_asn = 65002
peer_loopback = "10.255.0.$3"
[[tenant]]
vni = 100
[[tenant.port]]
representor = "rep0"
veth = "vf0"
mac = "02:00:00:00:09:0$2"
address = "192.168.9.$2/24"
T
}
config A 1 2 >/tmp/hA.toml; config B 2 1 >/tmp/hB.toml
for h in A B; do ip -n h$h link set lo up; ip -n h$h link set p1 up; done
tc -n hA qdisc show >/tmp/before
for h in A B; do ip netns exec h$h $U edge up --config /tmp/h$h.toml >/dev/null || exit 1; done
entry() { # host, its own number, the other's
    ip -n h$1 route replace 10.255.0.$3 via 10.1.0.$(($3 - 1)) src 10.255.0.$2
    bridge -n h$1 fdb replace 02:00:00:00:09:0$3 dev vni100 dst 10.255.0.$3 self extern_learn
    bridge -n h$1 fdb replace 02:00:00:00:09:0$3 dev vni100 master extern_learn
    bridge -n h$1 fdb append 00:00:00:00:00:00 dev vni100 dst 10.255.0.$3 self permanent
}
entry A 1 2; entry B 2 1
rules() { tc -n hA filter show dev rep0 ingress | grep -c 'handle 0x1000'; }
within 20 "a rule for the destination on the other host" '[ "$(rules)" = 1 ]'
within 20 "a rule for the address behind the port" 'tc -n hA filter show dev vni100 ingress | grep -q "dst_mac 02:00:00:00:09:01"'
within 20 "the same at the other host" 'tc -n hB filter show dev rep0 ingress | grep -q "dst_mac 02:00:00:00:09:01"'
is "the zero address has none" '! tc -n hA filter show dev rep0 ingress | grep -q "dst_mac 00:00:00:00:00:00"'
tc -n hA filter show dev rep0 ingress; tc -n hA actions ls action tunnel_key
is "pings" 'ip netns exec hA ping -c 5 -i 0.2 -W 3 192.168.9.2 >/tmp/ping || { cat /tmp/ping; false; }'
sent() { tc -n $1 -s filter show dev $2 ingress | awk '/Sent/ {print $4; exit}'; }
is "the rule carried them ($(sent hA rep0) packets)" '[ "$(sent hA rep0)" -ge 5 ]'
is "decapsulated packets took a rule, too ($(sent hB vni100))" '[ "$(sent hB vni100)" -ge 5 ]'
tc -n hA filter del dev rep0 ingress
within 20 "rules that somebody removed come back" '[ "$(rules)" = 1 ]'
tc -n hA qdisc del dev rep0 clsact
within 20 "so they do after their qdisc was removed" '[ "$(rules)" = 1 ]'
tc -n hA filter add dev rep0 ingress prio 7 protocol ip flower dst_ip 9.9.9.9 action drop
for i in $(seq 3 60); do printf 'fdb replace 02:00:00:00:09:%02x dev vni100 dst 10.255.0.%d self extern_learn\n' $i $i; done | bridge -n hA -batch -
within 30 "58 more destinations on 58 hosts" '[ "$(rules)" = 59 ]'
is "a tunnel action for each host" '[ "$(tc -n hA actions ls action tunnel_key | grep -c "tunnel_key  set")" = 59 ]'
kill -9 $(cat /run/unbroken-edge/hA/edged.pid)
bridge -n hA fdb del 02:00:00:00:09:03 dev vni100 dst 10.255.0.3 self
ip netns exec hA $U edge up --config /tmp/hA.toml >/dev/null
within 30 "a daemon that was killed takes over what is there" '[ "$(rules)" = 58 ]'
is "and removes the action that nobody refers to" '[ "$(tc -n hA actions ls action tunnel_key | grep -c "tunnel_key  set")" = 58 ]'
ops() { ip netns exec hA $U edge status --json | python3 -c 'import json,sys; r=json.load(sys.stdin)["rules"]; print(r["operations"], r["failures"], r["present"])'; }
sleep 2; before=$(ops); sleep 7
is "in the steady state nothing is written ($before)" '[ "$(ops)" = "$before" ]'
is "somebody else's rule is still there" 'tc -n hA filter show dev rep0 ingress | grep -q "dst_ip 9.9.9.9"'
cat /run/unbroken-edge/hA/events.jsonl | tail -5
for h in A B; do ip netns exec h$h $U edge down; done
is "after 'down' tc is as before" 'tc -n hA qdisc show | diff - /tmp/before && ! { tc -n hA actions ls action tunnel_key; tc -n hA actions ls action mirred; } | grep index'
exit $failed
