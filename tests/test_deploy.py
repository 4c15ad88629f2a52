"""The deployment files: well formed, and in agreement with the program they start."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast_files.objects.address import BucketAddress
from holdfast_service.api.access.logins import SECRET_HEADER, LoginsFile
from holdfast_service.api.access.request_head import IDENTITY
from holdfast_service.config import default_socket, parse
from holdfast_service.daemon.arena.callers import prepare_directory
from tests.compose import follows_the_schema
from tests.manifests import BASES, config, containers, is_daemon, sources, templates

TOP = Path(__file__).parent.parent
PROJECT = (TOP / "pyproject.toml").read_text()  # tomllib needs Python 3.11, we support 3.10
DOCKERFILE = (TOP / "deploy" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((TOP / "docker-compose.yml").read_text())
    return loaded


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(TOP / "deploy" / "holdfast.service")
    return parser


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """The daemon's flags, as its help lists them."""
    shown = subprocess.run(
        [sys.executable, "-m", "holdfast_service", "--help"], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"--[a-z][a-z-]*", shown))


def stage(name: str) -> str:
    """The instructions of one stage of the Dockerfile."""
    found = re.search(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def words(instruction: str, text: str) -> list[str]:
    """The JSON list behind an instruction."""
    found = re.search(rf"^{instruction} (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    listed: list[str] = yaml.safe_load(found[1])
    return listed


def test_the_compose_file_has_a_daemon_and_a_trainer_that_share_socket_and_data(compose: dict[str, Any]) -> None:
    """The trainer sees the socket's directory and reads the data where the daemon says it is."""
    daemon, trainer = compose["services"]["holdfast"], compose["services"]["trainer"]
    assert set(daemon["volumes"]) == {"data:/data", "socket:/run/holdfast"}
    assert set(trainer["volumes"]) == {"data:/data:ro", "socket:/run/holdfast"}
    assert {"data", "socket"} <= set(compose["volumes"])
    assert (
        "ipc" not in {*daemon, *trainer} and trainer["shm_size"]
    )  # a recreated daemon must not keep a trainer from starting
    assert daemon["user"] == trainer["user"]
    assert trainer["depends_on"]["holdfast"]["condition"] == "service_healthy"


def test_the_compose_file_says_nothing_that_either_compose_refuses(compose: dict[str, Any]) -> None:
    """No `version`, which compose v2 calls obsolete; and ports as text, which either reads alike."""
    assert set(compose) == {"services", "volumes", "x-hardened"}
    for service in compose["services"].values():
        assert all(isinstance(port, str) for port in service.get("ports", []))


def test_the_compose_file_builds_stages_that_exist(compose: dict[str, Any]) -> None:
    """Each service names a file and a stage that are there."""
    for service in compose["services"].values():
        assert (TOP / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert stage(service["build"]["target"])


def test_every_flag_that_starts_the_daemon_exists(
    compose: dict[str, Any], unit: configparser.ConfigParser, known_flags: set[str]
) -> None:
    """Image, Compose file and unit use no flag that the daemon lacks, and their values are accepted."""
    lines = [
        compose["services"]["holdfast"]["command"],
        words("CMD", stage("service")),
        unit["Service"]["ExecStart"].partition(" -m holdfast_service ")[2].split(),
    ]
    for line in lines:
        assert {word for word in line if word.startswith("--")} <= known_flags
        assert parse(line, {}).listen is not None


def test_the_login_proxy_sends_what_the_daemon_reads(known_flags: set[str]) -> None:
    """The headers of the example are those of the contract, the secret among them; its file of logins is accepted; and only
    the proxy's network is believed, in which nobody else is.
    """
    place = TOP / "deploy" / "compose" / "logins"
    compose = yaml.safe_load((place / "compose.yml").read_text())
    command = compose["services"]["holdfast"]["command"]
    assert {word for word in command if word.startswith("--")} <= known_flags
    config = parse(command, {})
    assert config.logins is not None and config.behind_tls
    read = LoginsFile.model_validate_json((place / "logins.json").read_text())
    (subnet,) = compose["networks"]["behind"]["ipam"]["config"]
    assert read.proxies == [subnet["subnet"]] and compose["networks"]["behind"]["internal"]
    (given,) = compose["services"]["holdfast"]["secrets"]
    assert read.secret_file.name == given["source"] and compose["services"]["holdfast"]["user"].startswith(given["uid"])
    assert "ports" not in compose["services"]["holdfast"] and compose["services"]["holdfast"]["networks"] == ["behind"]
    proxy = yaml.safe_load((place / "oauth2-proxy.yaml").read_text())
    sent = {header["name"].lower() for header in proxy["injectRequestHeaders"]}
    assert sent == {SECRET_HEADER, *(f"{read.headers}-{name}".lower() for name in IDENTITY)}
    assert not any(header.get("preserveRequestValue") for header in proxy["injectRequestHeaders"])
    (provider,) = proxy["providers"]  # of claims that are not named none is read, not even the audience
    assert provider["oidcConfig"].keys() == {"issuerURL", "audienceClaims", "groupsClaim", "emailClaim", "userIDClaim"}
    assert set(re.findall(r"^([A-Z0-9_]+)=", (place / "example.env").read_text(), re.MULTILINE)) == set(
        re.findall(r"\$\{([A-Z0-9_]+)", (place / "compose.yml").read_text())
    ) | {one["environment"] for one in compose["secrets"].values()}


def test_the_login_proxys_compose_file_follows_its_schema() -> None:
    """The Compose specification's own; docker-compose 1 knows no secrets of the environment."""
    follows_the_schema(TOP / "deploy" / "compose" / "logins" / "compose.yml")


@pytest.mark.parametrize("name", BASES)
def test_the_socket_of_a_pod_is_where_the_daemon_takes_it(name: str, tmp_path: Path) -> None:
    """Kubernetes lets everybody write to an emptyDir, and the daemon refuses such a directory unless it is sticky, as those
    in memory are.
    """
    found = 0
    for pod in [template["spec"] for document in sources(name) for template in templates(document)]:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in filter(is_daemon, containers(pod)):
            socket = config(container).socket
            (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == str(socket.parent)]
            made = volumes[mount["name"]].get("emptyDir")
            if made is not None:
                directory = tmp_path / str(found)
                directory.mkdir()
                directory.chmod(0o1777 if made.get("medium") == "Memory" else 0o777)
                prepare_directory(directory / socket.name)
                found += 1
    assert found == 1


def test_a_sidecar_is_a_node_of_its_own_and_does_not_wait_for_the_catalog() -> None:
    """Two pods of one machine have two names, and a trainer starts although PostgreSQL is away."""
    (job,) = [one for one in sources("sidecar") if one["kind"] == "Job"]
    (daemon,) = job["spec"]["template"]["spec"]["initContainers"]
    (node,) = [one for one in daemon["env"] if one["name"] == "HOLDFAST_NODE"]
    assert node["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    for probe in ("startupProbe", "livenessProbe"):
        assert daemon[probe]["httpGet"]["path"] == "/healthz"


def test_no_named_tuple_is_generic() -> None:
    """Python 3.10, which is promised, refuses such a class when it is imported; `make versions` runs all the rest there."""
    found = [path for room in ("client", "formats", "service") for path in (TOP / room).rglob("*.py")]
    assert [path for path in found if re.search(r"^class \w+\(NamedTuple, ", path.read_text(), re.MULTILINE)] == []
    assert len(found) > 500


def test_the_trainers_flags_exist(compose: dict[str, Any]) -> None:
    """The example trainer is started with flags of the demo's trainer, and with the daemon's socket."""
    source = (TOP / "client" / "holdfast" / "demo" / "train.py").read_text()
    daemon = parse(compose["services"]["holdfast"]["command"], {})
    for line in (compose["services"]["trainer"]["command"], words("CMD", stage("trainer"))):
        assert all(f'"{word}"' in source for word in line if word.startswith("--"))
        assert line[line.index("--socket") + 1] == str(daemon.socket)


def test_the_images_run_as_the_user_that_compose_names(compose: dict[str, Any]) -> None:
    """Neither image runs as root, and both as the user number that owns the volumes."""
    number = compose["services"]["holdfast"]["user"].partition(":")[0]
    assert f"useradd --uid {number} " in stage("user")
    for name in ("service", "trainer"):
        assert "\nUSER holdfast\n" in stage(name)


def test_the_daemons_image_has_no_torch_and_asks_after_its_health() -> None:
    """It installs the service's needs alone, and its health check asks the port it listens at."""
    text = stage("service")
    assert "torch" not in text + stage("packages")
    listen = parse(words("CMD", text), {}).listen
    assert listen is not None
    assert f"http://127.0.0.1:{listen[1]}/healthz" in text


def test_commands_in_the_image_find_its_socket() -> None:
    """Without being told: the image's runtime directory is where the socket of its command lies."""
    (directory,) = re.findall(r"^ENV .*\bXDG_RUNTIME_DIR=(\S+)$", stage("user"), re.MULTILINE)
    for name in ("service", "trainer"):
        line = words("CMD", stage(name))
        assert line[line.index("--socket") + 1] == str(default_socket({"XDG_RUNTIME_DIR": directory}))


@pytest.mark.parametrize("name", ["service", "trainer"])
def test_an_image_says_what_it_is(name: str) -> None:
    """Its labels are those of the OCI specification; version, revision and source are the builder's to give."""
    labels = dict(re.findall(r"\borg\.opencontainers\.image\.(\w+)=(\"[^\"]+\"|\S+)", stage(name)))
    given = {label: text for label, text in labels.items() if text.startswith("$")}
    assert labels.keys() == {"title", "description", "licenses", "version", "revision", "source"}
    assert given == {label: f"${label.upper()}" for label in ("version", "revision", "source")}
    (arguments,) = re.findall(r"^ARG (VERSION=.*)$", stage(name), re.MULTILINE)
    assert [argument.partition("=")[0] for argument in arguments.split()] == ["VERSION", "REVISION", "SOURCE"]
    assert f'\nlicense = "{labels["licenses"]}"\n' in PROJECT


def test_the_base_is_a_build_argument() -> None:
    """Each stage is built from BASE, which any Python will do for, or from another stage. The default has a digest."""
    bases = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.MULTILINE)
    stages = {name for _, name in bases}
    assert all(base == "${BASE}" or base in stages for base, _ in bases)
    assert re.search(r"^ARG BASE=python:3\.\d+-slim@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)


def test_what_the_image_copies_is_sent_to_the_build() -> None:
    """.dockerignore lets through what the Dockerfile copies, and the packages are complete with it."""
    sent = set(re.findall(r"^!(\S+)$", (TOP / ".dockerignore").read_text(), re.MULTILINE))
    copied = {word for line in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    packages = re.search(r"^packages = (\[.*\])$", PROJECT, re.MULTILINE)
    readme = re.search(r'^readme = "(.*)"$', PROJECT, re.MULTILINE)
    assert packages and readme
    rooms = {package.partition("/")[0] for package in yaml.safe_load(packages[1])}
    assert copied == sent
    assert rooms | {"pyproject.toml", readme[1]} <= copied
    assert all((TOP / name).exists() for name in copied)


def test_the_unit_gives_the_daemon_its_directories(unit: configparser.ConfigParser) -> None:
    """Root and socket lie in the directories that systemd makes for the service."""
    service = unit["Service"]
    line = service["ExecStart"].partition(" -m holdfast_service ")[2].split()
    config = parse(line, {})
    assert config.root.is_relative_to(Path("/var/lib") / service["StateDirectory"])
    assert config.socket.parent == Path("/run") / service["RuntimeDirectory"]
    assert service["User"] != "root"


def test_the_makefile_and_the_project_agree_on_torch() -> None:
    """The version that make installs first is the one that the development extra asks for."""
    (wanted,) = re.findall(r'"(torch==[^"]+)"', PROJECT)
    assert f" {wanted}\n" in (TOP / "Makefile").read_text()


def test_ci_runs_what_people_run() -> None:
    """.ci/run is executable and calls targets of the Makefile, nothing else."""
    script = TOP / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    called = [line for line in script.read_text().splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert called == ["make --jobs 4 check collected tools", "make test"]


AWS = {"AWS_REGION", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}


@pytest.mark.parametrize("name", ["tier", "bucket"])
def test_the_compose_files_of_buckets(name: str, compose: dict[str, Any]) -> None:
    """They add a tier, or another root and nothing else; keys are in no file, but come from the shell."""
    file = TOP / "deploy" / "compose" / f"{name}.yml"
    follows_the_schema(file)
    services = yaml.safe_load(file.read_text())["services"]
    for service in services.values():
        assert {key for key, value in service["environment"].items() if value is None} == AWS
    if name == "tier":
        assert services.keys() == {"holdfast"}
        (value,) = re.findall(r"^#   echo \"HOLDFAST_TIER=(\S+)\"", file.read_text(), re.MULTILINE)
        ((tier, place),) = parse(["--root", "/data"], {"HOLDFAST_TIER": value}).tier
        assert tier == "cloud" and isinstance(place, BucketAddress)
        return
    words_of, usual = services["holdfast"]["command"], compose["services"]["holdfast"]["command"]
    assert words_of[:4] == ["--root", "s3://models/team/checkpoints", "--state", "/data"] and words_of[4:] == usual[2:]
    assert parse(words_of, {}).place.directory == Path("/data") and services.keys() == {"holdfast", "trainer"}
