#!/usr/bin/env python3
"""Unmodified programs of Debian: ibverbs-utils with their options, perftest on every transport, and UCX. On both link layers: over
InfiniBand they address peers by LID, with no GID at all. Payload must have gone through the NICs, whatever the programs say."""

import argparse
import json
import re
import shutil
import sys

from lib.cc import compile_c
from lib import perftests
from lib.device import PLAIN_GID_INDEX
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, Skip, wait_until
from lib.suite import Suite

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
# Each with completion events and polling. qperf ends a test by a signal, which must end its wait for an event.
QPERF_LATENCIES = [
    "rc_lat",
    "uc_lat",
    "ud_lat",
    "rc_rdma_read_lat",
    "rc_rdma_write_lat",
    "rc_rdma_write_poll_lat",
    "uc_rdma_write_lat",
    "uc_rdma_write_poll_lat",
]
QPERF_RATES = ["rc_compare_swap_mr", "rc_fetch_add_mr", "ver_rc_compare_swap", "ver_rc_fetch_add"]
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
# What UCX is told to use, and the transport that it must then name. (`rc_v` allows UD for connecting.)
UCX_TRANSPORTS = [("ud_verbs", "ud_verbs/unb0:1", UCX_ALL), ("rc_v", "rc_verbs/unb0:1", UCX_ALL)]
INFINIBAND = ["--link-layer", "infiniband"]
BY_LID = [
    ("ibv_rc_pingpong", []),
    ("ibv_rc_pingpong", ["-g", "0"]),
    ("ibv_rc_pingpong", ["-N", "-e"]),
    ("ibv_uc_pingpong", []),
    ("ibv_ud_pingpong", []),
    ("ibv_ud_pingpong", ["-g", "0"]),
]


def needs(tool: str, package: str):
    if shutil.which(tool) is None:
        raise Skip(f"{tool} is missing: install Debian's {package}")


def both_ends(fabric: Fabric, tool: str, args: list, env: dict | None = None, meanwhile=lambda: None):
    """A server on host b and a client on host a; both must end with 0. Gives the client."""
    port = free_port()
    program = [tool, "-p", port, *args]
    server = fabric.run("b", program, f"b-{tool}", env=env)
    wait_until(lambda: server.ended() or listens(server.pid, port), 20, f"{tool} server listens at port {port}")
    client = fabric.run("a", [*program, "127.0.0.1"], f"a-{tool}", env=env)
    meanwhile()
    client.expect_success(SECONDS)
    server.expect_success(SECONDS)
    return client


def moved(fabric: Fabric, rails=range(4)) -> int:
    """Payload that the NICs of host a have sent: a program may fall back to TCP and still end well."""
    nics = fabric.nics()
    return sum(nics[f"a/{rail}"]["tx_payload_bytes"] for rail in rails if f"a/{rail}" in nics)


def pingpong(logs, tool: str, args: list, settings=()):
    needs(tool, "ibverbs-utils")
    with Fabric(logs, *settings) as fabric:
        client = both_ends(fabric, tool, ["-d", "unb0", *args])
        if not re.search(r"\d+ iters in", client.output()):
            raise Failure("the client printed no result")
        if moved(fabric) == 0:
            raise Failure("the NICs carried nothing")


def events_and_stamps(logs, tool: str, args: list):
    """A program that ends at an event without a completion. One may come, on any NIC: where a thread loses its core between arming a CQ and polling it, which
    is seen in one run of twenty. So of several runs most must end well, and the others by that alone."""
    needs(tool, "ibverbs-utils")
    well = 0
    for _ in range(EVENT_RUNS):
        try:
            pingpong(logs, tool, args)
            well += 1
        except Failure:
            # Each run writes its logs anew.
            if not any("poll CQ failed" in log.read_text(errors="replace") for log in logs.rglob("*.log")):
                raise
    if 2 * well <= EVENT_RUNS:
        raise Failure(f"{well} of {EVENT_RUNS} runs end well")
    return f"{well} of {EVENT_RUNS} runs end well"


