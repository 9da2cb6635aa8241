"""The OpenAPI document: it is valid, has every field, and agrees with the server on every value."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from math import inf, nextafter
from typing import Any

import pytest
import tiers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from odd_requests import mutated
from request_bodies import OPENAI
from test_openai_requests import assert_short
from test_response_format import ERRORS, MEANINGS

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.presets import REQUESTABLE
from nucleate.sampling_params import FIELDS
from nucleate.server.app import read_detokenize, read_tokenize
from nucleate.server.http_errors import http_error
from nucleate.server.limits import LIMITED_FIELDS, MAX_CHARACTERS, ServerLimits
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS, Endpoint
from nucleate.server.openai.fields import BEAM_PARAMETER_FIELDS
from nucleate.server.openai.messages import DETOKENIZE, TOKENIZE
from nucleate.server.openai.requests import NON_EMPTY, read_body
from nucleate.server.openai.responses import error_body
from nucleate.server.openapi_document import document

jsonschema = pytest.importorskip("jsonschema")

LIMITS = ServerLimits(max_logprobs=4, max_choices_per_request=4, max_completion_tokens=100)
DOCUMENT = document("tiny", "1.2.3", LIMITS)
SCHEMAS = DOCUMENT["components"]["schemas"]
REQUESTS = {"CompletionRequest": COMPLETIONS, "ChatRequest": CHAT}
DEFAULTS = nc.SamplingParams()
HELLO = [{"role": "user", "content": "Hello"}]
KINDS = pytest.mark.parametrize("kind", REQUESTS.values(), ids=lambda kind: kind.url)
LARGEST = sys.float_info.max


def valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def conforms(name: str, value: Any) -> None:
    rooted = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(rooted).validate(json.loads(json.dumps(value, allow_nan=False)))


def schema_of(kind: Endpoint) -> Any:
    return next(SCHEMAS[name] for name, one in REQUESTS.items() if one is kind)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("limits", [LIMITS, ServerLimits(), ServerLimits(max_logprobs=0)])
@pytest.mark.fast_cases(0)
def test_the_document_is_valid(limits: ServerLimits, keys: bool) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    made = document("tiny", "1.2.3", limits, needs_key=keys)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    validator.validate(made)
    for name, schema in made["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        if name.endswith("Request"):
            assert all(field.get("description") for field in schema["properties"].values()), name


def test_every_route_documents_its_responses() -> None:
    made = document("tiny", "1.2.3", LIMITS, needs_key=True)
    responses = {
        f"{method} {path}": sorted(operation["responses"])
        for path, methods in made["paths"].items()
        for method, operation in methods.items()
    }
    plain, probe = ["200", "401", "500"], ["200", "500", "503"]
    body = ["200", "400", "401", "404", "408", "413", "415", "500", "503", "504"]
    posted = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
    posted += ("/tokenize", "/detokenize", "/api/chat", "/api/generate", "/api/show")
    read = (
        "/v1/models",
        "/tokenizer_info",
        "/load",
        "/version",
        "/metrics",
        "/openapi.json",
        "/api/ps",
        "/api/tags",
        "/api/version",
    )
    assert responses == {
        **dict.fromkeys((f"post {path}" for path in posted), body),
        **dict.fromkeys((f"get {path}" for path in read), plain),
        **dict.fromkeys(("get /health", "get /ping", "post /ping"), probe),
        "post /api/pull": sorted([*body, "403", "502"]),
        "get /docs": ["200", "500"],
        "get /v1/models/{model}": ["200", "401", "404", "500"],
    }
    operations = [operation for methods in made["paths"].values() for operation in methods.values()]
    assert len({operation["summary"] for operation in operations}) == len(operations) == 25


def test_a_key_is_required_if_keys_are_set() -> None:
    open_, closed = (document("tiny", "1.2.3", LIMITS, needs_key=keys) for keys in (False, True))
    assert closed["security"] == [{"key": []}]
    assert closed["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert closed["paths"]["/health"]["get"]["security"] == []
    assert "security" not in closed["paths"]["/version"]["get"]
    assert "security" not in open_
    assert not any("401" in one["responses"] for methods in open_["paths"].values() for one in methods.values())


def test_streams_are_documented_as_events() -> None:
    for path in (COMPLETIONS.url, CHAT.url):
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        assert [*content] == ["application/json", "text/event-stream"]


def test_the_model_name_is_documented() -> None:
    assert DOCUMENT["info"]["version"] == "1.2.3"
    for name in (*REQUESTS, "TokenizeRequest", "DetokenizeRequest"):
        assert SCHEMAS[name]["properties"]["model"]["examples"] == ["tiny"]


@KINDS
def test_exactly_the_accepted_fields_are_documented(kind: Endpoint) -> None:
    schema = schema_of(kind)
    assert schema["properties"].keys() == kind.field_names
    assert schema["required"] == [*kind.prompt_fields]
    assert schema["additionalProperties"] == {"type": "null"}
    assert document("tiny", "1", LIMITS, ignore_unknown=True)["components"]["schemas"].keys() == SCHEMAS.keys()
    for name, field in schema["properties"].items():
        assert "default" not in field or valid(field, field["default"]), name
        assert valid(field, None) is (name not in kind.prompt_fields), name


@KINDS
def test_every_parameter_has_its_range_description_and_default(kind: Endpoint) -> None:
    for name, field in FIELDS.items():
        schema = schema_of(kind)["properties"][name]
        if name == "logprobs" and kind is CHAT:
            assert schema["type"] == ["boolean", "null"]
            continue
        assert field.help in schema["description"] or name == "seed"
        if name == "max_tokens":
            assert schema["default"] == {COMPLETIONS: 16, CHAT: 100}[kind]
        else:
            default = None if name in NON_EMPTY else field.default
            assert schema["default"] == json.loads(json.dumps(default, default=dict))
        if field.kind in ("float", "int") and not field.off:
            low = {"max_tokens": 0 if kind is COMPLETIONS else 1, "seed": -(2**63)}.get(name, field.low)
            low = -LARGEST if low is None and field.kind == "float" else low
            assert schema["exclusiveMinimum" if field.open_low else "minimum"] == low
            tightened = LIMITS.max_value(name) if name in LIMITED_FIELDS else None
            assert schema.get("maximum") == (tightened or field.high or (LARGEST if field.kind == "float" else None))


URLS = (COMPLETIONS.url, CHAT.url)
# Other fields that a value of a field requires.
WITH: Mapping[tuple[str, str], Mapping[str, Any]] = {
    (COMPLETIONS.url, "max_tokens"): {"echo": True},
    (COMPLETIONS.url, "min_tokens"): {"max_tokens": 100},
    (COMPLETIONS.url, "n"): {"best_of": 4},
    (CHAT.url, "top_logprobs"): {"logprobs": True},
    **{(url, "stream_options"): {"stream": True} for url in URLS},
    **{(url, name): {"use_beam_search": True, "max_tokens": 1} for url in URLS for name in BEAM_PARAMETER_FIELDS},
    **{(url, "dynamic_temperature_low"): {"dynamic_temperature_high": LARGEST} for url in URLS},
    **{(url, "dynamic_temperature_high"): {"dynamic_temperature_low": 0.0} for url in URLS},
}


def accepted(kind: Endpoint, field: str, value: Any) -> ParameterError | None:
    """The server's error for a value, or None."""
    body = {"messages": HELLO} if kind is CHAT else {"prompt": "Hello"}
    body = {**body, **({} if value is None else WITH.get((kind.url, field), {})), field: value}
    try:
        LIMITS.check_body(body, 10**6)
        read_body(LIMITS.cap_max_tokens(kind), body, DEFAULTS)
    except ParameterError as error:
        return error
    return None


