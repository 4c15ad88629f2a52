"""The deployment files of several nodes: valid by the tools that read them, in agreement with the program."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_service.config import Config, is_shared, parse
from tests import manifests

TOP = Path(__file__).parent.parent
COMPOSE_FILE = TOP / "deploy" / "compose" / "many-nodes.yml"
SLURM = TOP / "deploy" / "slurm" / "train.sbatch"
KUBERNETES = manifests.sources("many-nodes")
NODES = (1, 2, 3)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    return loaded


def ran(*command: str | Path) -> None:
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=TOP, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def config(arguments: list[str], environment: dict[str, str]) -> Config:
    """The configuration of a daemon that is started so."""
    return parse(arguments, environment)


def test_compose_file_follows_its_schema() -> None:
    """The Compose specification's own."""
    tool = shutil.which(Path(sys.executable).with_name("check-jsonschema")) or shutil.which("check-jsonschema")
    if tool is None:
        pytest.skip("check-jsonschema is not installed (pip install check-jsonschema)")
    ran(tool, "--builtin-schema", "vendor.compose-spec", COMPOSE_FILE)


def test_docker_compose_reads_the_file() -> None:
    """Also the first version of it."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed (apt-get install docker-compose)")
    ran("env", "HOLDFAST_POSTGRES_PASSWORD=x", "docker-compose", "-f", COMPOSE_FILE, "config", "--quiet")


def test_each_node_of_the_compose_file_is_a_machine_of_its_own(services: dict[str, Any]) -> None:
    """One root and one catalog for all, a socket and a host name for each, and its ranks at its own socket."""
    places = []
    for number in NODES:
        node, trainer = services[f"node-{number}"], services[f"trainer-{number}"]
        started = config(node["command"], node["environment"])
        assert is_shared(started.catalog_url) and node["hostname"] == f"node-{number}" and "--node" not in node["command"]
        assert set(node["volumes"]) == {"data:/data", f"socket-{number}:{started.socket.parent}"}
        assert set(trainer["volumes"]) == {"data:/data:ro", f"socket-{number}:{started.socket.parent}"}
        assert f"--socket={started.socket}" in trainer["command"] and node["user"] == trainer["user"]
        assert trainer["depends_on"] == {f"node-{number}": {"condition": "service_healthy"}}
        places.append((started.root, started.catalog_url))
    assert len(set(places)) == 1 and str(places[0][0]) == "/data"
    assert len({port for number in NODES for port in services[f"node-{number}"]["ports"]}) == len(NODES)


def test_the_trainers_of_the_compose_file_go_on_without_one(services: dict[str, Any]) -> None:
    """The same command on all nodes, for two to three of them; its flags are torchrun's and the demo trainer's."""
    commands = [services[f"trainer-{number}"]["command"] for number in NODES]
    assert commands[0] == commands[1] == commands[2] and "--nnodes=2:3" in commands[0]
    check_trainer(commands[0])


def check_trainer(command: list[str]) -> None:
    split = command.index("holdfast.demo.train")
    source = (TOP / "client" / "holdfast" / "demo" / "train.py").read_text()
    assert all(f'"{word.partition("=")[0]}"' in source for word in command[split + 1 :])
    from torch.distributed.run import get_args_parser

    assert get_args_parser().parse_args([*command[: split + 1]]).training_script == "holdfast.demo.train"


def test_the_first_node_of_the_compose_file_builds_what_the_others_run(services: dict[str, Any]) -> None:
    """Stages that exist, from the repository's top."""
    for service in (services["node-1"], services["trainer-1"]):
        context = (COMPOSE_FILE.parent / service["build"]["context"]).resolve()
        assert context == TOP and (context / service["build"]["dockerfile"]).exists()
    assert [name for name, service in services.items() if "build" in service] == ["node-1", "trainer-1"]
    assert re.fullmatch(r"postgres:\d+-alpine", services["postgres"]["image"])


@pytest.mark.parametrize("script", [SLURM, TOP / "examples" / "slurm.sbatch"], ids=lambda path: path.name)
def test_a_slurm_job_has_its_node_and_all_of_its_memory(script: Path) -> None:
    """The daemon's address and its budget are the job's alone; before the time limit the script is told, and it is queued
    again.
    """
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script.read_text(), re.MULTILINE))
    assert options["mem"] == "0" and "exclusive" in options and "requeue" in options
    assert re.fullmatch(r"B:USR1@\d+", options["signal"]) and options["open-mode"] == "append"


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in KUBERNETES if d["kind"] == kind and d["metadata"]["name"] == name]
    return dict(found)


def pod(kind: str, name: str) -> dict[str, Any]:
    return dict(manifest(kind, name)["spec"]["template"]["spec"])


def daemon(kind: str, name: str) -> Config:
    (container,) = pod(kind, name)["containers"]
    catalog = manifest("Secret", "holdfast-catalog")["stringData"]
    given = {variable["name"]: variable["valueFrom"] for variable in container["env"]}
    assert given["HOLDFAST_CATALOG"]["secretKeyRef"]["name"] == "holdfast-catalog"
    environment = {"HOLDFAST_CATALOG": catalog[given["HOLDFAST_CATALOG"]["secretKeyRef"]["key"]]}
    return manifests.config(container, environment)


