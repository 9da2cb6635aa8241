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


def say(llm: nc.LLM, text: str, **params: object) -> list[CompletionChunk]:
    """The pieces when the model says this text, then EOS."""
    ids = [*llm.tokenizer.encode(text, add_special_tokens=False), 0]
    model = Toy.script(ids, 4096, prompt_length=len(PROMPT))
    return list(generate(model, llm.tokenizer, PROMPT, GREEDY.replace(**params)))


def text_of(pieces: list[CompletionChunk]) -> str:
    return "".join(piece.text for piece in pieces)


def ended(pieces: list[CompletionChunk]) -> tuple[object, object]:
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    return pieces[-1].finish_reason, pieces[-1].stop_reason


def test_eos_ends_and_is_not_shown(llm: nc.LLM) -> None:
    pieces = say(llm, " upon a time")
    assert text_of(pieces) == " upon a time"
    assert ended(pieces) == ("stop", None)
    assert pieces[-1].token_ids == (0,)


def test_each_piece_is_one_token(llm: nc.LLM) -> None:
    pieces = say(llm, "The little fox ran away. " * 5)
    assert [len(piece.token_ids) for piece in pieces] == [1] * len(pieces)


@pytest.mark.parametrize(("keep", "shown"), [(False, "The little "), (True, "The little fox ran")])
def test_a_stop_string_over_token_borders(llm: nc.LLM, keep: bool, shown: str) -> None:
    pieces = say(llm, "The little fox ran away.", stop="fox ran", include_stop_str_in_output=keep)
    assert (text_of(pieces), ended(pieces)) == (shown, ("stop", "fox ran"))


def test_a_stop_string_that_never_comes_holds_nothing_back_for_good(llm: nc.LLM) -> None:
    pieces = say(llm, "The fox ran f", stop=["fox flew", "fz"])
    assert (text_of(pieces), ended(pieces)) == ("The fox ran f", ("stop", None))


def test_a_stop_id_gives_its_id(llm: nc.LLM) -> None:
    [dot] = llm.tokenizer.encode(".", add_special_tokens=False)
    pieces = say(llm, "Stop. Go on", stop_token_ids=[dot])
    assert (text_of(pieces), ended(pieces)) == ("Stop", ("stop", dot))


def test_a_pattern(llm: nc.LLM) -> None:
    pieces = say(llm, "It was 1984 and cold", stop_regex=r"\d{4}")
    assert (text_of(pieces), ended(pieces)) == ("It was ", ("stop", r"\d{4}"))


def test_a_pattern_without_end_is_an_error_of_this_answer(llm: nc.LLM) -> None:
    pieces = say(llm, "a" * 80 + "!", stop_regex=r"(a|aa)+c")
    reason, why = ended(pieces)
    assert reason == "error"
    assert "(a|aa)+c" in str(why)


def test_json_ends_after_the_value(llm: nc.LLM) -> None:
    pieces = say(llm, '{"title": "A } and \\" B", "n": [1, {}]} and more', stop_json=True)
    assert text_of(pieces) == '{"title": "A } and \\" B", "n": [1, {}]}'
    assert ended(pieces)[0] == "stop"


def test_lengths(llm: nc.LLM) -> None:
    pieces = say(llm, "The little fox ran away.", max_tokens=3)
    assert (len(pieces), ended(pieces)) == (3, ("length", None))
    pieces = say(llm, "The", min_tokens=10)  # EOS is banned until then; the runner-up is drawn
    assert len(pieces) >= 10
    assert 0 not in [token for piece in pieces[:9] for token in piece.token_ids]


def test_the_context_ends_an_answer(llm: nc.LLM) -> None:
    model = Toy.script([500], 4096, prompt_length=3, context_length=8)
    pieces = list(generate(model, llm.tokenizer, [0, 1, 2], GREEDY))
    assert (len(pieces), ended(pieces)) == (5, ("length", None))


def test_a_character_split_over_tokens_comes_whole_and_the_torn_tail_is_flushed(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode("é🦊", add_special_tokens=False)
    assert len(ids) > 2
    model = Toy.script([*ids[:-1], 0], 4096, prompt_length=2)
    pieces = list(generate(model, llm.tokenizer, PROMPT, GREEDY))
    assert text_of(pieces) == llm.tokenizer.decode(ids[:-1])
    assert "\ufffd" not in text_of(pieces[:-1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_invalid_logits_end_with_an_error_that_says_why(llm: nc.LLM, bad: float) -> None:
    def rule(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(4096, np.float32)
        logits[500 + len(seen)] = 10.0
        logits[7] = bad if len(seen) == 5 else 0.0
        return logits

    pieces = list(generate(Toy(rule, 4096), llm.tokenizer, PROMPT, GREEDY))
    reason, why = ended(pieces)
    assert reason == "error"
    assert "at token 7" in str(why)
    assert len(text_of(pieces)) > 0


def test_everything_banned_is_an_error(llm: nc.LLM) -> None:
    pieces = say(llm, "The", allowed_token_ids=[5], suppress_token_ids=[5])
    assert ended(pieces)[0] == "error"
    assert "every token is at -inf" in str(pieces[-1].stop_reason)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([4096], {}, r"outside the vocabulary \(0..4095\)"),
        ([-1], {}, "outside the vocabulary"),
        ([1] * 1024, {}, "the prompt has 1024 tokens, but the context holds 1024"),
        ([1], {"logit_bias": {5000: 1.0}}, "logit_bias names token 5000"),
        ([1], {"allowed_token_ids": [4096]}, "allowed_token_ids names token 4096"),
        ([1], {"stop_token_ids": [9999]}, "stop_token_ids names token 9999"),
        ([1], {"stop_regex": ["("]}, "stop_regex"),
        ([1], {"stop_regex": ["x*"]}, "stop_regex"),
    ],
)
def test_a_bad_request_is_refused_before_anything_runs(
    llm: nc.LLM, prompt: list[int], params: dict[str, object], message: str
) -> None:
    with pytest.raises(nc.ParameterError, match=message):
        generate(llm.model, llm.tokenizer, prompt, nc.SamplingParams(**params))


def test_the_prompt_counts_for_repetition_and_not_for_frequency(llm: nc.LLM) -> None:
    def rule(seen: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(4096, np.float32)
        logits[[300, 301]] = 2.0, 1.5
        return logits

    def first(**params: float) -> tuple[int, ...]:
        return next(generate(Toy(rule, 4096), llm.tokenizer, PROMPT, GREEDY.replace(**params))).token_ids

    assert first(repetition_penalty=2.0) == (301,)
    assert first(frequency_penalty=2.0, presence_penalty=2.0) == (300,)
