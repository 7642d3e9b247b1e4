#!/bin/sh
# Compiles the C programs that benches and figures run, into target/tests-c.
set -eu
cd "$(dirname "$0")/.."
programs=${CARGO_TARGET_DIR:-target}/tests-c
mkdir -p "$programs"
for name in scale verbs; do
    cc -std=gnu11 -O2 -Wall -o "$programs/$name" "tests/c/$name.c" -libverbs
done
