"""The manifests: valid by schema as files and as Kustomize puts them together, and each of their claims about the daemon."""

from __future__ import annotations

import base64
import math
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import yaml

from holdfast_formats.memory_bounds import SPARE_PERCENT
from holdfast_service.daemon.arena import holder
from tests.daemons import free_port, running
from tests.manifests import (
    ALERTS,
    BASES,
    PLACE,
    RULE,
    SCHEMAS,
    TOP,
    closed,
    config,
    containers,
    is_daemon,
    kustomization,
    printed,
    prometheus_rule,
    rendered,
    sources,
    templates,
)

OLDEST, NEWEST = "1.29", "1.37"  # of Kubernetes: native sidecars, and what the schemas know
COMPONENTS = sorted(path.parent.name for path in PLACE.glob("components/*/kustomization.yaml"))
TOGETHER = (
    ("sidecar",),
    ("sidecar", "monitoring", "gpus", "priority", "kueue"),
    ("many-nodes",),
    ("many-nodes", "monitoring", "gpus", "priority", "kueue"),
    ("many-nodes", "gpus", "priority", "jobset", "kueue"),
    ("many-nodes", "gpus", "priority", "kubeflow-trainer", "kueue"),
    ("many-nodes", "gpus", "priority", "volcano"),
    ("sidecar", "bucket-access", "tier"),
    ("sidecar", "gpus", "bucket-access", "bucket-root", "kueue"),
    ("many-nodes", "bucket-access", "tier"),
    ("many-nodes", "gpus", "bucket-access", "bucket-root", "jobset"),
    ("many-nodes", "bucket-access", "bucket-root", "kubeflow-trainer"),
    ("watcher", "monitoring"),
)
GIB = 1024**3
# Of each workload with saves: the state of its ranks in bytes, the bytes a second that its storage takes, and the seconds
# that the trainer in the same pod needs before the daemon is told to stop. The comments of the manifests say the same.
SIZES = {"llama3-8b": (128e9, 1e9, 30), "holdfast": (280e9, 2e9, 0)}
TRAINING = {"llama3-8b": 116, "holdfast": 384}  # GiB for the training itself, beside /dev/shm and the slots
SLOTS = 2


def check(document: dict[str, Any]) -> None:
    """By the strict schemas of Kubernetes; other kinds by an excerpt of their own, and the pods in them by Kubernetes'."""
    tool = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed (the extra dev has it)")
    schema = SCHEMAS.get((document["apiVersion"], document["kind"]))
    if schema is None:
        for version in (OLDEST, NEWEST):
            tool.validate(document, version, strict=True)
        return
    jsonschema.validate(document, closed(schema))
    for one in templates(document):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": one}
        tool.validate(pod, NEWEST, strict=True)
    for job in jobs([document]):
        if job["template"]:  # not before Kustomize has put it there
            named = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job}
            tool.validate(named, NEWEST, strict=True)


FILES = sorted(path for path in PLACE.rglob("*.yaml") if path.name != "kustomization.yaml")
FILES.append(TOP / "examples" / "kubernetes.yaml")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(TOP)))
def test_every_file_follows_its_schemas(file: Path) -> None:
    """Nothing in them is misspelled or unknown."""
    documents = list(yaml.safe_load_all(file.read_text()))
    assert documents
    for document in documents:
        check(document)


def test_the_schemas_refuse_what_is_misspelled() -> None:
    """A field that is not there, in a kind of Kubernetes, in one of another project, and in a pod within it."""
    (job,) = [one for one in sources("sidecar") if one["kind"] == "Job"]
    check(job)
    for kind, document in (("Job", job), ("JobSet", read("jobset", "jobset.yaml", "JobSet"))):
        document["spec"]["backofLimit"] = 1
        with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
            check(document)
        assert document["kind"] == kind
    volcano = read("volcano", "job.yaml", "Job")
    volcano["spec"]["tasks"][0]["template"] = {"spec": {"containers": [{"name": "a", "imagge": "b"}]}}
    with pytest.raises(jsonschema.ValidationError, match="imagge"):
        check(volcano)


