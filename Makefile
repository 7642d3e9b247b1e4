# The two commands are `make demo` and `make test`; see README.md.
CARGO  ?= cargo
# Debian's, for which its packages of pytest are.
PYTHON ?= /usr/bin/python3
PYTEST  = $(PYTHON) -m pytest
BUILD   = target/release
export CARGO PYTHON

.PHONY: all install uninstall wheel deb release demo check test test-all test-mpi test-torch \
	test-ray test-edge test-vm mutants bench figures lint clean

all:
	$(CARGO) build --release -p unbroken-cli -p unbroken-sdr -p unbroken-collective -p unbroken-apm \
		-p unbroken-simulations -p unbroken-preload -p unbroken-man -p xtask
	$(CARGO) run -q --release --bin xtask -- so
	$(BUILD)/unbroken-man $(BUILD)/man
	packaging/verifier.sh $(BUILD)

# What `make all` has built, into DESTDIR and PREFIX; see docs/reference/install.md.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
install uninstall:
	packaging/install.sh $@ $(BUILD) $(VERSION)

# The Python package with the command and its libraries, into target/wheels.
wheel: apt-wheel
	packaging/verifier.sh $(BUILD)
	packaging/wheel.sh $(BUILD) target/wheels

# Debian packages of what `make all` has built, into target/debs.
deb: apt-deb
	packaging/verifier.sh $(BUILD)
	packaging/deb.sh $(BUILD) $(VERSION) target/debs

# Packages, wheel, sources and checksums of a version, into target/release-VERSION; DRAFT=1: also
# of what is not committed or has no date in CHANGELOG.md.
release: apt-wheel apt-deb all
	packaging/release.sh $(BUILD) $(VERSION) target/release-$(VERSION) $(if $(DRAFT),--draft)

demo: apt-demo all
	$(BUILD)/unbroken demo --out target/demo

# What one runs before a commit: format, clippy, unit tests, 1,000 schedules, two end-to-end tests.
check: apt-test all
	tests/run.sh check

# Unit tests, 5,000 schedules, mutants, and end-to-end tests that cover each feature.
test: apt-test all
	tests/run.sh test

# Every test. SLICE=2/4: the second of four parts. LONG=1: full matrices and long runs.
test-all: apt-test apt-edge apt-simgrid apt-packages apt-slurm all
	$(CARGO) build -q --release --example scale -p unbroken-edge-rules
	tests/run.sh all $(SLICE)

# Parts of test-all by what they need: Open MPI; PyTorch (5 GB, in ~/.cache/unbroken); Ray (250 MB
# there); the host edge in network namespaces with FRR (root); a VM with Debian's kernel (root,
# QEMU).
test-mpi: apt-test all
	$(PYTEST) -m mpi

test-torch: apt-test all
	$(PYTEST) -m torch

test-ray: apt-test all
	$(PYTEST) -m ray

test-edge: apt-test apt-edge all
	$(CARGO) build -q --release --example scale -p unbroken-edge-rules
	$(PYTEST) -m edge

test-vm: apt-test all
	$(PYTEST) -m "vm and not timing"

# Changes of the pure crates, one place at a time, that no test notices (cargo-mutants). Hours, and
# not in CI. make mutants ARGS='--file "**/health.rs"'
mutants:
	tests/mutants.sh $(ARGS)

# Bandwidth, latency and the costs of failures beside others; then the tests that assert times.
bench: apt-test all
	benches/run.sh
	$(PYTEST) -m timing

# The papers' figures, from our models and measured here, into docs/figures; published values beside
# ours. One only: make figures ONLY=shift-7. Those of the host edge are measured in network
# namespaces (root, FRR), and left out with a reason where that cannot be.
figures: apt-figures $(if $(filter 0,$(shell id -u)),apt-edge) all
	benches/figures.sh $(if $(ONLY),--only $(ONLY))

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --release -- -D warnings

# Debian packages: installed where this user may (root, or sudo without a password), else named.
.PHONY: apt-wheel apt-deb apt-packages apt-demo apt-test apt-figures apt-edge apt-simgrid apt-slurm
apt-wheel:
	@tests/apt.sh python3-pip python3-setuptools python3-wheel binutils libibverbs-dev
apt-deb:
	@tests/apt.sh dpkg-dev fakeroot binutils libibverbs-dev
# For tests of packages in a clean Debian, of containers, and with bpftrace.
apt-packages: apt-deb apt-wheel
	@tests/apt.sh debootstrap lintian podman crun bpftrace
apt-demo:
	@tests/apt.sh perftest ibverbs-utils libibverbs-dev make
apt-test:
	@tests/apt.sh python3-pytest python3-pytest-xdist python3-pytest-timeout perftest \
		ibverbs-utils rdmacm-utils make libibverbs-dev tshark iperf3 nftables iproute2 \
		redis-server openssl g++ python3-venv python3-pyverbs ucx-utils openmpi-bin \
		infiniband-diags libfabric-bin \
		libopenmpi-dev hpcc qperf util-linux mount libisal2 python3-numpy valgrind gdb clang \
		libclang-rt-14-dev pkg-config man-db python3-pip python3-setuptools python3-wheel \
		iperf tgt libiscsi-dev fio dapl2-utils libucx-dev qemu-system-x86 librdmacm-dev \
		prometheus python3-pyte python3-jsonschema python3-yaml chromium chromium-driver

apt-figures:
	@tests/apt.sh libisal2 perftest libibverbs-dev openmpi-bin libopenmpi-dev

# For the test that compares the simulator of collectives with SimGrid.
apt-simgrid:
	@tests/apt.sh g++ libsimgrid-dev

# For the test of the examples for Slurm.
apt-slurm:
	@tests/apt.sh slurmctld slurmd slurm-client munge iproute2 nftables util-linux perftest

apt-edge:
	@tests/apt.sh frr iproute2 nftables perftest iputils-ping procps util-linux

clean:
	$(CARGO) clean
