"""A stand-in for NCCL (tests/c/nccl.c), which makes the verbs calls of NCCL's net_ib and checks
every byte: two ranks on hosts a and b, both ways. A fault comes in mid-stream. Both ranks end with
0, no event of NCCL's is fatal, and the bytes after the fault are on other NICs. Without failover
the same fault ends them. docs/guide/nccl.md says what the stand-in does, and what it does not."""

import json

import pytest

from lib import options
from lib.cc import compile_c
from lib.device import FLUSHES, PLAIN_GID_INDEX
from lib.fabric import Fabric
from lib.pairs import covering
from lib.ports import free_port, listens
from lib.process import Failure, wait_until

SECONDS = 30
# Groups that each rank receives before the fault, and again after the queue pairs have moved. A
# receiver asks for a completion of one clear-to-send in 256, so more than that.
PROGRESS = 300
# How long random faults strike, of which one that takes a path away comes each second.
RANDOM_SECONDS = 12
# Payload that each NIC of the new path must have carried for that.
MOVED_BYTES = 1 << 20
# How NCCL is told to use queue pairs: its defaults; data split over all queue pairs of a
# connection; what it does on networks that reorder packets.
SHAPES = {
    "defaults": [],
    "split over 4 QPs": ["--qps", 4, "--split"],
    "2 QPs in turns, adaptive routing": ["--qps", 2, "--adaptive-routing", 1, "--no-flush"],
}
FAULTS = ["nic a/0 dead", "nic b/0 dead", "nic b/0 down", "cable a/0 cut", "switch rail0 down"]
INFINIBAND = ("--link-layer", "infiniband")


class Ranks:
    """Two ranks: rank 0 on host b, rank 1 on host a. `between` is called when rank 0 has opened its
    devices and waits for the other."""

    def __init__(self, fabric, logs, *asked, failover=True, between=lambda: None):
        self.fabric, self.logs = fabric, logs
        program, port = compile_c("nccl", "-ldl", "-lpthread"), free_port()
        qps = asked[asked.index("--qps") + 1] if "--qps" in asked else 1
        devices = asked[asked.index("--device") + 1].count("+") + 1 if "--device" in asked else 1
        # Of each rank, on each device: those that send, those that receive, the one that flushes.
        self.qps = 2 * devices * (2 * qps + ("--no-flush" not in asked))
        line = ["--seconds", SECONDS * 2, "--stop-file", logs / "stop", *asked]

        def start(host, *meet):
            status = ["--status-file", logs / f"{host}.status"]
            return fabric.run(host, [program, *meet, *line, *status], host, failover)

        server = start("b", "--listen", port)
        ready = lambda: server.ended() or listens(server.pid, port)
        wait_until(ready, SECONDS, "rank 0 listens")
        between()
        self.ranks = {"b": server, "a": start("a", "--connect", f"127.0.0.1:{port}")}

    def check_alive(self):
        """Fails if a rank has ended."""
        for rank in self.ranks.values():
            if rank.ended():
                raise Failure(f"rank {rank.name} ended: {rank.output()[-300:]}")

    def received(self) -> dict:
        """The groups that each rank has received."""
        files = {host: self.logs / f"{host}.status" for host in self.ranks}
        return {
            host: json.loads(file.read_text())["received"] if file.exists() else 0
            for host, file in files.items()
        }

    def progress(self, when):
        """Waits until both ranks have received some more."""
        before = self.received()

        def more():
            self.check_alive()
            return all(n >= before[host] + PROGRESS for host, n in self.received().items())

        wait_until(more, SECONDS, f"groups {when}")

    def settled(self, without=(), port=None):
        """Waits until all queue pairs are protected and use none of some NICs, nor a port."""

        def done():
            self.check_alive()
            qps = self.fabric.status()["qps"]
            return len(qps) == self.qps and all(
                qp["protected"]
                and qp["state"] == "rts"
                and not set(without) & set(qp["path"].split("-"))
                and not (port and qp["primary"].split("-")[0] == port)
                for qp in qps
            )

        wait_until(done, SECONDS, f"{self.qps} protected queue pairs without {list(without)}")

    def finish(self) -> dict:
        """Ends both and gives what they report; what one has sent the other has verified."""
        (self.logs / "stop").touch()
        for rank in self.ranks.values():
            rank.expect_success(SECONDS)
        lines = {host: rank.output().splitlines()[-1] for host, rank in self.ranks.items()}
        reports = {host: json.loads(line) for host, line in lines.items()}
        for here, there in ("ab", "ba"):
            for sent, verified in [
                ("groups_sent", "groups_received"),
                ("messages_sent", "messages_verified"),
                ("bytes_sent", "bytes_verified"),
            ]:
                if not 0 < reports[here][sent] == reports[there][verified]:
                    raise Failure(f"{sent} of {here} are not {verified} of {there}: {reports}")
        return reports

    def expect_no_event(self, reports):
        """Fails if a thread of events heard anything: to NCCL the fault was none."""
        heard = {host: r["events"] for host, r in reports.items() if r["events"]}
        if heard or any(r["fatal_events"] for r in reports.values()):
            raise Failure(f"NCCL's threads of events heard {heard}")


