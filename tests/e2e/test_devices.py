"""RDMA devices of the machine, protected: unmodified programs over the kernel's rxe, in a VM
(tests/vm/devices.sh). The guest is emulated in software, so nothing here asserts a time.
"""

import socket
import subprocess
from pathlib import Path

import pytest

from lib.cc import compile_c
from lib.host_devices import GID, IN_THE_GUEST, Fault, Pair, connect, sent, sh
from lib.paths import BUILD
from lib.ports import free_port, listens
from lib.process import Failure, wait_until
from lib.streams import UNTIL_STOPPED
from lib.verifier import verified

pytestmark = IN_THE_GUEST

# Tool, options, and the link by which the payload leaves at first and after the fault.
STREAMS = {
    "write": ("ib_write_bw", ["-s", "65536"], "A0", "A1"),
    "send": ("ib_send_bw", ["-s", "65536"], "A0", "A1"),
    "read": ("ib_read_bw", ["-s", "65536"], "B0", "B1"),
    "write-64-qps": ("ib_write_bw", ["-s", "4096", "-q", "64"], "A0", "A1"),
}
FAULTS = {
    "link-down-here": ("down", "A0"),
    "link-down-there": ("down", "B0"),
    "loss": ("loss", "A0"),
}


def ibv(*words, devices=None) -> str:
    """What a program of ibverbs-utils says, with or without us."""
    run = []
    if devices:
        run = [BUILD / "unbroken", "run", "--devices", devices, "--"]
    done = subprocess.run(
        [str(w) for w in [*run, *words]], capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0:
        raise Failure(f"{words}: {done.stdout}{done.stderr}")
    return done.stdout


@pytest.mark.parametrize("program", ["ibv_devices", "ibv_devinfo"])
def test_devices_are_shown_as_they_are(program):
    assert ibv(program, devices="all") == ibv(program)


def test_a_device_that_is_not_there_is_named(logs):
    with Pair(logs) as pair:
        pair.start("A", ["true"], "true").expect_success(20)
    with pytest.raises(Failure, match="mlx5_9"):
        ibv("ibv_devices", devices="mlx5_9")


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_survives(logs, note, stream, fault):
    """The stream goes on over the second devices, and comes home when the link is mended."""
    tool, arguments, first, second = STREAMS[stream]
    with Pair(logs) as pair, Fault(*FAULTS[fault]) as broken:
        client, server = pair.perftest(tool, *arguments, "-D", 30)
        pair.flowing(first)
        broken.make()
        pair.flowing(second)
        broken.mend()
        pair.flowing(first, 50)
        pair.succeed(150, client, server)
        switched = [e for e in pair.unbroken("events").splitlines() if "switch" in e]
        note(f"{len(switched)} switches")
        assert any("switched " in e for e in switched), switched
        assert any("planned switch" in e for e in switched), switched


@pytest.mark.parametrize("link", ["A0", "B0"])
def test_flaps(logs, link):
    """A link is away for 0.4 s, four times: the stream comes home each time, and both ends end."""
    with Pair(logs) as pair, Fault("down", link) as broken:
        client, server = pair.perftest("ib_write_bw", "-s", 65536, "-D", UNTIL_STOPPED)
        for _ in range(4):
            pair.flowing("A0", 50)
            broken.make()
            sh("sleep 0.4")
            broken.mend()
        pair.flowing("A0", 50)
        pair.succeed(60, client, server)


@pytest.mark.parametrize("fault", FAULTS)
def test_unprotected_programs_stand_still(logs, fault):
    """What the tests above are worth: without us the same fault stops the program or ends it. (With
    -D it would end well after its time: perftest counts what came until then.)"""
    with Pair(logs, protected=False) as pair, Fault(*FAULTS[fault]) as broken:
        client, server = pair.perftest("ib_write_bw", "-s", 65536, "-n", 1_000_000)
        pair.flowing("A0")
        broken.make()
        before = sent("A1")
        with pytest.raises(Failure):
            pair.succeed(15, client, server)
        assert sent("A1") - before < 100_000


@pytest.mark.parametrize("fault", FAULTS)
def test_survives_while_programs_sleep(logs, fault):
    """Both ends wait for events of completion channels."""
    with Pair(logs) as pair, Fault(*FAULTS[fault]) as broken:
        client, server = pair.perftest("ib_send_bw", "-s", 65536, "-n", 3000, "-e")
        pair.flowing("A0")
        broken.make()
        pair.flowing("A1")
        pair.succeed(120, client, server)


@pytest.mark.parametrize("fault", FAULTS)
def test_rping_survives(logs, fault):
    """Programs that connect by address: the kernel's rdma_cm makes their connection, and the QPs
    that librdmacm makes are protected. (perftest 4.5 cannot be told its own address, so the kernel
    would connect B with itself.)"""
    port = free_port()
    words = ["rping", "-V", "-S", 60_000, "-C", 3000, "-p", port, "-a", "10.0.0.2"]
    with Pair(logs) as pair, Fault(*FAULTS[fault]) as broken:
        server = pair.start("B", [*words, "-s"], "rping-server")
        listening = lambda: f":{port} " in sh("rdma resource show cm_id")
        wait_until(lambda: server.ended() or listening(), 40, "rping listens")
        client = pair.start("A", [*words, "-c", "-I", "10.0.0.1"], "rping-client")
        pair.flowing("A0")
        qps = pair.status()["qps"]
        broken.make()
        pair.flowing("A1")
        # The kernel's own messages, as the one that ends the connection, go by this link alone.
        broken.mend()
        pair.succeed(200, client, server)
    assert len(qps) == 2 and all(qp["protected"] for qp in qps), qps


def test_status_and_drain(logs):
    """The command knows the devices: both ends are protected, and a drain moves them by plan."""
    with Pair(logs) as pair:
        client, server = pair.perftest("ib_send_bw", "-s", 4096, "-D", 25)
        pair.flowing("A0")
        status = wait_until(lambda: s if len((s := pair.status())["qps"]) == 2 else None, 20, "QPs")
        assert all(qp["protected"] for qp in status["qps"]), status["qps"]
        nics = {nic["nic"]: nic for nic in status["nics"]}
        assert set(nics) == {"rxeA0", "rxeA1", "rxeB0", "rxeB1"}, nics
        assert nics["rxeA0"]["state"] == "active" and nics["rxeA0"]["tx_bytes"] > 0, nics
        pair.unbroken("nic", "drain", "rxeA0")
        pair.flowing("A1")
        assert "0 sent again" in pair.unbroken("events")
        pair.succeed(60, client, server)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_byte_is_right(logs, note, fault):
    """A program that verifies all that it gets (tests/c/verifier.c)."""
    program, port = compile_c("verifier", "-libverbs"), free_port()
    with Pair(logs) as pair, Fault(*FAULTS[fault]) as broken:
        ends = {}
        for host in "BA":
            meet = ["--listen", port] if host == "B" else ["--connect", f"127.0.0.1:{port}"]
            files = ["--status-file", logs / f"{host}.status", "--stop-file", logs / "stop"]
            nic = ["--device", f"rxe{host}0", "--gid-index", GID, "--qps", 2, "--writes-repeat"]
            nic += ["--seconds", 600]  # until the stop file is there
            ends[host] = pair.start(host, [program, *meet, *nic, *files], f"{host}-verifier")
            if host == "B":
                wait_until(
                    lambda: ends["B"].ended() or listens(ends["B"].pid, port), 40, "it listens"
                )

        def more(count: int = 100):
            goals = {host: verified(logs, host) + count for host in "AB"}
            enough = lambda: (
                any(end.ended() for end in ends.values())
                or all(verified(logs, host) >= goal for host, goal in goals.items())
            )
            wait_until(enough, 60, f"{count} messages verified at both ends", 0.2)

        more()
        broken.make()
        pair.flowing("A1", amount=100_000)
        more()
        broken.mend()
        pair.flowing("A0", amount=100_000)
        more()
        (logs / "stop").touch()
        pair.succeed(60, *ends.values())
        note(f"{verified(logs, 'A') + verified(logs, 'B')} messages verified")


@pytest.mark.parametrize("program", ["ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_ud_pingpong"])
def test_pingpongs_of_each_transport(logs, program):
    """What is not protected goes to the provider as it is."""
    with Pair(logs) as pair:
        words = [program, "-g", 1, "-n", 200, "-s", 1024, "-p", 18600]
        server = pair.start("B", [*words, "-d", "rxeB0"], f"{program}-server")
        wait_until(lambda: server.ended() or ":18600 " in sh("ss -Hltn"), 40, "it listens")
        client = pair.start("A", [*words, "-d", "rxeA0", "127.0.0.1"], f"{program}-client")
        pair.succeed(60, client, server)


def test_events_wake_a_sleeping_program(logs):
    with Pair(logs) as pair:
        words = ["ibv_rc_pingpong", "-e", "-g", 1, "-n", 300, "-p", 18601]
        server = pair.start("B", [*words, "-d", "rxeB0"], "server")
        wait_until(lambda: server.ended() or ":18601 " in sh("ss -Hltn"), 40, "it listens")
        client = pair.start("A", [*words, "-d", "rxeA0", "127.0.0.1"], "client")
        pair.succeed(60, client, server)


def test_without_failover_programs_have_libibverbs_itself(logs):
    done = sh(
        "UNBROKEN_FAILOVER=0 target/release/unbroken run --devices all -- ibv_devinfo -v -d rxeA0"
    )
    assert done == ibv("ibv_devinfo", "-v", "-d", "rxeA0")


def link_fault(pair, verb: str, *words) -> str:
    """`unbroken fault` about the link of rxeA0; a failure has what it said."""
    command = [BUILD / "unbroken", "--runtime", pair.runtime, "fault", verb, *words]
    done = subprocess.run([str(w) for w in command], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise Failure(done.stderr)
    return done.stdout


def gid_index(device: str, address: str) -> int:
    """Where the GID of an IPv4 address stands in a device's table, as RoCE v2."""
    port = Path(f"/sys/class/infiniband/{device}/ports/1")
    words = [f"{int(part):02x}" for part in address.split(".")]
    gid = f"0000:0000:0000:0000:0000:ffff:{''.join(words[:2])}:{''.join(words[2:])}"
    for index in range(32):
        kind = port / "gid_attrs" / "types" / str(index)
        try:
            if (port / "gids" / str(index)).read_text().strip() == gid and "v2" in kind.read_text():
                return index
        except OSError:
            continue
    return -1


def test_a_gid_that_comes_back_at_another_place(logs, note):
    """An interface loses its address, and gets another one before it, as networks' managers do when
    a link comes back: the GID has another index, and the stream comes home to it."""
    mine, other = "10.0.0.1", "10.0.77.1"

    def has_address():
        sh(f"ip addr add {mine}/24 dev A0")
        sh(f"ip route replace 10.0.0.2 dev A0 src {mine} table 1010")

    first = gid_index("rxeA0", mine)
    with Pair(logs) as pair:
        try:
            client, server = pair.perftest("ib_write_bw", "-s", 65536, "-D", 70)
            pair.flowing("A0")
            sh(f"ip addr del {mine}/24 dev A0")
            pair.flowing("A1")
            sh(f"ip addr add {other}/24 dev A0")
            has_address()
            then = wait_until(
                lambda: i if (i := gid_index("rxeA0", mine)) >= 0 else None, 20, "the GID"
            )
            note(f"index {first}, then {then}")
            assert then != first
            pair.flowing("A0", 60)
            pair.succeed(150, client, server)
        finally:
            # As it was, for the tests to come.
            for address in (other, mine):
                sh(f"ip addr del {address}/24 dev A0 2>/dev/null || true")
            has_address()


@pytest.mark.parametrize("ends", ["clear", "reset"])
def test_a_link_that_unbroken_takes_down(logs, ends):
    """Its interface goes down, the stream goes on elsewhere, and clearing brings it back."""
    state = lambda: sh("cat /sys/class/net/A0/flags").strip()
    up = state()
    with Pair(logs) as pair:
        client, server = pair.perftest("ib_write_bw", "-s", 65536, "-D", 15)
        pair.flowing("A0")
        assert "A0 is down" in link_fault(pair, "set", "link rxeA0 down")
        try:
            assert int(state(), 16) & 1 == 0, state()
            pair.flowing("A1")
            assert "link rxeA0 down" in link_fault(pair, "list")
            for wrong in (["link rxeB0 down", "--for", "1s"], ["link nosuch down"]):
                with pytest.raises(Failure):
                    link_fault(pair, "set", *wrong)
            pair.succeed(90, client, server)
            if ends == "clear":
                link_fault(pair, "clear", "link rxeA0")
                assert link_fault(pair, "list") == ""
            else:
                pair.unbroken("reset", "--force")
            assert state() == up
        finally:
            sh("ip link set A0 up")
            for link in ("A0", "B0"):
                connect(link)


def test_a_device_that_is_deleted_is_let_go(logs):
    """`rdma link delete` waits for all that have the device open. The program goes on over its
    other one, keeps nobody waiting, and comes home when there is such a device again."""
    with Pair(logs) as pair:
        client, server = pair.perftest("ib_write_bw", "-s", 65536, "-D", 60)
        pair.flowing("A0")
        try:
            sh("rdma link delete rxeA0")  # within 30 s
            pair.flowing("A1")
        finally:
            sh("rdma link add rxeA0 type rxe netdev A0")
        pair.flowing("A0", 60)
        pair.succeed(150, client, server)


def test_datagrams_keep_their_traffic_class(logs):
    """What the program's address handle says (`--tclass`) is in what its NIC sends."""
    table = "netdev counted"
    sh(f"nft add table {table}")
    try:
        at = 'type filter hook egress device "A0" priority 0;'
        sh(f"nft 'add chain {table} out {{ {at} }}'")
        sh(f"nft add rule {table} out ip dscp 26 udp dport 4791 counter")
        with Pair(logs) as pair:
            more = ["-c", "UD", "-s", 1024, "-n", 1000, "--tclass", 26 << 2]
            pair.succeed(90, *pair.perftest("ib_send_bw", *more))
        counted = sh(f"nft list chain {table} out")
        assert int(counted.split("packets ")[1].split()[0]) >= 1000, counted
    finally:
        sh(f"nft delete table {table}")


@pytest.mark.parametrize("ends", ["clear", "reset"])
def test_a_cable_that_is_cut_by_a_fault(logs, ends):
    """Whoever has the interface loses all that it sends and receives, and the link stays up."""
    tables = lambda: sh("nft list tables netdev")
    with Pair(logs) as pair:
        client, server = pair.perftest("ib_write_bw", "-s", 65536, "-D", 15)
        pair.flowing("A0")
        said = link_fault(pair, "set", "cable rxeA0 cut")
        assert "A0 loses all" in said and "until `unbroken fault clear`" in said
        try:
            assert "LOWER_UP" in sh("ip link show A0") and "rxeA0" in tables()
            # Who sends is told nothing: dropped on its way out it would be ENOBUFS here.
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
                raw.bind(("A0", 0))
                assert [raw.send(bytes(60)) for _ in range(5)] == [60] * 5
            pair.flowing("A1")
            assert "cable rxeA0 cut" in link_fault(pair, "list")
            link_fault(pair, "set", "cable rxeA0 cut")
            other = f"{BUILD}/unbroken --runtime /tmp/other"
            with pytest.raises(Failure, match="by a fault of another runtime folder"):
                sh(f"{other} fault set 'cable rxeA0 cut'")
            before = sent("B0")
            pair.succeed(90, client, server)
            assert sent("B0") - before < 100_000
            if ends == "clear":
                link_fault(pair, "clear", "cable rxeA0")
                assert link_fault(pair, "list") == ""
            else:
                pair.unbroken("reset", "--force")
            assert "rxeA0" not in tables()
        finally:
            sh("nft add table netdev unbroken_cable_rxeA0")
            sh("nft delete table netdev unbroken_cable_rxeA0")


def test_a_link_is_of_root_alone(logs):
    with Pair(logs) as pair:
        line = f"setpriv --reuid nobody --clear-groups {BUILD}/unbroken --runtime /tmp/nobody"
        for fault in ("link rxeB1 down", "cable rxeB1 cut"):
            with pytest.raises(Failure, match="take[s]? root"):
                sh(f"{line} fault set '{fault}'")
        assert sh(f"{line} fault list") == ""
        sh("ip link set B1 down")
        try:
            with pytest.raises(Failure, match="down already"):
                link_fault(pair, "set", "link rxeB1 down")
            link_fault(pair, "clear")
            assert int(sh("cat /sys/class/net/B1/flags"), 16) & 1 == 0
        finally:
            sh("ip link set B1 up")
            for link in ("A1", "B1"):
                connect(link)
