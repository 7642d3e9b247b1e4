#!/usr/bin/env python3
"""Unmodified programs on plain devices: NICs that have plain verbs only, with an RNIC's habits. Without failover they work as on others;
with it RC queue pairs are protected (more of that: `--device plain` of other suites), and of others it is said why they are not."""

import json
import sys

from lib import perftests
from lib.cc import compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.suite import BUILD, Suite

SECONDS = 40
PLAIN = ["--device", "plain"]
# The only GID of a plain RoCE port that leads to peers.
GID_INDEX = "3"
PERFTESTS = [
    ("ib_write_bw", ["-n", "5000"], 5000 * 65536),
    ("ib_send_bw", ["-n", "5000", "-q", "4", "-b"], 4 * 5000 * 65536),
    ("ib_send_bw", ["-n", "2000", "-e"], 2000 * 65536),
    ("ib_read_bw", ["-n", "2000"], 2000 * 65536),
    ("ib_atomic_bw", ["-A", "FETCH_AND_ADD", "-n", "5000"], 0),
    ("ib_atomic_lat", ["-A", "CMP_AND_SWAP", "-n", "1000"], 0),
    ("ib_write_lat", ["-n", "1000"], 1000 * 2),
    ("ib_send_lat", ["-n", "1000"], 1000 * 2),
    ("ib_send_bw", ["--use-srq", "-q", "4", "-b"], 4 * 1000 * 65536),
    ("ib_send_bw", ["--use-srq", "-e"], 1000 * 65536),
    ("ib_send_bw", ["-c", "UD", "-n", "20000"], 20000 * 4096),
    ("ib_send_bw", ["--use-srq", "-q", "4", "-c", "UD"], 4 * 1000 * 4096),
    ("ib_write_bw", ["-c", "UC", "-n", "5000"], 5000 * 65536),
]
PINGPONGS = [
    ("ibv_rc_pingpong", ["-e"]),
    ("ibv_rc_pingpong", ["-t", "-N"]),
    ("ibv_srq_pingpong", ["-e"]),
    ("ibv_ud_pingpong", ["-e"]),
    ("ibv_uc_pingpong", ["-e"]),
]
NO_DATAGRAMS = "UD QPs of devices with plain verbs are not protected"


def ends(fabric, program, args, gids=(GID_INDEX, GID_INDEX)):
    """A server on host b and a client on host a, once the server listens, with their GID indices."""
    port = free_port()
    line = [program, "-d", "unb0", "-p", port, *args]
    server = fabric.run("b", [*line, "-g", gids[0]], f"b-{program}", failover=False)
    wait_until(lambda: server.ended() or listens(server.pid, port), 20, f"{program} server listens at port {port}")
    return server, fabric.run("a", [*line, "-g", gids[1], "127.0.0.1"], f"a-{program}", failover=False)


def devices(logs):
    """What programs and `unbroken status` are told of a plain device."""
    with Fabric(logs, *PLAIN) as fabric:
        program = fabric.run("a", ["ibv_devinfo", "-v", "-d", "unb1"], failover=False)
        program.expect_success(SECONDS)
        gids = [line.split()[-2:] for line in program.output().splitlines() if "GID[" in line]
        if gids != [["RoCE", "v1"], ["RoCE", "v2"]] * 2:
            raise Failure(f"GIDs: {gids}")
        files = [f"/sys/class/infiniband/unb1/ports/1/gid_attrs/types/{i}" for i in range(4)]
        program = fabric.run("a", ["cat", *files], "a-cat", failover=False)
        program.expect_success(SECONDS)
        if program.output().split("\n")[:4] != ["IB/RoCE v1", "RoCE v2"] * 2:
            raise Failure(f"sysfs: {program.output()}")
        kinds = {nic["device"] for nic in fabric.status()["nics"]}
        if kinds != {"plain"} or "plain" not in fabric.command("fabric", "show").stdout:
            raise Failure(f"status says {kinds}")
    with Fabric(logs) as fabric:
        fabric.run("a", ["ibv_devinfo"]).expect_success(SECONDS)
        if {nic["device"] for nic in fabric.status()["nics"]} != {"full"}:
            raise Failure("without the setting a NIC is not full")


