"""Drafts of multi-token prediction modules equal those of the modules run from scratch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_models import Toy

import nucleate as nc
from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Llama
from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.speculative.draft import DraftContext, TargetOutput
from nucleate.speculative.neural import load

pytestmark = pytest.mark.usefixtures("one_torch_thread")
torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

from mtp_models import FAMILIES, modules_of, save, slow_draft, stock_draft, stock_of  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from nucleate.models.transformers.batched_model import HiddenStateCapture  # noqa: E402
from nucleate.models.transformers.mtp_module import brought  # noqa: E402
from nucleate.speculative.neural.mtp import Mtp  # noqa: E402

CLOSE = 1e-3
"""Of the two best scores: where they are that close, either may be drafted."""


class Harness:
    """A model, its modules, and a proposer that receives the model's hidden states."""

    def __init__(self, family: str, **options: Any) -> None:
        self.stock = stock_of(family)
        self.modules = modules_of(*self.stock)
        self.proposer = Mtp(self.modules, **options)

    def hidden(self, ids: list[int]) -> np.ndarray:
        watcher = HiddenStateCapture(self.stock[0], self.proposer.layers)
        with torch.inference_mode():
            self.stock[0](input_ids=torch.tensor([ids]), use_cache=False)
            found: np.ndarray = watcher.take().numpy()
        watcher.close()
        return found

    def observe(self, key: int, ids: list[int], start: int = 0) -> None:
        """Pass the hidden states from ``start`` on, of all tokens but the last."""
        self.proposer.observe([TargetOutput(key, start, ids[start:-1], self.hidden(ids[:-1])[start:])])

    def drafts(self, texts: dict[int, list[int]], count: int) -> list[tuple[int, ...]]:
        states = [DraftContext(key, ids, temperature=0.0) for key, ids in texts.items()]
        return [draft.tokens for draft in self.proposer.propose(states, [count] * len(states))]

    def assert_correct(self, texts: dict[int, list[int]], count: int, bases: dict[int, int] | None = None) -> None:
        """The drafts equal those computed from scratch."""
        for (key, ids), tokens in zip(texts.items(), self.drafts(texts, count), strict=True):
            expected, close = slow_draft(self.stock, ids, count, (bases or {}).get(key, 0))
            assert list(tokens) == expected or close < CLOSE


def random_ids(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed + 99 * length).integers(3, 199, length).tolist()
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.fast_cases(0)
def test_drafts_equal_those_computed_from_scratch(family: str) -> None:
    """Texts of many lengths grow by draft tokens and by others, with drafts for some of them in each step."""
    harness, rng = Harness(family), random.Random(family)
    texts = {key: random_ids(length) for key, length in enumerate((2, 3, 15, 16, 17, 40))}
    read = dict.fromkeys(texts, 0)
    for step in range(5):
        requested = dict(rng.sample([*texts.items()], 4)) if step else texts
        for key, ids in requested.items():
            harness.observe(key, ids, read[key])
            read[key] = len(ids) - 1
        count = (4, 1, 5, 2, 4)[step]
        harness.assert_correct(requested, count)
        for (key, ids), tokens in zip(requested.items(), harness.drafts(requested, count), strict=True):
            accepted = rng.randint(0, len(tokens))
            texts[key] = [*ids, *tokens[:accepted], rng.randrange(3, 199)]


