"""Batched models capture the hidden states that Transformers, and the unbatched NumPy Llama, compute."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from nucleate.models.loader import EMBEDDED, runner_of
from nucleate.models.numpy_llama import Llama, LlamaContext
from nucleate.models.protocol import ModelError
from nucleate.models.runner import ModelInput, SequentialRunner
from nucleate.models.transformers.transformers_model import TransformersModel

pytestmark = pytest.mark.usefixtures("one_torch_thread")
torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

from test_batched_transformers import PACKED, SMALL  # noqa: E402

from nucleate.models.transformers.batched_model import HiddenStateCapture, decoder_layers  # noqa: E402

MEMORY = 4 << 20
EXPERTS = dict(n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: PACKED[name] for name in ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt-neox")},
    "mixtral": ("MixtralConfig", dict(SMALL, num_local_experts=3, num_experts_per_tok=2)),
    "glm4-moe": ("Glm4MoeConfig", dict(SMALL, head_dim=16, first_k_dense_replace=1, **EXPERTS)),
}
"""Some have lists of as many experts as layers."""


def model_of(name: str, dtype: str = "float32") -> TransformersModel:
    config, settings = KINDS[name]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**settings))
    for key, weight in made.named_parameters():
        if "norm" in key or "ln_" in key:  # norm weights of one would hide a misplaced normalization
            torch.nn.init.uniform_(weight, 0.5, 2.0)
    return TransformersModel.of(made.to(getattr(torch, dtype)))


def random_ids(length: int) -> list[int]:
    found: list[int] = np.random.default_rng(length).integers(3, 199, length).tolist()
    return found


def model_named(name: str) -> Any:
    return Llama(EMBEDDED) if name == "embedded" else model_of(name)


def stock(model: Any, ids: list[int]) -> list[np.ndarray]:
    """The input of each layer, and the last hidden state; that of Transformers is normalized."""
    if isinstance(model, Llama):
        short = object.__new__(Llama)
        states = []
        for count in range(len(model.layers) + 1):
            short.__dict__.update(model.__dict__, layers=model.layers[:count])
            states.append(LlamaContext(short)._forward(ids))
        return states
    with torch.inference_mode():
        out = model.model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    return [x[0].float().numpy() for x in out.hidden_states]


def final_norm(model: Any, x_TX: np.ndarray) -> np.ndarray:
    if isinstance(model, Llama):
        return x_TX
    decoder = model.model.get_decoder()
    names = [name for name in ("norm", "ln_f", "final_layer_norm") if hasattr(decoder, name)]
    with torch.inference_mode():
        found: np.ndarray = getattr(decoder, names[0])(torch.from_numpy(x_TX)).numpy()
    return found


@pytest.mark.parametrize("name", ["embedded", *KINDS])
def test_they_equal_those_without_batches(name: str) -> None:
    model = model_named(name)
    texts = [random_ids(length) for length in (1, 5, 17, 40)]
    expected = [stock(model, text) for text in texts]
    last, width = len(expected[0]) - 1, expected[0][0].shape[1]
    runner = runner_of(model, MEMORY)
    assert runner.paged, runner.unbatched_reason
    layers = (2, 0, last, 1, 2)
    runner.capture_hidden_states(layers)
    assert runner.hidden_states.shape == (0, width * 5)
    got: list[list[np.ndarray]] = [[] for _ in texts]
    for reads in ([(0, 1), (0, 5), (0, 17), (0, 30)], [(30, 38)], [(38, 40)]):
        first = len(texts) - len(reads)
        parts = [
            ModelInput(i, texts[i], *span, [3 * i, 3 * i + 1, 3 * i + 2], i % 2) for i, span in enumerate(reads, first)
        ]
        runner.forward(parts)
        assert isinstance(runner.hidden_states, np.ndarray)
        assert runner.hidden_states.dtype == np.float32
        begin = 0
        for part in parts:
            end = begin + part.stop - part.start
            got[part.key].append(runner.hidden_states[begin:end])
            begin = end
        assert begin == len(runner.hidden_states)
    for chunks, states in zip(got, expected, strict=True):
        ours = np.split(np.concatenate(chunks), 5, axis=1)
        scale = max(np.abs(states[2]).max(), 1.0)
        for index, layer in enumerate(layers):
            if layer < last:
                np.testing.assert_allclose(ours[index], states[layer], atol=2e-3 * scale)
            else:
                np.testing.assert_allclose(final_norm(model, ours[index]), states[last], atol=2e-2)


@pytest.mark.parametrize("name", ["embedded", "qwen3"])
def test_logits_are_bit_equal_with_and_without_capture(name: str) -> None:
    model = model_named(name)
    one, two = runner_of(model, MEMORY), runner_of(model, MEMORY)
    two.capture_hidden_states((1,))
    parts = [ModelInput(0, random_ids(9), 0, 9, [0], 3), ModelInput(1, random_ids(33), 0, 33, [1, 2, 3], 1)]
    np.testing.assert_array_equal(one.forward(parts), two.forward(parts))
    width = two.hidden_states.shape[1]
    two.capture_hidden_states((1, 3))
    two.forward(parts)
    assert one.hidden_states.shape == (0, 0)
    assert two.hidden_states.shape == (42, 2 * width)
    before, copy = two.hidden_states, two.hidden_states.copy()
    two.forward([ModelInput(0, random_ids(20), 0, 9, [0], 1)])
    np.testing.assert_array_equal(before, copy)  # they are copies
    two.forward([])
    assert two.hidden_states.shape == (0, 2 * width)
    two.capture_hidden_states(())
    two.forward(parts)
    assert two.hidden_states.shape == (0, 0)
    if name != "embedded":
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in two.model.modules())


def test_runners_without_hidden_state_capture(model: Llama) -> None:
    runner = SequentialRunner(model, 10)
    runner.capture_hidden_states(())
    with pytest.raises(ModelError, match="hidden states cannot be captured on numpy float32"):
        runner.capture_hidden_states((1,))
    assert runner.hidden_states.size == 0


def test_changing_the_captured_layers_keeps_the_kv_cache() -> None:
    model = model_of("gemma3")
    ids, runner = random_ids(30), runner_of(model, MEMORY)
    runner.forward([ModelInput(0, ids, 0, 20, [0, 1], 0)])
    runner.capture_hidden_states((1,))
    [logits_V] = runner.forward([ModelInput(0, ids, 20, 30, [0, 1], 1)])
    np.testing.assert_allclose(logits_V, model.begin().forward(ids), atol=1e-3)


def test_half_precision_states_are_returned_as_float32() -> None:
    runner = runner_of(model_of("llama", "bfloat16"), MEMORY)
    runner.capture_hidden_states((0, 3))
    runner.forward([ModelInput(0, random_ids(9), 0, 9, [0], 1)])
    assert runner.hidden_states.dtype == np.float32
    np.testing.assert_array_equal(
        runner.hidden_states, torch.from_numpy(runner.hidden_states).to(torch.bfloat16).float().numpy()
    )


@pytest.mark.parametrize("layers", [(7,), (-1,), (0, 9)])
@pytest.mark.parametrize(("name", "count"), [("embedded", 6), ("llama", 3)])
def test_invalid_layers(name: str, count: int, layers: tuple[int, ...]) -> None:
    runner = runner_of(model_named(name), MEMORY)
    with pytest.raises(ValueError, match=rf"the layers must be in 0\.\.{count}, got"):
        runner.capture_hidden_states(layers)
    assert runner.hidden_states.size == 0


def test_models_whose_layers_are_not_found() -> None:
    runner = runner_of(model_of("llama"), MEMORY)
    decoder = runner.model.get_decoder()
    decoder.again = torch.nn.ModuleList([*decoder.layers])
    with pytest.raises(ModelError, match=r"its 3 layers cannot be identified \(candidates: layers, again\)"):
        runner.capture_hidden_states((1,))
    del decoder.again
    runner.model.config.num_hidden_layers = 5
    with pytest.raises(ModelError, match=r"its 5 layers cannot be identified \(candidates: none\)"):
        runner.capture_hidden_states((1,))


class CustomDecoder(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A model whose layers pass hidden states by keyword and return a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Pair(), Pair()])
        self.config = transformers.LlamaConfig(num_hidden_layers=2)

    def get_decoder(self) -> CustomDecoder:
        return self

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x, _ = layer(hidden_states=x)
        return x


class Pair(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, hidden_states: Any) -> Any:
        return hidden_states + 1, None


def test_layers_with_a_module_list_of_the_same_length() -> None:
    """For example as many experts as layers."""
    model = CustomDecoder()
    model.layers[1].experts = torch.nn.ModuleList([Pair(), Pair()])
    assert decoder_layers(model) == [*model.layers]


def test_layers_with_other_inputs() -> None:
    model = CustomDecoder()
    watcher = HiddenStateCapture(model, (2, 0))
    model(torch.zeros(1, 4, 3))
    np.testing.assert_array_equal(watcher.take().numpy(), [[2, 2, 2, 0, 0, 0]] * 4)
    with pytest.raises(ModelError, match=r"layer 2 has an input of shape \(\)"):
        watcher.take()  # nothing was captured since
    for shape in ((1, 4, 2, 3), (2, 4, 3)):
        model(torch.zeros(shape))
        with pytest.raises(ModelError, match=f"layer 2 has an input of shape {re.escape(str(shape))}"):
            watcher.take()
