"""`unbroken top` on a terminal: a NIC dies and comes back on the screen, by its keys; a process
with thousands of queue pairs leaves it responsive and cheap."""

import os
import re
import signal
import termios
import time

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.process import Failure, ticks, wait_until
from lib.redis import Redis
from lib.storms import many, storm
from lib.terminal import Terminal

COLOUR = re.compile(rb"\x1b\[[0-9;]*(?:3[0-7]|9[0-7]|38;|4[0-7]|48;)[0-9;]*m")
MANY_QPS, IDLE_SECONDS = 10_000, 30
IDLE_SHARE = 0.01
KEY_MS = 500


LEFT_SCREEN = b"\x1b[?1049l"


def top(fabric, *args, **more) -> Terminal:
    """`unbroken top` of a fabric."""
    return Terminal([UNBROKEN, "top", *args], fabric.env, **more)


@pytest.mark.smoke
def test_a_nic_dies_and_comes_back_on_the_screen(logs, note):
    """At 80x24: a NIC is killed by a key that is asked back, queue pairs move, it is mended, they
    come back; a drained NIC is said to be; the terminal is as before afterwards."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        storm(fabric, 8, 120)
        wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
        with top(fabric, "--interval", "200ms") as screen:
            has = lambda *words: lambda text: all(word in text for word in words)
            screen.wait_for(has("healthy", "16 protected", "a/0-b/0", "yes"), 20, "all is well")
            screen.wait_for(lambda t: re.search(r">a/0 +active +\d.*bit/s", t), 20, "a rate")
            screen.type("x")
            screen.wait_for(has("unbroken fault set 'nic a/0 dead' ?"), 10, "it is asked back")
            screen.type("n")
            screen.wait_for(has("nothing was changed"), 10, "it was said no")
            if fabric.events("fault"):
                raise Failure("a fault was set without a yes")
            screen.type("xy")
            began = time.monotonic()
            text = screen.wait_for(has("degraded, survived", "DEAD"), 20, "the NIC is dead")
            seen_ms = (time.monotonic() - began) * 1000
            (logs / "dead.txt").write_text(text)
            screen.wait_for(lambda t: "a/1-b/1" in t, 20, "queue pairs have moved")
            screen.type("3")
            text = screen.wait_for(has("switched", "nic a/0 dead"), 20, "the events are shown")
            (logs / "events.txt").write_text(text)
            screen.type("u")
            screen.wait_for(has("unbroken fault clear 'nic a/0 dead' ?"), 10, "it is asked back")
            screen.type("y1")
            screen.wait_for(lambda t: "  healthy" in t and "DEAD" not in t, 40, "all are back")
            screen.type("jdy")
            screen.wait_for(has("active, drained"), 10, "the second NIC is drained")
            screen.type("dy")
            screen.wait_for(lambda t: "drained" not in t.splitlines()[4], 10, "it is used again")
            if any(len(line) > 80 for line in screen.text().splitlines()):
                raise Failure("a line is longer than the screen")
            if not COLOUR.search(screen.written):
                raise Failure("there are no colours")
            screen.type("q")
            if screen.wait_end(10) != 0 or b"\x1b[?1049l" not in screen.written[-200:]:
                raise Failure("the terminal is not as before")
        note(f"a dead NIC is seen {seen_ms:.0f} ms after its key")


def test_without_colours_and_without_a_terminal(logs):
    """NO_COLOR leaves all colours out; where there is no terminal it says what to do instead."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        fabric.fault("nic a/0 dead")
        fabric.env["NO_COLOR"] = "1"
        with top(fabric, columns=132, rows=50) as screen:
            screen.wait_for(lambda t: "DEAD" in t and "2 rails" in t and "4 counts" in t, 20, "all")
            screen.type("q")
            screen.wait_end(10)
            if found := COLOUR.search(screen.written):
                raise Failure(f"a colour in spite of NO_COLOR: {found.group()}")
        done = fabric.command("top")
        if done.returncode != 1 or "status --json" not in done.stderr:
            raise Failure(done.stderr)
        with Terminal(["env", "TERM=dumb", UNBROKEN, "top"], fabric.env) as screen:
            status = screen.wait_end(10)
            if status != 1 or b"right is TERM=xterm" not in screen.written:
                raise Failure(f"{status}: {screen.written}")


