"""What every container of every deployment file is held to: nothing that it need not do, no password that is known, and a
network in which only those reach it that must.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.manifests import BASES, containers, sources, templates

TOP = Path(__file__).parent.parent
COMPOSE = {
    path.relative_to(TOP): yaml.safe_load(path.read_text()) for path in sorted((TOP / "deploy" / "compose").rglob("*.yml"))
}
COMPOSE[Path("docker-compose.yml")] = yaml.safe_load((TOP / "docker-compose.yml").read_text())
MANIFESTS = {base: sources(base) for base in BASES}
SERVICES = [(file, name) for file, read in COMPOSE.items() for name, about in read["services"].items() if "image" in about]
ADDITIONS = {Path("deploy/compose/bucket.yml"), Path("deploy/compose/tier.yml")}  # to services of docker-compose.yml
PODS = [
    (file, one["kind"], one["metadata"]["name"])
    for file, documents in MANIFESTS.items()
    for one in documents
    if any(templates(one))
]
# The only container that has to be root: it makes a directory of the machine's the daemon's. And why it may do no more.
ROOTS = {("many-nodes", "socket-directory"): ["CHOWN", "FOWNER"]}


def service(file: Path, name: str) -> dict[str, Any]:
    return dict(COMPOSE[file]["services"][name])


def workload(file: str, kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in MANIFESTS[file] if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return dict(found)


def texts(value: object) -> Iterator[str]:
    """Every string of a document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from texts(one)
    if isinstance(value, str):
        yield value


def test_every_file_is_looked_at() -> None:
    """Those that the tests below read are all that there are, and none of them is empty."""
    assert {path.name for path in COMPOSE} >= {
        "docker-compose.yml",
        "full.yml",
        "many-nodes.yml",
        "watcher.yml",
        "compose.yml",
    }
    assert {file for file, _ in SERVICES} | ADDITIONS == COMPOSE.keys() and {file for file, *_ in PODS} == MANIFESTS.keys()
    assert len(SERVICES) >= 15 and len(PODS) >= 5
    for file in ADDITIONS:
        for about in COMPOSE[file]["services"].values():
            assert about.keys() <= {"command", "environment"}


@pytest.mark.parametrize(("file", "name"), SERVICES, ids=str)
def test_a_service_writes_to_its_volumes_alone_and_may_nothing_more(file: Path, name: str) -> None:
    """A root that cannot be written, no capability, no way to one, and a place for temporary files."""
    about = service(file, name)
    assert about["read_only"] is True
    assert about["cap_drop"] == ["ALL"] and "cap_add" not in about and "privileged" not in about
    assert about["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in about["tmpfs"] and about["logging"]["options"]["max-size"] == "10m"
    assert "mem_limit" in about
    if "holdfast" in about["image"]:
        assert about.get("hostname") or name == "trainer", "a node keeps its name when its container is recreated"
    assert "network_mode" not in about and "pid" not in about and "ipc" not in about
    assert all(port.startswith("127.0.0.1:") for port in about.get("ports", [])), "published on loopback alone"


@pytest.mark.parametrize(("file", "name"), SERVICES, ids=str)
def test_an_image_is_one_that_is_named(file: Path, name: str) -> None:
    """Ours, or of a version; never whatever is newest."""
    image = service(file, name)["image"]
    ours = r"holdfast(-trainer)?|\$\{HOLDFAST_(TRAINER_)?IMAGE:-holdfast(-trainer)?\}"
    assert re.fullmatch(rf"{ours}|[a-z0-9./-]+:v?\d[\w.-]+(@sha256:[0-9a-f]{{64}})?", image)


@pytest.mark.parametrize("file", COMPOSE, ids=str)
def test_no_password_has_a_default(file: Path) -> None:
    """Compose refuses to start without one, and says what to do."""
    for text in texts(COMPOSE[file]):
        for variable, rest in re.findall(r"\$\{(\w*(?:PASSWORD|SECRET|TOKEN|KEY)\w*)([^}]*)\}", text):
            assert re.match(r":\?.*(choose|see) ", rest), f"{variable}{rest}"
        assert not re.search(r"://[^/@$]+:[^$@/][^@/]*@", text), f"a password in {text}"
    for about in COMPOSE[file]["services"].values():
        known = about.get("environment", {})
        given = [name for name in known if re.search(r"PASSWORD|SECRET|TOKEN", name)]
        assert all(known[name] is None or known[name].startswith("${") for name in given)  # None: from the shell


def test_the_accounts_that_images_make_have_passwords_of_ones_own() -> None:
    """Grafana lets `admin` in with `admin` unless it is told another one; PostgreSQL's must be given."""
    for file, name in SERVICES:
        about = service(file, name)
        wanted = {"grafana": "GF_SECURITY_ADMIN_PASSWORD", "postgres": "POSTGRES_PASSWORD"}.get(name)
        assert wanted is None or wanted in about["environment"]


@pytest.mark.parametrize(("file", "kind", "name"), PODS)
def test_a_pod_may_nothing_more_than_it_must(file: str, kind: str, name: str) -> None:
    """Of the strictest kind that Kubernetes has (Pod Security: restricted), but for what makes the socket's directory."""
    spec = workload(file, kind, name)["spec"]["template"]["spec"]
    about = spec["securityContext"]
    assert about["runAsNonRoot"] is True and about["runAsUser"] == about["runAsGroup"] == 10001
    assert about["seccompProfile"] == {"type": "RuntimeDefault"} and spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    for container in containers(spec):
        security, added = container["securityContext"], ROOTS.get((file, container["name"]))
        assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == ({"drop": ["ALL"]} if added is None else {"drop": ["ALL"], "add": added})
        assert ({"runAsUser", "runAsNonRoot"} <= security.keys()) == (added is not None)
        assert container["resources"]["limits"]["memory"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert added is not None or "/tmp" in mounted, "what cannot write to its root needs a place for temporary files"


@pytest.mark.parametrize(("file", "kind", "name"), PODS)
def test_a_pod_is_reached_by_those_that_must(file: str, kind: str, name: str) -> None:
    """One policy is for it, which lets nobody in by leaving something out: each rule names who, and pods that listen name
    the ports.
    """
    template = workload(file, kind, name)["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    policies = [one["spec"] for one in MANIFESTS[file] if one["kind"] == "NetworkPolicy"]
    (policy,) = [one for one in policies if one["podSelector"]["matchLabels"].items() <= labels]
    assert "Ingress" in policy["policyTypes"]
    listening = {port["containerPort"] for c in containers(template["spec"]) for port in c.get("ports", [])}
    allowed = {port["port"] for rule in policy["ingress"] for port in rule.get("ports", [])}
    assert allowed == listening
    for rule in policy["ingress"]:
        assert rule["from"] and all(selector.get("matchLabels") for peer in rule["from"] for selector in peer.values()), (
            "everybody"
        )
        assert rule.get("ports") or not listening


def test_what_a_manifest_leaves_open_cannot_be_used() -> None:
    """A password or token in a Secret is a word that no database has."""
    for documents in MANIFESTS.values():
        for one in documents:
            for name, text in one.get("stringData", {}).items():
                assert "CHANGE-ME" in text or not re.search(r"pass|token|url", name)
