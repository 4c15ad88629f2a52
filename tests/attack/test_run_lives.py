"""Whole runs deleted, brought back, renamed, archived, noted and marked by several people at once, while trainers save to
runs of the same names and the daemon is killed. Nothing committed is lost, and catalog and directories agree in the end.

`--attack-s` says for how long.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from safetensors import safe_open

from holdfast_formats import naming
from tests.attack import life_rank
from tests.daemons import RunningDaemon, free_port, wait_until
from tests.forked import Forked

DEFAULT_S, MAX_S = 40.0, 180.0
PEOPLE, TRAINERS = 3, 2
LIFE_S = (3.0, 8.0)
# Allowed, and names of our own files and directories, of others' devices, or as long as one may be.
NAMES = (*"aA0", "a..", "checkpoints", "trash", "run.json", "deleted.json", "COMMIT", "con", "step-00000001", "x" * 128)
FINE_5XX = {500, 503, 504, 507}  # 500: damage, which there is none of, so its code is looked at

pytestmark = pytest.mark.attack


def act(client: httpx.Client, luck: random.Random) -> httpx.Response:
    """Something that somebody does to a run."""
    run, other = luck.sample(NAMES, 2)
    at = f"/v1/runs/{run}"
    choices = (
        ("DELETE", at, {"marked": luck.choice(("true", "false"))}, None),
        ("POST", f"{at}/undelete", {}, None),
        ("POST", f"{at}/rename", {"to": other}, None),
        ("PATCH", at, {}, {"archived": luck.random() < 0.5}),
        ("PATCH", at, {}, {"owner": f"o{luck.random()}", "notes": "n\x1b[2J\u202e"}),
        ("PATCH", at, {}, {"acknowledged": True}),
        ("PUT", f"{at}/checkpoints/1/pin", {}, None),
        ("DELETE", f"{at}/checkpoints/1/pin", {}, None),
        ("PUT", f"{at}/checkpoints/2/labels/good", {}, None),
        ("DELETE", f"{at}/checkpoints/2/labels/good", {}, None),
        ("POST", "/v1/jobs", {}, {"kind": "verify", "run": run, "step": 1}),
        ("GET", "/v1/trash", {}, None),
        ("GET", "/v1/summaries", {}, None),
        ("GET", at, {}, None),
    )
    weights = (3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    method, path, params, body = luck.choices(choices, weights)[0]
    return client.request(method, path, params=params, json=body)


class Crowd:
    """People who do such things at the same time, and what came of it."""

    def __init__(self, url: str) -> None:
        self.url, self.counts, self.wrong = url, Counter[str](), list[str]()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(PEOPLE)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        luck = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            while not self._over.is_set():
                try:
                    answer = act(client, luck)
                except httpx.HTTPError:  # the daemon is being started
                    self._over.wait(0.2)
                    continue
                words = [word for word in answer.url.path.split("/") if word not in NAMES]
                what = f"{answer.request.method} {'/'.join(words)} {answer.status_code}"
                self.counts[what] += 1
                code = answer.json().get("code") if answer.status_code >= 400 else None
                if answer.status_code >= 500 and (answer.status_code not in FINE_5XX or code == "internal-error"):
                    self.wrong.append(f"{answer.request.url}: {answer.text[:300]}")


def committed(trainers: list[Forked]) -> tuple[set[tuple[int, int]], Counter[str]]:
    """Which numbers trainers were told are committed, and what else they said."""
    found, said = set[tuple[int, int]](), Counter[str]()
    for trainer in trainers:
        assert trainer.stdout is not None
        with trainer.stdout as lines:
            for text in lines:
                word, *rest = text.split()
                said[" ".join([word, *rest]) if word != "committed" else word] += 1
                if word == "committed":
                    found.add((int(rest[0]), int(rest[1])))
    return found, said


def kept(root: Path) -> Counter[tuple[int, int]]:
    """The numbers in all checkpoints below the root, those in the trash among them."""
    found = Counter[tuple[int, int]]()
    for path in root.glob(f"**/{naming.CHECKPOINTS}/step-*/model.safetensors"):
        if naming.STAGING in path.parts[len(root.parts) + 1 : -1]:
            continue
        with safe_open(path, "numpy") as file:
            line, step = file.get_tensor("numbers").tolist()
        found[line, step] += 1
    return found


def test_whole_runs_while_everything_goes_on(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seconds = min(pytestconfig.getoption("--attack-s") or DEFAULT_S, MAX_S)
    root, listen, luck = tmp_path / "root", f"127.0.0.1:{free_port()}", random.Random(1)
    daemon = RunningDaemon(root, listen=listen)
    crowd = Crowd(daemon.url)
    trainers = [
        Forked(["-m", life_rank.__name__, daemon.socket, seed, seconds, *NAMES[seed::TRAINERS]]) for seed in range(TRAINERS)
    ]
    told: list[tuple[set[tuple[int, int]], Counter[str]]] = []
    reading = threading.Thread(target=lambda: told.append(committed(trainers)))
    reading.start()
    until, deaths = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        time.sleep(luck.uniform(*LIFE_S))
        daemon.kill()
        deaths += 1
        daemon = RunningDaemon(root, listen=listen)
    reading.join(300)
    crowd.end()
    for trainer in trainers:
        assert trainer.wait(60) == 0
    numbers, said = told[0]
    print(f"\n{deaths} deaths; {len(numbers)} commits; trainers: {dict(said)}; people: {dict(sorted(crowd.counts.items()))}")
    with httpx.Client(base_url=daemon.url, timeout=60, trust_env=False) as client:
        wait_until(lambda: not client.get("/v1/nodes").json()["items"][0]["busy"], 120)
        wait_until(lambda: client.get("/v1/catalog/check").json()["items"] == [], 120)
        damaged = [
            made
            for run in client.get("/v1/runs", params={"limit": 1000}).json()["items"]
            for made in client.get(f"/v1/runs/{run['name']}/checkpoints", params={"limit": 1000}).json()["items"]
            if made["damage"] is not None
        ]
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text() and not crowd.wrong, crowd.wrong
    assert damaged == [] and not [word for word in said if word.startswith("wrong")], said
    there = kept(root)
    assert numbers <= there.keys(), f"lost: {sorted(numbers - there.keys())}"
    assert numbers and deaths