def read(component: str, file: str, kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((PLACE / "components" / component / file).read_text())
    (found,) = [one for one in documents if one["kind"] == kind]
    return dict(found)


@pytest.mark.parametrize("together", TOGETHER, ids="+".join)
def test_what_kustomize_prints_follows_the_schemas(together: tuple[str, ...], tmp_path: Path) -> None:
    """And every image is the one of the kustomization that names it, also in pods within other kinds."""
    documents = rendered(tmp_path, *together)
    for document in documents:
        check(document)
    names = [(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(set(names)) == len(names)
    pods = [template["spec"] for document in documents for template in templates(document)]
    assert pods and all(re.match(r"registry\.example/.*@sha256:", one["image"]) for pod in pods for one in containers(pod))
    secrets = {one["metadata"]["name"] for one in documents if one["kind"] == "Secret"}
    for pod in pods:
        for variable in (variable for one in containers(pod) for variable in one.get("env", [])):
            assert variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name") in {None, *secrets}
        for volume in pod["volumes"]:
            assert volume.get("secret", {}).get("secretName") in {None, *secrets}


SCHEDULERS = {
    "jobset": ("JobSet", "llama3-70b-trainer-0-0"),
    "kubeflow-trainer": ("TrainingRuntime", "llama3-70b-node-0-0"),
    "volcano": ("Job", "llama3-70b-trainer-0"),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_trains_with_the_pods_of_the_job(name: str, tmp_path: Path) -> None:
    """As they are in many-nodes but for the name of the first, with the GPUs; Job and Service are not there twice."""
    kind, first = SCHEDULERS[name]
    documents = rendered(tmp_path, "many-nodes", "gpus", name)
    (mine,) = [one for one in documents if one["kind"] == kind]
    (template,) = templates(mine)
    (job,) = [one for one in sources("many-nodes") if one["kind"] == "Job"]
    (trainer,), (was,) = template["spec"]["containers"], job["spec"]["template"]["spec"]["containers"]
    assert trainer["args"] == was["args"] and trainer["volumeMounts"] == was["volumeMounts"]
    assert trainer["resources"]["limits"] == {**was["resources"]["limits"], "nvidia.com/gpu": "8"}
    (meet,) = trainer["env"]
    assert meet == {"name": "PET_RDZV_ENDPOINT", "value": f"{first}.llama3-70b:29400"}
    assert template["metadata"] == job["spec"]["template"]["metadata"]
    kept = [one for one in documents if one["metadata"]["name"] == "llama3-70b"]
    assert [one for one in kept if one["kind"] == "Service" or one["apiVersion"] == "batch/v1"] == []
    assert f"--nnodes={nodes(documents)}" in trainer["args"]


CHANGE = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "llama3-70b"},
    "spec": {"template": {"spec": {"containers": [{"name": "trainer", "args": ["/app/train.py"]}]}}},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_patch_of_the_job_before_its_pods_are_copied_is_kept(name: str, tmp_path: Path) -> None:
    """It is in a component that is listed before the one that replaces the Job."""
    mine = tmp_path / "my-trainer"
    mine.mkdir()
    about = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(about | {"patches": [{"patch": yaml.safe_dump(CHANGE)}]}))
    documents = rendered(tmp_path, "many-nodes", "gpus", name, first=("my-trainer",))
    (job,) = [one for one in documents if one["kind"] == SCHEDULERS[name][0]]
    (template,) = templates(job)
    assert template["spec"]["containers"][0]["args"] == ["/app/train.py"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_patch_of_a_job_that_was_replaced_is_an_error(name: str, tmp_path: Path) -> None:
    """Instead of changing nothing, which is noticed when the training starts."""
    rendered(tmp_path, "many-nodes", name)
    about = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(about | {"patches": [{"patch": yaml.safe_dump(CHANGE)}]}))
    with pytest.raises(AssertionError, match="no matches for Id Job"):
        printed(tmp_path)


@pytest.mark.parametrize("base", ["sidecar", "many-nodes"])
def test_kueue_alone_suspends_the_training(base: str, tmp_path: Path) -> None:
    """A manifest that says so, too, would suspend a running job whenever it is applied again."""
    documents = rendered(tmp_path, base, "kueue")
    (job,) = [one for one in documents if one["kind"] == "Job"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training" and "suspend" not in job["spec"]


@pytest.mark.parametrize("page", ["operating.md", "operating.zh-CN.md"])
def test_the_kustomization_of_the_guide_is_rendered(page: str, tmp_path: Path) -> None:
    """With a clone beside it, and with a secret and images of its own."""
    text = (TOP / "docs" / page).read_text()
    (shown,) = re.findall(r'```yaml title="kustomization.yaml"\n(.*?)```', text, re.DOTALL)
    shutil.copytree(PLACE, tmp_path / "holdfast" / "deploy" / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text(shown)
    (tmp_path / "catalog.env").write_text("url=postgresql://mine\n")
    documents = printed(tmp_path)
    (secret,) = [one for one in documents if one["kind"] == "Secret"]
    assert base64.b64decode(secret["data"]["url"]) == b"postgresql://mine"
    images = {one["image"] for document in documents for pod in templates(document) for one in containers(pod["spec"])}
    assert images == {"registry.example.com/holdfast:0.1.0", "registry.example.com/my-trainer:1"}
    assert {"DaemonSet", "Job", "PodMonitor", "PrometheusRule"} <= {one["kind"] for one in documents}
    (job,) = [one for one in documents if one["kind"] == "Job"]
    (trainer,) = job["spec"]["template"]["spec"]["containers"]
    assert "holdfast.demo.train" not in trainer["args"] and trainer["args"][-1].startswith("/app/")
    assert {one["name"] for one in trainer["env"]} == {"HOME", "PET_RDZV_ENDPOINT"}
    assert f"(T + shm + `slots` × S) ÷ {(100 - SPARE_PERCENT) / 100}" in text
    for document in documents:
        check(document)


def test_an_existing_secret_may_hold_the_catalogs_url(tmp_path: Path) -> None:
    """A patch names it, in the place of the one that Kustomize makes."""
    rendered(tmp_path, "many-nodes")
    about = yaml.safe_load((tmp_path / "kustomization.yaml").read_text())
    source = {"secretKeyRef": {"name": "ours"}}
    changed = [{"name": "holdfast", "env": [{"name": "HOLDFAST_CATALOG", "valueFrom": source}]}]
    about["patches"] = [
        {"patch": yaml.safe_dump(head | {"spec": {"template": {"spec": {"containers": changed}}}})}
        for head in (
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "holdfast"}},
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "holdfast-api"}},
        )
    ]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(about))
    asked = [
        variable["valueFrom"]["secretKeyRef"]
        for document in printed(tmp_path)
        for template in templates(document)
        for one in containers(template["spec"])
        for variable in one.get("env", [])
        if variable["name"] == "HOLDFAST_CATALOG"
    ]
    assert asked == [{"name": "ours", "key": "url"}] * 2


