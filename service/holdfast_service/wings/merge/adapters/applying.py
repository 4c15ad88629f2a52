"""Adds an adapter of PEFT's to the weights that it was trained on, as its `merge_and_unload` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats.dtypes import FLOATS
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.near_names import did_you_mean
from holdfast_formats.programs import compile_program, find, fitting
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.computed import rounded
from holdfast_service.wings.merge.adapters import changes, config, tensors
from holdfast_service.wings.merge.adapters.changes import Added, BiasAdded, Magnified, Product, TokenRows
from holdfast_service.wings.merge.adapters.config import AdapterConfig
from holdfast_service.wings.merge.adapters.tensors import AdapterTensors, LoraPair

_WEIGHT, _BIAS, _HEAD = ".weight", ".bias", "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_TIED, _VOCABULARY = "tie_word_embeddings", "vocab_size"
# Names of a module's parameters in the order in which transformers defines them, and PEFT nests their products.
_ORDER = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
_WITH_CONV1D = frozenset({"clvp", "clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"})
_CONV1D = frozenset({"c_attn", "c_fc", "c_proj", "q_attn"})  # their modules of this kind
_TRANSPOSED = frozenset({"aria", "gpt_oss", "llama4", "llama4_text", "openai_privacy_filter"})  # experts are [in, out]


class AdapterParts(NamedTuple):
    """An adapter: its name for messages, its configuration and its tensors."""

    name: str
    config: bytes
    tensors: Mapping[str, ForeignTensor]


class BaseWeights(NamedTuple):
    """The weights of a model by name, without the second names of tied ones, and its config.json."""

    tensors: Mapping[str, ForeignTensor]
    config: Mapping[str, Any] = {}


class AdaptedWeights(NamedTuple):
    """Weights with an adapter, changed ones as F32; the dtypes to store them in; what changes in config.json."""

    tensors: Mapping[str, ForeignTensor]
    stored: Mapping[str, str]
    settings: Mapping[str, Any] = {}


def adapted(base: BaseWeights, adapter: AdapterParts) -> AdaptedWeights:
    """The weights with an adapter. `StateMismatch` for an adapter of another model, or of an unknown kind."""
    terms, parts = config.read(adapter.config, adapter.name), tensors.sort(adapter.tensors, adapter.name)
    _check_complete(terms, parts, adapter.name)
    work = _Work(base, terms, adapter.name)
    work.replace(parts.replaced)
    for module, rows in parts.tokens.items():
        work.replace_rows(module, rows)
    for module, pair in parts.pairs.items():
        work.add(module, pair, parts)
    return AdaptedWeights(work.tensors, work.stored, work.settings)


def _check_complete(terms: AdapterConfig, parts: AdapterTensors, name: str) -> None:
    """`StateMismatch` if the tensors are not those that the configuration describes."""
    for module, pair in parts.pairs.items():
        key = pair.low.spec.name
        if terms.dora != (pair.magnitude is not None):
            has = "has no" if terms.dora else "has a"
            config.refuse(name, f"use_dora is {str(terms.dora).lower()}, but {module!r} {has} lora_magnitude_vector", key)
        if pair.bias is not None and not terms.lora_bias:
            config.refuse(name, f"lora_bias is not set, but {module!r} has a bias in lora_B", key)
    plain = {_plain(module) for module in parts.pairs}
    for parameter in terms.parameters:
        if not any(_belongs(parameter, module) for module in plain):
            config.refuse(name, f"target_parameters names {parameter!r}, of which the adapter has no tensors")
    if terms.saved and not any(map(terms.saves, parts.replaced)):  # PEFT lists classifiers of all names
        config.refuse(name, f"it has no tensors of modules_to_save: {', '.join(terms.saved)}")
    if bool(terms.tokens) != bool(parts.tokens):
        config.refuse(name, "trainable_token_indices and the adapter's trainable_tokens_delta do not belong together")


def _plain(module: str) -> str:
    """A module's name without the places in PEFT's nest of its parameters' products."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def _belongs(parameter: str, module: str) -> bool:
    """Whether a name of `target_parameters` is one of a module's own parameters."""
    return f".{module}.{parameter.rpartition('.')[2]}".endswith(f".{parameter}")


