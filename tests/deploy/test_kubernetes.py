"""The manifests: what Kubernetes would take, and that they agree with each other and with the daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvstore.daemon.config.config_sources import load
from kvstore.units import parse_bytes
from tests.running import ROOT

PLACE = ROOT / "deploy/kubernetes"
SCHEMA = json.loads((Path(__file__).parent / "kubernetes-1.32.json").read_text(encoding="utf-8"))
OF_OPERATORS = {"PodMonitor", "Kustomization"}  # no kinds of Kubernetes itself


def documents(*names: str) -> Iterator[dict[str, Any]]:
    for name in names or sorted(path.name for path in PLACE.glob("*.yaml")):
        yield from yaml.safe_load_all((PLACE / name).read_text(encoding="utf-8"))


def the(kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents() if document["kind"] == kind]
    return found


def pod(kind: str) -> dict[str, Any]:
    spec: dict[str, Any] = the(kind)["spec"]["template"]["spec"]
    return spec


def mounts(kind: str) -> dict[str, dict[str, Any]]:
    """Of the only container: path in it -> the volume."""
    (container,) = pod(kind)["containers"]
    volumes = {volume["name"]: volume for volume in pod(kind)["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}


def problems(document: dict[str, Any]) -> list[str]:
    """What Kubernetes would refuse, by its own schema, unknown fields included."""
    schema = {
        "$ref": f"#/definitions/{SCHEMA['kinds'][document['kind']]}",
        "definitions": SCHEMA["definitions"],
    }
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(document)]


def test_kubernetes_takes_every_manifest() -> None:
    """Each object is valid by the schema of Kubernetes; a misspelt field or a wrong type would not be."""
    kinds = set()
    for document in documents():
        kinds.add(document["kind"])
        if document["kind"] not in OF_OPERATORS:
            assert problems(document) == [], document["kind"]
    assert kinds == {*SCHEMA["kinds"], *OF_OPERATORS} - {"ConfigMap"}  # made by the kustomization
    broken = the("DaemonSet")
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 60
    assert problems(broken)


def test_the_kustomization_names_what_is_there() -> None:
    """Its resources and files exist, and every other manifest says that it is applied apart."""
    kustomization = the("Kustomization")
    (generated,) = kustomization["configMapGenerator"]
    named = [*kustomization["resources"], *generated["files"]]
    assert all((PLACE / name).is_file() for name in named)
    (configured,) = [v["configMap"]["name"] for v in pod("DaemonSet")["volumes"] if "configMap" in v]
    assert configured == generated["name"]
    apart = {path.name for path in PLACE.glob("*.yaml")} - set(named) - {"kustomization.yaml"}
    head = (PLACE / "kustomization.yaml").read_text(encoding="utf-8").partition("apiVersion")[0]
    assert all(name in head for name in apart)


def test_the_configuration_is_valid_and_lies_in_what_is_mounted() -> None:
    """Socket, data and records are in volumes of the node, the page is where the probe and Prometheus ask, memory fits the limit."""
    config = load(PLACE / "kvstore.toml", environment={}).config
    found = mounts("DaemonSet")
    assert found[str(config.socket_path.parent)]["hostPath"]["path"] == str(config.socket_path.parent)
    assert found[str(config.data_dir)]["hostPath"]
    assert all(found[str(directory)]["hostPath"] for directory in config.nvme.directories)
    assert found["/dev/shm"]["hostPath"]["path"] == "/dev/shm"
    assert found["/etc/kvstore"]["configMap"]
    (container,) = pod("DaemonSet")["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [
        int(config.web.listen.rpartition(":")[2])
    ]
    assert not config.web.listen.startswith(("127.", "localhost", "[::1]"))
    limit_bytes = parse_bytes(container["resources"]["limits"]["memory"] + "B")
    assert isinstance(config.dram.capacity_bytes, int)
    assert limit_bytes >= config.dram.capacity_bytes * 1.02 + (2 << 30)
    assert pod("DaemonSet")["terminationGracePeriodSeconds"] > config.stop_timeout_s + 15


def test_the_engine_shares_the_socket_and_the_user_and_nothing_else() -> None:
    """Of the node the engine mounts the directory of the socket only; both pods are the same user, without privileges."""
    daemon, engine = pod("DaemonSet"), pod("Deployment")
    shared = {
        path: volume["hostPath"]["path"]
        for path, volume in mounts("Deployment").items()
        if "hostPath" in volume
    }
    assert shared == {"/run/kvstore": mounts("DaemonSet")["/run/kvstore"]["hostPath"]["path"]}
    assert daemon["securityContext"]["runAsUser"] == engine["securityContext"]["runAsUser"]
    for spec in (daemon, engine):
        assert not {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"} & set(spec)
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            security = container["securityContext"]
            assert security["capabilities"]["drop"] == ["ALL"] and not security["allowPrivilegeEscalation"]
            assert "privileged" not in security


def test_directories_of_the_node_are_given_to_the_user() -> None:
    """What the kubelet makes as root's is handed over first, each directory that the daemon writes to."""
    daemon = pod("DaemonSet")
    (init,) = daemon["initContainers"]
    command, owner, *directories = init["command"]
    context = daemon["securityContext"]
    assert (command, owner) == ("chown", f"{context['runAsUser']}:{context['runAsGroup']}")
    made = {
        path
        for path, v in mounts("DaemonSet").items()
        if v.get("hostPath", {}).get("type") == "DirectoryOrCreate"
    }
    assert set(directories) == made == {mount["mountPath"] for mount in init["volumeMounts"]}


def test_no_probe_restarts_a_daemon_that_serves() -> None:
    """Liveness asks whether the daemon answers, not whether all of its disks are well; readiness asks the page."""
    (container,) = pod("DaemonSet")["containers"]
    assert container["livenessProbe"]["exec"]["command"] == ["kvstore", "ping"]
    assert container["startupProbe"]["exec"]["command"] == ["kvstore", "ping"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "web"}


def test_the_engine_is_told_what_the_documents_say() -> None:
    """The connector's line of the example is JSON, and the one of docs/vllm.md but for the socket, which is the default."""
    (container,) = pod("Deployment")["containers"]
    (line,) = [word for word in container["args"] if word.startswith("--kv-transfer-config=")]
    given = json.loads(line.partition("=")[2])
    text = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    documented = json.loads(re.search(r"--kv-transfer-config '(\{.*?\n\})'", text, re.DOTALL)[1])  # type: ignore[index]  # else it fails
    documented.pop("kv_connector_extra_config", None)
    assert given == documented


@pytest.mark.parametrize("kind", ["DaemonSet", "PodMonitor"])
def test_prometheus_finds_the_daemons(kind: str) -> None:
    """The monitor selects the daemons' pods, by a port that they name."""
    labels = the("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    selector = the(kind)["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    (endpoint,) = the("PodMonitor")["spec"]["podMetricsEndpoints"]
    (container,) = pod("DaemonSet")["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert endpoint["path"] == "/metrics"