@pytest.mark.parametrize("page", ["operating.md", "operating.zh-CN.md"])
def test_the_service_of_the_guide_leads_to_the_sidecar(page: str) -> None:
    """By the port's number: Services find named ports of native sidecars only from Kubernetes 1.32."""
    text = (TOP / "docs" / page).read_text()
    (shown,) = re.findall(r"```yaml\n(apiVersion: v1\nkind: Service\n.*?)```", text, re.DOTALL)
    service = yaml.safe_load(shown)
    check(service)
    (job,) = [one["spec"] for one in sources("sidecar") if one["kind"] == "Job"]
    (sidecar,) = filter(is_daemon, containers(job["template"]["spec"]))
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert [port["targetPort"] for port in service["spec"]["ports"]] == [one["containerPort"] for one in sidecar["ports"]]


def nodes(documents: list[dict[str, Any]]) -> int:
    """Pods that a scheduler starts, as each of the three kinds says it."""
    for one in documents:
        spec = one.get("spec", {})
        match one["kind"]:
            case "JobSet":
                return int(spec["replicatedJobs"][0]["template"]["spec"]["completions"])
            case "TrainJob":
                return int(spec["trainer"]["numNodes"])
            case "Job":
                assert spec["minAvailable"] == spec["tasks"][0]["replicas"]
                return int(spec["minAvailable"])
    raise AssertionError("no such kind")


def test_every_component_is_rendered_and_every_file_is_used() -> None:
    """By the tests above, and by a kustomization."""
    assert {name for _, *names in TOGETHER for name in names} == set(COMPONENTS)
    assert {base for base, *_ in TOGETHER} == set(BASES)
    for file in PLACE.rglob("kustomization.yaml"):
        about = kustomization(file.parent)
        secrets = [
            path for one in about.get("secretGenerator", []) for path in (*one.get("files", []), *one.get("envs", []))
        ]
        there = {path.name for path in file.parent.iterdir() if path.is_file()} - {file.name}
        assert sorted([*about.get("resources", []), *secrets]) == sorted(there)


IN_BUCKETS = [together for together in TOGETHER if "bucket-access" in together]


