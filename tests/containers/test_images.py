"""The image and the Compose files with a real engine (make engine): built, healthy, and a save that crosses containers; a
watcher over two daemons; and Holdfast behind a login proxy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.projects import ASK_OWN, HEALTHY_S, SOCKET, TOP, Project, inside, project
from tests.daemons import wait_until
from tests.engine import Engine

EXAMPLES = TOP / "deploy" / "compose"
# What a daemon that is reached by name answers, with its status.
ASK = """
import httpx, json, sys
answer = httpx.get(sys.argv[1], headers=json.loads(sys.argv[2]), trust_env=False)
print(json.dumps([answer.status_code, answer.text]))
"""
pytestmark = pytest.mark.engine


def test_image_is_small_and_nobodys_root(made: Engine) -> None:
    """No torch and no pip in it, a user of its own, a health check, and less than 120 MB over its base."""
    about = json.loads(made.docker("image", "inspect", "holdfast"))[0]
    assert about["Config"]["User"] == "holdfast"
    assert about["Config"]["Healthcheck"]["Test"][0] == "CMD"
    layers = made.docker("history", "--format", "{{.Size}} {{.CreatedBy}}", "--human=false", "holdfast").splitlines()
    added = sum(int(line.split()[0]) for line in layers if "COPY" in line or "useradd" in line)
    assert 0 < added < 120e6, layers
    listed = made.docker("run", "--rm", "--entrypoint", "ls", "holdfast", "/opt/holdfast/lib").split()
    packages = made.docker(
        "run", "--rm", "--entrypoint", "ls", "holdfast", f"/opt/holdfast/lib/{listed[0]}/site-packages"
    ).split()
    assert "holdfast" in packages and not {"torch", "pip"} & set(packages)


def test_daemon_serves_as_its_user(made: Engine, up: str) -> None:
    """It is healthy, its process is user 10001, and commands in the container find the daemon, its socket and its root."""
    assert inside(made, up, "id", "-u").strip() == "10001"
    found = {
        one["name"]: (one["status"], one["what"]) for one in json.loads(inside(made, up, "holdfast", "doctor", "--json"))
    }
    assert {found[name][0] for name in ("root", "socket", "service", "catalog")} == {"ok"}, found
    assert found.get("copies", ("ok",))[0] == "ok", "the routines in C were not built"  # only x86-64 has them
    assert found["root"][1] == "/data is writable" and SOCKET in found["socket"][1]
    nodes = json.loads(inside(made, up, "holdfast", "top", "--json"))
    assert nodes == []


def test_save_crosses_containers(made: Engine, up: str, run: Project) -> None:
    """A rank in another container gets its memory over the shared socket; what it sealed is committed and verified."""
    said = run.run("run", "--rm", "trainer").splitlines()
    assert [line for line in said if line.startswith("committed")] == ["committed 1", "committed 2", "committed 3"]
    assert "waited" in inside(made, up, "sh", "-c", "holdfast wait --idle && echo waited")
    listed = json.loads(inside(made, up, "holdfast", "ls", "demo", "--json"))
    assert [(found["step"], found["verified"]) for found in listed] == [(3, True), (2, True), (1, True)]
    again = run.run("run", "--rm", "trainer", "launch-2").splitlines()
    assert "restored 3" in again  # read through the volume, every byte compared


def test_trainer_has_shared_memory_of_its_own(made: Engine, up: str, run: Project) -> None:
    """It has a /dev/shm of its own, of the size that the Compose file gives it, and no namespace of the daemon's."""
    shown = run.run("run", "--rm", "--entrypoint", "sh", "trainer", "-c", "df -k /dev/shm | tail -1")
    assert str(2**20) in shown


def test_orderly_end(made: Engine, up: str) -> None:
    """SIGTERM ends it within the grace period, with nothing left to kill."""
    made.docker("stop", "--time", "60", up)
    assert made.docker("inspect", "--format", "{{.State.ExitCode}}", up).strip() == "0"


