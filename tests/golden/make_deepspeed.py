"""Makes `foreign/deepspeed.tar.xz`: small checkpoints of DeepSpeed itself, with the tensors that its own functions give.

    python -m tests.golden.make_deepspeed     (in an environment with DeepSpeed 0.19.8: make integrations)

Each is of three ranks, after three steps. Beside it stands `expected.safetensors`: weights and buffers by name, masters as
NAME/master, moments as NAME/exp_avg and so on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
WORLD = 3
VARIANTS = {
    "zero1_fp32": (1, "fp32", {}),
    "zero1_bf16_accumulated": (1, "bf16-accumulated", {}),
    "zero2_bf16_round_robin": (2, "bf16", {"round_robin_gradients": True}),
    "zero2_fp16": (2, "fp16", {}),
    "zero3_fp32": (3, "fp32", {"sub_group_size": 60}),
    "zero3_bf16": (3, "bf16", {}),
}


class Tiny(nn.Module):
    """A tied head, a frozen parameter, a buffer, and sizes that three ranks cannot cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.mix = nn.Linear(5, 7)
        self.out = nn.Linear(7, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.out(torch.relu(self.mix(self.embed(rows).mean(1)))) * self.scale + self.frozen.mean()
        return self.head(hidden).float().logsumexp(-1).mean() + hidden.float().square().mean()


def save(name: str, directory: str) -> None:
    """Train as one rank, and save."""
    from tests.integrations.deepspeed import engines

    stage, kind, zero = VARIANTS[name]
    chosen = engines.config(stage, kind)
    chosen["zero_optimization"] |= zero
    made = engines.engine(chosen, model=Tiny)
    chance = torch.Generator().manual_seed(made.global_rank)
    for _ in range(3):
        engines.step(made, torch.randint(0, 11, (4, 3), generator=chance))
    made.save_checkpoint(directory, client_state={"epoch": 2, "seen": ("a", 1)})
    found: dict[str, Any] = engines.tensors(made)
    if made.global_rank == 0:
        found = {name: tensor.detach().clone().contiguous() for name, tensor in found.items() if tensor is not None}
        save_file(found, Path(directory, "expected.safetensors"))


def main() -> None:
    with TemporaryDirectory() as directory:
        for number, name in enumerate(VARIANTS):
            target = Path(directory, name)
            target.mkdir()
            about = os.environ | {
                "WORLD_SIZE": str(WORLD),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(29_600 + number),
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "tests.golden.make_deepspeed", name, str(target)]
            ranks = [
                subprocess.Popen(command, env=about | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(WORLD)
            ]
            assert not any([rank.wait() for rank in ranks]), name
            for script in target.glob("zero_to_*.py"):
                script.write_text("# DeepSpeed's own script\n")
        with tarfile.open(HERE / "foreign/deepspeed.tar.xz", "w:xz") as archive:
            for path in sorted(Path(directory).rglob("*")):
                member = archive.gettarinfo(path, str(path.relative_to(directory)))
                member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
                with path.open("rb") if path.is_file() else open(os.devnull, "rb") as content:
                    archive.addfile(member, content if path.is_file() else None)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        save(sys.argv[1], sys.argv[2])
    else:
        main()
