#!/bin/sh
# Fuzzes every target for SECONDS (default 60) from its seed corpus and prints the number of executions.
# Stable Rust and a C++ compiler are enough. What is found lies in <target dir>/fuzz/artifacts/ and fails the script.
set -eu
seconds=${1:-60}
cd "$(dirname "$0")"
root=$(cd .. && pwd)
out=${CARGO_TARGET_DIR:-$root/target}/fuzz
export CARGO_TARGET_DIR="$out/build"

cargo run -q --release --bin seeds -- "$out/seeds/packet"
host=$(rustc -vV | sed -n 's/^host: //p') # named, so that build scripts are not instrumented
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table --cfg fuzzing" \
CARGO_TARGET_DIR="$out/instrumented" cargo build -q --release --bin packet --target "$host"

mkdir -p "$out/corpus/packet" "$out/artifacts"
log="$out/packet.log"
if ! "$out/instrumented/$host/release/packet" "$out/corpus/packet" "$out/seeds/packet" -artifact_prefix="$out/artifacts/packet-" \
    -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 >"$log" 2>&1; then
    tail -40 "$log"
    echo "fuzz packet: FAILED; the input lies in $out/artifacts; log: $log"
    exit 1
fi
executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
coverage=$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -1)
echo "fuzz packet: ok, $executions executions in $seconds s, $coverage edges covered"
