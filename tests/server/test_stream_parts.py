"""Streams of all APIs, cut at every byte: their parts and blocks add up to the response for the whole text."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import tiers
from test_messages_api import accumulated
from test_ollama_api import joined
from test_responses_api import check_order

import nucleate as nc
from nucleate.chat.chat_format import TOOL_FORMATS
from nucleate.chat.output_parser import ChunkParser, OutputParser
from nucleate.chat.reader import completed_object
from nucleate.chat.reasoning import FORMATS as REASONING
from nucleate.chat.reasoning import THINK
from nucleate.outputs import Completion, CompletionChunk, FinishReason, StepLogprobs, TokenLogprob, ToolCallDelta, Usage
from nucleate.server.chat_api import ChatBlocks, ChatEncoder, EncoderInput, Timing
from nucleate.server.messages_api import MessageEncoder
from nucleate.server.ollama_api import CHAT_LINES, GENERATE_LINES
from nucleate.server.openai.endpoints import CHAT
from nucleate.server.openai.requests import read_body
from nucleate.server.openai.responses import ResponseHead, chat_body
from nucleate.server.openai.streams import DONE, ChatStream
from nucleate.server.responses_api import ResponseEncoder
from nucleate.stopping.stop_matcher import StopMatcher, StopRules

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é😀\\n\\"}", "b": [1]}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": nope}}\n</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]'
HARMONY = (
    "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    '<|message|>{"a": 1}<|call|>'
)
TEXTS: dict[str, tuple[str, str, str]] = {
    # tool format, reasoning format, text
    "text": ("hermes", "think", "Hé 😀 <b>"),
    "reasoning": ("hermes", "think", "<think>\nwhy é\n</think>\n\nso 😀"),
    "reasoning only": ("hermes", "think", "<think>why"),
    "a call": ("hermes", "think", CALL),
    "all": ("hermes", "think", f"<think>x</think>Well.\n{CALL}\n{CALL}"),
    "text after a call": ("hermes", "think", f"a{CALL}b"),
    "a broken call": ("hermes", "think", f"a {BROKEN}!"),
    "a truncated call": ("hermes", "think", CALL[:-25]),
    "a structural tag": ("hermes", "think", '<think>a <a></think>x <a>{"a": true}</a> y'),
    "mistral": ("mistral", "mistral", f"[THINK]hm[/THINK]{MISTRAL}"),
    "harmony": ("openai", "gpt_oss", HARMONY),
}
NAMES = ("f",)
USAGE = Usage(3, 4)
REQUEST = read_body(CHAT, {"messages": [{"role": "user", "content": "x"}], "stream": True}, nc.SamplingParams())
Parts = Sequence[str]
Summary = tuple[str, str, list[Any], Any]
"""Reasoning, text, calls, and how the output ended."""


def chunks_of(parts: Parts, name: str, finish_reason: FinishReason = "stop") -> list[CompletionChunk]:
    """The chunks of an output whose text comes in these parts."""
    tool_format, reasoning, _ = TEXTS[name]
    formats = {"think": THINK, **REASONING}
    parser = ChunkParser(lambda: OutputParser(formats[reasoning], TOOL_FORMATS[tool_format], NAMES), lambda: None)
    end = CompletionChunk("", (), 0, 7, "length" if "truncated" in name else finish_reason)
    return [parser.parse(one) for one in (*(CompletionChunk(part, (9,), 0, 7) for part in parts), end)]


def given(llm: nc.LLM) -> EncoderInput:
    return EncoderInput(ResponseHead("x-1", 1, "m"), REQUEST, 3, llm.tokenizer, lambda: Timing(2.0, 1.5))


def sent(encoder: ChatEncoder | ChatStream, chunks: Sequence[CompletionChunk]) -> str:
    frames = [encoder.frames(0, [chunk]) for chunk in chunks]
    return b"".join([*frames, encoder.end(USAGE)]).decode()


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(frame.partition("\ndata: ")[2]) for frame in text.split("\n\n")[:-1]]


def chat(llm: nc.LLM, chunks: Sequence[CompletionChunk]) -> Summary:
    text = sent(ChatStream(ResponseHead("x-1", 1, "m"), REQUEST, [(1, 2, 3)], llm.tokenizer), chunks)
    frames = [json.loads(frame[6:]) for frame in text.removesuffix(DONE.decode()).split("\n\n")[:-1]]
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    calls: list[list[str]] = []
    for call in [call for delta in deltas for call in delta.get("tool_calls", ())]:
        if "id" in call:
            assert call["index"] == len(calls)
            calls.append([call["function"]["name"], ""])
        calls[call["index"]][1] += call["function"]["arguments"]
    texts = ("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content"))
    return *texts, calls, frames[-1]["choices"][0]["finish_reason"]  # type: ignore[return-value]


def responses(llm: nc.LLM, chunks: Sequence[CompletionChunk]) -> Summary:
    found = events(sent(ResponseEncoder({}, given(llm)), chunks))
    check_order(found)
    return _items(found[-1]["response"])


def _items(body: dict[str, Any]) -> Summary:
    items = body["output"]
    texts = {
        kind: [item["content"][0]["text"] for item in items if item["type"] == kind]
        for kind in ("reasoning", "message")
    }
    calls = [[item["name"], item["arguments"]] for item in items if item["type"] == "function_call"]
    ended = body["status"], [(item["id"], item["status"]) for item in items if item["type"] == "function_call"]
    return "".join(texts["reasoning"]), "".join(texts["message"]), calls, ended


def messages(llm: nc.LLM, chunks: Sequence[CompletionChunk]) -> Summary:
    found = events(sent(MessageEncoder(True, given(llm)), chunks))
    for index in {event["index"] for event in found if "index" in event}:
        own = [event for event in found if event.get("index") == index and "partial_json" in event.get("delta", {})]
        for event in own[1:]:  # a client reads what is complete
            own[0]["delta"]["partial_json"] += event["delta"].pop("partial_json")
            event["delta"] |= {"partial_json": ""}
        if own:
            own[0]["delta"]["partial_json"] = completed_object(own[0]["delta"]["partial_json"])
    return _blocks(accumulated(found))


def _blocks(body: dict[str, Any]) -> Summary:
    texts = ("".join(block.get(name, "") for block in body["content"]) for name in ("thinking", "text"))
    calls = [(block["name"], block["input"]) for block in body["content"] if block["type"] == "tool_use"]
    return *texts, calls, body["stop_reason"]  # type: ignore[return-value]


def ollama(kind: Callable[[EncoderInput], ChatEncoder], llm: nc.LLM, chunks: Sequence[CompletionChunk]) -> Summary:
    lines = [json.loads(line) for line in sent(kind(given(llm)), chunks).splitlines()]
    return _message(joined(lines))


def _message(body: Any) -> Summary:
    message = body.get("message", body)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("thinking", ""), message.get("content", message.get("response", "")), calls, body["done_reason"]


STREAMS: dict[str, Callable[[nc.LLM, Sequence[CompletionChunk]], Summary]] = {
    "chat completions": chat,
    "responses": responses,
    "messages": messages,
    "ollama chat": partial(ollama, CHAT_LINES),
    "ollama generate": partial(ollama, GENERATE_LINES),
}


def whole(api: str, llm: nc.LLM, chunks: Sequence[CompletionChunk]) -> Summary:
    """The response without streaming."""
    if api == "chat completions":
        completion = Completion.from_chunks((1, 2, 3), chunks)
        choice = chat_body(given(llm).head, REQUEST, completion, llm.tokenizer)["choices"][0]
        message = choice["message"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
        return message.get("reasoning") or "", message["content"] or "", calls, choice["finish_reason"]
    encoders: dict[str, Callable[[EncoderInput], ChatEncoder]] = {
        "responses": partial(ResponseEncoder, {}),
        "messages": partial(MessageEncoder, True),
        "ollama chat": CHAT_LINES,
        "ollama generate": GENERATE_LINES,
    }
    body = json.loads("".join(encoders[api](given(llm)).whole(chunks, USAGE)))
    if api == "responses":
        return _items(body)
    return _blocks(body) if api == "messages" else _message(body)


def cuts(text: str) -> Iterator[Parts]:
    """The text in one part, in single characters, cut at every place, and at several random places."""
    yield [text]
    yield [*text]
    yield ["", *text, ""]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    rng = random.Random(text)
    for _ in range(tiers.count(10, 200)):
        places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(2, 9)))
        yield [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("api", STREAMS)
@pytest.mark.fast_cases(0)
def test_the_stream_does_not_depend_on_the_cuts(llm: nc.LLM, api: str, name: str) -> None:
    text = TEXTS[name][2]
    expected = whole(api, llm, chunks_of([text], name))
    assert any(expected[:3]) or api == "ollama generate"  # has no calls
    for parts in cuts(text):
        chunks = chunks_of(parts, name)
        assert STREAMS[api](llm, chunks) == expected, parts
        assert whole(api, llm, chunks) == expected, parts


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("api", STREAMS)
@pytest.mark.fast_cases(0)
def test_an_output_that_a_limit_cuts_anywhere(llm: nc.LLM, api: str, name: str) -> None:
    """The stream adds up to the whole response, which has the calls so far and no markup in its text."""
    text, (reasoning, content, calls, _) = (
        TEXTS[name][2],
        whole("chat completions", llm, chunks_of([TEXTS[name][2]], name)),
    )
    for end in range(len(text) + 1):
        chunks = chunks_of([text[:end]], name, "length")
        found = whole(api, llm, chunks)
        assert STREAMS[api](llm, chunks) == found
        for parts in ([*text[:end]], [text[: end // 2], text[end // 2 : end]]):
            chunks = chunks_of(parts, name, "length")
            assert STREAMS[api](llm, chunks) == whole(api, llm, chunks) == found
        assert reasoning.startswith(found[0].rstrip())
        assert content.startswith(found[1].rstrip())
        assert [call[0] for call in found[2]] == [call[0] for call in calls][: len(found[2])]
        assert "tool" not in str(found[3])


def decoded(data: bytes, sizes: Sequence[int]) -> list[str]:
    """UTF-8 bytes in tokens of these sizes, as text: a token that ends within a character has the text before it."""
    decoder, ends = codecs.getincrementaldecoder("utf-8")(), [*accumulate(sizes)]
    return [decoder.decode(data[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


STOPS = (
    *("</think>", "k>\n\ns", "so", "é", "</t", "\n</tool_call>", '": "', "<tool_call>", "x", "Well.\n<", "zzz", "</a>"),
    *("why", "\n", "<think>", '}}\n</tool_call>\n<tool_call>\n{"name'),
)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", [name for name in TEXTS if TEXTS[name][0] == "hermes"])
@pytest.mark.parametrize("included", [False, True], ids=["without", "with"])
@pytest.mark.fast_cases(36)
def test_stop_strings_across_the_parts(name: str, stop: str, included: bool) -> None:
    """The text before the first stop string is parsed, wherever the bytes of the output are cut into tokens."""
    text = TEXTS[name][2]
    before, found, _ = text.partition(stop)
    kept = before + found if included else before
    expected = _summary(chunks_of([kept], name))
    data = text.encode()
    rng = random.Random(f"{name}{stop}")
    sizes = [[1] * len(data), *([place, len(data) - place] for place in range(1, len(data)))]
    for _ in range(tiers.count(5, 100)):
        sizes.append([rng.randrange(1, 12) for _ in range(len(data))])
    for own in sizes:
        matcher = StopMatcher(StopRules(stop=(stop,), include_stop_str_in_output=included))
        parts: list[str] = []
        for part in decoded(data, own):
            parts.append(matcher.push(9, part))
            if matcher.finish is not None:
                break
        else:
            parts.append(matcher.close())
        assert "".join(parts) == kept
        assert (matcher.finish is not None) == bool(found)
        assert _summary(chunks_of(parts, name)) == expected, parts


def _summary(chunks: Sequence[CompletionChunk]) -> Any:
    [output] = Completion.from_chunks((1,), chunks).outputs
    calls = [(call.name, call.arguments_json) for call in output.tool_calls]
    return output.reasoning, output.text, calls, output.finish_reason


def piece(text: str = "", reasoning: str = "", *calls: ToolCallDelta, **more: Any) -> CompletionChunk:
    return CompletionChunk(text, (1,), 0, 7, reasoning=reasoning, tool_calls=calls, **more)


def delta(index: int, name: str | None = None, arguments: str = "", **more: Any) -> ToolCallDelta:
    return ToolCallDelta(index, None if name is None else f"call_{index}", name, arguments, **more)


def pushed(chunks: Sequence[CompletionChunk]) -> tuple[ChatBlocks, list[str]]:
    """The blocks, and their events as text."""
    blocks = ChatBlocks()
    return blocks, [f"{e.kind} {e.block.index} {e.text}".strip() for one in chunks for e in blocks.push(one)]


def shown(blocks: ChatBlocks) -> list[tuple[str, str]]:
    return [(block.kind + (" incomplete" if block.incomplete else ""), block.text) for block in blocks.all]


END = piece(finish_reason="stop")
TABLE = {
    "nothing": ([END], []),
    "text": ([piece("a"), piece("b"), END], ["open 0", "add 0 a", "add 0 b", "close 0"]),
    "reasoning, then text": (
        [piece("", "r"), piece("t", "s"), END],
        ["open 0", "add 0 r", "add 0 s", "close 0", "open 1", "add 1 t", "close 1"],
    ),
    "a call in parts": (
        [piece("", "", delta(0, "f"), delta(0, None, "{")), piece("", "", delta(0, None, "}")), END],
        ["open 0", "add 0 {", "add 0 }", "close 0"],
    ),
    "two calls at once": (
        [piece("", "", delta(0, "f"), delta(0, None, "{}"), delta(1, "g"), delta(1, None, "[]")), END],
        ["open 0", "add 0 {}", "close 0", "open 1", "add 1 []", "close 1"],
    ),
    "the end of a call with the text after it": (
        [piece("", "", delta(0, "f")), piece("t", "", delta(0, None, "{}")), END],
        ["open 0", "add 0 {}", "close 0", "open 1", "add 1 t", "close 1"],
    ),
    "text before a call": (
        [piece("t", "", delta(0, "f"), delta(0, None, "{}")), END],
        ["open 0", "add 0 t", "close 0", "open 1", "add 1 {}", "close 1"],
    ),
    "a call that is cut": (
        [piece("", "", delta(0, "f"), delta(0, None, "{")), piece("", "", delta(0, None, '"a', incomplete=True)), END],
        ["open 0", "add 0 {", 'add 0 "a', "close 0"],
    ),
    "a call without arguments that is cut": (
        [piece("t", "", delta(0, "f"), delta(0, incomplete=True)), END],
        ["open 0", "add 0 t", "close 0", "open 1", "close 1"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_events(name: str) -> None:
    chunks, expected = TABLE[name]
    assert pushed(chunks)[1] == expected


def test_the_arguments_of_a_call_that_is_cut_are_those_that_are_complete() -> None:
    for name, shown_blocks, arguments in [
        ("a call that is cut", [("call incomplete", '{"a')], "{}"),
        ("a call without arguments that is cut", [("text", "t"), ("call incomplete", "")], "{}"),
        ("two calls at once", [("call", "{}"), ("call", "[]")], "[]"),
    ]:
        blocks, _ = pushed(TABLE[name][0])
        assert shown(blocks) == shown_blocks
        assert blocks.all[-1].arguments == arguments
        assert blocks.is_cut(blocks.all[-1]) == blocks.all[-1].incomplete


def test_only_the_last_block_of_an_output_that_is_too_long_is_cut() -> None:
    blocks, _ = pushed([piece("", "r"), piece("t"), piece(finish_reason="length")])
    assert [blocks.is_cut(block) for block in blocks.all] == [False, True]
    blocks, _ = pushed([piece("t"), END])
    assert not blocks.is_cut(blocks.all[0])


def test_logprobs_belong_to_the_text_that_their_tokens_are_in() -> None:
    steps = [StepLogprobs(TokenLogprob(number, -1.0, 1), (), ()) for number in range(5)]
    chunks = [
        piece("", "r", logprobs=(steps[0],)),  # reasoning has none
        piece(logprobs=(steps[1],)),  # held back
        piece("ab", logprobs=(steps[2],)),
        piece("", "", delta(0, "f"), delta(0, None, "{}"), logprobs=(steps[3],)),
        piece(logprobs=(steps[4],), finish_reason="stop"),
    ]
    blocks, _ = pushed(chunks)
    assert [block.logprobs for block in blocks.all] == [[], steps[1:3], []]
