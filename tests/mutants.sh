#!/bin/sh
# Changes the pure crates of failover and collectives one place at a time (cargo-mutants), and runs
# the crate's tests each time: what they do not notice is in target/mutants.out/missed.txt. Hours;
# not in CI. What may stay alive, and why, is in .cargo/mutants.toml.
#
#   tests/mutants.sh [OPTION…]      options of cargo-mutants: --file, --shard 1/8, --re
set -eu
cd "$(dirname "$0")/.."
if ! cargo mutants --version >/dev/null 2>&1; then
    echo "cargo-mutants is missing: cargo install --locked cargo-mutants" >&2
    exit 1
fi
# Compiling takes most of the time: no optimisation that the tests can do without.
export CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_PROFILE_DEV_DEBUG=false
export CARGO_PROFILE_DEV_INCREMENTAL=true CARGO_PROFILE_DEV_CODEGEN_UNITS=16
status=0
cargo mutants --package unbroken-failover-protocol --package unbroken-journal \
    --package unbroken-collective-protocol --package unbroken-schedule \
    --gitignore=true --colors=never --output target "$@" || status=$?
# It changes no constants. With options only a part was asked for.
[ $# -gt 0 ] || tests/constants.py || status=$?
exit $status
