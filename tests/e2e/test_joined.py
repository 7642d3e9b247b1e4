"""Networks of several machines that each machine joins by one line (`unbroken fabric join`), and
programs without an option. The machines are network namespaces (lib/namespaces.py); the directory
is a Redis server with a password.

Needs root, iproute2, nftables and redis-server.
"""

import json
import os

import pytest

from lib.fabric import UNBROKEN
from lib.paths import BUILD, ROOT
from lib.ports import free_port
from lib.process import Failure, wait_until
from lib.pytorch import PROGRAMS, interpreter, losses, same_bits
from lib.redis import PASSWORD
from test_kubernetes import documents
from test_redis import PATIENCE_SECONDS, STREAM_BYTES, Machines

pytestmark = pytest.mark.root


class Joined(Machines):
    """Machines whose runtime folders have joined the network."""

    def __enter__(self):
        super().__enter__()
        self.password_file = self.logs / "password"
        self.password_file.write_text(PASSWORD)
        self.password_file.chmod(0o600)
        return self

    def command(self, host, *words):
        """What `unbroken` says at a host: its exit status and its output."""
        line = [*self.net.within(host), UNBROKEN, *words]
        process = self.fabrics[host].start(f"{host}-{words[1]}", line)
        wait_until(process.ended, PATIENCE_SECONDS, f"{words} ends")
        return process.popen.returncode, process.output()

    def join(self, host, nics=None, url=None, password=True):
        """`fabric join`, with all NICs of the host unless others are named."""
        nics = nics or ",".join(str(self.net.addr(host, rail)) for rail in range(self.net.rails))
        words = ["--address", nics, "--directory", url or self.redis.url(host)]
        words += ["--password-file", self.password_file] if password else []
        return self.command(host, "fabric", "join", *words)

    def join_all(self):
        """Both hosts join."""
        for host in "ab":
            status, text = self.join(host)
            assert status == 0 and f"unb0 is {self.net.addr(host, 0)}" in text, text

    def program(self, host, words, env=None):
        """Starts a program that names no NIC and no directory."""
        line = [*self.net.within(host), UNBROKEN, "run", "--", *words]
        self.programs[host] = self.fabrics[host].start(f"{host}-program", line, env)

    # As `Machines.start`, without options.
    def start(self, args_of):
        port = free_port()
        self.program("b", args_of("b", port))
        inside = [*self.net.within("b"), "ss", "-Hltn", f"sport = :{port}"]
        listens = lambda: self.programs["b"].ended() or self._says(inside)
        wait_until(listens, PATIENCE_SECONDS, "the server listens")
        self.program("a", args_of("a", port))

    def _says(self, line) -> bool:
        process = self.fabrics["b"].start("b-ss", line)
        wait_until(process.ended, PATIENCE_SECONDS, "ss ends")
        return "LISTEN" in process.output()


@pytest.mark.parametrize("tool", [pytest.param("ib_write_bw", marks=pytest.mark.smoke)])
def test_perftest_survives(logs, tool):
    """A stream goes on over the other interface when the first one of either end fails."""
    with Joined(logs) as machines:
        machines.join_all()
        machines.perftest(tool)
        machines.wait_protected()
        machines.survives(0)
        machines.wait_protected()
        machines.finish()


def test_ddp_survives(logs):
    """A training of two ranks has the losses of one that nothing disturbs, bit for bit, and its
    gradients go over the other interface once the first one has failed."""
    python, steps = interpreter(), 150

    def train(machines, strike):
        address, port = machines.net.manager("a"), free_port()
        env = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": str(address),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "mgmt",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "python" / "unbroken"),
            "UNBROKEN_COLLECTIVE_LIBRARY": str(BUILD / "libunbroken_coll.so"),
        }
        script = [python, "-W", "ignore", PROGRAMS / "train.py", "unbroken", "ddp", steps]
        for rank, host in enumerate("ab"):
            machines.program(host, script, {**env, "RANK": str(rank), "LOCAL_RANK": "0"})
        if strike:
            begun = lambda: machines.ended() or len(losses(machines.programs["a"].output())) > 5
            wait_until(begun, 120, "the first steps")
            assert machines.carried(0) > STREAM_BYTES
            before = machines.carried(1)
            machines.fault(0)
        for program in machines.programs.values():
            program.expect_success(240)
        if strike and machines.carried(1) - before < STREAM_BYTES:
            raise Failure("the gradients did not go over the other interface")
        return losses(machines.programs["a"].output())

    with Joined(logs) as machines:
        machines.join_all()
        right = train(machines, strike=False)
        assert len(right) == steps
        same_bits(train(machines, strike=True), right)


