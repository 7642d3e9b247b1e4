#!/bin/sh
# Compares the fallback header with the installed one, and compiles the verifying program against both.
set -eu
cd "$(dirname "$0")"
header=/usr/include/infiniband/verbs.h
[ -f "$header" ] || { echo "skipped: $header is not installed (package libibverbs-dev)"; exit 0; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cc -Wall -Werror -o "$dir/installed" check.c
cc -Wall -Werror -I . -o "$dir/ours" check.c
"$dir/installed" >"$dir/installed.txt"
"$dir/ours" >"$dir/ours.txt"
diff -u "$dir/installed.txt" "$dir/ours.txt"
cc -O2 -Wall -Werror -I . -o "$dir/verifier" ../verifier.c -l:libibverbs.so.1 -lpthread
echo "compat: $(wc -l <"$dir/ours.txt") sizes, offsets and values equal; verifier.c compiles"
