"""Blocks of a chat: their order, their ends, and the independence of how the chunks are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import tiers

from nucleate.chat.chat_format import TOOL_FORMATS
from nucleate.chat.output_parser import ChunkParser, OutputParser
from nucleate.chat.reasoning import THINK
from nucleate.outputs import CompletionChunk, StepLogprobs, TokenLogprob, ToolCallDelta
from nucleate.server.chat_api import ChatBlocks

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "f", "arguments": {"a": nope}}\n</tool_call>'


def chunk(text: str = "", reasoning: str = "", *calls: ToolCallDelta, **more: Any) -> CompletionChunk:
    return CompletionChunk(text, (1,), 0, 7, reasoning=reasoning, tool_calls=calls, **more)


def delta(index: int, name: str | None = None, arguments: str = "", **more: Any) -> ToolCallDelta:
    return ToolCallDelta(index, None if name is None else f"call_{index}", name, arguments, **more)


def pushed(chunks: Sequence[CompletionChunk]) -> tuple[ChatBlocks, list[str]]:
    """The blocks, and their events as text."""
    blocks = ChatBlocks()
    return blocks, [f"{e.kind} {e.block.index} {e.text}".strip() for one in chunks for e in blocks.push(one)]


def shown(blocks: ChatBlocks) -> list[tuple[str, str]]:
    return [(block.kind + (" incomplete" if block.incomplete else ""), block.text) for block in blocks.all]


END = chunk(finish_reason="stop")
TABLE = {
    "nothing": ([END], []),
    "text": ([chunk("a"), chunk("b"), END], ["open 0", "add 0 a", "add 0 b", "close 0"]),
    "reasoning, then text": (
        [chunk("", "r"), chunk("t", "s"), END],
        ["open 0", "add 0 r", "add 0 s", "close 0", "open 1", "add 1 t", "close 1"],
    ),
    "a call in parts": (
        [chunk("", "", delta(0, "f"), delta(0, None, "{")), chunk("", "", delta(0, None, "}")), END],
        ["open 0", "add 0 {", "add 0 }", "close 0"],
    ),
    "two calls at once": (
        [chunk("", "", delta(0, "f"), delta(0, None, "{}"), delta(1, "g"), delta(1, None, "[]")), END],
        ["open 0", "add 0 {}", "close 0", "open 1", "add 1 []", "close 1"],
    ),
    "the end of a call with the text after it": (
        [chunk("", "", delta(0, "f")), chunk("t", "", delta(0, None, "{}")), END],
        ["open 0", "add 0 {}", "close 0", "open 1", "add 1 t", "close 1"],
    ),
    "text before a call": (
        [chunk("t", "", delta(0, "f"), delta(0, None, "{}")), END],
        ["open 0", "add 0 t", "close 0", "open 1", "add 1 {}", "close 1"],
    ),
    "a call that is cut": (
        [chunk("", "", delta(0, "f"), delta(0, None, "{")), chunk("", "", delta(0, None, '"a', incomplete=True)), END],
        ["open 0", "add 0 {", 'add 0 "a', "close 0"],
    ),
    "a call without arguments that is cut": (
        [chunk("t", "", delta(0, "f"), delta(0, incomplete=True)), END],
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
    blocks, _ = pushed([chunk("", "r"), chunk("t"), chunk(finish_reason="length")])
    assert [blocks.is_cut(block) for block in blocks.all] == [False, True]
    blocks, _ = pushed([chunk("t"), END])
    assert not blocks.is_cut(blocks.all[0])


def test_logprobs_belong_to_the_text_that_their_tokens_are_in() -> None:
    steps = [StepLogprobs(TokenLogprob(number, -1.0, 1), (), ()) for number in range(5)]
    chunks = [
        chunk("", "r", logprobs=(steps[0],)),  # reasoning has none
        chunk(logprobs=(steps[1],)),  # held back
        chunk("ab", logprobs=(steps[2],)),
        chunk("", "", delta(0, "f"), delta(0, None, "{}"), logprobs=(steps[3],)),
        chunk(logprobs=(steps[4],), finish_reason="stop"),
    ]
    blocks, _ = pushed(chunks)
    assert [block.logprobs for block in blocks.all] == [[], steps[1:3], []]


@pytest.mark.parametrize(
    "text",
    [
        "<think>why\n</think>\n\nso",
        f"a{CALL}b",
        f"<think>x</think>{CALL}\n{CALL}",
        f"{BROKEN}!",
        f"a {BROKEN}{CALL}",
        CALL[:-30],
    ],
)
def test_the_blocks_do_not_depend_on_how_the_text_is_cut(text: str) -> None:
    def split(cuts: Sequence[int]) -> tuple[list[tuple[str, str]], str]:
        """The reasoning and the calls, and the text: a chunk with text around a call has it as one."""
        parser = ChunkParser(lambda: OutputParser(THINK, TOOL_FORMATS["hermes"], ["f"]), lambda: None)
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        chunks = [parser.parse(chunk(part)) for part in parts] + [parser.parse(END)]
        blocks, happened = pushed(chunks)
        assert sum(event.startswith("open") for event in happened) == len(blocks.all)
        assert sum(event.startswith("close") for event in happened) == len(blocks.all)
        found = shown(blocks)
        return [one for one in found if one[0] != "text"], "".join(part for kind, part in found if kind == "text")

    rng = random.Random(len(text))
    expected = split(range(1, len(text)))
    for _ in range(tiers.count(30, 300)):
        cuts = sorted(rng.sample(range(1, len(text)), rng.randrange(6)))
        assert split(cuts) == expected
