"""`unbroken.events`: a Python program waits for switches, without anything but the event log."""

import json
import os
import sys
import threading

import pytest

from lib.fabric import Fabric
from lib.paths import ROOT
from lib.process import Failure

sys.path.insert(0, str(ROOT / "python" / "unbroken"))
from unbroken import events  # noqa: E402

SECONDS = 30


def write(folder, *lines: dict, name="events.jsonl"):
    """Adds lines to a log."""
    with open(folder / name, "a", encoding="utf-8") as log:
        log.writelines(json.dumps(line) + "\n" for line in lines)


def numbers(found: list) -> list:
    """Which events they are."""
    return [event["n"] for event in found]


@pytest.mark.smoke
def test_a_switch_is_told_at_once(logs, note):
    """A NIC dies under a program: whoever waits has the switch while the program goes on."""
    with Fabric(logs) as fabric:
        server, client = fabric.pair("ib_write_bw", ["-F", "-q", 4, "-D", 10])
        with events.Watch(runtime=fabric.path, pid=None, event="switch", kind="passive") as watch:
            if found := watch.wait(1):
                raise Failure(f"a switch before there is a fault: {found}")
            fabric.fault("nic a/0 dead")
            found = watch.wait(SECONDS)
            if client.ended() or not found:
                raise Failure(f"not told while the program ran: {found}")
            if any(event["from"] == event["to"] for event in found):
                raise Failure(f"nobody has moved: {found}")
        note(f"{len(found)} switches of process {found[0]['pid']}")
        client.expect_success(SECONDS)
        server.expect_success(SECONDS)


def test_only_what_is_new_and_asked_for(tmp_path):
    """Events before the watch, of other kinds and of other processes are none of its business."""
    own, other = os.getpid(), os.getpid() + 1
    write(tmp_path, {"n": 0, "event": "switch", "pid": own})
    watch = events.Watch(runtime=tmp_path, event="switch")
    everything = events.Watch(runtime=tmp_path, pid=None)
    write(tmp_path, {"n": 1, "event": "switch", "pid": own}, {"n": 2, "event": "fault", "pid": own})
    write(tmp_path, {"n": 3, "event": "switch", "pid": other})
    assert numbers(watch.poll()) == [1]
    assert numbers(everything.poll()) == [1, 2, 3]
    assert watch.poll() == [] == watch.wait(0.05)


def test_the_log_comes_later_and_is_rotated(tmp_path):
    """There is no log at first; later another file has its name. A line comes in parts, one is
    damaged."""
    watch = events.Watch(runtime=tmp_path, pid=None)
    assert watch.poll() == []
    write(tmp_path, {"n": 1})
    assert numbers(watch.poll()) == [1]
    with open(tmp_path / "events.jsonl", "a", encoding="utf-8") as log:
        log.write('{"n": 2')
        log.flush()
        assert watch.poll() == []
        log.write('}\n{"n": \n[3]\n')
    assert numbers(watch.poll()) == [2]
    write(tmp_path, {"n": 4})
    os.rename(tmp_path / "events.jsonl", tmp_path / "events.old.jsonl")
    write(tmp_path, {"n": 5})
    assert numbers(watch.poll()) == [4, 5]
    later = threading.Timer(0.2, write, (tmp_path, {"n": 6}))
    later.start()
    assert numbers(watch.wait(SECONDS)) == [6]
    later.join()


def test_a_log_of_others_is_refused(tmp_path):
    """A link, or somebody else's file, is not the log of this user's programs."""
    write(tmp_path, {"n": 1}, name="other")
    os.symlink(tmp_path / "other", tmp_path / "events.jsonl")
    with pytest.raises(OSError):
        events.Watch(runtime=tmp_path)
    os.remove(tmp_path / "events.jsonl")
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(PermissionError, match="not a file of this user"):
        events.Watch(runtime=tmp_path)
    if os.geteuid() == 0:
        os.remove(tmp_path / "events.jsonl")
        write(tmp_path, {"n": 1})
        os.chown(tmp_path / "events.jsonl", 1, 1)
        with pytest.raises(PermissionError, match="not a file of this user"):
            events.Watch(runtime=tmp_path)
