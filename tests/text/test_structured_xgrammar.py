"""The second engine: what it takes is held, what it would not hold is refused, and its slowness harms nobody else."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
from test_structured import CHOICES, SCHEMAS, can_write, walk
from test_structured_hostile import CASES

import nucleate as nc
from nucleate.core.parameter import ParameterError
from nucleate.text.structured import Grammars, Limits, Structured
from nucleate.text.structured.xgrammar import told
from nucleate.text.structured.xgrammar_forms import check_schema, taken_regex
from nucleate.text.tokenizer import Tokenizer

NEEDED = "the second grammar engine, xgrammar, is not installed"
SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return nc.LLM().tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    pytest.importorskip("xgrammar", reason=NEEDED)
    return Grammars(tokenizer, 4096, engine="xgrammar")


def taken(grammars: Grammars, **said: Any) -> Any:
    try:
        return grammars.compile(Structured(**said))
    except ParameterError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("whitespace", ["bounded", "compact"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_a_text_under_a_schema_that_is_taken_validates(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], whitespace: Any
) -> None:
    compiled = taken(grammars, json_schema=schema, whitespace=whitespace)
    judge = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for seed in range(6):
        text = walk(compiled, tokenizer, seed)
        errors = [*judge(schema, format_checker=judge.FORMAT_CHECKER).iter_errors(json.loads(text))]
        assert not errors, text


def test_most_ordinary_schemas_are_taken(grammars: Grammars) -> None:
    refused = []
    for schema in SCHEMAS:
        try:
            check_schema(schema, "strict")
        except ParameterError as error:
            refused.append(str(error))
    assert len(refused) < len(SCHEMAS) / 2, refused


def random_schema(chance: random.Random, depth: int) -> dict[str, Any]:
    """Of what is taken."""
    kinds = ["integer", "number", "string", "enum", "boolean", "null", *(["array", "object", "anyOf"] * (depth > 0))]
    kind = chance.choice(kinds)
    if kind == "enum":
        return {"enum": chance.sample(["a", "b c", 1, 2.5, None, True, [1], {"k": "é"}, '"', "\\"], 3)}
    if kind in ("integer", "number"):
        low = chance.randint(-2000, 2000) if kind == "integer" else round(chance.uniform(-50, 50), chance.randint(0, 3))
        bounds = {chance.choice(["minimum", "exclusiveMinimum"]): low}
        bounds |= {chance.choice(["maximum", "exclusiveMaximum"]): low + chance.randint(2, 3000)}
        return {"type": kind, **dict(chance.sample([*bounds.items()], chance.randint(0, 2)))}
    if kind == "string":
        low = chance.randint(0, 4)
        lengths = {"minLength": low, "maxLength": low + chance.randint(0, 5)}
        patterns = ["^[a-f]{2,4}$", "^(a|bc)+$", r"^\d{1,3}-\w?$", "^[^x]{3}$", "^a.b$", r"^\S*$"]
        return {"type": kind, **chance.choice([lengths, {"pattern": chance.choice(patterns)}, {"maxLength": 9}])}
    if kind == "array":
        low = chance.randint(0, 2)
        return {"type": kind, "items": random_schema(chance, depth - 1), "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = chance.sample(["a", "b", "long name", 'q"', "é", "a\\"], chance.randint(1, 4))
        made = {name: random_schema(chance, depth - 1) for name in names}
        required = chance.sample(names, chance.randint(0, len(names)))
        return {"type": kind, "properties": made, "required": required, "additionalProperties": False}
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, depth - 1) for _ in range(2)]}
    return {"type": kind}


@pytest.mark.parametrize("seed", range(40))
def test_random_schemas_of_what_is_taken_are_held(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    schema = random_schema(random.Random(seed), 3)
    compiled = grammars.compile(Structured(json_schema=schema))
    for each in range(4):
        text = walk(compiled, tokenizer, each)
        assert not [*jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text))], (schema, text)


NOT_HELD: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "required": ["b"]}, "required 'b', which is not in properties"),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, "maxLength beside pattern"),
    ({"type": "string", "pattern": "b"}, "pattern 'b', which is not of the form"),
    ({"type": "string", "pattern": "^a|b$"}, "not of the form"),
    ({"type": "string", "pattern": r"^a\$"}, "not of the form"),
    ({"type": "string", "pattern": r"^a\nb$"}, "the character"),
    ({"type": "string", "pattern": '^a"b$'}, "the character"),
    ({"type": "string", "pattern": r"^\x22$"}, "the character"),
    ({"type": "string", "pattern": r"^\u005c$"}, "the character"),
    ({"type": "string", "pattern": r"^\\$"}, "the character"),
    ({"minimum": 3}, "minimum without type"),
    ({"required": ["a"]}, "required without type"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "string", "enum": ["a", 1]}, "type beside enum"),
    ({"type": "integer", "enum": [True]}, "type beside enum"),
    ({"properties": {"a": {}}, "type": "object", "anyOf": [{"required": ["a"]}]}, "properties, type beside anyOf"),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]}, "allOf"),
    ({"type": "array", "items": {"$ref": "#/$defs/a", "minimum": 3}, "$defs": {"a": {}}},
     "minimum beside $ref at /items"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {}}, "not"),
    ({"if": {}}, "if"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^x$": {}}}, "patternProperties beside"),
    ({"type": "string", "format": "email"}, "format 'email'"),
    ({"oneOf": [{"type": "null"}]}, "oneOf, taken for anyOf,"),
    ({"type": "string", "maxlength": 3}, "did you mean maxLength"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "words"), NOT_HELD, ids=lambda value: json.dumps(value)[:60])
def test_what_xgrammar_is_silent_about_is_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        check_schema(schema, "strict")
    assert str(caught.value).startswith("json_schema: xgrammar cannot enforce ")
    assert words in str(caught.value)
    assert check_schema(schema, "lenient")
    if words.startswith("oneOf"):
        assert check_schema(schema, "coerce") == ("oneOf, taken for anyOf,",)
    else:
        with pytest.raises(ParameterError):
            check_schema(schema, "coerce")


def test_lenient_validates_what_is_ignored(grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    compiled = grammars.compile(Structured(json_schema=schema, policy="lenient"))
    assert compiled.ignored == ("uniqueItems",)
    assert compiled.validate("[1, 1]")


REGEXES = [
    "a.c", "^ab$", r"\d{2}", r"\w+", r"\s", "[^a]b", "a*?b", "(?:ab)+c", "(?<n>a)b", r"\x41\u0042", r"a\/\.\-",
    r"[\w-]{2}", r"\S{3}", "a{2,4}", "x{0}y", "[😀-😂]", "a||b", r"[^\x00-\x1f]{2}", r"[\s\S]", "(a|b)*a(a|b){5}",
    ".{0,4}", "[.]", "(.|\n){2}",
]  # fmt: skip
REFUSED = [
    "(?i)a", "(?=a)a", "(?!a)b", "(?P<n>a)", r"\p{L}", r"[\p{L}]", r"\bfoo", r"(a)\1", "a$b", "a^b", r"\Aa", r"a\z",
    r"\h", r"\W", r"[^\w]", r"\D", "[[:alpha:]]", "[a&&b]", "[a--b]", "[]a]", "(?#c)a", r"\q",
    r"a\Z", "[a[b]]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_text_under_a_regex_matches(grammars: Grammars, tokenizer: Tokenizer, pattern: str) -> None:
    compiled = grammars.compile(Structured(regex=pattern))
    for seed in range(6):
        text = walk(compiled, tokenizer, seed)
        assert regex.fullmatch(pattern, text), text
    for text in ("abc", "ab", "aab", "ababc", "aaa", "a\nc", "\n", "12", "a/.-", "AB", "y", "", "...."):
        assert not can_write(compiled, tokenizer, text) or regex.fullmatch(pattern, text), text


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_xgrammar_takes_amiss_is_refused(pattern: str) -> None:
    with pytest.raises(ParameterError, match=r"^regex: xgrammar does not take "):
        taken_regex(pattern)


@pytest.mark.parametrize("pattern", ["a++", "(", "[", "[z-a]", "a{,2}", "a{3"])
def test_what_xgrammar_refuses_is_told(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(ParameterError, match=r"^regex: "):
        grammars.compile(Structured(regex=pattern))


def test_what_a_dot_is_does_not_depend_on_the_engine() -> None:
    assert taken_regex(r"a.\.[.]") == r"a[^\n]\.[.]"


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: repr(choice)[:30])
def test_every_choice_can_be_written_and_nothing_else(
    grammars: Grammars, tokenizer: Tokenizer, choice: tuple[str, ...]
) -> None:
    compiled = grammars.compile(Structured(choice=choice))
    for text in choice:
        assert can_write(compiled, tokenizer, text), text
    assert {walk(compiled, tokenizer, seed) for seed in range(10)} <= set(choice)


@pytest.mark.parametrize(("field", "name", "value"), CASES, ids=[f"{field}-{name}" for field, name, _ in CASES])
def test_a_hostile_form_is_a_clear_error_in_time(grammars: Grammars, field: str, name: str, value: Any) -> None:
    begun = time.thread_time()
    try:
        made = Structured(**{field: value})
        grammars.compile(made)
    except ParameterError as error:
        caught = error
    else:
        assert made.form in ("regex", "choice"), "a schema is taken"
        return  # what is hostile to one engine may be nothing to the other
    assert time.thread_time() - begun < 5
    text = str(caught)
    assert caught.field == field
    assert len(text) < 400
    assert "\n" not in text
    assert not any(word in text for word in (".cc", "/project", "Check failed", "Traceback"))
    assert grammars.compile(Structured(regex="ok")).matcher().forced() is not None


def test_grammars_are_for_guidance(grammars: Grammars) -> None:
    for grammar in ('start: "a"', 'root ::= "a"'):
        with pytest.raises(ParameterError, match=r"^grammar: the engine xgrammar takes none"):
            grammars.compile(Structured(grammar=grammar))


BROKEN = [
    b"\xed\xa0\x80",
    b"\xed\xbf\xbf",
    b"\xe0\x80\x80",
    b"\xf0\x80\x80\x80",
    b"\xf4\x90\x80\x80",
    b"\xc0\x80",
    b"\xff",
]
WHOLE = [
    b"\xed\x9f\xbf",
    b"\xee\x80\x80",
    b"\xe0\xa0\x80",
    b"\xf0\x90\x80\x80",
    b"\xf4\x8f\xbf\xbf",
    b"\xc2\x80",
    b"\x7f",
]


@pytest.mark.parametrize(
    "said", [{"regex": r"\S"}, {"regex": "."}, {"json_schema": {"type": "string", "maxLength": 1}}]
)
def test_bytes_that_are_no_text_are_refused(grammars: Grammars, tokenizer: Tokenizer, said: dict[str, Any]) -> None:
    compiled = grammars.compile(Structured(**said))
    table, special = tokenizer.pieces.table, tokenizer.special_ids
    one = {tokenizer.pieces.as_bytes(token): token for token in table if token not in special}
    quote = b"" if "regex" in said else b'"'
    for data in BROKEN + WHOLE:
        matcher, mask_W, went = compiled.matcher(), np.empty(128, np.int32), 0
        for byte in quote + data + quote:
            token = one[bytes([byte])]
            matcher.fill(mask_W)
            if not mask_W[token // 32] >> (token % 32) & 1:
                with pytest.raises(ValueError, match="not allowed"):
                    matcher.push(token)
                break
            matcher.push(token)
            went += 1
        assert matcher.finished == (data in WHOLE), data
        matcher.rollback(went)
        with pytest.raises(ValueError, match="cannot take back"):
            matcher.rollback(1)


def test_blanks_have_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    compiled = grammars.compile(Structured(json_schema=SMALL))
    assert can_write(compiled, tokenizer, '{\n    "a": 1\n}')
    assert can_write(compiled, tokenizer, '{"a":1}')
    assert not can_write(compiled, tokenizer, "{" + " " * 18 + '"a": 1}')
    compact = grammars.compile(Structured(json_schema=SMALL, whitespace="compact"))
    assert not can_write(compact, tokenizer, '{"a": 1}')


def test_forced_is_only_what_no_other_token_could_say(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(Structured(regex="qz!")).matcher()
    forced = matcher.forced()
    assert tokenizer.decode(list(forced)) in ("", "qz!", "qz", "q")
    for token in forced:
        matcher.push(token)
    assert grammars.compile(Structured(regex="[ab]c")).matcher().forced() == ()


def test_who_waits_too_long_is_told_so_and_others_go_on(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xgrammar", reason=NEEDED)
    grammars = Grammars(tokenizer, 4096, engine="xgrammar", limits=Limits(compiling=0.2))
    free, real = threading.Event(), grammars._engine._compiler

    class Stuck:
        def compile_regex(self, pattern: str) -> Any:
            assert "slow" not in pattern or free.wait(30)
            return real.compile_regex(pattern)

    grammars._engine._compiler = Stuck()
    with pytest.raises(ParameterError, match="it takes the engine xgrammar too long"):
        grammars.compile(Structured(regex="slow"))
    with pytest.raises(ParameterError, match="others are compiled before it"):
        grammars.compile(Structured(regex="quick"))
    free.set()
    for _ in range(100):
        try:
            matcher = grammars.compile(Structured(regex="quick")).matcher()
            break
        except ParameterError:
            time.sleep(0.05)
    assert matcher.error is None
    assert grammars.compile(Structured(regex="slow")).matcher().error is None


def test_messages_are_ours() -> None:
    assert told("[02:04:34] /project/cpp/regex_converter.cc:83: Regex parsing error.\n") == "Regex parsing error."
    assert told("[02:04:34] /p/x.cc:1: Check failed: (a <= b) is false: Too many.\n") == "Too many."
    assert len(told("x" * 1000)) == 200


def test_it_is_not_loaded_unless_asked_for(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="engine must be one of guidance, xgrammar, got"):
        Grammars(tokenizer, 4096, engine="outlines")  # type: ignore[arg-type]
    import sys

    from nucleate.text.structured import xgrammar

    xgrammar.library.cache_clear()
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ModuleNotFoundError, match=r"nucleate\[xgrammar\]"):
        Grammars(tokenizer, 4096, engine="xgrammar")
    xgrammar.library.cache_clear()


def test_an_engine_of_requests_takes_either() -> None:
    llm = nc.LLM()
    with pytest.raises(
        ParameterError, match="structured_engine must be guidance or xgrammar, got 'outlines'"
    ) as caught:
        llm.new_engine(structured_engine="outlines")
    assert caught.value.field == "structured_engine"
    engine = llm.new_engine(structured_engine="xgrammar")
    asked = nc.Request(llm.encode("Is it?"), nc.SamplingParams(structured={"choice": ["yes", "no"]}, seed=1))
    pytest.importorskip("xgrammar", reason=NEEDED, exc_type=ImportError)
    engine.add(asked)
    events = [event for _ in range(20) for event in engine.step()]
    text = "".join(event.piece.text for event in events)
    assert text in ("yes", "no")
    assert type(engine._forms._made._engine).__name__ == "XGrammar"
