#!/bin/sh
# Fuzzes every target from its seed corpus and prints the number of executions: packets for SECONDS
# (default 60) and beside them, one after the other, what peers say about their queue pairs for half
# of that, and what else comes from outside, what SDR's peers say and what the connection manager is
# sent for a sixth each. Stable Rust and a C++ compiler are enough. What is found lies in
# <target dir>/fuzz/artifacts/ and fails the script.
set -eu
seconds=${1:-60}
cd "$(dirname "$0")"
root=$(cd .. && pwd)
out=${CARGO_TARGET_DIR:-$root/target}/fuzz
export CARGO_TARGET_DIR="$out/build"

# Not optimised: it runs for a moment.
cargo run -q --bin seeds -- "$out/seeds"
host=$(rustc -vV | sed -n 's/^host: //p') # named, so that build scripts are not instrumented
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table --cfg fuzzing" \
CARGO_TARGET_DIR="$out/instrumented" cargo build -q --release --bin packet --bin control --bin outside --bin sdr --bin cm --target "$host"

# fuzz TARGET SECONDS
fuzz() {
    mkdir -p "$out/corpus/$1" "$out/seeds/$1" "$out/artifacts"
    log="$out/$1.log"
    if ! "$out/instrumented/$host/release/$1" "$out/corpus/$1" "$out/seeds/$1" -artifact_prefix="$out/artifacts/$1-" \
        -max_total_time="$2" -max_len=4096 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 >"$log" 2>&1; then
        tail -40 "$log"
        echo "fuzz $1: FAILED; the input lies in $out/artifacts; log: $log"
        exit 1
    fi
    executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    coverage=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
    echo "fuzz $1: ok, $executions executions in $2 s, $coverage edges covered"
}

fuzz packet "$seconds" &
packet=$!
beside=0
(
    fuzz control "$((seconds / 2))"
    fuzz outside "$((seconds / 6))"
    fuzz sdr "$((seconds / 6))"
    fuzz cm "$((seconds / 6))"
) || beside=$?
wait "$packet"
exit "$beside"
