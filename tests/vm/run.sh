#!/bin/bash
# `run.sh COMMAND`: boots Debian's own kernel under QEMU (software emulation: correctness only),
# runs the command, gives its output and status; 77 where there can be no VM here.
# The guest's clock counts its instructions, 4 ns each: a busy machine makes a run longer, and its
# timeouts no shorter.
# What it needs is made once in ~/.cache/unbroken/vm (UNBROKEN_VM names another folder).
# UNBROKEN_VM_SHARE: the folder that the guest has as /share0, kept afterwards; else a new one.
# UNBROKEN_VM_QEMU: more words for QEMU, as those of NICs.
set -u
here=$(dirname "$(readlink -f "$0")"); folder=${UNBROKEN_VM:-$HOME/.cache/unbroken/vm}
case $here/ in /tmp/* | /run/*)
    echo "test-vm: the guest has a /tmp and a /run of its own, so it does not see $here:" \
        "clone the repository into another folder" >&2; exit 1 ;;
esac
"$here/setup.sh" "$folder"; made=$?
[ $made = 3 ] && exit 77
[ $made = 0 ] || exit 1
share=${UNBROKEN_VM_SHARE:-}
[ -n "$share" ] || { share=$(mktemp -d); trap 'rm -rf "$share"' EXIT; }
printf '%s\n' "$*" >"$share/command"
cp "$here/guest.sh" "$share/"
echo "$folder/kroot/lib/modules" >"$share/modules"
machine=microvm,acpi=on,pit=on,pic=on,isa-serial=on,usb=off
kernel="console=ttyS0 panic=-1 quiet mitigations=off nokaslr no_timer_check tsc=reliable"
kernel+=" tsc_early_khz=1000000 random.trust_cpu=on cryptomgr.notests audit=0"
host=local,id=h0,path=/,security_model=none,readonly=on,multidevs=remap
timeout -k 5 "${UNBROKEN_VM_SECONDS:-600}" \
    qemu-system-x86_64 -machine $machine -global virtio-mmio.force-legacy=false \
    -icount shift=2 -accel tcg,thread=single,tb-size=1024 -cpu max -smp 1 -m 2G \
    -nodefaults -no-user-config -display none -no-reboot \
    -kernel "$folder/vmlinux" -initrd "$folder/initramfs.cpio" -append "$kernel" \
    -serial "file:$share/console" -monitor none \
    -chardev file,id=o0,path=/dev/stdout -device virtio-serial-device \
    -device virtserialport,chardev=o0,name=out \
    -fsdev $host -device virtio-9p-device,fsdev=h0,mount_tag=host0 \
    -fsdev local,id=s0,path="$share",security_model=none \
    -device virtio-9p-device,fsdev=s0,mount_tag=share0 \
    ${UNBROKEN_VM_QEMU:-} </dev/null | cat
[ -s "$share/status" ] && exit "$(cat "$share/status")"
echo "test-vm: the guest gave no status; the end of its console:"; tail -5 "$share/console"
exit 1
