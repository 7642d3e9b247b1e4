#!/bin/bash
# Makes, once, what a VM with Debian's own kernel needs: `setup.sh FOLDER`. Ends with status 3, and
# says why, where it cannot be had.
set -eu
here=$(dirname "$(readlink -f "$0")"); folder=$1
skip() { echo "test-vm: skipped: $*"; exit 3; }
[ "$(id -u)" = 0 ] || skip "the guest reads all of this machine's files, so it needs root"
command -v apt-get >/dev/null || skip "no apt-get: Debian's kernel and QEMU come from Debian packages"
"$here/../apt.sh" qemu-system-x86 busybox-static cpio kmod iproute2 iputils-ping binutils python3 || skip "QEMU or its tools cannot be installed"
# What tests in the guest use: it sees this machine's programs. They say themselves what they cannot
# do without.
"$here/../apt.sh" frr nftables perftest ibverbs-providers procps util-linux \
    python3-pytest python3-pytest-timeout || echo "test-vm: some packages cannot be installed"
[ ! -e "$folder/ready" ] || exit 0
mkdir -p "$folder/debs"; cd "$folder"
package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/ {print $2; exit}')
[ -n "$package" ] || skip "no package linux-image-amd64 (apt-get update?)"
(cd debs && chmod 777 . && apt-get -qq download "$package") || skip "$package cannot be downloaded"
rm -rf kroot initramfs; dpkg -x debs/"$package"_*.deb kroot
kernel=$(ls kroot/lib/modules)
python3 - kroot/boot/vmlinuz-"$kernel" vmlinux <<'P'
import lzma, sys
packed = open(sys.argv[1], "rb").read()
start = packed.find(b"\xfd7zXZ\x00")
open(sys.argv[2], "wb").write(lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(packed[start:]))
P
depmod -b kroot "$kernel"
mkdir -p initramfs/{bin,dev,proc,sys,lib,host,rw,new}
cp "$(command -v busybox)" initramfs/bin/busybox; ln -s busybox initramfs/bin/sh; : >initramfs/lib/order
for module in virtio_pci virtio_mmio virtio_console 9pnet_virtio 9p overlay; do
    modprobe -d kroot -S "$kernel" --show-depends $module | awk '{print $2}'
done | awk '!seen[$0]++' | while read -r file; do
    name=$(basename "$file"); strip --strip-debug -o "initramfs/lib/$name" "$file"; echo "$name" >>initramfs/lib/order
done
# The first process: this machine's files, read-only, under an overlay in memory; then guest.sh.
cat >initramfs/init <<I
#!/bin/sh
export PATH=/bin; b=/bin/busybox
\$b mount -t devtmpfs dev /dev; \$b mount -t proc proc /proc; \$b mount -t sysfs sys /sys
for m in \$(\$b cat /lib/order); do \$b insmod /lib/\$m; done
o=trans=virtio,version=9p2000.L,msize=512000
\$b mount -t 9p -o \$o,ro,cache=loose host0 /host || \$b poweroff -f
\$b mount -t tmpfs -o size=80% tmpfs /rw; \$b mkdir /rw/u /rw/w
\$b mount -t overlay -o lowerdir=/host,upperdir=/rw/u,workdir=/rw/w overlay /new || \$b poweroff -f
\$b mkdir -p /new/run /new/share0
\$b mount -t tmpfs tmpfs /new/run; \$b mount -t tmpfs tmpfs /new/tmp
\$b mount -t 9p -o \$o share0 /new/share0
for d in dev proc sys; do \$b mount --move /\$d /new/\$d; done
exec \$b switch_root /new /share0/guest.sh </dev/console >/dev/console 2>&1
I
chmod 755 initramfs/init
(cd initramfs && find . | cpio -o -H newc --quiet) >initramfs.cpio
touch ready