def carried(fabric) -> dict:
    """The payload of each NIC, sent and received."""
    return {
        name: (nic["tx_payload_bytes"], nic["rx_payload_bytes"])
        for name, nic in fabric.nics().items()
    }


def ended_by(fault) -> list:
    """The NICs that a fault leaves without a path."""
    place = fault.split()[1]
    return ["a/0", "b/0"] if place.startswith("rail") else [place]


def through(logs, note, fault, asked, settings=(), env=None):
    """A run through a fault that is absorbed."""
    with Fabric(logs, *settings) as fabric:
        fabric.env.update(env or {})
        ranks = Ranks(fabric, logs, *asked)
        ranks.settled()
        ranks.progress("before the fault")
        early = [name for name, bytes_ in carried(fabric).items() if name[2] != "0" and any(bytes_)]
        if early:
            raise Failure(f"{early} carried payload before the fault")
        fabric.fault(fault)
        ranks.settled(without=ended_by(fault))
        before = carried(fabric)
        ranks.progress("after the fault")
        after = carried(fabric)
        for host in "ab":
            moved = [
                sum(after[nic][way] - before[nic][way] for nic in after if nic[0] == host)
                for way in (0, 1)
            ]
            stayed = [after[f"{host}/0"][way] - before[f"{host}/0"][way] for way in (0, 1)]
            # A flush of the other host has no reason to leave its NIC: it READs a byte.
            most = 0 if f"{host}/0" in ended_by(fault) else min(moved) / 100
            if min(moved) < MOVED_BYTES or max(stayed) > most:
                raise Failure(f"host {host}: {moved} bytes after the fault, on NIC 0 {stayed}")
        reports = ranks.finish()
        ranks.expect_no_event(reports)
        stall_ms = max(r["longest_stall_us"] for r in reports.values()) / 1000
        note(
            f"{sum(r['messages_verified'] for r in reports.values())} messages, "
            f"{len(fabric.events('switch'))} switches, longest stall {stall_ms:.0f} ms"
        )


@pytest.mark.parametrize(
    "shape",
    [pytest.param("defaults", marks=pytest.mark.smoke), *list(SHAPES)[1:], "inline"],
)
def test_unharmed(logs, note, shape, device):
    """What NCCL asks for is there, and every byte comes."""
    with Fabric(logs) as fabric:
        ranks = Ranks(fabric, logs, *SHAPES.get(shape, ["--inline"]))
        ranks.settled()
        ranks.progress("over NIC 0")
        reports = ranks.finish()
        ranks.expect_no_event(reports)
        wanted = {
            "gid_index": PLAIN_GID_INDEX if device == "plain" else 0,
            "verbs_missing": 0,
            "dmabuf": "EOPNOTSUPP",
            "devices": 4,
        }
        for host, said in reports.items():
            wrong = {key: said[key] for key in wanted if said[key] != wanted[key]}
            if wrong or not said["multi_groups"] and shape != "inline":
                raise Failure(f"rank on host {host}: {wrong}, {said}")
        note(f"{sum(r['messages_verified'] for r in reports.values())} messages")


