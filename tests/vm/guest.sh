#!/bin/bash
# The first process of the guest after the initramfs: runs /share0/command, leaves its status there,
# and powers off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C
mkdir -p /dev/pts /dev/shm /lib/modules /run/netns; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /dev/shm
[ -d "/lib/modules/$(uname -r)" ] || ln -s "$(cat /share0/modules)/$(uname -r)" "/lib/modules/$(uname -r)"
ip link set lo up; ulimit -l unlimited; cd /root
terminal=/dev/vport0p1; [ -c $terminal ] || terminal=$(ls /dev/vport*p1)
{ bash /share0/command </dev/null; echo $? >/share0/status; } >"$terminal" 2>&1
sync; busybox poweroff -f
