#!/bin/sh
# Builds Debian packages of what `make all` has built; `make deb` calls it from the root of the
# sources. Needs dpkg-dev, fakeroot and binutils.
#   unbroken            the command, libunbroken.so, man pages, completions, units of the host edge
#   libunbroken-coll0, libunbroken-sdr0, libunbroken-apm0    a library each
#   libunbroken-dev     headers, links, .pc files
# usage: deb.sh BUILD VERSION FOLDER
# environment: DEBFULLNAME, DEBEMAIL (the maintainer), SOURCE_DATE_EPOCH
set -eu
build=$1 version=$2 folder=$3
major=${version%%.*}
arch=$(dpkg --print-architecture)
libdir=/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)
# Whoever publishes packages names an address that answers; the default one cannot.
maintainer="${DEBFULLNAME:-Unbroken developers} <${DEBEMAIL:-maintainers@unbroken.invalid}>"
# The same sources give the same packages.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
all=$stage/all
umask 022
env DESTDIR="$all" PREFIX=/usr LIBDIR="$libdir" PRIVATEDIR="$libdir/unbroken" \
    UNITDIR=/lib/systemd/system packaging/install.sh install "$build" "$version"
if [ ! -e "$all$libdir/unbroken/unbroken-verifier" ]; then
    echo "deb: there is no $build/unbroken-verifier; \`make all\` builds it with libibverbs-dev" >&2
    exit 1
fi
mv "$all/usr/share/zsh/site-functions" "$all/usr/share/zsh/vendor-completions"
gzip -9n "$all"/usr/share/man/man1/*

# take PACKAGE PATH...: moves files into a package.
take() {
    package=$1
    shift
    for path in "$@"; do
        to=$stage/$package$(dirname "${path#"$all"}")
        mkdir -p "$to"
        mv "$path" "$to/"
    done
}

# The names of the packages, then the files of each; unbroken gets what is left.
libraries="coll sdr apm"
packages="unbroken libunbroken-dev"
for name in $libraries; do
    packages="$packages libunbroken-$name$major"
    so=$all$libdir/libunbroken_$name.so
    take "libunbroken-$name$major" "$so.$version" "$so.$major"
    take libunbroken-dev "$so"
done
take libunbroken-dev "$all/usr/include/unbroken" "$all$libdir/pkgconfig"
rmdir "$all/usr/include"
mv "$all" "$stage/unbroken"

# depends PROGRAM...: the packages that these need, as dpkg-shlibdeps finds them.
mkdir -p "$stage/debian"
printf 'Source: unbroken\n\nPackage: unbroken\nArchitecture: any\n' >"$stage/debian/control"
depends() {
    (cd "$stage" && dpkg-shlibdeps -O "$@") | sed -n 's/^shlibs:Depends=//p'
}

# describe PACKAGE: what is special about it, as fields of its control file.
describe() {
    tree=$stage/$1
    case $1 in
    unbroken)
        cat <<END
Section: net
Depends: $(depends "$tree/usr/bin/unbroken" "$tree$libdir/unbroken/libunbroken.so")
Recommends: ibverbs-utils, perftest
Suggests: frr, iproute2, nftables, redis-server
Description: RDMA programs go on when NICs, ports, cables and switches fail
 An unmodified program of libibverbs runs under "unbroken run". When its NIC
 fails, its queue pairs move to another one; every completion arrives once and
 in order.
 .
 It also has a software NIC in user space that needs no hardware, no kernel
 module and no root, with an emulated network and faults on demand, for tests
 of RDMA programs on laptops, in containers and in CI.
END
        ;;
    libunbroken-dev)
        needs=libibverbs-dev
        for name in $libraries; do
            needs="libunbroken-$name$major (= $version), $needs"
        done
        cat <<END
Section: libdevel
Multi-Arch: same
Depends: $needs
Suggests: unbroken (= $version)
Description: libraries of Unbroken, for programs (development files)
 Headers, pkg-config files and links for collective operations that go on when
 NICs fail (unbroken-coll), for reliable writes over lossy links (unbroken-sdr)
 and for automatic path migration (unbroken-apm); and a header for tests of
 RDMA programs in C, which needs the package unbroken (unbroken/lab.h).
END
        ;;
    *)
        case $1 in
        *coll*)
            short="collective operations that go on when NICs fail"
            long=" AllReduce and other collective operations over RDMA, planned around NICs that
 were lost."
            ;;
        *sdr*)
            short="reliable RDMA writes over lossy links"
            long=" Selective repeat and erasure coding over RDMA writes, with bitmaps that say
 which chunks have arrived."
            ;;
        *)
            short="automatic path migration of RDMA queue pairs"
            long=" Queue pairs of the process's own libibverbs move to another port when theirs
 fails."
            ;;
        esac
        cat <<END
Section: libs
Multi-Arch: same
Depends: $(depends "$tree$libdir"/*.so."$version")
Description: $short
$long
END
        ;;
    esac
}

write_documents() {
    docs=$stage/$1/usr/share/doc/$1
    mkdir -p "$docs"
    cat >"$docs/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: unbroken

Files: *
Copyright: 2025-2026 The Unbroken developers
License: Apache-2.0
 On Debian systems the text of the Apache License, version 2.0, is in
 /usr/share/common-licenses/Apache-2.0.
END
    {
        printf 'unbroken (%s) unstable; urgency=medium\n\n' "$version"
        printf '  * CHANGELOG.md of the sources says what has changed.\n\n'
        printf ' -- %s  %s\n' "$maintainer" "$(date -u -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n >"$docs/changelog.gz"
}

# write_scripts PACKAGE: what dpkg runs and reads.
write_scripts() {
    control=$stage/$1/DEBIAN
    case $1 in
    unbroken)
        for script in prerm postrm; do
            install -m 755 "packaging/debian/$script" "$control/$script"
        done
        install -D -m 644 packaging/debian/lintian-overrides \
            "$stage/unbroken/usr/share/lintian/overrides/unbroken"
        ;;
    libunbroken-dev) ;;
    *)
        so=$(basename "$stage/$1$libdir"/*.so."$version" ".so.$version")
        echo "$so $major $1 (>= $version)" >"$control/shlibs"
        echo "activate-noawait ldconfig" >"$control/triggers"
        ;;
    esac
}

mkdir -p "$folder"
rm -f "$folder"/*.deb
for package in $packages; do
    tree=$stage/$package
    mkdir -p "$tree/DEBIAN"
    write_documents "$package"
    write_scripts "$package"
    {
        printf 'Package: %s\nSource: unbroken\nVersion: %s\nArchitecture: %s\n' \
            "$package" "$version" "$arch"
        printf 'Maintainer: %s\nPriority: optional\nInstalled-Size: %s\n' \
            "$maintainer" "$(du -k -s --apparent-size "$tree" | cut -f1)"
        describe "$package"
    } >"$tree/DEBIAN/control"
    (cd "$tree" && find . -type f ! -path './DEBIAN/*' -printf '%P\n' | LC_ALL=C sort |
        xargs md5sum >DEBIAN/md5sums)
    find "$tree" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
    fakeroot dpkg-deb -Zxz --root-owner-group -b "$tree" "$folder" >/dev/null
    ls "$folder/${package}_${version}_$arch.deb"
done
