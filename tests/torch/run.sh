#!/bin/sh
# PyTorch from PyPI, unmodified, over the software NIC: makes (once) a virtual environment and runs the suite in tests/torch/run.py.
# The environment takes 5 GB and is kept in $XDG_CACHE_HOME/unbroken (default ~/.cache/unbroken).
set -eu
cd "$(dirname "$0")"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/unbroken
venv=$cache/torch-$(cksum <requirements.txt | cut -d ' ' -f 1)
if [ ! -e "$venv/complete" ]; then
    free_kib=$(mkdir -p "$cache" && df --output=avail "$cache" | tail -n 1)
    if [ "$free_kib" -lt 12000000 ]; then
        echo "skip  torch: $cache has $((free_kib / 1000000)) GB free, 12 are needed" >&2
        exit 0
    fi
    echo "making $venv"
    rm -rf "$venv"
    # Two tries: an index that cannot be reached is a reason to skip, and the log says so.
    python3 -m venv "$venv" && { "$venv/bin/pip" install -q -r requirements.txt || "$venv/bin/pip" install -q -r requirements.txt; } || {
        echo "skip  torch: PyTorch could not be installed (see above)" >&2
        exit 0
    }
    touch "$venv/complete"
fi
exec python3 run.py "$venv/bin/python" "$@"
