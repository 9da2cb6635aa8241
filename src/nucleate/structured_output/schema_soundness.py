r"""Works around texts that llguidance accepts although the schema forbids them: rewrites or rejects such schemas.

Known cases, found by testing and in its source (1.9.1):

- A name that is not declared may be spelled with \u escapes, and so get past the names that are. A name that matches a
  pattern may not. So additional properties are described with patterns.
- Names are not remembered: one that is written twice counts twice.
- A class in a pattern that holds every control character, or all but \n, but not " or \, takes these two, escaped. So
  classes lose most control characters, which no other text needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from nucleate.structured_output.json_schema import SchemaLocation, places

MAX_NAME_CHARACTERS: Final = 2_000
"""Maximum characters of all declared names for a pattern that excludes them."""
MAX_NAME_LENGTH: Final = 64
"""Maximum characters of one such name; each is a level of brackets."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PART = re.compile(r"\\(?:[pP](?:\{[^}]*\}|.)|.)|\[", re.DOTALL)
_PLAIN = re.compile(r"\[(?!\^)(?:\\[dws]|\\[nrtfv](?!-)|\\[^a-zA-Z0-9]|[^\[\\\x00-\x1f])*\]", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[\w-]*x")
_SINGLE = re.compile(r"[\x00-\x1f]|\\(?:x\{?|u\{?|U\{?)[0-9a-fA-F]+|\\a", re.DOTALL)
_MOST_SINGLE: Final = 20
_REST: Final = r"[^\x00-\x08\x0e-\x1f]"


def unsound(root: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what llguidance does not enforce and ``sound`` cannot rewrite, like ``unsupported_keywords``."""
    for place in places(root):
        others = place.schema.get("additionalProperties", True)
        patterns, named = place.objects("patternProperties"), _named(place)
        if others is not False and patterns:
            yield f"patternProperties{place.where}", " unless additionalProperties is false"
        elif others is not False and place.objects("properties") and not _tried(others, named):
            yield f"additionalProperties{place.where}", " beside names so long"
        if (patterns or _mended(place)) and any(map(_CONTROL.search, named)):
            yield (
                f"properties{place.where}",
                " whose names hold control characters, unless additionalProperties is false",
            )
        least = place.schema.get("minProperties", 0)
        twice = isinstance(least, int | float) and least > 1 and least > len({*map(str, place.listed("required"))}) + 1
        if twice and (patterns or others is not False):
            yield f"minProperties{place.where}", ", since a name can be written twice"
        for pattern in place.patterns():
            if len(set(_SINGLE.findall(pattern))) > _MOST_SINGLE:
                yield f"pattern{place.where}", " of so many control characters"
        if len({narrowed(pattern) for pattern in patterns}) < len(patterns):
            yield f"patternProperties{place.where}", ", which are too much alike"


def sound(root: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a schema in place, so that llguidance accepts no invalid text."""
    for place in list(places(root)):
        schema = cast("dict[str, Any]", place.schema)
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = narrowed(schema["pattern"])
        if place.objects("patternProperties"):
            schema["patternProperties"] = {
                narrowed(pattern): child for pattern, child in place.objects("patternProperties").items()
            }
        elif _mended(place):
            others = schema.get("additionalProperties", True)
            pattern = "^" if _anything(others) else f"^(?s:{_other_than(place.objects('properties'))})$"
            schema |= {"patternProperties": {pattern: others}, "additionalProperties": False}
    return root


def narrowed(pattern: str) -> str:
    """Remove control characters except whitespace from the classes of an expression."""
    verbose = _VERBOSE.search(pattern) is not None
    parts, done = [], 0
    while found := _PART.search(pattern, done):
        end = _class_end(pattern, found.start()) if found[0] == "[" else found.end()
        text = pattern[found.start() : end]
        if text[:2] in (r"\p", r"\P") or (text[0] == "[" and (verbose or not _PLAIN.fullmatch(text))):
            text = f"[{text}&&{_REST}]"
        parts += [pattern[done : found.start()], text]
        done = end
    return "".join(parts) + pattern[done:]


def _class_end(pattern: str, start: int) -> int:
    """Return the end of the class that starts there."""
    depth, place = 0, start
    while place < len(pattern):
        if pattern[place] == "[":
            depth += 1
            place += 1 + pattern.startswith("^", place + 1)
            place += pattern.startswith("]", place)  # as the first in a class it is a character
            continue
        place += 1 + (pattern[place] == "\\")
        if pattern[place - 1] == "]" and pattern[place - 2 : place] != "\\]":
            depth -= 1
            if depth == 0:
                return place
    return len(pattern)


def _named(place: SchemaLocation) -> list[str]:
    return [*place.objects("properties"), *(name for name in place.listed("required") if isinstance(name, str))]


def _mended(place: SchemaLocation) -> bool:
    """Return whether additional properties are allowed and need a pattern."""
    others = place.schema.get("additionalProperties", True)
    open_ = others is not False and not place.objects("patternProperties")
    return open_ and bool(place.objects("properties")) and _tried(others, _named(place))


def _tried(others: object, named: list[str]) -> bool:
    """Return whether the names are few enough for a pattern that excludes them, or need none."""
    return _anything(others) or (
        sum(map(len, named)) <= MAX_NAME_CHARACTERS and max(map(len, named)) <= MAX_NAME_LENGTH
    )


def _anything(schema: object) -> bool:
    return schema is True or schema == {}


def _other_than(names: Mapping[str, Any]) -> str:
    """Return an expression of all texts except these names."""
    if not any(names):
        return ".+" if names else ".*"
    branches: dict[str, dict[str, None]] = {}
    for name in names:
        if name:
            branches.setdefault(name[0], {})[name[1:]] = None
    excluded = "".join(rf"\u{{{ord(first):x}}}" for first in branches)
    more = [rf"\u{{{ord(first):x}}}(?:{_other_than(rest)})" for first, rest in branches.items()]
    end = [] if "" in names else [""]
    return "|".join([*end, f"[[^{excluded}]&&{_REST}].*", *more])
