"""`make official` tells each test that ended in another way than its list says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.environments import TOP
from tests.integrations.official import __main__ as lane
from tests.integrations.official import outcomes
from tests.integrations.official.suites import HERE, Reason, Suite

TITLES = {
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
    "peft": "PEFT",
    "torchtitan": "torchtitan",
}
NAMES = sorted(path.stem for path in HERE.glob("*.toml"))
TESTS = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_numbers(number):
    assert number == 1, "not one"

class TestInClass:
    def test_passes(self):
        pass

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass

@pytest.fixture
def breaks():
    yield
    raise OSError("behind it")

def test_error_behind(breaks):
    pass
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, outcomes.Outcome]:
    place = tmp_path_factory.mktemp("suite")
    (place / "unit").mkdir()
    (place / "unit" / "test_some.py").write_text(TESTS)
    report = place / "report.xml"
    words = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={place}", f"--junitxml={report}"]
    subprocess.run([sys.executable, "-m", "pytest", *words, "unit"], cwd=place, check=False, stdout=subprocess.DEVNULL)
    return outcomes.read(report)


def test_outcomes(found: dict[str, outcomes.Outcome]) -> None:
    """Names have no folders; an error behind a test is a failure of it."""
    assert {test: outcome.ended for test, outcome in found.items()} == {
        "test_some.test_numbers[1]": "passed",
        "test_some.test_numbers[2]": "failed",
        "test_some.TestInClass.test_passes": "passed",
        "test_some.test_skipped": "skipped",
        "test_some.test_error_behind": "failed",
    }
    assert "not one" in found["test_some.test_numbers[2]"].why and "behind it" in found["test_some.test_error_behind"].why
    assert outcomes.summary(found) == "2 passed, 2 failed, 1 skipped"


def test_a_name_that_no_test_has_is_told(found: dict[str, outcomes.Outcome]) -> None:
    """With its parameters or without; a star stands for any text."""
    tests = {"test_some.test_numbers", "test_some.test_numbers[2]", "test_some.test_*bers[2*", "test_some.test_gone"}
    suite = Suite("some", {}, (Reason("some that are there, and one", False, frozenset(tests)),))
    assert suite.gone(found) == ["test_some.test_gone is listed, and no test has this name"]
    assert all(suite.reasons[0].covers(f"test_some.test_numbers[{number}]") for number in (1, 2))
    assert not suite.reasons[0].covers("test_some.test_skipped")


def test_a_list_is_strict(found: dict[str, outcomes.Outcome]) -> None:
    """A failure that is not listed is told, and a listed test that passes. Some fail with Holdfast only."""
    listed = Suite("some", {}, (Reason("two is not one", True, frozenset({"test_some.test_numbers[2]"})),))
    assert [line.partition(" ")[0] for line in listed.unexpected(found, with_holdfast=False)] == [
        "test_some.test_error_behind"
    ]
    ours = Reason("ours", False, frozenset({"test_some.test_error_behind", "test_some.test_skipped"}))
    both = Suite("some", {}, (*listed.reasons, ours))
    assert both.unexpected(found, with_holdfast=True) == []
    assert len(both.unexpected(found, with_holdfast=False)) == 1
    too_much = Suite("some", {}, (*both.reasons[1:], Reason("all numbers", False, frozenset({"test_some.test_numbers"}))))
    assert too_much.unexpected(found, with_holdfast=True) == [
        "test_some.test_numbers[1] passed, and is listed as one that fails: all numbers"
    ]


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ((), "test_tiny.test_fails failed"),
        (("test_tiny.test_fails", "test_tiny.test_passes"), "test_tiny.test_passes passed, and is listed as one that fails"),
        (("test_tiny.test_fails", "test_tiny.test_gone"), "test_tiny.test_gone is listed, and no test has this name"),
        (("test_tiny.test_fails",), ""),
    ],
)
def test_the_lane_fails_where_its_list_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], listed: tuple[str, ...], says: str
) -> None:
    """In either direction, by its exit status and by the test's name; with a list that is right it passes."""
    (tmp_path / "test_tiny.py").write_text("def test_passes(): pass\ndef test_fails(): assert False\n")
    reasons = (Reason("as it is", True, frozenset(listed)),) if listed else ()
    suite = Suite("tiny", {"files": ["test_tiny.py"], "words": ["-c", "/dev/null"]}, reasons)
    assert lane.tried(suite, Path(sys.executable), tmp_path, "alone", []) == int(bool(says))
    unexpected = [line for line in capsys.readouterr().out.splitlines() if "unexpected: " in line]
    assert len(unexpected) == bool(says) and says in "".join(unexpected)


def test_the_lane_fails_where_no_test_was_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tests that cannot be started have not passed."""
    suite = Suite("tiny", {"files": [], "words": ["--no-such-option"]}, ())
    assert lane.tried(suite, Path(sys.executable), tmp_path, "alone", []) == 1
    assert "no report" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_lists_can_be_read(name: str) -> None:
    """Every failure has a reason, and no test has two; the plugin of each suite exists."""
    suite = Suite.read(name)
    assert suite.about["files"] and all(len(reason.reason) > 20 and reason.tests for reason in suite.reasons)
    assert (HERE / "plugins" / f"holdfast_in_{name}.py").is_file()


def test_sources(tmp_path: Path) -> None:
    """A checkout is taken from SOURCES; without one, a package that contains no tests is skipped."""
    (tmp_path / "lightning").mkdir()
    suite = Suite.read("lightning")
    assert suite.source("2.6.5", tmp_path, tmp_path / "build") == tmp_path / "lightning"
    assert suite.source("2.6.5", None, tmp_path / "build") is None
    assert suite.version(["torch==2.13.0", "lightning==2.6.6"]) == "2.6.5"
    assert Suite("lightning", {}, ()).version(["torch==2.13.0", "lightning==2.6.6"]) == "2.6.6"


@pytest.mark.parametrize("page", ["official.md", "official.zh-CN.md"])
@pytest.mark.parametrize("name", NAMES)
def test_the_documents_have_the_lists(name: str, page: str) -> None:
    """Each failure with its reason, and none that is not expected any more."""
    suite, text = Suite.read(name), (TOP / "docs" / "integrations" / page).read_text()
    told = [line for line in text.partition(f"\n## {TITLES[name]}\n")[2].partition("\n## ")[0].splitlines() if "| `" in line]
    listed = [f"| {', '.join(f'`{test}`' for test in sorted(one.tests))} | {_where(one, page)} |" for one in suite.reasons]
    assert [line.rpartition(" | ")[0] + " |" for line in told] == listed
    if page == "official.md":
        assert [line.rpartition(" | ")[2].removesuffix(" |") for line in told] == [one.reason for one in suite.reasons]


def _where(one: Reason, page: str) -> str:
    english = "alone too" if one.alone else "with Holdfast"
    return (
        english if page == "official.md" else {"alone too": "单独运行时也失败", "with Holdfast": "使用 Holdfast 时"}[english]
    )
