#!/bin/sh
# The papers' figures, into docs/figures. Called by `make figures`; arguments go to `unbroken-bench figures`.
# Those that are measured run unmodified programs on this machine for some minutes: `--only sdr` or `--only shift-7` draws less.
# Those of the host edge (`--only edge`) need root and FRR; benches/edge/figures.py measures them.
set -eu
cd "$(dirname "$0")/.."
cargo build --release -q -p unbroken-bench
benches/programs.sh
target=${CARGO_TARGET_DIR:-target}
# PyTorch, where `make test-torch` has installed it.
python=
for found in "${XDG_CACHE_HOME:-$HOME/.cache}"/unbroken/torch-*/bin/python; do
    [ -x "$found" ] && python=$found
done
echo "$(nproc) cores, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), Linux $(uname -r), $(date -u +%Y-%m-%dT%H:%MZ)"
exec "$target/release/unbroken-bench" figures --unbroken "$target/release/unbroken" --programs "$target/tests-c" \
    ${python:+--python "$python"} --out docs/figures "$@"