@pytest.mark.parametrize("family", ["mellum", "deepseek_v3, 3"])
@pytest.mark.fast_cases(1)
def test_each_sequence_gets_its_number_of_draft_tokens(family: str) -> None:
    harness, counts = Harness(family), [1, 6, 0, 4, 2, 6]
    texts = {key: random_ids(20 + 5 * key) for key in range(6)}
    for _ in range(2):
        for key, ids in texts.items():
            harness.observe(key, ids)
        states = [DraftContext(key, ids, temperature=0.0) for key, ids in texts.items()]
        drafts = harness.proposer.propose(states, counts)
        for state, count, draft in zip(states, counts, drafts, strict=True):
            expected, close = slow_draft(harness.stock, [*state.token_ids], count)
            assert list(draft.tokens) == expected or close < CLOSE
        texts = {key: [*ids, 5, 6] for key, ids in texts.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_equal_transformers(family: str) -> None:
    harness = Harness(family)
    for length in (2, 9, 33):
        ids = random_ids(length, 5)
        harness.observe(length, ids)
        expected, close = slow_draft(harness.stock, ids, harness.modules.count)
        assert close > CLOSE
        assert stock_draft(harness.stock, ids) == expected
        assert [list(tokens) for tokens in harness.drafts({length: ids}, harness.modules.count)] == [expected]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3, 3"])
def test_drafts_are_the_same_without_the_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nucleate.models.transformers.batched_model.has_kernel", lambda device, dtype: False)
    monkeypatch.setattr("nucleate.models.transformers.mtp_module.has_kernel", lambda device, dtype: False)
    harness = Harness(family)
    texts = {key: random_ids(length) for key, length in enumerate((2, 17, 33))}
    for round_ in range(2):
        for key, ids in texts.items():
            harness.observe(key, ids, 0 if not round_ else len(ids) - 3)
        harness.assert_correct(texts, 5)
        texts = {key: [*ids, 7, 8] for key, ids in texts.items()}


@pytest.mark.parametrize("family", ["glm4_moe", "mellum", "deepseek_v3, 3"])
def test_sequences_with_a_late_start(family: str) -> None:
    """The prefix came from the prefix cache: the state starts after it, at the same positions."""
    harness = Harness(family)
    bases = {0: 0, 1: 7, 2: 31, 3: 38}
    texts = {key: random_ids(40, key) for key in bases}
    for key, base in bases.items():
        harness.observe(key, texts[key], base)
    for _ in range(2):
        harness.assert_correct(texts, 4, bases)
    longer = {key: [*ids, 5, 6, 9] for key, ids in texts.items()}
    for key, ids in longer.items():
        harness.observe(key, ids, 39)
    harness.assert_correct(longer, 4, bases)


def test_positions_are_those_of_the_sequence() -> None:
    """Positions do not count from the first known hidden state; the outputs would be almost equal."""
    harness, seen = Harness("glm4_moe"), []
    own = harness.modules._model.forward_layer

    def recording(index: int, x: Any, positions: Any, *rest: Any, **named: Any) -> Any:
        seen.append(positions[0].tolist())
        return own(index, x, positions, *rest, **named)

    harness.modules._model.forward_layer = recording
    harness.observe(0, random_ids(20), 12)
    harness.drafts({0: random_ids(20)}, 3)
    assert seen == [[13, 14, 15, 16, 17, 18, 19], [20], [21]]


def test_missing_tokens_restart_the_state() -> None:
    harness, ids = Harness("deepseek_v3, 3"), random_ids(50)
    hidden_TX = harness.hidden(ids[:-1])
    harness.proposer.observe([TargetOutput(0, 0, ids[:10], hidden_TX[:10])])
    harness.drafts({0: ids[:11]}, 4)
    harness.proposer.observe([TargetOutput(0, 30, ids[30:49], hidden_TX[30:49])])
    harness.assert_correct({0: ids}, 4, {0: 30})


@pytest.mark.parametrize("family", ["mellum", "deepseek_v3, 3"])
def test_repeated_hidden_states_change_nothing(family: str) -> None:
    harness, ids = Harness(family), random_ids(50)
    hidden_TX = harness.hidden(ids[:-1])
    for start, stop in ((0, 20), (5, 20), (0, 33), (33, 33), (16, 49), (48, 49)):
        harness.proposer.observe([TargetOutput(0, start, ids[start:stop], hidden_TX[start:stop])])
        harness.assert_correct({0: ids[: stop + 1]}, 3)
    harness.assert_correct({0: ids}, 4)


def test_the_edges_of_a_draft() -> None:
    harness, ids = Harness("glm4_moe"), random_ids(30)
    harness.observe(0, ids)
    assert harness.drafts({0: ids}, 0) == [()]
    assert harness.drafts({1: []}, 3) == [()]
    assert harness.drafts({0: ids[:20]}, 4) == [()]


def test_hidden_states_are_copied() -> None:
    harness, ids = Harness("glm4_moe"), random_ids(30)
    hidden_TX = harness.hidden(ids[:-1])
    harness.proposer.observe([TargetOutput(0, 0, ids[:-1], hidden_TX)])
    hidden_TX[:] = np.nan
    harness.assert_correct({0: ids}, 3)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3, 3"])
@pytest.mark.parametrize("shared", [True, False])
def test_nan_hidden_states_give_no_draft(family: str, shared: bool) -> None:
    harness, ids = Harness(family), random_ids(12)
    harness.observe(0, ids)
    harness.observe(1, ids)
    harness.proposer.observe([TargetOutput(1, 11, ids[-1:], np.full((1, 64), np.nan, np.float32))])
    states = [DraftContext(0, ids, 5, 3, shared_noise=shared), DraftContext(1, [*ids, 8], 5, 3, shared_noise=shared)]
    one, other = harness.proposer.propose(states, [5, 5])
    assert len(one) == 5
    assert not other.tokens
    assert not other.distributions


def test_sampled_tokens_have_shared_noise_or_distributions() -> None:
    """With shared noise, a token is what the target samples; otherwise it comes with its distribution."""
    from nucleate.speculative.neural import mtp
    from nucleate.speculative.neural.draft_sampling import sample_tokens

    harness, ids = Harness("glm4_moe"), random_ids(20)
    seen: list[Any] = []

    def recording(logits_RV: np.ndarray, states: list[DraftContext], indices: list[int]) -> Any:
        seen.append((logits_RV, list(indices)))
        return sample_tokens(logits_RV, states, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtp, "sample_tokens", recording)
        harness.observe(0, ids)
        [coupled] = harness.proposer.propose([DraftContext(0, ids, 5, 3, 0.9)], [3])
        [sampled] = harness.proposer.propose([DraftContext(0, ids, 5, 3, 0.9, shared_noise=False)], [3])
    assert [indices for _, indices in seen] == [[0], [1], [2]] * 2
    assert coupled.distributions is None
    assert sampled.distributions is not None
    for index, (logits_RV, _) in enumerate(seen[:3]):
        params = nc.SamplingParams(temperature=0.9, seed=3)
        assert coupled.tokens[index] == nc.sample(logits_RV, params, step=15 + index)[0]
    for distribution, (logits_RV, _) in zip(sampled.distributions, seen[3:], strict=True):
        np.testing.assert_allclose(
            distribution, nc.probabilities(logits_RV, nc.SamplingParams(temperature=0.9))[0], rtol=1e-9
        )


def test_idle_sequences_are_evicted() -> None:
    per_block = sum(pool.size for pool in Harness("glm4_moe").modules.new_kv_caches(1))
    harness = Harness("glm4_moe", memory=8 * per_block + 1)
    assert len(harness.proposer._kv_slots.free) == 8
    texts = {key: random_ids(50, key) for key in range(4)}
    for key, ids in texts.items():
        harness.observe(key, ids)
        harness.assert_correct({key: ids}, 4)  # 4 of 8 blocks each
    together = harness.drafts(texts, 4)
    assert 1 <= sum(len(tokens) == 4 for tokens in together) <= 2
    for key, tokens in zip(texts, together, strict=True):
        if tokens:
            assert list(tokens) == slow_draft(harness.stock, texts[key], 4)[0]
    long = random_ids(8 * BLOCK + 2)
    harness.observe(9, long)
    assert harness.drafts({9: long}, 4) == [()]
    harness.observe(9, long)
    assert harness.drafts({9: long}, 1) == [()]  # 129 positions
    harness.observe(8, long[:-1])
    harness.assert_correct({8: long[:-1]}, 1)
    with pytest.raises(ModelError, match=f"{per_block - 1} bytes of KV cache cannot hold one block of {per_block}"):
        Mtp(harness.modules, per_block - 1)


def folder_of(family: str, tmp_path: Path) -> tuple[Any, TransformersModel]:
    """A model, and the same model loaded from a folder."""
    stock = stock_of(family)
    save(*stock, tmp_path)
    return stock, TransformersModel(tmp_path, "cpu", "auto")


@pytest.mark.parametrize("family", ["glm4_moe", "mellum", "deepseek_v3, 3", "qwen2", "qwen3"])
def test_modules_are_loaded_from_the_model_folder(family: str, tmp_path: Path) -> None:
    """In the layouts of DeepSeek-V3, Qwen3-Next and MiMo."""
    stock, model = folder_of(family, tmp_path)
    harness, ids = Harness(family), random_ids(30)
    harness.proposer = load("mtp", model)  # type: ignore[assignment]
    assert harness.proposer.layers == (2,)
    harness.observe(0, ids)
    assert list(harness.drafts({0: ids}, 4)[0]) == slow_draft(stock, ids, 4)[0]
    found = brought(model)
    assert brought(model) is found  # loaded once
    theirs = {weight.data_ptr() for weight in model.model.parameters()}
    shared = (found._model.embed_tokens.weight, found._model.shared_head.weight)
    assert {weight.data_ptr() for weight in shared} <= theirs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_modules_in_half_precision(dtype: str, tmp_path: Path) -> None:
    """Weights are loaded in the dtype of the model; rounding rarely changes a draft token."""
    folder_of("glm4_moe", tmp_path)
    model = TransformersModel(tmp_path, "cpu", dtype)
    harness, agree = Harness("glm4_moe"), 0
    proposer = load("mtp", model)
    assert {weight.dtype for weight in brought(model)._model.parameters()} == {getattr(torch, dtype)}
    for key in range(8):
        ids = random_ids(20, key)
        proposer.observe([TargetOutput(key, 0, ids[:-1], harness.hidden(ids[:-1]))])
        [draft] = proposer.propose([DraftContext(key, ids, temperature=0.0)], [3])
        assert len(draft) == 3
        agree += draft.tokens[0] == slow_draft(harness.stock, ids, 1)[0][0]
    assert agree >= 6


def test_other_model_kinds_have_no_modules() -> None:
    for model in (Llama(EMBEDDED), Toy(lambda _: np.zeros(9, np.float32), 9)):
        with pytest.raises(
            ModelError, match=r"no multi-token prediction .* modules in its folder, such as deepseek_v3"
        ):
            load("mtp", model)


def test_transformers_models_without_modules() -> None:
    with pytest.raises(ModelError, match="the model has no multi-token prediction"):
        load("mtp", TransformersModel(EMBEDDED, "cpu", "auto"))
    none = transformers.Glm4MoeConfig(**{**FAMILIES["glm4_moe"][1], "num_mtp_layers": 0})
    model = TransformersModel.of(transformers.AutoModelForCausalLM.from_config(none))
    with pytest.raises(ModelError, match="the model has no multi-token prediction"):
        load("mtp", model)
    with pytest.raises(ModelError, match="the model has no multi-token prediction"):
        nc.LLM(speculative_config="mtp")


def test_models_without_a_folder(tmp_path: Path) -> None:
    model, _ = stock_of("glm4_moe")
    with pytest.raises(ModelError, match="MTP modules are loaded from the folder of a model"):
        load("mtp", TransformersModel.of(model))
    model.config.name_or_path = str(tmp_path / "gone")
    with pytest.raises(ModelError, match="MTP modules are loaded from the folder of a model"):
        load("mtp", TransformersModel.of(model))


def test_folders_without_module_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_of("mellum")[0].save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"cannot load the MTP modules in .*: The following MtpModel weights are missing"
    ):
        load("mtp", TransformersModel(tmp_path, "cpu", "auto"))


def test_another_shape_is_an_error(tmp_path: Path) -> None:
    _, model = folder_of("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.mtp_layers.0.input_proj.weight"
    save_file({**tensors, name: tensors[name][1:]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"eh_proj.weight has the shape \(63, 128\), the model needs \(64, 128\)"):
        load("mtp", model)


def test_a_different_final_norm_is_detected() -> None:
    model, modules = stock_of("glm4_moe")
    model.get_decoder().norm.register_forward_hook(lambda module, given, out: out * 1.1)
    modules_of(model, modules)  # called as in the model
    del model.get_decoder()._modules["norm"]
    with pytest.raises(ModelError, match=r"cannot continue a text: AttributeError: .* no attribute 'norm'"):
        modules_of(model, modules)
