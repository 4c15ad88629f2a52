"""The manifests of deploy/kubernetes: as files, as Kustomize puts them together, and the schemas that they follow.

`python -m tests.manifests` writes the PrometheusRule again after deploy/prometheus/alerts.yml has changed, and the alerts'
links after the address of the site in mkdocs.yml has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_service.config import Config, parse

TOP = Path(__file__).parent.parent
PLACE = TOP / "deploy" / "kubernetes"
BASES = ("many-nodes", "sidecar", "watcher")
SCHEMAS = {
    (read["properties"]["apiVersion"]["enum"][0], read["properties"]["kind"]["enum"][0]): read
    for read in (
        json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "kubernetes_schemas").glob("*.json"))
    )
}
ALERTS, RULE = TOP / "deploy" / "prometheus" / "alerts.yml", PLACE / "components" / "monitoring" / "rules.yaml"
_RULE_HEAD = """\
# The alerts of deploy/prometheus/alerts.yml, written by `python -m tests.manifests`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: holdfast
  labels: {app.kubernetes.io/name: holdfast}
spec:
"""


def site() -> str:
    """The address at which the documentation is published, which ends with a slash."""
    (address,) = re.findall(r"^site_url: (https://\S+/)$", (TOP / "mkdocs.yml").read_text(), re.MULTILINE)
    return str(address)


def linked(rules: str) -> str:
    """Rules or their tests, with every link of an alert leading to the site."""
    return re.sub(r'(runbook_url: ")https://[^"#]*/', lambda found: found[1] + site(), rules)


def prometheus_rule() -> str:
    """The text of the PrometheusRule."""
    lines = [line for line in ALERTS.read_text().splitlines() if not line.startswith("#")]
    return _RULE_HEAD + "".join(f"  {line}\n" if line else "\n" for line in lines)


def kustomization(directory: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((directory / "kustomization.yaml").read_text()))


def sources(name: str) -> list[dict[str, Any]]:
    """The manifests of one directory as they are written, and the Secrets that Kustomize makes, without its hashes."""
    directory = PLACE / name
    about = kustomization(directory)
    found = [one for file in about["resources"] for one in yaml.safe_load_all((directory / file).read_text())]
    for secret in about.get("secretGenerator", []):
        data = {file: (directory / file).read_text() for file in secret.get("files", [])}
        for file in secret.get("envs", []):
            data |= dict(
                line.split("=", 1) for line in (directory / file).read_text().splitlines() if line[:1] not in ("", "#")
            )
        found.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret["name"]}, "stringData": data})
    return found


def rendered(place: Path, base: str, *components: str, first: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """A base with components, in their order, as Kustomize puts them together; before them those in `place` itself."""
    paths = [os.path.relpath(PLACE / one, place) for one in (base, *(f"components/{name}" for name in components))]
    paths[1:1] = first
    about = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": paths[:1]}
    digest = "sha256:" + "0" * 64
    images = [
        {"name": name, "newName": f"registry.example/{name}", "digest": digest} for name in ("holdfast", "holdfast-trainer")
    ]
    (place / "kustomization.yaml").write_text(yaml.safe_dump(about | {"components": paths[1:], "images": images}))
    return printed(place)


def printed(place: Path) -> list[dict[str, Any]]:
    """What `kubectl kustomize` prints for a directory; skips where kubectl is missing or too old."""
    ended = subprocess.run([*_kustomize(), str(place)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return list(yaml.safe_load_all(ended.stdout))


def _kustomize() -> list[str]:
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl") is None:
        pytest.skip("neither kubectl nor kustomize is installed: the kustomizations are not rendered")
    asked = subprocess.run(["kubectl", "version", "--client", "--output=json"], capture_output=True, text=True, check=False)
    version = re.search(r'"kustomizeVersion": *"v(\d+)', asked.stdout)
    if version is None or int(version[1]) < 5:
        pytest.skip("kubectl is older than 1.27: the kustomizations are not rendered")
    return ["kubectl", "kustomize"]


def templates(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every pod template in a manifest, also of kinds that Kubernetes does not know itself."""
    spec = document.get("spec", {})
    for nested in (spec.get("template"), *(task["template"] for task in spec.get("tasks", []))):
        if nested and "containers" in nested.get("spec", {}):
            yield nested
        elif nested:
            yield from templates(nested)
    for one in spec.get("replicatedJobs", []):
        yield from templates(one["template"])


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """All containers of a pod."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def is_daemon(container: dict[str, Any]) -> bool:
    """Whether a container runs the image's own command."""
    return "command" not in container and re.search(r"(^|/)holdfast(:|@)", container["image"]) is not None


def config(container: dict[str, Any], environment: dict[str, str] | None = None) -> Config:
    """The configuration of the daemon that a container starts."""
    return parse([argument.replace("$(POD_IP)", "10.0.0.1") for argument in container["args"]], environment or {})


def closed(schema: Any) -> Any:
    """The schema, and fields that it does not name are refused, as `kubectl apply` does."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: closed(value) if key != "enum" else value for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


if __name__ == "__main__":
    for rules in (ALERTS, ALERTS.with_name("alerts.test.yml")):
        rules.write_text(linked(rules.read_text()))
    RULE.write_text(prometheus_rule())
