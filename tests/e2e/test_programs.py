"""Unmodified programs of Debian: ibverbs-utils with their options, perftest on every transport,
qperf and UCX; on both link layers (over InfiniBand they address peers by LID, with no GID at all).

Payload must have gone through the NICs, whatever the programs say.
"""

import contextlib
import json
import os
import re
import sys

import pytest

from lib import perftests
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, Process, needs, wait_until
from lib.qperf import LATENCIES, POLLING, RATES, qperf

SECONDS = 40
EVENT_RUNS = 5
PINGPONGS = [
    ("ibv_rc_pingpong", []),
    ("ibv_rc_pingpong", ["-e"]),
    ("ibv_rc_pingpong", ["-t"]),
    ("ibv_rc_pingpong", ["-c"]),
    ("ibv_rc_pingpong", ["-e", "-c"]),
    ("ibv_rc_pingpong", ["-e", "-N"]),
    ("ibv_rc_pingpong", ["-N"]),
    ("ibv_rc_pingpong", ["-N", "-t"]),
    ("ibv_rc_pingpong", ["-j", "-N"]),
    ("ibv_rc_pingpong", ["-m", "256", "-s", "100000", "-n", "100", "-r", "50"]),
    ("ibv_ud_pingpong", []),
    ("ibv_ud_pingpong", ["-e"]),
    ("ibv_srq_pingpong", []),
    ("ibv_srq_pingpong", ["-e"]),
    ("ibv_srq_pingpong", ["-q", "128"]),
    ("ibv_uc_pingpong", []),
    ("ibv_uc_pingpong", ["-e"]),
    ("ibv_uc_pingpong", ["-c"]),
    ("ibv_uc_pingpong", ["-l", "0", "-s", "2048", "-n", "500"]),
    ("ibv_uc_pingpong", ["-m", "256", "-s", "100000", "-n", "100", "-r", "50"]),
]
UCX_TAGS = [("tag_bw", ["-s", "4096", "-n", "10000"]), ("tag_lat", ["-s", "8", "-n", "10000"])]
UCX_ALL = [
    *UCX_TAGS,
    ("tag_bw", ["-s", "1048576", "-n", "500"]),
    ("stream_bw", ["-s", "16384", "-n", "1000"]),
    ("ucp_put_bw", ["-s", "65536", "-n", "1000"]),
    ("ucp_put_lat", ["-s", "8", "-n", "1000"]),
    ("ucp_get", ["-s", "65536", "-n", "1000"]),
    ("ucp_add", ["-s", "8", "-n", "1000"]),
    ("ucp_fadd", ["-s", "8", "-n", "1000"]),
    ("ucp_swap", ["-s", "4", "-n", "1000"]),
    ("ucp_cswap", ["-s", "8", "-n", "1000"]),
]
# What UCX is told to use, and the transport that it must then name. (`rc_v` allows UD for
# connecting.)
UCX_TRANSPORTS = {"ud_verbs": "ud_verbs/unb0:1", "rc_v": "rc_verbs/unb0:1"}
INFINIBAND = ["--link-layer", "infiniband"]
BY_LID = [
    ("ibv_rc_pingpong", []),
    ("ibv_rc_pingpong", ["-g", "0"]),
    ("ibv_rc_pingpong", ["-N", "-e"]),
    ("ibv_uc_pingpong", []),
    ("ibv_ud_pingpong", []),
    ("ibv_ud_pingpong", ["-g", "0"]),
]


def both_ends(
    fabric: Fabric, tool: str, args: list, env: dict | None = None, meanwhile=lambda: None
):
    """A server on host b and a client on host a; both must end with 0. Gives the client."""
    port = free_port()
    program = [tool, "-p", port, *args]
    server = fabric.run("b", program, f"b-{tool}", env=env)
    wait_until(
        lambda: server.ended() or listens(server.pid, port),
        20,
        f"{tool} server listens at port {port}",
    )
    client = fabric.run("a", [*program, "127.0.0.1"], f"a-{tool}", env=env)
    meanwhile()
    client.expect_success(SECONDS)
    server.expect_success(SECONDS)
    return client