@pytest.mark.parametrize("together", IN_BUCKETS, ids="+".join)
def test_daemons_and_trainers_use_a_bucket_as_an_account(together: tuple[str, ...], tmp_path: Path) -> None:
    """Each of their pods has it, and the region. A root in a bucket leaves /data to what a daemon keeps for itself."""
    documents = rendered(tmp_path, *together)
    (account,) = [one for one in documents if one["kind"] == "ServiceAccount"]
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].startswith("arn:aws:iam::")
    pods = [template["spec"] for one in documents for template in templates(one) if one["kind"] != "Pod"]
    for pod in pods:
        assert pod["serviceAccountName"] == account["metadata"]["name"]
        volumes = {one["name"]: one for one in pod["volumes"]}
        for container in containers(pod):
            mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes.keys()
            if "socket-directory" in container["name"]:
                continue
            assert "AWS_REGION" in {one["name"] for one in container["env"]}
            if "bucket-root" not in together:
                assert "/data" in mounts and (not is_daemon(container) or config(container).place.bucket is None)
            elif is_daemon(container):
                place = config(container).place
                assert place.bucket is not None and str(place.directory) == "/data" and "/data" in mounts
            else:
                assert "/data" not in mounts
    tiers = [tier for pod in pods for one in containers(pod) if is_daemon(one) for tier in config(one).tier]
    assert bool(tiers) == ("tier" in together)


@pytest.mark.parametrize("component", COMPONENTS)
def test_patches_and_replacements_are_of_what_there_is(component: str) -> None:
    """Without Kustomize, too: the manifests that they name are there, and so is what holds the field that they write."""
    about = kustomization(PLACE / "components" / component)
    files = [PLACE / "components" / component / file for file in about.get("resources", [])]
    own = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    bases = [sources("many-nodes")] if component in SCHEDULERS else [sources("many-nodes"), sources("sidecar")]
    for patch in about.get("patches", []):
        changed = yaml.safe_load(patch["patch"])
        target = patch.get("target", {})
        # A patch of one manifest by its name is of the base that has it.
        for base in [base for base in bases if "name" not in target or any(targeted(one, target) for one in base)]:
            if isinstance(changed, dict):
                (found,) = [one for one in base if (targeted(one, target) if target else named(one) == named(changed))]
                assert changed["kind"] == found["kind"]
                continue
            (found,) = [one for one in base if targeted(one, target)]
            for operation in changed:
                *path, last = operation["path"].removeprefix("/").split("/")
                at: Any = found
                for key in path:
                    at = at[int(key) if isinstance(at, list) else key]
                if isinstance(at, list) and last != "-":
                    assert int(last) < len(at) and operation["op"] in ("replace", "remove")
                    continue
                assert isinstance(at, list) == (last == "-") and (operation["op"] == "add" or last in at)
    for one in about.get("transformers", []):
        gone = yaml.safe_load(yaml.safe_load(one)["patch"])
        assert gone["$patch"] == "delete" and named(gone) in map(named, bases[0])
    for one in about.get("replacements", []):
        assert one["source"]["fieldPath"] == "spec.template"
        (target,) = one["targets"]
        (found,) = [each for each in own if each["kind"] == target["select"]["kind"]]
        at = found
        for key in target["fieldPaths"][0].split("."):
            at = at[int(key) if isinstance(at, list) else key]
        assert at == {}


def targeted(document: dict[str, Any], target: dict[str, str]) -> bool:
    is_named = re.fullmatch(target.get("name", ".*"), document["metadata"]["name"])
    return bool(is_named and re.fullmatch(target["kind"], document["kind"]))


def named(document: dict[str, Any]) -> tuple[str, str, str]:
    return document["apiVersion"], document["kind"], document["metadata"]["name"]


def test_prometheus_loads_the_alerts_that_are_tested() -> None:
    """The rule of the operator is the file that promtool tests. After a change of it: python -m tests.manifests."""
    assert RULE.read_text() == prometheus_rule()
    assert yaml.safe_load(RULE.read_text())["spec"] == yaml.safe_load(ALERTS.read_text())


PODS = [
    pytest.param(base, one["metadata"]["name"], template, id=f"{base} {one['metadata']['name']}")
    for base in BASES
    for one in sources(base)
    for template in templates(one)
]


