"""Batched, paged Transformers models generate the same tokens as ``generate``."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from runner_driver import Driver
from toy_models import Toy
from toy_requests import check_prefix_to_the_token

import nucleate as nc
from nucleate.models import cpu_operations
from nucleate.models.loader import EMBEDDED, runner_of
from nucleate.models.numpy_llama import Llama
from nucleate.models.protocol import ModelError
from nucleate.models.runner import ModelInput, SequentialRunner
from nucleate.models.transformers.transformers_model import TransformersModel

pytestmark = pytest.mark.usefixtures("one_torch_thread")
torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

from nucleate.models.transformers import batched_model  # noqa: E402
from nucleate.models.transformers.ragged_attention import AttentionPlan  # noqa: E402

MEMORY = 8 << 20
SMALL: dict[str, Any] = dict(
    vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
    pad_token_id=0,
)  # fmt: skip
ALTERNATING = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in SMALL.items() if key != name}


PACKED = {
    "llama": ("LlamaConfig", SMALL),
    "llama, one kv head": ("LlamaConfig", {**SMALL, "num_key_value_heads": 1}),
    "llama, scaled positions": (
        "LlamaConfig",
        {**SMALL, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama, dynamic positions": (
        "LlamaConfig",
        {**SMALL, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "qwen2": ("Qwen2Config", SMALL),
    "qwen2, some windows": ("Qwen2Config", dict(SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen3": ("Qwen3Config", dict(SMALL, head_dim=24)),
    "mistral": ("MistralConfig", dict(SMALL, sliding_window=11)),
    "gemma2": (
        "Gemma2Config",
        dict(SMALL, head_dim=16, sliding_window=11, attn_logit_softcapping=5.0, final_logit_softcapping=9.0),
    ),
    "gemma3": ("Gemma3TextConfig", dict(SMALL, head_dim=16, sliding_window=11, **ALTERNATING)),
    "gemma4, heads of different sizes": (
        "Gemma4TextConfig",
        dict(
            SMALL, head_dim=16, global_head_dim=32, sliding_window=11, vocab_size_per_layer_input=199,
            hidden_size_per_layer_input=16, num_kv_shared_layers=0, **ALTERNATING,
        ),
    ),
    "gpt2": (
        "GPT2Config",
        dict(
            vocab_size=199, n_embd=64, n_layer=3, n_head=4, n_positions=256, initializer_range=0.2, bos_token_id=0,
            eos_token_id=1,
        ),
    ),
    "roberta, positions from 0": ("RobertaConfig", {**SMALL, "is_decoder": True, "pad_token_id": 1}),
    "gpt-neox": ("GPTNeoXConfig", without("num_key_value_heads")),
    "phi3": ("Phi3Config", SMALL),
    "olmo2": ("Olmo2Config", SMALL),
    "mixtral": ("MixtralConfig", dict(SMALL, **EXPERTS)),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
    "gpt-oss": ("GptOssConfig", dict(SMALL, head_dim=16, sliding_window=11, **EXPERTS)),
    "deepseek-v3": (  # values are smaller than keys
        "DeepseekV3Config",
        dict(
            SMALL, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
            moe_intermediate_size=32, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
            v_head_dim=16, first_k_dense_replace=1,
        ),
    ),
}  # fmt: skip
ONE_BY_ONE = {
    "mamba": (
        "MambaConfig",
        dict(vocab_size=199, hidden_size=64, num_hidden_layers=2, state_size=8, initializer_range=0.2),
        "its attention cannot be replaced",
    ),
    "jamba": (
        "JambaConfig",
        dict(SMALL, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8, use_mamba_kernels=False),
        "its attention cannot be replaced",
    ),
    "bamba": ("BambaConfig", dict(SMALL, attn_layer_indices=[1], **MAMBA), "its attention cannot be replaced"),
    "lfm2": ("Lfm2Config", dict(SMALL, layer_types=["conv", "full_attention", "conv"]), "it has layers of type conv"),
    "llama4": (
        "Llama4TextConfig",
        dict(SMALL, head_dim=16, num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=8),
        "it has layers of type chunked_attention",
    ),
    "bloom": (
        "BloomConfig",
        dict(vocab_size=199, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2),
        "its attention cannot be replaced",
    ),
    "openai-gpt": (
        "OpenAIGPTConfig",
        dict(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2),
        "each new token recomputes its sequence, as it has no cache",
    ),
    "xlm": (
        "XLMConfig",
        dict(vocab_size=199, emb_dim=64, n_layers=2, n_heads=4, max_position_embeddings=64, n_langs=1, causal=True),
        "each new token recomputes its sequence, as it has no cache",
    ),
    "xlnet": (
        "XLNetConfig",
        dict(vocab_size=199, d_model=64, n_layer=2, n_head=4, d_inner=96, use_mems_eval=False),
        "each new token recomputes its sequence, as it has no cache",
    ),
    "cpmant": (
        "CpmAntConfig",
        dict(
            vocab_size=199, hidden_size=64, num_attention_heads=4, dim_head=16, dim_ff=96, num_hidden_layers=2,
            prompt_length=8, position_bias_max_distance=64, use_cache=False,
        ),
        "each new token recomputes its sequence, as decoding with its cache raises",
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        dict(SMALL, lru_width=64, attention_window_size=8),
        "each new token recomputes its sequence, as .* does not return its cache",
    ),
    "doge, a mask from the values": (
        "DogeConfig",
        dict(SMALL, keep_window_size=2048),
        "its attention adds a mask of its own to the scores",
    ),
    "phi3, long positions": (
        "Phi3Config",
        {
            **SMALL,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 8, "short_factor": [1.0] * 8,
                "original_max_position_embeddings": 64,
            },
        },
        r"its positions \(longrope\) depend on the length of the sequence",
    ),
}  # fmt: skip


def model_of(config: str, settings: dict[str, Any], dtype: str = "float32", **more: Any) -> TransformersModel:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**settings), dtype=getattr(torch, dtype), **more
    )
    for name, weight in made.named_parameters():
        if name.endswith(("sinks", ".A")):  # near zero, an omission would not show
            torch.nn.init.normal_(weight, std=2.0)
    return TransformersModel.of(made)


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(len(lengths))
    return [random.integers(3, 199, length).tolist() for length in lengths]


def generate(model: TransformersModel, ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """The tokens generated by Transformers, and the logits of each."""
    given = torch.tensor([ids])
    out = model.model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, eos_token_id=-1,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits).float().numpy()


def driven(runner: Any, seed: int, lengths: tuple[int, ...], steps: int) -> Driver:
    """A runner that has generated tokens after some prompts."""
    driver = Driver(runner, seed)
    for ids in prompts(*lengths):
        driver.add(ids)
    driver.run(steps)
    return driver


def unbatched(model: Llama, ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
    context, generated = model.begin(), list[int]()
    rows = [context.forward(ids)]
    while len(generated) < count:
        generated.append(int(rows[-1].argmax()))
        rows.append(context.forward(generated[-1:]))
    return generated, np.stack(rows[:-1])


def assert_equals_generate(driver: Driver, model: Any) -> None:
    """Compare tokens, up to the first one whose two best logits differ by less than 1e-4."""
    for one in driver.sequences:
        ours = one.ids[one.prompt :]
        reference = unbatched if isinstance(model, Llama) else generate
        generated, logits_LV = reference(model, one.ids[: one.prompt], len(ours))
        for step, (mine, other) in enumerate(zip(ours, generated, strict=True)):
            np.testing.assert_allclose(one.logits[step], logits_LV[step], atol=2e-3 * np.abs(logits_LV).max())
            if mine != other:
                assert logits_LV[step, other] - logits_LV[step, mine] < 1e-4
                break


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", PACKED)
def test_batched_outputs_equal_generate(name: str) -> None:
    model = model_of(*PACKED[name])
    stock = model.model.config._attn_implementation
    runner = runner_of(model, MEMORY)
    assert runner.paged, runner.unbatched_reason
    assert_equals_generate(driven(runner, 1, (1, 3, 16, 17, 41, 60), 12), model)
    assert model.model.config._attn_implementation == stock


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.fast_cases(1)
def test_models_that_cannot_be_paged_give_a_reason(name: str) -> None:
    config, settings, why = ONE_BY_ONE[name]
    model = model_of(config, settings)
    runner = runner_of(model, MEMORY)
    assert isinstance(runner, SequentialRunner)
    assert re.search(why, runner.unpaged_reason)
    assert_equals_generate(driven(runner, 1, (1, 9, 20), 8), model)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss", "deepseek-v3", "qwen3"])
def test_outputs_without_the_kernel_are_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_model, "has_kernel", lambda device, dtype: False)
    model = model_of(*PACKED[name])
    runner = runner_of(model, MEMORY)
    assert runner.paged, runner.unbatched_reason
    assert_equals_generate(driven(runner, 2, (2, 5, 30, 47), 10), model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "gpt2"])
def test_half_precision_is_within_rounding(name: str, dtype: str) -> None:
    model = model_of(*PACKED[name], dtype=dtype)
    runner = runner_of(model, MEMORY)
    assert runner.paged, runner.unbatched_reason
    rows = prompts(33, 20)
    blocks = [[7, 3, 9], [4, 1]]
    runner.forward([ModelInput(i, ids, 0, 18, blocks[i], 0) for i, ids in enumerate(rows)])
    runner.forward([ModelInput(i, ids, 18, len(ids) - 1, blocks[i], 0) for i, ids in enumerate(rows)])
    ours = runner.forward([ModelInput(i, ids, len(ids) - 1, len(ids), blocks[i], 1) for i, ids in enumerate(rows)])
    for mine, ids in zip(ours, rows, strict=True):
        stock = model.begin().forward(ids)
        spread = np.linalg.norm(stock - stock.mean())
        assert np.linalg.norm(mine - stock) < {"bfloat16": 0.1, "float16": 0.02}[dtype] * spread


def model_named(name: str) -> Any:
    """The embedded model on the NumPy runtime, or a model of Transformers."""
    family, _, dtype = name.partition(" in ")
    return Llama(EMBEDDED) if name == "embedded" else model_of(*PACKED[family], dtype=dtype or "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedded", "mistral", "mistral in float64"])
def test_a_shared_prefix_is_computed_once(name: str) -> None:
    model = model_named(name)
    driver = Driver(runner_of(model, 2 * MEMORY), seed=3)
    [common, *ends] = prompts(35, 4, 1, 20)
    first = driver.add(common + ends[0])
    driver.step({0: 1000})
    others = [driver.add(common + end, sharing=first) for end in ends[1:]]
    others.append(driver.add(common[:32], sharing=first))  # only whole blocks are shared
    assert [one.shared for one in others] == [2, 2, 1]
    driver.run(10)
    assert_equals_generate(driver, model)


@pytest.mark.slow
def test_a_prefix_may_end_within_a_block() -> None:
    check_prefix_to_the_token(nc.LLM(runtime="torch", device="cpu"))


@pytest.mark.parametrize("name", ["embedded", "gemma2", "gemma2 in float64"])
def test_unused_slots_may_contain_nan(name: str) -> None:
    model = model_named(name)
    runner = runner_of(model, 2 * MEMORY)
    for cache in runner.caches:
        for array in cache[:2]:
            array[:] = float("nan")
    assert_equals_generate(driven(runner, 4, (5, 29), 6), model)


def test_models_that_return_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(*PACKED["llama"])
    stock = type(model.model).forward

    def all_logits(self: Any, *args: Any, logits_to_keep: Any = 0, **named: Any) -> Any:
        return stock(self, *args, **named)

    monkeypatch.setattr(type(model.model), "forward", all_logits)
    assert_equals_generate(driven(runner_of(model, MEMORY), 5, (5, 29), 6), model)


@pytest.mark.parametrize("name", ["embedded", "qwen3"])
def test_logits_of_any_number_of_last_tokens(name: str) -> None:
    model = model_named(name)
    runner = runner_of(model, MEMORY)
    one, two, three = prompts(12, 30, 9)
    expected = [model.begin().forward_all(ids) for ids in (one, two, three)]
    none = runner.forward([ModelInput(0, one, 0, 5, [1], 0), ModelInput(1, two, 0, 25, [2, 5], 0)])
    assert none.shape == (0, model.vocab_size)
    parts = [
        ModelInput(0, one, 5, 12, [1], 3),
        ModelInput(2, three, 0, 9, [8], 9),
        ModelInput(1, two, 25, 30, [2, 5], 0),
    ]
    both = np.concatenate([expected[0][-3:], expected[2]])
    for _ in range(2):  # the same positions again
        np.testing.assert_allclose(runner.forward(parts), both, atol=1e-3)
    assert runner.forward([]).shape == (0, model.vocab_size)


def test_a_failed_forward_pass_leaves_the_runner_usable() -> None:
    model = model_of(*PACKED["gpt2"])
    runner = runner_of(model, MEMORY)
    one, two = prompts(12, 15)
    runner.forward([ModelInput(0, one, 0, 6, [1], 0)])
    with pytest.raises(IndexError):
        runner.forward([ModelInput(0, one, 6, 12, [1], 1), ModelInput(1, [*two, 10**6], 0, 16, [2], 1)])
    logits = runner.forward([ModelInput(0, one, 6, 12, [1], 1), ModelInput(1, two, 0, 15, [2], 1)])
    np.testing.assert_allclose(logits, [model.begin().forward(ids) for ids in (one, two)], atol=1e-3)


@pytest.mark.slow
def test_the_model_stays_usable_also_on_another_thread() -> None:
    model = model_of(*PACKED["gemma3"])
    [ids] = prompts(40)
    before = model.begin().forward_all(ids)
    runner = runner_of(model, MEMORY)
    expected = runner.forward([ModelInput(0, ids, 0, 40, [5, 4, 3], 40)])
    wrong: list[str] = []

    def stock() -> None:
        for _ in range(20):
            if not np.array_equal(model.begin().forward_all(ids), before):
                wrong.append("stock")

    thread = threading.Thread(target=stock)
    thread.start()
    for _ in range(20):
        if not np.array_equal(runner.forward([ModelInput(0, ids, 0, 40, [5, 4, 3], 40)]), expected):
            wrong.append("packed")
    thread.join()
    assert not wrong


def test_weights_are_not_copied() -> None:
    model = model_of(*PACKED["llama"])
    runner = runner_of(model, MEMORY)
    generated = {weight.data_ptr() for weight in model.model.parameters()}
    assert {weight.data_ptr() for weight in runner.model.parameters()} == generated


def test_the_kv_cache_fits_the_given_memory() -> None:
    model = model_of(*PACKED["llama"])
    block = 3 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, head size, bytes
    assert runner_of(model, 10 * block).blocks == runner_of(model, 11 * block - 1).blocks == 10
    with pytest.raises(ModelError, match=f"needs at least {block} bytes"):
        runner_of(model, block - 1)
    half = runner_of(model_of(*PACKED["llama"], dtype="bfloat16"), 10 * block)
    assert half.blocks == 20


def test_wrong_results_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu_operations.decode_attention

    def wrong(*given: Any) -> None:
        right(*given[:5], given[5]._replace(scaling=given[5].scaling * 1.1), *given[6:])

    monkeypatch.setattr(cpu_operations, "decode_attention", wrong)
    runner = runner_of(model_of(*PACKED["llama"]), MEMORY)
    assert not runner.paged
    assert re.fullmatch(r"its batched logits differ by \d+\.\d%", runner.unpaged_reason)


@pytest.mark.parametrize("name", ["_decode", "_chunk"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wrong_results_are_detected_in_half_precision(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(AttentionPlan, name)
    monkeypatch.setattr(AttentionPlan, name, lambda *given: 0.5 * right(*given))
    runner = runner_of(model_of(*PACKED["llama"], dtype=dtype), MEMORY)
    assert not runner.paged
    assert "batched logits differ by" in runner.unpaged_reason


def change(name: str, value: Any) -> Callable[[TransformersModel], None]:
    def apply(model: TransformersModel) -> None:
        for module in model.model.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
                setattr(module, name, value)

    return apply


@pytest.mark.parametrize(
    ("name", "apply", "why"),
    [
        ("gemma2", change("sliding_window", None), "its attention has the window none, its mask has 11"),
        ("gemma2", change("sliding_window", 5000), "its attention has the window 5000, its mask has 11"),
        ("gpt-oss", change("sliding_window", 4000), "its attention has the window 4000, its mask has 11"),
        ("llama", change("is_causal", False), "its attention is not causal"),
        ("llama", lambda model: model.model.model.layers.pop(1), "a batched call raises .*|2 of its 3 layers .*"),
        ("llama", lambda model: setattr(model.model.config, "attention_chunk_size", 99), "its attention is chunked"),
        ("llama", lambda model: setattr(model.model.config, "is_encoder_decoder", True), "it is an encoder-decoder .*"),
    ],
)
def test_incompatible_models_are_not_paged(name: str, apply: Any, why: str) -> None:
    model = model_of(*PACKED[name])
    apply(model)
    runner = runner_of(model, MEMORY)
    assert not runner.paged
    assert re.fullmatch(why, runner.unpaged_reason)


def test_other_model_kinds_run_unbatched() -> None:
    toy = Toy(lambda seen: np.eye(9, dtype=np.float32)[sum(seen) % 9], 9)
    runner = runner_of(toy, 1 << 20)
    assert (runner.paged, runner.blocks, runner.unbatched_reason) == (False, 64, "Toy supports one sequence at a time")
    with pytest.raises(ModelError, match=r"the KV cache needs at least 16384 bytes \(one block\), got 5"):
        runner_of(toy, 5)


@pytest.mark.parametrize("name", ["mamba", "jamba", "bamba", "lfm2"])
def test_chunks_after_the_first_one(name: str) -> None:
    model = model_of(*ONE_BY_ONE[name][:2])
    [ids] = prompts(30)
    expected = model.begin().forward_all(ids)
    context = model.begin()
    context.forward(ids[:11])
    np.testing.assert_allclose(context.forward_all(ids[11:20]), expected[11:20], atol=1e-3)
    np.testing.assert_allclose(context.forward(ids[20:29]), expected[28], atol=1e-3)
    np.testing.assert_allclose(context.forward(ids[29:]), expected[29], atol=1e-3)
