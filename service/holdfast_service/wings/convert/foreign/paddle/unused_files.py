"""Files of a directory without tensors: signals of writers, assets, and what a torch trainer cannot use.

Every writer leaves a signal when its files are complete. If only some did, the directory may be torn.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse
from holdfast_service.wings.convert.foreign import directories

_SIGNAL = re.compile(r"(saved_signal_|\.(?:model|master|optimizer)_weight\.done\.)(-?\d+)")
_DONE = frozenset({".model_done", ".optimizer_done", ".checkpoint_done"})
_RANDOM = re.compile(r"rng_state(?:_(\d+))?\.pth")
_ASSET = re.compile(
    r".+\.(json|jsonl|txt|model|jinja|md|tiktoken|py|vocab|bpe|spm)|LICENSE.*|NOTICE.*|README.*", re.IGNORECASE
)
_TENSORS = re.compile(
    r".+\.(safetensors|pdparams|pdopt|pdema|pdiparams|distcp|metadata|bin|pt|pth|ckpt|npz|npy|h5|gguf|msgpack|pkl|pickle)"
    r"(_shard_\d+)?",
    re.IGNORECASE,
)
STATES = frozenset({"config.json", "scheduler.pdparams", "scaler.pdparams", "trainer_state.bin", "trainer_state.json"})
UNUSED: Mapping[str, str] = {
    "training_args.bin": "arguments of Paddle's trainer, as Python objects; your trainer has its own",
    ".saving_info": "how many processes saved, and with which options",
    "static_name_to_dyg_name.json": "names in Paddle's static graph",
}
_RANDOM_REASON = "random number states of Paddle (Philox, mt19937_64), which torch cannot load"


class Leftovers(NamedTuple):
    """The use of files without tensors, and the copied ones."""

    uses: tuple[FileUse, ...]
    assets: tuple[str, ...]


def sort_out(files: Files, names: Iterable[str], used: Collection[str]) -> Leftovers:
    """The use of each name that is not in `used`. `StateMismatch` for one that may hold tensors."""
    uses: list[FileUse] = []
    assets: list[str] = []
    for name in names:
        if name in used:
            continue
        if files.size(name) is None:
            if name in STATES:
                raise _refused(name, "is not a regular file, but it holds training state")
            uses.append(FileUse(name, "unused", directories.why_unused(files, name)))
        elif _SIGNAL.fullmatch(name) or name in _DONE:
            uses.append(FileUse(name, "signal", "marks the files of a writer as complete"))
        elif name in UNUSED or _RANDOM.fullmatch(name):
            uses.append(FileUse(name, "unused", UNUSED.get(name, _RANDOM_REASON)))
        elif _TENSORS.fullmatch(name):
            raise _refused(name, "is not known in this kind of checkpoint and may hold training state")
        elif _ASSET.fullmatch(name) and naming.is_asset_name(name):
            assets.append(name)
            uses.append(FileUse(name, "asset"))
        else:
            uses.append(FileUse(name, "unused", "Paddle's trainer keeps no state in it"))
    return Leftovers(tuple(uses), tuple(assets))


def _refused(name: str, what: str) -> StateMismatch:
    hint = "move it out of the directory if it does not belong to the checkpoint"
    return StateMismatch(f"{name} {what}", hint=hint, file=name)


def check_signals(names: Iterable[str], writers: int, kinds: Collection[str] = ()) -> None:
    """`StateMismatch` if only some writers left their signal. `writers` is their known number, `kinds` those of weights that
    exist. Without any signal only the tensors show whether they are complete.
    """
    ranks: dict[str, set[int]] = defaultdict(set)
    for name in names:
        signal, random = _SIGNAL.fullmatch(name), _RANDOM.fullmatch(name)
        if signal is not None and int(signal[2]) >= 0:
            ranks[signal[1]].add(int(signal[2]))
        if random is not None and random[1] is not None:
            writers = max(writers, int(random[1]) + 1)
    if not ranks:
        return
    world = max([writers, *(max(ranks_of) + 1 for ranks_of in ranks.values())])
    # Ranks that have none of the masters signal these even where no rank does, so only kinds that are there count.
    wanted = [f".{kind}_weight.done." for kind in kinds] if any(kind.startswith(".") for kind in ranks) else []
    for kind in (*wanted, *(["saved_signal_"] if "saved_signal_" in ranks else [])):
        for rank in range(world):
            if rank not in ranks.get(kind, ()):
                raise StateMismatch(
                    f"{kind}{rank} is missing, although other ranks marked theirs as complete: rank {rank} may have been "
                    "stopped during the save",
                    hint="import another step; if you know that all files are complete, remove the signal files instead",
                    file=f"{kind}{rank}",
                )