@pytest.mark.smoke
def test_the_commands_of_the_daemon_set(logs):
    """What a pod of packaging/kubernetes/network.yaml runs joins the network, and its programs
    reach each other by one address each."""
    [pods] = [d for d in documents("network.yaml") if d["kind"] == "DaemonSet"]
    [container] = pods["spec"]["template"]["spec"]["containers"]
    *shell, script = container["command"]
    script = script.replace("exec sleep infinity", "")
    with Joined(logs) as machines:
        for host in "ab":
            env = {
                "POD_IP": str(machines.net.addr(host, 0)),
                "DIRECTORY": machines.redis.url(host),
                "UNBROKEN_DIRECTORY_PASSWORD_FILE": str(machines.password_file),
                "PATH": f"{BUILD}:{os.environ['PATH']}",
            }
            line = [*machines.net.within(host), *shell, script]
            machines.fabrics[host].start(f"{host}-pod", line, env).expect_success(20)
        machines.perftest("ib_write_bw")
        machines.finish()


@pytest.mark.smoke
def test_wrong_words_are_named(logs):
    """Addresses of others, a directory of one machine or that is not there, a wrong password."""
    with Joined(logs) as machines:
        other = str(machines.net.addr("b", 0))
        own = str(machines.net.addr("a", 0))
        for nics, url, password, said in [
            (other, None, True, f"{other} is no address of this machine"),
            (f"{own},{own}", None, True, f"{own} is named twice"),
            (own, "lmdb", True, "is a file of one machine"),
            (own, f"redis://{machines.net.server('a')}:1", True, "redis-server -"),
            (own, None, False, "names a user but no password"),
            (own, "redis://me:secret@h", True, "everybody can see a password"),
        ]:
            status, text = machines.join("a", nics, url, password)
            assert status == 1 and said in text, text
        machines.password_file.write_text("wrong")
        status, text = machines.join("a")
        assert status == 1 and "refuses user and password" in text, text
        assert not (machines.fabrics["a"].path / "joined.json").exists()


@pytest.mark.smoke
def test_a_network_is_left(logs):
    """What was joined is shown, stands in the way of an emulated network, and is left."""
    with Joined(logs) as machines:
        assert machines.join("a")[0] == 0
        own = [str(machines.net.addr("a", rail)) for rail in range(2)]
        shown = json.loads(machines.command("a", "fabric", "show", "--json")[1])
        assert shown["joined"]["nics"] == own and PASSWORD not in json.dumps(shown)
        file = machines.fabrics["a"].path / "joined.json"
        assert os.stat(file).st_mode & 0o777 == 0o600 and PASSWORD not in file.read_text()
        status, text = machines.command("a", "fabric", "up")
        assert status == 1 and "unbroken fabric down" in text, text
        assert machines.command("a", "fabric", "down")[0] == 0
        assert not file.exists() and machines.command("a", "fabric", "up")[0] == 0
        status, text = machines.join("a")
        assert status == 1 and "there is an emulated network" in text, text


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["garbage", "link", "fifo"])
def test_a_hostile_file_is_refused(logs, kind):
    """What lies in the place of the file is named, and nothing is run."""
    with Joined(logs) as machines:
        assert machines.join("a")[0] == 0
        file = machines.fabrics["a"].path / "joined.json"
        file.unlink()
        {
            "garbage": lambda: file.write_text('{"nics": 1}'),
            "link": lambda: file.symlink_to("/etc/hostname"),
            "fifo": lambda: os.mkfifo(file),
        }[kind]()
        machines.program("a", ["true"])
        wait_until(machines.programs["a"].ended, PATIENCE_SECONDS, "it ends")
        text = machines.programs["a"].output()
        assert machines.programs["a"].popen.returncode == 1 and str(file) in text, text
