#!/bin/bash
# Runs every suite, goes on after a failure, and prints what each took. `make test` builds first and calls this.
# usage: run.sh [--long] [SUITE...]
#   --long   full matrices: the whole survival matrix, 1,000 faults under the verifier, 500 storms of ten seconds, an hour of load, 10^5 simulated schedules, the largest models, 10 minutes of fuzzing and of each churn
#   SUITE    only these (the names of the summary)
set -uo pipefail
cd "$(dirname "$0")/.."

long=
if [ "${1:-}" = --long ]; then long=1; shift; fi
only=" $* "
cargo=${CARGO:-cargo}
logs=${CARGO_TARGET_DIR:-target}/test-logs
mkdir -p "$logs"
names=() seconds=() results=()

# suite NAME COMMAND...: runs it with its output on the screen and in target/test-logs/NAME.log.
suite() {
    local name=$1; shift
    if [ "$only" != "  " ] && [[ "$only" != *" $name "* ]]; then return; fi
    local began=$SECONDS
    printf '\n==> %s: %s\n' "$name" "$*"
    "$@" 2>&1 | tee "$logs/$name.log"
    local status=${PIPESTATUS[0]} skipped
    # Cases that could not run here; a suite with nothing else has tested nothing, and says so by its status.
    skipped=$(grep -c '^skip  ' "$logs/$name.log")
    case $status in
        0) [ "$skipped" = 0 ] && results+=(ok) || results+=("ok, but $skipped skipped") ;;
        77) results+=("NOT TESTED") ;;
        *) results+=(FAILED) ;;
    esac
    names+=("$name"); seconds+=($((SECONDS - began)))
}

suite format  $cargo fmt --all --check
suite clippy  $cargo clippy -q --workspace --all-targets --release -- -D warnings
suite deps    $cargo run -q --release -p xtask -- deps
suite abi     $cargo run -q --release -p xtask -- abi
suite unit    $cargo test -q --release --workspace
[ -z "$long" ] || suite explore $cargo test -q --release -p unbroken-path --test model -- --ignored --nocapture
suite sim     $cargo run -q --release -p unbroken-sim -- --schedules "$([ -n "$long" ] && echo 100000 || echo 10000)"
suite mutants $cargo run -q --release -p unbroken-sim -- --mutants
suite wire    python3 tests/wire/check.py
suite model   python3 tests/model/run.py
suite capture python3 tests/wire/capture.py
suite survival  python3 tests/survival.py ${long:+--all}
suite repeat    python3 tests/survival.py --repeat "$([ -n "$long" ] && echo 20 || echo 10)" --only 'ib_write_bw nic-dead at a, 64K, 1 QP, one-way' --only 'ib_send_bw nic-dead at a, 64K, 1 QP, one-way'
suite netns     python3 tests/netns.py
suite redis     python3 tests/redis.py
suite containers python3 tests/containers.py
suite user      python3 tests/user.py
suite verify    python3 tests/verify.py ${long:+--faults 1000}
suite verify-plain python3 tests/verify.py --device plain --faults "$([ -n "$long" ] && echo 200 || echo 40)"
suite load      python3 tests/load.py ${long:+--all}
suite threads   python3 tests/threads.py
suite combined  python3 tests/combined.py
suite threads-plain python3 tests/threads.py --device plain
suite combined-plain python3 tests/combined.py --device plain
suite turmoil   python3 tests/turmoil.py
suite storms    python3 tests/storms.py --runs "$([ -n "$long" ] && echo 250 || echo 5)"
suite storms-plain python3 tests/storms.py --device plain --seed 1001 --runs "$([ -n "$long" ] && echo 250 || echo 5)"
suite cost      python3 tests/cost.py
suite planned   python3 tests/planned.py ${long:+--flap-seconds 60}
suite apm       python3 tests/apm.py
suite apm-plain python3 tests/apm.py --device plain --only streaming
suite lanes     python3 tests/lanes.py
suite lanes-plain python3 tests/lanes.py --device plain
suite processes python3 tests/processes.py
suite input     python3 tests/bad_input.py
suite strangers python3 tests/strangers.py
suite lifecycle python3 tests/lifecycle.py
suite events    python3 tests/events.py
suite remap     python3 tests/remap.py
suite remap-plain python3 tests/remap.py --device plain
suite churn     python3 tests/churn.py ${long:+--seconds 600}
suite scale     python3 tests/scale.py
suite pyverbs   python3 tests/pyverbs/run.py
suite programs  python3 tests/programs.py
suite plain     python3 tests/plain.py
suite coll      python3 tests/coll.py
suite mpi       python3 tests/mpi.py
suite datagrams python3 tests/datagrams.py
suite sdr       python3 tests/sdr.py ${long:+--all}
suite early     python3 tests/early.py ${long:+--all}
suite readme    python3 tests/readme.py
suite fuzz      fuzz/run.sh "$([ -n "$long" ] && echo 600 || echo 60)"

printf '\n%-14s %6s  %s\n' suite seconds result
failed=0 untested=
for i in "${!names[@]}"; do
    printf '%-14s %6d  %s\n' "${names[$i]}" "${seconds[$i]}" "${results[$i]}"
    case ${results[$i]} in FAILED) failed=1 ;; "NOT TESTED") untested+=" ${names[$i]}" ;; esac
done
[ -z "$untested" ] || echo "not tested on this machine:$untested"
printf '%-14s %6d\n' total "$SECONDS"
exit $failed