def perftest(logs, tool, args, payload):
    perftests.run(logs, tool, args, payload, PLAIN, failover=False)


def pingpong(logs, tool, args):
    with Fabric(logs, *PLAIN) as fabric:
        server, client = ends(fabric, tool, args)
        for process in (client, server):
            process.expect_success(SECONDS)
        if fabric.nics()["a/0"]["tx_payload_bytes"] == 0:
            raise Failure("the NIC carried nothing")


def ucx(logs, transport):
    """UCX, which chooses a GID by its type."""
    with Fabric(logs, *PLAIN) as fabric:
        env, port = {"UCX_NET_DEVICES": "unb0:1", "UCX_TLS": transport}, free_port()
        server = fabric.run("b", ["ucx_perftest", "-p", port], failover=False, env=env)
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "ucx_perftest listens")
        line = ["ucx_perftest", "127.0.0.1", "-p", port, "-t", "tag_bw", "-s", "65536", "-n", "3000"]
        client = fabric.run("a", line, failover=False, env=env)
        for process in (client, server):
            process.expect_success(SECONDS)
        carried = fabric.nics()["b/0"]["rx_payload_bytes"]
        if carried < 3000 * 65536:
            raise Failure(f"the NIC carried {carried} bytes")


def wrong_gid(logs, gids, said):
    """Programs of which one takes another GID than that which leads to peers."""
    with Fabric(logs, *PLAIN) as fabric:
        server, client = ends(fabric, "ibv_rc_pingpong", [], gids)
        client.expect_error(SECONDS)
        if said not in client.output() + server.output():
            raise Failure(f"nobody says '{said}': {client.output()}")
        carried = sum(nic["tx_packets"] for nic in fabric.nics().values())
        if carried != 0:
            raise Failure(f"{carried} packets got through")


def verifier(logs, *options):
    """Every message once, in order and intact."""
    program, port = compile_c("verifier", "-libverbs"), free_port()
    options = ["--gid-index", GID_INDEX, "--qps", 4, "--messages", 20000, *options]
    with Fabric(logs, *PLAIN) as fabric:
        server = fabric.run("b", [program, "--listen", port, *options], "b-verifier", failover=False)
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the verifier listens")
        client = fabric.run("a", [program, "--connect", f"127.0.0.1:{port}", *options], "a-verifier", failover=False)
        for process in (client, server):
            process.expect_success(SECONDS)
        verified = [json.loads(p.output().splitlines()[-1])["verified_messages"] for p in (client, server)]
        if min(verified) < 20000:
            raise Failure(f"{verified} messages were verified")
        return f"{sum(verified)} messages"


def dies(logs, tool, args, seed):
    """A NIC dies under a program: it ends with an error, whichever way its QPs die, and its peer does, too."""
    with Fabric(logs, *PLAIN) as fabric:
        fabric.env["UNBROKEN_DEVICE_SEED"] = str(seed)
        server, client = fabric.pair(tool, ["-F", "-D", "30", "-s", "65536", *args], failover=False)
        wait_until(lambda: client.ended() or fabric.nics()["b/0"]["rx_payload_bytes"] > 1e6, 20, "traffic")
        fabric.fault("nic a/0 dead")
        client.expect_error(SECONDS)
        server.kill()


def protected(logs):
    """With failover on a program's RC QPs are protected, by a journal; its UD QPs are not, and status says why."""
    with Fabric(logs, *PLAIN) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-F", "-D", "3", "-x", GID_INDEX])
        wait_until(lambda: client.ended() or len(fabric.status()["qps"]) == 2, 20, "both QPs")
        wait_until(lambda: client.ended() or all(qp["protected"] for qp in fabric.status()["qps"]), 20, "both are protected")
        for process in (client, server):
            process.expect_success(SECONDS)
        server, client = fabric.pair("ib_send_bw", ["-F", "-c", "UD", "-D", "3", "-x", GID_INDEX])
        wait_until(lambda: client.ended() or len(fabric.status()["qps"]) == 2, 20, "both QPs")
        why = {(qp["protected"], qp["why"]) for qp in fabric.status()["qps"]}
        if why != {(False, NO_DATAGRAMS)}:
            raise Failure(f"status says {why} of UD QPs")
        for process in (client, server):
            process.expect_success(SECONDS)


