"""LoRA on a frozen base model: the checkpoint contains the adapter and its optimizer. Needs: pip install transformers peft

python examples/lora.py
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from holdfast import Checkpointer
from holdfast.integrations.peft import adapter, adapter_config

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--at", help="directory of the checkpoints (default: your daemon's, else ./holdfast-data)")
options = parser.parse_args()

torch.manual_seed(0)  # the same base model at every start; yours comes from from_pretrained()
sizes = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
)
model = get_peft_model(LlamaForCausalLM(sizes), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


def train() -> float:
    tokens = torch.randint(1, 64, (4, 16))
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


state = {"adapter_model": adapter(model), "optim": optimizer}
with Checkpointer("lora", state, assets=[adapter_config(model)], at=options.at) as checkpointer:
    first = checkpointer.restore() + 1
    print(f"starts with step {first}", flush=True)
    for step in range(first, options.steps + 1):
        loss = train()
        if step % 20 == 0 or step == options.steps:
            checkpointer.save(step, metrics={"loss": loss})
            print(f"step {step} loss {loss:.9f}", flush=True)
# To load the adapter: PeftModel.from_pretrained(base, "holdfast-data/lora/checkpoints/step-00000060")
