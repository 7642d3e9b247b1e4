#!/bin/sh
# Makes what a release has, of what `make all` has built: packages, wheels, the sources, checksums.
# `make release` calls it from the root of the sources. Nothing is published.
#
# It refuses a version that is not the same everywhere: Cargo.toml, the Python packages, the
# headers, CHANGELOG.md, and the tag of the commit, if it has one. --draft lets a version through
# that has no date in CHANGELOG.md, or changes that are not committed.
# usage: release.sh BUILD VERSION FOLDER [--draft]
set -eu
build=$1 version=$2 folder=$3 draft=${4:-}
case $version in
[0-9]*.[0-9]*.[0-9]*) ;;
*)
    echo "release: '$version' is no version; one like 1.2.3 is right" >&2
    exit 2
    ;;
esac
case $draft in
"" | --draft) ;;
*)
    echo "release: '$draft' is no option; --draft is one" >&2
    exit 2
    ;;
esac

wrong=0
# differs WHAT FOUND: tells of a version that is another one.
differs() {
    if [ "$2" != "$version" ]; then
        echo "release: $1 has the version '$2', not $version" >&2
        wrong=1
    fi
}
# field FILE PATTERN: the first match of a sed pattern.
field() {
    sed -n "s/$2/\1/p" "$1" | head -n 1
}
differs Cargo.toml "$(field Cargo.toml '^version = "\(.*\)"')"
differs python/unbroken/unbroken/__init__.py \
    "$(field python/unbroken/unbroken/__init__.py '^__version__ = "\(.*\)"')"
differs python/model/pyproject.toml "$(field python/model/pyproject.toml '^version = "\(.*\)"')"
header=include/unbroken/unbroken.h
differs "$header" "$(
    for part in MAJOR MINOR PATCH; do
        field $header "^#define UNBROKEN_VERSION_$part *\([0-9]*\).*"
    done | paste -s -d.
)"
differs "$build/unbroken" "$("$build/unbroken" --version | cut -d' ' -f2)"
for tag in $(git tag --points-at HEAD); do
    differs "the tag $tag" "${tag#v}"
done
if ! grep -q "^## \[$version\] – [0-9-]*$" CHANGELOG.md && [ -z "$draft" ]; then
    echo "release: CHANGELOG.md has no line '## [$version] – DATE'" >&2
    wrong=1
fi
if [ -n "$(git status --porcelain)" ] && [ -z "$draft" ]; then
    echo "release: there are changes that are not committed" >&2
    wrong=1
fi
[ "$wrong" = 0 ] || exit 1

rm -rf "$folder"
mkdir -p "$folder"
packaging/deb.sh "$build" "$version" "$folder"
packaging/wheel.sh "$build" "$folder/wheels"
mv "$folder"/wheels/*.whl "$folder/"
rmdir "$folder/wheels"
git archive --format=tar.gz --prefix="unbroken-$version/" -o "$folder/unbroken-$version.tar.gz" HEAD
(cd "$folder" && sha256sum -- *.deb *.whl *.tar.gz >SHA256SUMS)
du -h "$folder"/* | sed "s|$folder/||"
