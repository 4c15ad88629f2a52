"""Dashboard, alerts and manifests: valid by the tools that read them, and made of metrics and flags that there are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_formats.rest.operations import EVENTS
from holdfast_service.config import parse
from holdfast_service.observe.metrics import METRICS, PHASES
from tests.compose import follows_the_schema
from tests.manifests import linked, site, sources

TOP = Path(__file__).parent.parent
PROMETHEUS = TOP / "deploy" / "prometheus"
DASHBOARD = json.loads((TOP / "deploy" / "grafana" / "dashboards" / "holdfast.json").read_text())
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
TESTED = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())
KUBERNETES = sources("sidecar")
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {f"{panel['id']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]}
EXPRESSIONS |= {rule["alert"]: rule["expr"] for rule in RULES}
ADDED = {"instance", "job", "le"}  # labels that Prometheus adds, or histograms have
VALUES = {
    "phase": set(PHASES),
    "kind": set(EVENTS),
    "state": {"committed", "aborted", "dropped", "damaged", "queued", "running"},
}


def exposed() -> dict[str, set[str]]:
    """Every series there is, with its labels."""
    found: dict[str, set[str]] = {"up": set()}
    for name, declared in METRICS.items():
        endings = {"gauge": [""], "counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}[declared.kind]
        found |= {name + ending: set(declared.labels) for ending in endings}
    return found


def promtool(*arguments: str) -> str:
    tool = shutil.which("promtool") or shutil.which(Path(sys.executable).with_name("promtool"))
    if tool is None:
        pytest.skip("promtool is not installed (make tools)")
    ended = subprocess.run([tool, *arguments], capture_output=True, text=True, cwd=PROMETHEUS, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_queries_are_of_declared_metrics(title: str) -> None:
    """Every name in a query of dashboard or alerts is exposed, every label is one of its labels, every value can occur."""
    expression, known = EXPRESSIONS[title], exposed()
    names = set(re.findall(r"\b(?:holdfast_[a-z_]+|up)\b(?!\")", re.sub(r'"[^"]*"', '""', expression)))
    assert names and names <= known.keys()
    labels = set().union(*(known[name] for name in names)) | ADDED
    selected = re.findall(r"(\w+)(?:=|!=|=~|!~)\"([^\"]*)\"", expression)
    assert {label for label, _ in selected} <= labels
    for label, wanted in selected:
        if label in VALUES:
            assert set(wanted.split("|")) <= VALUES[label], wanted
    for listed in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {label.strip() for label in listed.split(",")} <= labels


def test_every_metric_is_looked_at() -> None:
    """What is worth exposing is on the dashboard or in an alert."""
    together = " ".join(EXPRESSIONS.values())
    assert [name for name in METRICS if name not in together] == []


def test_dashboard_is_whole() -> None:
    """Panels have ids, titles and places of their own, and no place is taken twice."""
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert panel["title"] and at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells
    assert all(target["datasource"]["uid"] == "${datasource}" for panel in PANELS for target in panel["targets"])


def test_dashboards_queries_parse(tmp_path: Path) -> None:
    """Prometheus itself reads every query of the dashboard, with Grafana's variables filled in."""
    filled = {"$__rate_interval": "5m", "$instance": ".*", "$run": ".*"}
    rules: list[dict[str, Any]] = []
    for number, expression in enumerate(EXPRESSIONS.values()):
        for name, value in filled.items():
            expression = expression.replace(name, value)
        rules.append({"record": f"test:query{number}", "expr": expression})
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


def test_rules_and_configuration_are_valid() -> None:
    """promtool takes the rules, and the configuration that loads them."""
    assert f"{len(RULES)} rules found" in promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")
    promtool("check", "config", "many-daemons.yml")


def test_rules_fire_when_they_should() -> None:
    """The rules' own tests pass."""
    assert "SUCCESS" in promtool("test", "rules", "alerts.test.yml")


