"""What was asked of this run of the tests; conftest.py sets it before tests are collected."""

# Full matrices and long runs, instead of covering sets and short ones.
LONG = False
# The first seed of what is drawn at random.
SEED = 1
# This is a VM of the tests' own, with Debian's kernel: the host edge has flower rules and rxe
# there.
VM = False
