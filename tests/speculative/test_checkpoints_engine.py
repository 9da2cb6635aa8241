"""Draft heads in their public layouts: the same texts as without speculation, on both kinds of targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_heads import LAYOUTS, write

import nucleate as nc

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

PROMPTS = ["Once upon a time", "One day, Tom and"]
PARAMS = [nc.SamplingParams(temperature=0, max_tokens=12), nc.SamplingParams(seed=3, max_tokens=16, top_p=0.9)]


def config_of(folder: Path, layout: str, target: Any, **options: Any) -> dict[str, Any]:
    """Write a head for a target. Returns how it is used."""
    method, make, file = LAYOUTS[layout]
    write(folder, *make(target), file)
    return {"method": method, "model": str(folder), "num_speculative_tokens": 5, "adaptive": False, **options}


def drafted(llm: nc.LLM) -> int:
    """The number of draft tokens for a text."""
    engine = llm.new_engine()
    engine.add(nc.Request(llm.encode("A"), PARAMS[1]))
    while len(engine):
        engine.step()
    return engine.stats.speculative.draft_tokens


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 3])
def test_texts_are_those_without_speculation(tmp_path: Path, llm: nc.LLM, layout: str, width: int) -> None:
    drafting = nc.LLM(speculative_config=config_of(tmp_path, layout, llm.model, tree_width=width))
    for params in PARAMS:
        expected = [one.text for one in llm.generate(PROMPTS, params)]
        assert [one.text for one in drafting.generate(PROMPTS, params)] == expected
    assert drafted(drafting) > 0


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rules_with_probabilities_are_greedy_at_temperature_0(
    tmp_path: Path, llm: nc.LLM, layout: str, rule: str
) -> None:
    drafting = nc.LLM(speculative_config=config_of(tmp_path, layout, llm.model, acceptance_rule=rule))
    expected = [one.text for one in llm.generate(PROMPTS, PARAMS[0])]
    assert [one.text for one in drafting.generate(PROMPTS, PARAMS[0])] == expected
    assert drafting.generate(PROMPTS, PARAMS[1])[0].text


SIZES: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, head_dim=16,
    num_key_value_heads=2,
)  # fmt: skip


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
@pytest.mark.usefixtures("one_torch_thread")
def test_a_transformers_model_is_a_target(tmp_path: Path, llm: nc.LLM, layout: str, family: str) -> None:
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**SIZES)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    plain = nc.LLM(model, llm.tokenizer)
    target = type("Target", (), {"vocab_size": 4096, "hidden_size": 32})
    drafting = nc.LLM(model, llm.tokenizer, speculative_config=config_of(tmp_path, layout, target))
    for params in PARAMS:
        params = params.replace(ignore_eos=True, max_tokens=12)
        expected = [one.text for one in plain.generate(PROMPTS, params)]
        assert [one.text for one in drafting.generate(PROMPTS, params)] == expected
    assert drafted(drafting) > 0
