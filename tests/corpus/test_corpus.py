"""The lane `make corpus` tells every difference, and the documents list what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.corpus import comparing, document
from tests.corpus.__main__ import environments, table
from tests.corpus.cases import Case, aliases, flat, written
from tests.corpus.comparing import Result
from tests.corpus.families import CASES, torch_files
from tests.corpus.making import loaded, made

CASE = Case("torch-state-dict", "torch", torch_files.plain, torch_files.weights, torch_files.into(torch_files.Net))


def through(case: Case, tmp_path: Path) -> Result:
    """A case as the lane runs it, in this process."""
    place = tmp_path / case.name
    written(tmp_path / "made.json", made(case, place))
    (tmp_path / "made.json").rename(place / "make.json")
    result = comparing.imported(case, place, tmp_path / "root")
    if result.imported != "equal":
        return result
    result = comparing.exported(case, result, place, tmp_path / "root")
    written(place / "load.json", loaded(case, place))
    return comparing.loaded(result, place)


@pytest.fixture(autouse=True)
def no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL", "")


def test_a_case(tmp_path: Path) -> None:
    """Imported, exported and loaded; the table has its numbers."""
    result = through(CASE, tmp_path)
    assert (result.imported, result.exported, result.loaded, result.wrong) == ("equal", "--as hf", "10 equal", "")
    assert result.tensors == 10 and re.search(r"torch-state-dict +torch .*equal", table([result]))


def test_differences_are_told(tmp_path: Path) -> None:
    """One bit, a tensor too many and one too few; and a tensor that the library loads differently."""

    def other(place: Path) -> dict[str, torch.Tensor]:
        found = dict(torch_files.weights(place))
        found["model/body.0.bias"] = found["model/body.0.bias"].nextafter(torch.tensor(9.0))
        found["model/new"] = found.pop("model/embed.weight")
        return found

    result = through(CASE._replace(read=other), tmp_path)
    assert result.imported == "FAILED"
    for part in ("1 missing: model/new", "1 not in the source: model/embed.weight", "1 different: model/body.0.bias"):
        assert part in result.wrong
    changed = CASE._replace(name="loads", load_exported=lambda place: {"embed.weight": torch.zeros(1)})
    assert "10 differ after the export" in through(changed, tmp_path).wrong


def test_what_is_left_out_has_a_reason(tmp_path: Path) -> None:
    """A tensor that the import does not have is wrong without one; a second name of a tensor that it has is none."""
    case = CASE._replace(name="more", make=torch_files.tutorial, words=("--weights-only",))
    more = case._replace(read=lambda place: {**torch_files.weights(place), "extra/more": torch.ones(1)})
    assert "1 missing: extra/more" in through(more, tmp_path).wrong
    result = through(more._replace(name="said", left_out={"extra/*": "the lane says so"}), tmp_path)
    assert (result.left_out, result.wrong) == ({"extra/more": "the lane says so"}, "")
    one = torch.ones(2)
    assert aliases({"a": one, "b": one, "c": torch.ones(2)}) == {"b": "a"}
    assert list(flat({"a": [one, {"b": one}], "c": 1})) == ["a/0", "a/1/b"]


def test_a_refusal_must_be_the_recorded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its words; an import of what is listed as refused is wrong, and so is a refusal of what is not."""
    whole = Case("torch-whole-model", "torch", torch_files.whole_model)
    refused = through(whole, tmp_path)
    assert refused.imported == "refused" and refused.wrong == "" and document.as_recorded(refused).wrong == ""
    other = refused._replace(refusal={**refused.refusal, "detail": "no"})
    assert "refused with" in document.as_recorded(other).wrong
    assert "listed as refused" in through(CASE._replace(name="a", read=None), tmp_path).wrong
    assert through(whole._replace(name="b", read=lambda place: {}), tmp_path).wrong.startswith("refused: ")


@pytest.mark.parametrize("page", document.PAGES, ids=lambda page: page.name)
def test_the_list_of_refusals_is_current(page: Path) -> None:
    """The page has what is recorded, and every case that is recorded is one that must be refused."""
    (shown,) = document.BETWEEN.findall(page.read_text())
    assert shown == document.generated(page)
    assert sorted(document.recorded()) == sorted(name for name, case in CASES.items() if case.read is None)


def test_the_corpus_is_large() -> None:
    """Cases and libraries; each environment exists, and pins every package."""
    assert len(CASES) >= 60 and len({case.library for case in CASES.values()}) >= 20
    known = environments()
    assert {case.environment for case in CASES.values()} <= known.keys()
    assert all("==" in package for package in known["everyday"]["packages"])  # type: ignore[attr-defined]
