"""Writes a model folder as a folder for OpenVINO, with its tokenizer and configs.

Run: python training/write_openvino.py OUTPUT [--model FOLDER]

By default the embedded model. It converts plain Llama models with float32 weights; ``optimum-cli export openvino``
converts everything else. The graph has the form of that tool: a stateful model with one KV cache per sequence, which
OpenVINO can turn into one with paged attention. Needs ``pip install openvino safetensors torch``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo
from safetensors.torch import load_file

import nucleate.models.loader

COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DYNAMIC = ov.Dimension(-1)


class LlamaGraph:
    """The graph of a plain Llama model."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text("utf-8"))
        self.weights = load_file(folder / "model.safetensors")
        heads = self.config["num_attention_heads"]
        self.heads, self.kv_heads = heads, self.config.get("num_key_value_heads", heads)
        self.head_size = self.config.get("head_dim") or self.config["hidden_size"] // heads
        self.parameters = {
            name: op.parameter([DYNAMIC] * rank, kind, name=name)
            for name, rank, kind in (
                ("input_ids", 2, np.int64),
                ("attention_mask", 2, np.int64),
                ("position_ids", 2, np.int64),
                ("beam_idx", 1, np.int32),
            )
        }
        for name, node in self.parameters.items():
            node.output(0).set_names({name})
        self.sinks: list[Any] = []

    def weight(self, name: str) -> Any:
        """A weight as a constant."""
        return op.constant(self.weights[name].float().numpy())

    def linear(self, x: Any, name: str) -> Any:
        """x times the transposed weight."""
        return op.matmul(x, self.weight(name), False, True)

    def norm(self, x: Any, name: str) -> Any:
        """RMSNorm."""
        squares = op.reduce_mean(op.power(x, op.constant(np.float32(2))), op.constant(np.int64([-1])), True)
        root = op.sqrt(op.add(squares, op.constant(np.float32(self.config["rms_norm_eps"]))))
        return op.multiply(op.divide(x, root), self.weight(name))

    def split(self, x: Any, heads: int) -> Any:
        """[B, T, heads * size] as [B, heads, T, size]."""
        shaped = op.reshape(x, op.constant(np.int64([0, 0, heads, self.head_size])), True)
        return op.transpose(shaped, op.constant(np.int64([0, 2, 1, 3])))

    def rotate(self, x: Any, cosine: Any, sine: Any) -> Any:
        """Rotary position embeddings."""
        half = self.head_size // 2
        first, second = (
            op.slice(x, op.constant([start]), op.constant([end]), op.constant([1]), op.constant([3]))
            for start, end in ((0, half), (half, self.head_size))
        )
        turned = op.concat([op.multiply(second, op.constant(np.float32(-1))), first], -1)
        return op.add(op.multiply(x, cosine), op.multiply(turned, sine))

    def cached(self, x: Any, name: str, batch: Any) -> Any:
        """The states of the sequence so far, with these."""
        shape = ov.PartialShape([DYNAMIC, ov.Dimension(self.kv_heads), DYNAMIC, ov.Dimension(self.head_size)])
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = shape, ov.Type.f32, name
        variable = Variable(info)
        sizes = [op.constant(np.int64([size])) for size in (self.kv_heads, 0, self.head_size)]
        empty = op.broadcast(op.constant(np.float32(0)), op.concat([batch, *sizes], 0))
        past = op.read_value(empty, variable)
        past = op.gather(past, self.parameters["beam_idx"], op.constant(np.int64(0)))
        every = op.concat([past, x], 2)
        self.sinks.append(op.assign(every, variable))
        return every

    def repeated(self, x: Any) -> Any:
        """Keys or values for each head."""
        count = self.heads // self.kv_heads
        if count == 1:
            return x
        wide = op.unsqueeze(x, op.constant(np.int64(2)))
        shape = op.shape_of(x, output_type="i64")
        parts = [op.gather(shape, op.constant(np.int64([i])), op.constant(np.int64(0))) for i in range(4)]
        wide = op.broadcast(
            wide, op.concat([*parts[:2], op.constant(np.int64([count])), *parts[2:]], 0), "BIDIRECTIONAL"
        )
        return op.reshape(wide, op.constant(np.int64([0, self.heads, -1, self.head_size])), True)

    def mask(self) -> Any:
        """The causal mask [1, 1, T, L]: 0 or the lowest number."""
        positions, total = (
            self.parameters["position_ids"],
            op.gather(
                op.shape_of(self.parameters["attention_mask"], output_type="i64"),
                op.constant(np.int64(1)),
                op.constant(np.int64(0)),
            ),
        )
        keys = op.range(op.constant(np.int64(0)), total, op.constant(np.int64(1)), "i64")
        visible = op.less_equal(
            keys, op.unsqueeze(op.unsqueeze(positions, op.constant(np.int64(1))), op.constant(np.int64(3)))
        )
        return op.select(visible, op.constant(np.float32(0)), op.constant(np.float32(-65504)))

    def build(self) -> ov.Model:
        """The whole model."""
        config, ids = self.config, self.parameters["input_ids"]
        x = op.gather(self.weight("model.embed_tokens.weight"), ids, op.constant(np.int64(0)))
        batch = op.gather(op.shape_of(ids, output_type="i64"), op.constant(np.int64([0])), op.constant(np.int64(0)))
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        inverse = theta ** -(np.arange(0, self.head_size, 2) / self.head_size)
        positions = op.convert(op.unsqueeze(self.parameters["position_ids"], op.constant(np.int64(2))), "f32")
        angles = op.multiply(positions, op.constant(np.concatenate([inverse, inverse]).astype(np.float32)))
        cosine, sine = (op.unsqueeze(function(angles), op.constant(np.int64(1))) for function in (op.cos, op.sin))
        mask, scale = self.mask(), op.constant(np.float32(self.head_size**-0.5))
        for number in range(config["num_hidden_layers"]):
            layer = f"model.layers.{number}"
            y = self.norm(x, f"{layer}.input_layernorm.weight")
            query, key, value = (
                self.split(self.linear(y, f"{layer}.self_attn.{name}_proj.weight"), heads)
                for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            key = self.cached(
                self.rotate(key, cosine, sine), f"past_key_values.{number}.keypresent.{number}.key", batch
            )
            value = self.cached(value, f"past_key_values.{number}.valuepresent.{number}.value", batch)
            found = op.scaled_dot_product_attention(
                self.rotate(query, cosine, sine), self.repeated(key), self.repeated(value), mask, scale
            )
            found = op.transpose(found, op.constant(np.int64([0, 2, 1, 3])))
            found = op.reshape(found, op.constant(np.int64([0, 0, self.heads * self.head_size])), True)
            x = op.add(x, self.linear(found, f"{layer}.self_attn.o_proj.weight"))
            y = self.norm(x, f"{layer}.post_attention_layernorm.weight")
            gate, up = (self.linear(y, f"{layer}.mlp.{name}_proj.weight") for name in ("gate", "up"))
            x = op.add(x, self.linear(op.multiply(op.swish(gate), up), f"{layer}.mlp.down_proj.weight"))
        head = "lm_head.weight" if "lm_head.weight" in self.weights else "model.embed_tokens.weight"
        logits = op.result(self.linear(self.norm(x, "model.norm.weight"), head))
        logits.output(0).set_names({"logits"})
        return ov.Model([logits], self.sinks, [*self.parameters.values()], "llama")


def write(folder: Path, target: Path) -> None:
    """Write the model of a folder. Raises ValueError for a model that is not a plain Llama."""
    kind = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    if kind != "llama":
        raise ValueError(f"model_type must be llama, got {kind!r}")
    target.mkdir(parents=True, exist_ok=True)
    ov.save_model(LlamaGraph(folder).build(), target / "openvino_model.xml", compress_to_fp16=False)
    for name in COPIED:
        if (folder / name).is_file():
            shutil.copy(folder / name, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, default=nucleate.models.loader.EMBEDDED)
    arguments = parser.parse_args()
    write(arguments.model, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
