"""The trainable draft methods: a small Llama (draft model), Medusa heads, an EAGLE-3 head, a DFlash head.

A call of a module returns its loss on rows of the target's text: the Kullback-Leibler divergence of its predictions from
those of the target. ``nucleate.speculative.neural`` runs the trained weights in NumPy, and cites the papers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel

WIDTH, HEADS, KV_HEADS, SIZE = 192, 6, 2, 32  # of the target and of the heads
EPSILON = 1e-5
LAYERS = (2, 4, 6)
"""The layers of the target whose inputs EAGLE and DFlash use; 6 is the input of the final norm."""


class Rows(NamedTuple):
    """A batch of tokens with the outputs of the target."""

    ids_BT: Tensor
    hidden: dict[int, Tensor]  #: [B, T, width] before each layer of LAYERS
    last_BTX: Tensor  #: normalised, as the unembedding reads it
    logits_BTV: Tensor


def unit(x: Tensor) -> Tensor:
    """The rows, normalised to a mean square of 1."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


class Norm(nn.Module):
    """Root-mean-square normalisation."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return unit(x) * self.weight


def linear(size_in: int, size_out: int) -> nn.Linear:
    layer = nn.Linear(size_in, size_out, bias=False)
    nn.init.normal_(layer.weight, std=0.6 / math.sqrt(size_in))
    return layer


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary positions of [..., heads, size], halves as pairs; positions [...]."""
    frequencies = theta ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = (positions[..., None] * frequencies)[..., None, :]
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(target || drafted) of each row."""
    target = target.float().log_softmax(-1)
    return (target.exp() * (target - logits.float().log_softmax(-1))).sum(-1)


def anchors(rows: int, length: int, count: int) -> Tensor:
    """Random positions [rows, count] below ``length``, different in every row."""
    return torch.rand(rows, length).topk(count, dim=1).indices.sort(dim=1).values


def take(x: Tensor, places: Tensor) -> Tensor:
    """x [B, T, ...] at positions [B, A]: [B, A, ...]."""
    return x[torch.arange(len(x))[:, None], places]


def weights(count: int, rate: float = 0.8) -> Tensor:
    """The loss weight of each draft position: later ones are reached less often."""
    weight = rate ** torch.arange(count)
    return weight / weight.sum()


class Small(nn.Module):
    """A small Llama. It uses the embeddings of the target, projected by two matrices."""

    def __init__(self, width: int = 128, layers: int = 2, inner: int = 384) -> None:
        super().__init__()
        self.config = LlamaConfig(
            vocab_size=4096, bos_token_id=0, eos_token_id=0,
            hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
            num_attention_heads=width // SIZE, num_key_value_heads=2, max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rms_norm_eps=EPSILON,
        )  # fmt: skip
        self.model = LlamaModel(self.config)
        self.model.embed_tokens = nn.Identity()
        self.embed, self.unembed = linear(WIDTH, width), linear(width, WIDTH)

    def forward(self, rows: Rows, table_VX: Tensor) -> Tensor:
        x = self.model(inputs_embeds=self.embed(table_VX[rows.ids_BT]) * 8.0, use_cache=False).last_hidden_state
        places = anchors(*rows.ids_BT.shape, rows.ids_BT.shape[1] // 2)
        logits = self.unembed(take(x, places)) @ table_VX.T
        return divergence(logits, take(rows.logits_BTV, places)).mean()[None]


class Medusa(nn.Module):
    """A head for each token after the next one: two residual blocks before the target's unembedding."""

    def __init__(self, count: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.ModuleList(linear(WIDTH, WIDTH) for _ in range(blocks)) for _ in range(count))
        for head in self.heads:
            nn.init.zeros_(head[-1].weight)

    def forward(self, rows: Rows, table_VX: Tensor) -> Tensor:
        count = len(self.heads)
        places = anchors(len(rows.ids_BT), rows.ids_BT.shape[1] - count, 128)
        last = take(rows.last_BTX, places)
        losses = []
        for i, head in enumerate(self.heads, 1):
            x = last
            for block in head:
                x = x + functional.silu(block(x))
            losses.append(divergence(x @ table_VX.T, take(rows.logits_BTV, places + i)).mean())
        return torch.stack(losses)


class Mixing(nn.Module):
    """The attention and MLP of a head; keys and values are arguments."""

    def __init__(
        self,
        size_in: int,
        inner: int,
        width: int = WIDTH,
        heads: int = HEADS,
        kv_heads: int = KV_HEADS,
        size: int = SIZE,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        self.query, self.key, self.value = (linear(size_in, count * size) for count in (heads, kv_heads, kv_heads))
        self.out = linear(heads * size, width)
        self.mlp_norm = Norm(width)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[..., kv heads, group, size]."""
        split = rotate(self.query(x).unflatten(-1, (self.heads, self.size)), positions)
        return split.unflatten(-2, (self.kv_heads, self.heads // self.kv_heads))

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., kv heads, size]."""
        return (
            rotate(self.key(x).unflatten(-1, (self.kv_heads, self.size)), positions),
            self.value(x).unflatten(-1, (self.kv_heads, self.size)).float(),
        )

    def rest(self, x: Tensor, heads: Tensor) -> Tensor:
        x = x + self.out(heads.flatten(-3))
        normal = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(normal)) * self.up(normal))


def fused(rows: Rows) -> Tensor:
    """The hidden states of the three layers, each normalised, concatenated."""
    return torch.cat([unit(rows.hidden[layer]) for layer in LAYERS], -1)


