#!/usr/bin/env python3
"""Makes the reference files in tests/data/transformers: small random models of transformers, their loss, logits and gradients.

    python3 scripts/transformers_reference.py FOLDER [NAME ...]

For each model, FOLDER/NAME contains a Hugging Face directory (config.json, model.safetensors in fp32) and reference.safetensors:
inputs and targets (B, T), logits (B, T, V), the gradient of every parameter under its name, and the losses and gradient norms of
ten AdamW steps on that batch. Some models also have documents.safetensors: the same with attention within documents, which begin at
the token SEPARATOR, and positions that restart in each document. conversations.safetensors has rows of several conversations (C, T),
which begin where the tensor starts is 1. Targets of -1 have no loss, as the tokens of users and padding; the loss is the mean over the
others. All targets of two rows are masked. The gradients of models with experts include the load-balancing loss of each layer,
divided by the number of layers; the losses do not. Values are computed in double precision on the CPU and stored in
single precision.
The weights of models named *-bf16 are in bf16. Their reference contains inputs, logits, and bf16_logits: the logits that
transformers computes in bf16.
Needs torch, transformers 5 and safetensors.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import NanoChatConfig, NanoChatForCausalLM, OlmoeConfig, OlmoeForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

B, T, V, STEPS = 2, 24, 97, 10
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
WEIGHT_DECAY, CLIP = 0.1, 1.0
# Token that begins a document, and its positions (row, column): documents of one token, at the start and in the middle of a row.
SEPARATOR = V - 1
SEPARATORS = [(0, 7), (0, 8), (0, 20), (1, 0), (1, 1), (1, 2), (1, 13)]
# Rows of conversations, the first tokens of their conversations, and the first column of the padding. The targets of MASKED rows have no loss.
C, MASKED = 8, (2, 3)
STARTS = [(0, 7, 15), (0, 1, 2), (0, 12), (0,), (0, 5), (0, 23), (0, 8, 9, 16), (0, 11)]
PADDING = [T, T, T, T, 17, T, T, 20]
WITH_CONVERSATIONS = ["llama-tied", "llama-untied", "qwen3", "nanochat", "mistral"]
WITH_DOCUMENTS = ["llama-tied", "qwen3", "nanochat", "mistral", "qwen3-windows"]
COMMON = {"vocab_size": V, "num_hidden_layers": 2, "max_position_embeddings": 32, "attn_implementation": "eager"}
SCALED = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip

MODELS = {
    # Tied head, scaled rotary positions, three query heads for each key-value head.
    "llama-tied": (LlamaForCausalLM, LlamaConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=80, rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope_parameters=SCALED, **COMMON)),
    # Untied head, head size unlike C / NH, one key-value head.
    "llama-untied": (LlamaForCausalLM, LlamaConfig(
        hidden_size=40, num_attention_heads=4, num_key_value_heads=1, head_dim=16, intermediate_size=72, rms_norm_eps=1e-3,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **COMMON)),
    # Biases of queries, keys and values.
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **COMMON)),
    # YaRN, with sequences three times as long as those of its pretraining.
    "qwen2-yarn": (Qwen2ForCausalLM, Qwen2Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_parameters=YARN, **COMMON)),
    # Norm of queries and keys, more attention channels than C.
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=56, rms_norm_eps=1e-6,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **COMMON)),
    # ReLU squared, norms without weights, a norm of queries and keys after their rotation, logits within +-15.
    # The row of a padding token would have no gradient.
    "nanochat": (NanoChatForCausalLM, NanoChatConfig(
        pad_token_id=None, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **COMMON)),
    # A window in both layers.
    "mistral": (MistralForCausalLM, MistralConfig(
        hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=80, rms_norm_eps=1e-5, sliding_window=5,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, **COMMON)),
    # A window in the first layer only.
    "qwen3-windows": (Qwen3ForCausalLM, Qwen3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=56, rms_norm_eps=1e-6,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, use_sliding_window=True,
        sliding_window=3, layer_types=["sliding_attention", "full_attention"], **COMMON)),
    # Normalized weights of two of five experts.
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, moe_intermediate_size=24, num_experts=5,
        num_experts_per_tok=2, norm_topk_prob=True, router_aux_loss_coef=0.1, output_router_logits=True,
        experts_implementation="eager", **COMMON)),
    # Weights of three of seven experts that are not normalized, and a norm of all heads.
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=16, rms_norm_eps=1e-5,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, num_experts=7,
        num_experts_per_tok=3, norm_topk_prob=False, router_aux_loss_coef=0.1, output_router_logits=True, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, experts_implementation="eager", **COMMON)),
    # Head sizes that the GPU kernels support.
    "llama-bf16": (LlamaForCausalLM, LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=128, rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope_parameters=SCALED, **COMMON)),
    "qwen2-bf16": (Qwen2ForCausalLM, Qwen2Config(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=1, intermediate_size=128, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **COMMON)),
    "qwen3-bf16": (Qwen3ForCausalLM, Qwen3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=128, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **COMMON)),
}  # fmt: skip


def make_model(name):
    """Returns a model whose parameters exercise every term: norms differ from 1 and biases from 0, and the matrices are large
    enough that attention is far from uniform."""
    kind, config = MODELS[name]
    torch.manual_seed(1234)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
            else:
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    return model


def tokens():
    return torch.randint(0, V, (B, T + 1), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def write_bf16(name, folder):
    """Writes a model in bf16, and its logits in double precision and in bf16."""
    make_model(name).bfloat16().save_pretrained(folder)
    inputs = tokens()[:, :-1].contiguous()
    load = lambda dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    exact, rounded = (load(dtype)(inputs).logits.double() for dtype in (torch.float64, torch.bfloat16))
    save_file({"inputs": inputs.int(), "logits": exact.float(), "bf16_logits": rounded.float()}, folder / "reference.safetensors")
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(name, "root mean square error of the logits in bf16", (rounded - exact).square().mean().sqrt().item())


def conversations():
    """Returns inputs and targets (C, T), and whether each input begins a conversation. Padding consists of conversations of one token."""
    batch = torch.randint(0, V, (C, T + 1), generator=torch.Generator().manual_seed(7))
    column = torch.arange(T + 1)
    starts = torch.zeros(C, T + 1, dtype=torch.bool)
    for row in range(C):
        starts[row, list(STARTS[row])] = True
        starts[row, PADDING[row] :] = True
    # Tokens of the assistant. The first one of a conversation has no loss.
    has_loss = ((column + 3 * torch.arange(C)[:, None]) % 5 < 3) & ~starts
    has_loss[list(MASKED)] = False
    targets = torch.where(has_loss[:, 1:], batch[:, 1:], -1)
    return batch[:, :-1].contiguous(), targets.contiguous(), starts[:, :-1].contiguous()


def documents_of(starts, config):
    """Returns the masks (B, 1, T, T) of documents and windows, added to the scores, and the positions (B, T). Documents begin where
    starts (B, T) is true."""
    number = starts.cumsum(1)
    position = torch.arange(T)
    distance = position[:, None] - position
    visible = (number[:, :, None] == number[:, None, :]) & (distance >= 0)

    def mask(window):
        hidden = ~(visible & (distance < window))
        return torch.zeros(len(starts), 1, T, T, dtype=torch.float64).masked_fill(hidden[:, None], float("-inf"))

    window = getattr(config, "sliding_window", None) or T
    masks = {"full_attention": mask(T), "sliding_attention": mask(window)}
    # Classes whose layers differ take a mask for each kind.
    attention_mask = masks if hasattr(config, "layer_types") else mask(window)
    return {"attention_mask": attention_mask, "position_ids": visible.sum(2) - 1}


def loss_of(model, inputs, targets, starts):
    """Returns the loss, the logits and the load-balancing loss."""
    config, balance = model.config, 0.0
    options = {} if starts is None else documents_of(starts, config)
    has_experts = hasattr(config, "num_experts")
    output = model(inputs, **options, **({"output_router_logits": True} if has_experts else {}))
    if has_experts:
        layers = [load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok) for logits in output.router_logits]
        balance = config.router_aux_loss_coef * sum(layers) / len(layers)
    logits = output.logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), logits, balance


def gradients(model):
    """Returns the gradients by the names in files: those of each expert by itself."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.float()
        if gradient.dim() < 3:
            found[name] = gradient
            continue
        prefix, kinds = name.rsplit(".", 1)
        kinds = ["gate_proj", "up_proj"] if kinds == "gate_up_proj" else [kinds]
        for expert, matrices in enumerate(gradient):
            for kind, matrix in zip(kinds, matrices.chunk(len(kinds))):
                found[f"{prefix}.{expert}.{kind}.weight"] = matrix
    return found


