"""Runs transformers' own tests of checkpoints, from a checkout, as they are and with their Trainer attached to Holdfast.

    build/integrations/transformers/bin/python -m tests.integrations.transformers.official CHECKOUT

Prints a line for each test with both results. The checkout should be of about the version that is installed; nothing in it
is changed. Tests that need the network or a GPU fail or are skipped on both sides. Many need `parameterized` and
`sentencepiece`, which the checkout's tests expect to be installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.environments import TOP

ATTACHED, RESULTS = "HOLDFAST_OFFICIAL", "HOLDFAST_RESULTS"  # names in the environment of a run
FILES = ("tests/trainer/test_trainer_checkpointing.py", "tests/trainer/test_trainer.py")  # before 5.3 it was one file
CHOICE = "resume or resuming or save_checkpoints or load_best or best_checkpoint or best_model or saves_tokenizer"


def attached(base: type) -> type:
    """A Trainer that attaches itself, to a run for each output directory. As in transformers, plain train() begins anew."""
    from holdfast.integrations.transformers import HoldfastTrainerMixin, attach

    class Trainer(HoldfastTrainerMixin):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            place = Path(self.args.output_dir).resolve()
            attach(self, f"run-{abs(hash(str(place)))}", at=os.environ[ATTACHED])

        def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
            asked = False if resume_from_checkpoint is None else resume_from_checkpoint
            return super().train(asked, *arguments, **named)

    assert issubclass(Trainer, base)
    return Trainer


def fill_in(file: Path) -> list[str]:
    """Give transformers the names that the file imports and that it does not have, so that the rest can run."""
    missing = []
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    theirs = [node for node in imports if (node.module or "").split(".")[0] == "transformers"]
    for node in theirs:  # all of them first: importing one may replace another by a lazy one
        importlib.import_module(str(node.module))
    for node in theirs:
        module = sys.modules[str(node.module)]
        for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
            other = next((known for known in dir(module) if known.lower() == name.lower()), None)
            setattr(module, name, getattr(module, other) if other else None)  # PreTrainedConfig was PretrainedConfig
            missing.append(name)
    return missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the attached Trainer into the modules that make one."""
    if ATTACHED in os.environ:
        from transformers import Trainer

        made = attached(Trainer)
        for module in list(sys.modules.values()):
            if module.__name__.startswith("tests.trainer.") and getattr(module, "Trainer", None) is Trainer:
                module.Trainer = made  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how each test ended."""
    if report.when == "call" or report.outcome != "passed":
        line = {"test": report.nodeid.split("::", 1)[1], "outcome": report.outcome, "why": _why(report)}
        with open(os.environ[RESULTS], "a") as file:
            file.write(json.dumps(line) + "\n")


def run(checkout: Path, choice: str, root: Path | None) -> dict[str, dict[str, str]]:
    """The results of one run, by test; with a root, the Trainer is attached."""
    file = next(name for name in FILES if (checkout / name).is_file())
    with tempfile.TemporaryDirectory() as place:
        results = Path(place) / "results"
        about = os.environ | {RESULTS: str(results), "PYTHONPATH": f"{checkout}:{TOP}", "HF_HUB_OFFLINE": "1"}
        about |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | ({ATTACHED: str(root)} if root else {})
        command = [sys.executable, "-c", PROGRAM, str(TOP), file, choice]
        subprocess.run(command, cwd=checkout, env=about, check=False)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {line["test"]: line for line in lines}


# The checkout has a package `tests` too, so this file is loaded by its path.
PROGRAM = """
import importlib.util, pathlib, sys, pytest
top, file, choice = sys.argv[1:]
sys.path.remove(top) if top in sys.path else None
sys.modules["tests.integrations.environments"] = type(sys)("environments")
sys.modules["tests.integrations.environments"].TOP = pathlib.Path(top)
spec = importlib.util.spec_from_file_location("official", f"{top}/tests/integrations/transformers/official.py")
plugin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plugin)
print("names that this transformers lacks:", *plugin.fill_in(pathlib.Path(file)))
words = [file, "-q", "--noconftest", "-p", "no:cacheprovider", "-k", choice, "-c", "/dev/null", "--rootdir", "."]
sys.exit(pytest.main(words, plugins=[plugin]))
"""


def main() -> int:
    """The exit status: 1 if a test passes as it is, and fails attached."""
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.transformers.official")
    parser.add_argument("checkout", type=Path, help="a checkout of transformers, with tests/ and src/")
    parser.add_argument("-k", dest="choice", default=CHOICE, help="which tests, as pytest's -k")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    plain = run(checkout, options.choice, None)
    with tempfile.TemporaryDirectory() as place:
        ours = run(checkout, options.choice, Path(place) / "root")
    for test in sorted(plain):
        mine = ours.get(test, {"outcome": "missing", "why": ""})
        print(f"{test.split('::')[-1]:60} {plain[test]['outcome']:8} {mine['outcome']:8} {mine['why']}")
    return int(any(plain[test]["outcome"] == "passed" != ours.get(test, {}).get("outcome") for test in plain))


def _why(report: pytest.TestReport) -> str:
    text = str(report.longrepr or "").splitlines()
    found = [line.removeprefix("E ").strip() for line in text if line.startswith("E ")]
    return found[0][:160] if found else (text[-1][:160] if text and report.outcome == "skipped" else "")


if __name__ == "__main__":
    sys.exit(main())