def test_selectors_match_the_pods_they_are_for() -> None:
    """Of the DaemonSet, the Deployment, both Services, and the job's spread over the nodes."""
    labels = {name: manifest(kind, name)["spec"]["template"]["metadata"]["labels"] for kind, name in PODS}
    assert len({tuple(sorted(found.items())) for found in labels.values()}) == len(PODS)
    for kind, name in (("DaemonSet", "holdfast"), ("Deployment", "holdfast-api")):
        assert manifest(kind, name)["spec"]["selector"]["matchLabels"].items() <= labels[name].items()
    for name in ("holdfast-api", "llama3-70b"):
        assert manifest("Service", name)["spec"]["selector"].items() <= labels[name].items()
    (apart,) = pod("Job", "llama3-70b")["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"].items() <= labels["llama3-70b"].items()


PODS = (("DaemonSet", "holdfast"), ("Deployment", "holdfast-api"), ("Job", "llama3-70b"))


@pytest.mark.parametrize(("kind", "name"), PODS)
def test_pods_mount_what_they_have(kind: str, name: str) -> None:
    """Every volume is mounted, and every image has a version."""
    spec = pod(kind, name)
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert re.search(r":\d+\.\d+\.\d+$", container["image"])
    assert volumes == {mount["name"] for c in spec["containers"] for mount in c["volumeMounts"]}


def test_the_nodes_daemons_share_root_and_catalog_with_the_one_for_the_api() -> None:
    """The one for the API takes no ranks, asks for tokens, and has a name that no machine has."""
    node, api = daemon("DaemonSet", "holdfast"), daemon("Deployment", "holdfast-api")
    assert (node.root, node.catalog_url) == (api.root, api.catalog_url) and is_shared(node.catalog_url)
    assert node.listen == ("0.0.0.0", 8420) and node.metrics_open and not node.insecure_no_tokens  # for Prometheus
    assert node.exchange == ("10.0.0.1", 8421)
    assert api.listen == ("0.0.0.0", 8420) and api.behind_tls and "holdfast-api" in api.allowed_hosts
    assert (api.arena_bytes_max, api.spill, api.node) == (0, "never", "api")
    assert manifest("Deployment", "holdfast-api")["spec"]["strategy"] == {"type": "Recreate"}
    (port,) = manifest("Service", "holdfast-api")["spec"]["ports"]
    assert port["port"] == api.listen[1]


def test_ranks_reach_the_daemon_of_their_node() -> None:
    """The same directory of the node in both pods, of one owner, and the checkpoints where the daemon says they are."""
    node, job = pod("DaemonSet", "holdfast"), pod("Job", "llama3-70b")
    made = {volume["name"]: volume for volume in node["volumes"]}
    used = {volume["name"]: volume for volume in job["volumes"]}
    assert made["socket"]["hostPath"]["path"] == used["socket"]["hostPath"]["path"]
    assert made["checkpoints"] == used["checkpoints"]
    assert manifest("PersistentVolumeClaim", "holdfast-checkpoints")["spec"]["accessModes"] == ["ReadWriteMany"]
    (trainer,) = job["containers"]
    mounts = {mount["name"]: mount for mount in trainer["volumeMounts"]}
    started = daemon("DaemonSet", "holdfast")
    assert mounts["checkpoints"] == {"name": "checkpoints", "mountPath": str(started.root), "readOnly": True}
    assert f"--socket={started.socket}" in trainer["args"] and mounts["socket"]["mountPath"] == str(started.socket.parent)
    (prepares,) = node["initContainers"]
    assert prepares["command"][-1] == str(started.socket.parent) and "10001" in prepares["command"]


def test_the_jobs_launchers_meet_at_its_first_pod() -> None:
    """An indexed job whose pods have names of their own, as many as torchrun waits for."""
    spec, job = pod("Job", "llama3-70b"), manifest("Job", "llama3-70b")["spec"]
    (trainer,) = spec["containers"]
    assert job["completionMode"] == "Indexed" and f"--nnodes={job['completions']}" in trainer["args"]
    service = manifest("Service", spec["subdomain"])["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    meet = f"llama3-70b-0.{spec['subdomain']}:{service['ports'][0]['port']}"
    assert trainer["env"] == [{"name": "PET_RDZV_ENDPOINT", "value": meet}]
    check_trainer(trainer["args"])


def test_the_slurm_script_is_sound() -> None:
    """For bash, and for shellcheck where there is one; it leaves more time than it takes to wait for the saves."""
    ran("bash", "-n", SLURM)
    if tool := shutil.which("shellcheck"):
        ran(tool, SLURM)
    text = SLURM.read_text()
    (told,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    (drain,) = re.findall(r"^DRAIN_S=(\d+)", text, re.MULTILINE)
    assert int(told) >= int(drain) + 120
    for flag in ("--requeue", "--exclusive", "--no-kill"):
        assert f"#SBATCH {flag}\n" in text
