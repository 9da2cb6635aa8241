"""Walks JSON schemas: subschemas, references, and keywords that cannot be enforced; and the formats of strings.

Formats are regular expressions that are valid for llguidance and for Python, so that masks and ``validation`` agree.
They match no invalid text. Some are stricter than their format, see docs/structured.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.spec import OnUnsupported


class Format(NamedTuple):
    """A regular expression that matches the whole text, and the maximum length in characters."""

    pattern: str
    max_length: int | None = None

    @property
    def search_pattern(self) -> str:
        """The regular expression with anchors, because JSON schemas search in a string."""
        return f"^(?:{self.pattern})$"


def _one_of(*options: str) -> str:
    return f"(?:{'|'.join(options)})"


# RFC 3339, with months and leap years as in the Gregorian calendar
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = _one_of(
    f"{_YEAR}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])",
    f"{_YEAR}-(?:0[13-9]|1[0-2])-(?:29|30)",
    f"{_YEAR}-(?:0[13578]|1[02])-31",
    f"{_LEAP_YEAR}-02-29",
)
_FRACTION = r"(?:\.[0-9]{1,9})?"
_MINUTE_OF_DAY = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_OFFSET = f"(?:[Zz]|[+-]{_MINUTE_OF_DAY})"
_UTC = "(?:[Zz]|[+-]00:00)"
_ORDINARY_TIME = f"{_MINUTE_OF_DAY}:[0-5][0-9]{_FRACTION}{_OFFSET}"
_LEAP_SECOND = f"23:59:60{_FRACTION}{_UTC}"
_TIME = _one_of(_ORDINARY_TIME, _LEAP_SECOND)
_DATE_TIME = _one_of(f"{_DATE}[Tt]{_ORDINARY_TIME}", f"{_YEAR}-(?:06-30|12-31)[Tt]{_LEAP_SECOND}")
_COUNT = "[0-9]{1,9}"
_DURATION_TIME = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DURATION_DATE = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_COUNT}W)"

# RFC 4291 and 3986
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"
_LAST_GROUPS = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_GROUPS_BEFORE = [f"(?:(?:{_GROUP}:){{0,{count - 1}}}{_GROUP})?" if count else "" for count in range(8)]
_ALL_BUT_LAST_GROUPS = [f"{_GROUPS_BEFORE[count]}::(?:{_GROUP}:){{{5 - count}}}" for count in range(6)]
_IPV6 = _one_of(
    f"{_one_of(f'(?:{_GROUP}:){{6}}', *_ALL_BUT_LAST_GROUPS)}{_LAST_GROUPS}",
    f"{_GROUPS_BEFORE[6]}::{_GROUP}",
    f"{_GROUPS_BEFORE[7]}::",
)

# RFC 1123, without the labels that RFC 5890 reserves (two hyphens in the third and fourth place)
_LETTER = "[A-Za-z0-9]"
_INNER = "[A-Za-z0-9-]"
_LABEL = (
    f"{_LETTER}(?:{_LETTER}|{_INNER}{_LETTER}|{_INNER}{{2}}{_LETTER}"
    f"|{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})?"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"

# RFC 5321
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:{_HOSTNAME}|\[(?:{_IPV4}|IPv6:{_IPV6})\])"


def _uri(letters: str, private: str, relative: bool) -> str:
    """Return the texts of RFC 3986. letters, private: the further characters of RFC 3987. relative: and references."""
    unreserved = f"A-Za-z0-9._~{letters}-"
    delimiters = "!$&'()*+,;="
    escape = f"%{_HEX}{{2}}"
    character = f"(?:[{delimiters}:@{unreserved}]|{escape})"
    user = f"(?:[{delimiters}:{unreserved}]|{escape})*"
    name = f"(?:[{delimiters}{unreserved}]|{escape})*"
    literal = rf"\[(?:{_IPV6}|[Vv]{_HEX}+\.[{delimiters}:A-Za-z0-9._~-]+)\]"
    authority = f"(?:{user}@)?(?:{literal}|{name})(?::[0-9]{{0,5}})?"
    path = f"(?:/{character}*)*"
    end = rf"(?:\?(?:{character}|[/?{private}])*)?(?:#(?:{character}|[/?])*)?"
    scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
    rooted = f"(?://{authority}{path}|/(?:{character}+{path})?|)"
    if not relative:
        return f"{scheme}(?:{rooted}|{character}+{path}){end}"
    first = f"(?:[{delimiters}@{unreserved}]|{escape})+"  # without a colon, which would end a scheme
    return f"(?:(?:{scheme})?{rooted}|{scheme}{character}+{path}|{first}{path}){end}"


_PLANES = "".join(rf"\U{plane:04x}0000-\U{plane:04x}fffd" for plane in range(1, 14)) + r"\U000e1000-\U000efffd"
_IRI_LETTERS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + _PLANES
_IRI_PRIVATE = r"\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"

# RFC 6901 and 6570
_POINTER = r"(?:/(?:[^/~\x00-\x1f]|~[01])*)*"
_VARIABLE = rf"(?:[A-Za-z0-9_]|%{_HEX}{{2}})(?:\.?(?:[A-Za-z0-9_]|%{_HEX}{{2}}))*(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = (
    rf"(?:[!#$&(-;=?-\[\]_a-z~{_IRI_LETTERS}{_IRI_PRIVATE}]|%{_HEX}{{2}}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)

FORMATS: Final[Mapping[str, Format]] = {
    "date-time": Format(_DATE_TIME),
    "date": Format(_DATE),
    "time": Format(_TIME),
    "duration": Format(_DURATION),
    "email": Format(_EMAIL, 254),
    "hostname": Format(_HOSTNAME, 253),
    "ipv4": Format(_IPV4),
    "ipv6": Format(_IPV6),
    "uri": Format(_uri("", "", relative=False)),
    "uri-reference": Format(_uri("", "", relative=True)),
    "iri": Format(_uri(_IRI_LETTERS, _IRI_PRIVATE, relative=False)),
    "iri-reference": Format(_uri(_IRI_LETTERS, _IRI_PRIVATE, relative=True)),
    "uri-template": Format(_TEMPLATE),
    "uuid": Format("-".join(f"{_HEX}{{{length}}}" for length in (8, 4, 4, 4, 12))),
    "json-pointer": Format(_POINTER),
    "relative-json-pointer": Format(rf"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})"),
}
"""String formats that token masks enforce."""


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


SUPPORTED = _split(
    "type enum const anyOf oneOf allOf $ref properties patternProperties additionalProperties required minProperties "
    "maxProperties items prefixItems minItems maxItems minLength maxLength pattern format minimum maximum "
    "exclusiveMinimum exclusiveMaximum multipleOf"
)
"""Keywords that token masks enforce."""
UNSUPPORTED = _split(
    "not if then else contains minContains maxContains uniqueItems propertyNames dependentRequired dependentSchemas "
    "dependencies additionalItems unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef nullable extends "
    "disallow divisibleBy x-guidance"
)
"""Other keywords that constrain values. All other words have no effect on validation."""
KEYWORDS = SUPPORTED | UNSUPPORTED
UNSUPPORTED_FORMATS = _split("idn-email idn-hostname regex")
"""Other formats of the specification. All other names have no effect on validation, such as "password" and "binary"."""
_HINTS = {"nullable": '; write "null" as one of the types'}
TARGETS: Final = "$targets"
"""Key of a normalized root for the schemas to which references refer, by JSON pointer."""
BUDGET: Final = "$budget"
"""Key of a normalized root for the ``Budget`` of its comparisons."""
BEFORE: Final = "$before"
"""Key of a rewritten schema for its keywords before, because a rewritten schema may allow less."""

ONE = ("additionalProperties", "items")
LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties")
"""Enforced keywords with one schema, a list of schemas, and an object of schemas."""
_EVERY_ONE = (
    *ONE,
    *("additionalItems", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_EVERY_LIST = (*LIST, "items")
_EVERY_NAMED = (*NAMED, "dependentSchemas", "dependencies")
_DEFINITIONS = ("$defs", "definitions")
_APPLICATORS = frozenset((*_EVERY_NAMED, *_EVERY_ONE, *_EVERY_LIST, *_DEFINITIONS))


class SchemaLocation(NamedTuple):
    """A subschema and its JSON pointer."""

    pointer: str
    schema: Mapping[str, Any]

    @property
    def message_suffix(self) -> str:
        """`` at POINTER`` for messages; empty for the root."""
        return f" at {shown(self.pointer)[1:-1]}" if self.pointer else ""

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.schema.get(name)
        return value if isinstance(value, dict) else {}

    def list_of(self, name: str) -> list[Any]:
        value = self.schema.get(name)
        return value if isinstance(value, list) else []

    def patterns(self) -> list[str]:
        """The regular expressions of this subschema."""
        own = self.schema.get("pattern")
        return [*self.mapping("patternProperties"), *([own] if isinstance(own, str) else [])]

    def patterns_and_formats(self) -> list[str]:
        """The regular expressions and the format of this subschema."""
        format_name = self.schema.get("format")
        return [*self.patterns(), *([format_name] if isinstance(format_name, str) else [])]

    @property
    def intersects(self) -> bool:
        """Whether several schemas apply to one value: by ``allOf``, or by ``$ref`` with other keywords."""
        return bool(self.list_of("allOf")) or ("$ref" in self.schema and len(self.schema.keys() & SUPPORTED) > 1)

    def children(self, *, every: bool = False, definitions: bool = False) -> list[SchemaLocation]:
        """Return the direct subschemas under enforced keywords.

        every: under all keywords that apply schemas. definitions: also schemas that are only defined here.
        """
        schema, found = self.schema, list[tuple[str, Any]]()
        if _APPLICATORS.isdisjoint(schema):  # most subschemas; this makes walks three times as fast
            return []
        names, ones, lists = (_EVERY_NAMED, _EVERY_ONE, _EVERY_LIST) if every else (NAMED, ONE, LIST)
        for name in (*names, *_DEFINITIONS) if definitions else names:
            if name in schema:
                found += [(f"{name}/{escaped_step(key)}", child) for key, child in self.mapping(name).items()]
        found += [(name, schema[name]) for name in ones if name in schema]
        for name in lists:
            if name in schema:
                found += [(f"{name}/{index}", child) for index, child in enumerate(self.list_of(name))]
        return [SchemaLocation(f"{self.pointer}/{step}", child) for step, child in found if isinstance(child, dict)]

    def ref_target(self, root: Mapping[str, Any]) -> SchemaLocation | None:
        """The target of a resolved ``$ref``, if it is an object; otherwise None."""
        pointer = self.schema.get("$ref")
        target = root.get(TARGETS, {}).get(pointer) if isinstance(pointer, str) else None
        return SchemaLocation(unquote(str(pointer)[1:]), target) if isinstance(target, dict) else None


def with_children(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a schema with changed subschemas under enforced keywords."""
    changed = dict(schema)
    for keyword, value in schema.items():
        if keyword in NAMED and isinstance(value, dict):
            changed[keyword] = {name: change(child) for name, child in value.items()}
        elif keyword in LIST and isinstance(value, list):
            changed[keyword] = [change(child) for child in value]
        elif keyword in ONE:
            changed[keyword] = change(value)
    return changed


