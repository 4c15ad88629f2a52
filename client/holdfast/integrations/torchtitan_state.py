"""torchtitan's state as entries of a Checkpointer's: its model parts, and its data loader's position."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast.state.modules import EXTRA_STATE, clean
from holdfast_formats.errors import InvalidRequest, StateMismatch

DATALOADER = "dataloader"
_KNOWN_HOOKS = ("torch.", "torchtitan.")  # what these do to a state_dict only renames or cuts what the module has
_PICKLED = b"\x80"  # how a pickle of protocol 2 or newer begins


class ModelParts(nn.Module):
    """The parts of a model (several with pipelines) as one, by their own parameters, persistent buffers and extra state.

    torchtitan's fused projections offer copies of their parts from `state_dict()`, gathered from all ranks. The parameter
    itself is stored instead, in place and without a collective, under its own name: `…attention.qkv_linear.wqkv.weight`.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """Raises `InvalidRequest` for parts with other state, and for duplicate names."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._extras: dict[str, nn.Module] = {}  # modules with an extra state, by its name
        self._tensors: dict[str, torch.Tensor] = {}  # looked up once: FSDP shows other tensors in the middle of a step
        for part in parts:
            self._add(part)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Live tensors by name, and the modules' extra state."""
        return {**self._tensors, **{name: module.get_extra_state() for name, module in self._extras.items()}}

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """All modules, under their names in their parts, which prefix the names of their tensors."""
        yield "", self
        for part in self.parts:
            yield from part.named_modules(*args, **kwargs)

    def entry(self) -> Any:
        """The parts as one entry of the state. A save compares a mapping with the last one, but traverses a module
        again; only modules distinguish buffers, which may differ between ranks, from parameters.
        """
        parameters = {id(parameter) for parameter in self.parameters()}
        plain = not self._extras and all(id(one) in parameters for one in self._tensors.values())
        return dict(self._tensors) if plain else self

    def _add(self, part: nn.Module) -> None:
        transient = set()
        for path, module in part.named_modules(remove_duplicate=False):
            _refuse_hooks(path, module)
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                name = clean(f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE)
                self._refuse_twins(name, self._extras.setdefault(name, module) is module)
            # torch 2.13 has no public way to find persistent buffers without the hooks of state_dict()
            transient |= {f"{path}.{name}" if path else name for name in module._non_persistent_buffers_set}
        tensors: list[tuple[str, torch.Tensor]] = [*part.named_parameters(remove_duplicate=False)]
        tensors += [pair for pair in part.named_buffers(remove_duplicate=False) if pair[0] not in transient]
        for raw, tensor in tensors:
            name = clean(raw)
            self._refuse_twins(name, self._tensors.setdefault(name, tensor) is tensor)

    def _refuse_twins(self, name: str, same: bool) -> None:
        if not same:
            raise InvalidRequest(
                f"two parts of the model have different tensors named {name!r}",
                hint="parts of a pipeline have different layers: give them different names",
            )


class DataPosition:
    """The position of torchtitan's data loader; an entry of the state.

    `key` names the data-parallel rank, so that each rank finds the position of its data whatever its own number is.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        rank, world = getattr(loader, "dp_rank", None), getattr(loader, "dp_world_size", None)
        self._known = isinstance(rank, int) and isinstance(world, int)
        self.key = position_key(rank, world) if isinstance(rank, int) and isinstance(world, int) else DATALOADER
        others = range(world) if isinstance(world, int) and self._known else ()
        self.others = tuple(position_key(other, world) for other in others if other != rank and isinstance(world, int))

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the loader: a Checkpointer asks such objects for their state before it installs random streams."""
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The loader's position. Raises `InvalidRequest` if it is pickled."""
        state: dict[str, Any] = self._plain().state_dict(self._loader) if self._plain() else self._loader.state_dict()
        pickled = [name for name, value in state.items() if isinstance(value, bytes) and value.startswith(_PICKLED)]
        if pickled:
            raise InvalidRequest(
                f"state_dict() of the data loader {type(self._loader).__name__} has a pickle under {pickled[0]!r}",
                hint="return JSON values and tensors, or leave state_dict() to ParallelAwareDataloader",
            )
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position, for the next iterator."""
        if self._plain():
            self._plain().load_state_dict(self._loader, dict(state))
        else:
            self._loader.load_state_dict(state)

    def _plain(self) -> Any:
        """torchdata's own class, if torchtitan's only pickles its state."""
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchtitan.components.dataloader import ParallelAwareDataloader

        kind = type(self._loader)
        same = all(
            getattr(kind, name, None) is getattr(ParallelAwareDataloader, name) for name in ("state_dict", "load_state_dict")
        )
        return StatefulDataLoader if same and self._known else None


def position_key(rank: int, world: int) -> str:
    """The state's key for a data-parallel rank's position."""
    return f"{DATALOADER}.{rank}-of-{world}"


def fusing_program(parts: Sequence[nn.Module]) -> str | None:
    """A mapping program, as TOML, that makes these parts' fused projections of what torchtitan's own checkpoints have; None
    if none are fused.
    """
    statements = set()
    for path, module in ((clean(path), module) for part in parts for path, module in part.named_modules()):
        if hasattr(module, "wqkv") and hasattr(module, "heads_per_kv") and hasattr(module, "head_dim"):
            groups = module.wqkv.weight.shape[0] // ((module.heads_per_kv + 2) * module.head_dim)
            place = re.sub(r"(?<=layers\.)\d+", "$LAYER_ID", path)
            how = f"axis=0, num_heads={module.heads_per_kv * groups}, num_key_value_groups={groups}"
            for kind in (name for name, _ in module.wqkv.named_parameters()):
                sources = ", ".join(f"{place}.{part}.{kind}" for part in ("wq", "wk", "wv"))
                statements.add(f"{sources} -> {place}.wqkv.{kind}, fused_qkv, {how}")
    lines = "\\n".join([*sorted(statements), "* -> *"])
    return f'name = "fused"\nfrom = "torchtitan"\nto = "fused"\nstatements = "{lines}"' if statements else None


def explained(error: StateMismatch, parts: Sequence[nn.Module]) -> StateMismatch:
    """The error of a restore, with a hint if another number of data-parallel ranks saved, or torchtitan itself did."""
    if ".wqkv." in error.detail and ".wq." in error.detail and (program := fusing_program(parts)) is not None:
        return StateMismatch(
            error.detail,
            hint="torchtitan's own checkpoints have the fused projections in parts: import it with --program FILE, and with "
            f"these lines in FILE.toml:\n{program}",
            **error.members,
        )
    if f"/{DATALOADER}." not in error.detail or error.hint.startswith("another number"):
        return error
    return StateMismatch(
        error.detail,
        hint="another number of data-parallel ranks saved this checkpoint, and torchtitan cannot redistribute its data: set "
        'exclude_from_loading=["dataloader"] to start the data from the beginning',
        **error.members,
    )


def _refuse_hooks(path: str, module: nn.Module) -> None:
    for hook in module._state_dict_hooks.values():  # torch 2.13 has no public list of them
        where = getattr(hook, "__module__", None) or type(hook).__module__
        if not where.startswith(_KNOWN_HOOKS):
            raise InvalidRequest(
                f"{path or 'the model'} ({type(module).__name__}) has a hook of state_dict() from {where}: what it adds to "
                "the parameters and buffers would not be stored",
                hint="keep such values in buffers, or pass an object that has them in states=",
            )