class Eagle(nn.Module):
    """A layer with a hidden state of the target and the next token as inputs; further steps use its own output."""

    def __init__(self, inner: int = 512, steps: int = 5) -> None:
        super().__init__()
        self.steps = steps
        self.fuse = linear(len(LAYERS) * WIDTH, WIDTH)
        self.token_norm, self.hidden_norm, self.norm = Norm(WIDTH), Norm(WIDTH), Norm(WIDTH)
        self.layer = Mixing(2 * WIDTH, inner)

    def forward(self, rows: Rows, table_VX: Tensor) -> Tensor:
        """Each step uses the outputs of the previous one, as in inference, but the tokens of the text."""
        batch, length = rows.ids_BT.shape
        places = anchors(batch, length - self.steps - 1, 64)
        context = self.fuse(self.inputs(rows)[:, :-1])
        tokens = self.token_norm(table_VX[rows.ids_BT])
        keys, values = self.layer.keys(
            torch.cat([tokens[:, 1:], self.hidden_norm(context)], -1), torch.arange(length - 1).expand(batch, -1)
        )
        start_B = torch.where(torch.rand(batch) < 0.3, torch.rand(batch) * 0.8 * length, 0).long()  # a late context
        start_B = torch.minimum(start_B, places[:, 0])
        index = torch.arange(length - 1)
        hidden_BAT = (index > places[..., None]) | (index < start_B[:, None, None])
        x, own_keys, own_values, losses = take(context, places), [], [], []
        for step in range(self.steps):
            both = torch.cat([take(tokens, places + step + 1), self.hidden_norm(x)], -1)
            queries = self.layer.queries(both, places + step) * self.layer.size**-0.5
            scores = torch.einsum("bakgd,btkd->bakgt", queries, keys)
            scores = scores.masked_fill(hidden_BAT[:, :, None, None], -torch.inf)
            if step:
                key, value = self.layer.keys(both, places + step)
                own_keys.append(key)
                own_values.append(value)
                own = torch.einsum("bakgd,bankd->bakgn", queries, torch.stack(own_keys, 2))
                scores = torch.cat([scores, own], -1)
            mix = scores.softmax(-1)
            heads = torch.einsum("bakgt,btkd->bakgd", mix[..., : length - 1], values)
            if step:
                heads = heads + torch.einsum("bakgn,bankd->bakgd", mix[..., length - 1 :], torch.stack(own_values, 2))
            x = self.layer.rest(x, heads)
            logits = self.unembed(self.norm(x), table_VX)
            losses.append(divergence(logits, take(rows.logits_BTV, places + step + 1)).mean())
        return torch.stack(losses)

    def inputs(self, rows: Rows) -> Tensor:
        """What ``fuse`` reads, [B, T, layers * width]."""
        return fused(rows)

    def unembed(self, x: Tensor, table_VX: Tensor) -> Tensor:
        """The logits of the tokens that the head can draft."""
        return x @ table_VX.T


class DFlash(nn.Module):
    """A token and masked positions, predicted at once with attention to each other and the target's hidden states."""

    def __init__(self, inner: int = 352, layers: int = 2, count: int = 4) -> None:
        super().__init__()
        self.count = count
        self.fuse = linear(len(LAYERS) * WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.randn(count, WIDTH) * 0.5)
        self.context_norm, self.norm = Norm(WIDTH), Norm(WIDTH)
        self.layers = nn.ModuleList(Mixing(WIDTH, inner) for _ in range(layers))
        self.norms = nn.ModuleList(Norm(WIDTH) for _ in range(layers))

    def forward(self, rows: Rows, table_VX: Tensor) -> Tensor:
        batch, length = rows.ids_BT.shape
        places = 1 + anchors(batch, length - self.count - 1, 48)
        number, size = places.shape[1], 1 + self.count
        context = self.context_norm(self.fuse(fused(rows)))
        position = torch.arange(length).expand(batch, -1)
        block = places[..., None] + torch.arange(size)
        first = unit(table_VX[take(rows.ids_BT, places)])[:, :, None]
        x = torch.cat([first, self.empty.expand(batch, number, -1, -1)], 2)
        start_B = torch.where(torch.rand(batch) < 0.3, torch.rand(batch) * 0.8 * length, 0).long()
        start_B = torch.minimum(start_B, places[:, 0] - 1)
        index = torch.arange(length)
        hidden_BAT = (index >= places[..., None]) | (index < start_B[:, None, None])
        for layer, norm in zip(self.layers, self.norms, strict=True):
            keys, values = layer.keys(context, position)
            normal = norm(x)
            queries = layer.queries(normal, block) * SIZE**-0.5
            own_keys, own_values = layer.keys(normal, block)
            scores = torch.einsum("banghd,btgd->banght", queries, keys)
            scores = scores.masked_fill(hidden_BAT[:, :, None, None, None], -torch.inf)
            own = torch.einsum("banghd,bamgd->banghm", queries, own_keys)
            mix = torch.cat([scores, own], -1).softmax(-1)
            heads = torch.einsum("banght,btgd->banghd", mix[..., :length], values)
            heads = heads + torch.einsum("banghm,bamgd->banghd", mix[..., length:], own_values)
            x = layer.rest(x, heads)
        logits = self.norm(x[:, :, 1:]) @ table_VX.T
        target = torch.stack([take(rows.logits_BTV, places + i) for i in range(self.count)], 2)
        return divergence(logits, target).mean((0, 1))


PARTS = {"draft": Small, "medusa": Medusa, "eagle": Eagle, "dflash": DFlash}