CASES = covering([FAULTS, list(SHAPES), ["full", "plain"]])


@pytest.mark.parametrize(
    "fault, shape, kind",
    [pytest.param("nic a/0 dead", "defaults", "full", marks=pytest.mark.smoke)]
    + [case for case in CASES if case != ("nic a/0 dead", "defaults", "full")],
)
def test_fault(logs, note, monkeypatch, fault, shape, kind):
    """A NIC, a cable or a switch fails under the stream."""
    if kind == "plain":
        monkeypatch.setattr(Fabric, "device", ("--device", "plain"))
        monkeypatch.setattr(Fabric, "gid_index", PLAIN_GID_INDEX)
    through(logs, note, fault, SHAPES[shape])


def test_device_dies_before_it_is_used(logs, device):
    """A NIC dies when NCCL has opened and tried its devices, and has no connection yet. A fatal
    event would end all later connections of that device, which is never opened again."""
    with Fabric(logs) as fabric:

        def strike():
            fabric.fault("nic b/0 dead")
            wait_until(lambda: fabric.events("device-fatal"), SECONDS, "the event of the device")

        ranks = Ranks(fabric, logs, between=strike)
        ranks.settled(without=["b/0"])
        ranks.progress("over another NIC")
        reports = ranks.finish()
        ranks.expect_no_event(reports)
        if fabric.elsewhere("b/0", "rx_payload_bytes") < MOVED_BYTES:
            raise Failure("the other NICs of host b have received nothing")


@pytest.mark.parametrize("fault", ["nic a/0 dead", "cable b/0 cut"])
def test_infiniband(logs, note, fault):
    """Link layer InfiniBand: peers by LID, and adaptive routing by default."""
    through(logs, note, fault, [], INFINIBAND)


@pytest.mark.parametrize("shape", ["defaults", "split over 4 QPs"])
def test_loss(logs, note, shape, device):
    """Packets are lost, at both ends."""
    with Fabric(logs) as fabric:
        ranks = Ranks(fabric, logs, *SHAPES[shape])
        ranks.settled()
        ranks.progress("before the loss")
        for host in "ab":
            fabric.fault(f"loss {host}/0 1%")
        lost = lambda: min(fabric.nics()[f"{host}/0"]["retransmits"] for host in "ab") > 100
        wait_until(lambda: ranks.check_alive() or lost(), SECONDS, "packets sent again")
        ranks.progress("under loss")
        reports = ranks.finish()
        ranks.expect_no_event(reports)
        note(f"{sum(r['messages_verified'] for r in reports.values())} messages")


TWO_PORTS = ("--ports", "2")


@pytest.mark.parametrize(
    "devices, settings, fault, ended",
    [
        ("unb0+unb1", (), "nic a/0 dead", ["a/0"]),
        ("unb0+unb1", ("--device", "plain"), "cable b/1 cut", ["b/1"]),
        ("unb0:1+unb0:2", TWO_PORTS, "nic a/0/1 down", ["a/0"]),
        ("unb0:1+unb0:2", TWO_PORTS, "nic a/0 dead", ["a/0", "a/0/2"]),
    ],
    ids=["two NICs", "two plain NICs", "a port of two", "both ports"],
)
def test_merged_nics(logs, note, devices, settings, fault, ended):
    """NCCL makes one NIC of two devices, or, by itself, of both ports of one."""
    with Fabric(logs, *settings) as fabric:
        ranks = Ranks(fabric, logs, "--device", devices, "--qps", 2, "--split")
        ranks.settled()
        ranks.progress("before the fault")
        if min(carried(fabric)[nic][0] for nic in ended) < MOVED_BYTES:
            raise Failure(f"{ended} carried less than {MOVED_BYTES}: {carried(fabric)}")
        fabric.fault(fault)
        one_port = fault == "nic a/0/1 down"
        ranks.settled(without=[] if one_port else ended, port=ended[0] if one_port else None)
        before = carried(fabric)
        ranks.progress("after the fault")
        after = carried(fabric)
        if any(after[nic] != before[nic] for nic in ended):
            raise Failure(f"{ended} carry payload after '{fault}': {before}, {after}")
        reports = ranks.finish()
        ranks.expect_no_event(reports)
        note(f"{sum(r['messages_verified'] for r in reports.values())} messages")


