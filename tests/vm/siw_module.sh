#!/bin/bash
# Makes siw.ko for the VM's kernel, once: `siw_module.sh FOLDER`. Debian's kernel comes without
# (CONFIG_RDMA_SIW is not set), so it is built of Debian's own source. Ends with status 3, and says
# why, where it cannot be had.
set -eu
here=$(dirname "$(readlink -f "$0")"); folder=$1/siw
skip() { echo "test-vm: skipped: $*"; exit 3; }
[ ! -e "$folder/siw.ko" ] || exit 0
kernel=$(ls "$1/kroot/lib/modules"); common=${kernel%-amd64}-common
version=$(echo "$kernel" | cut -d. -f1,2)
"$here/../apt.sh" gcc make xz-utils || skip "gcc, make or xz cannot be installed"
rm -rf "$folder"; mkdir -p "$folder/debs" "$folder/src"; cd "$folder"
packages=(linux-source-"$version" linux-headers-"$kernel" linux-headers-"$common" linux-kbuild-"$version")
(cd debs && chmod 777 . && apt-get -qq download "${packages[@]}") || skip "no packages: ${packages[*]}"
for deb in debs/*.deb; do dpkg -x "$deb" hdr; done
tar -C src --strip-components=1 --wildcards -xf "hdr/usr/src/linux-source-$version.tar.xz" \
    '*/drivers/infiniband/sw/siw'
headers=$PWD/hdr/usr/src
# The packages are not installed, so what names their places is led here.
sed -i "s,^include /usr/src,include $headers," "$headers/linux-headers-$kernel/Makefile"
for of in "$kernel" "$common"; do
    for name in scripts tools; do
        ln -sfn "$PWD/hdr/usr/lib/linux-kbuild-$version/$name" "$headers/linux-headers-$of/$name"
    done
done
make -s -C "$headers/linux-headers-$kernel" M="$PWD/src/drivers/infiniband/sw/siw" \
    CONFIG_RDMA_SIW=m modules || skip "siw cannot be built"
strip --strip-debug -o made.ko src/drivers/infiniband/sw/siw/siw.ko
rm -rf debs hdr src; mv made.ko siw.ko
