#!/usr/bin/env python3
"""Makes the reference files in tests/data/peft: small models with low-rank adapters of PEFT, their loss, logits and gradients.

    python3 scripts/peft_reference.py tests/data/transformers FOLDER

The models are those in tests/data/transformers, and a GPT-2 in FOLDER/gpt2-base. For each of them, FOLDER/NAME contains the directory
that PEFT saves (adapter_config.json, adapter_model.safetensors in fp32) and reference.safetensors: inputs and targets (B, T), logits
(B, T, V), the gradient of every adapter under its name in adapter_model.safetensors, and the losses and gradient norms of ten AdamW
steps on that batch. Values are computed in double precision on the CPU and stored in single precision.
Needs torch, transformers 5, peft and safetensors.
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

B, T, V, STEPS = 2, 24, 97, 10
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Base model, settings of the adapters.
MODELS = {
    "llama": ("llama-tied", {"r": 3, "lora_alpha": 5, "target_modules": LLAMA}),
    # Scaled by the square root of the rank, and without adapters of keys.
    "qwen3": ("qwen3", {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True}),
    # Rotates in the other direction.
    "nanochat": ("nanochat", {"r": 9, "lora_alpha": 9, "target_modules": "all-linear"}),
    # One matrix for queries, keys and values. Two modules are named c_proj, of which one has adapters.
    "gpt2": ("gpt2-base", {"r": 2, "lora_alpha": 7, "target_modules": ["c_attn", "attn.c_proj", "c_fc"], "fan_in_fan_out": True}),
}  # fmt: skip


def make_gpt2(path):
    torch.manual_seed(1234)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=32, vocab_size=V))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.1)
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)


def write(models, folder, name):
    base, settings = MODELS[name]
    path = folder / base if base == "gpt2-base" else models / base
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(4321)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.1)
    # Relative to a directory above that of the adapters.
    model.peft_config["default"].base_model_name_or_path = ("peft/" if base == "gpt2-base" else "transformers/") + base
    model.save_pretrained(folder / name)
    (folder / name / "README.md").unlink(missing_ok=True)
    # Without the dropout of GPT-2.
    model = model.double().eval()
    batch = torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(5))
    inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    adapters = {key.replace(".default", ""): p for key, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(adapters.values(), **ADAMW)
    tensors, losses, norms = {"inputs": inputs.int(), "targets": targets.int()}, [], []
    for step in range(STEPS):
        logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            tensors["logits"] = logits.detach().float()
            tensors |= {key: p.grad.float() for key, p in adapters.items()}
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(adapters.values(), CLIP).item())
        optimizer.step()
    tensors |= {"losses": torch.tensor(losses), "norms": torch.tensor(norms)}
    save_file({key: t.contiguous() for key, t in tensors.items()}, folder / name / "reference.safetensors")
    print(name, len(adapters), losses[0], losses[-1], norms[0])


def main():
    models, folder = Path(sys.argv[1]), Path(sys.argv[2])
    make_gpt2(folder / "gpt2-base")
    for name in MODELS:
        write(models, folder, name)


main()