def test_a_watcher_says_which_daemon_does_not_answer(made: Engine, tmp_path: Path) -> None:
    """As the head of its file has it: a token of each daemon, then the watcher, which Prometheus may ask, as the others."""
    compose = yaml.safe_load((EXAMPLES / "watcher.yml").read_text())
    del compose["services"]["prometheus"]
    watcher, given = compose["services"]["watcher"], tmp_path / "watcher"
    watcher["volumes"] = [volume.replace("../../watcher", str(given)) for volume in watcher["volumes"]]
    daemons = {f"daemon-{number}:8420": f"daemon-{number}" for number in (1, 2)}
    with project(made, "holdfast-test-watcher", tmp_path, compose) as examples:
        examples.up(*daemons.values())
        given.mkdir()
        create = ("holdfast", "token", "create", "watcher")
        tokens = {at: examples.run("exec", "-T", name, *create) for at, name in daemons.items()}
        (given / "tokens").write_text("".join(f"http://{at} {token}" for at, token in tokens.items()))
        (given / "notify.toml").write_text('[[target]]\nname = "me"\nkind = "webhook"\nurl = "http://receiver.example/"\n')
        for path in given.iterdir():
            path.chmod(0o600)
        owned = ("--user", "0", "--entrypoint", "chown", "--volume", f"{given}:/given", "holdfast")
        made.docker("run", "--rm", *owned, "-R", "10001:10001", "/given")
        examples.up("watcher")

        def reachable() -> dict[str, bool]:
            said = examples.run("exec", "-T", "watcher", "python", "-c", ASK_OWN, "/v1/watched/daemons")
            return {one["name"]: one["reachable"] for one in json.loads(said)["items"]}

        wait_until(lambda: reachable() == dict.fromkeys(daemons, True), HEALTHY_S)
        (target,) = json.loads(examples.run("exec", "-T", "watcher", "holdfast", "notify", "ls", "--json"))
        assert target["name"] == "me"
        for at in (*daemons, "watcher:8420"):
            asked = ("exec", "-T", "watcher", "python", "-c", ASK, f"http://{at}/metrics", "{}")
            status, text = json.loads(examples.run(*asked))
            assert status == 200 and "holdfast_" in text
        examples.run("stop", "daemon-2")
        wait_until(lambda: reachable() == {"daemon-1:8420": True, "daemon-2:8420": False}, HEALTHY_S)


def test_only_the_login_proxy_says_who_is_there(made: Engine, tmp_path: Path) -> None:
    """A container in the proxy's network, with the secret: the person's groups count. Without it nobody is believed."""
    place, secret = EXAMPLES / "logins", "4e" * 32
    compose = yaml.safe_load((place / "compose.yml").read_text())
    daemon = compose["services"]["holdfast"]
    daemon["volumes"] = [volume.replace("./", f"{place}/") for volume in daemon["volumes"]]
    daemon["secrets"] = [one["source"] for one in daemon["secrets"]]  # docker-compose 1 knows only secrets in files
    (tmp_path / "secret").write_text(secret)
    (tmp_path / "secret").chmod(0o644)
    proxy = {"image": "holdfast", "entrypoint": ["python", "-c", ASK], "networks": ["behind"]}
    compose["services"] = {"holdfast": daemon, "proxy": proxy}
    compose["secrets"] = {name: {"file": str(tmp_path / "secret")} for name in daemon["secrets"]}
    with project(made, "holdfast-test-logins", tmp_path, compose) as examples:
        examples.up("holdfast")

        def whoami(**said: str) -> tuple[int, dict[str, Any]]:
            headers = {"Host": "holdfast.example", **{name.replace("_", "-"): value for name, value in said.items()}}
            url = "http://holdfast:8420/v1/whoami"
            status, text = json.loads(examples.run("run", "--rm", "-T", "proxy", url, json.dumps(headers)))
            return status, json.loads(text)

        person = {"X_Forwarded_User": "ada", "X_Forwarded_Email": "ada@example.com", "X_Forwarded_Groups": "staff,team-a"}
        assert whoami()[0] == 401 and whoami(**person)[0] == 403
        status, found = whoami(**person, X_Holdfast_Proxy_Secret=secret)
        assert (status, found["name"], found["by"]) == (200, "ada@example.com", "login")
        assert {(grant["scope"], grant["runs"]) for grant in found["grants"]} == {("write", "team-a-*"), ("read", "*")}
