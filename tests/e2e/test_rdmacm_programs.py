"""Programs of Debian's that connect by address, beside rdmacm-utils and perftest: each goes on over
the other NIC when one fails, or its port, or its cable."""

import pytest

from lib.cc import compile_c
from lib.fabric import Fabric
from lib.ports import free_port, listens
from lib.process import Failure, needs, wait_until
from lib.rdmacm import FAULTS, address, serve

TWO = ("--hosts", "a,b", "--nics", "2")


_DTEST_PORT = 15_828


def _outlives(fabric, fault, server, client, sender):
    """The sending host's traffic goes through its first NIC, and after the fault through the
    other."""
    sent_by = lambda nic: fabric.nics()[f"{sender}/{nic}"]["tx_bytes"]
    wait_until(lambda: client.ended() or sent_by(0) > 4e6, 30, "traffic")
    if fault:
        fabric.fault(fault)
    client.expect_success(120)
    server.expect_success(60)
    carrier = 1 if fault else 0
    sent = sent_by(carrier)
    if sent < 4e6:
        raise Failure(f"{sender}/{carrier} has sent {sent} bytes")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", ["write", "read"])
def test_fio(logs, verb, fault):
    """fio's engine `rdma`. (With `--verb=send` it connects with rnr_retry_count 0, so a receiver
    that is late ends it, with or without a fault.)"""
    needs("fio", "fio")
    port = free_port()
    with Fabric(logs, *TWO) as fabric:
        job = ["fio", "--name=job", "--ioengine=rdma", f"--port={port}", "--bs=64k", "--size=2g"]
        # A job is a thread, not a child that would outlive a test that fails.
        job += ["--iodepth=8", "--thread"]
        # Whatever the verb, the server's job reads.
        server = serve(fabric, [*job, "--rw=read"], port)
        to = [f"--hostname={address(fabric, 'b/0')}", f"--verb={verb}"]
        # ... and the client's writes: a job that reads waits for a client.
        client = fabric.run("a", [*job, *to, "--rw=write"], "a-fio")
        _outlives(fabric, fault, server, client, "b" if verb == "read" else "a")


@pytest.mark.serial  # It asks its server at a TCP port that cannot be chosen.
@pytest.mark.parametrize("fault", FAULTS)
def test_dtest(logs, fault):
    """dtest, over uDAPL's provider for rdma_cm: WRITEs, READs and messages both ways."""
    needs("dtest", "dapl2-utils")
    with Fabric(logs, *TWO) as fabric:
        env = {}
        for host in "ab":
            registry = fabric.files / f"dat-{host}.conf"
            ip = address(fabric, f"{host}/0")
            library = "u2.0 nonthreadsafe default libdaplofa.so.2 dapl.2.0"
            registry.write_text(f'ofa-v2-unb {library} "{ip} 0" ""\n')
            env[host] = {"DAT_OVERRIDE": str(registry)}
        args = ["dtest", "-P", "ofa-v2-unb", "-B", 500, "-b", 65536]
        server = fabric.run("b", [*args, "-s"], "b-dtest", env=env["b"])
        wait_until(lambda: server.ended() or listens(server.pid, _DTEST_PORT), 30, "dtest listens")
        to = address(fabric, "b/0")
        client = fabric.run("a", [*args, "-h", to], "a-dtest", env=env["a"])
        _outlives(fabric, fault, server, client, "a")
        for end in (server, client):
            if "PASSED" not in end.output():
                raise Failure(f"{end.name}: {end.output().strip().splitlines()[-1]}")


# libfabric's endpoints that connect: RC, and reliable datagrams over them.
_FABRICS = {"msg": ("verbs", "msg"), "ofi_rxm": ("verbs;ofi_rxm", "rdm")}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", _FABRICS)
def test_libfabric(logs, kind, fault):
    """fi_pingpong, which compares what it receives. libfabric looks for NICs among the interfaces
    of the machine."""
    needs("fi_pingpong", "libfabric-bin")
    port, (provider, endpoint) = free_port(), _FABRICS[kind]
    with Fabric(logs, *TWO) as fabric:
        args = ["fi_pingpong", "-p", provider, "-e", endpoint, "-c", "-S", 65536, "-I", 1500]
        server = fabric.run("b", [*args, "-B", port], "b-fi")
        wait_until(lambda: server.ended() or listens(server.pid, port), 30, "fi_pingpong listens")
        to = address(fabric, "b/0")
        client = fabric.run("a", [*args, "-P", port, to], "a-fi")
        _outlives(fabric, fault, server, client, "a")


@pytest.mark.parametrize("fault", FAULTS)
def test_ucx(logs, note, fault):
    """Two ends of UCX that connect by address. It uses both NICs at once (its rails)."""
    port, program = free_port(), compile_c("ucx_sockaddr", "-lucp", "-lucs")
    rc = {"UCX_TLS": "rc"}
    with Fabric(logs, *TWO) as fabric:
        server = serve(fabric, [program, port], port, env=rc)
        to = address(fabric, "b/0")
        client = fabric.run("a", [program, port, to, 6], "a-ucx", env=rc)
        _outlives(fabric, fault, server, client, "a")
        note(client.output().strip())
