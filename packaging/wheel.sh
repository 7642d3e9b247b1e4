#!/bin/sh
# Builds the Python package with the command and its libraries into a wheel; `make wheel` calls it
# from the root of the sources.
# usage: wheel.sh BUILD FOLDER
set -eu
build=$1
folder=$2
libraries="libunbroken_coll.so libunbroken_simulations.so"
# What `unbroken run` and `unbroken demo` look for beside the command.
programs="unbroken libunbroken.so unbroken-verifier"
python=${PYTHON:-/usr/bin/python3}
for file in $libraries $programs; do
    if [ ! -e "$build/$file" ]; then
        echo "wheel: there is no $build/$file; \`make all\` builds it" >&2
        if [ "$file" = unbroken-verifier ]; then
            echo "wheel: it needs infiniband/verbs.h (Debian: libibverbs-dev)" >&2
        fi
        exit 1
    fi
done
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
# A copy: setuptools builds in the sources, and the libraries must not stay beside them, where they
# would be found before a newer one.
cp -r python/unbroken/. "$stage"
cp -r python/model/unbroken_model "$stage/"
rm -rf "$stage/build" "$stage"/*.egg-info
mkdir "$stage/unbroken/bin"
for file in $libraries; do
    strip --strip-unneeded -o "$stage/unbroken/$file" "$build/$file"
done
for file in $programs; do
    strip --strip-unneeded -o "$stage/unbroken/bin/$file" "$build/$file"
done
# The oldest glibc that has all that they ask for.
floor=$(for file in $libraries $programs; do objdump -T "$build/$file"; done |
    grep -o 'GLIBC_2\.[0-9]*' | sort -u -V | tail -n 1)
WHEEL_PLATFORM=manylinux_2_${floor#GLIBC_2.}_$(uname -m)
export WHEEL_PLATFORM
rm -rf "$folder"
# Without isolation: the build tools are Debian's, and nothing is downloaded.
"$python" -m pip wheel -q --no-deps --no-build-isolation --no-index -w "$folder" "$stage"
ls "$folder"/*.whl
