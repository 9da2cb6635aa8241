"""``LLM(model, tokenizer)`` with a model in memory: same text as from a folder, and the object unchanged."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED

pytestmark = pytest.mark.usefixtures("one_torch_thread")
torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

from random_models import CONFIGS, LLAMA, greedy  # noqa: E402
from random_models import random_model as made  # noqa: E402
from toy_requests import drive  # noqa: E402

GREEDY = nc.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = nc.SamplingParams(temperature=1.3, top_p=0.95, repetition_penalty=1.1, seed=7, max_tokens=12, ignore_eos=True)
PROMPTS = ["Once upon a time", "The fox", "A dog and a cat went to the market to"]


def tokens(completions: list[nc.Completion]) -> list[list[int]]:
    return [list(completion.outputs[0].token_ids) for completion in completions]


def generated(model: Any, llm: nc.LLM, count: int = 12) -> list[list[int]]:
    """The greedy tokens of Transformers' ``generate`` for PROMPTS, in evaluation mode."""
    training = model.training
    model.eval()
    found = [greedy(model, llm.encode(prompt), count) for prompt in PROMPTS]
    model.train(training)
    return found


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_in_memory_generates_the_text_of_its_folder(name: str, tmp_path: Path) -> None:
    model = made(name)
    model.save_pretrained(tmp_path)
    folder, memory = nc.LLM(tmp_path, EMBEDDED, device="cpu"), nc.LLM(model, EMBEDDED)
    assert memory.folder is None
    assert memory.new_engine().runner.paged == ("one sequence" not in name)
    for params in (GREEDY, SAMPLED):
        assert tokens(memory.generate(PROMPTS, params)) == tokens(folder.generate(PROMPTS, params))
    assert tokens(memory.generate(PROMPTS, GREEDY)) == generated(model, memory)


