"""A transformers Trainer with one additional line, `attach`. Needs: pip install transformers accelerate

python examples/trainer.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast.integrations.transformers import attach

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--at", help="directory of the checkpoints (default: your daemon's, else ./holdfast-data)")
options = parser.parse_args()

rows = [{"input_ids": torch.arange(row, row + 8) % 32, "labels": torch.arange(row, row + 8) % 32} for row in range(64)]
model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=8, vocab_size=32))
arguments = TrainingArguments(
    "trainer-output", max_steps=options.steps, save_steps=10, logging_steps=10, save_total_limit=3, report_to="none"
)

trainer = attach(Trainer(model, arguments, train_dataset=rows), "trainer", at=options.at)
trainer.train()  # continues from the newest undamaged checkpoint, if there is one
print(f"ended at step {trainer.state.global_step}", flush=True)