def addresses(logs, name: str, settings: list):
    """A C program that looks at ports and their tables, and uses all of them. Its QPs are protected, whatever they are addressed by."""
    program = compile_c(name, "-libverbs")
    with Fabric(logs, *settings) as fabric:
        fabric.run("a", [program]).expect_success(SECONDS)
        if fabric.events("unprotected"):
            raise Failure(f"a QP is not protected: {fabric.events('unprotected')[0]}")


def wanted(logs, settings: list, gid_index: int):
    """A C program that sets a path with unusual values and is told them, before its NIC dies and after."""
    program = compile_c("wanted", "-libverbs")
    with Fabric(logs, *settings) as fabric:
        moved_file = logs / "moved"
        moved_file.unlink(missing_ok=True)
        process = fabric.run("a", [program, moved_file], env={"TEST_GID_INDEX": str(gid_index)})
        wait_until(lambda: process.ended() or "connected" in process.output(), SECONDS, "the program is that far")
        wait_until(lambda: process.ended() or all(qp["protected"] for qp in fabric.status()["qps"]), SECONDS, "its QPs are protected")
        fabric.fault("nic a/0 dead")
        wait_until(lambda: process.ended() or len(fabric.events("switch")) == 2, SECONDS, "both have moved")
        moved_file.touch()
        process.expect_success(SECONDS)
        switches = fabric.events("switch")
        if len(switches) != 2:
            raise Failure(f"it was led astray by its new path: {switches}")


def unprotected_elsewhere(logs, settings: list, gid_index: int):
    """A QP whose NIC is dead from the beginning, and whose peer nobody knows, uses the GID of the NIC that it is on."""
    program = compile_c("wanted", "-libverbs")
    with Fabric(logs, *settings) as fabric:
        fabric.fault("nic a/0 dead")
        fabric.run("a", [program], env={"TEST_GID_INDEX": str(gid_index)}).expect_success(SECONDS)
        if not fabric.events("unprotected"):
            raise Failure("it is protected, with a peer that nobody knows")


def devinfo(logs, settings, texts):
    needs("ibv_devinfo", "ibverbs-utils")
    with Fabric(logs, *settings) as fabric:
        program = fabric.run("a", ["ibv_devinfo", "-v"])
        program.expect_success(SECONDS)
        for text in texts:
            if text not in program.output():
                raise Failure(f"ibv_devinfo does not say {text!r}")


def says(logs, program: list, texts: list):
    """A program that only prints."""
    needs(program[0], "ibverbs-utils")
    with Fabric(logs) as fabric:
        started = fabric.run("a", program)
        started.expect_success(SECONDS)
        for text in texts:
            if text not in started.output():
                raise Failure(f"{' '.join(program)} does not say {text!r}")


def asyncwatch(logs, settings: list, failover: bool):
    """ibv_asyncwatch, which has no QP that could be protected, tells of a port that goes down and comes back, and of the death of the device."""
    needs("ibv_asyncwatch", "ibverbs-utils")
    with Fabric(logs, *settings) as fabric:
        # It prints through a pipe's buffer, which stdbuf makes as short as a line.
        watch = fabric.run("a", ["stdbuf", "-oL", "ibv_asyncwatch", "-d", "unb1"], "a-asyncwatch", failover=failover)
        wait_until(lambda: "async event FD" in watch.output(), SECONDS, "ibv_asyncwatch watches")
        for fault, text in [("nic a/1 down", "IBV_EVENT_PORT_ERR"), (None, "IBV_EVENT_PORT_ACTIVE"), ("nic a/1 dead", "IBV_EVENT_DEVICE_FATAL")]:
            if fault:
                fabric.fault(fault)
            else:
                fabric.clear()
            wait_until(lambda: text in watch.output(), SECONDS, f"ibv_asyncwatch tells of {fault or 'the healed port'}")


