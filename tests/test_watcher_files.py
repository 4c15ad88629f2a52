"""The deployment files of a watcher: in agreement with the program, and Prometheus asks every daemon there is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_service.config import Config, parse
from holdfast_service.wings.notify.targets import read_targets
from holdfast_service.wings.notify.watched_daemons.watched import check_address, read_tokens
from tests import manifests
from tests.compose import follows_the_schema
from tests.wings.notify.receivers import secret

DEPLOY = Path(__file__).parent.parent / "deploy"
COMPOSE_FILE = DEPLOY / "compose" / "watcher.yml"
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
KUBERNETES = manifests.sources("watcher")
PROMETHEUS = DEPLOY / "prometheus" / "many-daemons.yml"
DAEMONS = ("daemon-1", "daemon-2")


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [document for document in KUBERNETES if document["kind"] == kind]
    return dict(found)


def watcher_pod() -> tuple[dict[str, Any], Config]:
    pod = manifest("Deployment")["spec"]["template"]["spec"]
    return pod, parse(pod["containers"][0]["args"], {})


def test_compose_file_follows_its_schema() -> None:
    follows_the_schema(COMPOSE_FILE)


def test_docker_compose_reads_the_file() -> None:
    """Also the first version of it."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed (apt-get install docker-compose)")
    command = ["docker-compose", "-f", str(COMPOSE_FILE), "config", "--quiet"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_compose_file_watches_each_of_its_daemons() -> None:
    """By addresses at which they listen and by names that they take; their roots and sockets are their own."""
    started = {name: parse(SERVICES[name]["command"], {}) for name in (*DAEMONS, "watcher")}
    assert set(started["watcher"].watch) == {check_address(f"http://{name}:8420") for name in DAEMONS}
    for name, config in started.items():
        assert config.listen == ("0.0.0.0", 8420) and name in config.allowed_hosts and SERVICES[name]["hostname"] == name
        assert not config.insecure_no_tokens and not config.loopback_open
    assert len({volume for name in DAEMONS for volume in SERVICES[name]["volumes"]}) == 4
    assert started["watcher"].arena_bytes_max == 0
    mounts = [volume.split(":") for volume in SERVICES["watcher"]["volumes"]]
    assert ["../../watcher", "/etc/holdfast", "ro"] in mounts
    for path in (started["watcher"].watch_tokens, started["watcher"].notify):
        assert path is not None and path.parent == Path("/etc/holdfast")


def test_prometheus_asks_every_daemon_of_the_compose_file() -> None:
    """With the rules that are loaded for one daemon, too."""
    loaded = yaml.safe_load(PROMETHEUS.read_text())
    assert loaded["rule_files"] == ["alerts.yml"] and loaded["scrape_configs"][0]["job_name"] == "holdfast"
    (static,) = loaded["scrape_configs"][0]["static_configs"]
    assert sorted(static["targets"]) == sorted(f"{name}:8420" for name in (*DAEMONS, "watcher"))
    assert SERVICES["prometheus"]["command"] == [f"--config.file=/etc/prometheus/{PROMETHEUS.name}"]
    for name in (*DAEMONS, "watcher"):
        assert parse(SERVICES[name]["command"], {}).metrics_open


def test_prometheus_finds_the_pods_of_every_example() -> None:
    """By a label and the name of a port that the daemons of many nodes, their API and the watcher have."""
    text = PROMETHEUS.read_text()
    assert "__meta_kubernetes_pod_label_app_kubernetes_io_name], regex: holdfast" in text
    assert "__meta_kubernetes_pod_container_port_name], regex: http," in text
    serving = 0
    for template in [
        one for base in manifests.BASES for document in manifests.sources(base) for one in manifests.templates(document)
    ]:
        for container in filter(manifests.is_daemon, manifests.containers(template["spec"])):
            assert "http" in {port["name"] for port in container["ports"]}
            assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "holdfast"
            serving += 1
    assert serving == 4


def test_the_manifests_files_are_what_the_daemon_reads(tmp_path: Path) -> None:
    """The tokens are those of the watched daemons, and the targets are valid, where the Secret is mounted."""
    pod, config = watcher_pod()
    files = manifest("Secret")["stringData"]
    assert read_tokens(secret(tmp_path, files["tokens"])).keys() == set(config.watch)
    path = tmp_path / "notify.toml"
    path.write_text(files["notify.toml"])
    (target,) = read_targets(path).target
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    at = Path(mounts["config"]["mountPath"])
    assert {config.watch_tokens, config.notify, getattr(target, "url_file", None)} == {at / name for name in files}
    assert volumes["config"]["secret"]["secretName"] == manifest("Secret")["metadata"]["name"]
    assert volumes["config"]["secret"]["defaultMode"] & 0o007 == 0  # else the daemon refuses them
    assert volumes["root"]["persistentVolumeClaim"]["claimName"] == manifest("PersistentVolumeClaim")["metadata"]["name"]


def test_the_watchers_pod_is_behind_a_proxy_and_has_its_service() -> None:
    pod, config = watcher_pod()
    assert pod["securityContext"]["fsGroup"] == 10001 and config.behind_tls
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"].items() <= labels.items()