def has_integral_float(value: Any) -> bool:
    """Whether the value contains a float that JSON Schema accepts as an integer."""
    if isinstance(value, float):
        return value.is_integer()
    if isinstance(value, dict):
        return any(map(has_integral_float, value.values()))
    return isinstance(value, list) and any(map(has_integral_float, value))


def beyond_schemas(field: str, value: Any) -> bool:
    """Whether the schema cannot express the server's rules for this field and value."""
    if field == "logit_bias" and isinstance(value, dict):
        numbers = [key for key in value if key.strip().isdecimal()]
        return any(key.endswith("\n") or len(key) > 20 or str(int(key)) != key for key in numbers)
    if field in ("min_tokens", "num_beam_groups") and isinstance(value, int):
        return value > (100 if field == "min_tokens" else 1)  # it must divide num_beams
    return field in (
        *("prompt", "messages", "chat_template_kwargs", "stream_options", "tools", "tool_choice", "structured_outputs"),
        *("response_format", "grammar", "grammar_lazy", "grammar_triggers", "pipeline"),
    )


def agree(kind: Endpoint, field: str, value: Any) -> None:
    value = json.loads(json.dumps(value))
    if field in kind.prompt_fields and value is None:
        return
    is_valid = valid(schema_of(kind)["properties"][field], value)
    why = accepted(kind, field, value)
    number = FIELDS[field].kind if field in FIELDS else ""
    if is_valid is (why is None) or ("float" not in number and has_integral_float(value)):
        return
    if (is_valid or field == "prompt") and beyond_schemas(field, value):  # ids are checked later
        return
    raise AssertionError(f"{field}={value!r:.200}: the schema says {is_valid}, the server {why!r:.200}")


def edges(field: str) -> list[Any]:
    """Values at the ends of the range of a field, and at those of all ranges."""
    powers = (2**power - less for power in (31, 53, 63, 64) for less in (0, 1))
    near: set[float] = {0, 1, -1, *powers, 10**30, 0.5, LARGEST, -LARGEST, 5e-324}
    parameter = FIELDS.get(field)
    ends = [] if parameter is None else [parameter.low, parameter.high, *parameter.off, parameter.default]
    ends += [LIMITS.max_value(field), LIMITS.max_choices_per_request]
    for end in (end for end in ends if isinstance(end, int | float) and not isinstance(end, bool)):
        near |= {end, end - 1, end + 1}
        if abs(end) < 2**53:
            near |= {int(end), nextafter(end, inf), nextafter(end, -inf), float(end)}
    return [*near, True, False, None, 10**400, -(10**400)]


