#!/bin/bash
# Runs the steps of `make check`, `make test` or `make test-all`, goes on after a failure, and
# prints what each took. See tests/README.md.
#
# usage: tests/run.sh check | test | all [I/N]
#   check   what one runs before a commit
#   test    everything but the longer end-to-end tests; asserts no times
#   all     every test; with I/N the I-th of N parts of the end-to-end tests
set -uo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
python=${PYTHON:-/usr/bin/python3}
# End-to-end tests mostly wait: more of them than cores run at once.
workers=${WORKERS:-$(($(nproc) + 1))}
# LONG=1: full matrices and long runs.
long=${LONG:+--long}
names=() seconds=() results=()

# step NAME COMMAND...: runs it with its output on the screen.
step() {
    local name=$1 began=$SECONDS status
    shift
    printf '\n==> %s: %s\n' "$name" "$*"
    "$@"
    status=$?
    names+=("$name") seconds+=($((SECONDS - began)))
    # pytest's 5: no test was chosen.
    case $status in 0 | 5) results+=(ok) ;; *) results+=(FAILED) ;; esac
}

# end_to_end MARKS [OPTIONS...]: those that run beside others, and then those that run alone.
end_to_end() {
    local marks=$1
    shift
    step end-to-end "$python" -m pytest -n "$workers" -m "($marks) and not serial" "$@"
    step alone "$python" -m pytest -m "($marks) and serial" "$@"
}

lint() {
    step format $cargo fmt --all --check
    step clippy $cargo clippy -q --workspace --all-targets --release -- -D warnings
    step deps $cargo xtask deps
    step docs $cargo xtask docs
    # A workspace of its own. Nothing is linked, so libFuzzer itself is not compiled.
    step fuzz-format $cargo fmt --check --manifest-path fuzz/Cargo.toml
    step fuzz-targets env RUSTFLAGS="--cfg fuzzing" CUSTOM_LIBFUZZER_PATH=/none/libfuzzer.a \
        CARGO_TARGET_DIR=target/fuzz/check $cargo check -q --bins --manifest-path fuzz/Cargo.toml
}

# unit SCHEDULES [TARGETS...]: cargo's tests, all or those of some targets. Built first, so that the
# times of tests are their own.
unit() {
    local schedules=$1
    shift
    step build $cargo test -q --release --workspace --no-run
    step unit $cargo test -q --release --workspace --no-fail-fast "$@"
    step schedules $cargo run -q --release --bin sim -- --schedules "$schedules"
}

# Rules that are left out, one at a time: each must be noticed.
mutants() {
    step mutants $cargo test-mutants
    step mutants-sdr $cargo test-mutants-sdr
}

case ${1:-} in
check)
    lint
    unit 1000 --lib --bins
    step end-to-end "$python" -m pytest -n "$workers" \
        "tests/e2e/test_survival.py::test_survives[ib_write_bw nic dead at a 64K 1qp one-way]" \
        "tests/e2e/test_collectives.py::test_c_api"
    ;;
test)
    unit 5000
    mutants
    step deps $cargo xtask deps
    step docs $cargo xtask docs
    step abi $cargo xtask abi
    end_to_end "smoke and not timing"
    ;;
all)
    slice=${2:-1/1}
    if [ "${slice%/*}" = 1 ]; then
        lint
        unit "${LONG:+10}10000"
        mutants
        step abi $cargo xtask abi
    fi
    if [ -n "$long" ] && [ "${slice%/*}" = 1 ]; then
        step explore $cargo test -q --release -p unbroken-failover-protocol --test model -- \
            --ignored --nocapture
    fi
    end_to_end "not timing and not vm" --slice="$slice" $long
    ;;
*)
    sed -n '5,8s/^# //p' "$0" >&2
    exit 2
    ;;
esac

printf '\n%-12s %7s  %s\n' step seconds result
failed=0
for i in "${!names[@]}"; do
    printf '%-12s %7d  %s\n' "${names[$i]}" "${seconds[$i]}" "${results[$i]}"
    [ "${results[$i]}" = ok ] || failed=1
done
printf '%-12s %7d\n' total "$SECONDS"
exit $failed
