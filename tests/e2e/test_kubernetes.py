"""The manifests for Kubernetes, without a cluster: their schemas, and the sample's containers.

There is no kubelet here. What it would do for the sample, by the device plugin's configuration, is
done with podman: each container of the pod with the mounts of `unbroken.dev/nic`, in one network
namespace, with the pod's security context."""

import re
import subprocess

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.paths import BUILD, ROOT
from lib.process import Skip, wait_until
from lib.schemas_of_others import interpreter

MANIFESTS = ROOT / "packaging" / "kubernetes"
# The oldest that is promised, two in between, and the newest that the schemas have.
VERSIONS = ["1.26", "1.31", "1.34", "1.37"]
STREAM_BYTES = 20_000_000


def documents(name: str) -> list:
    """The documents of a manifest."""
    try:
        import yaml
    except ImportError:
        raise Skip("yaml is missing (Debian: python3-yaml)") from None
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def device() -> dict:
    """The configuration of the device plugin."""
    import yaml

    [config] = [d for d in documents("device-plugin.yaml") if d["kind"] == "ConfigMap"]
    return yaml.safe_load(config["data"]["device"])


def validate(*files, version: str) -> subprocess.CompletedProcess:
    """What the schemas of a version of Kubernetes say; fields that they do not know are errors."""
    command = interpreter().with_name("kubernetes-validate")
    line = [command, "--strict", "-k", version, *files]
    return subprocess.run([str(w) for w in line], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_schemas(version, tmp_path):
    files = sorted(MANIFESTS.glob("*.yaml"))
    done = validate(*files, version=version)
    assert done.returncode == 0 and done.stdout.count("passed") + done.stderr.count("passed") >= 3
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(files[-1].read_text().replace("restartPolicy", "restartPolitics"))
    assert validate(wrong, version=version).returncode != 0, "a wrong field is accepted"


def test_the_plugin_finds_what_it_offers():
    """It sees each path of its configuration, at the place where the node has it, and pods get
    what they ask for."""
    [plugin] = [d for d in documents("device-plugin.yaml") if d["kind"] == "DaemonSet"]
    pod = plugin["spec"]["template"]["spec"]
    volumes = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"]}
    [container] = pod["containers"]
    mounts = container["volumeMounts"]
    seen = {m["mountPath"] for m in mounts if volumes[m["name"]] == m["mountPath"]}
    [group] = device()["groups"]
    assert {path["path"] for path in group["paths"]} <= seen
    domain = container["args"][container["args"].index("--domain") + 1]
    [sample] = documents("pod.yaml")
    for part in sample["spec"]["containers"]:
        assert part["resources"]["limits"][f"{domain}/{device()['name']}"] == 1
    assert group["count"] >= len(sample["spec"]["containers"])
    # Where the package puts them, and where the command looks for the library.
    deb = (ROOT / "packaging/deb.sh").read_text()
    assert 'PRIVATEDIR="$libdir/unbroken"' in deb and "PREFIX=/usr " in deb


def test_nothing_has_more_rights_than_it_needs():
    """No container is privileged or may become so, and no image is whatever a tag names today."""
    [plugin] = [d for d in documents("device-plugin.yaml") if d["kind"] == "DaemonSet"]
    [sample] = documents("pod.yaml")
    pods = [plugin["spec"]["template"]["spec"], sample["spec"]]
    containers = [c for pod in pods for c in pod.get("initContainers", []) + pod["containers"]]
    assert len(containers) == 4
    for part in containers:
        context = part["securityContext"]
        assert not context.get("privileged") and context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        image = part["image"]
        local = image.startswith("localhost/") and part["imagePullPolicy"] == "Never"
        assert local or "@sha256:" in image, image
        assert not image.endswith(":latest"), image
    assert all(pod["automountServiceAccountToken"] is False for pod in pods)


def container(podman, fabric, part: dict, network: str) -> list:
    """A container of the sample, as a kubelet would run it."""
    here = {"/usr/bin/unbroken": UNBROKEN, "/run/unbroken": fabric.path}
    options = ["--user", part["securityContext"]["runAsUser"], "--cap-drop", "ALL"]
    options += ["--security-opt", "no-new-privileges", "--name", part["name"]]
    [group] = device()["groups"]
    for path in group["paths"]:
        source = here.get(path["path"], BUILD / "libunbroken.so")
        access = "ro" if path.get("readOnly") else "rw"
        options += ["--volume", f"{source}:{path['mountPath']}:{access}"]
    env = tuple(f"{e['name']}={e['value']}" for e in part["env"])
    return podman.container(*part["command"], env=env, network=network, options=tuple(options))


@pytest.mark.root
@pytest.mark.serial
def test_the_sample_outlives_a_nic(podman, logs, note):
    """Its two containers, unprivileged and with one network namespace, while a NIC dies."""
    [pod] = documents("pod.yaml")
    parts = {part["name"]: part for part in pod["spec"]["containers"]}
    with Fabric(logs, "--hosts", "a,b,c,d", "--nics", "4") as fabric:
        # That of a pod's sandbox.
        lives = "ip link set lo up && echo up && exec sleep 600"
        sandbox = fabric.start("sandbox", ["unshare", "--net", "sh", "-c", lives])
        wait_until(lambda: "up\n" in sandbox.output(), 20, "a network namespace")
        network = f"ns:/proc/{sandbox.pid}/ns/net"
        server, client = (
            fabric.start(name, container(podman, fabric, parts[name], network)) for name in "ba"
        )
        flows = lambda: client.ended() or fabric.nics()["b/0"]["rx_payload_bytes"] > STREAM_BYTES
        wait_until(flows, 60, "traffic on rail 0")
        fabric.fault("nic a/0 dead")
        for end in (client, server):
            end.expect_success(60)
        to = {re.sub(r"-.*", "", e["to"]) for e in fabric.events("switch") if e["host"] == "a"}
        moved = sum(fabric.nics()[nic]["tx_payload_bytes"] for nic in to - {"a/0"})
        assert moved > STREAM_BYTES, f"{moved} bytes by other NICs: {to}"
        note(f"{moved / 1e9:.2f} GB by other NICs after the fault")