TEXTS = ["", "a", "abcdef", "abcdefg", "ä" * 6, "😀" * 6, "canonical", "gumbel", "raw", "none", "text", "5"]
LISTS: list[Any] = [
    [],
    *(
        [item] * size
        for item, size in product(["a", "", "abc", 1, -1, 0, True, None, 2**70, 0.5, [1], [], ["a"]], [1, 3, 4, 5])
    ),
    *([1] * size for size in (6, 7)),
    *([[1] * size] for size in (6, 7)),
    *([text] for text in TEXTS),
    *(["a", [1]], ["a", 1], [1, "a"], ["top_p"], ["top_p", "top_p"], ["gumbel"], ["mask"], ["canonical"]),
    *([*REQUESTABLE], [*reversed(REQUESTABLE)], [*REQUESTABLE, "top_p"]),
]
FORMATS = [value for fields, _ in (*MEANINGS, *ERRORS) for value in fields.values()]
OBJECTS: list[Any] = [
    {},
    *(
        {key: value}
        for key, value in product(
            ["0", "5", "-1", "+1", "1.0", "", "a", " 1", "1_0"], [0, 1.5, -1e308, None, "1", True, 10**400]
        )
    ),
    *({str(key): 1.0 for key in range(size)} for size in (3, 4)),
    *({"include_usage": value} for value in (True, False, None, 1, 0)),
    {"include_obfuscation": False},
    {"include_usage": True, "include_other": True},
    {"type": "text"},
    {"type": "json_object"},
    {"type": "text", "more": 1},
    *FORMATS,
]
EVERYWHERE = [(kind, field) for kind in REQUESTS.values() for field in sorted(kind.field_names)]
FIELD = pytest.mark.parametrize(
    ("kind", "field"), EVERYWHERE, ids=[f"{kind.prompt_fields[0]}-{field}" for kind, field in EVERYWHERE]
)


def changed(kind: Endpoint, field: str) -> Iterator[Any]:
    """The values of a field in valid bodies, each changed in many ways."""
    rng = random.Random(field)
    for value in (body[field] for body in OPENAI[kind.url] if isinstance(body.get(field), dict | list)):
        yield from (value, *(mutated(value, rng) for _ in range(40)))


@pytest.mark.fast_cases(5)
@FIELD
def test_schema_and_server_agree_at_the_edges(kind: Endpoint, field: str) -> None:
    for value in (*edges(field), *TEXTS, *LISTS, *OBJECTS, *changed(kind, field)):
        agree(kind, field, value)


SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.integers(-3, 9) | st.text(max_size=8)
NUMBERS_ = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-3, 3)
VALUES = st.recursive(
    SCALARS | NUMBERS_ | st.sampled_from(TEXTS),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 99).map(str), inner, max_size=5)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=tiers.count(400, 4000), deadline=None)
@given(location=st.sampled_from(EVERYWHERE), value=VALUES | NUMBERS_)
def test_schema_and_server_agree(location: tuple[Endpoint, str], value: Any) -> None:
    assume(not (isinstance(value, dict) and any(key.isdigit() and not key.isascii() for key in value)))
    agree(*location, value)


def test_limits_that_no_schema_can_express_are_checked_by_the_server() -> None:
    for field in ("stop", "bad_words", "dry_sequence_breakers"):
        error = accepted(COMPLETIONS, field, ["a" * MAX_CHARACTERS, "b"])
        assert error is not None
        assert f"{MAX_CHARACTERS + 1} characters" in str(error)


@pytest.mark.slow
@settings(max_examples=tiers.count(125, 500), deadline=None)
@given(
    fields=st.dictionaries(
        st.sampled_from(sorted(TOKENIZE | DETOKENIZE)) | st.text(max_size=6),
        VALUES | st.just(HELLO) | st.lists(st.integers(0, 9), max_size=4) | st.sampled_from([{}, {"a": 1}]),
        max_size=3,
    )
)
def test_accepted_tokenize_bodies_match_the_schema(fields: dict[str, Any]) -> None:
    for name, read in {"TokenizeRequest": read_tokenize, "DetokenizeRequest": read_detokenize}.items():
        try:
            read(fields)
        except ParameterError as error:
            assert_short(http_error(error).body)
        else:
            assert valid(SCHEMAS[name], fields)


@pytest.mark.parametrize(("name", "known"), [("TokenizeRequest", TOKENIZE), ("DetokenizeRequest", DETOKENIZE)])
def test_tokenize_bodies_have_every_field(name: str, known: Mapping[str, Any]) -> None:
    assert SCHEMAS[name]["properties"].keys() == known.keys()


def test_error_responses_match_the_document() -> None:
    conforms("Error", error_body("what"))
    conforms("Error", error_body("what", "top_p", "code", "server_error"))
    for wrong in ({"error": {"message": "what"}}, {"error": "what"}, {"message": "what"}, {}):
        with pytest.raises(jsonschema.ValidationError):
            conforms("Error", wrong)
