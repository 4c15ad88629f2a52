"""Collects an adapter's tensors in Paddle's layout, and lists them in the layout and under the names of the weights.

All adapters for Paddle use it, so that they agree in names, transposition, steps and documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.mapping.reading import fetched
from holdfast_formats.region import Shape, whole
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign import computed, file_signs
from holdfast_service.wings.convert.foreign.paddle import consistency, progress, unused_files
from holdfast_service.wings.convert.foreign.paddle.quantised import FIRST, SECOND
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import LocalTensorParts
from holdfast_service.wings.convert.foreign.paddle.transposition import Linears, linears, turned

CONFIG = "config.json"
JSON_BYTES_MAX = 2**28
ROWS_COMPARED = 16  # of embeddings that may be tied
HALF = {"bfloat16": "BF16", "float16": "F16"}
_MOMENTS = {FIRST: "exp_avg", SECOND: "exp_avg_sq"}
_TIED = ("model.embed_tokens.weight", "lm_head.weight")


class Gathering:
    """The tensors of a directory, by key. `config` is its config.json, if there is one."""

    def __init__(self, files: Files, options: ReadOptions) -> None:
        self.files, self.options = files, options
        self.config = read_json(files, CONFIG) if CONFIG in files.list("") else None
        self.progress = progress.read(files)
        self.tensors: dict[TensorKey, ForeignTensor] = {}
        self.shapes: dict[str, Shape] = {}  # of parameters, in Paddle's layout
        self.notes: list[str] = []
        self.names: set[str] = set()  # of parameters, for a model without config.json
        self._powers: list[LocalTensorParts] = []
        self._linears: Linears | None = None

    def convert(self, converted: Callable[[ForeignTensor], ForeignTensor]) -> None:
        """Put what `converted` returns for each tensor in its place, under its own key."""
        self.tensors = {made.key: made for made in map(converted, self.tensors.values())}

    @property
    def half(self) -> str | None:
        """The narrow dtype of the weights in config.json; None for others."""
        dtype = (self.config or {}).get("torch_dtype") or (self.config or {}).get("dtype")
        return HALF.get(str(dtype).removeprefix("paddle.").removeprefix("torch."))

    @property
    def linears(self) -> Linears:
        """The weights that Paddle holds transposed; call it once `names` are complete."""
        if self._linears is None:
            self._linears = linears(self.config, self.names)
        return self._linears

    def in_paddle(self, name: str, shape: Shape) -> Shape | None:
        """A weight's shape in Paddle's layout by that in Hugging Face's; None if the model class is unknown."""
        if len(shape) != 2 or not name.endswith(".weight"):
            return shape
        if self.linears.pattern is None:
            return None
        return shape[::-1] if self.linears.has(name) else shape

    def weight(self, tensor: ForeignTensor, of: str, *, paddle_layout: bool = True) -> None:
        """List a tensor of parameter `of` in the weights' layout."""
        spec = tensor.spec
        if paddle_layout and not self.options.as_is and of.endswith(".weight"):
            if len(spec.shape) == 1 and self.linears.certainly(of):
                raise StateMismatch(
                    f"{where(tensor)}: {spec.name!r} has shape {list(spec.shape)}, but {of!r} is the weight of a Linear "
                    "layer; it was flattened, and its original shape is not recorded",
                    tensor=spec.name,
                )
            if len(spec.shape) == 2 and self.linears.has(of):
                tensor = turned(tensor)
        listed = self.tensors.setdefault(tensor.key, tensor)
        if listed is not tensor:
            raise StateMismatch(
                f"{spec.name!r} of group {spec.group} is in {where(listed)} and in {where(tensor)}", tensor=spec.name
            )

    def powers(self, arrays: Iterable[LocalTensorParts]) -> None:
        """Record the beta powers of a parameter; with `as_is` the adapter lists them instead."""
        self._powers.extend(arrays)

    def moments(self, of: str, held: Mapping[str, ForeignTensor]) -> None:
        """List the optimizer state of a parameter, by Paddle's types, with its step."""
        if self.options.as_is:
            for tensor in held.values():
                self.weight(tensor, of)
            return
        for kind, tensor in held.items():
            if kind not in _MOMENTS:
                raise StateMismatch(
                    f"{where(tensor)}: {kind} of {of!r} is not Adam state; other Paddle optimizers are not supported",
                    hint="import it under its own name with --as-is",
                    tensor=tensor.spec.name,
                )
        missing = [kind for kind in _MOMENTS if kind not in held]
        if missing:
            present = next(iter(held.values()))
            raise StateMismatch(f"{where(present)}: {missing[0]} of {of!r} is missing", tensor=f"{of}/{missing[0]}")
        for kind, tensor in held.items():
            self.weight(renamed(tensor, optimizer_state.GROUP, f"{of}/{_MOMENTS[kind]}"), of)
        key = TensorKey(optimizer_state.GROUP, f"{of}/step")
        self.tensors[key] = computed.scalar(key, float(self._step(next(iter(held.values())))))

    def _step(self, asked: ForeignTensor) -> int:
        if self.progress.step is None:
            raise StateMismatch(
                f"{where(asked)} has optimizer state, but {' or '.join(progress.TRAINER_STATES)}, which counts the "
                "steps, is missing",
                hint="copy that file too, or import the state without steps with --as-is",
                file=progress.TRAINER_STATES[0],
            )
        return self.progress.step

    def tie(self) -> None:
        """List the masters and the optimizer state of tied embeddings under both names, as the model has them."""
        first, second = (self.tensors.get(TensorKey("model", name)) for name in _TIED)
        if self.options.as_is or first is None or second is None:
            return
        if not (self.config.get("tie_word_embeddings") if self.config is not None else self._alike(first, second)):
            return
        for here, target in (_TIED, _TIED[::-1]):
            for key, tensor in list(self.tensors.items()):
                name = key.name.removeprefix(here)
                other = TensorKey(key.group, target + name)
                if key.group != "model" and name in ("", "/exp_avg", "/exp_avg_sq", "/step") and name != key.name:
                    self.tensors.setdefault(other, renamed(tensor, *other))
        self.notes.append(f"{_TIED[0]} and {_TIED[1]} are tied: state that Paddle keeps under one name is listed under both")

    def _tied(self) -> Collection[str]:
        """Embeddings of which Paddle may keep the weight under one name, and the state under the other."""
        return _TIED if self.config is None or self.config.get("tie_word_embeddings") else ()

    def _alike(self, first: ForeignTensor, second: ForeignTensor) -> bool:
        """Whether embeddings are tied, without a config.json: one has no state of its own, and both begin with the same
        values.
        """
        groups = ("master", optimizer_state.GROUP)
        owners = {key.name.partition("/")[0] for key in self.tensors if key.group in groups}
        if (first.spec.name in owners) == (second.spec.name in owners) or first.spec.shape != second.spec.shape:
            return False
        rows = whole((min(first.spec.shape[0], ROWS_COMPARED), *first.spec.shape[1:]))
        values = [fetched(self.files, tensor, rows) for tensor in (first, second)]
        return bool(values[0].any()) and values[0].tobytes() == values[1].tobytes()

    def listing(self, kind: str, names: Collection[str], used: Collection[str]) -> ForeignListing:
        """Everything, with the use of each file. `used` are those that hold tensors or their places."""
        hyper: dict[str, Any] = {}
        if self._powers and not self.options.as_is:
            known = progress.betas(self.files, self._powers, self.progress.step or 0)
            hyper = {} if known is None else {"betas": progress.document(known)}
            self.notes.append(f"{len(self._powers)} beta powers agree with step {self.progress.step} and are not stored")
        if self.progress.learning_rate is not None:
            hyper["lr"] = self.progress.learning_rate
        self.tie()
        if not self.options.as_is:
            self.notes += consistency.check(self.tensors, self._tied(), self.progress.step is not None)
        documents: dict[str, dict[str, Any]] = {}
        # Files and not values of group `extra`: a trainer refuses to restore values that it has no use for.
        assets = {f"{key}.json": json.dumps(value, indent=1).encode() for key, value in self.progress.documents.items()}
        steps = sorted(key.name.removesuffix("/step") for key in self.tensors if key.name.endswith("/step"))
        if steps:
            documents["extra"] = {}  # a trainer expects the group
            documents[optimizer_state.GROUP] = {optimizer_state.KEY: optimizer_state.document([(steps, hyper)])}
        rest = unused_files.sort_out(self.files, names, {*used, *self.progress.files})
        uses = [FileUse(name, "tensors") for name in used] + [FileUse(name, "state") for name in self.progress.files]
        return ForeignListing(
            kind,
            self.tensors,
            tuple(sorted((*uses, *rest.uses))),
            documents,
            rest.assets,
            tuple(self.notes),
            self.progress.step,
            assets,
        )


def renamed(tensor: ForeignTensor, group: str, name: str) -> ForeignTensor:
    spec = tensor.spec
    return tensor._replace(spec=type(spec)(group, name, spec.dtype, spec.shape))


def read_json(files: Files, path: str) -> dict[str, Any]:
    """A JSON object, of a model's index at most."""
    return file_signs.read_object(files, path, JSON_BYTES_MAX)


def where(tensor: ForeignTensor) -> str:
    inner = tensor.decoder.inputs if tensor.decoder is not None else ()
    held = sorted({piece.file for one in (tensor, *inner) for piece in one.pieces})
    return ", ".join(held[:3]) + (" …" if len(held) > 3 else "")
