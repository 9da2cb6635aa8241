"""Reasoning sections: the parser, the tracker of tokens, and the limit of their length."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import chat_models
import pytest
import tiers
from chat_models import parse

import nucleate as nc
from nucleate.chat.chat_format import TOOL_FORMATS, ChatFormat, RenderedChat
from nucleate.chat.reasoning import FORMATS, THINK, ReasoningSection, ReasoningTracker, effort_variables

ASK = [{"role": "user", "content": "Tell me a story."}]
HARMONY = FORMATS["gpt_oss"]
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> nc.LLM:
    """A model whose template opens the section."""
    return chat_models.model(tmp_path_factory.mktemp("opened"), chat_models.OPENED)


@pytest.fixture(scope="module")
def optional(tmp_path_factory: pytest.TempPathFactory) -> nc.LLM:
    """A model that may open the section."""
    return chat_models.model(tmp_path_factory.mktemp("optional"), chat_models.OPTIONAL)


TABLE = [
    # output, whether the prompt opened the section, reasoning, content, tool format
    ("<think>\nHm.\n</think>\n\nHello", False, "Hm.", "Hello", None),
    ("Hm.\n</think>\n\nHello\n", True, "Hm.", "Hello\n", None),
    ("\n<think>Hm", False, "Hm", "", None),
    ("Hm \n", True, "Hm \n", "", None),
    ("Hello</think>", False, "", "Hello</think>", None),
    ("  Hello <think>", False, "", "  Hello <think>", None),
    ("<think></think>", False, "", "", None),
    ("</think>\n", True, "", "", None),
    ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>", None),
    ('Hm.</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', True, "Hm.", "", "hermes"),
    ("<think>a <tool_call>{}</think>b", False, "a <tool_call>{}", "b", "hermes"),
    (f"{ANALYSIS}Hm.{FINAL}Hello", False, "Hm.", "Hello", "openai"),
    (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b{FINAL}c<|return|>", False, "a\nb", "c", "openai"),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content", "tool_format"), TABLE)
def test_an_output_is_split_in_any_parts_and_at_any_limit(
    text: str, is_open: bool, reasoning: str, content: str, tool_format: str | None
) -> None:
    own = HARMONY if tool_format == "openai" else THINK
    for parts in ([text], text, *([text[:place], text[place:]] for place in range(len(text)))):
        found = parse(parts, tool_format, reasoning=own, opened=is_open)
        assert (found.reasoning, found.content) == (reasoning, content)
        assert found.complete_calls == ([("f", "{}")] if '"f"' in text else [])

    if text.startswith(("Hello", "  Hello")):
        return  # without a section, a marker is text
    for end in range(len(text) + 1):  # where a limit cuts an output, no part of a marker is text
        found = parse(text[:end], tool_format, reasoning=own, opened=is_open, cut=True)
        assert reasoning.startswith(found.reasoning.rstrip())
        assert content.startswith(found.content.rstrip())


@pytest.mark.parametrize(
    ("text", "format_name", "is_open", "inside"),
    [
        ("Hm, so.</think> Hello", "qwen3", True, "Hm, so."),
        ("<think>Hm, so.</think> Hello", "qwen3", False, "Hm, so."),
        ("\n<think>Hm", "qwen3", False, "Hm"),
        ("Hello <think>", "qwen3", False, ""),
        (f"{ANALYSIS}one<|end|><|start|>assistant{ANALYSIS}two{FINAL}three", "gpt_oss", False, "onetwo"),
    ],
)
def test_the_tracker_counts_the_tokens_of_the_section(
    llm: nc.LLM, text: str, format_name: str, is_open: bool, inside: str
) -> None:
    section = ReasoningSection(FORMATS[format_name], is_open, ())
    tracker = ReasoningTracker(section, llm.tokenizer, None)
    ids = [llm.tokenizer.encode(character, add_special_tokens=False)[0] for character in text]
    counted = "".join(character for character, token in zip(text, ids, strict=True) if tracker.push(token))
    end = FORMATS[format_name].end
    assert counted.replace(end[:-1], "") == inside  # the marker is one token in real vocabularies
    assert tracker.count == len(counted)
    assert tracker.forced_token is None


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("limit", [0, 7, 40])
@pytest.mark.parametrize("values", [{}, {"temperature": 1.5, "top_k": 50}, {"temperature": 0}])
def test_the_limit_is_exact(opened: nc.LLM, limit: int, values: dict[str, Any]) -> None:
    """Before the limit, the tokens are those without one; after it, those after the same tokens."""
    ends, length = tuple(opened.tokenizer.encode("</think>", False)), limit + 30
    for seed in range(tiers.count(1, 20)):
        shared = {**values, "seed": seed, "max_tokens": length, "ignore_eos": True, "logprobs": 0}
        free = opened.chat(ASK, **shared).outputs[0]
        (output,) = opened.chat(ASK, **shared, max_reasoning_tokens=limit).outputs
        assert output.token_ids[:limit] == free.token_ids[:limit]
        assert output.token_ids[limit : limit + len(ends)] == ends
        assert output.logprobs is not None
        assert output.reasoning_tokens == limit
        assert (output.reasoning or "") == opened.tokenizer.decode(free.token_ids[:limit]).strip()
        request, _ = opened.chat_request(ASK, **shared)
        given = nc.Request(request.prompt_ids, request.params, output_ids=output.token_ids[: limit + len(ends)])
        tokens = [token for chunk in chat_models.run(opened, given) for token in chunk.token_ids]
        assert output.token_ids == tuple(tokens)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_the_limit_holds_under_speculation(tmp_path: Path, opened: nc.LLM, rule: str) -> None:
    speculation = nc.Speculation("ngram", acceptance_rule=rule)
    llm = chat_models.model(tmp_path, chat_models.OPENED, speculative_config=speculation)
    ends = tuple(llm.tokenizer.encode("</think>", False))
    for seed in range(tiers.count(1, 5)):
        values = {"max_tokens": 60, "seed": seed, "ignore_eos": True, "max_reasoning_tokens": 20, "n": 2}
        found, plain = llm.chat(ASK, **values), opened.chat(ASK, **values)
        for output in found.outputs:
            assert output.token_ids[20 : 20 + len(ends)] == ends
            assert output.reasoning_tokens == 20
        if rule == "coupled":
            assert [output.token_ids for output in found.outputs] == [output.token_ids for output in plain.outputs]


@pytest.mark.slow
def test_a_limit_without_a_section_has_no_effect(llm: nc.LLM, optional: nc.LLM) -> None:
    values = {"seed": 1, "max_tokens": 20}
    assert llm.chat(ASK, **values, max_reasoning_tokens=0).outputs == llm.chat(ASK, **values).outputs
    limited, free = (llm.generate("Once", **values, **limit)[0] for limit in ({"max_reasoning_tokens": 0}, {}))
    assert limited.outputs == free.outputs
    assert optional.chat(ASK, **values, max_reasoning_tokens=0).text == optional.chat(ASK, **values).text


@pytest.mark.slow
def test_structured_output_starts_after_the_reasoning(opened: nc.LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for seed in range(3):
        for constraint in ({"json_schema": schema}, {"regex": "(yes|no)!"}, {"choice": ["yes", "no"]}):
            values = {"structured_outputs": constraint, "max_reasoning_tokens": 12, "max_tokens": 200, "seed": seed}
            (output,) = opened.chat(ASK, **values).outputs
            assert output.reasoning
            assert output.finish_reason == "stop"
            assert re.search("yes|no", output.text)
            if "json_schema" in constraint:
                assert json.loads(output.text)["a"] in ("yes", "no")
            else:
                assert re.fullmatch("(yes|no)!?", output.text)


def test_structured_output_without_reasoning(optional: nc.LLM) -> None:
    for variables in ({}, {"enable_thinking": False}):
        values = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 300, "max_reasoning_tokens": 20}
        found = optional.chat(ASK, **values, chat_template_kwargs=variables)
        assert found.text in ("yes", "no")
        assert found.outputs[0].finish_reason == "stop"


def test_streamed_chunks_add_up(opened: nc.LLM) -> None:
    values = {"seed": 3, "max_tokens": 40, "max_reasoning_tokens": 15, "ignore_eos": True}
    chunks, whole = list(opened.stream_chat(ASK, **values)), opened.chat(ASK, **values)
    assert "".join(chunk.reasoning for chunk in chunks) == whole.reasoning
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum(chunk.reasoning_tokens for chunk in chunks) == whole.usage.reasoning_tokens == 15
    assert len(chunks) > 20


def test_the_format_follows_from_the_template(llm: nc.LLM) -> None:
    for template, expected in (
        ("<think>", THINK),
        ("{{ m.split('</think>')[-1] }}", THINK),
        ("[THINK][/THINK]", FORMATS["mistral"]),
        ("<|channel|>analysis<|message|>", HARMONY),
        ("{{ messages }}", None),
    ):
        tokenizer = type("T", (), {"chat_template": template, "special_texts": {}, "pieces": llm.tokenizer.pieces})
        assert ChatFormat.find(tokenizer).reasoning == expected  # type: ignore[arg-type]
        assert ChatFormat.find(tokenizer, reasoning_parser="none").reasoning is None  # type: ignore[arg-type]
        assert ChatFormat.find(tokenizer, reasoning_parser="qwen3").reasoning == THINK  # type: ignore[arg-type]
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(nc.ParameterError, match=f"{name} must be one of auto, "):
            nc.LLM(**{name: "unknown"})


def test_markers_that_are_special_tokens_stay_in_the_text(llm: nc.LLM) -> None:
    """``<|end|>`` is a special token of the bundled model."""
    chat_format = ChatFormat(llm.tokenizer, TOOL_FORMATS["openai"], HARMONY)
    kept = RenderedChat("", chat_format).kept_token_ids
    end = llm.tokenizer.backend.token_to_id("<|end|>")
    assert kept == {end}
    ids = [*llm.tokenizer.encode("Hi", False), end, *llm.tokenizer.encode(" you", False)]
    request = nc.Request((5,), nc.SamplingParams(max_tokens=9, ignore_eos=True), output_ids=ids, kept_token_ids=kept)
    text = "".join(chunk.text for chunk in chat_models.run(llm, request))
    assert text.startswith("Hi<|end|> you")


def test_efforts() -> None:
    assert effort_variables("low") == {"reasoning_effort": "low"}
    assert effort_variables("none")["enable_thinking"] is False
    for wrong in ("huge", 5, None, ["low"]):
        with pytest.raises(nc.ParameterError, match="reasoning_effort must be one of"):
            effort_variables(wrong)  # type: ignore[arg-type]
