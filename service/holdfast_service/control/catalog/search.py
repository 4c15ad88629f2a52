"""Search runs, steps and labels for text, among the runs that the request may see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, String, cast, select
from sqlalchemy.orm import Session

from holdfast_formats.rest.search import SearchHit
from holdfast_service.control.database.schema import CheckpointRow, RunRow

RUNS_READ_MAX = 500  # runs whose files are searched for labels
RUNS_SEARCHED_MAX = 50  # runs that match, in which steps are looked for

Labels = Callable[[str], Mapping[str, Sequence[int]]]  # of a run: its labels, and the steps that have each


class SearchQuery(NamedTuple):
    """A query: parts of a run's name, digits of a step, and parts of a label. RUN@STEP names both."""

    words: tuple[str, ...]
    step: str | None  # the text after the @, in lower case; None without one

    @classmethod
    def parse(cls, text: str) -> SearchQuery:
        run, at, step = text.strip().casefold().partition("@")
        return cls(tuple(run.split()), step.strip() if at else None)

    def names(self, run: str) -> bool:
        return all(word in run.casefold() for word in self.words)


def search(session: Session, asked: SearchQuery, limit: int, labels_of: Labels) -> list[SearchHit]:
    """At most `limit` hits: the run of exactly this name, runs whose names begin with it or contain it, checkpoints by step
    and by label.
    """
    if not asked.words and not asked.step:
        return []
    names = list(session.scalars(select(RunRow.name).order_by(RunRow.name)))
    runs = sorted((name for name in names if asked.names(name)), key=lambda name: _rank(name, asked))
    if asked.step is not None:
        # Steps of the run that is named come before newer ones of others that have its name in theirs.
        named = [name for name in runs[:1] if name.casefold() == " ".join(asked.words)]
        search_hits = _at_step(session, named, asked.step, limit) if named else []
        search_hits += _at_step(session, runs[len(named) : RUNS_SEARCHED_MAX], asked.step, limit)
        return [*search_hits, *_labelled(runs[:RUNS_READ_MAX], asked.step, labels_of)][:limit]
    hits = [SearchHit(kind="run", run=name) for name in runs[:limit]]
    if len(asked.words) == 1 and len(hits) < limit:
        word = asked.words[0]
        if word.isascii() and word.isdigit():
            hits += _at_step(session, None, word, limit - len(hits))
        hits += _labelled(names[:RUNS_READ_MAX], word, labels_of)
    elif len(hits) < limit:
        hits += _words_apart(session, names, asked.words, labels_of)
    return hits[:limit]


def _words_apart(session: Session, names: Sequence[str], words: Sequence[str], labels_of: Labels) -> list[SearchHit]:
    """`llama 1200` and `llama best`: the last word is a step or a label of runs that contain the others."""
    *parts, last = words
    runs = [name for name in names if SearchQuery(tuple(parts), None).names(name)]
    search_hits = _at_step(session, runs[:RUNS_SEARCHED_MAX], last, RUNS_SEARCHED_MAX)
    return [*search_hits, *_labelled(runs[:RUNS_READ_MAX], last, labels_of)]


def _rank(name: str, asked: SearchQuery) -> tuple[bool, bool, str]:
    text = " ".join(asked.words)
    return name.casefold() != text, not name.casefold().startswith(text), name


def _at_step(session: Session, runs: Sequence[str] | None, digits: str, limit: int) -> list[SearchHit]:
    """Checkpoints whose step contains these digits: the exact step first, then the newest; of these runs, or of all."""
    if digits == "" and runs is not None:
        return _rows(session, runs, None, limit)
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 15:
        return []
    exact = _rows(session, runs, CheckpointRow.step == int(digits), limit)
    others = _rows(session, runs, cast(CheckpointRow.step, String).contains(digits, autoescape=True), limit)
    return [*exact, *(hit for hit in others if hit not in exact)][:limit]


def _rows(session: Session, runs: Sequence[str] | None, such: ColumnElement[bool] | None, limit: int) -> list[SearchHit]:
    wanted = select(CheckpointRow.run, CheckpointRow.step).order_by(CheckpointRow.step.desc(), CheckpointRow.run)
    if runs is not None:
        wanted = wanted.where(CheckpointRow.run.in_(runs))
    if such is not None:
        wanted = wanted.where(such)
    return [SearchHit(kind="checkpoint", run=run, step=step) for run, step in session.execute(wanted.limit(limit))]


def _labelled(runs: Iterable[str], word: str, labels_of: Labels) -> list[SearchHit]:
    if len(word) < 2 and not word.isalpha():
        return []
    return [
        SearchHit(kind="checkpoint", run=run, step=step, label=label)
        for run in runs
        for label, steps in sorted(labels_of(run).items())
        if word in label.casefold()
        for step in sorted(steps, reverse=True)
    ]
