"""Which schemas and expressions xgrammar holds; it is silent about what it does not. Compiles nothing.

Found by trying each keyword, alone and beside others, with texts that are right and wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from nucleate.core.parameter import ParameterError
from nucleate.core.structured import Policy
from nucleate.core.values import shown
from nucleate.text.structured.schema import HELD, Place, not_held, places

XGRAMMAR_HELD: Final = HELD - {"allOf", "multipleOf", "additionalItems", "minProperties"}
XGRAMMAR_FORMATS: Final = frozenset({"ipv4", "uuid"})
_ALTERNATIVES: Final = frozenset({"anyOf", "oneOf"})
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip

_ANY: Final = 10**9
_PART = re.compile(
    r"(?P<class>\[\^?(?:\\.|[^\]\\])*\])|(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|.))"
    r"|(?P<group>\((?:\?(?::|<\w+>))?)|(?P<one>.)",
    re.DOTALL,
)
_NAMED: Final = frozenset("nrtfvdwsDWSxu")


def check_schema(root: Mapping[str, Any], policy: Policy) -> tuple[str, ...]:
    """What is ignored. Raises ParameterError, which names the keyword and the place, where the policy forbids that."""
    ignored = []
    for what, hint in _not_held(root):
        taken = what.startswith("oneOf")
        if policy == "strict" or (policy == "coerce" and not taken):
            other = "; policy coerce would take it for anyOf" if taken else "; policy lenient would ignore it"
            raise ParameterError("json_schema", f"json_schema: xgrammar cannot enforce {what}{hint}{other}")
        ignored.append(what)
    return tuple(ignored)


def taken_schema(root: dict[str, Any]) -> dict[str, Any]:
    """A schema as xgrammar is to read it, changed in place: within lengths it would let control characters through."""
    for place in list(places(root)):
        schema = cast("dict[str, Any]", place.schema)
        low, high = schema.get("minLength", 0), schema.get("maxLength", _ANY)
        if (low == 0 and high == _ANY) or {"pattern", "format"} & schema.keys():
            continue
        if all(isinstance(each, int | float) and each == int(each) for each in (low, high)) and 0 <= low <= high:
            most = "" if high == _ANY else int(high)
            schema["pattern"] = f"^[^\\x00-\\x1f]{{{int(low)},{most}}}$"
            schema.pop("minLength", None)
            schema.pop("maxLength", None)
    return root


def taken_regex(pattern: str) -> str:
    """An expression as xgrammar is to read it to mean the same. Raises ParameterError for what it would take amiss."""
    why = _amiss(pattern, ascii_only=False)
    if why:
        raise ParameterError("regex", f"regex: xgrammar does not take {why}")
    return "".join("[^\\n]" if part[0] == "." else part[0] for part in _PART.finditer(pattern))


def _not_held(root: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from not_held(root, XGRAMMAR_HELD, XGRAMMAR_FORMATS)
    for place in places(root):
        for what in _beside(place, {name for name in place.schema if name in HELD}):
            yield f"{what}{place.where}", ""


def _beside(place: Place, said: set[str]) -> Iterator[str]:
    """What is ignored at one place because of what else stands there."""
    schema = place.schema
    if "oneOf" in said:
        yield "oneOf, taken for anyOf,"
    for alone in (frozenset({"$ref"}), frozenset({"const", "enum"}), _ALTERNATIVES):
        if said & alone:
            others = said - alone - ({"type"} if "enum" in alone and _of_type(schema) else set())
            if len(said & alone) > 1:
                yield " beside ".join(sorted(said & alone))
            if others:
                yield f"{', '.join(sorted(others))} beside {min(said & alone)}"
            return
    if schema.get("type") == []:
        yield "type of no values"
    if said and "type" not in said:
        yield f"{', '.join(sorted(said))} without type"
    yield from _in_strings(place, said)
    missing = {name for name in place.listed("required") if name not in place.objects("properties")}
    if missing:
        yield f"required {shown(min(missing, key=str))}, which is not in properties,"
    if "patternProperties" in said and ("properties" in said or schema.get("additionalProperties", False) is not False):
        yield "patternProperties beside other properties"


def _of_type(schema: Mapping[str, Any]) -> bool:
    """Whether all values of an enum or const are of the type that stands beside them."""
    kinds = schema.get("type")
    types = tuple(
        each for kind in (kinds if isinstance(kinds, list) else [kinds]) for each in _TYPES.get(str(kind), ())
    )
    given = schema.get("enum")
    values = [*(given if isinstance(given, list) else ()), *([schema["const"]] if "const" in schema else [])]
    return all(isinstance(value, types) and (not isinstance(value, bool) or bool in types) for value in values)


def _in_strings(place: Place, said: set[str]) -> Iterator[str]:
    restricting = [name for name in ("pattern", "format") if name in said]
    lengths = sorted(said & {"minLength", "maxLength"})
    if len(restricting) > 1 or (restricting and lengths):
        yield f"{' and '.join([*restricting[1:], *lengths])} beside {restricting[0]}"
    for pattern in place.patterns():
        if not (pattern.startswith("^") and pattern.endswith("$")) or _splits(pattern[1:-1]):
            yield f"pattern {shown(pattern)}, which is not of the form ^(...)$,"
        elif why := _amiss(pattern, ascii_only=True):
            yield f"{why} in the pattern {shown(pattern)}"


def _splits(inner: str) -> bool:
    """Whether there is a choice outside of all brackets, or the last $ is none."""
    level = 0
    for part in _PART.finditer(inner):
        level += (part.lastgroup == "group") - (part[0] == ")")
        if level == 0 and part[0] == "|":
            return True
    return re.search(r"(?<!\\)(?:\\\\)*\\$", inner) is not None


def _amiss(pattern: str, *, ascii_only: bool) -> str | None:
    r"""What xgrammar would take for something else. ascii_only: in JSON, where \d and \w are ASCII for both."""
    for part in _PART.finditer(pattern):
        text, kind = part[0], part.lastgroup
        if kind == "group" and pattern[part.end() : part.end() + 1] == "?":
            return "a group with ?"
        if (text == "^" and part.start() > 0) or (text == "$" and part.end() < len(pattern)):
            return f"{text} in the middle"
        if kind == "class" and (text in ("[]", "[^]") or re.search(r"(?<!\\)\[|&&|--|~~", text[1:])):
            return "a class within a class"
        escape = next(
            (each for each in re.findall(r"\\(.)", text, re.DOTALL) if _unknown(each, text, ascii_only)), None
        )
        if escape is not None:
            return shown("\\" + escape)
        if ascii_only and kind in ("escape", "one") and _raw(text):
            return f"the character {shown(text)}"
    return None


def _unknown(letter: str, text: str, ascii_only: bool) -> bool:
    """Whether an escape within a part means something else to xgrammar."""
    if not letter.isalnum():
        return False
    wide = letter in "DW" or (letter in "dw" and text.startswith("[^"))  # those of Unicode would be left out
    return letter not in _NAMED or (wide and not ascii_only)


def _raw(text: str) -> bool:
    """Whether a part stands for a character that JSON has to escape; it would be written as it is."""
    if text.startswith(("\\x", "\\u")):
        code = int(text[2:].strip("{}"), 16)
        return code < 32 or code in (34, 92)
    return text in ('"', "\\\\", '\\"', *(f"\\{letter}" for letter in "nrtfv")) or text < " "
