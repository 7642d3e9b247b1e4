"""What was asked of this run of the tests; tests/e2e/conftest.py sets it before tests are collected."""

# Full matrices and long runs, instead of covering sets and short ones.
LONG = False
# The first seed of what is drawn at random.
SEED = 1
