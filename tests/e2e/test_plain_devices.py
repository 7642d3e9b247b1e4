"""Unmodified programs on plain devices: NICs that have plain verbs only, with an RNIC's habits.
Without failover they work as on others; with it RC queue pairs are protected (more of that: the
tests with the fixture `device`), and status says why others are not."""

import json

import pytest

from lib import perftests
from lib.cc import compile_c
from lib.fabric import UNBROKEN, Fabric
from lib.paths import BUILD
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

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


def named(cases, smoke=()):
    """Programs with their arguments as parameters, named by their command lines. Some are smoke
    tests."""
    for tool, args, *more in cases:
        name = " ".join([tool, *args])
        marks = pytest.mark.smoke if name in smoke else ()
        yield pytest.param(tool, args, *more, id=name, marks=marks)


def ends(fabric, program, args, gids=(GID_INDEX, GID_INDEX)):
    """A server on host b and a client on host a, once the server listens, with their GID
    indices."""
    port = free_port()
    line = [program, "-d", "unb0", "-p", port, *args]
    server = fabric.run("b", [*line, "-g", gids[0]], f"b-{program}", failover=False)
    listening = lambda: server.ended() or listens(server.pid, port)
    wait_until(listening, 20, f"{program} server listens at port {port}")
    client_line = [*line, "-g", gids[1], "127.0.0.1"]
    return server, fabric.run("a", client_line, f"a-{program}", failover=False)


@pytest.mark.smoke
def test_what_is_shown(logs):
    """What programs and `unbroken status` show of a plain device."""
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


@pytest.mark.parametrize(
    "tool, args, payload", named(PERFTESTS, ["ib_write_bw -n 5000", "ib_send_bw -c UD -n 20000"])
)
def test_perftest(logs, tool, args, payload):
    perftests.run(logs, tool, args, payload, PLAIN, failover=False)


@pytest.mark.parametrize("tool, args", named(PINGPONGS, ["ibv_srq_pingpong -e"]))
def test_pingpong(logs, tool, args):
    with Fabric(logs, *PLAIN) as fabric:
        server, client = ends(fabric, tool, args)
        for process in (client, server):
            process.expect_success(SECONDS)
        if fabric.nics()["a/0"]["tx_payload_bytes"] == 0:
            raise Failure("the NIC carried nothing")


@pytest.mark.parametrize("transport", ["rc_v", "ud_v"])
def test_ucx(logs, transport):
    """UCX, which chooses a GID by its type."""
    with Fabric(logs, *PLAIN) as fabric:
        env, port = {"UCX_NET_DEVICES": "unb0:1", "UCX_TLS": transport}, free_port()
        server = fabric.run("b", ["ucx_perftest", "-p", port], failover=False, env=env)
        listening = lambda: server.ended() or listens(server.pid, port)
        wait_until(listening, 20, "ucx_perftest listens")
        line = [
            "ucx_perftest",
            "127.0.0.1",
            "-p",
            port,
            "-t",
            "tag_bw",
            "-s",
            "65536",
            "-n",
            "3000",
        ]
        client = fabric.run("a", line, failover=False, env=env)
        for process in (client, server):
            process.expect_success(SECONDS)
        carried = fabric.nics()["b/0"]["rx_payload_bytes"]
        if carried < 3000 * 65536:
            raise Failure(f"the NIC carried {carried} bytes")


# Where only one end takes the GID with index 1, there is no path from IPv6 to IPv4.
@pytest.mark.parametrize(
    "gids, message",
    [
        ((GID_INDEX, "1"), "Failed to modify QP to RTR"),
        (("0", "0"), "transport retry counter exceeded"),
        (("1", "1"), "transport retry counter exceeded"),
        (("2", "2"), "transport retry counter exceeded"),
    ],
    ids=["one end 1", "0", "1", "2"],
)
def test_wrong_gid_index(logs, gids, message):
    """Programs of which one takes another GID than that which leads to peers."""
    with Fabric(logs, *PLAIN) as fabric:
        server, client = ends(fabric, "ibv_rc_pingpong", [], gids)
        client.expect_error(SECONDS)
        if message not in client.output() + server.output():
            raise Failure(f"nobody says '{message}': {client.output()}")
        carried = sum(nic["tx_packets"] for nic in fabric.nics().values())
        if carried != 0:
            raise Failure(f"{carried} packets got through")


