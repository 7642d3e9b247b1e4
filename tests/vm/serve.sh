#!/bin/bash
# Runs in the guest: carries out what the test outside leaves in /share0, one after the other: N.sh
# leaves N.out, then N.rc. lib/guests.py is the other end.
cd "$(dirname "$(readlink -f "$0")")/../.." || exit 1
n=0
while :; do
    until [ -f /share0/$n.sh ]; do sleep 0.05; done
    bash /share0/$n.sh >/share0/$n.out 2>&1 </dev/null
    echo $? >/share0/$n.rc.new; mv /share0/$n.rc.new /share0/$n.rc
    n=$((n + 1))
done