@pytest.mark.parametrize(("base", "name", "template"), PODS)
def test_prometheus_finds_and_reaches_each_daemon(base: str, name: str, template: dict[str, Any]) -> None:
    """By the label and port of the PodMonitor, under the job that the alerts ask for. Its metrics need no token, all else
    does; and the pod's policy lets the namespace of Prometheus in at that port.
    """
    monitor = read("monitoring", "pods.yaml", "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    labels = template["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    jobs = set(re.findall(r'job="([^"]+)"', ALERTS.read_text()))
    assert jobs == {labels[monitor["jobLabel"]]}
    for container in filter(is_daemon, containers(template["spec"])):
        started = config(container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert started.listen == ("0.0.0.0", ports[endpoint["port"]])
        assert started.metrics_open and not started.insecure_no_tokens and not started.loopback_open
        exchange = started.exchange
        assert ports.keys() == {"http"} if exchange is None else ports["exchange"] == exchange[1]
        policies = [one["spec"] for one in sources(base) if one["kind"] == "NetworkPolicy"]
        (policy,) = [one for one in policies if one["podSelector"]["matchLabels"].items() <= labels.items()]
        opened = [
            {port["port"] for port in rule["ports"]}
            for rule in policy["ingress"]
            for peer in rule["from"]
            if peer == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
        ]
        assert opened == [{ports["http"]}], name


@pytest.mark.parametrize(("base", "name"), [("sidecar", "llama3-8b"), ("many-nodes", "holdfast-api")])
def test_a_watcher_reaches_daemons_of_other_namespaces(base: str, name: str) -> None:
    """Those that it watches, from the namespace in which its own file says to apply it."""
    (policy,) = [one["spec"] for one in sources(base) if one["kind"] == "NetworkPolicy" and named(one)[2] == name]
    peers = [peer for rule in policy["ingress"] for peer in rule["from"] if "podSelector" in peer]
    (watcher,) = [one for one in sources("watcher") if one["kind"] == "Deployment"]
    labels = watcher["spec"]["template"]["metadata"]["labels"]
    (inside,) = re.findall(r"kubectl apply -n (\S+) -k deploy", (PLACE / "watcher" / "kustomization.yaml").read_text())
    (peer,) = [one for one in peers if one["podSelector"]["matchLabels"].items() <= labels.items()]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": inside}}


@pytest.mark.parametrize(("base", "name", "template"), PODS)
def test_services_add_no_variables_to_a_pod(base: str, name: str, template: dict[str, Any]) -> None:
    """Kubernetes would name them after Services, such as HOLDFAST_API_PORT, and the daemon's options are HOLDFAST_ too."""
    assert template["spec"]["enableServiceLinks"] is False, (base, name)


@pytest.mark.parametrize(("base", "name", "template"), PODS)
def test_a_daemon_may_write_to_its_volume(base: str, name: str, template: dict[str, Any]) -> None:
    """A new volume belongs to root, and a daemon that may not write ends with status 6."""
    pod = template["spec"]
    for container in filter(is_daemon, containers(pod)):
        (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == str(config(container).root)]
        (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
        assert "persistentVolumeClaim" in volume and not mount.get("readOnly")
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"], (base, name)


@pytest.mark.parametrize(("base", "name", "template"), PODS)
def test_probes_ask_the_daemon_and_let_its_own_watchdog_act_first(base: str, name: str, template: dict[str, Any]) -> None:
    """The kubelet restarts whole containers, and with them the process that keeps the shared memory."""
    for container in filter(is_daemon, containers(template["spec"])):
        for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
            if probe != "readinessProbe" or probe in container:  # a DaemonSet's pods have no Service
                assert container[probe]["httpGet"] == {"path": path, "port": "http"}, (base, name)
                assert container[probe]["timeoutSeconds"] >= 5
        starts, alive = container["startupProbe"], container["livenessProbe"]
        assert starts["periodSeconds"] * starts["failureThreshold"] >= 300  # it may migrate the catalog before it answers
        if config(container).arena_bytes_max == 0:
            continue  # it has no shared memory
        assert alive["periodSeconds"] * alive["failureThreshold"] >= 2 * holder.SILENT_S


@pytest.mark.parametrize(("base", "name", "template"), PODS)
def test_a_daemon_has_the_time_to_write_and_no_hook_takes_from_it(base: str, name: str, template: dict[str, Any]) -> None:
    """The grace holds the trainer's last save and all slots at the speed of the storage; memory and volume hold them too."""
    pod = template["spec"]
    assert all("lifecycle" not in container for container in containers(pod))
    daemons = [one for one in containers(pod) if is_daemon(one) and config(one).arena_bytes_max != 0]
    assert (name in SIZES) == bool(daemons)
    for container in daemons:
        state, speed, before = SIZES[name]
        assert pod["terminationGracePeriodSeconds"] >= before + SLOTS * state / speed + 60
        memory = bytes_of(container["resources"]["limits"]["memory"])
        assert SLOTS * state / 0.9 + GIB / 2 <= memory <= 1.2 * (SLOTS * state / 0.9)
        (job,) = [one for one in sources(base) if one["kind"] == "Job"]
        trainer = job["spec"]["template"]["spec"]["containers"][0]
        (shm,) = [one["emptyDir"] for one in job["spec"]["template"]["spec"]["volumes"] if one["name"] == "shm"]
        parts = TRAINING[name], bytes_of(shm["sizeLimit"]) / GIB, SLOTS * state / GIB
        limit = bytes_of(trainer["resources"]["limits"]["memory"])
        assert sum(parts) * GIB <= limit * (100 - SPARE_PERCENT) / 100
        assert bytes_of(trainer["resources"]["requests"]["memory"]) == limit
        said = f"({' + '.join(f'{math.ceil(part)}' for part in parts)} GiB) ÷ {(100 - SPARE_PERCENT) / 100}:"
        assert said in (PLACE / base / "job.yaml").read_text()
        (claim,) = [one for one in sources(base) if one["kind"] == "PersistentVolumeClaim"]
        whole = state * job["spec"].get("completions", 1)
        keep = config(container).keep
        assert keep and (keep + 1) * whole <= bytes_of(claim["spec"]["resources"]["requests"]["storage"])


def bytes_of(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * 1024.0 ** ("KMGT".index(unit[0]) + 1)


@pytest.mark.parametrize(("base", "name", "template"), PODS)
def test_every_container_says_what_it_needs(base: str, name: str, template: dict[str, Any]) -> None:
    for container in containers(template["spec"]):
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}, (base, name)
        assert container["resources"]["limits"].keys() == {"memory"}


def jobs(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The specs of all Jobs of Kubernetes, also those within a JobSet or a TrainingRuntime."""
    found = [one["spec"] for one in documents if (one["apiVersion"], one["kind"]) == ("batch/v1", "Job")]
    for one in documents:
        spec = one.get("spec", {})
        nested = spec.get("replicatedJobs") or spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])
        found += [each["template"]["spec"] for each in nested]
    return found


@pytest.mark.parametrize("together", TOGETHER, ids="+".join)
def test_an_eviction_is_not_counted(together: tuple[str, ...], tmp_path: Path) -> None:
    """By a Job; and a JobSet is told the reason. Only pods that are never restarted may have such a policy."""
    for job in jobs(rendered(tmp_path, *together)):
        (rule,) = job["podFailurePolicy"]["rules"]
        assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert rule["action"] == ("Ignore" if job["backoffLimit"] else "FailJob")
        assert job["podReplacementPolicy"] == "Failed" and job["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("base", ["sidecar", "many-nodes"])
def test_a_drain_waits_for_the_whole_training(base: str) -> None:
    """The budget is of the job's pods, all of them; more would be evicted than may be, if it allowed one."""
    documents = sources(base)
    (job,) = [one["spec"] for one in documents if one["kind"] == "Job"]
    (budget,) = [one["spec"] for one in documents if one["kind"] == "PodDisruptionBudget"]
    assert budget["selector"]["matchLabels"].items() <= job["template"]["metadata"]["labels"].items()
    assert budget["minAvailable"] == job.get("completions", 1)


def test_the_sidecar_answers_probes_and_prometheus_without_a_token(tmp_path: Path) -> None:
    """As they ask: at the pod's address, which the daemon does not know by name. Everything else needs a token."""
    (job,) = [one for one in sources("sidecar") if one["kind"] == "Job"]
    (sidecar,) = filter(is_daemon, containers(job["spec"]["template"]["spec"]))
    flags = [flag for flag in sidecar["args"] if not flag.startswith(("--root=", "--socket=", "--listen="))]
    port = free_port()
    with running(tmp_path / "root", *flags, listen=f"0.0.0.0:{port}", closed=True):
        asked = {
            path: httpx.get(
                f"http://127.0.0.1:{port}{path}", headers={"Host": f"10.1.2.3:{port}"}, trust_env=False
            ).status_code
            for path in ("/healthz", "/readyz", "/metrics", "/v1/runs")
        }
    assert asked == {"/healthz": 200, "/readyz": 200, "/metrics": 200, "/v1/runs": 401}
