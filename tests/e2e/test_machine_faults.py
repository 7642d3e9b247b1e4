"""Faults that people set on devices of the machine (`--faults`, docs/guide/hardware.md), on any
machine: the devices are those of lib/machine.py.
"""

import pytest

from lib import device
from lib.cc import compile_c
from lib.fabric import Fabric
from lib.machine import MachineFabric
from lib.process import Failure, wait_until
from lib.streams import UNTIL_STOPPED
from lib.verifier import report, start, verified
from test_machine_devices import FLOWS, carried, flows_elsewhere, pair

WAIT_SECONDS = 30
STREAMS = {"write": "ib_write_bw", "send": "ib_send_bw"}
# Those that a queue pair leaves its device for.
LEAVES = [
    "nic unb0 dead",
    "nic unb0 down",
    "refuse unb0 ENOMEM",
    "swallow unb0",
    "event unb0 PORT_ERR",
]
# What an end never meets: one that sends nothing loses no completion, and the target of WRITEs
# posts nothing.
UNMET = [
    ("write", "swallow unb0", "b"),
    ("send", "swallow unb0", "b"),
    ("write", "refuse unb0 ENOMEM", "b"),
]
CASES = [
    (s, f, h) for s in STREAMS for f in LEAVES for h in ("a", "b", "ab") if (s, f, h) not in UNMET
]
SMOKE = [("write", "nic unb0 dead", "a"), ("send", "nic unb0 down", "ab")]


class Faulty(MachineFabric):
    def __init__(self, logs, faults):
        super().__init__(logs, "--nics", "2")
        self.faults = faults

    def refused(self, *args) -> str:
        """What a command says that must fail."""
        done = self.command(*args)
        if done.returncode == 0:
            raise Failure(f"{args}: {done.stdout}")
        return done.stderr


def end(processes):
    for process in processes:
        process.expect_success(WAIT_SECONDS)


@pytest.mark.parametrize(
    "stream, fault, hosts",
    [pytest.param(*case, marks=pytest.mark.smoke if case in SMOKE else ()) for case in CASES],
)
def test_survives(logs, stream, fault, hosts):
    """The stream goes on over the other device, whichever ends meet the fault."""
    with Faulty(logs, hosts) as fabric:
        server, client = pair(fabric, STREAMS[stream], ["-D", UNTIL_STOPPED])
        fabric.set_device_fault(fault)
        flows_elsewhere(fabric, [client, server], "a/0")
        if [e["fault"] for e in fabric.events("fault")] != [fault]:
            raise Failure(f"{fabric.events('fault')}")
        end([client, server])
        if not any(e["kind"] == "passive" for e in fabric.events("switch")):
            raise Failure(f"no passive switch: {fabric.events()}")


def test_every_byte_is_right(logs, note, monkeypatch):
    """A program that verifies all that it gets, while both ends meet one fault after the other."""
    monkeypatch.setattr(Fabric, "device", ("--device", "plain"))  # for what it promises
    options = device.verifier_options()
    monkeypatch.setattr(Fabric, "device", ())
    with Faulty(logs, "ab") as fabric:
        program = compile_c("verifier", "-libverbs")
        args = [
            "--device",
            "unb0",
            "--gid-index",
            fabric.gid_index,
            "--qps",
            2,
            "--seconds",
            60,
            *options,
        ]
        ends = start(fabric, logs, program, *args)

        def more(count=2000):
            goals = {host: verified(logs, host) + count for host in "ab"}
            enough = lambda: (
                any(end.ended() for end in ends.values())
                or all(verified(logs, host) >= goal for host, goal in goals.items())
            )
            wait_until(enough, WAIT_SECONDS, f"{count} messages more at both ends")

        more()
        for fault in ["nic {} down", "nic {} dead", "wqe-error {} RETRY_EXC_ERR", "swallow {}"]:
            # Where one of the queue pairs is now.
            name = fabric.status()["qps"][0]["path"].split("-")[0]
            fabric.set_device_fault(fault.format(name))
            more()
            fabric.clear_device_faults()
            more()
        (logs / "stop").touch()
        for one in ends.values():
            one.expect_success(WAIT_SECONDS)
        if not fabric.events("switch"):
            raise Failure("nothing has switched")
        total = sum(report(one)["verified_messages"] for one in ends.values())
        note(f"{total} messages, {len(fabric.events('switch'))} switches")


@pytest.mark.parametrize("stream, fault, hosts", UNMET)
def test_an_end_that_does_not_meet_it_goes_on(logs, stream, fault, hosts):
    with Faulty(logs, hosts) as fabric:
        server, client = pair(fabric, STREAMS[stream], ["-D", 2])
        fabric.set_device_fault(fault)
        end([client, server])


def test_a_work_request_fails(logs):
    """One send fails its queue pair, as at a provider: it goes on, on this device or another."""
    with Faulty(logs, "a") as fabric:
        server, client = pair(fabric, "ib_write_bw", ["-D", UNTIL_STOPPED])
        fabric.set_device_fault("wqe-error unb0 RETRY_EXC_ERR")
        wait_until(lambda: client.ended() or fabric.events("switch"), WAIT_SECONDS, "a switch")
        end([client, server])
        if not fabric.events("switch"):
            raise Failure(f"{fabric.events()}")


def test_an_error_of_its_own_reaches_the_program(logs):
    with Faulty(logs, "a") as fabric:
        _, client = pair(fabric, "ib_write_bw", ["-D", UNTIL_STOPPED])
        fabric.set_device_fault("wqe-error unb0 REM_ACCESS_ERR")
        client.expect_error(WAIT_SECONDS)
        if fabric.events("switch"):
            raise Failure(f"{fabric.events()}")