class _Work:
    """Weights that an adapter is being added to."""

    def __init__(self, base: BaseWeights, terms: AdapterConfig, name: str) -> None:
        self.tensors, self._base, self._terms, self._name = dict(base.tensors), base, terms, name
        self.stored = {key: one.spec.dtype for key, one in base.tensors.items()}
        self.settings: dict[str, Any] = {}
        self._embedding = next((key for key in base.tensors if key.endswith(_EMBEDDINGS)), None)
        self._tied = self._embedding is not None and _HEAD not in base.tensors and _has_head(base.config)
        self._mapped: Mapping[TensorKey, MappedTensor] | None = None
        self._given = dict[str, str]()  # modules with a product, by their weight

    def replace(self, replaced: Mapping[str, ForeignTensor]) -> None:
        """Take whole tensors of the adapter. A tied head stays tied, unless one of the two was trained by itself."""
        replaced, old = dict(replaced), self.tensors.get(self._embedding or "")
        if self._tied and self._embedding is not None and old is not None:
            head, embedding = replaced.pop(_HEAD, None), replaced.get(self._embedding)
            trained = any(map(self._terms.saves, (_HEAD, self._embedding)))
            if trained and not self._terms.ties_kept and (head is not None or embedding is not None):
                self._tied = False
                self.settings[_TIED] = False
                self.tensors[_HEAD], self.stored[_HEAD] = old, self.stored[self._embedding]
                if head is not None:
                    replaced[_HEAD] = head
            elif head is not None and embedding is None:
                replaced[self._embedding] = head
        for target, tensor in replaced.items():
            self._replace(target, tensor)
        self._check_vocabulary()

    def _replace(self, target: str, tensor: ForeignTensor) -> None:
        target = self._target(target)
        spec, key = self._spec(target), tensor.spec.name
        if target not in self.tensors:
            config.refuse(self._name, f"it replaces {target!r}, which the checkpoint stores in parts", key)
        if spec.shape != tensor.spec.shape:
            if spec.shape[1:] != tensor.spec.shape[1:] or not target.endswith((*_EMBEDDINGS, _HEAD)):
                what = f"its {key!r} has shape {list(tensor.spec.shape)}, but {target!r} has {list(spec.shape)}"
                config.refuse(self._name, what, key)
            self.settings[_VOCABULARY] = tensor.spec.shape[0]
        if tensor.spec.dtype != spec.dtype and not {tensor.spec.dtype, spec.dtype} <= FLOATS.keys():
            config.refuse(self._name, f"its {key!r} is {tensor.spec.dtype}, but {target!r} is {spec.dtype}", key)
        same = tensor.spec.dtype == spec.dtype
        self.tensors[target] = tensor if same else rounded(tensor, TensorKey(spec.group, target), spec.dtype)

    def _check_vocabulary(self) -> None:
        """`StateMismatch` if an embedding got other rows than the head, whose new rows PEFT did not save."""
        rows = self.settings.get(_VOCABULARY)
        for key in (self._embedding, _HEAD):
            if rows is not None and key in self.tensors and self.tensors[key].spec.shape[0] != rows:
                config.refuse(self._name, f"it has another vocabulary, of {rows} tokens, but no {key!r} of that size", key)

    def replace_rows(self, module: str, rows: ForeignTensor) -> None:
        """Replace the rows of some tokens."""
        found = [tokens for of, tokens in self._terms.tokens.items() if not of or module == of or module.endswith(f".{of}")]
        target = self._target(f"{module}{_WEIGHT}")
        spec = self._spec(target)
        wanted = (len(found[0]), *spec.shape[1:]) if found else ()
        if len(found) != 1 or rows.spec.shape != wanted or max(found[0]) >= spec.shape[0]:
            what = f"{rows.spec.name!r} of {list(rows.spec.shape)} does not fit trainable_token_indices"
            config.refuse(self._name, what, rows.spec.name)
        self._given[target] = module
        self._set(target, TokenRows(self.tensors[target], rows, found[0]))

    def add(self, module: str, pair: LoraPair, parts: AdapterTensors) -> None:
        """Add a module's product to its weight, or to the one of its parameters that PEFT nested at this place."""
        parameter = self._parameter(module, parts)
        key = _plain(module) if parameter is None else parameter
        target = self._target(f"{module}{_WEIGHT}" if parameter is None else parameter)
        if target in self._given:
            raise StateMismatch(
                f"{self._name}: {self._given[target]!r} and {module!r} both change {target!r}, which has two names",
                hint=f"leave the tensors of {module!r} out of the adapter; PEFT would add both",
                tensor=target,
            )
        self._given[target] = module
        rank, scale = self._terms.terms(key)
        spec, moves = self._spec(target), self._moves(target)
        product = self._product(module, pair, spec.shape, scale)
        if product is None:
            shapes = f"{list(pair.high.spec.shape)} × {list(pair.low.spec.shape)}"
            raise StateMismatch(
                f"{self._name}: {shapes} cannot be added to {target!r} of {list(spec.shape)}",
                hint="merge it into the model that it was trained on",
                tensor=target,
            )
        if product.rank != rank:
            what = f"its {config.NAME} has rank {rank} for {key!r}, but {pair.low.spec.name!r} has {product.rank}"
            config.refuse(self._name, what, pair.low.spec.name)
        if moves is not None and pair.magnitude is None:
            for move in moves.moves:
                self._set(move.source.name, Added(self.tensors[move.source.name], product, move))
        elif moves is not None:
            config.refuse(self._name, f"use_dora for {target!r}, which the checkpoint stores in parts", pair.low.spec.name)
        elif pair.magnitude is None:
            self._set(target, Added(self.tensors[target], product))
        else:
            self._set(target, self._magnified(Added(self.tensors[target], product), pair.magnitude))
        if pair.bias is not None:
            bias = f"{module}{_BIAS}"
            if self._spec(bias).shape != pair.bias.spec.shape:
                config.refuse(self._name, f"{pair.bias.spec.name!r} does not fit {bias!r}", pair.bias.spec.name)
            self._set(bias, BiasAdded(self.tensors[bias], pair.bias, scale))

    def _magnified(self, added: Added, magnitude: ForeignTensor) -> Magnified:
        outputs = added.product.high.spec.shape[0]
        if magnitude.spec.shape not in ((outputs,), (1, outputs, *(1 for _ in added.weight.spec.shape[2:]))):
            what = f"{magnitude.spec.name!r} has shape {list(magnitude.spec.shape)} for {outputs} outputs"
            config.refuse(self._name, what, magnitude.spec.name)
        return Magnified(added, magnitude)

    def _product(self, module: str, pair: LoraPair, shape: tuple[int, ...], scale: float) -> Product | None:
        low, high = pair.low.spec.shape, pair.high.spec.shape
        view = changes.fits(low, high, shape, self._turned(module), pair.embedding)
        experts = 1
        if view is None and not pair.embedding:
            transposed = self._base.config.get("model_type") in _TRANSPOSED
            view, experts = changes.fits_experts(low, high, shape, transposed), shape[0] if shape else 1
        return None if view is None else Product(pair.low, pair.high, scale, view, experts)

    def _turned(self, module: str) -> bool:
        """Whether a module's weight is [in, out]. PEFT's one flag is that of the last module, where a model has both."""
        if self._base.config.get("model_type") in _WITH_CONV1D:
            return _plain(module).rpartition(".")[2] in _CONV1D
        return self._terms.turned

    def _parameter(self, module: str, parts: AdapterTensors) -> str | None:
        """The parameter of `target_parameters` that a pair belongs to; None for the weight of a module."""
        plain = _plain(module)
        leaves = {one.rpartition(".")[2] for one in self._terms.parameters if _belongs(one, plain)}
        depths = sum(_plain(other) == plain for other in parts.pairs)
        if not leaves:
            return None
        if len(leaves) != depths or (depths > 1 and not leaves <= set(_ORDER)):
            what = f"it has {depths} products for {', '.join(sorted(leaves))} of {plain!r}"
            config.refuse(self._name, what, parts.pairs[module].low.spec.name)
        ordered = sorted(leaves, key=lambda leaf: _ORDER.index(leaf) if leaf in _ORDER else 0)
        depth = module.removeprefix(plain).count(".base_layer")
        return f"{plain}.{ordered[len(ordered) - 1 - depth]}"

    def _target(self, name: str) -> str:
        """The tensor that a name of the adapter's model stands for: a tied head is the embedding, a router is renamed."""
        if self._tied and name == _HEAD and self._embedding is not None:
            return self._embedding
        moved = self._moves(name)
        if moved is None or len(moved.moves) != 1 or moved.moves[0].axes != tuple(range(len(moved.spec.shape))):
            return name
        source = moved.moves[0].source.name
        return source if self.tensors[source].spec.shape == moved.spec.shape else name

    def _spec(self, target: str) -> TensorSpec:
        """The weight's, or that of the tensor that a mapping program makes of several; `StateMismatch` if there is none."""
        if target in self.tensors:
            return self.tensors[target].spec
        moved = self._moves(target)
        if moved is None:
            hint = self._apart(target) or did_you_mean(target, self.tensors, "check that the adapter belongs to this model")
            what = f"{self._name} adapts tensor {target!r}, which the model does not have"
            raise StateMismatch(what, hint=hint, tensor=target)
        return moved.spec

    def _apart(self, target: str) -> str:
        """The way on for an adapter of single experts, if the checkpoint has them fused; empty for any other."""
        specs = {one.key: one.spec for one in self._base.tensors.values()}
        program = fitting(specs, [target], self._base.config)
        if program is None or program.target != "hf":
            return ""
        return f"`holdfast export MODEL DIR --as hf --program {program.name}` stores experts apart: merge into DIR"

    def _moves(self, target: str) -> MappedTensor | None:
        """How transformers makes a tensor of those of the hub, if it fuses them in memory."""
        if target in self.tensors:
            return None
        if self._mapped is None:
            specs = {one.key: one.spec for one in self._base.tensors.values()}
            try:
                self._mapped = compile_program(find("hf", "hf-stacked", self._base.config), specs, self._base.config).tensors
            except (InvalidRequest, StateMismatch):  # it holds them as they are, or they are another model's
                self._mapped = {}
        found = next((one for one in self._mapped.values() if one.spec.name == target), None)
        return None if found is None or any(move.stepped for move in found.moves) else found

    def _set(self, target: str, decoder: Any) -> None:
        spec = self.tensors[target].spec
        self.tensors[target] = ForeignTensor(TensorSpec(spec.group, target, "F32", spec.shape), (), decoder=decoder)


