r"""The syntax of regular expressions: one meaning of ``\d \w \s`` in all constraints, and what masks do not support.

Validators differ about these classes: in ECMA-262, which JSON Schema names, ``\d`` and ``\w`` are ASCII; in Python and
Rust, they have all digits and letters. A mask allows only characters on which all agree: a class is what it contains in
every dialect, and a negated class is what no dialect excludes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, final

from nucleate.parameters.parameter import ParameterError

_ESCAPE: Final = r"\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|\\"
_OUTSIDE = re.compile(_ESCAPE + r"|\[\^?|\(\?(?:<?[=!]|P?<\w+>|[a-zA-Z]*-?[a-zA-Z]*[:)]|P?.)?|\{[^{}]*\}|.", re.DOTALL)
_INSIDE = re.compile(_ESCAPE + r"|\[:\^?[a-z]+:\]|\[\^?|&&|--|~~|.", re.DOTALL)
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}", re.ASCII)
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]*))?[:)]")

_CODE = re.compile(r"\\[xuU]\{([0-9a-fA-F]{1,8})\}")
_NAMED: Final = ("d", "w", "s", "D", "W", "S")

_SPACE: Final = r"\t-\r\x20\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CLASSES: Final = {
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\u200c\u200d"),
    "s": (_SPACE, _SPACE + r"\x1c-\x1f\x85\ufeff"),
}
"""The characters of each class in every dialect, and in any."""
_POSIX: Final = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "digit": "0-9",
    "lower": "a-z",
    "upper": "A-Z",
    "space": r"\t-\r\x20",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}
_ALTERNATIVES: Final = "write the allowed texts as alternatives"
_BOUNDARY: Final = ("a word boundary", "remove it, or write the character next to it, such as [^0-9A-Za-z_]")
_REFERENCE: Final = ("a backreference", "repeat the pattern of the group")
_OCTAL: Final = ("an octal escape", r"write \x and two hexadecimal digits")
_RECURSION: Final = ("a recursion", "use a grammar")
_ESCAPES: Final = {
    **dict.fromkeys("bB<>", _BOUNDARY),
    **dict.fromkeys("123456789kg", _REFERENCE),
    "0": _OCTAL,
    "Z": ("an anchor of other dialects", "write $"),
    "G": ("an anchor of other dialects", "remove it"),
    "K": ("a reset of the match", "remove it"),
    "c": ("a control escape", r"write \x and two hexadecimal digits"),
    "h": ("a class of other dialects", r"write [ \t]"),
    "R": ("a class of other dialects", r"write (?:\r\n|\n|\r)"),
    "N": ("an escape of other dialects", r"write \u{...} for a character, or [^\n]"),
    "X": ("a class of other dialects", "write . for a character"),
    "e": ("an escape of other dialects", r"write \x1b"),
    "Q": ("quoting", r"write \ before each special character"),
    "E": ("quoting", r"write \ before each special character"),
    "u": ("an incomplete escape", r"write \u and four hexadecimal digits"),
    "U": ("an incomplete escape", r"write \u{...}"),
    "x": ("an incomplete escape", r"write \x and two hexadecimal digits"),
}
_GROUPS: Final = {
    **dict.fromkeys(("(?=", "(?!", "(?<=", "(?<!"), ("look-around", _ALTERNATIVES)),
    "(?>": ("an atomic group", "write (?:...)"),
    "(?(": ("a conditional group", _ALTERNATIVES),
    "(?#": ("a comment", "remove it"),
    "(?|": ("a group of other dialects", "write (?:...)"),
    "(?'": ("a group of other dialects", "write (?<name>...)"),
    "(?P=": _REFERENCE,
    **dict.fromkeys(("(?P>", "(?&", "(?+", *(f"(?{digit}" for digit in range(10))), _RECURSION),
}
_FLAG_HINTS: Final = {
    "m": "remove it: ^ and $ are the ends of the text",
    "x": "write the pattern without spaces and comments",
    "R": "remove it",
    "a": r"remove it: \d and \w are ASCII",
}
_SET_OPERATIONS: Final = {"--": r"write \- for a hyphen", "~~": r"write \~ for a tilde", "&&": r"write \& for an &"}


class Part(NamedTuple):
    """A part of a pattern. negated: whether a class around it excludes what it matches; None outside classes."""

    position: int
    text: str
    negated: bool | None


class Unsupported(NamedTuple):
    """What masks do not support in a pattern: a part, its offset, its kind, and what to write instead.

    invalid: it is an error, not only unsupported.
    """

    position: int
    text: str
    kind: str
    hint: str
    invalid: bool = False

    def __str__(self) -> str:
        fault = f"is {self.kind}" if self.invalid else f"({self.kind}) is not supported"
        return f"{self.text} {fault}; {self.hint}"


def pattern_parts(pattern: str) -> Iterator[Part]:
    position, classes = 0, list[bool]()
    while found := (_INSIDE if classes else _OUTSIDE).match(pattern, position):
        yield Part(position, found[0], classes[-1] if classes else None)
        if found[0] in ("[", "[^"):
            classes.append((bool(classes) and classes[-1]) != (found[0] == "[^"))
        elif found[0] == "]" and classes:
            classes.pop()
        position = found.end()


def nesting(marks: Iterable[str]) -> int:
    """Return how deep brackets are nested in characters, or in the parts of a grammar."""
    depth = deepest = 0
    for mark in marks:
        depth += (mark in ("(", "[", "{")) - (mark in (")", "]", "}"))
        deepest = max(deepest, depth)
    return deepest


@lru_cache(64)
def with_explicit_classes(pattern: str) -> str:
    r"""Return a supported pattern with characters instead of ``\d \w \s \D \W \S``."""
    written: list[str] = []
    after_class = False
    for part in pattern_parts(pattern):
        name = part.text[1:] if part.text[0] == "\\" else ""
        if name in _NAMED:
            every, any_dialect = CLASSES[name.lower()]
            if part.negated:
                every, any_dialect = any_dialect, every
            text = every if name.islower() else f"[^{any_dialect}]"
            written.append(f"[{text}]" if part.negated is None and name.islower() else text)
            after_class = part.negated is not None
        else:
            written.append(r"\-" if after_class and part.text == "-" else part.text)
            after_class = False
    return "".join(written)


@lru_cache(64)
def unsupported_syntax(pattern: str) -> Unsupported | None:
    """Return the first part of a pattern that masks do not support, or None."""
    return _Checker().first(pattern)


def check_syntax(field: str, pattern: str) -> None:
    """Raise ParameterError, which names the field and the offset, for a pattern that masks do not support."""
    found = unsupported_syntax(pattern)
    if found is not None:
        raise ParameterError(field, f"{field}: at offset {found.position}: {found}")


@dataclass
class _Level:
    """A group, or the whole pattern: what comes before its current part.

    consumed: a part that matches text. ended: the anchor ``$``. The others: the same where the group begins, and an
    anchor in any of its alternatives.
    """

    consumed_before: bool = False
    ended_before: Part | None = None
    consumed: bool = False
    ended: Part | None = None
    ended_in_any: Part | None = None

    def next_alternative(self) -> None:
        self.ended_in_any = self.ended_in_any or self.ended
        self.consumed, self.ended = self.consumed_before, self.ended_before


@final
class _Checker:
    """Follows the groups, repetitions, anchors and classes of a pattern."""

    def __init__(self) -> None:
        self._levels = [_Level()]
        self._open: list[Part] = []  # the brackets of groups and classes
        self._before = ""  # the text of the previous part
        self._repeats = 0  # 1: after a repetition, 2: after a lazy one
        self._repeatable = False

    def first(self, pattern: str) -> Unsupported | None:
        for part in pattern_parts(pattern):
            found = self._outside(part) if part.negated is None else self._inside(part)
            if found is not None:
                return found
            self._before = part.text
        if not self._open:
            return None
        opening = self._open[-1]
        close = ")" if opening.text[0] == "(" else "]"
        return _invalid(
            opening, "never closed", f"close it with {close}, or write \\{opening.text[0]} for the character"
        )

    def _outside(self, part: Part) -> Unsupported | None:
        text = part.text
        if text in ("*", "+", "?") or text[0] == "{":
            return self._repetition(part)
        self._repeats = 0
        if text in ("^", "\\A", "$", "\\z", "|"):
            return self._anchor(part)
        if text[0] == "(":
            return self._group(part)
        if text == ")":
            return self._close(part)
        if text[0] == "[":
            self._open.append(part)
        return (_escape(part) if text[0] == "\\" else None) or self._text()

    def _anchor(self, part: Part) -> Unsupported | None:
        level, self._repeatable = self._levels[-1], False
        if part.text == "|":
            level.next_alternative()
        elif part.text in ("$", "\\z"):
            level.ended = level.ended or part
        elif level.consumed:
            return _rejected(part, "an anchor after text", "put it at the beginning, or remove it")
        return None

    def _close(self, part: Part) -> Unsupported | None:
        if len(self._levels) == 1:
            return _invalid(part, "never opened", r"write \) for the character")
        self._open.pop()
        level = self._levels.pop()
        level.next_alternative()
        found = self._text()
        self._levels[-1].ended = level.ended_in_any
        return found

    def _text(self) -> Unsupported | None:
        level = self._levels[-1]
        level.consumed = self._repeatable = True
        return level.ended and _rejected(level.ended, "an anchor before text", "put it at the end, or remove it")

    def _group(self, part: Part) -> Unsupported | None:
        self._repeatable = False
        kind = next((_GROUPS[name] for name in (part.text[:4], part.text[:3]) if name in _GROUPS), None)
        flags = _FLAGS.fullmatch(part.text)
        if kind is None and flags is not None:
            for flag in flags[1] + (flags[2] or ""):
                if flag not in "isUu" or (flag == "u" and flag in (flags[2] or "")):
                    return _rejected(part, f"the flag {flag}", _FLAG_HINTS.get(flag, "remove it"))
            if part.text[-1] == ")":
                return None
        elif kind is not None:
            return _rejected(part, *kind)
        elif part.text != "(" and part.text[-1] != ">":
            return _invalid(part, "an unknown group", "write (...) or (?:...)")
        level = self._levels[-1]
        self._open.append(part)
        self._levels.append(_Level(level.consumed, level.ended, level.consumed, level.ended))
        return None

    def _repetition(self, part: Part) -> Unsupported | None:
        count = _COUNT.fullmatch(part.text)
        if part.text[0] == "{" and count is None:
            low = part.text.replace(" ", "").replace("{,", "{0,")
            meant = low if _COUNT.fullmatch(low) else "a count such as {2,5}"
            return _invalid(part, "no count", f"write {meant}, or \\{{ for the character")
        if count is not None and count[2] and int(count[2][:12]) < int(count[1][:12]):
            return _invalid(part, "reversed", f"write {{{count[2]},{count[1]}}}")
        if self._repeats == 1 and part.text == "?":
            self._repeats = 2
            return None
        if self._repeats:
            is_possessive = part.text == "+" and self._repeats == 1
            kind = "a possessive repetition" if is_possessive else "a repetition of a repetition"
            return _rejected(part, kind, "remove it" if is_possessive else "put the first one in (?:...)")
        if not self._repeatable:
            return _invalid(part, "without a part to repeat", f"write \\{part.text[0]} for the character, or remove it")
        self._repeats, self._repeatable = 1, False
        return None

    def _inside(self, part: Part) -> Unsupported | None:
        text = part.text
        if text == "]":
            if self._before in ("[", "[^"):
                return _rejected(part, "] at the beginning of a class", r"write \] for the character")
            self._open.pop()
        elif text[0] == "[" and text[:2] != "[:":
            if self._before != "&&":
                return _rejected(part, "a class in a class", r"write \[ for the character")
            self._open.append(part)
        elif self._before == "&&" or text in ("--", "~~"):
            return _rejected(part, "a set operation", _SET_OPERATIONS.get(text, r"write \& for the character &"))
        elif text[0] == "\\":
            if self._before == "-" and text[1:] in _NAMED:
                return _rejected(part, "the end of a range", r"write \- for a hyphen")
            return _escape(part)
        return None


def _rejected(part: Part, kind: str, hint: str) -> Unsupported:
    return Unsupported(part.position, part.text, kind, hint)


def _invalid(part: Part, kind: str, hint: str) -> Unsupported:
    return Unsupported(part.position, part.text, kind, hint, invalid=True)


def _escape(part: Part) -> Unsupported | None:
    name = part.text[1:]
    if name in ("A", "z", "b", "B") and part.negated is not None:
        return _rejected(part, "no character", r"write \x08 for backspace" if name == "b" else "remove it")
    if (
        len(name) > 1
        or name in _NAMED
        or name in "Aznrtfva"
        or (name.isascii() and not name.isalnum() and name not in "<>")
    ):
        return None if name else _invalid(part, "an unfinished escape", r"write \\ for the character")
    if name in _ESCAPES:
        return _rejected(part, *_ESCAPES[name])
    return _rejected(part, "an unknown escape", f"write {name} for the character")


def python_pattern(pattern: str) -> str:
    """Return a pattern for the package regex with the flag V1, which matches the same texts as in a mask."""
    written: list[str] = []
    multiline = any(part.text[:2] == "(?" and "m" in part.text.partition("-")[0] for part in pattern_parts(pattern))
    for part in pattern_parts(with_explicit_classes(pattern)):
        text = part.text
        if found := _CODE.fullmatch(text):
            text = f"\\U{int(found[1], 16):08x}"
        elif text[:2] == "[:" and text.strip("[:^]") in _POSIX:
            text = f"[{'^' if '^' in text else ''}{_POSIX[text.strip('[:^]')]}]"
        elif text[:2] in ("\\p", "\\P") and text[2:3] != "{":
            text = f"{text[:2]}{{{text[2:]}}}"
        elif part.negated is None and (text == "\\z" or (text == "$" and not multiline)):
            text = r"\Z"
        written.append(text)
    return "".join(written)


_CONTROL: Final = r"\x00-\x08\x0e-\x1f"
NO_CONTROL: Final = f"[^{_CONTROL}]"
"""All characters except control characters other than whitespace: see ``schema_soundness``."""


def pattern_excluding(texts: Iterable[str]) -> str:
    """Return a regular expression that matches every text except these."""
    given = list(texts)
    if not any(given):
        return ".+" if given else ".*"
    branches: dict[str, dict[str, None]] = {}
    for text in given:
        if text:
            branches.setdefault(text[0], {})[text[1:]] = None
    excluded = "".join(rf"\u{{{ord(first):x}}}" for first in branches)
    more = [rf"\u{{{ord(first):x}}}(?:{pattern_excluding(rest)})" for first, rest in branches.items()]
    end = [] if "" in given else [""]
    return "|".join([*end, f"[^{excluded}{_CONTROL}].*", *more])
