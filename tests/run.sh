#!/bin/bash
# Runs every suite, goes on after a failure, and prints what each took. `make test` builds first and calls this.
# Suites that assert times, or take all cores, run alone. Those that mostly wait and assert none run beside one another; each is shown when it has ended.
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
# How many run beside one another: where a third waits for a core, so do those that wait for it. One that is asked for alone has the screen for itself.
lanes=2
[ $# != 1 ] || lanes=1
names=() results=()
declare -A running=()
TIMEFORMAT='%R %U %S'

wanted() { [ "$only" = "  " ] || [[ "$only" == *" $1 "* ]]; }

# note NAME STATUS: remembers what became of it.
note() {
    local skipped
    # Cases that could not run here; a suite with nothing else has tested nothing, and says so by its status.
    skipped=$(grep -c '^skip  ' "$logs/$1.log")
    case $2 in
        0) [ "$skipped" = 0 ] && results+=(ok) || results+=("ok, but $skipped skipped") ;;
        77) results+=("NOT TESTED") ;;
        *) results+=(FAILED) ;;
    esac
    names+=("$1")
}

# suite NAME COMMAND...: runs it alone, with its output on the screen and in target/test-logs/NAME.log.
suite() {
    wanted "$1" || return 0
    until_fewer_than 1
    local name=$1 status; shift
    printf '\n==> %s: %s\n' "$name" "$*"
    { time "$@" 2>&1 | tee "$logs/$name.log"; status=${PIPESTATUS[0]}; } 2>"$logs/$name.took"
    note "$name" "$status"
}

# beside NAME COMMAND...: begins it when a lane is free; its output is in the log, and comes to the screen when it has ended.
beside() {
    if [ "$lanes" = 1 ]; then suite "$@"; return; fi
    wanted "$1" || return 0
    until_fewer_than "$lanes"
    local name=$1; shift
    printf '\n==> %s begins: %s\n' "$name" "$*"
    # In a process group of its own, which `stop` ends; so it does not read from the terminal.
    set -m
    { time "$@" >"$logs/$name.log" 2>&1; } 2>"$logs/$name.took" </dev/null &
    set +m
    running[$!]=$name
}

