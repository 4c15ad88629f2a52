"""Load a checkpoint's directory with Transformers, as with any model, and continue a prompt.

python -m holdfast.demo.generate CHECKPOINT_DIRECTORY RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast_formats.digest import digest

PROMPT = "class "
NEW_TOKENS = 96


def main(checkpoint: str, result: str) -> None:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    weights = {
        name: digest(weight.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for name, weight in model.named_parameters()
    }
    prompt = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    model.eval()
    with torch.no_grad():
        tokens = model.generate(
            **prompt, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True
        )
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    Path(result).write_text(json.dumps({"weights": weights, "text": text}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
