"""TRL's SFTTrainer, attached: its overrides are called, the tokenizer is saved, and it resumes bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from holdfast.integrations.transformers import attach
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and datasets' own


daemon = own_daemon(listen="none")


def made(output: Path) -> Any:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from trl import SFTConfig, SFTTrainer

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *"abcdefghij"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": len(words)}
    rows = Dataset.from_dict({"text": ["a b c d e", "f g h i j", "a c e g i", "b d f h j", "a a b b", "c c d d"] * 2})
    settings: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    settings |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "bf16": False, "learning_rate": 1e-2}
    settings |= {"max_length": 8, "save_total_limit": 2}
    return SFTTrainer(
        GPT2LMHeadModel(GPT2Config(**shape)),
        SFTConfig(str(output), **settings),
        train_dataset=rows,
        processing_class=tokenizer,
    )


def test_sft(daemon: RunningDaemon, tmp_path: Path) -> None:
    whole = attach(made(tmp_path / "whole"), "whole", at=daemon.socket)
    whole.train()
    assert (tmp_path / "whole" / "README.md").is_file()  # SFTTrainer's own _save_checkpoint writes it
    assert sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert AutoTokenizer.from_pretrained(tmp_path / "whole" / "checkpoint-6").pad_token == "<pad>"
    resumed = attach(made(tmp_path / "whole"), "whole", at=daemon.socket)
    resumed.train(resume_from_checkpoint=4)
    end, other = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in end.items())