# until_fewer_than N: waits until fewer than N run beside one another, and shows those that have ended.
until_fewer_than() {
    local ended status
    while [ ${#running[@]} -ge "$1" ]; do
        wait -n -p ended "${!running[@]}"; status=$?
        printf '\n==> %s:\n' "${running[$ended]}"
        cat "$logs/${running[$ended]}.log"
        note "${running[$ended]}" "$status"
        unset "running[$ended]"
    done
}

# Interrupted: so are those that run, and what they made they take away; those that do not hear it are killed.
stop() {
    local groups=("${!running[@]}")
    trap - INT TERM HUP
    [ ${#groups[@]} = 0 ] || kill -INT -- "${groups[@]/#/-}"
    for _ in {1..100}; do kill -0 -- "${groups[@]/#/-}" 2>/dev/null || break; sleep 0.1; done
    kill -KILL -- "${groups[@]/#/-}" 2>/dev/null
    exit 130
}
trap stop INT TERM HUP

suite format  $cargo fmt --all --check
# All that tests are built of, before anybody waits for cargo's lock, or reads a program that is built anew.
suite build   $cargo test -q --release --workspace --no-run
suite build-mutants $cargo test-mutants --list
suite build-mutants-sdr $cargo test-mutants-sdr --list

# What mostly waits, or computes by itself, and asserts no times; the longest first.
beside clippy $cargo clippy -q --workspace --all-targets --release -- -D warnings
beside redis  python3 tests/redis.py
beside fuzz   fuzz/run.sh "$([ -n "$long" ] && echo 600 || echo 60)"
beside unit   $cargo test -q --release --workspace
[ -z "$long" ] || beside explore $cargo test -q --release -p unbroken-failover-protocol --test model -- --ignored --nocapture
beside lifecycle python3 tests/lifecycle.py
beside storms    python3 tests/storms.py --runs "$([ -n "$long" ] && echo 250 || echo 5)"
beside storms-plain python3 tests/storms.py --device plain --seed 1001 --runs "$([ -n "$long" ] && echo 250 || echo 5)"
beside coll      python3 tests/coll.py
beside coll-meet python3 tests/coll_meet.py $([ -n "$long" ] && echo --slow)
beside coll-storms python3 tests/coll_storms.py --runs "$([ -n "$long" ] && echo 300 || echo 10)"
beside programs  python3 tests/programs.py
beside readme    python3 tests/readme.py
beside plain     python3 tests/plain.py
beside pyverbs   python3 tests/pyverbs/run.py
beside processes python3 tests/processes.py
beside strangers python3 tests/strangers.py
beside events    python3 tests/events.py
beside forks     python3 tests/forks.py
beside debuggers python3 tests/debuggers.py
beside remap     python3 tests/remap.py
beside remap-plain python3 tests/remap.py --device plain
beside churn     python3 tests/churn.py ${long:+--seconds 600}
beside containers python3 tests/containers.py
beside user      python3 tests/user.py
beside input     python3 tests/bad_input.py
beside datagrams python3 tests/datagrams.py
beside sim     $cargo run -q --release --bin sim -- --schedules "$([ -n "$long" ] && echo 100000 || echo 10000)"
beside mutants $cargo test-mutants
beside mutants-sdr $cargo test-mutants-sdr
beside wire    python3 tests/wire/check.py
beside model   python3 tests/model/run.py
beside capture python3 tests/wire/capture.py
beside deps    $cargo run -q --release --bin xtask -- deps
beside abi     $cargo run -q --release --bin xtask -- abi

# What asserts times or rates, or takes all cores: MPI's ranks poll, and stand still where others compute beside them.
suite mpi       python3 tests/mpi.py
[ -z "$long" ] || suite mpi-rest python3 tests/mpi.py --rest
suite early     python3 tests/early.py ${long:+--all}
suite survival  python3 tests/survival.py ${long:+--all}
suite repeat    python3 tests/survival.py --repeat "$([ -n "$long" ] && echo 20 || echo 6)" --only 'ib_write_bw nic-dead at a, 64K, 1 QP, one-way' --only 'ib_send_bw nic-dead at a, 64K, 1 QP, one-way'
suite netns     python3 tests/netns.py
suite verify    python3 tests/verify.py ${long:+--faults 1000}
suite verify-plain python3 tests/verify.py --device plain --faults "$([ -n "$long" ] && echo 200 || echo 40)"
suite load      python3 tests/load.py ${long:+--all}
suite threads   python3 tests/threads.py
suite combined  python3 tests/combined.py
suite threads-plain python3 tests/threads.py --device plain
suite combined-plain python3 tests/combined.py --device plain
suite turmoil   python3 tests/turmoil.py
suite cost      python3 tests/cost.py
suite planned   python3 tests/planned.py ${long:+--flap-seconds 60}
suite apm       python3 tests/apm.py
suite apm-plain python3 tests/apm.py --device plain --only streaming
suite lanes     python3 tests/lanes.py
suite lanes-plain python3 tests/lanes.py --device plain
suite scale     python3 tests/scale.py
suite sdr       python3 tests/sdr.py ${long:+--all}

until_fewer_than 1
printf '\n%-14s %7s %7s  %s\n' suite seconds cpu result
failed=0 untested=
for i in "${!names[@]}"; do
    awk -v name="${names[$i]}" -v result="${results[$i]}" '{ printf "%-14s %7.0f %7.0f  %s\n", name, $1, $2 + $3, result }' "$logs/${names[$i]}.took"
    case ${results[$i]} in FAILED) failed=1 ;; "NOT TESTED") untested+=" ${names[$i]}" ;; esac
done
[ -z "$untested" ] || echo "not tested on this machine:$untested"
printf '%-14s %7d\n' total "$SECONDS"
exit $failed
