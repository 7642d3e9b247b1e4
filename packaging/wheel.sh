#!/bin/sh
# Builds the Python package with its C library into a wheel; `make wheel` calls it from the root of
# the sources.
# usage: wheel.sh BUILD FOLDER
set -eu
library=$1/libunbroken_coll.so
folder=$2
python=${PYTHON:-/usr/bin/python3}
if [ ! -e "$library" ]; then
    echo "wheel: there is no $library; \`make all\` builds it" >&2
    exit 1
fi
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
# A copy: setuptools builds in the sources, and the library must not stay beside them, where it
# would be found before a newer one.
cp -r python/unbroken/. "$stage"
rm -rf "$stage/build" "$stage"/*.egg-info
strip --strip-debug -o "$stage/unbroken/libunbroken_coll.so" "$library"
rm -rf "$folder"
# Without isolation: the build tools are Debian's, and nothing is downloaded.
"$python" -m pip wheel -q --no-deps --no-build-isolation --no-index -w "$folder" "$stage"
ls "$folder"/*.whl
