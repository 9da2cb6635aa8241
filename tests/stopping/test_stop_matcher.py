"""The stop matcher equals rereading the full text after every token."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import regex
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.outputs import Finish
from nucleate.parameters.parameter import ParameterError
from nucleate.stopping import stop_matcher
from nucleate.stopping.stop_matcher import StopMatcher, StopRules

Tokens = list[tuple[int, str]]


# The reference implementation: rereads the full text after every token.
def occurrences(text: str, string: str) -> Iterator[tuple[int, int]]:
    for start in range(len(text) - len(string) + 1):
        if text.startswith(string, start):
            yield start, start + len(string)


def json_end(text: str, passed: int) -> int | None:
    """The end of the first complete JSON value that ends after the first ``passed`` characters."""
    stack, start, quoted, escaped = "", 0, False, False
    for index, character in enumerate(text):
        if escaped:
            escaped = False
        elif quoted:
            quoted, escaped = character != '"', character == "\\"
        elif character in "{[":
            start = start if stack else index
            stack += "}" if character == "{" else "]"
        elif stack and character == '"':
            quoted = True
        elif stack and character == stack[-1]:
            stack = stack[:-1]
            if not stack and index >= passed and loads(text[start : index + 1]):
                return index + 1
        elif character in "}]":
            stack = ""
    return None


def loads(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def reader(rules: StopRules, tokens: Tokens, tail: str) -> tuple[str, Finish | None, int]:
    """The text shown, the finish, and the number of tokens read."""
    text, passed, ignored, finish, searched, count = "", 0, set[tuple[str, int]](), None, True, 0
    for token_id, new in [*tokens, (None, tail)]:
        count += token_id is not None
        if token_id is not None and finish:
            continue
        eos = token_id in rules.eos_token_ids and not rules.ignore_eos
        if token_id is not None and (eos or token_id in rules.stop_token_ids) and count >= rules.min_tokens:
            finish, last = Finish("stop", None if eos else token_id), count
            if rules.include_stop_str_in_output and new:
                text, searched = text + new, False
            continue
        text += new
        matches = [(m.start(), m.end(), p) for p in rules.stop_regex for m in regex.finditer(p, text, overlapped=True)]
        if count < rules.min_tokens:
            ignored |= {(pattern, start) for start, _, pattern in matches}
            passed = len(text)
        elif searched:
            found = [(*span, s) for s in rules.stop for span in occurrences(text, s) if span[1] > passed]
            found += [match for match in matches if (match[2], match[0]) not in ignored]
            best = min(found, key=lambda match: (match[0], -match[1]), default=None)
            end = json_end(text, passed) if rules.stop_json else None
            if end is not None and (best is None or end <= best[0]):
                return text[:end], Finish("stop", "json"), last if finish else count
            if best is not None:
                cut = best[1] if rules.include_stop_str_in_output else best[0]
                return text[:cut], Finish("stop", best[2]), last if finish else count
        if token_id is not None and rules.max_tokens is not None and count >= rules.max_tokens:
            finish, last = Finish("length"), count
    return text, finish, last if finish else count


def run(rules: StopRules, tokens: Tokens, tail: str) -> tuple[str, Finish | None, int]:
    matcher, shown, count = StopMatcher(rules), "", 0
    for token_id, text in tokens:
        shown += matcher.push(token_id, text)
        count += 1
        if matcher.finish is not None:
            with pytest.raises(RuntimeError, match="after the sequence had ended"):
                matcher.push(token_id, text)
            break
        check_buffered(rules, "".join(text for _, text in tokens[:count]), shown, count)
    shown += matcher.close(tail)
    assert matcher.close("more") == ""
    return shown, matcher.finish, count


def check_buffered(rules: StopRules, text: str, shown: str, count: int) -> None:
    """The buffered text is the longest suffix that is a prefix of a possible match."""
    assert text.startswith(shown)
    if rules.stop_regex and rules.min_tokens:
        return  # skipped matches make the expected value harder to compute
    buffered = [size for s in rules.stop for size in range(1, len(s)) if text.endswith(s[:size])]
    for pattern in rules.stop_regex:
        starts = [
            p for p in range(len(text)) if (m := regex.compile(pattern).match(text, p, partial=True)) and m.partial
        ]
        buffered += [len(text) - min(starts)] if starts else []
    assert len(text) - len(shown) == max(buffered, default=0)


PATTERNS = ["abbc|b", "ab+c", "a.b", "[ab]{3}c", "(?<=a)b+c", "b(?=ca)", "c|bb", "(?:ab)+cc", "a(?!b)c"]


def random_case(draw: random.Random) -> tuple[StopRules, Tokens, str]:
    def text(most: int, alphabet: str) -> str:
        return "".join(draw.choices(alphabet, k=draw.randint(0, most)))

    alphabet = draw.choice(["ab", "abc", "abc", '{}[]",1:\\a'])
    tokens = [(draw.randint(0, 30), text(4, alphabet)) for _ in range(draw.randint(0, 25))]
    strings = tuple({text(5, alphabet) or alphabet[0] for _ in range(draw.choice([0, 1, 1, 3, 8]))})
    most = draw.choice([None, 8, 20])
    rules = StopRules(
        stop=strings if draw.random() < 0.7 else (),
        stop_regex=tuple(draw.sample(PATTERNS, draw.choice([0, 0, 1, 2]))),
        stop_json=draw.random() < 0.4,
        stop_token_ids=frozenset({draw.randint(0, 30)}),
        eos_token_ids=frozenset({draw.randint(0, 30)}),
        include_stop_str_in_output=draw.random() < 0.5,
        ignore_eos=draw.random() < 0.3,
        max_tokens=most,
        min_tokens=draw.choice([0, 0, 3, 7]),
        regex_seconds=10.0,
    )
    return rules, tokens, draw.choice(["", text(3, alphabet)])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.fast_cases(2)
def test_equals_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    reasons: dict[object, int] = {}
    for _ in range(600):
        rules, tokens, tail = random_case(draw)
        expected = reader(rules, tokens, tail)
        assert run(rules, tokens, tail) == expected, (rules, tokens, tail)
        kind = expected[1] and (expected[1].reason, type(expected[1].detail))
        reasons[kind] = reasons.get(kind, 0) + 1
    assert len(reasons) >= 5, "the cases must reach every kind of end"


@settings(max_examples=tiers.count(40, 150))
@given(
    st.lists(st.text('ab{}[]"\\ 1,:', max_size=4), max_size=20),
    st.lists(st.text("ab{", min_size=1, max_size=4), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_any_text(texts: list[str], strings: list[str], stop_json: bool, include: bool) -> None:
    rules = StopRules(stop=tuple(strings), stop_json=stop_json, include_stop_str_in_output=include)
    tokens = [(0, text) for text in texts]
    assert run(rules, tokens, "") == reader(rules, tokens, "")


@pytest.mark.parametrize("include", [False, True])
def test_one_character_at_a_time_truncates_at_the_right_position(include: bool) -> None:
    text = "one STOX then STOP and more"
    rules = StopRules(stop=("STOP",), include_stop_str_in_output=include)
    shown, finish, count = run(rules, [(1, character) for character in text], "")
    assert shown == ("one STOX then STOP" if include else "one STOX then ")
    assert finish == Finish("stop", "STOP")
    assert count == 18


def test_only_a_partial_match_is_buffered() -> None:
    matcher = StopMatcher(StopRules(stop=("</answer>",)))
    assert matcher.push(1, "no reason to hold <") == "no reason to hold "
    assert matcher.push(1, "/ans") == ""
    assert matcher.push(1, "!") == "</ans!"


def test_the_earliest_start_wins_and_then_the_longest_match() -> None:
    assert run(StopRules(stop=("bc", "abcd")), [(1, "xab"), (1, "cd")], "")[:2] == ("x", Finish("stop", "abcd"))
    # The inner string ends one token before the outer one.
    assert run(StopRules(stop=("bc", "abcd")), [(1, "xabc"), (1, "d")], "")[:2] == ("xa", Finish("stop", "bc"))
    rules = StopRules(stop=("ab", "abc"), include_stop_str_in_output=True)
    assert run(rules, [(1, "xabcd")], "")[:2] == ("xabc", Finish("stop", "abc"))


def test_the_tail_may_complete_a_stop() -> None:
    rules = StopRules(stop=("END",), max_tokens=1)
    assert run(rules, [(1, "the EN")], "D.")[:2] == ("the ", Finish("stop", "END"))
    assert run(rules, [(1, "the EN")], "\ufffd")[:2] == ("the EN\ufffd", Finish("length"))
    eos = StopRules(stop=("END",), eos_token_ids=frozenset({9}))
    assert run(eos, [(1, "the EN"), (9, "</s>")], "D")[:2] == ("the ", Finish("stop", "END"))
    assert run(eos, [(1, "the EN"), (9, "</s>")], "")[:2] == ("the EN", Finish("stop"))


def test_stop_tokens() -> None:
    rules = StopRules(stop_token_ids=frozenset({5}), eos_token_ids=frozenset({9}))
    assert run(rules, [(1, "a"), (5, "b")], "") == ("a", Finish("stop", 5), 2)
    assert run(rules, [(1, "a"), (9, "b")], "") == ("a", Finish("stop"), 2)
    shown = StopRules(stop_token_ids=frozenset({5}), include_stop_str_in_output=True, stop=("bc",))
    assert run(shown, [(1, "a"), (5, "b")], "c") == ("abc", Finish("stop", 5), 2)
    assert run(StopRules(eos_token_ids=frozenset({9}), ignore_eos=True), [(9, "</s>")], "") == ("</s>", None, 1)
    assert run(StopRules(eos_token_ids=frozenset({9}), max_tokens=1), [(9, "")], "")[1] == Finish("stop")
    matcher = StopMatcher(StopRules(eos_token_ids=frozenset({9}), min_tokens=2))
    assert not matcher.is_stop_token(9)
    matcher.push(9, "")
    assert matcher.is_stop_token(9)
    assert not matcher.is_stop_token(8)


def test_matches_before_min_tokens_are_ignored() -> None:
    rules = StopRules(stop=("ab",), min_tokens=3)
    assert run(rules, [(1, "ab"), (1, "ab"), (1, "-"), (1, "ab")], "")[0] == "abab-"
    assert run(rules, [(1, "ab"), (1, "-a"), (1, "b")], "")[0] == "ab-"  # started before, completed in time
    assert run(StopRules(stop_json=True, min_tokens=2), [(1, "[1]"), (1, "-"), (1, "[2]x")], "")[0] == "[1]-[2]"
    assert run(StopRules(stop_regex=("a+",), min_tokens=2), [(1, "aa"), (1, "a-")], "")[0] == "aa"


def test_no_tokens_allowed() -> None:
    matcher = StopMatcher(StopRules(max_tokens=0))
    assert matcher.finish == Finish("length")
    assert matcher.close() == ""


JSON_CASES = [
    ('Sure: {"a": "}\\"]", "b": [1, {"c": null}]} done', 'Sure: {"a": "}\\"]", "b": [1, {"c": null}]}'),
    ("[1, 2][3]", "[1, 2]"),
    ('{] {"a": 1} x', '{] {"a": 1}'),
    ('use {name} as in {"name": 1}.', 'use {name} as in {"name": 1}'),
    ('"{" opens, and its end is in a string: {}', '"{" opens, and its end is in a string: {}'),
    ("123 true", "123 true"),
    ('{"never": "closed}', '{"never": "closed}'),
    ("[" + "9" * 5000 + "]!", "[" + "9" * 5000 + "]"),
    ("[" * 3000 + "]" * 3000 + "!", "[" * 3000 + "]" * 3000),
]


@pytest.mark.parametrize(("text", "shown"), JSON_CASES)
@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_json_values(text: str, shown: str, size: int) -> None:
    matcher = StopMatcher(StopRules(stop_json=True))
    out = ""
    for index in range(0, len(text), size):
        out += matcher.push(1, text[index : index + size])
        if matcher.finish:
            break
    assert out + matcher.close() == shown
    assert matcher.finish == (Finish("stop", "json") if shown != text else None)


def test_a_slow_pattern_ends_its_own_sequence_only() -> None:
    slow = StopMatcher(StopRules(stop_regex=("(a|aa)+c",), regex_seconds=0.05))
    other = StopMatcher(StopRules(stop_regex=("b",)))
    began = time.thread_time()
    slow.push(1, "a" * 200)
    slow_text = slow.push(1, "b") if slow.finish is None else ""
    assert time.thread_time() - began < 2
    assert slow_text == ""
    assert slow.close("tail") == ""
    assert slow.finish == Finish("error", "stop_regex '(a|aa)+c' took longer than 0.05 s, and 0.0005 s per token")
    assert other.push(1, "ab") == "a"
    assert other.finish == Finish("stop", "b")


def test_regex_memory_and_work_stay_bounded() -> None:
    matcher = StopMatcher(StopRules(stop_regex=("(?<=x)stop",)))
    for _ in range(20_000):
        assert matcher.push(1, "word ") == "word "
    assert len(matcher._regexes[0]._text) < 20_000
    assert matcher.push(1, "xst") == "x"
    assert matcher.push(1, "op!") == ""
    assert matcher.finish == Finish("stop", "(?<=x)stop")


def test_thousands_of_strings_cost_a_constant_number_of_steps() -> None:
    """A character goes at most one state deeper, so the total of all steps back is at most the number of characters."""

    class Counted(list):
        steps = 0

        def __getitem__(self, state):
            Counted.steps += 1
            return super().__getitem__(state)

    draw = random.Random(1)
    strings = tuple("".join(draw.choices("abcd", k=15)) for _ in range(4096))
    matcher = StopMatcher(StopRules(stop=strings))
    machine = matcher._strings._automaton
    machine.fail = Counted(machine.fail)
    text = "".join(draw.choices("abcd", k=3000))
    for index in range(0, len(text), 3):
        matcher.push(1, text[index : index + 3])
    assert len(text) / 4 < Counted.steps <= len(text)


def test_json_that_ends_where_a_string_starts() -> None:
    assert run(StopRules(stop_json=True, stop=("!",)), [(1, "[1]!")], "")[:2] == ("[1]", Finish("stop", "json"))
    assert run(StopRules(stop_json=True, stop=("]",)), [(1, "[1]!")], "")[:2] == ("[1", Finish("stop", "]"))
    assert run(StopRules(stop_json=True, stop=("-", "!")), [(1, "-[1]!")], "")[:2] == ("", Finish("stop", "-"))


@pytest.mark.parametrize("quantifiers", [("+",), ("{2}",), ("{2,3}", "{1,3}"), ("+?", "{3}"), ("++",)])
def test_accepted_patterns_compile_quickly(quantifiers: tuple[str, ...]) -> None:
    """Nested repetitions cost a factor per level: patterns that would take seconds are rejected by a check."""
    accepted = []
    for depth in range(2, 90):
        pattern = "(?:" * depth + "a|b" + "".join(")" + quantifiers[level % len(quantifiers)] for level in range(depth))
        began = time.thread_time()
        with suppress(ParameterError):
            StopRules(stop_regex=(pattern,))
            accepted.append(depth)
        assert time.thread_time() - began < 2
    assert accepted[:4] == [2, 3, 4, 5]


def test_patterns_have_a_time_budget_plus_an_allowance_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that each search advances."""
    clock, takes = [100.0], [0.0]
    monkeypatch.setattr(stop_matcher.time, "monotonic", lambda: clock[0])

    def push(self: object, text: str, seconds: float, ignore: bool = False) -> None:
        clock[0] += min(takes[0], seconds)
        if takes[0] > seconds:
            raise TimeoutError

    monkeypatch.setattr(stop_matcher.RegexSearch, "push", push)
    matcher = StopMatcher(StopRules(stop_regex=("x",), regex_seconds=1.0))
    takes[0] = 0.9
    matcher.push(1, "a")
    takes[0] = 0.01
    for _ in range(500):
        matcher.push(1, "a")
    assert matcher.finish is None
    takes[0] = 0.02
    pushed = 0
    while matcher.finish is None:
        matcher.push(1, "a")
        pushed += 1
    assert pushed == pytest.approx(11, abs=1)
    assert matcher.finish == Finish("error", "stop_regex 'x' took longer than 1 s, and 0.01 s per token")


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("(a",), "stop_regex='(a': invalid pattern: missing )"),
        (("a*",), "stop_regex='a*': must not match the empty string"),
        (("a" * 1025,), "at most 1024 characters are allowed, got 1025"),
        (("a",) * 17, "at most 16 are allowed"),
        (("((a{1000}){1000}){1000}",), "too many repetitions"),
        (("(?x)((a{1 000}){10 00}){1000}",), "too many repetitions"),
        (("(?x)a{1#\n0000000}",), "too many repetitions"),
        (("(?:" * 20 + "a" + "){2}" * 20,), "too many repetitions"),
        (("(" * 500 + "a" + ")" * 500,), "nested too deeply"),
        ((r"\L<x>",), "invalid pattern"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_an_invalid_regex_is_an_error_on_one_line(patterns: tuple[str, ...], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        StopRules(stop_regex=patterns)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
