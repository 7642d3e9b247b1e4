#!/bin/sh
# Installs what `make all` has built, or removes it again; `make install` and `make uninstall` call
# it from the root of the sources. Both walk the same list, so that nothing is left behind.
# usage: install.sh install|uninstall BUILD VERSION
# environment: DESTDIR, PREFIX, BINDIR, LIBDIR, PRIVATEDIR, INCLUDEDIR, DATADIR, UNITDIR, STRIP
set -eu
what=$1 build=$2 version=$3
PREFIX=${PREFIX:-/usr/local}
BINDIR=${BINDIR:-$PREFIX/bin}
LIBDIR=${LIBDIR:-$PREFIX/lib}
PRIVATEDIR=${PRIVATEDIR:-$LIBDIR}
INCLUDEDIR=${INCLUDEDIR:-$PREFIX/include}
DATADIR=${DATADIR:-$PREFIX/share}
UNITDIR=${UNITDIR:-$PREFIX/lib/systemd/system}
DESTDIR=${DESTDIR:-}
STRIP=${STRIP:-strip}
major=${version%%.*}

for folder in "$PREFIX" "$BINDIR" "$LIBDIR" "$PRIVATEDIR" "$INCLUDEDIR" "$DATADIR" "$UNITDIR"; do
    case $folder in
    /*) ;;
    *)
        echo "install: $folder: folders must be absolute; DESTDIR may stand before them" >&2
        exit 2
        ;;
    esac
done

# place MODE SOURCE TARGET: copies a file. The old one is replaced, not written into: a program may
# have it mapped.
place() {
    if [ "$what" = uninstall ]; then
        rm -f "$DESTDIR$3"
        return
    fi
    if [ ! -e "$2" ]; then
        echo "install: there is no $2; \`make all\` builds it" >&2
        exit 1
    fi
    mkdir -p "$(dirname "$DESTDIR$3")"
    rm -f "$DESTDIR$3"
    install -m "$1" "$2" "$DESTDIR$3"
}

# place_code MODE SOURCE TARGET: the same without what only debuggers need, which is five sixths.
place_code() {
    place "$1" "$2" "$3"
    if [ "$what" = install ] && [ "$STRIP" != no ]; then
        "$STRIP" --strip-unneeded "$DESTDIR$3"
    fi
}

# fill SOURCE TARGET: copies a text, with the folders in place of @NAME@ and of /usr/local.
fill() {
    if [ "$what" = install ]; then
        mkdir -p "$(dirname "$DESTDIR$2")"
        sed -e "s|/usr/local/bin|$BINDIR|g" -e "s|@PREFIX@|$PREFIX|" -e "s|@LIBDIR@|$LIBDIR|" \
            -e "s|@INCLUDEDIR@|$INCLUDEDIR|" -e "s|@VERSION@|$version|" "$1" >"$DESTDIR$2.new"
        chmod 644 "$DESTDIR$2.new"
        mv "$DESTDIR$2.new" "$DESTDIR$2"
    else
        rm -f "$DESTDIR$2"
    fi
}

# link NAME TARGET: makes a symbolic link.
link() {
    if [ "$what" = install ]; then ln -sfn "$1" "$DESTDIR$2"; else rm -f "$DESTDIR$2"; fi
}

place_code 755 "$build/unbroken" "$BINDIR/unbroken"
place_code 644 "$build/libunbroken.so" "$PRIVATEDIR/libunbroken.so"
if [ "$what" = uninstall ] || [ -e "$build/unbroken-verifier" ]; then
    place_code 755 "$build/unbroken-verifier" "$PRIVATEDIR/unbroken-verifier"
else
    echo "install: unbroken-verifier was not built: \`unbroken demo\` will compile it" >&2
fi
for name in sdr coll apm; do
    library=libunbroken_$name.so
    place_code 644 "$build/$library" "$LIBDIR/$library.$version"
    link "$library.$version" "$LIBDIR/$library.$major"
    link "$library.$major" "$LIBDIR/$library"
    fill "packaging/pkgconfig/unbroken-$name.pc.in" "$LIBDIR/pkgconfig/unbroken-$name.pc"
done
for header in include/unbroken/*.h; do
    place 644 "$header" "$INCLUDEDIR/unbroken/${header##*/}"
done
for unit in docs/guide/edge/*.service; do
    fill "$unit" "$UNITDIR/${unit##*/}"
done
for file in packaging/monitoring/*; do
    mode=644
    case $file in *.sh) mode=755 ;; esac
    place "$mode" "$file" "$DATADIR/unbroken/monitoring/${file##*/}"
done
for file in packaging/kubernetes/*; do
    place 644 "$file" "$DATADIR/unbroken/kubernetes/${file##*/}"
done
place 644 "$build/man/bash/unbroken.bash" "$DATADIR/bash-completion/completions/unbroken"
place 644 "$build/man/zsh/_unbroken" "$DATADIR/zsh/site-functions/_unbroken"
place 644 "$build/man/fish/unbroken.fish" "$DATADIR/fish/vendor_completions.d/unbroken.fish"
# Pages of an older version go, too, whatever subcommands it had.
rm -f "$DESTDIR$DATADIR/man/man1/unbroken.1" "$DESTDIR$DATADIR/man/man1"/unbroken-*.1
if [ "$what" = install ]; then
    for page in "$build"/man/man1/*.1; do
        place 644 "$page" "$DATADIR/man/man1/${page##*/}"
    done
elif [ -d "$DESTDIR$INCLUDEDIR/unbroken" ]; then
    # Others than ours may lie in it.
    rmdir --ignore-fail-on-non-empty "$DESTDIR$INCLUDEDIR/unbroken"
fi
for folder in monitoring kubernetes .; do
    if [ "$what" = uninstall ] && [ -d "$DESTDIR$DATADIR/unbroken/$folder" ]; then
        rmdir --ignore-fail-on-non-empty "$(realpath "$DESTDIR$DATADIR/unbroken/$folder")"
    fi
done
