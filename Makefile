# The two commands are `make demo` and `make test`; see README.md.
CARGO ?= cargo
BUILD  = target/release

.PHONY: all demo test test-long test-mpi test-torch test-edge test-vm lint bench figures clean

all:
	$(CARGO) build --release -p unbroken-cli -p unbroken-sdr -p unbroken-collective -p unbroken-apm -p unbroken-preload -p xtask
	$(CARGO) run -q --release --bin xtask -- so

demo: apt-demo all
	$(BUILD)/unbroken demo --out target/demo

test: apt-test all
	tests/run.sh

test-long: apt-test all
	tests/run.sh --long

# Open MPI over verbs: every transport, and several faults of each.
test-mpi: apt-test all
	/usr/bin/python3 -m pytest tests/e2e/test_mpi.py tests/e2e/test_startup_faults.py

# PyTorch over verbs, and over the backend of torch.distributed; its virtual environment (5 GB, made once) is kept in ~/.cache/unbroken.
test-torch: apt-test all
	/usr/bin/python3 -m pytest tests/e2e -m torch

# The host edge in network namespaces with real FRR (root).
test-edge: apt-edge all
	$(CARGO) run -q --release --example scale
	/usr/bin/python3 -m pytest tests/e2e -m edge

# In a VM with Debian's own kernel: tc rules, and the host edge's suite over them (root; QEMU from Debian; what it needs is made once in ~/.cache/unbroken/vm).
test-vm: all
	/usr/bin/python3 -m pytest tests/e2e -m vm

bench: apt-test all
	benches/run.sh

# The papers' figures, from our models and measured here, into docs/figures; published values beside ours. One only: make figures ONLY=shift-7
# Those of the host edge are measured in network namespaces (root, FRR), and left out with a reason where that cannot be.
figures: apt-figures $(if $(filter 0,$(shell id -u)),apt-edge) all
	benches/figures.sh $(if $(ONLY),--only $(ONLY))

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --release -- -D warnings

# Debian packages: installed where this user may (root, or sudo without a password), else named.
.PHONY: apt-demo apt-test apt-figures apt-edge
apt-demo:
	@tests/apt.sh perftest ibverbs-utils libibverbs-dev make
apt-test:
	@tests/apt.sh python3-pytest python3-pytest-xdist python3-pytest-timeout perftest ibverbs-utils rdmacm-utils make libibverbs-dev tshark iperf3 nftables iproute2 redis-server openssl g++ python3-venv python3-pyverbs ucx-utils openmpi-bin libopenmpi-dev hpcc qperf util-linux mount libisal2 python3-numpy valgrind gdb clang libclang-rt-14-dev

apt-figures:
	@tests/apt.sh libisal2 perftest libibverbs-dev openmpi-bin libopenmpi-dev

apt-edge:
	@tests/apt.sh frr iproute2 nftables perftest iputils-ping procps util-linux

clean:
	$(CARGO) clean
