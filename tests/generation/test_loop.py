"""The generation loop for one sequence: arguments, stop criteria and streaming."""

from __future__ import annotations

import numpy as np
import pytest
from toy_models import Toy

import nucleate as nc
from nucleate.generation.loop import generate
from nucleate.outputs import CompletionChunk

GREEDY = nc.SamplingParams(temperature=0)
PROMPT = [0, 300]
VALUE = '{"title": "A } and \\" B", "n": [1, {}]}'


def generate_text(llm: nc.LLM, text: str, **params: object) -> list[CompletionChunk]:
    """The chunks of a model that generates this text, then EOS."""
    ids = [*llm.tokenizer.encode(text, add_special_tokens=False), 0]
    model = Toy.script(ids, 4096, prompt_length=len(PROMPT))
    return list(generate(model, llm.tokenizer, PROMPT, GREEDY.replace(**params)))


def text_of(chunks: list[CompletionChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def finish_of(chunks: list[CompletionChunk]) -> tuple[object, object]:
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    return chunks[-1].finish_reason, chunks[-1].stop_reason


@pytest.mark.parametrize(
    ("text", "params", "shown", "stop_reason"),
    [
        (" upon a time", {}, " upon a time", None),
        ("The little fox ran away.", {"stop": "fox ran"}, "The little ", "fox ran"),
        ("The fox ran.", {"stop": "fox ran", "include_stop_str_in_output": True}, "The fox ran", "fox ran"),
        ("The fox ran f", {"stop": ["fox flew", "fz"]}, "The fox ran f", None),  # held back, until the end
        ("Stop. Go on", {"stop_token_ids": "."}, "Stop", "."),
        ("It was 1984 and cold", {"stop_regex": r"\d{4}"}, "It was ", r"\d{4}"),
        (VALUE + " and more", {"stop_json": True}, VALUE, "json"),
    ],
)
def test_what_ends_an_output_and_its_text(
    llm: nc.LLM, text: str, params: dict[str, object], shown: str, stop_reason: object
) -> None:
    [dot] = llm.tokenizer.encode(".", add_special_tokens=False)
    params = {name: [dot] if value == "." else value for name, value in params.items()}
    chunks = generate_text(llm, text, **params)
    assert (text_of(chunks), finish_of(chunks)) == (shown, ("stop", dot if stop_reason == "." else stop_reason))
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * len(chunks)


@pytest.mark.slow
def test_a_catastrophic_pattern_is_an_error(llm: nc.LLM) -> None:
    chunks = generate_text(llm, "a" * 80 + "!", stop_regex=r"(a|aa)+c")
    reason, why = finish_of(chunks)
    assert reason == "error"
    assert "(a|aa)+c" in str(why)


def test_max_and_min_tokens(llm: nc.LLM) -> None:
    chunks = generate_text(llm, "The little fox ran away.", max_tokens=3)
    assert (len(chunks), finish_of(chunks)) == (3, ("length", None))
    chunks = generate_text(llm, "The", min_tokens=10)  # EOS is banned until then; the second best token is sampled
    assert len(chunks) >= 10
    assert 0 not in [token for chunk in chunks[:9] for token in chunk.token_ids]


def test_the_context_length_ends_an_output(llm: nc.LLM) -> None:
    model = Toy.script([500], 4096, prompt_length=3, context_length=8)
    chunks = list(generate(model, llm.tokenizer, [0, 1, 2], GREEDY))
    assert (len(chunks), finish_of(chunks)) == (5, ("length", None))


def test_split_characters_are_emitted_complete_and_an_incomplete_one_at_the_end(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode("é🦊", add_special_tokens=False)
    assert len(ids) > 2
    model = Toy.script([*ids[:-1], 0], 4096, prompt_length=2)
    chunks = list(generate(model, llm.tokenizer, PROMPT, GREEDY))
    assert text_of(chunks) == llm.tokenizer.decode(ids[:-1])
    assert "\ufffd" not in text_of(chunks[:-1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_invalid_logits_end_with_an_error(llm: nc.LLM, bad: float) -> None:
    def rule(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(4096, np.float32)
        logits[500 + len(seen)] = 10.0
        logits[7] = bad if len(seen) == 5 else 0.0
        return logits

    chunks = list(generate(Toy(rule, 4096), llm.tokenizer, PROMPT, GREEDY))
    reason, why = finish_of(chunks)
    assert reason == "error"
    assert "at token 7" in str(why)
    assert len(text_of(chunks)) > 0


def test_everything_banned_is_an_error(llm: nc.LLM) -> None:
    chunks = generate_text(llm, "The", allowed_token_ids=[5], suppress_token_ids=[5])
    assert finish_of(chunks)[0] == "error"
    assert "every token is at -inf" in str(chunks[-1].stop_reason)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([4096], {}, r"outside the vocabulary \(0..4095\)"),
        ([-1], {}, "outside the vocabulary"),
        ([1], {"allowed_token_ids": [4096]}, "allowed_token_ids names token 4096"),
        ([1], {"stop_regex": ["x*"]}, "stop_regex"),
    ],
)
def test_invalid_requests_are_rejected_before_running(
    llm: nc.LLM, prompt: list[int], params: dict[str, object], message: str
) -> None:
    with pytest.raises(nc.ParameterError, match=message):
        generate(llm.model, llm.tokenizer, prompt, nc.SamplingParams(**params))


def test_the_prompt_counts_for_repetition_but_not_for_frequency(llm: nc.LLM) -> None:
    def rule(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(4096, np.float32)
        logits[[300, 301]] = 2.0, 1.5
        return logits

    def first(**params: float) -> tuple[int, ...]:
        return next(generate(Toy(rule, 4096), llm.tokenizer, PROMPT, GREEDY.replace(**params))).token_ids

    assert first(repetition_penalty=2.0) == (301,)
    assert first(frequency_penalty=2.0, presence_penalty=2.0) == (300,)
