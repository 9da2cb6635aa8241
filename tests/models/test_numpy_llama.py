"""The NumPy Llama equals Transformers: logits for every shape of the architecture, tokens for the embedded model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Llama, unsupported_reason
from nucleate.models.protocol import ModelError

torch = pytest.importorskip("torch", reason="the comparison needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="the comparison needs the extra 'torch'")


SHAPES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one kv head": {"num_key_value_heads": 1},
    "no sharing": {"num_key_value_heads": 4},
    "own head size": {"head_dim": 24},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "epsilon": {"rms_norm_eps": 1e-3},
}


def folder_of(path: Path, dtype: str = "float32", **changes: object) -> Path:
    torch.manual_seed(0)
    settings = dict(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**settings, **changes}))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_those_of_transformers(shape: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **SHAPES[shape])
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, 97, 70).tolist()
    with torch.inference_mode():
        expected_TV = stock(torch.tensor([ids])).logits[0].numpy()
    context = Llama(folder).begin()
    np.testing.assert_allclose(context.forward(ids[:3]), expected_TV[2], atol=1e-4)
    np.testing.assert_allclose(context.forward(ids[3:40]), expected_TV[39], atol=1e-4)
    for position in range(40, 70):  # beyond the initial capacity of the cache
        np.testing.assert_allclose(context.forward([ids[position]]), expected_TV[position], atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_all_stored_types_are_loaded_exactly(dtype: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, dtype=dtype)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = stock.model.embed_tokens.weight.detach().numpy()
    np.testing.assert_array_equal(Llama(folder).embedding, expected)


@pytest.mark.parametrize("ids", [[], [-1], [4096], [5] * 1025])
def test_invalid_inputs_are_rejected_without_effect(ids: list[int]) -> None:
    context = Llama(EMBEDDED).begin()
    with pytest.raises(ValueError, match=r"token ids in 0\.\.4095|exceed the context length 1024"):
        context.forward(ids)
    assert context.forward([0]).shape == (4096,)


def changed_copy(path: Path, **changes: object) -> None:
    """A folder of the embedded model with another config."""
    shutil.copytree(EMBEDDED, path, dirs_exist_ok=True)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen3"}, "the architecture is 'qwen3'"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "an activation other than SiLU"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8}}, "RoPE scaling"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "RoPE scaling"),
    ],
)
def test_other_architectures_are_rejected_with_a_reason(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    changed_copy(tmp_path, **change)
    assert reason in (unsupported_reason(tmp_path) or "")
    with pytest.raises(ModelError, match=reason):
        Llama(tmp_path)


def test_a_broken_weights_file_is_one_error(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + b"\0" * 40)
    with pytest.raises(ModelError, match="is not a valid safetensors file"):
        Llama(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 7}, r"model\.layers\.6\.input_layernorm\.weight is missing"),
        ({"num_attention_heads": 3}, r"q_proj\.weight has the shape \(192, 192\), config\.json gives \(96, 192\)"),
        ({"vocab_size": 5000}, r"embed_tokens\.weight has the shape \(4096, 192\)"),
        ({"num_attention_heads": "x"}, "num_attention_heads must be a number > 0, got 'x'"),
        ({"num_hidden_layers": 6.0}, r"num_hidden_layers must be an integer, got 6\.0"),
        ({"max_position_embeddings": None}, "max_position_embeddings must be a number > 0, got None"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number > 0, got None"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be a number > 0, got 'x'"),
        ({"rope_parameters": ["x"]}, "rope_parameters in config.json is not an object"),
    ],
)
def test_a_config_that_does_not_match_the_weights_is_one_error(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    changed_copy(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        Llama(tmp_path)


def test_null_kv_heads_mean_as_many_as_heads(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, num_key_value_heads=4)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": None}))
    assert Llama(folder).kv_heads == 4