def moved(fabric: Fabric, rails=range(4)) -> int:
    """Payload that the NICs of host a have sent: a program may fall back to TCP and still end
    well."""
    nics = fabric.nics()
    return sum(nics[f"a/{rail}"]["tx_payload_bytes"] for rail in rails if f"a/{rail}" in nics)


def run_pingpong(logs, tool: str, args: list, settings=()):
    """Both ends of a ping-pong, which must have gone through the NICs."""
    needs(tool, "ibverbs-utils")
    with Fabric(logs, *settings) as fabric:
        client = both_ends(fabric, tool, ["-d", "unb0", *args])
        if not re.search(r"\d+ iters in", client.output()):
            raise Failure("the client printed no result")
        if moved(fabric) == 0:
            raise Failure("the NICs carried nothing")


def program_params(cases, smoke=()):
    """Programs with their arguments as parameters, named by their command lines. Some are smoke
    tests."""
    for tool, args, *more in cases:
        name = " ".join([tool, *args])
        marks = pytest.mark.smoke if name in smoke else ()
        yield pytest.param(tool, args, *more, id=name, marks=marks)


SMOKE_PINGPONGS = [
    "ibv_rc_pingpong -e",
    "ibv_ud_pingpong",
    "ibv_srq_pingpong",
    "ibv_uc_pingpong",
]


@pytest.mark.parametrize("tool, args", program_params(PINGPONGS, SMOKE_PINGPONGS))
def test_pingpong(logs, tool, args):
    run_pingpong(logs, tool, ["-g", "0", *args])


@pytest.mark.parametrize("tool", ["ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong"])
def test_pingpong_by_the_second_gid(logs, tool):
    run_pingpong(logs, tool, ["-g", "1"])


@pytest.mark.parametrize("tool, args", program_params(BY_LID, ["ibv_rc_pingpong"]))
def test_pingpong_by_lid(logs, tool, args):
    run_pingpong(logs, tool, args, INFINIBAND)


@pytest.mark.parametrize("args", [["-e", "-t"], ["-e", "-t", "-N"]], ids=" ".join)
def test_pingpong_with_events_and_timestamps(logs, args):
    """A program that ends at an event without a completion, where threads lose their cores between
    arming a CQ and polling it: two others compute."""
    with busy_cores(logs):
        for _ in range(EVENT_RUNS):
            run_pingpong(logs, "ibv_rc_pingpong", ["-g", "0", *args])