def test_rules_say_what_to_do() -> None:
    """Each has a severity, a summary and an action; and those that wake somebody are tested."""
    tested = {case["alertname"] for test in TESTED["tests"] for case in test["alert_rule_test"] if case.get("exp_alerts")}
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "action", "runbook_url"}
    assert {rule["alert"] for rule in RULES if rule["labels"]["severity"] == "page"} <= tested


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_links_to_what_to_do(rule: dict[str, Any]) -> None:
    """The link leads to a heading of "When something went wrong", on the site that mkdocs.yml names. Below the heading for
    daemons stands the alert's own row.
    """
    page, _, anchor = rule["annotations"]["runbook_url"].removeprefix(site()).partition(".html#")
    text = (TOP / "docs" / f"{page}.md").read_text()
    sections = {section.partition("\n")[0].lower().replace(" ", "-"): section for section in text.split("\n## ")[1:]}
    assert page == "when-something-went-wrong" and anchor in sections
    assert anchor != "a-daemon-needs-attention" or f"`{rule['alert']}`" in sections[anchor]


def test_links_are_those_of_the_site() -> None:
    """`python -m tests.manifests` would change nothing."""
    for path in (PROMETHEUS / "alerts.yml", PROMETHEUS / "alerts.test.yml"):
        assert linked(path.read_text()) == path.read_text()


COMPOSE_FILES = (("docker-compose.yml",), ("docker-compose.yml", "deploy/compose/full.yml"))


@pytest.mark.parametrize("files", COMPOSE_FILES)
def test_compose_file_follows_its_schema(files: tuple[str, ...]) -> None:
    """The Compose specification's own schema."""
    follows_the_schema(TOP / files[-1])


@pytest.mark.parametrize("files", COMPOSE_FILES)
def test_docker_compose_reads_the_file(files: tuple[str, ...]) -> None:
    """The daemon alone needs no setting; with a database and Grafana it is refused without their passwords, and says how
    to have one.
    """
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed (apt-get install docker-compose)")
    command = ["docker-compose", *(word for file in files for word in ("--file", file))]
    command += ["--profile", "trainer", "config", "--quiet"]
    passwords = {f"HOLDFAST_{name}_PASSWORD": "x" for name in ("POSTGRES", "GRAFANA")}
    for left_out in (None, *(passwords if len(files) > 1 else ())):
        known = {"PATH": os.environ["PATH"], **{name: text for name, text in passwords.items() if name != left_out}}
        given = known if len(files) > 1 else {"PATH": known["PATH"]}
        ended = subprocess.run(command, capture_output=True, text=True, cwd=TOP, env=given, check=False)
        assert (ended.returncode == 0) == (left_out is None), ended.stderr
        assert left_out is None or "openssl rand -hex 16" in ended.stderr


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [document for document in KUBERNETES if document["kind"] == kind]
    assert {"apiVersion", "kind", "metadata", "spec"} == set(found)
    return found


@pytest.fixture
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifest("Job")["spec"]["template"]["spec"]
    return spec


def test_sidecar_is_a_native_one(pod: dict[str, Any]) -> None:
    """An init container that goes on: it starts before the trainer and ends after it."""
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    config = parse(sidecar["args"], {})
    assert config.log_format == "json"


def test_pod_shares_socket_and_checkpoints(pod: dict[str, Any]) -> None:
    """Every mount has its volume and every volume a mount; the trainer reads checkpoints and sees the socket."""
    containers = [*pod["initContainers"], *pod["containers"]]
    mounts = {c["name"]: {m["name"]: m for m in c["volumeMounts"]} for c in containers}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set().union(*mounts.values()) == volumes.keys()
    assert mounts["trainer"]["socket"] == mounts["holdfast"]["socket"]
    assert mounts["trainer"]["checkpoints"]["readOnly"] and "readOnly" not in mounts["holdfast"]["checkpoints"]
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory" and mounts["trainer"]["shm"]["mountPath"] == "/dev/shm"
    claim = volumes["checkpoints"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest("PersistentVolumeClaim")["metadata"]["name"]