def paths(logs):
    with Fabric(logs) as fabric:
        files = ["/sys/class/infiniband/unb0/ports/1/state", "/sys/class/infiniband/unb0/ports/1/gid_attrs/types/0"]
        program = fabric.run("a", ["cat", *files])
        program.expect_success(SECONDS)
        if program.output().split("\n")[:2] != ["4: ACTIVE", "RoCE v2"]:
            raise Failure(f"the files say {program.output()!r}")
        fabric.fault("nic a/0 down")
        down = fabric.run("a", ["cat", files[0]], "a-cat-down")
        down.expect_success(SECONDS)
        if down.output().strip() != "1: DOWN":
            raise Failure(f"the state of a port without a link is {down.output()!r}")


def pci(logs, settings: list, pci_class: str):
    """The PCI device of a NIC, found as NCCL and UCX find it; it is none of this machine's."""
    code = """
import os
link = os.path.realpath("/sys/class/infiniband/unb1/device")
read = lambda name: open(link + "/" + name).read().strip()
bus_id = link.split("/")[-1]
bus = "/sys/class/pci_bus/" + bus_id[:7]
print(link)
print(os.path.realpath(link + "/subsystem"), read("class"), os.path.exists("/sys/bus/pci/devices/" + bus_id))
print(os.path.exists(link + "/net"), os.listdir(link + "/infiniband"), os.listdir(link + "/infiniband_verbs"))
print(all(read(name) for name in ("vendor", "device", "local_cpus", "local_cpulist", "max_link_speed", "max_link_width")), int(read("numa_node")) >= -1)
print("PCI_SLOT_NAME=" + bus_id in read("uevent"), bus_id in os.listdir("/sys/bus/pci/devices"))
"""
    script = logs / "pci.py"
    script.write_text(code)
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
        resolved = fabric.run("a", ["realpath", "/sys/class/infiniband/unb0", "/sys/class/pci_bus/fab0:00/../../fab0:00:01.0"], "a-realpath")
        resolved.expect_success(SECONDS)


def perftest(logs, tool: str, *args):
    needs(tool, "perftest")
    perftests.run(logs, tool, *args)


def unprotected(logs, transport: str):
    """Failover does not protect UC, and says so. A QP on a NIC that dies flushes, as it does on hardware."""
    needs("ib_send_bw", "perftest")
    with Fabric(logs) as fabric:
        _, client = fabric.pair("ib_send_bw", ["-F", "-c", transport, "-D", "10"])
        wait_until(lambda: client.ended() or moved(fabric, [0]) > 1 << 20, 20, "traffic on rail 0")
        said = f"{transport} QPs are not protected"
        if said not in json.dumps(fabric.status()):
            raise Failure(f"the status does not say {said!r}")
        fabric.fault("nic a/0 dead")
        client.expect_error(SECONDS)
        if moved(fabric, [1, 2, 3]) > 1 << 20:
            raise Failure("another rail has carried it")


def infiniband_paths(logs):
    told = {"link_layer": "InfiniBand", "lid": "0x82", "sm_lid": "0x1", "gid_attrs/types/0": "IB/RoCE v1", "pkeys/0": "0xffff"}
    with Fabric(logs, *INFINIBAND) as fabric:
        program = fabric.run("a", ["cat", *(f"/sys/class/infiniband/unb2/ports/1/{name}" for name in told)])
        program.expect_success(SECONDS)
        if program.output().split("\n")[:-1] != list(told.values()):
            raise Failure(f"the files say {program.output()!r}")


def ucx(logs, transports: str, named: str, test: str, args: list, settings=()):
    needs("ucx_perftest", "ucx-utils")
    with Fabric(logs, *settings) as fabric:
        env = {"UCX_NET_DEVICES": "unb0:1", "UCX_TLS": transports, "UCX_LOG_LEVEL": "info"}
        client = both_ends(fabric, "ucx_perftest", ["-t", test, *args], env)
        if named not in client.output() or "Final:" not in client.output():
            raise Failure(f"no result over {named}")
        if moved(fabric) == 0:
            raise Failure("the NICs carried nothing")


