import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast.integrations.transformers import attach

rows = [{"input_ids": torch.arange(row, row + 8) % 32, "labels": torch.arange(row, row + 8) % 32} for row in range(64)]
model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=8, vocab_size=32))
arguments = TrainingArguments("output", max_steps=30, save_steps=10, logging_steps=10, use_cpu=True, report_to="none")

trainer = attach(Trainer(model, arguments, train_dataset=rows), "example", at="checkpoints")
trainer.train()