def _has_head(base: Mapping[str, Any]) -> bool:
    """Whether a model has a head for tokens, stored or tied."""
    named = base.get("architectures")
    return isinstance(named, list) and any("CausalLM" in str(one) or "LMHead" in str(one) for one in named)


def check_alike(adapters: Mapping[str, AdapterParts], first: str) -> None:
    """`StateMismatch` if merged adapters are not added to their base in the same way."""
    read = {name: config.read(one.config, name) for name, one in adapters.items()}
    scales = {}
    for name, terms in read.items():
        parts = tensors.sort(adapters[name].tensors, name)
        scales[name] = {module: terms.terms(_plain(module)) for module in parts.pairs}
        for module, pair in parts.pairs.items():
            if not terms.parameters and pair.low.spec.shape[:1] != (scales[name][module].rank,):
                what = f"its {config.NAME} has another rank for {module!r} than the adapter"
                config.refuse(name, what, pair.low.spec.name)
    for name, terms in read.items():
        if scales[name] != scales[first] or terms.dora != read[first].dora:
            one, other = read[first], terms
            raise StateMismatch(
                f"{name} has rank {other.rank} and lora_alpha {other.alpha:g} in its {config.NAME}, or other values of "
                f"use_rslora, use_dora, rank_pattern or alpha_pattern, than {first} with rank {one.rank} and lora_alpha "
                f"{one.alpha:g}",
                hint="merge each adapter into its base first, as MODEL+ADAPTER",
                file=config.NAME,
            )
