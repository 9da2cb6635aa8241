"""At load, a few tokens show how a model decodes: with its cache, recomputed without one, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nucleate.models.loader import runner_of
from nucleate.models.protocol import ModelError
from nucleate.models.transformers.transformers_model import TransformersModel

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

SMALL: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def replace_forward(model: Any, change: Any) -> Any:
    """The model with another forward: ``change(stock, arguments)`` returns its output."""
    stock = type(model).forward

    class Changed(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, past_key_values: Any = None, **named: Any) -> Any:
            return change(
                lambda **more: stock(self, **more), dict(input_ids=input_ids, past_key_values=past_key_values) | named
            )

        def prepare_inputs_for_generation(self, input_ids: Any, **named: Any) -> dict[str, Any]:
            return {"input_ids": input_ids}  # so that generate recomputes

    model.__class__ = Changed
    return model


def test_a_working_cache_is_used() -> None:
    decoding = TransformersModel.of(llama()).decoding
    assert (decoding.cache, decoding.reason) == ("past_key_values", "")


def forgets(stock: Any, arguments: dict[str, Any]) -> Any:
    """A model that returns a cache but does not read it."""
    return stock(**{**arguments, "past_key_values": None})


def fails_with_a_cache(stock: Any, arguments: dict[str, Any]) -> Any:
    if arguments["past_key_values"] is not None:
        raise IndexError("cache index")
    return stock(**arguments)


def returns_no_cache(stock: Any, arguments: dict[str, Any]) -> Any:
    return stock(**{**arguments, "use_cache": False})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (forgets, "with its cache, its logits differ by"),
        (fails_with_a_cache, "decoding with its cache raises IndexError: cache index"),
        (returns_no_cache, "it does not return its cache"),
    ],
)
def test_sequences_are_recomputed_if_the_cache_does_not_work(change: Any, reason: str) -> None:
    right = TransformersModel.of(llama()).begin()
    model = TransformersModel.of(replace_forward(llama(), change))
    assert model.decoding.cache is None
    assert reason in model.decoding.reason
    context = model.begin()
    for ids in ([5, 6, 7], [8], [9, 10]):
        np.testing.assert_allclose(context.forward_all(ids), right.forward_all(ids), atol=1e-4)
    model.model.config.attention_chunk_size = 8  # so that it cannot run batched
    runner = runner_of(model, 1 << 20)
    assert "; each new token recomputes its sequence, as " in runner.unbatched_reason


def test_the_cache_is_used_if_generate_has_the_same_logits() -> None:
    model = llama()
    stock = type(model).forward

    class OtherPrefill(type(model)):  # type: ignore[misc]
        """Without a cache, its logits are others, as for a model that sees a prompt in both directions."""

        def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True, **named: Any) -> Any:
            out = stock(self, input_ids, past_key_values=past_key_values, use_cache=use_cache, **named)
            if not use_cache:
                out.logits = out.logits.roll(7, dims=-1)
            return out

    model.__class__ = OtherPrefill
    assert TransformersModel.of(model).decoding.cache == "past_key_values"


def test_a_model_that_cannot_run_is_an_error_at_load() -> None:
    def needs_an_image(stock: Any, arguments: dict[str, Any]) -> Any:
        raise ValueError("You must specify\npixel_values")

    with pytest.raises(
        ModelError, match=r"^Changed cannot continue a text: ValueError: You must specify pixel_values$"
    ):
        TransformersModel.of(replace_forward(llama(), needs_an_image))


def test_a_model_without_a_language_head_is_an_error_at_load() -> None:
    with pytest.raises(ModelError, match=r"^LlamaModel has no language model head; load"):
        TransformersModel.of(llama().model)


def test_the_number_of_logits_must_be_that_of_the_head() -> None:
    def fewer(stock: Any, arguments: dict[str, Any]) -> Any:
        out = stock(**arguments)
        out.logits = out.logits[..., :50]
        return out

    with pytest.raises(ModelError, match="Changed returns 50 logits per token; its head has 99"):
        TransformersModel.of(replace_forward(llama(), fewer))


@pytest.mark.slow
def test_token_bytes_of_layers_of_different_sizes() -> None:
    config = transformers.Gemma4TextConfig(
        **{**SMALL, "num_hidden_layers": 3}, head_dim=8, global_head_dim=16, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=99, num_kv_shared_layers=0, sliding_window=8, num_global_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )  # fmt: skip
    model = TransformersModel.of(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert model.token_bytes == 2 * 2 * (8 + 16 + 16) * 4  # keys and values, heads, sizes, bytes
    runner = runner_of(model, 1 << 20)
    assert runner.paged, runner.unbatched_reason
    assert [layer.key_shape for layer in runner.layers] == [(2, 8), (2, 16), (2, 16)]