def write_reference(name, path, kind):
    """Writes the values of a model with random weights, and returns what to print."""
    model = make_model(name)
    model.save_pretrained(path.parent)
    model = model.double()
    if kind == "conversations":
        inputs, targets, starts = conversations()
    else:
        batch = tokens()
        if kind == "documents":
            for row, column in SEPARATORS:
                batch[row, column] = SEPARATOR
        inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        starts = inputs == SEPARATOR if kind == "documents" else None
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    tensors, losses, norms = {"inputs": inputs.int(), "targets": targets.int()}, [], []
    if kind == "conversations":
        tensors["starts"] = starts.int()
    for step in range(STEPS):
        loss, logits, balance = loss_of(model, inputs, targets, starts)
        optimizer.zero_grad()
        (loss + balance).backward()
        if step == 0:
            tensors["logits"] = logits.detach().float()
            tensors |= gradients(model)
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    tensors |= {"losses": torch.tensor(losses), "norms": torch.tensor(norms)}
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    return losses[0], losses[-1], norms[0]


def main():
    folder = Path(sys.argv[1])
    for name in sys.argv[2:] or MODELS:
        if name.endswith("-bf16"):
            write_bf16(name, folder / name)
            continue
        kinds = ["reference"]
        kinds += ["documents"] * (name in WITH_DOCUMENTS) + ["conversations"] * (name in WITH_CONVERSATIONS)
        for kind in kinds:
            print(name, kind, *write_reference(name, folder / name / f"{kind}.safetensors", kind))
        (folder / name / "generation_config.json").unlink(missing_ok=True)


main()