@pytest.mark.parametrize("fault", ["nic unb0 dead", "nic unb0 down"])
def test_comes_home(logs, fault):
    """A fault that is over, or cleared, brings the stream home by planned switches."""
    with Faulty(logs, "a") as fabric:
        server, client = pair(fabric, "ib_write_bw", ["-D", UNTIL_STOPPED])
        fabric.set_device_fault(fault)
        flows_elsewhere(fabric, [client, server], "a/0")
        if fault not in [f for nic in fabric.status()["nics"] for f in nic["faults"]]:
            raise Failure(f"{fabric.status()['nics']}")
        fabric.clear_device_faults("nic unb0")
        planned = lambda: [e for e in fabric.events("switch") if e["kind"] == "planned"]
        wait_until(lambda: client.ended() or planned(), WAIT_SECONDS, "it comes home")
        first = carried(fabric, "a")["a/0"]
        there = lambda: client.ended() or carried(fabric, "a")["a/0"] - first > FLOWS
        wait_until(there, WAIT_SECONDS, "bytes on a/0 again")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        if any(e["replayed"] for e in planned()) or not fabric.events("fault-clear"):
            raise Failure(f"{fabric.events()}")


def test_a_schedule_needs_nobody(logs):
    """A fault with a time begins and ends by itself; it is listed meanwhile."""
    with Faulty(logs, "a") as fabric:
        server, client = pair(fabric, "ib_write_bw", ["-D", UNTIL_STOPPED])
        fabric.set_device_fault("nic unb0 down", "--at", "200ms", "--for", "1s")
        if (
            "nic unb0 down" not in (said := fabric.command("fault", "list").stdout)
            or "lasts 1s" not in said
        ):
            raise Failure(said)
        kinds = lambda: [e["kind"] for e in fabric.events("switch")]
        wait_until(lambda: client.ended() or "planned" in kinds(), WAIT_SECONDS, "it comes home")
        client.expect_success(WAIT_SECONDS)
        server.expect_success(WAIT_SECONDS)
        if (
            "passive" not in kinds()
            or "planned" not in kinds()
            or fabric.command("fault", "list").stdout
        ):
            raise Failure(f"{fabric.events()}")


@pytest.mark.smoke
def test_without_faults_one_is_refused(logs):
    """No program takes faults that was not started for them, and an error says so."""
    with Faulty(logs, "") as fabric:
        server, client = pair(fabric, "ib_write_bw", ["-D", 2])
        said = fabric.refused("fault", "set", "nic unb0 dead")
        if "no program there was started with --faults" not in said:
            raise Failure(said)
        if (fabric.path / "device-faults").exists():
            raise Failure("a program without --faults has made the folder of faults")
        end([client, server])


def test_a_wrong_name_is_told(logs):
    """The devices that there are, and the words that there are, are named."""
    with Faulty(logs, "a") as fabric:
        fabric.run("a", ["sleep", "60"])  # opens nothing: takes nothing
        server, client = pair(fabric, "ib_write_bw", ["-D", 3])
        for fault, right in {
            "nic unb7 dead": "programs with --faults have unb0, unb1",
            "nic unb0 ded": "can be 'dead' or 'down'",
            "refuse unb0 EWHAT": "right is one of EAGAIN",
            "nic a/9 dead": "'a/9'",
        }.items():
            if right not in (said := fabric.refused("fault", "set", fault)):
                raise Failure(f"{fault}: {said}")
        end([client, server])


@pytest.mark.parametrize("kind", ["garbage", "link", "open to others", "too large"])
def test_a_hostile_table_is_refused(logs, kind):
    """Programs go on as if it were not there; commands say what is wrong with it."""
    with Faulty(logs, "a") as fabric:
        server, client = pair(fabric, "ib_write_bw", ["-D", 3])
        fabric.set_device_fault("nic unb0 dead", "--at", "100s")
        table = fabric.path / "device-faults" / "table"
        text = table.read_text()
        dead = text.splitlines()[0] + "\n1 1 0 0 nic unb0 dead\n"
        if kind == "garbage":
            table.write_bytes(dead.encode() + b"\xff\x00 fire\n")
        elif kind == "link":
            (fabric.path / "device-faults" / "elsewhere").write_text(dead)
            (fabric.path / "device-faults" / "elsewhere").chmod(0o600)
            table.unlink()
            table.symlink_to("elsewhere")
        elif kind == "open to others":
            table.write_text(dead)
            table.chmod(0o666)
        else:
            table.write_text(dead + "1 1 0 0 nic unb0 dead\n" * 5000)
        said = fabric.refused("fault", "set", "nic unb0 down")
        if "device-faults/table" not in said:
            raise Failure(said)
        end([client, server])
        if "faults of devices: " not in client.output() or fabric.events("switch"):
            raise Failure(f"{fabric.events()}")


@pytest.mark.parametrize("event", ["GID_CHANGE", "LID_CHANGE", "PKEY_CHANGE"])
def test_changes_of_a_port_are_passed_on(logs, event):
    """A program that watches its device hears of what is no fault, too."""
    with Faulty(logs, "a") as fabric:
        line = ["stdbuf", "-oL", "ibv_asyncwatch", "-d", "unb0"]
        watch = fabric.run("a", line)
        wait_until(lambda: "async event FD" in watch.output(), WAIT_SECONDS, "it watches")
        fabric.set_device_fault(f"event unb0 {event}")
        shown = lambda: f"IBV_EVENT_{event}" in watch.output()
        wait_until(shown, WAIT_SECONDS, f"ibv_asyncwatch shows {event}")
