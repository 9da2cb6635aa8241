"""Structured-output examples: fifty JSON schemas of rising difficulty, regular expressions, and lists of choices.

All are fully supported. Most strings and numbers are bounded, since a story model does not end them by itself; those
of ``OPEN`` are not, so outputs may end by length.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(optional: tuple[str, ...] = (), /, **properties: Any) -> Schema:
    """An object with these properties and no others; all but ``optional`` are required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def integer(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def array(items: Any, low: int, high: int, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high, **more}


def nested(depth: int) -> Schema:
    return integer(0, 9) if depth == 0 else closed(inner=nested(depth - 1))


RECORD = closed(
    name=text(8),
    kind={"enum": ["a rather long name of a kind", "short"]},
    sizes={"type": "array", "items": integer(0, 99), "maxItems": 2},
)


def validated(count: int) -> Schema:
    """Ones and twos that must be unique, which is only validated; of an enum without multipleOf it is enforced."""
    return array({"enum": [1, 2], "multipleOf": 1}, count, count, uniqueItems=True)


_PLAIN: dict[str, Schema] = {
    "null": {"type": "null"},
    "yes or no": {"type": "boolean"},
    "a digit": integer(0, 9),
    "a word": text(12, minLength=1),
    "one of three": {"enum": ["red", "green", "blue"]},
    "a constant": {"const": {"kind": "fixed", "of": [1, 2.5, None, True]}},
    "no properties": closed(),
    "one property": closed(name=text(10)),
    "two types": {"type": ["integer", "null"], "minimum": -99, "maximum": 99},
    "values of all types": {"enum": [None, False, 0, 1.5, "x", [1, "two"], {"three": 3}]},
}

_LISTS_AND_NUMBERS: dict[str, Schema] = {
    "three digits": array(integer(0, 9), 3, 3),
    "an empty list": array({"type": "boolean"}, 0, 0),
    "up to four words": array(text(8), 0, 4),
    "a table": array(array(integer(-9, 9), 2, 2), 2, 3),
    "a tuple": {
        "type": "array",
        "prefixItems": [{"enum": ["x", "y"]}, integer(0, 99), {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "a tuple and more": {
        "type": "array",
        "prefixItems": [text(6), {"type": "null"}],
        "items": integer(1, 3),
        "minItems": 2,
        "maxItems": 5,
    },
    "bounds that are no integers": {"type": "integer", "minimum": -3.5, "maximum": 12.25},
    "bounds that are left out": {"type": "integer", "exclusiveMinimum": 17, "exclusiveMaximum": 203},
    "hundredths of one": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    "a narrow number": {"type": "number", "exclusiveMinimum": -0.25, "exclusiveMaximum": 0.5, "multipleOf": 0.125},
    "multiples of seven": integer(0, 700, multipleOf=7),
    "quarters": {"type": "number", "minimum": 0, "maximum": 20, "multipleOf": 0.25},
}

_STRINGS: dict[str, Schema] = {
    "a number plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "a part of the text": {"type": "string", "pattern": "cat|dog", "maxLength": 30},
    "a word of vowels": {"type": "string", "pattern": "^(?:[aeiou][b-df-h]?){2,6}$", "maxLength": 9},
    "digits of a pattern": {"type": "string", "pattern": r"^\d{4}(?:-\d{2}){2}$"},
    "dates and times": closed(
        day={"type": "string", "format": "date"},
        clock=text(14, format="time"),
        moment=text(25, format="date-time"),
        length=text(12, format="duration"),
    ),
    "addresses": closed(
        four={"type": "string", "format": "ipv4"},
        six={"type": "string", "format": "ipv6"},
        id={"type": "string", "format": "uuid"},
        mail=text(40, format="email"),
    ),
    "other letters": closed(**{"größe": integer(1, 60), "名前": {"enum": ["花子", "太郎"]}, "🙂": {"const": "ça va"}}),
    "what must be escaped": closed(
        **{
            'a "quoted" name': {"enum": ['say "yes"', "back\\slash", "line\nbreak", "tab\t", "\u0001"]},
            "a/b~c": integer(0, 1),
        }
    ),
    "characters, not bytes": text(5, minLength=5),
}

_OBJECTS: dict[str, Schema] = {
    "a person": closed(name=text(16), age=integer(0, 120), tall={"type": "boolean"}),
    "most of it optional": closed(
        ("nick", "born", "likes"), name=text(8), nick=text(8), born=integer(1900, 2030), likes=array(text(6), 0, 2)
    ),
    "all of it optional": closed(("a", "b", "c"), a=integer(0, 9), b={"type": "null"}, c={"type": "boolean"}),
    "thirty optional": closed(
        tuple(f"field_{i}" for i in range(30)), **{f"field_{i}": integer(0, i + 1) for i in range(30)}
    ),
    "forty required": closed(**{f"column {i:02}": {"enum": [i, -i, None]} for i in range(40)}),
    "a list of records": array(closed(id=integer(1, 999), kind={"enum": ["in", "out"]}, note=text(10)), 1, 3),
    "nested thirty deep": nested(30),
    "nested ten deep": nested(10),
    "names of a pattern": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": integer(0, 9)},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 3,
    },
    "other names are numbers": {
        "type": "object",
        "properties": {"title": text(10)},
        "required": ["title"],
        "additionalProperties": integer(0, 99),
        "maxProperties": 3,
    },
}

_COMPOSED: dict[str, Schema] = {
    "either or": {
        "anyOf": [closed(circle=integer(1, 50)), closed(width=integer(1, 50), height=integer(1, 50)), {"type": "null"}]
    },
    "told apart by kind": array(
        {
            "oneOf": [
                closed(kind={"const": "mail"}, to=text(12)),
                closed(kind={"const": "call"}, number={"type": "string", "pattern": "^[0-9]{5,9}$"}),
                closed(kind={"const": "wait"}, hours=integer(1, 48)),
            ]
        },
        1,
        2,
    ),
    "both of two": {"allOf": [{"type": "integer", "minimum": 10}, {"maximum": 90, "multipleOf": 5}]},
    "an object in parts": {
        "allOf": [
            {"type": "object", "properties": {"a": integer(0, 9)}, "required": ["a"]},
            {"properties": {"a": {"maximum": 4}, "b": {"enum": ["p", "q"]}}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "shared parts": {
        "$defs": {"point": closed(x=integer(-99, 99), y=integer(-99, 99)), "name": text(8, pattern="^[a-z]+$")},
        **closed(label={"$ref": "#/$defs/name"}, start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "a chain": {
        "$defs": {
            "link": closed(head={"type": "boolean"}, tail={"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]})
        },
        "$ref": "#/$defs/link",
    },
    "a tree": {
        "$defs": {"node": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        **closed(value=integer(0, 9), left={"$ref": "#/$defs/node"}, right={"$ref": "#/$defs/node"}),
    },
    "a call of a tool": closed(
        ("limit",),
        tool={"enum": ["search", "open"]},
        arguments=closed(
            ("until",),
            query=text(40, minLength=3),
            fields=array({"enum": ["title", "body", "author", "date"]}, 1, 3),
            until={"type": "string", "format": "date"},
            weights={
                "type": "object",
                "patternProperties": {"^[a-z]{1,8}$": integer(0, 100)},
                "additionalProperties": False,
                "maxProperties": 2,
            },
        ),
        limit=integer(1, 50),
    ),
}

OPEN: dict[str, Schema] = {
    "any string and number": closed(text={"type": "string"}, number={"type": "number"}),
    "other names are numbers": _OBJECTS["other names are numbers"],  # its names are unbounded
}
"""Schemas without a maximum length."""

SCHEMAS: dict[str, Schema] = {**_PLAIN, **_LISTS_AND_NUMBERS, **_STRINGS, **_OBJECTS, **_COMPOSED, **OPEN}
"""The fifty schemas by name."""

PATTERNS = (
    "[0-9]{3}-[0-9]{4}",
    "[a-z]{1,12}",
    "(?:yes|no)(?: (?:yes|no)){0,3}",
    "[A-Z][a-z]{2,8} [A-Z][a-z]{2,8}",
    "a very long text that leaves no choice at all",
    r"\d{1,2}\.\d{1,2}\.\d{4}",
    r"[+-]?\d{1,5}(?:\.\d{1,3})?(?:e[+-]?\d{1,2})?",
    "(?:[01]{8} ){2}[01]{8}",
    r"#[0-9a-f]{6}|rgb\((?:\d{1,2},){2}\d{1,2}\)",
    "(?i)(?:mon|tues|wednes|thurs|fri|satur|sun)day",
    r"\w{3,9}@\w{2,9}\.(?:org|net)",
    "[^a-z\n]{5,10}",
    "(?s).{1,20}",
    r"[\p{Greek}]{2,6}",
    "(?:ab?c{2,3}){1,4}",
    r"\[(?:\d(?:, \d){0,5})?\]",
    "((a|b)(c|d)){3,5}",
    '"(?:[^"\\\\\\n]|\\\\["\\\\n]){0,15}"',
    r"(?:[a-f]\s?){4,10}\n?",
    "日本(?:語|人)?|中文",
)

CHOICES = (
    ("yes", "no"),
    ("positive", "negative", "neutral"),
    ("a", "ab", "abc", "abcd"),
    ("abc", "ab", "a"),
    ("1", "10", "100", "1000"),
    ("only this one",),
    (" ", "  ", "   "),
    ("true", "True", "TRUE"),
    ("Once upon a time", "Once upon a hill", "Once"),
    ("the end", "The end", "the end."),
    ("ja", "nein", "vielleicht, später"),
    ("🙂", "🙃", "👨‍👩‍👧", "é", "e"),
    ("{", "}", "{}", '{"a": 1}'),
    ('"quoted"', "'quoted'", "back\\slash"),
    ("line\nbreak", "line\n", "tab\there"),
    ("a|b", "(a)", "[a-z]*", "a.b", "$^"),
    tuple(f"option {i}" for i in range(100)),
    tuple(f"{i:03}" for i in range(0, 1000, 7)),
    ("x" * 50, "x" * 51, "x" * 49 + "y"),
    ("start: /x/", "%json", "<|endoftext|>"),
)
