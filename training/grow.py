"""Expands the embedded model to a larger Llama with almost the same output, as in Net2Net (arXiv 1511.05641).

Channels, neurons, heads and some layers are copied. The weights that use copies are divided among them, unevenly, so
that training can make the copies different. Without copied layers, the output is identical.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, HEADS, KV_HEADS, INNER = 512, 16, 4, 1408
LAYERS = (0, 1, 2, 2, 3, 4, 4, 5)
"""For each layer, the layer of the embedded model that it copies."""


def copies(count: int, size: int) -> Tensor:
    """For each of ``size`` copies, which of ``count`` originals it copies; each at least once."""
    of = torch.cat([torch.arange(count).repeat(size // count), torch.randperm(count)[: size % count]])
    return of[torch.randperm(size)]


def shares(of: Tensor, power: int = 1) -> Tensor:
    """A random share for each copy; the powers of the shares of an original sum to 1."""
    weight = torch.rand(len(of)) + 0.5
    total = torch.zeros(int(of.max()) + 1).index_add(0, of, weight**power)
    return weight / total[of] ** (1 / power)


class Growth:
    """Expands the embedded model."""

    def __init__(self, small: LlamaForCausalLM) -> None:
        self.given, self.own = small.config, small.state_dict()
        self.of = copies(self.given.hidden_size, WIDTH)
        self.channel = shares(self.of, 2)  # preserves the norm of a vector, and the logits
        self.part = (self.given.hidden_size / WIDTH) ** 0.5  # the mean square is taken over more channels
        group, before = HEADS // KV_HEADS, self.given.num_attention_heads // self.given.num_key_value_heads
        self.key_of = torch.arange(KV_HEADS) * self.given.num_key_value_heads // KV_HEADS
        self.query_of = torch.cat(
            [old * before + (group * new + torch.arange(group)) % before for new, old in enumerate(self.key_of)]
        )

    def config(self) -> LlamaConfig:
        given = self.given
        return LlamaConfig(
            hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=len(LAYERS), num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, head_dim=given.head_dim, vocab_size=given.vocab_size,
            max_position_embeddings=given.max_position_embeddings, rope_parameters=given.rope_parameters,
            rms_norm_eps=given.rms_norm_eps * self.part**2, tie_word_embeddings=True,
            bos_token_id=given.bos_token_id, eos_token_id=given.eos_token_id,
        )  # fmt: skip

    def weights(self) -> dict[str, Tensor]:
        table = self.reader(self.own["model.embed_tokens.weight"])
        made = {
            "model.embed_tokens.weight": table,
            "lm_head.weight": table,
            "model.norm.weight": self.norm("model.norm"),
        }
        for layer, source in enumerate(LAYERS):
            for name, weight in self.layer(f"model.layers.{source}.", LAYERS.count(source)).items():
                made[f"model.layers.{layer}.{name}.weight"] = weight
        return made

    def layer(self, prefix: str, times: int) -> dict[str, Tensor]:
        """A layer that is copied several times; each copy adds a share of its output."""
        inner = copies(self.given.intermediate_size, INNER)
        return {
            **{name: self.norm(prefix + name) for name in ("input_layernorm", "post_attention_layernorm")},
            "self_attn.q_proj": self.reader(self.heads(self.found(prefix, "self_attn.q"), self.query_of)),
            "self_attn.k_proj": self.reader(self.heads(self.found(prefix, "self_attn.k"), self.key_of)),
            "self_attn.v_proj": self.reader(self.heads(self.found(prefix, "self_attn.v"), self.key_of)),
            "self_attn.o_proj": self.writer(
                self.heads(self.found(prefix, "self_attn.o").T, self.query_of, shares(self.query_of) / times).T
            ),
            "mlp.gate_proj": self.reader(self.found(prefix, "mlp.gate")[inner]),
            "mlp.up_proj": self.reader(self.found(prefix, "mlp.up")[inner]),
            "mlp.down_proj": self.writer(self.found(prefix, "mlp.down")[:, inner] * shares(inner) / times),
        }

    def found(self, prefix: str, name: str) -> Tensor:
        return self.own[f"{prefix}{name}_proj.weight"]

    def norm(self, name: str) -> Tensor:
        return self.own[f"{name}.weight"][self.of] * self.part

    def reader(self, weight_RX: Tensor) -> Tensor:
        return weight_RX[:, self.of] * self.channel

    def writer(self, weight_XR: Tensor) -> Tensor:
        return weight_XR[self.of] * self.channel[:, None]

    def heads(self, weight_RX: Tensor, of: Tensor, share: Tensor | None = None) -> Tensor:
        """The rows of the copied heads, scaled by their shares."""
        rows = weight_RX.unflatten(0, (-1, self.given.head_dim))[of]
        return (rows if share is None else rows * share[:, None, None]).flatten(0, 1)


def grown(small: LlamaForCausalLM) -> LlamaForCausalLM:
    """The larger model."""
    growth = Growth(small)
    model = LlamaForCausalLM(growth.config())
    model.load_state_dict(growth.weights())
    return model


@torch.no_grad()
def disturb(model: LlamaForCausalLM, noise: float) -> None:
    """Add noise to each matrix, relative to its size, so that copies differ."""
    for weight in model.parameters():
        if weight.ndim == 2:
            weight += torch.randn_like(weight) * weight.square().mean().sqrt() * noise