@contextlib.contextmanager
def busy_cores(logs):
    """Two programs that do nothing but compute."""
    line = [sys.executable, "-c", "while True: pass"]
    spinners = [Process(f"spin-{n}", line, logs / f"spin-{n}.log", os.environ) for n in range(2)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()


FABRICS = {"ofi_rxd": ("verbs;ofi_rxd", "rdm"), "dgram": ("verbs", "dgram")}


@pytest.mark.parametrize("kind", FABRICS)
def test_libfabric(logs, note, kind):
    """fi_pingpong over verbs: datagrams, and reliable ones over UD (ofi_rxd). test_rdmacm_programs
    has the endpoints that connect."""
    needs("fi_pingpong", "libfabric-bin")
    provider, endpoint = FABRICS[kind]
    port, program = free_port(), ["fi_pingpong", "-p", provider, "-e", endpoint]
    with Fabric(logs) as fabric:
        server = fabric.run("b", [*program, "-B", port], "b-fi")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the server listens")
        client = fabric.run("a", [*program, "-P", port, "127.0.0.1"], "a-fi")
        client.expect_success(SECONDS)
        server.expect_success(SECONDS)
        if moved(fabric) < (10_000_000 if endpoint == "rdm" else 50_000):
            raise Failure("the NICs did not carry it")
        note(client.output().splitlines()[-1])


def test_diagnostics(logs):
    """ibstat knows the devices; what asks by management datagrams says that they are not there."""
    needs("ibstat", "infiniband-diags")
    with Fabric(logs, *INFINIBAND) as fabric:
        devices = fabric.run("a", ["ibstat", "-l"], "a-ibstat-l")
        devices.expect_success(20)
        if devices.output().split() != ["unb0", "unb1", "unb2", "unb3"]:
            raise Failure(f"ibstat -l: {devices.output()}")
        fabric.fault("nic a/0 down")
        port = fabric.run("a", ["ibstat", "unb0", "1"], "a-ibstat")
        port.expect_success(20)
        if "State: Down" not in port.output():
            raise Failure(f"ibstat of a port that is down: {port.output()}")
        for tool in "iblinkinfo", "perfquery":
            asks = fabric.run("a", [tool], f"a-{tool}")
            asks.expect_error(20)
            if "ib_umad" not in asks.output():
                raise Failure(f"{tool}: {asks.output()}")


@pytest.mark.parametrize(
    "name, settings",
    [("infiniband", INFINIBAND), ("indexes", ["--ports", "2"])],
    ids=["infiniband", "ports GIDs completion vectors"],
)
def test_addresses(logs, name, settings):
    """A C program that looks at ports and their tables, and uses all of them. Its QPs are
    protected, whatever they are addressed by."""
    program = compile_c(name, "-libverbs")
    with Fabric(logs, *settings) as fabric:
        fabric.run("a", [program]).expect_success(SECONDS)
        if fabric.events("unprotected"):
            raise Failure(f"a QP is not protected: {fabric.events('unprotected')[0]}")


def test_path_attributes(logs, device):
    """A C program that sets a path with unusual values and is told them, before its NIC dies and
    after."""
    program = compile_c("wanted", "-libverbs")
    with Fabric(logs) as fabric:
        moved_file = logs / "moved"
        moved_file.unlink(missing_ok=True)
        process = fabric.run("a", [program, moved_file])

        def wait_for(condition, what):
            wait_until(lambda: process.ended() or condition(), SECONDS, what)

        wait_for(lambda: "connected" in process.output(), "the program has connected its QPs")
        protected = lambda: all(qp["protected"] for qp in fabric.status()["qps"])
        wait_for(protected, "its QPs are protected")
        fabric.fault("nic a/0 dead")
        wait_for(lambda: len(fabric.events("switch")) == 2, "both have moved")
        moved_file.touch()
        process.expect_success(SECONDS)
        switches = fabric.events("switch")
        if len(switches) != 2:
            raise Failure(f"it was led astray by its new path: {switches}")


def test_path_attributes_without_protection(logs, device):
    """A QP whose NIC is dead from the beginning, and whose peer nobody knows, uses the GID of
    the NIC that it is on."""
    program = compile_c("wanted", "-libverbs")
    with Fabric(logs) as fabric:
        fabric.fault("nic a/0 dead")
        fabric.run("a", [program]).expect_success(SECONDS)
        if not fabric.events("unprotected"):
            raise Failure("it is protected, with a peer that nobody knows")


DEVINFO = {
    "ethernet": ([], ["unb0", "PORT_ACTIVE", "Ethernet", "RoCE v2", "4096 (5)"]),
    "infiniband": (
        [*INFINIBAND, "--mtu", "1024"],
        [
            "PORT_ACTIVE",
            "InfiniBand",
            "port_lid:\t\t131",
            "sm_lid:\t\t\t1",
            "active_mtu:\t\t1024 (3)",
            "fe80:",
        ],
    ),
    "two ports": (["--ports", "2"], ["phys_port_cnt:\t\t\t2", "port:\t2", "::ffff:127."]),
}


@pytest.mark.smoke
@pytest.mark.parametrize("settings, texts", DEVINFO.values(), ids=DEVINFO)
def test_ibv_devinfo(logs, settings, texts):
    """`ibv_devinfo -v` shows what a fabric's settings say."""
    needs("ibv_devinfo", "ibverbs-utils")
    with Fabric(logs, *settings) as fabric:
        program = fabric.run("a", ["ibv_devinfo", "-v"])
        program.expect_success(SECONDS)
        for text in texts:
            if text not in program.output():
                raise Failure(f"ibv_devinfo does not say {text!r}")


@pytest.mark.parametrize(
    "program, texts",
    [
        (["ibv_devinfo", "-l"], ["4 HCAs found", "unb3"]),
        (["ibv_devinfo", "-d", "unb1", "-i", "1"], ["unb1", "PORT_ACTIVE"]),
        (["ibv_devices"], ["unb0", "unb3", "02554e00"]),
    ],
    ids=["ibv_devinfo -l", "ibv_devinfo -d -i", "ibv_devices"],
)
def test_shows_devices(logs, program, texts):
    """A program that only prints."""
    needs(program[0], "ibverbs-utils")
    with Fabric(logs) as fabric:
        started = fabric.run("a", program)
        started.expect_success(SECONDS)
        for text in texts:
            if text not in started.output():
                raise Failure(f"{' '.join(program)} does not say {text!r}")


ASYNC_EVENTS = [
    ("nic a/1 down", "IBV_EVENT_PORT_ERR"),
    (None, "IBV_EVENT_PORT_ACTIVE"),
    ("nic a/1 dead", "IBV_EVENT_DEVICE_FATAL"),
]


def watch_events(logs, failover: bool):
    """ibv_asyncwatch, which has no QP that could be protected, shows that a port goes down and
    comes back, and the death of the device."""
    needs("ibv_asyncwatch", "ibverbs-utils")
    with Fabric(logs) as fabric:
        # It prints through a pipe's buffer, which stdbuf makes as short as a line.
        line = ["stdbuf", "-oL", "ibv_asyncwatch", "-d", "unb1"]
        watch = fabric.run("a", line, "a-asyncwatch", failover=failover)
        wait_until(lambda: "async event FD" in watch.output(), SECONDS, "ibv_asyncwatch watches")
        for fault, text in ASYNC_EVENTS:
            if fault:
                fabric.fault(fault)
            else:
                fabric.clear()
            shown = lambda: text in watch.output()
            wait_until(shown, SECONDS, f"ibv_asyncwatch shows {fault or 'the port that is up'}")


@pytest.mark.smoke
def test_ibv_asyncwatch(logs, device):
    watch_events(logs, failover=True)


def test_ibv_asyncwatch_without_failover(logs):
    watch_events(logs, failover=False)


@pytest.mark.smoke
def test_sysfs(logs):
    """The state and the GID type of a port in sysfs."""
    with Fabric(logs) as fabric:
        port = "/sys/class/infiniband/unb0/ports/1"
        files = [f"{port}/state", f"{port}/gid_attrs/types/0"]
        program = fabric.run("a", ["cat", *files])
        program.expect_success(SECONDS)
        if program.output().split("\n")[:2] != ["4: ACTIVE", "RoCE v2"]:
            raise Failure(f"the files say {program.output()!r}")
        fabric.fault("nic a/0 down")
        down = fabric.run("a", ["cat", files[0]], "a-cat-down")
        down.expect_success(SECONDS)
        if down.output().strip() != "1: DOWN":
            raise Failure(f"the state of a port without a link is {down.output()!r}")


PCI_CODE = """
import os
link = os.path.realpath("/sys/class/infiniband/unb1/device")
read = lambda name: open(link + "/" + name).read().strip()
bus_id = link.split("/")[-1]
bus = "/sys/class/pci_bus/" + bus_id[:7]
print(link)
there = os.path.exists("/sys/bus/pci/devices/" + bus_id)
print(os.path.realpath(link + "/subsystem"), read("class"), there)
lists = [os.listdir(link + "/" + name) for name in ("infiniband", "infiniband_verbs")]
print(os.path.exists(link + "/net"), *lists)
names = "vendor device local_cpus local_cpulist max_link_speed max_link_width".split()
print(all(read(name) for name in names), int(read("numa_node")) >= -1)
print("PCI_SLOT_NAME=" + bus_id in read("uevent"), bus_id in os.listdir("/sys/bus/pci/devices"))
"""


@pytest.mark.parametrize(
    "settings, pci_class",
    [([], "0x020000"), (INFINIBAND, "0x020700")],
    ids=["ethernet", "infiniband"],
)
def test_pci_device(logs, settings, pci_class):
    """The PCI device of a NIC, found as NCCL and UCX find it; it is none of this machine's."""
    script = logs / "pci.py"
    script.write_text(PCI_CODE)
    with Fabric(logs, *settings) as fabric:
        program = fabric.run("a", [sys.executable, script], "a-python")
        program.expect_success(SECONDS)
        told = [
            "/sys/devices/pcifab0:00/fab0:00:02.0",
            f"/sys/bus/pci {pci_class} True",
            "False ['unb1'] ['uverbs1']",
            "True True",
            "True False",
        ]
        if program.output().split("\n")[:-1] != told:
            raise Failure(f"it says {program.output()!r}, not {told}")
        names = ["/sys/class/infiniband/unb0", "/sys/class/pci_bus/fab0:00/../../fab0:00:01.0"]
        resolved = fabric.run("a", ["realpath", *names], "a-realpath")
        resolved.expect_success(SECONDS)


SMOKE_PERFTESTS = [
    "ib_send_bw -c UC -n 2000 -b",
    "ib_send_bw -c UD -n 20000",
    "ib_read_bw -n 2000",
    "ib_atomic_bw -A FETCH_AND_ADD -n 5000",
    "ib_send_bw --use-srq -q 4",
]


@pytest.mark.parametrize(
    "tool, args, payload", program_params(perftests.PERFTESTS, SMOKE_PERFTESTS)
)
def test_perftest(logs, tool, args, payload):
    needs(tool, "perftest")
    perftests.run(logs, tool, args, payload)


@pytest.mark.parametrize("tool, args, payload", program_params(perftests.BY_LID))
def test_perftest_by_lid(logs, tool, args, payload):
    needs(tool, "perftest")
    perftests.run(logs, tool, args, payload, INFINIBAND)


def test_uc_is_not_protected(logs):
    """Failover does not protect UC, and says so. A QP on a NIC that dies flushes, as it does on
    hardware."""
    needs("ib_send_bw", "perftest")
    with Fabric(logs) as fabric:
        _, client = fabric.pair("ib_send_bw", ["-F", "-c", "UC", "-D", "10"])
        wait_until(lambda: client.ended() or moved(fabric, [0]) > 1 << 20, 20, "traffic on rail 0")
        said = "UC QPs are not protected"
        if said not in json.dumps(fabric.status()):
            raise Failure(f"the status does not say {said!r}")
        fabric.fault("nic a/0 dead")
        client.expect_error(SECONDS)
        if moved(fabric, [1, 2, 3]) > 1 << 20:
            raise Failure("another rail has carried it")


def test_sysfs_of_infiniband(logs):
    told = {
        "link_layer": "InfiniBand",
        "lid": "0x82",
        "sm_lid": "0x1",
        "gid_attrs/types/0": "IB/RoCE v1",
        "pkeys/0": "0xffff",
    }
    with Fabric(logs, *INFINIBAND) as fabric:
        files = [f"/sys/class/infiniband/unb2/ports/1/{name}" for name in told]
        program = fabric.run("a", ["cat", *files])
        program.expect_success(SECONDS)
        if program.output().split("\n")[:-1] != list(told.values()):
            raise Failure(f"the files say {program.output()!r}")


def run_ucx(logs, transports: str, test: str, args: list, settings=()):
    """ucx_perftest over some transports, whose name it must print."""
    needs("ucx_perftest", "ucx-utils")
    with Fabric(logs, *settings) as fabric:
        env = {"UCX_NET_DEVICES": "unb0:1", "UCX_TLS": transports, "UCX_LOG_LEVEL": "info"}
        client = both_ends(fabric, "ucx_perftest", ["-t", test, *args], env)
        named = UCX_TRANSPORTS[transports]
        if named not in client.output() or "Final:" not in client.output():
            raise Failure(f"no result over {named}")
        if moved(fabric) == 0:
            raise Failure("the NICs carried nothing")


def ucx_params(tests, smoke=()):
    """Tests of ucx_perftest as parameters."""
    for test, args in tests:
        marks = pytest.mark.smoke if test in smoke else ()
        yield pytest.param(test, args, id=f"{test} {args[1]}", marks=marks)


@pytest.mark.parametrize("transports", UCX_TRANSPORTS)
@pytest.mark.parametrize("test, args", ucx_params(UCX_ALL, ["ucp_put_lat"]))
def test_ucx(logs, transports, test, args):
    run_ucx(logs, transports, test, args)


@pytest.mark.parametrize("transports", UCX_TRANSPORTS)
@pytest.mark.parametrize("test, args", ucx_params(UCX_TAGS))
def test_ucx_by_lid(logs, transports, test, args):
    run_ucx(logs, transports, test, args, INFINIBAND)


def qperf_params():
    """Every test of qperf, with events and polling, as parameters."""
    for test in [*LATENCIES, *RATES]:
        for how, poll in POLLING.items():
            smoke = (test, how) in [("rc_lat", "events"), ("rc_rdma_write_poll_lat", "polling")]
            marks = pytest.mark.smoke if smoke else ()
            yield pytest.param(test, poll, id=f"{test} {how}", marks=marks)


@pytest.mark.parametrize("test, poll", qperf_params())
def test_qperf(logs, note, test, poll):
    note(qperf(logs, test, poll))


@pytest.mark.parametrize(
    "tool, args, settings",
    [
        ("ib_write_bw", ["-s", "65536", "-n", "1000"], []),
        ("ib_send_bw", ["-c", "UD", "-s", "1024", "-n", "500"], INFINIBAND),
    ],
    ids=["ib_write_bw", "ib_send_bw UD by LID"],
)
def test_port_2(logs, tool, args, settings):
    """What is bound to port 2 goes through that port."""
    needs(tool, "perftest")
    with Fabric(logs, "--ports", "2", *settings) as fabric:
        server, client = fabric.pair(tool, ["-F", "-i", 2, *args])
        client.expect_success(SECONDS)
        server.expect_success(SECONDS)
        nics = fabric.nics()
        first, second = (nics[nic]["tx_payload_bytes"] for nic in ("a/0", "a/0/2"))
        # (Control messages go through port 1.)
        if second < 100 * first or second == 0:
            raise Failure(f"port 1 carried {first} bytes, port 2 {second}")


@pytest.mark.parametrize(
    "fault, args",
    [
        ("nic a/0/2 down", []),
        ("cable b/0/2 cut", []),
        ("nic a/0 dead", []),
        ("nic a/0 dead", ["-x", 1]),
    ],
    ids=["port down", "cable cut", "nic dead", "nic dead second GID"],
)
def test_port_2_survives(logs, note, fault, args):
    """A stream that is bound to port 2 goes on over another NIC when that port fails, and is
    told nothing."""
    needs("ib_write_bw", "perftest")
    with Fabric(logs, "--ports", "2") as fabric:
        server, client = fabric.pair("ib_write_bw", ["-F", "-i", 2, "-D", 3, *args])
        wait_until(
            lambda: client.ended() or fabric.nics()["a/0/2"]["tx_payload_bytes"] > 100e6,
            20,
            "traffic on port 2",
        )
        fabric.fault(fault)
        client.expect_success(SECONDS)
        server.expect_success(SECONDS)
        nics = fabric.nics()
        elsewhere = sum(
            n["tx_payload_bytes"]
            for name, n in nics.items()
            if name.startswith("a/") and name != "a/0/2"
        )
        if elsewhere < 100e6:
            raise Failure(f"the other ports carried {elsewhere} bytes")
        on_port = nics["a/0/2"]["tx_payload_bytes"]
        note(f"{on_port / 1e9:.2f} GB on port 2, {elsewhere / 1e9:.2f} GB elsewhere")


@pytest.mark.parametrize(
    "transport, fault",
    [
        ("rc_v", "cable a/0 cut"),
        ("rc_v", "nic b/0 down"),
        ("rc_v", "nic a/0 dead"),
        ("ud_v", "nic a/0 dead"),
    ],
    ids=["rc cable cut", "rc nic down", "rc nic dead", "ud nic dead"],
)
def test_ucx_survives(logs, note, transport, fault):
    """UCX goes on over another rail."""
    needs("ucx_perftest", "ucx-utils")
    size, count = 65536, 40000 if transport == "rc_v" else 10000
    with Fabric(logs) as fabric:

        def strike():
            wait_until(lambda: moved(fabric, [0]) > size * count // 10, 20, "traffic on rail 0")
            fabric.fault(fault)

        env = {"UCX_NET_DEVICES": "unb0:1", "UCX_TLS": transport}
        client = both_ends(
            fabric, "ucx_perftest", ["-t", "tag_bw", "-s", size, "-n", count, "-w", 10], env, strike
        )
        if "Final:" not in client.output():
            raise Failure("no result")
        elsewhere = moved(fabric, [1, 2, 3])
        if elsewhere < size * count // 10:
            raise Failure(f"the other rails carried {elsewhere} bytes")
        note(f"{moved(fabric, [0]) / 1e9:.2f} GB on rail 0, {elsewhere / 1e9:.2f} GB on others")