def qperf(logs, test: str, poll: int, seconds: int = 1, least: int = 10):
    """qperf addresses its peer by LID, so the link layer is InfiniBand. `least`: packets that must have come to each end."""
    needs("qperf", "qperf")
    with Fabric(logs, *INFINIBAND) as fabric:
        port = free_port()
        server = fabric.run("b", ["qperf", "-lp", port], "b-qperf")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, f"qperf listens at port {port}")
        args = ["qperf", "127.0.0.1", "-lp", port, "-i", "unb0:1", "-t", seconds, "-cp", poll, test]
        client = fabric.run("a", args, "a-qperf")
        client.expect_success(SECONDS)
        figure = re.search(r"(latency|msg_rate) += +(.+)", client.output())
        if not figure:
            raise Failure(f"no result: {client.output()!r}")
        nics = fabric.nics()
        if min(nics["a/0"]["rx_packets"], nics["b/0"]["rx_packets"]) < least:
            raise Failure(f"the NICs carried less than {least} packets each way")
        server.kill()
        return figure.group(2)


def port_2(logs, tool: str, args: list, settings=()):
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


def port_2_survives(logs, fault: str, *args):
    """A stream that is bound to port 2 goes on over another NIC when that port fails, and is told nothing."""
    needs("ib_write_bw", "perftest")
    with Fabric(logs, "--ports", "2") as fabric:
        server, client = fabric.pair("ib_write_bw", ["-F", "-i", 2, "-D", 3, *args])
        wait_until(lambda: client.ended() or fabric.nics()["a/0/2"]["tx_payload_bytes"] > 100e6, 20, "traffic on port 2")
        fabric.fault(fault)
        client.expect_success(SECONDS)
        server.expect_success(SECONDS)
        nics = fabric.nics()
        elsewhere = sum(n["tx_payload_bytes"] for name, n in nics.items() if name.startswith("a/") and name != "a/0/2")
        if elsewhere < 100e6:
            raise Failure(f"the other ports carried {elsewhere} bytes")
        return f"{nics['a/0/2']['tx_payload_bytes'] / 1e9:.2f} GB on port 2, {elsewhere / 1e9:.2f} GB elsewhere"


