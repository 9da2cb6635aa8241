"""EAGLE heads in their public layouts: the drafts of a plain twin, and errors that name what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import DRAFT_TOKENS, SIZE, attention_biases, eagle1, eagle3, plain_layer, plain_norm, write

import nucleate as nc
from nucleate.models.loader import runner_of
from nucleate.models.runner import ModelInput
from nucleate.speculative.draft import DraftContext, TargetOutput
from nucleate.speculative.neural.eagle_checkpoint import frequencies, load_eagle


def float64(tensors: Any, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix).removesuffix(".weight"): value.astype(float) for name, value in tensors.items()}


def twin3(
    tensors: Any, prefix: str, target: Any, ids: list[int], hidden_TF: Any, count: int, before: bool
) -> list[int]:
    """Greedy drafts of EAGLE-3 in float64, without a cache."""
    w, embedding = float64(tensors, prefix), tensors.get("embed_tokens.weight", target.embedding).astype(float)
    states, tokens, drafts = list(hidden_TF.astype(float) @ w["fc"].T), [*ids[1:]], []
    while len(drafts) < count:
        inputs = [
            np.concatenate([plain_norm(embedding[t], w["input_layernorm"]), plain_norm(x, w["hidden_norm"])])
            for t, x in zip(tokens, states, strict=True)
        ]
        x = plain_layer(w, inputs, plain_norm(states[-1], w["hidden_norm"]) if before else states[-1])
        best = int((w["lm_head"] @ plain_norm(x, w["norm"])).argmax())
        drafts.append(best + int(tensors["d2t"][best]))
        states.append(x)
        tokens.append(drafts[-1])
    return drafts


def twin1(tensors: Any, target: Any, ids: list[int], hidden_TX: Any, count: int) -> list[int]:
    """Greedy drafts of EAGLE-1 in float64, without a cache."""
    w, embedding = float64(tensors, "layers.0."), tensors.get("embed_tokens.weight", target.embedding).astype(float)
    epsilon = float(target.epsilon)
    hidden_TX = hidden_TX.astype(float)
    states = [x / np.sqrt((x * x).mean() + epsilon) * target.norm.astype(float) for x in hidden_TX]
    tokens, drafts = [*ids[1:]], []
    while len(drafts) < count:
        pairs = zip(tokens, states, strict=True)
        inputs = [w["fc"] @ np.concatenate([embedding[t], x]) + w.get("fc.bias", 0.0) for t, x in pairs]
        states.append(plain_layer(w, inputs, inputs[-1]))
        drafts.append(int((states[-1] @ target.unembedding.astype(float)).argmax()))
        tokens.append(drafts[-1])
    return drafts


def hidden_states(target: Any, layers: tuple[int, ...], ids: list[int]) -> np.ndarray:
    runner = runner_of(target, 1 << 24)
    runner.capture_hidden_states(layers)
    runner.forward([ModelInput(0, ids, 0, len(ids), range(8), 1)])
    return np.array(runner.hidden_states)


def drafts(proposer: Any, ids: list[int], hidden_TF: np.ndarray) -> list[int]:
    proposer.observe([TargetOutput(0, 0, ids[:-1], hidden_TF[: len(ids) - 1])])
    [draft] = proposer.propose([DraftContext(0, ids, temperature=0)], [6])
    return [*draft.tokens]


TEXT = "Once upon a time there was a little dog."


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_eagle3_drafts_are_those_of_a_twin(tmp_path: Path, llm: nc.LLM, prefix: str, own: bool, before: bool) -> None:
    target: Any = llm.model
    config, tensors = eagle3(target, prefix, own=own)
    tensors = write(tmp_path, config, attention_biases(tensors) if own else tensors, norm_before_residual=before)
    proposer, ids = load_eagle(tmp_path, target, 1)(), llm.encode(TEXT)
    layers = len(target.layers)
    assert proposer.layers == (2, layers // 2, layers - 3)
    hidden_TF = hidden_states(target, proposer.layers, ids)
    for stop in (len(ids) - 3, len(ids)):  # the second time, three tokens are new
        expected = twin3(tensors, prefix, target, ids[:stop], hidden_TF[: stop - 1], 6, before)
        assert drafts(proposer, ids[:stop], hidden_TF) == expected


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_eagle1_drafts_are_those_of_a_twin(tmp_path: Path, llm: nc.LLM, own: bool, bias: bool) -> None:
    target: Any = llm.model
    config, tensors = eagle1(target, own=own, bias=bias)
    tensors = write(tmp_path, config, attention_biases(tensors) if bias else tensors)
    proposer, ids = load_eagle(tmp_path, target, 1)(), llm.encode(TEXT)
    assert proposer.layers == (len(target.layers),)
    hidden_TX = hidden_states(target, proposer.layers, ids)
    for stop in (len(ids) - 3, len(ids)):
        assert drafts(proposer, ids[:stop], hidden_TX) == twin1(tensors, target, ids[:stop], hidden_TX[: stop - 1], 6)


def without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


Q, UP = "midlayer.self_attn.q_proj", "midlayer.mlp.up_proj.weight"
ERRORS: list[tuple[Any, Any, Any, str]] = [
    (eagle3, {"num_hidden_layers": 2}, dict, "it has several layers"),
    (eagle3, {"rope_scaling": {"rope_type": "yarn"}}, dict, "its rotary embedding is yarn"),
    (eagle3, {"rope_scaling": {"rope_type": "llama3"}}, dict, "factor must be a number > 0"),
    (eagle3, {"norm_output": True}, dict, "norm_output is True in its config; only False is known"),
    (eagle1, {"hidden_act": "gelu"}, dict, "hidden_act is 'gelu' in its config; only 'silu' is known"),
    (eagle3, {"num_attention_heads": "4"}, dict, "num_attention_heads must be a number > 0"),
    (eagle3, {}, lambda tensors: without(tensors, "fc.weight"), "not an EAGLE head"),
    (eagle3, {}, lambda tensors: without(tensors, "lm_head.weight"), "it has no lm_head"),
    (eagle3, {}, lambda tensors: without(tensors, UP), f"{UP} is missing"),
    (eagle3, {}, lambda tensors: {**tensors, "d2t": tensors["d2t"] + 5000}, "d2t does not map its 300 tokens"),
    (eagle3, {}, lambda tensors: {**tensors, "d2t": tensors["d2t"][1:]}, "d2t has 299 entries for the 300 tokens"),
    (eagle3, {}, lambda tensors: {**tensors, f"{Q}.bias": tensors["norm.weight"]}, "q_proj.bias has the shape"),
    (eagle3, {}, lambda tensors: {**tensors, "midlayer.mlp.up_proj.bias": tensors["norm.weight"]}, "up_proj.bias"),
    (eagle3, {}, lambda tensors: {**tensors, "embed_tokens.weight": tensors["fc.weight"][:, :256]}, "embeddings"),
    (eagle3, {}, lambda tensors: {**tensors, "lm_head.weight": tensors["lm_head.weight"][:, 1:]}, "no lm_head of its"),
    (eagle3, {}, lambda tensors: {**tensors, UP: tensors["fc.weight"]}, r"midlayer.mlp.gate_proj.weight has the shape"),
    (eagle3, {}, lambda tensors: {**tensors, "fc2.weight": tensors["fc.weight"]}, "do not have: fc2.weight"),
    (eagle3, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, dict, "fc.weight has the shape"),
    (eagle1, {"hidden_size": 64}, dict, "its hidden size is 64, that of the target's embeddings 192"),
    (eagle1, {}, lambda tensors: {**tensors, "fc.weight": tensors["fc.weight"][1:]}, "fc.weight has the shape"),
    (eagle1, {}, lambda tensors: {**tensors, "fc.bias": tensors["fc.bias"][1:]}, "fc.bias has the shape"),
    (eagle1, {"head_dim": 2 * SIZE}, dict, "layers.0.self_attn.q_proj.weight has the shape"),
    (eagle1, {}, lambda tensors: without(tensors, "layers.0.mlp.up_proj.weight"), "up_proj.weight is missing"),
    (eagle1, {}, lambda tensors: {**tensors, "hidden_norm.weight": tensors["fc.bias"]}, "not have: hidden_norm"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "config", "change", "message"), ERRORS)
def test_other_checkpoints_are_errors(
    tmp_path: Path, llm: nc.LLM, head: Any, config: Any, change: Any, message: str
) -> None:
    given, tensors = head(llm.model)
    write(tmp_path, given, change(tensors), **config)
    with pytest.raises(nc.ModelError, match=message):
        nc.LLM(speculative_config={"method": "eagle", "model": str(tmp_path)})


def test_a_folder_without_weights(tmp_path: Path, llm: nc.LLM) -> None:
    write(tmp_path, *eagle3(llm.model))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(nc.ModelError, match=r"none of the files model.safetensors, pytorch_model.bin"):
        nc.LLM(speculative_config={"method": "eagle", "model": str(tmp_path)})
    (tmp_path / "pytorch_model.bin").write_bytes(b"no")
    with pytest.raises(nc.ModelError, match="cannot read"):
        nc.LLM(speculative_config={"method": "eagle", "model": str(tmp_path)})


def test_frequencies_of_llama3_are_those_of_transformers() -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="needs the extra 'torch'")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    rope |= {"rope_type": "llama3", "rope_theta": 500.0}
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=rope, max_position_embeddings=4096)
    expected, _ = utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    np.testing.assert_allclose(frequencies(rope, 64, scaled=True), expected.numpy(), rtol=1e-5)


def test_a_target_without_hidden_states(tmp_path: Path, llm: nc.LLM) -> None:
    write(tmp_path, *eagle3(llm.model))
    model = type("Toy", (), {"vocab_size": DRAFT_TOKENS, "runtime": "a toy"})()
    with pytest.raises(nc.ModelError, match="hidden states can be read, not one on a toy"):
        load_eagle(tmp_path, model, 1)
