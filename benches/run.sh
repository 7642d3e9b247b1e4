#!/bin/sh
# All benches: a table, and benches/results/latest.json. Called by `make bench`; arguments go to
# `unbroken-bench run`.
set -eu
cd "$(dirname "$0")/.."
cargo build --release -q --bin unbroken-bench
target=${CARGO_TARGET_DIR:-target}/release
programs=${CARGO_TARGET_DIR:-target}/tests-c
benches/programs.sh
python=$(benches/python.sh)
echo "$(nproc) cores, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r), $(date -u +%Y-%m-%dT%H:%MZ)"
exec "$target/unbroken-bench" run --unbroken "$target/unbroken" --programs "$programs" ${python:+--python "$python"} "$@"
