#!/bin/sh
# Installs the Debian packages that are missing, or names them exactly.
# usage: apt.sh PACKAGE...
set -eu
missing=
for p in "$@"; do
    dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $p"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo=sudo; else
    echo "missing Debian packages:$missing" >&2
    echo "install them with: sudo apt-get install$missing" >&2
    exit 1
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
# tshark asks whether others than root may capture; the default (no) is right.
# shellcheck disable=SC2086
$sudo apt-get install -y -qq --no-install-recommends $missing >/tmp/unbroken-apt.$$ 2>&1 ||
    { $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends $missing; } >/tmp/unbroken-apt.$$ 2>&1 ||
    { cat /tmp/unbroken-apt.$$ >&2; exit 1; }
rm -f /tmp/unbroken-apt.$$