def ucx_survives(logs, transport: str, fault: str):
    """UCX goes on over another rail."""
    needs("ucx_perftest", "ucx-utils")
    size, count = 65536, 40000 if transport == "rc_v" else 10000
    with Fabric(logs) as fabric:

        def strike():
            wait_until(lambda: moved(fabric, [0]) > size * count // 10, 20, "traffic on rail 0")
            fabric.fault(fault)

        env = {"UCX_NET_DEVICES": "unb0:1", "UCX_TLS": transport}
        client = both_ends(fabric, "ucx_perftest", ["-t", "tag_bw", "-s", size, "-n", count, "-w", 10], env, strike)
        if "Final:" not in client.output():
            raise Failure("no result")
        elsewhere = moved(fabric, [1, 2, 3])
        if elsewhere < size * count // 10:
            raise Failure(f"the other rails carried {elsewhere} bytes")
        return f"{moved(fabric, [0]) / 1e9:.2f} GB on rail 0, {elsewhere / 1e9:.2f} GB on others"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORDS", help="cases whose names have all these words, as in --only 'send_bw UC'")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="each perftest N times")
    options = parser.parse_args()
    suite = Suite("programs", only=(options.only or "").split())
    suite.case("ibv_devinfo -v", devinfo, [], ["unb0", "PORT_ACTIVE", "Ethernet", "RoCE v2", "4096 (5)"])
    said = ["PORT_ACTIVE", "InfiniBand", "port_lid:\t\t131", "sm_lid:\t\t\t1", "active_mtu:\t\t1024 (3)", "fe80:"]
    suite.case("ibv_devinfo -v, InfiniBand", devinfo, [*INFINIBAND, "--mtu", "1024"], said)
    suite.case("ibv_devinfo -l", says, ["ibv_devinfo", "-l"], ["4 HCAs found", "unb3"])
    suite.case("ibv_devinfo -d -i", says, ["ibv_devinfo", "-d", "unb1", "-i", "1"], ["unb1", "PORT_ACTIVE"])
    suite.case("ibv_devices", says, ["ibv_devices"], ["unb0", "unb3", "02554e00"])
    suite.case("ibv_asyncwatch", asyncwatch, [], True)
    suite.case("ibv_asyncwatch, plain devices", asyncwatch, ["--device", "plain"], True)
    suite.case("ibv_asyncwatch --no-failover", asyncwatch, [], False)
    suite.case("ibv_devinfo -v, two ports", devinfo, ["--ports", "2"], ["phys_port_cnt:\t\t\t2", "port:\t2", "::ffff:127."])
    suite.case("paths", paths)
    suite.case("paths, InfiniBand", infiniband_paths)
    suite.case("PCI devices", pci, [], "0x020000")
    suite.case("PCI devices, InfiniBand", pci, INFINIBAND, "0x020700")
    suite.case("addresses, InfiniBand", addresses, "infiniband", INFINIBAND)
    suite.case("ports, GIDs, completion vectors", addresses, "indexes", ["--ports", "2"])
    for settings, gid_index, devices in [([], 0, ""), (["--device", "plain"], PLAIN_GID_INDEX, ", plain devices")]:
        suite.case(f"what is wanted of paths, nic a/0 dead{devices}", wanted, settings, gid_index)
        suite.case(f"the same, dead at first and without protection{devices}", unprotected_elsewhere, settings, gid_index)
    for tool, args in PINGPONGS:
        suite.case(" ".join([tool, *args]), pingpong, tool, ["-g", "0", *args])
    for args in [["-e", "-t"], ["-e", "-t", "-N"]]:
        suite.case(" ".join(["ibv_rc_pingpong", *args]), events_and_stamps, "ibv_rc_pingpong", ["-g", "0", *args])
    for program in ["ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong"]:
        suite.case(f"{program} -g 1", pingpong, program, ["-g", "1"])
    for tool, args in BY_LID:
        suite.case(" ".join([tool, *args, "by LID"]), pingpong, tool, args, INFINIBAND)
    for tool, args, payload in perftests.PERFTESTS:
        for _ in range(options.repeat):
            suite.case(" ".join([tool, *args]), perftest, tool, args, payload)
    for tool, args, payload in perftests.BY_LID:
        suite.case(" ".join([tool, *args, "by LID"]), perftest, tool, args, payload, INFINIBAND)
    suite.case("ib_send_bw -c UC, nic a/0 dead", unprotected, "UC")
    for test in [*QPERF_LATENCIES, *QPERF_RATES]:
        for poll, how in enumerate(["events", "polling"]):
            suite.case(f"qperf {test}, {how}", qperf, test, poll)
    suite.case("ib_write_bw -i 2", port_2, "ib_write_bw", ["-s", "65536", "-n", "1000"])
    suite.case("ib_send_bw -c UD -i 2 by LID", port_2, "ib_send_bw", ["-c", "UD", "-s", "1024", "-n", "500"], INFINIBAND)
    for fault in ["nic a/0/2 down", "cable b/0/2 cut", "nic a/0 dead"]:
        suite.case(f"ib_write_bw -i 2, {fault}", port_2_survives, fault)
    suite.case("ib_write_bw -i 2 -x 1, nic a/0 dead", port_2_survives, "nic a/0 dead", "-x", 1)
    for transports, named, tests in UCX_TRANSPORTS:
        for test, args in tests:
            suite.case(f"ucx_perftest {transports} {test} {args[1]}", ucx, transports, named, test, args)
        for test, args in UCX_TAGS:
            suite.case(f"ucx_perftest {transports} {test} by LID", ucx, transports, named, test, args, INFINIBAND)
    for transport, fault in [("rc_v", "cable a/0 cut"), ("rc_v", "nic b/0 down"), ("rc_v", "nic a/0 dead"), ("ud_v", "nic a/0 dead")]:
        suite.case(f"ucx_perftest {transport}, {fault}", ucx_survives, transport, fault)
    sys.exit(suite.finish())


if __name__ == "__main__":
    main()
