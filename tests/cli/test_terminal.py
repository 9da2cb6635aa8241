"""Width, colours and characters of a terminal, and tables that fit it."""

from __future__ import annotations

import io
import random
import re

import pytest

from nucleate.cli.terminal import (
    NO_BREAK,
    Cell,
    Terminal,
    TextTable,
    character_width,
    columns,
    has_colors,
    pad,
    text_width,
    truncated,
    wrapped,
)


class Screen(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (True, False)),
        ({"TERM": "dumb"}, (False, False)),
        ({"NO_COLOR": "1"}, (False, False)),
        ({"NO_COLOR": ""}, (True, False)),
        ({"FORCE_COLOR": "1"}, (True, True)),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, (True, True)),
        ({"CLICOLOR_FORCE": "1"}, (True, True)),
        ({"CLICOLOR_FORCE": "0"}, (True, False)),
        ({"FORCE_COLOR": "0"}, (False, False)),
        ({"FORCE_COLOR": ""}, (True, False)),
        ({"CLICOLOR": "0"}, (False, False)),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, (False, False)),
    ],
)
def test_colors_follow_the_environment(
    variables: dict[str, str], expected: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (has_colors(Screen()), has_colors(io.StringIO())) == expected


def test_the_width_is_that_of_the_terminal_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert columns(io.StringIO()) is None
    assert (columns(Screen()) or 0) > 0
    for text, expected in (("60", 60), ("0", None), ("-5", None), ("wide", None), ("", None), ("²", None)):
        monkeypatch.setenv("COLUMNS", text)
        assert columns(io.StringIO()) == expected


def test_a_terminal_without_colors_paints_nothing() -> None:
    assert Terminal().paint("a", "bold") == "a"
    assert Terminal(has_colors=True).paint("a", "bold") == "\x1b[1ma\x1b[0m"
    assert Terminal(has_colors=True).paint("", "bold") == ""
    assert Terminal(has_colors=True).paint("a", "") == "a"


@pytest.mark.parametrize(
    ("character", "width"),
    [
        ("a", 1),
        ("é", 1),
        ("日", 2),
        ("한", 2),
        ("Ａ", 2),
        ("🦊", 2),
        ("\u0301", 0),
        ("\ufe0f", 0),
        ("\u1161", 0),
        ("█", 1),
    ],
)
def test_the_width_of_a_character(character: str, width: int) -> None:
    assert character_width(character) == width


def test_texts_are_quoted_on_one_line() -> None:
    terminal = Terminal()
    for text, expected in (
        (" a", '" a"'),
        ('"\\', r'"\"\\"'),
        ("\n\r\t", r'"\n\r\t"'),
        ("\x1b[31m", r'"\u001b[31m"'),
        ("\x7f\x9b", r'"\u007f\u009b"'),
        ("\u202e\u2066", r'"\u202e\u2066"'),
        ("\u00a0\u200b\u2028", r'"\u00a0\u200b\u2028"'),
        ("\U000e0001\ue000", r'"\U000e0001\ue000"'),
        ("日本 🦊é", '"日本 🦊é"'),
    ):
        assert terminal.quoted(text) == expected
    assert Terminal(encoding="ascii").quoted("é日🦊") == r'"\xe9\u65e5\U0001f98a"'
    assert Terminal(encoding="latin-1").quoted("é日") == r'"é\u65e5"'
    assert Terminal(encoding="no such encoding").quoted("é") == r'"\u00e9"'


def test_truncated_texts_have_at_most_their_width() -> None:
    characters = 'aé日🦊\u0301\n"\x9b '
    generator = random.Random(1)
    for _ in range(500):
        text = "".join(generator.choices(characters, k=generator.randrange(30)))
        width = generator.randrange(6, 40)
        quoted = Terminal().quoted(text, width)
        assert text_width(quoted) <= width
        whole = Terminal().quoted(text)
        assert quoted == whole or (quoted.endswith('"...') and whole.startswith(quoted[:-4]))
        plain = text.replace("\n", "").replace("\x9b", "")
        assert text_width(truncated(plain, width)) <= width
        assert truncated(plain, width) == plain or truncated(plain, width).endswith("...")


def test_wrapping_breaks_between_words_only() -> None:
    generator = random.Random(2)
    for _ in range(500):
        words = ["".join(generator.choices("ab日🦊,", k=generator.randrange(1, 12))) for _ in range(8)]
        width = generator.randrange(6, 40)
        first, *more = wrapped(" ".join(words), width)
        assert all(line.startswith("  ") for line in more)
        lines = [first, *(line[2:] for line in more)]
        assert " ".join(lines) == " ".join(words)
        for line in (first, *more):
            assert text_width(line) <= width or len(line.split()) == 1
        for line, following in zip((first, *more), lines[1:], strict=False):  # no line ends early
            assert text_width(line) + 1 + text_width(following.split()[0]) > width
    assert wrapped("a b", None) == ["a b"]
    assert wrapped("", 10) == [""]
    assert wrapped(f"a{NO_BREAK}1, b{NO_BREAK}2", 6, "") == ["a 1,", "b 2"]


def test_padding_counts_columns() -> None:
    assert pad("日本", 6, "<") == "日本  "
    assert pad("日本", 6, ">") == "  日本"
    assert pad("too long", 3, "<") == "too long"


TABLE = TextTable(
    ("name", "count\n(unit)", "why"),
    "<><",
    [[Cell("日本", "bold"), Cell("1"), Cell("some words to wrap")], [Cell("b"), Cell("22", "dim"), Cell("short")]],
    least=10,
)


def test_a_wide_table() -> None:
    assert TABLE.lines(Terminal()) == [
        "       count",
        "name  (unit)  why",
        "日本       1  some words to wrap",
        "b         22  short",
    ]


def test_a_table_whose_last_column_wraps() -> None:
    assert TABLE.lines(Terminal(26)) == [
        "       count",
        "name  (unit)  why",
        "日本       1  some words",
        "                to wrap",
        "b         22  short",
    ]


def test_a_table_whose_last_column_is_below() -> None:
    assert TABLE.lines(Terminal(18)) == [
        "       count",
        "name  (unit)",
        "日本       1",
        "  some words to",
        "    wrap",
        "b         22",
        "  short",
    ]
    assert not TABLE.fits_stacked(11)
    assert TABLE.lines(Terminal(1))[2] == "日本       1"  # no worse than too wide


@pytest.mark.parametrize("width", [None, 1, 18, 26, 80])
def test_colors_change_no_column(width: int | None) -> None:
    painted = TABLE.lines(Terminal(width, has_colors=True))
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in painted] == TABLE.lines(Terminal(width))
    assert any("\x1b[1m日本\x1b[0m" in line for line in painted)
    assert any("\x1b[2m22\x1b[0m" in line for line in painted)


def test_a_part_of_a_cell_is_bold() -> None:
    table = TextTable(
        ("a", "b"), "<<", [[Cell("TopK(5)", bold=4), Cell("x")], [Cell("Temperature", bold=11), Cell("")]]
    )
    lines = table.lines(Terminal(has_colors=True))
    assert lines[1:] == ["\x1b[1mTopK\x1b[0m(5)      x", "\x1b[1mTemperature\x1b[0m"]
