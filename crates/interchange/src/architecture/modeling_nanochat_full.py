"""nanochat's model for transformers, with what NanoChatForCausalLM lacks: a factor of queries and keys, windows, value embeddings,
residual scales, smear and backout (https://github.com/karpathy/nanochat, commit 92d63d4).

llm-rs writes this file into exports. AutoModelForCausalLM.from_pretrained(DIRECTORY, trust_remote_code=True) loads them, and
AutoTokenizer needs trust_remote_code=True, too.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers 5.24 has renamed the argument and the result past_key_values.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
VALUE_GATE_CHANNELS, SMEAR_GATE_CHANNELS = 12, 24


class NanoChatFullConfig(PretrainedConfig):
    model_type = "nanochat_full"
    keys_to_ignore_at_inference = [CACHE]

    def adds(self, addition):
        return addition in self.additions.split(",")

    def window_of(self, layer):
        """Returns the number of tokens that a token attends to, itself included, or None for all."""
        return self.window if self.window is not None and self.window_pattern[layer] == "S" else None


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.config, self.window = layer, config, config.window_of(layer)
        channels, self.size = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.c_q = linear(channels, self.heads * self.size)
        self.c_k = linear(channels, self.kv_heads * self.size)
        self.c_v = linear(channels, self.kv_heads * self.size)
        self.c_proj = linear(self.heads * self.size, channels)
        if config.adds("value-embeddings") and layer % 2 == (config.num_hidden_layers - 1) % 2:
            self.ve_gate = linear(min(VALUE_GATE_CHANNELS, channels), self.kv_heads)

    def forward(self, x, value_embedding, rotation, positions, real, cache):
        B, T, _ = x.shape
        q, k, v = (
            projection(x).view(B, T, -1, self.size) for projection in (self.c_q, self.c_k, self.c_v)
        )
        if value_embedding is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate.in_features]))
            v = v + gate.unsqueeze(-1) * value_embedding.view(B, T, self.kv_heads, self.size)
        normalized = lambda x: self.config.qk_gain * F.rms_norm(x, (self.size,), eps=self.config.rms_norm_eps)
        q, k, v = (x.transpose(1, 2) for x in (normalized(rotate(q, rotation)), normalized(rotate(k, rotation)), v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        # Cached tokens are the first ones, so the position of a key is its index.
        keys = torch.arange(k.shape[2], device=x.device)
        mask = keys <= positions[:, None]
        if self.window is not None:
            mask &= keys > positions[:, None] - self.window
        mask = mask[None, None]
        if real is not None:
            # Padding attends to itself, so that it has a result.
            mask = mask & (real[:, None, None, :] | (keys == positions[:, None]))
        group = self.heads // self.kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


def rotate(x, rotation):
    cos, sin = (part.to(x.dtype) for part in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = linear(config.hidden_size, config.intermediate_size)
        self.c_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.attn, self.mlp = Attention(config, layer), MLP(config)
        if config.adds("residual-scales"):
            self.resid_lambda, self.x0_lambda = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x, x0, *attention):
        normalized = lambda x: F.rms_norm(x, (x.shape[-1],), eps=self.eps)
        if hasattr(self, "resid_lambda"):
            x = self.resid_lambda * x + self.x0_lambda * x0
        x = x + self.attn(normalized(x), *attention)
        return x + self.mlp(normalized(x))


class NanoChatFullForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoChatFullConfig
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        vocab, channels, layers = config.vocab_size, config.hidden_size, range(config.num_hidden_layers)
        blocks = nn.ModuleList([Block(config, layer) for layer in layers])
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(vocab, channels), "h": blocks})
        if not config.tie_word_embeddings:
            self.lm_head = linear(channels, vocab)
        kv_channels = config.num_key_value_heads * config.head_dim
        has_values = [layer for layer in layers if hasattr(blocks[layer].attn, "ve_gate")]
        self.value_embeds = nn.ModuleDict({str(layer): nn.Embedding(vocab, kv_channels) for layer in has_values})
        if config.adds("smear"):
            self.smear_gate = linear(min(SMEAR_GATE_CHANNELS, channels), 1)
            self.smear_lambda = nn.Parameter(torch.zeros(1))
        if config.adds("backout"):
            self.backout_lambda = nn.Parameter(torch.zeros(1))
        self.post_init()

    def get_input_embeddings(self):
        return self.transformer.wte

    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        new = inputs["input_ids"].shape[1]
        # The smear needs the token before those that the cache does not have.
        inputs["previous_ids"] = input_ids[:, -new - 1 : -new] if new < input_ids.shape[1] else None
        return inputs

    def forward(
        self,
        input_ids,
        attention_mask=None,
        labels=None,
        use_cache=None,
        previous_ids=None,
        logits_to_keep=0,
        **others,
    ):
        config, layers = self.config, self.config.num_hidden_layers
        normalized = lambda x: F.rms_norm(x, (x.shape[-1],), eps=config.rms_norm_eps)
        cache = others.get(CACHE)
        if cache is None and use_cache:
            cache = DynamicCache()
        start, length = 0 if cache is None else cache.get_seq_length(), input_ids.shape[1]
        if start > 0 and config.adds("smear") and previous_ids is None:
            raise ValueError("previous_ids: expected the token before input_ids, which the smear needs, found None")
        positions = torch.arange(start, start + length, device=input_ids.device)
        real = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        # transformers 5 has it in rope_parameters.
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta
        channels = torch.arange(0, config.head_dim, 2, device=input_ids.device)
        frequencies = theta ** (-channels / config.head_dim)
        angles = torch.outer(positions.float(), frequencies.float())[:, None, :]
        rotation = angles.cos(), angles.sin()

        embedded = normalized(self.transformer.wte(input_ids))
        x = embedded
        if config.adds("smear"):
            gate = self.smear_lambda * torch.sigmoid(self.smear_gate(embedded[..., : self.smear_gate.in_features]))
            first = torch.zeros_like(embedded[:, :1])
            if previous_ids is not None:
                first = normalized(self.transformer.wte(previous_ids))
            before = torch.cat([first, embedded[:, :-1]], dim=1)
            if real is not None:
                shifted = F.pad(real, (1, 0))[:, start : start + length]
                before = before * shifted.unsqueeze(-1)
            x = embedded + gate * before
        x0 = x
        for layer, block in enumerate(self.transformer.h):
            name = str(layer)
            values = self.value_embeds[name](input_ids).to(x.dtype) if name in self.value_embeds else None
            x = block(x, x0, values, rotation, positions, real, cache)
            if layer == layers // 2:
                middle = x
        if config.adds("backout"):
            x = x - self.backout_lambda * middle
        x = normalized(x)[:, -logits_to_keep if logits_to_keep else 0 :]
        head = self.transformer.wte if config.tie_word_embeddings else self.lm_head
        logits = F.linear(x, head.weight).float()
        if config.final_logit_softcapping is not None:
            logits = config.final_logit_softcapping * torch.tanh(logits / config.final_logit_softcapping)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
