# The two commands are `make demo` and `make test`; see README.md.
CARGO ?= cargo
BUILD  = target/release

.PHONY: all demo test lint bench check-tools clean test-long

all:
	$(CARGO) build --release -p unbroken-cli
	$(CARGO) run -q --release -p xtask -- so

demo: apt-demo all
	$(BUILD)/unbroken demo --out target/demo

test: apt-test all
	tests/run.sh

test-long: apt-test all
	tests/run.sh --long

bench: apt-test all
	benches/run.sh

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --release -- -D warnings

# Debian packages: installed where this user may (root, or sudo without a password), else named.
.PHONY: apt-demo apt-test
apt-demo:
	@tests/apt.sh perftest ibverbs-utils make
apt-test:
	@tests/apt.sh perftest ibverbs-utils make libibverbs-dev tshark iperf3 nftables iproute2 g++ python3-venv python3-pyverbs ucx-utils

clean:
	$(CARGO) clean