def test_the_object_does_not_change() -> None:
    model = made(attention_dropout=0.5)
    hooks = [model.model.layers[0].register_forward_hook(lambda *_: None)]
    before = [(name, id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()]
    implementation, modules = model.config._attn_implementation, list(map(id, model.modules()))
    llm = nc.LLM(model, EMBEDDED, speculative_config="ngram")
    llm.generate(PROMPTS, SAMPLED)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert list(map(id, model.modules())) == modules
    assert [(name, id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()] == before
    assert [len(module._forward_hooks) for module in model.modules() if module._forward_hooks] == [len(hooks)]
    assert not [buffer for buffer in model.buffers() if buffer.is_inference()]
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()  # it can still be trained
    assert model.lm_head.weight.grad is not None


def test_trained_weights_are_used_after_the_prefix_cache_is_reset() -> None:
    model = made()
    llm = nc.LLM(model, EMBEDDED)
    before = tokens(llm.generate(PROMPTS, GREEDY))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    llm.reset_prefix_cache()
    after = tokens(llm.generate(PROMPTS, GREEDY))
    assert after != before
    assert after == generated(model, llm)


class LoraLinear(torch.nn.Module):
    """A linear layer with a low-rank update, as an adapter inserts it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + 2.0 * self.up(self.down(self.dropout(x)))


def with_adapter(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.up_proj = LoraLinear(layer.self_attn.q_proj), LoraLinear(layer.mlp.up_proj)
    return model


class Wrapper(torch.nn.Module):
    """A wrapper like that of peft, which has the model in it."""

    def __init__(self, model: Any, **config: Any) -> None:
        super().__init__()
        self.inner, self.active_peft_config = model, SimpleNamespace(**config)

    def get_base_model(self) -> Any:
        return self.inner


@pytest.mark.slow
def test_adapters_and_wrappers() -> None:
    plain = nc.LLM(made(), EMBEDDED)
    model = with_adapter(made())
    expected = generated(model, plain)
    assert expected != generated(made(), plain)
    for each in (model, Wrapper(model, is_prompt_learning=False)):
        llm = nc.LLM(each, EMBEDDED)
        assert llm.new_engine().runner.paged
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
    with pytest.raises(
        nc.ModelError, match=r"the adapter adds virtual tokens to prompts \(PREFIX_TUNING\), which is not"
    ):
        nc.LLM(Wrapper(model, is_prompt_learning=True, peft_type="PREFIX_TUNING"), EMBEDDED)


@pytest.mark.slow
def test_compiled_models() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own imports
        llm = nc.LLM(torch.compile(made()), EMBEDDED)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == generated(made(), llm)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft
def test_peft_adapters() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    wrapped = peft.get_peft_model(
        made(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    )
    llm = nc.LLM(wrapped, EMBEDDED)
    assert llm.new_engine().runner.paged
    assert tokens(llm.generate(PROMPTS, GREEDY)) == generated(wrapped, llm)


def test_patched_modules_and_hooks_apply() -> None:
    model = made()
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * 0.5)
    model.lm_head.forward = lambda x: torch.nn.functional.linear(x, model.lm_head.weight).flip(-1)
    llm = nc.LLM(model, EMBEDDED)
    assert llm.new_engine().runner.paged
    assert tokens(llm.generate(PROMPTS, GREEDY)) == generated(model, llm) != generated(made(), llm)


@pytest.mark.slow
def test_quantized_weights() -> None:
    model = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(model.eval(), {torch.nn.Linear}, dtype=torch.qint8)
        llm = nc.LLM(quantized, EMBEDDED)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == generated(quantized, llm)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_of_the_object_is_kept(dtype: str) -> None:
    llm = nc.LLM(made().to(getattr(torch, dtype)), EMBEDDED)
    assert llm.model.runtime == f"torch cpu {dtype}"
    assert len(tokens(llm.generate("The fox", GREEDY))[0]) == 12


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: transformers.LlamaModel(CONFIGS["llama"]()), "LlamaModel has no language model head"),
        (lambda: torch.nn.Linear(2, 2), "Linear is not a model of Transformers, nor a wrapper of one"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
            ),
            "T5ForConditionalGeneration is an encoder-decoder model; only causal",
        ),
        (
            lambda: transformers.LlamaForSequenceClassification(CONFIGS["llama"]()),
            "LlamaForSequenceClassification has no language model head",
        ),
        (lambda: made().to("meta"), "LlamaForCausalLM has weights without values"),
    ],
)
def test_a_model_that_cannot_be_run_is_one_error(model: Any, message: str) -> None:
    with pytest.raises(nc.ModelError, match=message):
        nc.LLM(model(), EMBEDDED)


def test_the_generation_config_of_the_object_is_the_default() -> None:
    model = made()
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, max_new_tokens=9, eos_token_id=[7, 8], sequence_bias={(5,): -2.0}
    )
    llm = nc.LLM(model, EMBEDDED)
    expected = nc.SamplingParams(temperature=0.6, top_k=20, max_tokens=9, logit_bias={5: -2.0})
    assert llm.default_params == expected
    assert llm.tokenizer.eos_token_ids >= {7, 8}
    assert nc.LLM(model, EMBEDDED, generation_config="none").default_params == nc.SamplingParams()
    model.generation_config.temperature = -1.0
    with pytest.raises(nc.ModelError, match=r"the model's generation_config: temperature must be .*, got -1"):
        nc.LLM(model, EMBEDDED)


@pytest.mark.slow
def test_a_draft_model_in_memory_gives_the_same_tokens() -> None:
    model, rates = made(), []
    expected = tokens(nc.LLM(model, EMBEDDED).generate(PROMPTS, SAMPLED))
    for draft in (model, made("gpt2")):
        config = nc.Speculation("draft", num_speculative_tokens=3, adaptive=False, model=draft)
        llm = nc.LLM(model, EMBEDDED, speculative_config=config)
        assert tokens(llm.generate(PROMPTS, SAMPLED)) == expected
        engine = llm.new_engine()
        plain = nc.SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
        drive(engine, [nc.Request(llm.encode(prompt), plain) for prompt in PROMPTS])
        rates.append(engine.stats.speculative.acceptance_rate)
    assert rates[0] > 0.9 > rates[1]  # the model itself drafts what it would sample


def test_a_draft_model_that_does_not_fit() -> None:
    wrong = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "vocab_size": 99}))
    for draft, message in (
        (wrong, "must have the vocabulary of the model; it has 99 tokens instead of 4096"),
        (
            made("bloom, one sequence at a time"),
            "the draft model must have a paged KV cache: its attention cannot be replaced",
        ),
    ):
        with pytest.raises(nc.ModelError, match=message):
            nc.LLM(made(), EMBEDDED, speculative_config=nc.Speculation("draft", model=draft))
    with pytest.raises(
        nc.ParameterError, match="model is for the methods 'draft', 'eagle', 'medusa', got it with 'ngram'"
    ):
        nc.Speculation("ngram", model="x")