@pytest.mark.parametrize("offset", range(2))
def test_random_faults(logs, note, offset, device):
    """Faults of all kinds, one after the other and some at once."""
    seed = options.SEED + offset
    with Fabric(logs) as fabric:
        ranks = Ranks(fabric, logs, *SHAPES["split over 4 QPs"])
        ranks.settled()
        fabric.random_faults(seed, RANDOM_SECONDS, "a", "b")
        over = lambda: not fabric.command("fault", "list", "--json").stdout.strip()
        until = RANDOM_SECONDS + SECONDS
        wait_until(lambda: ranks.check_alive() or over(), until, "the end of the faults")
        ranks.progress("after the faults")
        reports = ranks.finish()
        ranks.expect_no_event(reports)
        switches = len(fabric.events("switch"))
        if not switches:
            raise Failure(f"seed {seed}: no queue pair has moved")
        verified = sum(r["messages_verified"] for r in reports.values())
        note(f"seed {seed}: {verified} messages, {switches} switches")


@pytest.mark.parametrize("fault", ["nic a/0 dead", "cable b/0 cut"])
@pytest.mark.parametrize("flush", FLUSHES, indirect=True)
def test_flushes(logs, note, flush, fault):
    """Plain devices whose flushes are not as they should be."""
    through(logs, note, fault, [], env={"UNBROKEN_DEVICE_FLUSH": flush})


def test_events_are_heard(logs):
    """The threads of events would end the ranks if they heard of the fault."""
    with Fabric(logs) as fabric:
        fabric.env["UNBROKEN_SHOW_EVENTS"] = "1"
        ranks = Ranks(fabric, logs)
        ranks.settled()
        ranks.progress("before the fault")
        fabric.fault("nic a/0 dead")
        for rank in ranks.ranks.values():
            rank.expect_error(SECONDS)
        if "a fatal event was heard" not in ranks.ranks["a"].output():
            raise Failure(f"it says {ranks.ranks['a'].output()}")


def test_wrong_bytes_are_found(logs):
    """The stand-in finds a byte that is not as it was sent."""
    with Fabric(logs) as fabric:
        ranks = Ranks(fabric, logs, "--corrupt")
        for rank in ranks.ranks.values():
            rank.expect_error(SECONDS)
        said = "".join(rank.output() for rank in ranks.ranks.values())
        if "are wrong" not in said and "checksum" not in said and "number" not in said:
            raise Failure(f"nobody has found the wrong byte: {said}")


@pytest.mark.parametrize("fault", ["nic a/0 dead", "nic b/0 dead"])
def test_without_failover(logs, fault, device):
    """The same fault without failover: both ranks end with an error."""
    with Fabric(logs) as fabric:
        ranks = Ranks(fabric, logs, failover=False)
        ranks.progress("before the fault")
        fabric.fault(fault)
        for rank in ranks.ranks.values():
            rank.expect_error(SECONDS)
        said = "".join(rank.output() for rank in ranks.ranks.values())
        if not any(word in said for word in ("has status", "fatal event", "ibv_post_")):
            raise Failure(f"nobody says what failed: {said}")


def test_no_nic_is_left(logs, device):
    """All NICs of a host die: both ranks get an error, as NCCL does without us."""
    with Fabric(logs) as fabric:
        ranks = Ranks(fabric, logs)
        ranks.settled()
        ranks.progress("before the faults")
        for nic in [name for name in fabric.nics() if name[0] == "a"]:
            fabric.fault(f"nic {nic} dead")
        for rank in ranks.ranks.values():
            rank.expect_error(SECONDS + 20)