@pytest.mark.parametrize("options", [[], ["--srq"]], ids=["own receives", "srq"])
def test_verifier(logs, note, options):
    """Every message once, in order and intact."""
    program, port = compile_c("verifier", "-libverbs"), free_port()
    options = ["--gid-index", GID_INDEX, "--qps", 4, "--messages", 20000, *options]
    with Fabric(logs, *PLAIN) as fabric:
        line = [program, "--listen", port, *options]
        server = fabric.run("b", line, "b-verifier", failover=False)
        listening = lambda: server.ended() or listens(server.pid, port)
        wait_until(listening, 20, "the verifier listens")
        line = [program, "--connect", f"127.0.0.1:{port}", *options]
        client = fabric.run("a", line, "a-verifier", failover=False)
        for process in (client, server):
            process.expect_success(SECONDS)
        results = [json.loads(p.output().splitlines()[-1]) for p in (client, server)]
        verified = [result["verified_messages"] for result in results]
        if min(verified) < 20000:
            raise Failure(f"{verified} messages were verified")
        note(f"{sum(verified)} messages")


@pytest.mark.parametrize(
    "tool, args, seed",
    [*(("ib_write_bw", ["-q", "1"], seed) for seed in range(8)), ("ib_send_bw", ["-q", "8"], 0)],
    ids=[*(f"ib_write_bw seed {seed}" for seed in range(8)), "ib_send_bw 8 QPs"],
)
def test_nic_dies_without_failover(logs, tool, args, seed):
    """A NIC dies under a program: it ends with an error, whichever way its QPs die, and its peer
    does, too."""
    with Fabric(logs, *PLAIN) as fabric:
        fabric.env["UNBROKEN_DEVICE_SEED"] = str(seed)
        options = ["-F", "-D", "30", "-s", "65536", *args]
        server, client = fabric.pair(tool, options, failover=False)
        came = lambda: fabric.nics()["b/0"]["rx_payload_bytes"]
        wait_until(lambda: client.ended() or came() > 1e6, 20, "traffic")
        fabric.fault("nic a/0 dead")
        client.expect_error(SECONDS)
        server.kill()


def test_failover(logs):
    """With failover on a program's RC QPs are protected, by a journal; its UD QPs are not, and
    status says why."""
    with Fabric(logs, *PLAIN) as fabric:
        server, client = fabric.pair("ib_send_bw", ["-F", "-D", "3", "-x", GID_INDEX])
        wait_until(lambda: client.ended() or len(fabric.status()["qps"]) == 2, 20, "both QPs")
        protected = lambda: all(qp["protected"] for qp in fabric.status()["qps"])
        wait_until(lambda: client.ended() or protected(), 20, "both are protected")
        for process in (client, server):
            process.expect_success(SECONDS)
        server, client = fabric.pair("ib_send_bw", ["-F", "-c", "UD", "-D", "3", "-x", GID_INDEX])
        wait_until(lambda: client.ended() or len(fabric.status()["qps"]) == 2, 20, "both QPs")
        why = {(qp["protected"], qp["why"]) for qp in fabric.status()["qps"]}
        if why != {(False, NO_DATAGRAMS)}:
            raise Failure(f"status says {why} of UD QPs")
        for process in (client, server):
            process.expect_success(SECONDS)


def test_nics_given_by_addresses(logs):
    """NICs that are given by addresses have no fabric that says what they are: the command does."""
    with Fabric(logs) as fabric:
        port = free_port()

        def run(nic, args, name):
            options = ["--nics", nic, "--device", "plain", "--no-failover"]
            command = fabric.command_line([UNBROKEN, "run", *options, "--"])
            return fabric.start(name, [*command, *args])

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


def test_wrong_settings(logs):
    """A wrong setting is named, with what would be right."""
    right = "'full' and 'plain' are right"
    with Fabric(logs) as fabric:
        run = ["run", "--nics", "127.78.0.1", "--device", "bare", "--", "true"]
        for args in (["fabric", "up", "--device", "bare"], run):
            done = fabric.command(*args)
            if done.returncode == 0 or right not in done.stderr or "bare" not in done.stderr:
                raise Failure(f"{args}: {done.returncode} {done.stderr}")
        done = fabric.command("run", "--device", "plain", "--", "true")
        if done.returncode == 0 or "--nics" not in done.stderr:
            raise Failure(f"--device without --nics: {done.returncode} {done.stderr}")
        env = {
            "UNBROKEN_NICS": "127.78.0.1",
            "UNBROKEN_DEVICE": "bare",
            "UNBROKEN_LOG": "1",
            "LD_PRELOAD": str(BUILD / "libunbroken.so"),
        }
        program = fabric.start("devinfo", ["ibv_devinfo"], env)
        program.expect_error(SECONDS)
        if f"UNBROKEN_DEVICE: device is 'bare'; {right}" not in program.output():
            raise Failure(f"UNBROKEN_DEVICE=bare: {program.output()}")
