#!/bin/sh
# The papers' figures, into docs/figures. Called by `make figures`; arguments go to `unbroken-bench
# figures`. Those that are measured run unmodified programs on this machine for some minutes:
# `--only sdr` or `--only shift-7` draws less. Those of the host edge (`--only edge`) need root and
# FRR; benches/edge/figures.py measures them, those of collectives benches/coll/figures.py, those of
# path migration (`--only apm`) benches/apm/figures.py.
set -eu
cd "$(dirname "$0")/.."
cargo build --release -q --bin unbroken-bench
benches/programs.sh
target=${CARGO_TARGET_DIR:-target}
python=$(benches/python.sh)
echo "$(nproc) cores, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r), $(date -u +%Y-%m-%dT%H:%MZ)"
"$target/release/unbroken-bench" figures --unbroken "$target/release/unbroken" --programs "$target/tests-c" \
    ${python:+--python "$python"} --out docs/figures "$@"
# what pages say of them
python3 benches/numbers_of_pages.py