def addresses(logs):
    """NICs that are given by addresses have no fabric that says what they are: the command does."""
    with Fabric(logs) as fabric:
        port = free_port()

        def run(nic, args, name):
            line = [*fabric.command_line([UNBROKEN, "run", "--nics", nic, "--device", "plain", "--no-failover", "--"]), *args]
            return fabric.start(name, line)

        shown = run("127.78.0.1", ["ibv_devinfo", "-v"], "devinfo")
        shown.expect_success(SECONDS)
        if shown.output().count("RoCE v1") != 2:
            raise Failure(f"GIDs: {shown.output()}")
        line = ["ibv_rc_pingpong", "-d", "unb0", "-g", GID_INDEX, "-p", port, "-e"]
        server = run("127.78.0.1", line, "server")
        wait_until(lambda: server.ended() or listens(server.pid, port), 20, "the server listens")
        client = run("127.78.0.2", [*line, "127.0.0.1"], "client")
        for process in (client, server):
            process.expect_success(SECONDS)


def wrong_settings(logs):
    """A wrong setting is named, with what would be right."""
    right = "'full' and 'plain' are right"
    with Fabric(logs) as fabric:
        for args in (["fabric", "up", "--device", "bare"], ["run", "--nics", "127.78.0.1", "--device", "bare", "--", "true"]):
            done = fabric.command(*args)
            if done.returncode == 0 or right not in done.stderr or "bare" not in done.stderr:
                raise Failure(f"{args}: {done.returncode} {done.stderr}")
        done = fabric.command("run", "--device", "plain", "--", "true")
        if done.returncode == 0 or "--nics" not in done.stderr:
            raise Failure(f"--device without --nics: {done.returncode} {done.stderr}")
        env = {"UNBROKEN_NICS": "127.78.0.1", "UNBROKEN_DEVICE": "bare", "UNBROKEN_LOG": "1", "LD_PRELOAD": str(BUILD / "libunbroken.so")}
        program = fabric.start("devinfo", ["ibv_devinfo"], env)
        program.expect_error(SECONDS)
        if f"UNBROKEN_DEVICE: device is 'bare'; {right}" not in program.output():
            raise Failure(f"UNBROKEN_DEVICE=bare: {program.output()}")


def main():
    suite = Suite("plain")
    suite.case("devices", devices)
    for tool, args, payload in PERFTESTS:
        suite.case(" ".join([tool, *args]), perftest, tool, args, payload)
    for tool, args in PINGPONGS:
        suite.case(" ".join([tool, *args]), pingpong, tool, args)
    for transport in ("rc_v", "ud_v"):
        suite.case(f"ucx_perftest {transport}", ucx, transport)
    suite.case("GID index 1 at one end: no way from IPv6 to IPv4", wrong_gid, (GID_INDEX, "1"), "Failed to modify QP to RTR")
    for index in "012":
        suite.case(f"GID index {index}: nothing gets through", wrong_gid, (index, index), "transport retry counter exceeded")
    suite.case("verifier", verifier)
    suite.case("verifier --srq", verifier, "--srq")
    for seed in range(8):
        suite.case(f"ib_write_bw, its NIC dies, seed {seed}", dies, "ib_write_bw", ["-q", "1"], seed)
    suite.case("ib_send_bw -q 8, its NIC dies", dies, "ib_send_bw", ["-q", "8"], 0)
    suite.case("failover on", protected)
    suite.case("NICs given by addresses", addresses)
    suite.case("wrong settings", wrong_settings)
    sys.exit(suite.finish())


if __name__ == "__main__":
    main()
