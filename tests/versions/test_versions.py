"""Every Python that is promised, and the oldest packages that pyproject.toml allows (make versions): a daemon, its ranks,
the command line and the pages. There is no torch in these environments: ranks are those of the crash lab.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.daemons import wait_until
from tests.versions.interpreters import LOCKED, TOP, installed, interpreter, run

SIZE = 1_000_003
CASES = [("3.10", "highest"), ("3.10", "lowest-direct"), ("3.12", "highest"), ("3.12", LOCKED), ("3.13", "highest")]
PAGES = ("/", "/runs/r", "/runs/r/checkpoints/2", "/events", "/nodes", "/openapi.json", "/metrics", "/v1/runs", "/v1/rounds")
pytestmark = pytest.mark.versions


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the project in it."""
    version, resolution = request.param
    found = interpreter(version)
    if found is None:
        pytest.skip(f"there is no Python {version} here: neither on the path nor in ~/.pyenv, and uv cannot bring it")
    return str(installed(found, tmp_path_factory.mktemp("versions") / f"{version}-{resolution}", resolution))


@pytest.fixture
def daemon(python: str, tmp_path: Path) -> Iterator[Path]:
    """The root that a daemon of this environment serves; afterwards it has ended in an orderly way."""
    root = tmp_path / "root"
    words = ["--root", str(root), "--socket", str(tmp_path / "s.sock"), "--listen", "127.0.0.1:0", "--loopback-open"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen([python, "-m", "holdfast_service", *words], stdout=log, stderr=log, cwd=tmp_path)

    def serves() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        return (root / ".holdfast.json").exists()

    wait_until(serves, 240)
    yield root
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_it_saves_and_shows(python: str, daemon: Path, tmp_path: Path) -> None:
    """Two ranks save twice; the step is verified, listed by the command line, and every page is there."""
    ranks = []
    for rank in range(2):
        arguments = [str(tmp_path / "s.sock"), "r", str(rank), "2", "launch", "1,2", str(SIZE)]
        command = [python, "-m", "tests.crash.rank_process", *arguments]
        ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TOP))
    for process in ranks:
        assert process.stdin is not None and process.stdout is not None
        said = [next(process.stdout).strip() for _ in range(11)]
        assert {"committed 1", "committed 2"} <= set(said), said
        process.stdin.close()
        process.stdout.close()
        assert process.wait(60) == 0
    url = json.loads((daemon / ".holdfast.json").read_text())["url"]
    holdfast = [str(Path(python).parent / "holdfast")]
    about = {"HOLDFAST_URL": url, "XDG_RUNTIME_DIR": str(tmp_path)}

    def verified() -> bool:
        found = json.loads(run([*holdfast, "ls", "r", "--json"], **about))
        return [(one["step"], one["verified"]) for one in found] == [(2, True), (1, True)]

    wait_until(verified)
    assert "intact" in run([*holdfast, "verify", "r@2", "--root", str(daemon)], **about)
    assert "r" in run([*holdfast, "top"], **about)
    for page in PAGES:
        answer = httpx.get(url + page, trust_env=False, timeout=60)
        assert answer.status_code == 200, (page, answer.text[:2000])


def test_every_module_is_imported(python: str) -> None:
    """What needs no framework can be imported: a construct that this Python lacks is found where nothing else runs it."""
    code = """
import importlib, pkgutil
import holdfast, holdfast_files, holdfast_formats, holdfast_service
left = ("holdfast.integrations", "holdfast.demo")
for top in (holdfast, holdfast_files, holdfast_formats, holdfast_service):
    for found in pkgutil.walk_packages(top.__path__, top.__name__ + ".", onerror=lambda name: None):
        if found.name.startswith(left) or found.name.endswith(("__main__", ".env")) or "._native" in found.name:
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as missing:
            assert missing.name == "torch", (found.name, missing)
"""
    run([python, "-W", "error::SyntaxWarning", "-c", code])


def test_the_lowest_python_is_the_one_that_is_promised() -> None:
    """What is run here is what pyproject.toml says."""
    project = (TOP / "pyproject.toml").read_text()
    (promised,) = re.findall(r'^requires-python = ">=([\d.]+)"$', project, re.MULTILINE)
    assert promised == min((version for version, _ in CASES), key=lambda text: tuple(map(int, text.split("."))))
