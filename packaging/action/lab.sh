#!/bin/bash
# Installs Unbroken from a wheel, makes an emulated network and runs commands in it: what the GitHub
# Action beside this file does, and a GitLab job can. Needs Python 3.10 or newer with venv.
#
# environment:
#   LAB_PACKAGE   the wheel that pip installs: a file or a URL        (needed)
#   LAB_HOSTS     names of hosts, with commas                         [a,b]
#   LAB_NICS      NICs of each host                                   [4]
#   LAB_DEVICE    full or plain                                       [full]
#   LAB_RUN       commands for bash                                   [none]
#   LAB_FOLDER    where the virtual environment goes                  [$RUNNER_TEMP or a new one]
# The exit status is that of LAB_RUN. What happened in the network is shown behind its output, and
# in the summary of the job where there is one.
set -euo pipefail

# A name would be looked up on PyPI, where anybody may register it: Unbroken is not released there.
package=${LAB_PACKAGE:-}
case $package in
*.whl | *://*) ;;
*)
    echo "lab.sh: LAB_PACKAGE is '$package'; right is the file or the URL of a wheel of \`make" \
        "wheel\`: Unbroken is not released, and its name on PyPI is not ours" >&2
    exit 2
    ;;
esac

folder=${LAB_FOLDER:-${RUNNER_TEMP:-$(mktemp -d)}/unbroken}
python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check "$package"
export PATH="$folder/bin:$PATH"

# Its pages change with every packet: in memory where there is room for them.
where=/dev/shm
[ -w "$where" ] || where=$folder
runtime=$(mktemp -d --tmpdir="$where" --suffix=-unbroken-lab)
export UNBROKEN_RUNTIME=$runtime/runtime
unbroken fabric up --hosts "${LAB_HOSTS:-a,b}" --nics "${LAB_NICS:-4}" \
    --device "${LAB_DEVICE:-full}"

# For the following steps of a job.
if [ -n "${GITHUB_ENV:-}" ]; then
    echo "UNBROKEN_RUNTIME=$UNBROKEN_RUNTIME" >>"$GITHUB_ENV"
    echo "$folder/bin" >>"$GITHUB_PATH"
    echo "runtime=$UNBROKEN_RUNTIME" >>"$GITHUB_OUTPUT"
fi
[ -n "${LAB_RUN:-}" ] || exit 0

status=0
bash -euo pipefail -c "$LAB_RUN" || status=$?
tell() {
    printf '%s\n' '' '### What happened in the RDMA lab' '' '```'
    unbroken events
    unbroken status
    printf '%s\n' '```'
}
tell
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    tell >>"$GITHUB_STEP_SUMMARY"
fi
# Nobody comes after.
if [ -z "${GITHUB_ENV:-}" ]; then
    unbroken reset --force >/dev/null
    rm -rf "$runtime"
fi
exit "$status"
