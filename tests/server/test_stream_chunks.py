"""Stream frames: OpenAI's format, and the same content as the body without streaming."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.outputs import Completion, CompletionChunk, StepLogprobs, TokenLogprob, Usage, Validation
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS
from nucleate.server.openai.requests import ParsedRequest, read_body
from nucleate.server.openai.responses import ResponseHead, chat_body, completion_body, error_body
from nucleate.server.openai.streams import DONE, KEEP_ALIVE, ChatStream, CompletionStream, ResponseStream, error_frame

HEAD = ResponseHead('x-"é\n1', 1700000000, 'tiny "\U0001f98a"')
DEFAULTS = nc.SamplingParams()
PROMPT = (0, 399, 1897)
KINDS = pytest.mark.parametrize("kind", [CompletionStream, ChatStream])


def parse(kind: type[ResponseStream], prompts: Any = "The fox", **fields: Any) -> ParsedRequest:
    if kind is CompletionStream:
        return read_body(COMPLETIONS, {"prompt": prompts, "stream": True, **fields}, DEFAULTS)
    if "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return read_body(CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": True, **fields}, DEFAULTS)


def opened(llm: nc.LLM, kind: type[ResponseStream], count: int = 1, **fields: Any) -> ResponseStream:
    return kind(HEAD, parse(kind, ["The fox"] * count, **fields), [PROMPT] * count, llm.tokenizer)


def frames(data: bytes) -> list[dict[str, Any]]:
    """The chunks in frames, excluding the final [DONE]."""
    assert data == b"" or data.endswith(b"\n\n")
    found = data.split(b"\n\n")[:-1]
    assert all(frame.startswith(b"data: {") and b"\n" not in frame and frame.isascii() for frame in found)
    return [json.loads(frame[6:]) for frame in found]


def choices(data: bytes) -> list[dict[str, Any]]:
    made = frames(data)
    for one in made:
        assert [len(one["choices"]), one["id"], one["model"]] == [1, HEAD.id, HEAD.model]
    return [one["choices"][0] for one in made]


COMMON = dict(logprobs=None, finish_reason=None, seed=7)


def test_chat_chunks_in_openais_format(llm: nc.LLM) -> None:
    chunks = opened(llm, ChatStream, stream_options={"include_usage": True})
    first = frames(chunks.frames(0, [CompletionChunk("Hi", (70,), 0, 7)]))
    head = {"id": HEAD.id, "object": "chat.completion.chunk", "created": HEAD.created, "model": HEAD.model}
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, **COMMON, "token_ids": []}
    hi = {"index": 0, "delta": {"content": "Hi"}, **COMMON, "token_ids": [70]}
    assert first == [{**head, "choices": [choice], "usage": None} for choice in (role, hi)]
    last = frames(chunks.frames(0, [CompletionChunk(" you", (71, 72), 0, 7, "stop", "end")]))
    end = {"index": 0, "delta": {}, **COMMON, "finish_reason": "stop", "token_ids": [], "stop_reason": "end"}
    you = {"index": 0, "delta": {"content": " you"}, **COMMON, "token_ids": [71, 72]}
    assert last == [{**head, "choices": [choice], "usage": None} for choice in (you, end)]
    data = chunks.end(Usage(3, 4))
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    usage["prompt_tokens_details"] = {"cached_tokens": 0}
    assert frames(data.removesuffix(DONE)) == [{**head, "choices": [], "usage": usage}]
    assert data.endswith(b"\n\ndata: [DONE]\n\n")


def test_completion_chunks_in_openais_format(llm: nc.LLM) -> None:
    chunks = opened(llm, CompletionStream, 2, n=2)
    head = {"id": HEAD.id, "object": "text_completion", "created": HEAD.created, "model": HEAD.model}
    found = frames(chunks.frames(1, [CompletionChunk("Hi", (70,), 1, 7)]))
    assert found == [{**head, "choices": [{"index": 3, "text": "Hi", **COMMON, "token_ids": [70]}]}]
    found = frames(chunks.frames(1, [CompletionChunk("", (71,), 1, 7, "length")]))
    end = {"index": 3, "text": "", **COMMON, "finish_reason": "length", "token_ids": [71], "stop_reason": None}
    assert found == [{**head, "choices": [end]}]
    assert chunks.end(Usage(3, 4)) == DONE == b"data: [DONE]\n\n"


def test_the_final_frames() -> None:
    body = error_body("no\nmore", kind="server_error")
    data = error_frame(body)
    assert data.endswith(DONE)
    assert frames(data.removesuffix(DONE)) == [body]
    assert KEEP_ALIVE == b": keep-alive\n\n"


@KINDS
def test_a_chunk_without_content_makes_no_frame(llm: nc.LLM, kind: type[ResponseStream]) -> None:
    chunks = opened(llm, kind)
    assert chunks.frames(0, []) == b""
    assert chunks.frames(0, [CompletionChunk("", (70,), 0, 7)]) == b""
    assert chunks.frames(0, [CompletionChunk("", (71,), 0, 7), CompletionChunk("", (), 0, 7)]) == b""
    assert choices(chunks.frames(0, [CompletionChunk("a", (72,), 0, 7)]))[-1]["token_ids"] == [70, 71, 72]
    assert chunks.frames(0, [CompletionChunk("", (73,), 0, 7)]) == b""
    assert choices(chunks.frames(0, [CompletionChunk("b", (), 0, 7)]))[-1]["token_ids"] == [73]
    assert chunks.frames(0, [CompletionChunk("", (74,), 0, 7)]) == b""
    (end,) = choices(chunks.frames(0, [CompletionChunk("", (), 0, 7, "abort")]))
    assert (end["token_ids"], end["finish_reason"]) == ([74], "abort")


@KINDS
def test_validation_results_come_with_the_last_chunk(llm: nc.LLM, kind: type[ResponseStream]) -> None:
    chunks = opened(llm, kind, n=2)
    result = Validation(("uniqueItems at /a",), ("$.a: wrong",))
    begun = [CompletionChunk(text, (70,), index, 7) for text, index in (("[", 0), ("[", 1), ("1", 0))]
    early = choices(chunks.frames(0, begun))
    ends = choices(chunks.frames(0, [CompletionChunk("]", (72,), 0, 7, "stop", validation=result)]))
    other = choices(chunks.frames(0, [CompletionChunk("]", (72,), 1, 7, "stop")]))
    assert ends[-1]["validation"] == {"ignored": ["uniqueItems at /a"], "errors": ["$.a: wrong"], "unchecked": []}
    assert not any("validation" in choice for choice in (*early, *ends[:-1], *other))


@KINDS
def test_logprobs_are_sent_before_the_text_is_complete(llm: nc.LLM, kind: type[ResponseStream]) -> None:
    chunks = opened(llm, kind, logprobs=1)
    for token in (177, 258):  # parts of one character
        token_logprobs = (StepLogprobs(TokenLogprob(token, -1.0, 1), (), ()),)
        choice = choices(chunks.frames(0, [CompletionChunk("", (token,), 0, 7, None, None, token_logprobs)]))[-1]
        entries = choice["logprobs"]["content"] if kind is ChatStream else choice["logprobs"]["tokens"]
        assert (len(entries), choice["token_ids"], choice["finish_reason"]) == (1, [token], None)


@KINDS
def test_an_output_without_text_has_a_first_and_a_last_chunk(llm: nc.LLM, kind: type[ResponseStream]) -> None:
    found = choices(opened(llm, kind).frames(0, [CompletionChunk("", (4,), 0, 7, "stop")]))
    assert [choice["finish_reason"] for choice in found] == [None, "stop"][-len(found) :]
    assert found[-1]["token_ids"] == [4]
    if kind is ChatStream:
        assert [choice["delta"] for choice in found] == [{"role": "assistant", "content": ""}, {}]


@KINDS
def test_an_error_sets_no_finish_reason(llm: nc.LLM, kind: type[ResponseStream]) -> None:
    chunks = opened(llm, kind)
    chunks.frames(0, [CompletionChunk("a", (70,), 0, 7)])
    (choice,) = choices(chunks.frames(0, [CompletionChunk("b", (), 0, 7, "error", "the model failed: /path")]))
    assert choice["finish_reason"] is None
    assert "stop_reason" not in choice
    assert opened(llm, kind).frames(0, [CompletionChunk("", (), 0, 7, "error", "x")]) == b""


@KINDS
def test_simultaneous_chunks_of_a_choice_share_a_frame(llm: nc.LLM, kind: type[ResponseStream]) -> None:
    chunks = opened(llm, kind, n=2)
    for index in (0, 1):
        chunks.frames(0, [CompletionChunk("a", (70,), index, 7 + index)])
    indices = [1, 0, 1, 1, 0, 1]
    at_once = [CompletionChunk(text, (70,), index, 7 + index) for text, index in zip("bcdefg", indices, strict=True)]
    found = choices(chunks.frames(0, at_once))
    entries = [choice.get("text", choice.get("delta", {}).get("content")) for choice in found]
    assert sorted(zip([choice["index"] for choice in found], entries, strict=True)) == [(0, "cf"), (1, "bdeg")]
    assert sorted(choice["seed"] for choice in found) == [7, 8]


def json_frame(kind: type[ResponseStream], number: int, chunk: CompletionChunk, include_usage: bool) -> bytes:
    """A frame with text, serialized by ``json``."""
    content = {"text": chunk.text} if kind is CompletionStream else {"delta": {"content": chunk.text}}
    choice = {"index": number, **content, "logprobs": None, "finish_reason": None, "seed": chunk.seed,
              "token_ids": list(chunk.token_ids)}  # fmt: skip
    body = {"id": HEAD.id, "object": kind.kind, "created": HEAD.created, "model": HEAD.model, "choices": [choice]}
    body |= {"usage": None} if include_usage else {}
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


TEXTS = st.one_of(
    st.text(min_size=1, max_size=8),
    st.text(st.sampled_from('"\\/\n\r\t\b\f\0\x1f\x7f\u2028\u2029\ufffd\ufeff🦊é日</'), min_size=1, max_size=8),
)
IDS = st.lists(st.integers(0, 2**31), max_size=3).map(tuple)


@KINDS
@pytest.mark.parametrize("include_usage", [False, True])
@settings(max_examples=tiers.count(40, 300))
@given(data=st.data())
@pytest.mark.fast_cases(0)
def test_fast_frames_equal_those_of_json(
    llm: nc.LLM, kind: type[ResponseStream], include_usage: bool, data: st.DataObject
) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks, seed = opened(llm, kind, n=3, **options), data.draw(st.integers(0, 2**64 - 1))
    index = data.draw(st.integers(0, 2))
    chunks.frames(0, [CompletionChunk("a", (70,), index, seed)])
    for text, ids in data.draw(st.lists(st.tuples(TEXTS, IDS), min_size=3, max_size=8)):
        chunk = CompletionChunk(text, ids, index, seed)
        assert chunks.frames(0, [chunk]) == json_frame(kind, index, chunk, include_usage)
        assert json.loads(json_frame(kind, index, chunk, include_usage)[6:])["choices"][0]["index"] == index


@KINDS
def test_a_very_long_text(llm: nc.LLM, kind: type[ResponseStream]) -> None:
    chunks = opened(llm, kind)
    chunks.frames(0, [CompletionChunk("a", (70,), 0, 7)])
    chunk = CompletionChunk('"🦊\n' * 300_000, tuple(range(10_000)), 0, 7)
    assert chunks.frames(0, [chunk]) == json_frame(kind, 0, chunk, False)


@KINDS
def test_a_frame_takes_microseconds(llm: nc.LLM, kind: type[ResponseStream]) -> None:
    """Serializing a frame with ``json`` takes five times as long; at least twice on a busy machine."""
    chunks = opened(llm, kind)
    chunks.frames(0, [CompletionChunk("a", (70,), 0, 7)])
    chunk_list = [[CompletionChunk(" fox", (index,), 0, 7)] for index in range(2000)]
    fast, by_json = [], []
    for _ in range(5):
        start = time.perf_counter()
        for one in chunk_list:
            chunks.frames(0, one)
        middle = time.perf_counter()
        for one in chunk_list:
            json_frame(kind, 0, one[0], False)
        fast.append(middle - start)
        by_json.append(time.perf_counter() - middle)
    assert min(fast) < min(by_json) / 2, (min(fast), min(by_json))


# Complete streams


def joined(kind: type[ResponseStream], given: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the chunks into a body, as a client does."""
    outputs: dict[int, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for chunk in given:
        for choice in chunk["choices"]:
            own = outputs.setdefault(choice["index"], {"index": choice["index"], "texts": [], "logprobs": []})
            assert "finish_reason" not in own, "a choice goes on after its end"
            texts = [choice["text"]] if kind is CompletionStream else [choice["delta"].get("content")]
            if kind is ChatStream:
                assert ("role" in choice["delta"]) == (not own["texts"])
                assert (choice["delta"] == {}) == (choice["finish_reason"] is not None)
                texts = [text for text in texts if text is not None]
            own["texts"] += texts
            own["logprobs"] += [] if choice["logprobs"] is None else [choice["logprobs"]]
            own["token_ids"] = own.get("token_ids", []) + choice["token_ids"]
            assert own.setdefault("seed", choice["seed"]) == choice["seed"]
            for name in ("prompt_logprobs", "prompt_token_ids"):
                where = choice if kind is CompletionStream else chunk
                if name in where:
                    assert not own["token_ids"] or "".join(own["texts"]) == (choice.get("text") or "")  # the first one
                    assert (own if kind is CompletionStream else top).setdefault(name, where[name]) == where[name]
            if choice["finish_reason"] is None:
                assert choice.keys().isdisjoint({"stop_reason", "validation"})
            else:
                own |= {name: choice[name] for name in ("finish_reason", "stop_reason", "validation") if name in choice}
    made = []
    for _, own in sorted(outputs.items()):
        text, parts = "".join(own.pop("texts")), own.pop("logprobs")
        own |= {"message": {"role": "assistant", "content": text, "refusal": None}} if kind is ChatStream else {}
        own |= {"text": text} if kind is CompletionStream else {}
        own["logprobs"] = {name: [] for part in parts[:1] for name in part} or None
        for name, column in (item for part in parts for item in part.items()):
            own["logprobs"][name] += column or []
        if parts and kind is ChatStream:
            own["logprobs"]["refusal"] = None
        made.append(own)
    return {"id": HEAD.id, "choices": made, "usage": given[-1]["usage"], **top}


def trimmed(body: dict[str, Any]) -> dict[str, Any]:
    """A body without object type, creation time and null parts of the prompt.

    Null logprobs equal a list without logprobs.
    """
    for part in (body, *body["choices"]):
        for name in ("prompt_logprobs", "prompt_token_ids"):
            if name in part and part[name] is None:
                del part[name]
    for choice in body["choices"]:
        if choice["logprobs"] is not None and not any(choice["logprobs"].values()):
            choice["logprobs"] = None
    kept = ("id", "choices", "usage", "prompt_logprobs", "prompt_token_ids")
    return {name: body[name] for name in kept if name in body}


def steps(draw: st.DrawFn, ids: Sequence[int], top: int, also: Sequence[int]) -> Iterator[StepLogprobs]:
    numbers = st.sampled_from([0.0, -0.5, -1e-7, -3.25, float("-inf")])
    for token in ids:
        likely = tuple(TokenLogprob(70 + rank, -float(rank), 1 + rank) for rank in range(top))
        others = tuple(TokenLogprob(other, draw(numbers), None) for other in also)
        yield StepLogprobs(TokenLogprob(token, draw(numbers), draw(st.integers(1, 9))), likely, others)


@st.composite
def random_chunks(
    draw: st.DrawFn, llm: nc.LLM, prompt_ids: Sequence[int], index: int, request: ParsedRequest
) -> list[CompletionChunk]:
    """The chunks of one random output; the text may lag behind the tokens and may be truncated."""
    ids = draw(st.lists(st.sampled_from([4, 70, 104, 177, 237, 258, 399, 1190, 1897]), max_size=6))
    ids = ids[:1] if request.prompt_only else ids
    before = len(llm.tokenizer.decode(prompt_ids, skip_special_tokens=True).rstrip("\ufffd"))
    text = llm.tokenizer.decode([*prompt_ids, *ids])[before:]
    text = text[: draw(st.integers(0, len(text)))]
    token_logprobs = list(steps(draw, ids, request.engine_params.logprobs or 0, request.params.logprob_token_ids))
    reason = draw(st.sampled_from(["stop", "length", "abort"]))
    detail = draw(st.sampled_from([None, 4, "the end"]))
    worth = [None, Validation(("not at /a",), ()), Validation(("not",), ("$: wrong", "$.a: too"))]
    result = draw(st.sampled_from(worth))
    chunk_list, shown, certain = [], 0, 0
    for position, token in enumerate(ids):
        last = position == len(ids) - 1
        certain = len(llm.tokenizer.decode([*prompt_ids, *ids[: position + 1]]).rstrip("\ufffd")) - before
        until = len(text) if last else draw(st.integers(shown, max(shown, min(certain, len(text)))))
        logprobs = (token_logprobs[position],) if request.returns_logprobs else None
        end = (reason, detail) if last else (None, None)
        validation = result if last else None
        part = text[shown:until]
        chunk_list.append(CompletionChunk(part, (token,), index, 7 + index, *end, logprobs, validation=validation))
        shown = until
    if not chunk_list:
        chunk_list = [CompletionChunk("", (), index, 7 + index, "abort")]
    count = request.engine_params.prompt_logprobs
    if index == 0 and count is not None and draw(st.booleans()):
        of_prompt = (None, *steps(draw, prompt_ids[1:], count, request.params.logprob_token_ids))
        chunk_list[0] = replace(chunk_list[0], prompt_logprobs=of_prompt)
    return chunk_list


def interleaved(draw: st.DrawFn, own: list[list[CompletionChunk]]) -> list[CompletionChunk]:
    """Chunks of several outputs in random order; the first output starts."""
    queues, found = [list(chunk_list) for chunk_list in own], [own[0][0]]
    del queues[0][0]
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        found.append(queue.pop(0))
    return found


@KINDS
@settings(max_examples=tiers.count(50, 400))
@given(data=st.data())
@pytest.mark.fast_cases(0)
def test_merged_chunks_equal_the_response_body(llm: nc.LLM, kind: type[ResponseStream], data: st.DataObject) -> None:
    draw = data.draw
    prompts: list[Any] = ["x"]
    if kind is CompletionStream:
        given = ["The fox", "é <|end|>x", [399, 237], [0, 399, 258], [1897]]
        prompts = draw(st.lists(st.sampled_from(given[:2]), min_size=1, max_size=2) |
                       st.lists(st.sampled_from(given[2:]), min_size=1, max_size=2))  # fmt: skip
    fields: dict[str, Any] = {"n": draw(st.integers(1, 3)), "prompts": prompts}
    for name, values in (
        ("logprobs", [0, 2]),
        ("prompt_logprobs", [0, 1, 3]),
        ("logprob_token_ids", [[5, 70]]),
        ("return_token_ids", [True]),
        ("return_tokens_as_token_ids", [True]),
    ):
        fields |= {name: draw(st.sampled_from(values))} if draw(st.booleans()) else {}
    if kind is CompletionStream and draw(st.booleans()):
        fields |= {"echo": True} | ({"max_tokens": 0} if draw(st.booleans()) else {})
    request = parse(kind, stream_options={"include_usage": True}, **fields)
    ids = [llm.encode(prompt) for prompt in prompts]
    outputs = [
        [draw(random_chunks(llm, prompt_ids, index, request), label="output") for index in range(request.params.n)]
        for prompt_ids in ids
    ]
    chunks, stream = kind(HEAD, request, ids, llm.tokenizer), b""
    queues = [interleaved(draw, own) for own in outputs]
    for position, queue in enumerate(queues):
        while queue:
            size = draw(st.integers(1, len(queue)))
            stream += chunks.frames(position, queue[:size])
            del queue[:size]
    completions = [
        Completion.from_chunks(prompt_ids, [chunk for own in output_chunks for chunk in own])
        for prompt_ids, output_chunks in zip(ids, outputs, strict=True)
    ]
    usage = Usage(sum(one.usage.prompt_tokens for one in completions),
                  sum(one.usage.completion_tokens for one in completions))  # fmt: skip
    stream += chunks.end(usage)
    assert stream.endswith(DONE)
    given_chunks = frames(stream.removesuffix(DONE))
    assert all(chunk["usage"] is None for chunk in given_chunks[:-1])
    if kind is CompletionStream:
        body = completion_body(HEAD, request, completions, llm.tokenizer)
    else:
        body = chat_body(HEAD, request, completions[0], llm.tokenizer)
    assert trimmed(joined(kind, given_chunks)) == trimmed(json.loads(json.dumps(body)))


def test_chunks_have_openais_types(llm: nc.LLM) -> None:
    types = pytest.importorskip("openai.types")
    chat = pytest.importorskip("openai.types.chat")
    token_logprobs = (StepLogprobs(TokenLogprob(70, -1.0, 1), (TokenLogprob(71, -2.0, 2),), ()),)
    for logprobs in (None, 1):
        entries = None if logprobs is None else token_logprobs
        ends = ((None, None), ("stop", "b"))
        chunk_list = [CompletionChunk("a", (70,), 0, 7, *end, entries) for end in ends]
        for kind in (ChatStream, CompletionStream):
            fields = {} if logprobs is None else {"logprobs": logprobs}
            request = parse(kind, stream_options={"include_usage": True}, **fields)
            chunks = kind(HEAD, request, [PROMPT], llm.tokenizer)
            data = b"".join(chunks.frames(0, [chunk]) for chunk in chunk_list) + chunks.end(Usage(3, 2))
            for chunk in frames(data.removesuffix(DONE)):
                model = chat.ChatCompletionChunk if kind is ChatStream else types.Completion
                if kind is CompletionStream:  # the type is a string; OpenAI and other servers send null
                    for choice in chunk["choices"]:
                        choice["finish_reason"] = choice["finish_reason"] or "stop"
                found = model.model_validate(chunk, strict=True)
                assert found.model_dump(exclude_unset=True) == chunk
            completion = Completion.from_chunks(PROMPT, chunk_list)
            if kind is ChatStream:
                body = chat_body(HEAD, request, completion, llm.tokenizer)
                assert chat.ChatCompletion.model_validate(body, strict=True)
            else:
                body = completion_body(HEAD, request, [completion], llm.tokenizer)
                assert types.Completion.model_validate(body, strict=True)
