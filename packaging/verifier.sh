#!/bin/sh
# Compiles the program of `unbroken demo` that checks every message; `make all` calls it from the
# root of the sources. It is linked to libunbroken.so, so that it also runs where libibverbs is not
# installed. Without the header of libibverbs it is not built, which is told: the demo compiles it.
# usage: verifier.sh BUILD
set -eu
build=$1
program=$build/unbroken-verifier
if ! echo '#include <infiniband/verbs.h>' | "${CC:-cc}" -E -o /dev/null - 2>/dev/null; then
    echo "unbroken-verifier: not built, infiniband/verbs.h is missing (libibverbs-dev)" >&2
    rm -f "$program"
    exit 0
fi
sources="tests/c/verifier.c $(echo tests/c/verifier_*.h) tests/c/common.h $0"
# shellcheck disable=SC2086
if [ -e "$program" ] &&
    [ -z "$(find $sources "$build/libunbroken.so" -newer "$program")" ]
then
    exit 0
fi
"${CC:-cc}" -std=gnu11 -O2 -Wall -Wextra -Werror -fstack-protector-strong -D_FORTIFY_SOURCE=2 \
    -Wl,-z,relro,-z,now,-rpath,'$ORIGIN' -o "$program.new" \
    tests/c/verifier.c "$build/libunbroken.so"
mv "$program.new" "$program"
