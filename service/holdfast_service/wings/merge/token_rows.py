"""Embeddings and heads whose rows are put in the order of another vocabulary, row by row, as mergekit does.

A token's row is the model's own. If it has none: the base's, or that of the only model that has the token, or else the mean
of all that have it. The rows behind the last token are the mean of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.digest import digest
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.merge.scanning import BLOCK_ELEMENTS
from holdfast_service.wings.merge.settings import layer_of
from holdfast_service.wings.merge.stacking import Model, StackedPart
from holdfast_service.wings.merge.vocabulary import ModelTokens, TokenSource

_OF_TOKENS = re.compile(
    r"(?:^|\.)(?:embed_tokens|tok_embeddings|embed_in|embed_out|wte|word_embeddings|lm_head|output_layer)\.(?:weight|bias)$"
    r"|(?:^|\.)(?:lm_head\.(?:decoder|linear)|vocab_projector)\.(?:weight|bias)$"
    r"|^(?:shared|output|backbone\.embeddings)\.weight$|^cls\.predictions\.(?:decoder\.weight|bias)$"
)
_NONE, _MEAN = -1, -2  # instead of a row of the model: given apart, or the mean of all others
Place = tuple[int, int]  # a row of a model, by its number


def is_of_tokens(name: str) -> bool:
    """Whether a tensor has a row for each token."""
    return _OF_TOKENS.search(name) is not None


class VocabularyRows:
    """A tensor's rows in another order, in F32. `apart` are rows that are means of others, of several tensors."""

    def __init__(
        self, inputs: tuple[ForeignTensor, ...], own: int, rows: NDArray[np.int64], apart: Mapping[int, Sequence[Place]]
    ) -> None:
        """`own`: the number of the input whose rows `rows` are."""
        self.inputs, self._own, self._rows, self._apart = inputs, own, rows, apart
        self._mean: NDArray[np.float32] | None = None

    @property
    def terms(self) -> str:
        return digest(self._rows.tobytes() + repr((self._own, sorted(self._apart.items()))).encode())

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        if (self._rows[box.offset[0] : box.offset[0] + box.shape[0]] == _MEAN).any() and self._mean is None:
            self._mean = self._find_mean(fetch)
        return self._decoded(box, fetch)

    def _decoded(self, box: Box, fetch: FetchBox) -> NDArray[np.float32]:
        made = np.zeros(box.shape, np.float32)
        columns = tuple(slice(at, at + size) for at, size in zip(box.offset[1:], box.shape[1:], strict=True))
        for at, source, count in self._runs(box.offset[0], box.shape[0]):
            if source == _MEAN:
                assert self._mean is not None
                made[at : at + count] = self._mean[columns]
            elif source == _NONE:
                for row in range(at, at + count):
                    made[row] = self._mixed(box, row, fetch)
            else:
                wanted = Box((source, *box.offset[1:]), (count, *box.shape[1:]))
                made[at : at + count] = fetch(self.inputs[self._own], wanted).astype(np.float32)
        return made

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Stretches of rows that follow each other in the model: the place, the first row there, and how many."""
        rows = self._rows[first : first + count]
        steps = np.where(rows[1:] < 0, rows[1:] == rows[:-1], (rows[1:] == rows[:-1] + 1) & (rows[:-1] >= 0))
        starts = [0, *(np.flatnonzero(~steps) + 1).tolist()]
        for at, end in zip(starts, [*starts[1:], count], strict=True):
            yield at, int(rows[at]), end - at

    def _mixed(self, box: Box, row: int, fetch: FetchBox) -> NDArray[np.float32]:
        places = self._apart.get(box.offset[0] + row, ())
        total = np.zeros(box.shape[1:], np.float32)
        for number, source in places:
            wanted = Box((source, *box.offset[1:]), (1, *box.shape[1:]))
            total = total + fetch(self.inputs[number], wanted).astype(np.float32)[0]
        return total / np.float32(len(places)) if len(places) > 1 else total

    def _find_mean(self, fetch: FetchBox) -> NDArray[np.float32]:
        shape = self.inputs[self._own].spec.shape[1:]
        total, count = np.zeros(shape), int(np.count_nonzero(self._rows != _MEAN))
        step = max(BLOCK_ELEMENTS // max(int(np.prod(shape)), 1), 1)
        for first in range(0, count, step):
            some = min(step, count - first)
            total += self._decoded(Box((first, *(0 for _ in shape)), (some, *shape)), fetch).sum(axis=0, dtype=np.float64)
        return (total / max(count, 1)).astype(np.float32)


class Alignment(NamedTuple):
    """How rows are put in the order of the result's tokens."""

    result: ModelTokens
    of_models: Mapping[str, ModelTokens]
    sources: Mapping[str, TokenSource]  # of tokens that the recipe names
    base: str | None
    multiple: int

    @property
    def rows(self) -> int:
        """The rows of the result."""
        count = max(self.result.numbers.values()) + 1
        return -(-count // self.multiple) * self.multiple

    def aligned(self, part: StackedPart) -> StackedPart:
        """A part whose models' tensors with a row for each token have the result's rows.

        Raises `StateMismatch` for a tensor that seems to have such rows under an unknown name; `InvalidRequest` by line
        for a source that the part lacks.
        """
        names = [name for name in part.models[0].tensors if is_of_tokens(name)]
        models = list(part.models)
        for model in models:
            self._refuse_unknown(model)
        for name in names:
            have = [number for number, model in enumerate(models) if name in model.tensors]
            tensors = self._tensors(name, [part.models[number] for number in have])
            for number, tensor in zip(have, tensors, strict=True):
                models[number] = models[number]._replace(tensors={**models[number].tensors, name: tensor})
        return part._replace(models=models)

    def _tensors(self, name: str, models: Sequence[Model]) -> list[ForeignTensor]:
        inputs = tuple(model.tensors[name] for model in models)
        if any(not one.spec.shape or one.spec.shape[1:] != inputs[0].spec.shape[1:] for one in inputs):
            return list(inputs)  # what does not fit is refused with all other tensors
        own = [self._own(model, tensor) for model, tensor in zip(models, inputs, strict=True)]
        apart: dict[int, Sequence[Place]] = {}
        forced = np.zeros(self.rows, np.bool_)
        absent = np.any([rows == _NONE for rows in own], axis=0)
        for token, number in self.result.numbers.items():
            source = self.sources.get(token)
            forced[number] = source is not None and source.force
            if absent[number] or forced[number]:
                apart[number] = self._places(source, number, own, models)
        made = []
        for place, (model, rows) in enumerate(zip(models, own, strict=True)):
            spec = model.tensors[name].spec
            wide = TensorSpec(spec.group, spec.name, "F32", (self.rows, *spec.shape[1:]))
            here = np.where(forced, _NONE, rows)
            needed = {number: places for number, places in apart.items() if here[number] == _NONE}
            made.append(ForeignTensor(wide, (), decoder=VocabularyRows(inputs, place, here, needed)))
        return made

    def _refuse_unknown(self, model: Model) -> None:
        """Refuse what would keep its rows while the tokens move."""
        numbers, made = self.of_models[model.name].numbers, self.result.numbers
        rows = {tensor.spec.shape[:1] for name, tensor in model.tensors.items() if is_of_tokens(name)}
        if rows <= {(self.rows,)} and all(numbers.get(token) == number for token, number in made.items()):
            return
        for name, tensor in model.tensors.items():
            if tensor.spec.shape[:1] in rows and not is_of_tokens(name) and layer_of(name) is None:
                raise StateMismatch(
                    f"{model.name}: tensor {name!r} has as many rows as there are tokens, but no name that Holdfast knows",
                    hint="delete the recipe's tokenizer, and merge models with one vocabulary",
                    tensor=name,
                )

    def _own(self, model: Model, tensor: ForeignTensor) -> NDArray[np.int64]:
        """The model's own row of each row of the result."""
        rows = np.full(self.rows, _MEAN, np.int64)
        tokens, count = self.of_models[model.name].numbers, tensor.spec.shape[0]
        for token, number in self.result.numbers.items():
            row = tokens.get(token, _NONE)
            rows[number] = row if row < count else _NONE
        return rows

    def _places(
        self, source: TokenSource | None, number: int, own: Sequence[NDArray[np.int64]], models: Sequence[Model]
    ) -> Sequence[Place]:
        """The rows whose mean a model gets that has no row for a token."""
        if source is not None and not source.usual:
            return () if source.model is None else [self._named(source, models)]
        have = [(place, int(rows[number])) for place, rows in enumerate(own) if rows[number] >= 0]
        of_base = [one for one in have if models[one[0]].name == self.base]
        return of_base or have

    def _named(self, source: TokenSource, models: Sequence[Model]) -> Place:
        name = str(source.model)
        place = next((place for place, model in enumerate(models) if model.name == name), None)
        if place is None:
            raise _wrong(source, f"{name} is not merged there", "name one of the models that are merged")
        row = self.of_models[name].numbers.get(source.row) if isinstance(source.row, str) else source.row
        count = next(tensor for key, tensor in models[place].tensors.items() if is_of_tokens(key)).spec.shape[0]
        if row is None or not 0 <= row < count:
            raise _wrong(source, f"{name} has no token {source.row!r}", "name a model that has it, or `kind: zero`")
        return place, row


def _wrong(source: TokenSource, what: str, hint: str) -> InvalidRequest:
    return InvalidRequest(
        f"recipe, line {source.line}: the token {source.token!r}: {what}", hint=hint, line=source.line, key=source.token
    )


def rows_of(model: Model) -> int:
    """The number of tokens that a model has rows for. `StateMismatch` for a model without an embedding."""
    counts = [tensor.spec.shape[0] for name, tensor in model.tensors.items() if is_of_tokens(name) and tensor.spec.shape]
    if not counts:
        raise StateMismatch(
            f"{model.name} has no embedding of tokens whose name Holdfast knows",
            hint="delete the recipe's tokenizer, and merge models with one vocabulary",
        )
    return max(counts)
