"""The parsers of tool calls: tables of outputs, any split into parts, malformed and truncated calls."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest
import tiers
from chat_models import NAMES, parse

from nucleate.chat.chat_format import TOOL_FORMATS, find_format
from nucleate.chat.output_parser import OutputParser
from nucleate.chat.reader import completed_object

ONE = {"a": [1, "x}]<"], "b": {"c": None}}
TEXT = json.dumps(ONE)
DS_BEGIN, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL, DS_SEP, DS_STOP = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

Calls = list[tuple[str, Any]]
F: Calls = [("f", ONE)]
BOTH: Calls = [("f", ONE), ("get_weather", {})]

TABLE: list[tuple[str, str, str, Calls]] = [
    # format, output, content, calls
    *[
        (name, f'<tool_call>\n{{"name": "f", "arguments": {TEXT}}}\n</tool_call>', "", F)
        for name in ("hermes", "plain")
    ],
    ("hermes", f'<tool_call>{{"name":"f","arguments":{TEXT}}}</tool_call>', "", F),
    ("hermes", f'<tool_call>{{"arguments": {TEXT}, "name": "f"}}</tool_call>', "", F),
    ("hermes", f'<tool_call>{{"id": [1], "name": "f", "parameters": {TEXT}}}', "", F),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f\\u0066"}</tool_call>', '<tool_call>{"name": "f\\u0066"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "\\u0066"}</tool_call>', "", [("f", {})]),
    (
        "hermes",
        (
            f'Wait.\n\n<tool_call>\n{{"name": "f", "arguments": {TEXT}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>\n'
        ),
        "Wait.",
        BOTH,
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> then text ', "then text ", [("f", {})]),
    ("hermes", 'One <tool_call>{"name": "f"}</tool_call> two', "One two", [("f", {})]),
    ("hermes", "no call, a < b <tool", "no call, a < b <tool", []),
    ("llama3_json", f'{{"name": "f", "parameters": {TEXT}}}', "", F),
    ("llama3_json", f'<|python_tag|>{{"name": "f", "parameters": {TEXT}}}', "", F),
    ("llama3_json", f'\n{{"type": "function", "name": "f", "parameters": {TEXT}}}', "", F),
    ("llama3_json", f'{{"name": "f", "parameters": {TEXT}}}; {{"name": "get_weather", "parameters": {{}}}}', "", BOTH),
    ("llama3_json", f'Sure: {{"name": "f", "arguments": {TEXT}}}', "Sure:", F),
    ("llama3_json", '{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
    ("llama3_json", '  {"a": 1} x', '  {"a": 1} x', []),
    *[
        (
            name,
            f'[TOOL_CALLS] [{{"name": "f", "arguments": {TEXT}}}, {{"name": "get_weather", "arguments": {{}}}}]',
            "",
            BOTH,
        )
        for name in ("mistral", "mistral_v11")
    ],
    ("mistral", f'[TOOL_CALLS][{{"name": "f", "arguments": {TEXT}, "id": "abcdefghi"}}]', "", F),
    ("mistral", f"Hm[TOOL_CALLS]f{TEXT}[TOOL_CALLS]get_weather{{}}", "Hm", BOTH),
    ("mistral_v11", f"[TOOL_CALLS]f[ARGS]{TEXT}[TOOL_CALLS]get_weather[ARGS]{{}}", "", BOTH),
    ("mistral_v11", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{TEXT}", "", F),
    (
        "deepseek_v3",
        (
            f"{DS_BEGIN}{DS_CALL}function{DS_SEP}f\n```json\n{TEXT}\n```{DS_STOP}\n"
            f"{DS_CALL}function{DS_SEP}get_weather\n```json\n{{}}\n```{DS_STOP}{DS_END}"
        ),
        "",
        BOTH,
    ),
    (
        "deepseek_v31",
        f"Ok.{DS_BEGIN}{DS_CALL}f{DS_SEP}{TEXT}{DS_STOP}{DS_CALL}get_weather{DS_SEP}{{}}{DS_STOP}{DS_END}",
        "Ok.",
        BOTH,
    ),
    ("deepseek_v31", f"{DS_BEGIN}{DS_CALL}function{DS_SEP}f\n```json\n{TEXT}\n```{DS_STOP}{DS_END}", "", F),
    ("deepseek_v31", f"{DS_BEGIN}x", f"{DS_BEGIN}x", []),
    ("openai", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{TEXT}<|call|>", "", F),
    ("openai", f" to=functions.f<|channel|>commentary json<|message|>{TEXT}", "", F),
    (
        "openai",
        (
            f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary"
            f"<|message|>{TEXT}"
        ),
        "I look.",
        F,
    ),
    ("openai", "<|channel|>final<|message|>Hello", "Hello", []),
    ("openai", "just text", "just text", []),
    ("openai", "<|channel|>commentary to=functions.zzz<|message|>{}", "{}", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), TABLE, ids=lambda value: str(value)[:40])
def test_an_output_in_any_parts_is_split_into_content_and_calls(
    name: str, text: str, content: str, calls: Calls
) -> None:
    found = parse([text], name)
    assert found.content == content
    assert [(called, json.loads(arguments)) for called, arguments in found.complete_calls] == calls
    for place in range(len(text)):
        assert parse([text[:place], text[place:]], name).order == found.order
    for size in (1, 2, 3, 7):
        assert parse([text[start : start + size] for start in range(0, len(text), size)], name).order == found.order


MARKUP = {
    **dict.fromkeys(("hermes", "plain"), ("<tool", "</tool", '"name"')),
    "llama3_json": ("<|py", '"name": "f', '"parameters"'),
    "mistral": ("[TOOL", '"name"', '"arguments"'),
    "mistral_v11": ("[TOOL", "[ARGS", "[CALL"),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), ("<｜", "```", "function")),
    "openai": ("<|", "commentary", "functions."),
}


@pytest.mark.parametrize(("name", "text", "content", "calls"), TABLE, ids=lambda value: str(value)[:40])
def test_a_call_that_is_cut_stays_a_call_and_its_markup_is_never_text(
    name: str, text: str, content: str, calls: Calls
) -> None:
    if not calls or "\\u0066" in text:
        return
    seen = []
    for end in range(len(text) + 1):
        found = parse([text[:end]], name, cut=True)
        assert parse(text[:end], name, cut=True).order == found.order
        assert not any(markup in found.content for markup in MARKUP[name]), text[:end]
        if '"type"' in text and not found.calls:
            continue  # an object may be an answer in JSON until it names a tool
        assert content.startswith(found.content.rstrip())
        for (called, arguments, is_incomplete), (expected, values) in zip(found.calls, calls, strict=False):
            assert called == expected
            if is_incomplete:
                assert called == found.calls[-1][0]
                assert TEXT.startswith(arguments) or arguments == "{"
                json.loads(completed_object(arguments))
            else:
                assert json.loads(arguments) == values
        seen.append([call[:2] for call in found.calls])
    assert len(seen[-1]) == len(calls)
    for before, after in itertools.pairwise(seen):  # the parts of a stream add up
        assert all(
            part[0] == whole[0] and whole[1].startswith(part[1]) for part, whole in zip(before, after, strict=False)
        )
        assert len(before) <= len(after)
    assert any(["f", TEXT[:3]] in calls for calls in seen) or all(call[1] == {} for call in calls) or "name" in text


@pytest.mark.parametrize(("name", "text", "content", "calls"), TABLE, ids=lambda value: str(value)[:40])
def test_a_text_that_the_model_ends_within_a_call(name: str, text: str, content: str, calls: Calls) -> None:
    """Until a call has named its tool and begun its arguments, it is text, and no text is lost."""
    for end in range(len(text)):
        found = parse([text[:end]], name)
        for called, arguments in found.complete_calls:
            assert called in NAMES
            assert isinstance(json.loads(arguments), dict)
        if not found.calls and name != "openai":
            assert found.content.strip() == text[:end].strip()


MALFORMED = [
    # format, output, content, name and arguments, whether they are complete
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": no}}</tool_call> so', "so", '{"a": no}}', False),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "x": no}</tool_call> so', "so", "{}", True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", '{"a": 1', False),
    ("llama3_json", '{"name": "f", "parameters": {"a": no}} so', "", '{"a": no}} so', False),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": no}}]', "", '{"a": no}}]', False),
    ("mistral_v11", '[TOOL_CALLS]f[ARGS]{"a": no}', "", '{"a": no}', False),
    ("deepseek_v3", f'{DS_CALL}function{DS_SEP}f\n```json\n{{"a": no}}\n```{DS_STOP}so', "so", '{"a": no}', False),
    ("deepseek_v31", f'{DS_CALL}f{DS_SEP}{{"a": no}}{DS_STOP}so', "so", '{"a": no}', False),
    ("openai", ' to=functions.f<|message|>{"a": no}<|call|>', "", '{"a": no}', False),
]


@pytest.mark.parametrize(("name", "text", "content", "arguments", "is_complete"), MALFORMED)
def test_malformed_arguments_stay_those_of_the_call(
    name: str, text: str, content: str, arguments: str, is_complete: bool
) -> None:
    """A stream has sent their beginning."""
    for parts in ([text], text):
        found = parse(parts, name)
        assert found.calls == [["f", arguments, not is_complete]]
        assert found.content == content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("hermes", "a < b"), ("hermes", '{"name": "f"'), ("llama3_json", '{"name": "Ann", "age": 5')),
        *(("llama3_json", '{"age": 5, "name": "A'), ("llama3_json", '{"age": 5, "city": "Par')),
        ("openai", "<|channel|>final<|message|>Hello"),
    ],
)
def test_a_text_that_is_cut_within_no_call_stays_text(name: str, text: str) -> None:
    assert parse(text, name, cut=True).content == text.rpartition("<|message|>")[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_random_outputs_are_parsed_without_error_and_alike_in_any_parts(name: str) -> None:
    rng = random.Random(name)
    pieces = [text for own, text, _, _ in TABLE if own == name] or [text for _, text, _, _ in TABLE[:8]]
    pieces += [*TOOL_FORMATS[name].special_tokens, *'{}",:f\\é ', '{"name": "f"', "\n" * 70, "1e"]
    pieces += ['{"name": ', '"arguments": {', "[" * 120, "9" * 500, "```json\n", "get_weather", "x" * 300, "true"]
    for _ in range(tiers.count(150, 2000)):
        chosen = [rng.choice(pieces) for _ in range(rng.randrange(1, 7))]
        text = "".join(
            one[rng.randrange(len(one)) :][: rng.choice([3, 20, 500])] if rng.random() < 0.4 else one for one in chosen
        )
        whole = parse([text], name)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 9)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(parts, name).order == whole.order, text
        assert parse(text, name).order == whole.order, text
        assert parse(parts, name, cut=True).order == parse([text], name, cut=True).order, text
        for _called, arguments in whole.complete_calls:
            assert isinstance(json.loads(arguments), dict)


def test_arguments_are_streamed_as_they_come() -> None:
    parser = OutputParser(None, TOOL_FORMATS["hermes"], NAMES)
    parser.push('<tool_call>{"name": "f", "arguments": ')
    (start, first) = parser.push('{"a')
    assert (start.name, start.arguments, first.arguments) == ("f", "", '{"a')  # type: ignore[union-attr]
    assert [event.arguments for event in parser.push('": "xyz')] == ['": "xyz']  # type: ignore[union-attr]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_time_is_linear(name: str) -> None:
    units = ["<tool_call>", '{"name":', "[TOOL_CALLS]", "[", '{"', "<|channel|>", DS_CALL, " ", "1"]

    def seconds(unit: str, count: int) -> float:
        text = ("[TOOL_CALLS] [" if unit in "[ " else "") + unit * count
        parser = OutputParser(None, TOOL_FORMATS[name], NAMES)
        begin = time.thread_time()
        for start in range(0, len(text), 50):
            parser.push(text[start : start + 50])
        parser.finish()
        return time.thread_time() - begin

    for unit in units:
        seconds(unit, 100)
        small = min(seconds(unit, 1000) for _ in range(2))
        assert min(seconds(unit, 16_000) for _ in range(2)) < 80 * small + 0.2


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("{{ messages }}", (), "plain"),
        ("{% if tools %}<tool_call>{% endif %}", (), "hermes"),
        ("{% if tools %}<tool_call>\n<function=f>{% endif %}", (), None),
        ("{% if tools %}<tool_call>f<arg_key>a{% endif %}", (), None),
        ("{% if tools %}other{% endif %}", (), None),
        ('<|start_header_id|>{{ tools }}"parameters": ', (), "llama3_json"),
        ("<|python_tag|>", (), "llama3_json"),
        ("[TOOL_CALLS]", (), "mistral"),
        ("[TOOL_CALLS]", ("[ARGS]",), "mistral_v11"),
        ("[TOOL_CALLS][ARGS]", (), "mistral_v11"),
        (f"{DS_BEGIN}```json", (), "deepseek_v3"),
        (DS_BEGIN, (), "deepseek_v31"),
        ("<|channel|>analysis<|message|>", (), "openai"),
    ],
)
def test_the_format_follows_from_the_template(template: str, tokens: tuple[str, ...], expected: str | None) -> None:
    assert find_format(template, tokens) == expected