@pytest.mark.parametrize("command", ["top", "web"])
def test_to_look_makes_no_folder(logs, command):
    """A folder that is not there stays so, and the error says who makes one."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        listen = ["--listen", "127.0.0.1:0"] if command == "web" else []
        typo, usual = fabric.files / "typo", fabric.files / "unbroken"
        for env, folder in [
            ({"UNBROKEN_RUNTIME": str(typo)}, typo),
            ({"UNBROKEN_RUNTIME": "", "XDG_RUNTIME_DIR": str(fabric.files)}, usual),
        ]:
            with Terminal([UNBROKEN, command, *listen], {**fabric.env, **env}) as screen:
                status = screen.wait_end(10)
                if status != 1 or b"unbroken fabric up" not in screen.written:
                    raise Failure(f"{status}: {screen.written}")
            if folder.exists():
                raise Failure(f"{folder} was made")


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_a_directory_that_does_not_answer(logs, how, note):
    """A Redis server that dies, or falls silent: the screen says so, keys are answered as ever, a
    failure of a NIC is survived; and all is well when the server is back, without its data."""
    with Redis(None, logs) as redis, Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        redis.start()
        redis.start_proxy()
        fabric.env |= redis.env()
        storm(fabric, 8, 240)
        wait_until(lambda: all(q["protected"] for q in fabric.status()["qps"]), 20, "protection")
        has = lambda *words: lambda text: all(word in text for word in words)
        with top(fabric, "--interval", "200ms") as screen:
            screen.wait_for(has("healthy", "16 protected"), 20, "all is well")
            began = time.monotonic()
            redis.kill() if how == "killed" else redis.hold()
            lost = has("degraded, survived", "directory lost: ", "16 protected")
            (logs / "lost.txt").write_text(screen.wait_for(lost, 60, "the directory is lost"))
            note(f"{how}: said after {time.monotonic() - began:.1f} s")
            screen.type("3")
            screen.wait_for(lambda t: t.count("directory lost") >= 2, 20, "the event, too")
            fabric.fault("nic a/0 dead")
            screen.wait_for(has("switched", "a/1-b/1"), 20, "queue pairs have moved")
            fabric.clear()
            redis.start() if how == "killed" else redis.pass_on()
            well = lambda t: "  healthy" in t and "directory lost" not in t.splitlines()[1]
            screen.wait_for(well, 60, "all is well again")
            screen.type("q")
            if screen.wait_end(10) != 0:
                raise Failure("top did not end well")


def busy_ms(screen, keys: str) -> float:
    """How long the screen takes to follow keys."""
    began = time.monotonic()
    screen.type(keys[0])
    screen.wait_for(lambda text: keys[1:] in text, 20, f"the answer to {keys[0]}")
    return (time.monotonic() - began) * 1000


@pytest.mark.timing
@pytest.mark.serial
def test_ten_thousand_queue_pairs(logs, note):
    """With 10,000 queue pairs keys are answered at once, and an idle screen takes a hundredth of a
    core at most."""
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        many(fabric, MANY_QPS)
        with top(fabric) as screen:
            screen.wait_for(lambda t: f"{MANY_QPS} QPs" in t, 60, "all queue pairs")
            took = [
                busy_ms(screen, keys) for keys in ("2rail0", "4switches", "1program", "?its cable")
            ]
            screen.type(" ")
            # The first look at all of them is dear, and has a pause behind it.
            before, began = ticks(screen.pid), time.monotonic()
            while time.monotonic() - began < IDLE_SECONDS:
                screen.read(0.2)
            share = (ticks(screen.pid) - before) / os.sysconf("SC_CLK_TCK") / IDLE_SECONDS
            note(f"{MANY_QPS} QPs: {share * 100:.2f} % of a core, keys {max(took):.0f} ms")
            if share > IDLE_SHARE or max(took) > KEY_MS:
                raise Failure(f"{share * 100:.2f} % of a core, keys {took} ms")


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_the_terminal_as_it_was(logs, ends):
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric, top(fabric) as screen:
        screen.wait_for(lambda text: "healthy" in text, 20, "the screen")
        os.kill(screen.pid, ends)
        status = screen.wait_end(10)
        flags = termios.tcgetattr(screen.master)[3]
        if status != -ends or not flags & termios.ECHO or LEFT_SCREEN not in screen.written:
            raise Failure(f"status {status}, flags {flags:#x}, {screen.written[-40:]}")


# A server has no need of the terminal once it has left its session.
LONG = {
    "top": ["top"],
    "events": ["events", "--follow"],
    "web": ["web", "--listen", "127.0.0.1:0"],
    "metrics": ["metrics", "--listen", "127.0.0.1:0"],
    "traces": ["traces", "--otlp", "http://127.0.0.1:9"],
}


@pytest.mark.parametrize("is_leader", [True, False], ids=["session", "setsid"])
@pytest.mark.parametrize("command", LONG)
def test_long_commands_end_with_their_terminal(logs, command, is_leader):
    """The terminal is closed: by the signal, or, in a session without it, since nobody reads."""
    if not is_leader and command not in ("top", "events"):
        pytest.skip("a server in another session goes on")
    line = [UNBROKEN, *LONG[command]]
    with Fabric(logs, "--hosts", "a,b", "--nics", "2") as fabric:
        if is_leader:
            screen = Terminal(line, fabric.env)
        else:
            # The shell stays the leader; what it starts has no terminal to be told by.
            pid_file = logs / "pid"
            script = f"setsid sh -c 'echo $$ >{pid_file}; exec \"$@\"' sh \"$@\" & wait"
            screen = Terminal(["sh", "-c", script, "sh", *line], fabric.env)
        with screen:
            fabric.fault("nic a/0 dead")
            pid = screen.pid
            # Where there are no switches `traces` has nothing to say.
            name = lambda: open(f"/proc/{pid}/comm").read() == "unbroken\n"
            says = lambda: screen.read(0) or screen.written
            wait_until(name if command == "traces" else says, 20, "it has begun")
            if not is_leader:
                wait_until(lambda: pid_file.exists() and pid_file.read_text(), 20, "its pid")
                pid = int(pid_file.read_text())
            screen.close()
            gone = lambda: screen.ended() if is_leader else not alive(pid)
            try:
                wait_until(gone, 20, f"{command} has ended")
            finally:
                if not is_leader and alive(pid):
                    os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether a process runs: one that nobody waits for has ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
