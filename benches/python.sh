#!/bin/sh
# Prints the Python that has torch, where `make test-torch` has installed one; else nothing.
for found in "${XDG_CACHE_HOME:-$HOME/.cache}"/unbroken/torch-*/bin/python; do
    [ -x "$found" ] && python=$found
done
echo "${python:-}"
