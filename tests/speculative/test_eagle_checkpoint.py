"""EAGLE-3 heads in their public layout: the drafts of a plain twin, and the same tokens as without speculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import nucleate as nc
from nucleate.models.loader import runner_of
from nucleate.models.runner import ModelInput
from nucleate.speculative.draft import DraftContext, TargetOutput
from nucleate.speculative.neural.eagle_checkpoint import load_eagle

WIDTH, HEADS, KV_HEADS, SIZE, INNER, DRAFT_TOKENS = 48, 4, 2, 16, 64, 300


def head_tensors(target: Any, prefix: str, *, own_embedding: bool) -> dict[str, np.ndarray]:
    """Random weights; the logits prefer some tokens, so that drafts are accepted now and then."""
    rng = np.random.default_rng(0)
    width = WIDTH if own_embedding else target.hidden_size

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(size=(rows, columns), scale=columns**-0.5).astype(np.float32)

    gaps = rng.choice(target.vocab_size, DRAFT_TOKENS, replace=False)
    tensors = {
        "fc.weight": matrix(width, 3 * target.hidden_size),
        "norm.weight": rng.normal(1, 0.1, width).astype(np.float32),
        "lm_head.weight": matrix(DRAFT_TOKENS, width) * 3,
        "d2t": np.sort(gaps).astype(np.int64) - np.arange(DRAFT_TOKENS),
        "t2d": np.isin(np.arange(target.vocab_size), gaps),
        f"{prefix}self_attn.q_proj.weight": matrix(HEADS * SIZE, 2 * width),
        f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * SIZE, 2 * width),
        f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * SIZE, 2 * width),
        f"{prefix}self_attn.o_proj.weight": matrix(width, HEADS * SIZE),
        f"{prefix}mlp.gate_proj.weight": matrix(INNER, width),
        f"{prefix}mlp.up_proj.weight": matrix(INNER, width),
        f"{prefix}mlp.down_proj.weight": matrix(width, INNER),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = rng.normal(1, 0.1, width).astype(np.float32)
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(target.vocab_size, width)
    return tensors


CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "rms_norm_eps": 1e-5}
CONFIG |= {"num_hidden_layers": 1, "rope_theta": 500.0, "draft_vocab_size": DRAFT_TOKENS, "rope_scaling": None}


def write(folder: Path, target: Any, prefix: str = "midlayer.", *, own: bool = False, **changes: Any) -> dict[str, Any]:
    """Write a head. Returns its tensors."""
    folder.mkdir(exist_ok=True)
    tensors = head_tensors(target, prefix, own_embedding=own)
    config = {**CONFIG, "hidden_size": WIDTH if own else target.hidden_size, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def twin(
    tensors: Any, prefix: str, embedding: Any, ids: list[int], hidden_TF: Any, count: int, before: bool
) -> list[int]:
    """Greedy drafts in float64, without a cache."""
    w = {name.removeprefix(prefix).removesuffix(".weight"): value.astype(float) for name, value in tensors.items()}

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    def rotate(x: Any, position: int) -> Any:
        angle = position * 500.0 ** -(np.arange(0, SIZE, 2) / SIZE)
        first, second = np.split(x, 2, -1)
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
        )

    states, tokens, drafts = list(hidden_TF.astype(float) @ w["fc"].T), [*ids[1:]], []
    while len(drafts) < count:
        inputs = [
            np.concatenate([norm(embedding[t].astype(float), "input_layernorm"), norm(x, "hidden_norm")])
            for t, x in zip(tokens, states, strict=True)
        ]
        last = len(inputs) - 1
        query = rotate((w["self_attn.q_proj"] @ inputs[-1]).reshape(HEADS, SIZE), last)
        keys = np.stack([rotate((w["self_attn.k_proj"] @ y).reshape(KV_HEADS, SIZE), i) for i, y in enumerate(inputs)])
        values = np.stack([(w["self_attn.v_proj"] @ y).reshape(KV_HEADS, SIZE) for y in inputs])
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = keys[:, group] @ query[head] * SIZE**-0.5
            weights = np.exp(scores - scores.max())
            mixed.append(weights @ values[:, group] / weights.sum())
        residual = norm(states[-1], "hidden_norm") if before else states[-1]
        x = residual + w["self_attn.o_proj"] @ np.concatenate(mixed)
        y = norm(x, "post_attention_layernorm")
        gate = w["mlp.gate_proj"] @ y
        x = x + w["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["mlp.up_proj"] @ y))
        best = int((w["lm_head"] @ norm(x, "norm")).argmax())
        drafts.append(best + int(tensors["d2t"][best]))
        states.append(x)
        tokens.append(drafts[-1])
    return drafts


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_drafts_are_those_of_a_twin(tmp_path: Path, llm: nc.LLM, prefix: str, own: bool, before: bool) -> None:
    target: Any = llm.model
    tensors = write(tmp_path, target, prefix, own=own, norm_before_residual=before)
    proposer = load_eagle(tmp_path, target, 1)()
    layers = len(target.layers)
    assert proposer.layers == (2, layers // 2, layers - 3)
    runner = runner_of(target, 1 << 24)
    runner.capture_hidden_states(proposer.layers)
    ids = llm.encode("Once upon a time there was a little dog.")
    runner.forward([ModelInput(0, ids, 0, len(ids), range(8), 1)])
    hidden_TF = np.array(runner.hidden_states)
    embedding = tensors.get("embed_tokens.weight", target.embedding)
    for stop in (len(ids) - 3, len(ids)):  # the second time, three tokens are new
        proposer.observe([TargetOutput(0, 0, ids[: stop - 1], hidden_TF[: stop - 1])])
        [draft] = proposer.propose([DraftContext(0, ids[:stop], temperature=0)], [6])
        assert [*draft.tokens] == twin(tensors, prefix, embedding, ids[:stop], hidden_TF[: stop - 1], 6, before)


PROMPTS = ["Once upon a time", "The dog ran", "One day, Tom and"]


@pytest.mark.parametrize("width", [1, 3])
def test_texts_are_those_without_speculation(tmp_path: Path, llm: nc.LLM, width: int) -> None:
    write(tmp_path, llm.model)
    config = {
        "method": "eagle",
        "model": str(tmp_path),
        "tree_width": width,
        "num_speculative_tokens": 5,
        "adaptive": False,
    }
    drafting = nc.LLM(speculative_config=config)
    for params in (
        nc.SamplingParams(temperature=0, max_tokens=30),
        nc.SamplingParams(seed=3, max_tokens=30, top_p=0.9),
    ):
        expected = [one.text for one in llm.generate(PROMPTS, params)]
        assert [one.text for one in drafting.generate(PROMPTS, params)] == expected


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_transformers_model_is_a_target(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4096, **sizes)).eval()
    embedded = nc.LLM()
    llm = nc.LLM(model, embedded.tokenizer)
    target = type("Target", (), {"vocab_size": 4096, "hidden_size": 32})
    tensors = write(tmp_path, target)
    if kind == "bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, tmp_path / "pytorch_model.bin")
    drafting = nc.LLM(
        model, embedded.tokenizer, speculative_config={"method": "eagle", "model": tmp_path, "adaptive": False}
    )
    params = nc.SamplingParams(seed=1, max_tokens=12, ignore_eos=True)
    assert drafting.generate(PROMPTS, params)[1].text == llm.generate(PROMPTS, params)[1].text
    engine = drafting.new_engine()
    engine.add(nc.Request(drafting.encode("A"), params))
    while len(engine):
        engine.step()
    assert engine.stats.speculative.draft_tokens > 0


def without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({"num_hidden_layers": 2}, lambda tensors: tensors, "it has several layers"),
        ({"rope_scaling": {"rope_type": "yarn"}}, lambda tensors: tensors, "its rotary embedding is yarn"),
        ({"num_attention_heads": "4"}, lambda tensors: tensors, "num_attention_heads must be a number > 0"),
        ({}, lambda tensors: without(tensors, "fc.weight"), "not an EAGLE-3 head"),
        ({}, lambda tensors: without(tensors, "lm_head.weight"), "it has no lm_head"),
        ({}, lambda tensors: without(tensors, "midlayer.mlp.up_proj.weight"), "midlayer.mlp.up_proj.weight is missing"),
        ({}, lambda tensors: {**tensors, "d2t": tensors["d2t"] + 5000}, "d2t does not map its 300 tokens to the 4096"),
        ({}, lambda tensors: {**tensors, "midlayer.self_attn.q_proj.bias": tensors["d2t"]}, "its layer has biases"),
        ({}, lambda tensors: {**tensors, "embed_tokens.weight": tensors["fc.weight"][:, :256]}, "embeddings"),
        ({}, lambda tensors: {**tensors, "lm_head.weight": tensors["lm_head.weight"][:, 1:]}, "no lm_head of its"),
        ({}, lambda tensors: {**tensors, "midlayer.mlp.up_proj.weight": tensors["fc.weight"]}, "shapes of its MLP"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, lambda tensors: tensors, "fc has the shape"),
    ],
)  # fmt: skip
def test_other_checkpoints_are_errors(tmp_path: Path, llm: nc.LLM, config: Any, change: Any, message: str) -> None:
    tensors = write(tmp_path, llm.model, **config)
    save_file(change(tensors), tmp_path / "model.safetensors")
    with pytest.raises(nc.ModelError, match=message):
        nc.LLM(speculative_config={"method": "eagle", "model": str(tmp_path)})


def test_a_folder_without_weights(tmp_path: Path, llm: nc.LLM) -> None:
    write(tmp_path, llm.model)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(nc.ModelError, match=r"neither model.safetensors nor pytorch_model.bin"):
        nc.LLM(speculative_config={"method": "eagle", "model": str(tmp_path)})
    (tmp_path / "pytorch_model.bin").write_bytes(b"no")
    with pytest.raises(nc.ModelError, match="cannot read"):
        nc.LLM(speculative_config={"method": "eagle", "model": str(tmp_path)})
