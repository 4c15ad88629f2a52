"""The release workflow: valid, pinned, with no right too many, of commands that there are; and the notes of a release."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release import notes

TOP = Path(__file__).parent.parent
FOLDER = TOP / ".github"
WORKFLOW = FOLDER / "workflows" / "release.yml"
TEXT = WORKFLOW.read_text()
READ: dict[Any, Any] = yaml.safe_load(TEXT)
JOBS: dict[str, dict[str, Any]] = READ["jobs"]
STEPS = [(name, step) for name, job in JOBS.items() for step in job["steps"]]
# What each job may do beyond reading the repository, and why it must.
RIGHTS = {
    "packages": {},
    "installed": {},
    "pypi": {"id-token"},  # trusted publishing
    "images": {"packages", "id-token", "attestations"},  # pushes, and signs
    "notes": {"contents"},  # makes the release
}
# Those that take a name for what runs in them, which a person then approves.
APPROVED = {"pypi": "pypi", "images": "ghcr"}


@pytest.mark.parametrize(
    ("path", "schema"), [(WORKFLOW, "vendor.github-workflows"), (FOLDER / "renovate.json", "vendor.renovate")]
)
def test_a_file_follows_its_schema(path: Path, schema: str) -> None:
    """The schema of the program that reads it."""
    tool = shutil.which(Path(sys.executable).with_name("check-jsonschema")) or shutil.which("check-jsonschema")
    if tool is None:
        pytest.skip("check-jsonschema is not installed (pip install check-jsonschema)")
    ended = subprocess.run([tool, "--builtin-schema", schema, path], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_file_is_looked_at() -> None:
    found = {path.relative_to(FOLDER) for path in FOLDER.rglob("*") if path.is_file()}
    assert found == {Path("workflows/release.yml"), Path("renovate.json")}


def test_every_action_is_of_one_commit() -> None:
    """With its version behind it, and of the same commit wherever it is used."""
    used = re.findall(r"^ *(?:- )?uses: (.*)$", TEXT, re.MULTILINE)
    assert used and len(used) == sum("uses" in step for _, step in STEPS)
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    assert len({line.partition("@")[0] for line in used}) == len(set(used))


def test_nothing_happens_until_it_is_switched_on() -> None:
    """Each job waits for one that waits for the variable, and only tags start any."""
    assert READ[True] == {"push": {"tags": ["v*"]}}  # `on`, which YAML takes for a boolean
    for job in JOBS.values():
        assert job["if"] == "vars.RELEASE == 'true'" if "needs" not in job else "if" not in job
    assert [name for name, job in JOBS.items() if "needs" not in job] == ["packages"]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_no_right_too_many(name: str) -> None:
    """None but what it is listed for here; the workflow itself has none. Who may publish waits for a person."""
    assert READ["permissions"] == {}
    job = JOBS[name]
    assert {right for right, level in job["permissions"].items() if level == "write"} == set(RIGHTS[name])
    assert set(job["permissions"].values()) <= {"read", "write"} and job.get("environment") == APPROVED.get(name)
    for step in job["steps"]:
        if "actions/checkout@" in step.get("uses", ""):
            assert step["with"] == {"persist-credentials": False}


def test_no_text_of_others_is_put_into_a_shell() -> None:
    """A tag's name comes in as a variable."""
    assert all("${{" not in step["run"] for _, step in STEPS if "run" in step)


def test_commands_exist() -> None:
    """Targets of the Makefile with variables that it has, modules of this repository, and files that a step has made."""
    makefile = (TOP / "Makefile").read_text()
    shell = " ".join(step["run"] for _, step in STEPS if "run" in step)
    made = re.findall(r"\bmake ([a-z]+)((?: [A-Z_]+=\S+)*)", shell)
    assert {target for target, _ in made} == {"dist", "installed"}
    for target, variables in made:
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE)
        assert all(re.search(rf"^{name} \?=", makefile, re.MULTILINE) for name in re.findall(r"(\w+)=", variables))
    for module in re.findall(r"\bpython -m (tests\S+)", shell):
        assert (TOP / f"{module.replace('.', '/')}.py").exists()
    recipe = makefile.partition("\ndist:")[2].partition("\n\n")[0]
    assert "--out-dir dist" in recipe and "--output-file build/sbom.json" in recipe and "build/notes.md" in shell


def test_images_are_the_dockerfiles() -> None:
    """Targets that there are, with every build argument that its labels need, and an SBOM and provenance."""
    dockerfile = (TOP / "deploy" / "Dockerfile").read_text()
    (build,) = [step["with"] for _, step in STEPS if "docker/build-push-action@" in step.get("uses", "")]
    assert (TOP / build["context"] / build["file"]).samefile(TOP / "deploy" / "Dockerfile")
    for one in JOBS["images"]["strategy"]["matrix"]["include"]:
        assert re.search(rf"^FROM \S+ AS {one['target']}$", dockerfile, re.MULTILINE)
    given = set(re.findall(r"^(\w+)=", build["build-args"], re.MULTILINE))
    (wanted,) = set(re.findall(r"^ARG (VERSION=.*)$", dockerfile, re.MULTILINE))
    assert given == {argument.partition("=")[0] for argument in wanted.split()}
    assert build["sbom"] is True and build["provenance"] == "mode=max"


def test_the_wheel_is_tried_on_what_is_promised() -> None:
    """The oldest Python that the project allows, to the newest that `make versions` tries."""
    tried = JOBS["installed"]["strategy"]["matrix"]["python"]
    project = (TOP / "pyproject.toml").read_text()
    assert f'requires-python = ">={tried[0]}"' in project and tried == ["3.10", "3.11", "3.12", "3.13"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Of a version 1.2.0 with notes, and a site."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "mkdocs.yml").write_text("site_url: https://docs.example.org/\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0\n\nNew.\n\n### Saving\n\n- Fast.\n\n## 1.1.0\n\nOld.\n")
    return tmp_path


def test_notes_are_the_changelogs_section(project: Path) -> None:
    assert notes("v1.2.0", project) == "New.\n\n### Saving\n\n- Fast.\n"


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("pyproject.toml", 'version = "1.3.0"\n', "the tag must be v1.3.0"),
        ("mkdocs.yml", "site_url: https://docs.holdfast.example/\n", "does not exist"),
        ("CHANGELOG.md", "## Unreleased: 1.2.0\n\nNew.\n", "Unreleased: 1.2.0"),
    ],
)
def test_a_tag_that_cannot_be_released_is_refused(project: Path, file: str, text: str, said: str) -> None:
    """Another version, no site, no notes."""
    (project / file).write_text(text)
    with pytest.raises(ValueError, match=said):
        notes("v1.2.0", project)
