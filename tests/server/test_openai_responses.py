"""Response bodies in OpenAI's format, with and without echo and logprobs, and their encoding in pieces."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.outputs import Completion, CompletionOutput, FinishReason, StepLogprobs, TokenLogprob, Usage, Validation
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS
from nucleate.server.openai.json_encoding import SLICE, encode_json, json_parts, pieces
from nucleate.server.openai.requests import ParsedRequest, read_body
from nucleate.server.openai.responses import ResponseHead, chat_body, completion_body, failure_message, select_outputs

HEAD = ResponseHead("x-1", 1700000000, "tiny")
HELLO = [{"role": "user", "content": "Hello"}]


def parse(*prompts: Any, **fields: Any) -> ParsedRequest:
    """The parsed request with these fields: a completion of the prompts, or a chat without prompts."""
    if prompts:
        return read_body(COMPLETIONS, {"prompt": prompts[0] if len(prompts) == 1 else prompts, **fields}, ANY)
    logprobs = {"logprobs": True, "top_logprobs": fields.pop("logprobs")} if "logprobs" in fields else {}
    return read_body(CHAT, {"messages": HELLO, **logprobs, **fields}, ANY)


ANY = nc.SamplingParams()
WITH_LOGPROBS = parse("Once", logprobs=1)


def scored(token: int, logprob: float = -1.0, rank: int | None = 1) -> TokenLogprob:
    return TokenLogprob(token, logprob, rank)


def completion(llm: nc.LLM, ids: list[int], prompt: str = "Once", steps: bool = True, **changes: Any) -> Completion:
    """A completion with these generated tokens."""
    prompt_ids = llm.encode(prompt)
    text = llm.tokenizer.decode(prompt_ids + ids)[len(prompt) :]
    logprobs = (
        tuple(StepLogprobs(scored(token), (scored(token), scored(0, -2.0, 2)), ()) for token in ids) if steps else None
    )
    values = dict(index=0, text=text, token_ids=tuple(ids), finish_reason="stop", stop_reason=None, seed=7)
    output = CompletionOutput(**{**values, "logprobs": logprobs, **changes})
    return Completion(tuple(prompt_ids), (output,), Usage(len(prompt_ids), len(ids)))


def test_a_completion_body_in_openais_format(llm: nc.LLM) -> None:
    request = parse("The fox", "A", n=2, seed=1, max_tokens=5)
    first, second = llm.generate(list(request.prompts), request.engine_params)
    made = completion_body(HEAD, request, [first, second], llm.tokenizer)
    counts = {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
    assert {**made, "choices": 0} == {
        "id": "x-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": 0,
        "usage": {
            **counts,
            "prompt_tokens_details": {"cached_tokens": first.usage.cached_tokens + second.usage.cached_tokens},
        },
    }
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert [choice["seed"] for choice in made["choices"]] == [1, 2, 1, 2]
    outputs = (*first.outputs, *second.outputs)
    assert [choice["text"] for choice in made["choices"]] == [output.text for output in outputs]
    assert made["choices"][3] == {
        "index": 3,
        "text": second.outputs[1].text,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
        "seed": 2,
        "token_ids": list(second.outputs[1].token_ids),
        "prompt_token_ids": None,
        "prompt_logprobs": None,
    }


def test_a_chat_completion_body_in_openais_format(llm: nc.LLM) -> None:
    request = parse(n=2, seed=1, max_tokens=3, logprobs=2, logprob_token_ids=[5])
    generated = llm.chat(HELLO, request.engine_params)
    made = chat_body(HEAD, request, generated, llm.tokenizer)
    assert made["object"] == "chat.completion"
    choice = made["choices"][1]
    assert choice["message"] == {"role": "assistant", "content": generated.outputs[1].text, "refusal": None}
    assert choice["logprobs"]["refusal"] is None
    assert len(choice["logprobs"]["content"]) == 3
    for entry, token in zip(choice["logprobs"]["content"], generated.outputs[1].token_ids, strict=True):
        assert set(entry) == {"token", "logprob", "bytes", "token_id", "rank", "top_logprobs"}
        assert (entry["token_id"], bytes(entry["bytes"]).decode()) == (token, entry["token"])
        assert [one["rank"] for one in entry["top_logprobs"][:2]] == [1, 2]
        assert 5 in [one["token_id"] for one in entry["top_logprobs"]]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == generated.outputs[1].text
    assert json.dumps(made, allow_nan=False)


def test_prompt_logprobs_come_with_the_first_choice(llm: nc.LLM) -> None:
    request = parse("The fox", "A dog", n=2, max_tokens=1, prompt_logprobs=1)
    results = llm.generate(list(request.prompts), request.engine_params)
    choices = completion_body(HEAD, request, results, llm.tokenizer)["choices"]
    assert [choice.get("prompt_logprobs") is not None for choice in choices] == [True, False, True, False]
    first, second, _ = choices[0]["prompt_logprobs"]
    assert first is None
    assert next(iter(second)) == str(results[0].prompt_token_ids[1])
    for token, entry in second.items():
        assert entry.keys() == {"logprob", "rank", "decoded_token"}
        assert entry["decoded_token"] == llm.tokenizer.decode([int(token)], skip_special_tokens=False)
    chat = chat_body(HEAD, request, results[0], llm.tokenizer)
    assert chat["prompt_logprobs"] == choices[0]["prompt_logprobs"]  # of the response, as there is one prompt
    assert "prompt_logprobs" not in chat["choices"][0]


@pytest.mark.parametrize("text", [" a fox.", " 🦊🥁 né", "日本語", "a", ""])
def test_text_offsets_match_the_token_texts(llm: nc.LLM, text: str) -> None:
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    made = completion_body(HEAD, WITH_LOGPROBS, [completion(llm, ids)], llm.tokenizer)["choices"][0]
    assert made["text"] == text
    lengths = [len(llm.tokenizer.decode(ids[:position]).rstrip("\ufffd")) for position in range(len(ids))]
    assert made["logprobs"]["text_offset"] == lengths
    texts = [name.removeprefix("bytes:") for name in made["logprobs"]["tokens"]]
    parts = (bytes.fromhex(name.replace("\\x", "")) if name[:2] == "\\x" else name.encode() for name in texts)
    assert b"".join(parts).decode() == text


def test_text_offsets_stay_within_a_truncated_text(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode(" the fox and the drum", add_special_tokens=False)
    made = completion_body(HEAD, WITH_LOGPROBS, [completion(llm, ids, text=" the")], llm.tokenizer)["choices"][0]
    assert made["logprobs"]["text_offset"] == [0] + [4] * (len(ids) - 1)


def test_infinite_logprobs_become_openais_minimum(llm: nc.LLM) -> None:
    never = scored(70, -math.inf, None)
    generated = completion(llm, [70], logprobs=(StepLogprobs(never, (scored(71), never), (scored(3, -math.inf),)),))
    requested = parse("Once", logprobs=1, logprob_token_ids=[3])
    chat = chat_body(HEAD, requested, generated, llm.tokenizer)["choices"][0]["logprobs"]["content"][0]
    assert (chat["logprob"], chat["rank"], chat["top_logprobs"][1]["logprob"]) == (-9999.0, None, -9999.0)
    legacy = completion_body(HEAD, requested, [generated], llm.tokenizer)["choices"][0]["logprobs"]
    assert legacy["token_logprobs"] == [-9999.0]
    assert [*legacy["top_logprobs"][0].values()] == [-9999.0, -1.0, -9999.0]  # the chosen one, the top, the requested
    assert json.dumps([chat, legacy], allow_nan=False)


def test_ids_without_a_token_have_an_empty_text(llm: nc.LLM) -> None:
    size = llm.tokenizer.vocab_size
    tokenizer = type(llm.tokenizer)(llm.folder, padded_size=size + 8)
    generated = CompletionOutput(0, "", (size + 1,), "length", None, 1, (StepLogprobs(scored(size + 1), (), ()),))
    made = chat_body(HEAD, WITH_LOGPROBS, Completion((1,), (generated,), Usage(1, 1)), tokenizer)
    assert made["choices"][0]["logprobs"]["content"][0]["bytes"] == []
    completion_body(HEAD, WITH_LOGPROBS, [Completion((1,), (generated,), Usage(1, 1))], tokenizer)


def echoed(llm: nc.LLM, prompt: Any, **fields: Any) -> tuple[Completion, dict[str, Any]]:
    """A completion with echo: the body, and its first choice."""
    request = parse(prompt, echo=True, seed=1, **fields)
    ids = llm.encode(prompt)
    completions = llm.generate([ids], request.engine_params)
    return completions[0], completion_body(HEAD, request, completions, llm.tokenizer)["choices"][0]


PROMPTS = ["The fox", "x", "The 🦊 né", "<|user|>Hi<|end|>", "a<|endoftext|>b"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_echo_returns_the_prompt_unchanged(llm: nc.LLM, prompt: str) -> None:
    generated, choice = echoed(llm, prompt, max_tokens=4)
    assert choice["text"] == prompt + generated.text
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"] is None
    assert choice["token_ids"] == list(generated.outputs[0].token_ids)
    ids = llm.encode(prompt)
    shown = llm.tokenizer.decode(ids)  # without special tokens
    generated, choice = echoed(llm, ids, max_tokens=4)
    assert choice["text"] == shown + generated.text
    generated, choice = echoed(llm, ids, max_tokens=4, skip_special_tokens=False)
    assert choice["text"] == "<|endoftext|>" + prompt + generated.text


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("variant", ["text", "text in full", "ids", "ids in full"])
def test_prompt_logprobs_with_echo(llm: nc.LLM, prompt: str, silent: bool, variant: str) -> None:
    size, full, ids = 0 if silent else 3, variant.endswith("full"), llm.encode(prompt)
    given_prompt = prompt if "text" in variant else ids
    generated, choice = echoed(llm, given_prompt, max_tokens=size, logprobs=2, skip_special_tokens=not full)
    reported, own = choice["logprobs"], generated.outputs[0].token_ids[:size]
    assert [len(column) for column in reported.values()] == [len(ids) + size] * 4
    assert (reported["token_logprobs"][0], reported["top_logprobs"][0]) == (None, None)
    steps = [*generated.prompt_logprobs[1:], *generated.outputs[0].logprobs[:size]]
    assert reported["token_logprobs"][1:] == [step.chosen.logprob for step in steps]
    for step, top in zip(steps, reported["top_logprobs"][1:], strict=True):
        assert sorted(top.values()) == sorted({step.chosen.logprob, *(one.logprob for one in step.top)})
        assert len(top) in (2, 3)
    # a text does not contain the special tokens that the tokenizer put before it
    counts = {"text": [False] + [True] * (len(ids) - 1), "ids": [token > 4 for token in ids]}
    counts |= {"text in full": counts["text"], "ids in full": [True] * len(ids)}

    def before(position: int) -> str:
        own = [token for token, there in zip(ids[:position], counts[variant], strict=False) if there]
        return llm.tokenizer.decode(own, skip_special_tokens=False).rstrip("\ufffd")

    assert reported["text_offset"][: len(ids)] == [len(before(position)) for position in range(len(ids))]
    assert choice["text"] == before(len(ids)) + ("" if silent else generated.text)
    assert reported["text_offset"][len(ids) :][:1] == [len(before(len(ids)))] * (not silent)
    assert reported["tokens"][1:2] == [llm.tokenizer.decode(ids[1:2], skip_special_tokens=False)]
    assert choice["token_ids"] == list(own)
    assert choice["prompt_logprobs"] is None


def test_a_character_split_between_prompt_and_completion_appears_once(llm: nc.LLM) -> None:
    ids = llm.encode("A🦊")
    request = parse(ids[:-1], echo=True, logprobs=0)
    output = CompletionOutput(0, "🦊", (ids[-1],), "stop", None, 1, (StepLogprobs(scored(ids[-1]), (), ()),))
    made = completion_body(HEAD, request, [Completion(tuple(ids[:-1]), (output,), Usage(5, 1))], llm.tokenizer)
    assert made["choices"][0]["text"] == "A🦊"
    assert made["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1]
    silent = parse(ids[:-1], echo=True, max_tokens=0)
    made = completion_body(HEAD, silent, [Completion(tuple(ids[:-1]), (output,), Usage(5, 1))], llm.tokenizer)
    assert made["choices"][0]["text"] == "A\ufffd"


def test_a_skipped_special_token_is_not_confused_with_its_text(llm: nc.LLM) -> None:
    spelled = [token for part in ("<|", "user", "|>") for token in llm.tokenizer.encode(part, add_special_tokens=False)]
    ids = [2, *spelled, 399]
    output = CompletionOutput(0, "", (), "abort", None, 7)
    request, generated = parse(ids, echo=True, logprobs=0), Completion(tuple(ids), (output,), Usage(9, 0))
    (choice,) = completion_body(HEAD, request, [generated], llm.tokenizer)["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"][:2]) == ("<|user|>The", [0, 0])
    assert choice["logprobs"]["text_offset"][-1] == len("<|user|>")


def test_every_choice_echoes_its_own_prompt(llm: nc.LLM) -> None:
    request = parse("The fox", "A", echo=True, n=2, seed=1, max_tokens=2, logprobs=1)
    made = llm.generate(list(request.prompts), request.engine_params)
    choices = completion_body(HEAD, request, made, llm.tokenizer)["choices"]
    outputs = made[0].outputs + made[1].outputs
    for choice, prompt, output in zip(choices, ["The fox"] * 2 + ["A"] * 2, outputs, strict=True):
        assert choice["text"] == prompt + output.text
        assert len(choice["logprobs"]["tokens"]) == len(llm.encode(prompt)) + 2
        assert "".join(choice["logprobs"]["tokens"][1:]) == choice["text"]


def test_prompt_logprobs_requested_by_two_fields(llm: nc.LLM) -> None:
    for own, of_prompt in ((3, 1), (1, 3)):
        _, choice = echoed(llm, "The fox", max_tokens=1, logprobs=own, prompt_logprobs=of_prompt)
        assert {len(step) for step in choice["prompt_logprobs"][1:]} <= {of_prompt, of_prompt + 1}
        assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {own, own + 1}
    _, choice = echoed(llm, "The fox", max_tokens=2, logprobs=0, logprob_token_ids=[7, 9])
    first, *others = choice["logprobs"]["top_logprobs"]
    requested = {llm.tokenizer.decode([token], skip_special_tokens=False) for token in (7, 9)}
    assert first is None
    assert all(requested < {*step} and len(step) == 3 for step in others)


def test_unknown_prompt_logprobs_are_null(llm: nc.LLM) -> None:
    request = parse("Once", echo=True, logprobs=1)
    generated = replace(completion(llm, [70]), prompt_logprobs=(None, None))
    reported = completion_body(HEAD, request, [generated], llm.tokenizer)["choices"][0]["logprobs"]
    assert reported["token_logprobs"] == [None, None, -1.0]
    aborted = Completion((0, 399), (CompletionOutput(0, "", (), "abort", None, 7),), Usage(2, 0))
    choice = completion_body(HEAD, request, [aborted], llm.tokenizer)["choices"][0]
    assert (choice["logprobs"]["top_logprobs"], choice["finish_reason"]) == ([None, None], "abort")


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_max_tokens_of_0_returns_only_the_prompt(llm: nc.LLM, reason: FinishReason) -> None:
    request = parse("Once", echo=True, max_tokens=0, n=2)
    output = CompletionOutput(0, " upon", (70,), reason, 70, 7)
    generated = Completion((0, 5), (output, replace(output, index=1)), Usage(2, 2))
    made = completion_body(HEAD, request, [generated], llm.tokenizer)
    assert [made["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")] == [2, 0, 2]
    expected = "abort" if reason == "abort" else "length"
    for choice in made["choices"]:
        assert (choice["text"], choice["token_ids"], choice["logprobs"]) == ("Once", [], None)
        assert (choice["finish_reason"], choice["stop_reason"]) == (expected, 70 if reason == "abort" else None)


LOGPROBS = st.lists(st.sampled_from([0.0, -0.5, -1.0, -2.5, -math.inf]), max_size=4)


@settings(max_examples=tiers.count(25, 100))
@given(results=st.lists(LOGPROBS, min_size=1, max_size=6), n=st.integers(1, 6), with_logprobs=st.booleans())
def test_best_of_selects_the_highest_mean_logprobs(results: list[list[float]], n: int, with_logprobs: bool) -> None:
    n = min(n, len(results))
    outputs = tuple(
        CompletionOutput(
            index, str(index), tuple(range(len(own))), "stop", None, index + 5,
            tuple(StepLogprobs(TokenLogprob(0, one, 1), (), ()) for one in own) or None,
        )
        for index, own in enumerate(results)
    )  # fmt: skip
    usage = Usage(3, sum(map(len, results)))
    request = parse("Once", n=n, best_of=len(results), **({"logprobs": 0} if with_logprobs else {}))
    found = select_outputs(request, Completion((1, 2, 3), outputs, usage))
    assert found.usage == usage
    assert [output.index for output in found.outputs] == list(range(n))
    means = [-sum(own) / len(own) if own else math.inf for own in results]
    expected = sorted(range(len(results)), key=lambda i: (means[i], i))[:n] if len(results) > n else range(n)
    assert [output.seed - 5 for output in found.outputs] == list(expected)
    assert all((output.logprobs is not None) == (with_logprobs and bool(output.token_ids)) for output in found.outputs)
    assert select_outputs(request, found) == found


def test_logprobs_are_returned_if_requested(llm: nc.LLM) -> None:
    nothing = Completion((0,), (CompletionOutput(0, "", (), "abort", None, 7),), Usage(1, 0))
    assert chat_body(HEAD, parse(), completion(llm, [70]), llm.tokenizer)["choices"][0]["logprobs"] is None
    [choice] = chat_body(HEAD, WITH_LOGPROBS, nothing, llm.tokenizer)["choices"]
    assert choice["logprobs"] == {"content": [], "refusal": None}


def test_internal_details_are_removed_from_error_messages() -> None:
    for detail, message in (
        ("invalid logits: no finite score", "invalid logits: no finite score"),
        ("the model failed: [Errno 2] /secret/path", "the model failed"),
        ("the model failed:", "the model failed"),
        ("a pattern is too slow; the model failed: no", "a pattern is too slow; the model failed: no"),
    ):
        assert failure_message(detail) == message


def test_validation_results_are_returned(llm: nc.LLM) -> None:
    worth = Validation(("uniqueItems at /a",), ())
    for request, make in ((parse("Once"), completion_body), (parse(), chat_body)):
        for validation, expected in (
            (worth, {"ignored": ["uniqueItems at /a"], "errors": [], "unchecked": []}),
            (None, None),
        ):
            done: Any = completion(llm, [5], validation=validation)
            [choice] = make(HEAD, request, [done] if make is completion_body else done, llm.tokenizer)["choices"]
            assert choice.get("validation") == expected
            assert ("validation" in choice) == (validation is not None)
    silent = parse("Once", echo=True, max_tokens=0)
    [choice] = completion_body(HEAD, silent, [completion(llm, [5], validation=worth)], llm.tokenizer)["choices"]
    assert "validation" not in choice


def test_long_validation_results_are_truncated(llm: nc.LLM) -> None:
    worth = Validation(tuple(f"not at /{number}" for number in range(5000)), ("x" * 10**5,))
    [choice] = completion_body(HEAD, parse("Once"), [completion(llm, [5], validation=worth)], llm.tokenizer)["choices"]
    assert choice["validation"]["ignored"][98:] == ["not at /98", "not at /99", "and 4900 more"]
    assert len(choice["validation"]["errors"][0]) == 2000
    short = Validation(("not",) * 100, ())
    [choice] = completion_body(HEAD, parse("Once"), [completion(llm, [5], validation=short)], llm.tokenizer)["choices"]
    assert choice["validation"]["ignored"] == ["not"] * 100


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=3), inner), max_leaves=60
)


def lazy(value: Any) -> Any:
    """The value with iterators in place of the lists that ``json_parts`` can reach."""
    if isinstance(value, dict):
        return {name: lazy(item) for name, item in value.items()}
    return map(lazy, value) if isinstance(value, list) and not any(isinstance(item, list) for item in value) else value


@pytest.mark.slow
@settings(max_examples=tiers.count(25, 500))
@given(VALUES)
def test_parts_equal_the_whole(value: Any) -> None:
    expected = encode_json(value).decode()
    assert "".join(json_parts(value)) == expected
    assert "".join(json_parts(lazy(value))) == expected


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_pieces(size: int) -> None:
    value = {"choices": [{"index": index, "list": [*range(index)]} for index in range(30)], "empty": [], "object": {}}
    made = list(pieces(json_parts({**value, "choices": iter(value["choices"])}), size))
    assert json.loads(b"".join(made)) == value
    assert all(len(piece) >= size for piece in made[:-1])
    assert list(pieces([])) == [b""]


def test_only_the_next_entries_are_made() -> None:
    made: list[int] = []

    def entries() -> Iterator[dict[str, Any]]:
        for index in range(100):
            made.append(index)
            yield {"text": "x" * 100, "more": [0] * (2 * SLICE)}

    first = next(pieces(json_parts({"choices": entries()}), 500))
    assert len(first) < 1000
    assert len(made) < 6
