# The two commands are `make demo` and `make test`; see README.md.
CARGO ?= cargo
BUILD  = target/release

.PHONY: all install uninstall wheel demo test test-long test-mpi test-torch test-edge test-vm lint bench figures clean

all:
	$(CARGO) build --release -p unbroken-cli -p unbroken-sdr -p unbroken-collective -p unbroken-apm -p unbroken-preload -p unbroken-man -p xtask
	$(CARGO) run -q --release --bin xtask -- so
	$(BUILD)/unbroken-man $(BUILD)/man

# What `make all` has built, into DESTDIR and PREFIX; see docs/reference/install.md.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
install uninstall:
	packaging/install.sh $@ $(BUILD) $(VERSION)

# The Python package with its C library, into target/wheels.
wheel: apt-wheel
	packaging/wheel.sh $(BUILD) target/wheels

demo: apt-demo all
	$(BUILD)/unbroken demo --out target/demo

test: apt-test all
	tests/run.sh

test-long: apt-test all
	tests/run.sh --long

# What `make test` leaves out of MPI: the other transports, and more faults of each.
test-mpi: apt-test all
	python3 tests/mpi.py --rest

# PyTorch over verbs, and over the backend of torch.distributed; its virtual environment (5 GB, made once) is kept in ~/.cache/unbroken.
test-torch: apt-test all
	tests/torch/run.sh

# The host edge in network namespaces with real FRR (root).
test-edge: apt-edge all
	$(CARGO) run -q --release --example scale
	tests/edge/run.py

# In a VM with Debian's own kernel: tc rules, and the host edge's suite over them (root; QEMU from Debian; what it needs is made once in ~/.cache/unbroken/vm).
test-vm: all
	tests/vm/run.sh "bash $(CURDIR)/tests/vm/rules.sh $(CURDIR)/$(BUILD)/unbroken"
	UNBROKEN_VM_SECONDS=3600 tests/vm/run.sh "bash $(CURDIR)/tests/vm/edge.sh"

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
.PHONY: apt-wheel apt-demo apt-test apt-figures apt-edge
apt-wheel:
	@tests/apt.sh python3-pip python3-setuptools python3-wheel binutils
apt-demo:
	@tests/apt.sh perftest ibverbs-utils libibverbs-dev make
apt-test:
	@tests/apt.sh perftest ibverbs-utils rdmacm-utils make libibverbs-dev tshark iperf3 nftables iproute2 redis-server openssl g++ python3-venv python3-pyverbs ucx-utils openmpi-bin libopenmpi-dev hpcc qperf util-linux mount libisal2 python3-numpy valgrind gdb clang libclang-rt-14-dev pkg-config man-db python3-pip python3-setuptools python3-wheel

apt-figures:
	@tests/apt.sh libisal2 perftest libibverbs-dev openmpi-bin libopenmpi-dev

apt-edge:
	@tests/apt.sh frr iproute2 nftables perftest iputils-ping procps util-linux

clean:
	$(CARGO) clean