def original(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema as it was before it was rewritten."""
    before: Mapping[str, Any] = schema.get(BEFORE, schema)
    return before


def escaped_step(name: str) -> str:
    """Return a name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1") if "~" in name or "/" in name else name


def subschemas(
    root: Mapping[str, Any], *, start: SchemaLocation | None = None, every: bool = False
) -> Iterator[SchemaLocation]:
    """Yield each schema in use once: the root (or ``start``), its subschemas and referenced schemas.

    every: also subschemas under keywords that cannot be enforced. A schema may be changed when it is yielded.
    """
    stack = [start or SchemaLocation("", root)]
    visited: dict[int, Mapping[str, Any]] = {}  # keeps the schemas alive, so that their identities are unique
    while stack:
        location = stack.pop()
        if id(location.schema) in visited:
            continue
        visited[id(location.schema)] = location.schema
        yield location
        stack += reversed(location.children(every=every))
        if "$ref" in location.schema and (ref_target := location.ref_target(root)):
            stack.append(ref_target)


@dataclass
class PreparedSchema:
    """A normalized and rewritten schema. locations: each subschema in use, once."""

    root: dict[str, Any]
    locations: list[SchemaLocation]

    def update_locations(self) -> None:
        """Find the locations again, after subschemas were removed."""
        self.locations = list(subschemas(self.root))


def unsupported_keywords(locations: Iterable[SchemaLocation]) -> Iterator[tuple[str, str]]:
    """Yield the unsupported keywords of a prepared schema as (``keyword at pointer``, hint); the hint may be empty."""
    for location in locations:
        for keyword in [keyword for keyword in location.schema if keyword not in _ACCEPTED]:
            value, suffix = location.schema[keyword], location.message_suffix
            if keyword in NUMERIC:
                if not all(map(_is_exact, value if keyword == "enum" and isinstance(value, list) else [value])):
                    yield f"{keyword}{suffix} with such a large number", ""
            elif keyword in UNSUPPORTED:
                yield f"{keyword}{suffix}", _HINTS.get(keyword, "")
        format_name = location.schema.get("format")
        if isinstance(format_name, str) and applies_to_strings(location.schema) and format_name not in FORMATS:
            known = _FORMATS_BY_PLAIN_WORD.get(_plain(format_name[:_MAX_KEYWORD_LENGTH]))
            what = f"format {shown(format_name)}{location.message_suffix}"
            if format_name in UNSUPPORTED_FORMATS:
                yield what, f" (supported: {', '.join(sorted(FORMATS))})"
            elif known is not None:
                yield what, f"; did you mean {known}?"


def misspelled_keywords(locations: Iterable[SchemaLocation]) -> Iterator[str]:
    """Yield the unknown keywords of a prepared schema that look like known ones, with their places."""
    for location in locations:
        for keyword in location.schema:
            if keyword in _ACCEPTED or keyword in KEYWORDS:
                continue
            if known := _misspelled(keyword[:_MAX_KEYWORD_LENGTH]):
                yield f"{shown(keyword)[1:-1]}{location.message_suffix}; did you mean {known}?"


def _is_exact(value: object) -> bool:
    """Whether llguidance represents a number exactly: as a double, and as a 64-bit integer for bounds."""
    return not isinstance(value, int | float) or (abs(value) < 2**63 and float(value) == value)


@lru_cache(4096)
def _misspelled(keyword: str) -> str | None:
    """Return the keyword that an unknown word probably stands for, or None for a word of another vocabulary."""
    if keyword.startswith("x-"):
        return None
    word = _plain(keyword)
    if word in _BY_PLAIN_WORD:
        return _BY_PLAIN_WORD[word]
    near = [known for known in _BY_PLAIN_WORD if known[:1] == word[:1] and abs(len(known) - len(word)) <= 2]
    similar = difflib.get_close_matches(word, near, n=1, cutoff=_CUTOFF)
    return _BY_PLAIN_WORD[similar[0]] if similar else None


def _plain(keyword: str) -> str:
    return re.sub("[^a-z0-9]", "", keyword.lower())


NUMERIC = _split("const enum minimum maximum exclusiveMinimum exclusiveMaximum")
_ACCEPTED = (SUPPORTED - NUMERIC) | _split("title description default examples deprecated readOnly writeOnly $comment")
"""Keywords that need no check."""
_MAX_KEYWORD_LENGTH: Final = 32
_CUTOFF: Final = 0.86
_FORMATS_BY_PLAIN_WORD = {_plain(name): name for name in sorted({*FORMATS} | UNSUPPORTED_FORMATS)}
_BY_PLAIN_WORD = {_plain(keyword): keyword for keyword in sorted(KEYWORDS) if keyword != "x-guidance"}


def applies_to_strings(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "string")
    return "string" in kind if isinstance(kind, list | str) else False


def check_unsupported(unsupported: Iterable[tuple[str, str]], on_unsupported: OnUnsupported) -> tuple[str, ...]:
    """Return the ignored keywords. Raises ParameterError for the first one unless ``on_unsupported`` is "ignore"."""
    if on_unsupported == "ignore":
        return tuple(dict.fromkeys(what for what, _ in unsupported))
    for what, hint in unsupported:
        message = f'json_schema: cannot enforce {what}{hint}; set on_unsupported="ignore" to ignore it'
        raise ParameterError("json_schema", message)
    return ()


def keyword_locations(locations: Sequence[SchemaLocation], *keywords: str) -> str:
    """Return the first three locations of keywords, for messages."""
    found = [each.pointer or "the root" for each in locations if not each.schema.keys().isdisjoint(keywords)]
    return ", ".join(shown(pointer)[1:-1] for pointer in found[:3]) + (" and more" if len(found) > 3 else "")
