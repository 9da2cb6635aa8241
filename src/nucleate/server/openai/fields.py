"""Fields of request bodies: each is declared once, for its check, its error and the OpenAPI document.

Numbers are declared as ``Parameter``, like those of ``SamplingParams``; the others as ``Field``, with a JSON schema.
``use_beam_search`` and its fields are those of vLLM: ``best_of`` (or ``n``) is the number of beams, and the ``n``
highest-scoring ones are returned. Sampling fields and other stop criteria are rejected; temperature may be 0 or 1, and
a seed has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from nucleate.engine.beam_params import BeamParams
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import Parameter, ParameterError, entries, invalid_value
from nucleate.sampling_params import FIELDS, SamplingParams

Schema = dict[str, Any]
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
ARRAY: Schema = {"type": "array"}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
LIST: Schema = {"type": "array", "items": OBJECT, "minItems": 1}
TEXT_OR_LIST: Schema = {"anyOf": [TEXT, LIST]}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def object_schema(*required: str, closed: bool = False, **properties: Schema) -> Schema:
    """Return the schema of an object. closed: it has no other properties."""
    made: Schema = {"type": "object", "properties": properties, "required": [*required]}
    return {**made, "additionalProperties": False} if closed else made


_TYPES: Mapping[str, tuple[type, str]] = {
    "boolean": (bool, "true or false"),
    "integer": (int, "an integer"),
    "string": (str, "a string"),
    "object": (Mapping, "an object"),
    "array": (list, "a list"),
}
"""Types of JSON: the type in Python, and the words of errors."""


class Field(NamedTuple):
    """A field of a request body. allowed: what its schema allows, in words; "": the words of its type.

    Of an unsupported field, the schema has the values without effect, and ``allowed`` is the end of its error.
    """

    schema: Schema
    help: str = ""
    allowed: str = ""

    def check(self, name: str, value: Any, field: str = "") -> Any:
        """Return a value. Raises ParameterError for another type, or out of range. field: see ``invalid_value``.

        Alternatives (``anyOf``), and the schemas of items and properties, are left to the parser of the field.
        """
        schema = self.schema
        if "enum" in schema:
            valid = any(json_equal(value, one) for one in schema["enum"])
        elif "type" not in schema or "items" in schema:
            return value
        else:
            kind = _TYPES[schema["type"]][0]
            valid = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
            if valid and "minimum" in schema:
                valid = schema["minimum"] <= value <= schema["maximum"]
            elif valid and "minLength" in schema:
                valid = len(value) >= schema["minLength"]
        if valid:
            return value
        if not self.is_supported:
            raise ParameterError(field or name, f"{name} is not supported, got {shown(value)}{self.allowed}")
        if self.allowed:
            words = self.allowed
        else:
            words = f"one of {', '.join(schema['enum'])}" if "enum" in schema else _TYPES[schema["type"]][1]
        raise invalid_value(name, words, value, field)

    @property
    def is_supported(self) -> bool:
        """Whether the field has an effect for some value, or is ignored for all."""
        return self.help != _NOT_SUPPORTED


Declared = Field | Parameter
_NOT_SUPPORTED = "Not supported."
ANY = Field({})
"""Of a field inside an object, which its parser checks."""
NO_EFFECT = Field({}, "No effect.")


def unsupported(*accepted: Any, instead: str = "") -> Field:
    """Declare an unsupported field. accepted: its values without effect. instead: the end of its error."""
    return Field({"enum": [*accepted]}, _NOT_SUPPORTED, instead)


def present_fields(
    body: Any, known: Collection[str], where: str = "", field: str = "", *, strict: bool = False
) -> dict[str, Any]:
    """Return the entries of an object, see ``entries``, checked if ``known`` declares them. Raises ParameterError."""
    given: dict[str, Any] = entries(body, known, where, field, strict=strict)
    for name, value in given.items():
        declared = known[name] if isinstance(known, Mapping) else None
        if isinstance(declared, Field):
            declared.check(f"{where}.{name}" if where else name, value, field)
    return given


FLAG, LISTED = Field(BOOLEAN), Field(ARRAY)


def read_text(given: Mapping[str, Any], name: str, where: str, field: str) -> str:
    """Return an entry that must be a string. where: the place of the object. Raises ParameterError."""
    text: str = Field(TEXT).check(f"{where}.{name}", given.get(name), field)
    return text


def read_name(given: Mapping[str, Any], name: str, where: str, field: str) -> str:
    """Return an entry that must be a non-empty string, such as an id. Raises ParameterError."""
    text: str = Field(NAME, "", "a non-empty string").check(f"{where}.{name}", given.get(name), field)
    return text


def read_parts(value: Any, where: str, field: str, kinds: Mapping[str, str], allowed: str) -> list[str]:
    """Return a text as the only one, or the texts of content parts. Raises ParameterError, also for images.

    kinds: the types of parts, each with the name of its entry that is the text. allowed: these types, in words.
    """
    if isinstance(value, str):
        return [value]
    texts = []
    for index, part in enumerate(Field(ARRAY, "", "a string or a list of parts").check(where, value, field)):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise invalid_value(f"{where}[{index}]", allowed, part, field)
        texts.append(read_text(part, kinds[kind], f"{where}[{index}]", field))
    return texts


Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def reject_deep_nesting(read: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Decorate a parser: it raises ParameterError instead of RecursionError for a deeply nested body."""

    @wraps(read)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        try:
            return read(*args, **kwargs)
        except RecursionError:
            raise ParameterError("body", "the body is nested too deeply") from None

    return wrapper


def are_token_ids(value: Sequence[Any]) -> bool:
    """Return whether all entries are integers."""
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def json_equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, 1 and true differ."""
    return type(value) is type(other) and value == other


USE_BEAM_SEARCH = "use_beam_search"
BEAM_PARAMETER_FIELDS: Mapping[str, Declared] = {
    "early_stopping": Field({"anyOf": [BOOLEAN, {"enum": ["never"]}]}, "With use_beam_search: when to stop."),
    **{
        name: replace(parameter, default=MISSING, help=f"With use_beam_search: {parameter.help}")
        for name, parameter in BeamParams.PARAMETERS.items()
        if name in ("length_penalty", "num_beam_groups", "diversity_penalty")
    },
}
"""Body fields that need ``use_beam_search``: fields of ``BeamParams``."""
BEAM_FIELDS: Mapping[str, Declared] = {
    USE_BEAM_SEARCH: Field(BOOLEAN, "Use beam search with best_of (or n) beams instead of sampling."),
    **BEAM_PARAMETER_FIELDS,
}

_SHARED_FIELDS = ("max_tokens", "structured_outputs", "stop_token_ids", "ignore_eos", "logprobs", "skip_special_tokens")
_OTHER_FIELDS = ("n", "seed")
_FIELD_NAMES = {"num_beams": "best_of", "num_return_sequences": "n"}


def read_beams(
    given: Mapping[str, Any], params: SamplingParams, *, best_of: int, stream: bool, echo: bool
) -> BeamParams | None:
    """Return the beam search parameters of a body, or None. params: its sampling parameters. Raises ParameterError."""
    if not given.get(USE_BEAM_SEARCH):
        for name in BEAM_PARAMETER_FIELDS:
            if name in given:
                raise ParameterError(name, f"{name} needs {USE_BEAM_SEARCH} to be true")
        return None
    if stream:
        why = "no token is final before the search ends"
        raise ParameterError("stream", f"stream must be false with use_beam_search: {why}")
    if echo and params.logprobs is not None:
        raise ParameterError("logprobs", "logprobs with echo are not supported with use_beam_search")
    for name in (name for name in FIELDS if name in given and name not in (*_SHARED_FIELDS, *_OTHER_FIELDS)):
        value = getattr(params, name)
        if value != FIELDS[name].default and not (name == "temperature" and value == 0):
            raise ParameterError(name, f"{name} is not supported with use_beam_search, got {shown(given[name])}")
    own = {name: given[name] for name in BEAM_PARAMETER_FIELDS if name in given}
    shared = {name: getattr(params, name) for name in _SHARED_FIELDS}
    try:
        return BeamParams(num_beams=best_of, num_return_sequences=params.n, **own, **shared)
    except ParameterError as error:
        name = _FIELD_NAMES.get(error.field, error.field)
        raise ParameterError(name, str(error).replace(error.field, name, 1)) from None


TRUNCATE, SIDE = "truncate_prompt_tokens", "truncation_side"
_COUNT = Field({"type": "integer", "minimum": -1, "maximum": 2**63 - 1}, "", "an integer >= -1 and < 2**63")


@dataclass(frozen=True)
class Truncation:
    """How many tokens of a prompt to keep: the first or the last ones. count: -1 for as many as fit the context."""

    count: int
    keeps_end: bool = True

    def apply(self, prompt_ids: list[int], max_prompt_tokens: int) -> list[int]:
        """Return the tokens that are kept. max_prompt_tokens: those that fit the context before the output."""
        count = max(1, max_prompt_tokens) if self.count == -1 else self.count
        return prompt_ids[-count:] if self.keeps_end else prompt_ids[:count]


def read_truncation(given: Mapping[str, Any], *, echo: bool, suffix: str | None) -> Truncation | None:
    """Read ``truncate_prompt_tokens`` and ``truncation_side``. echo: of a completion. Raises ParameterError."""
    if TRUNCATE not in given:
        return None
    count = _COUNT.check(TRUNCATE, given[TRUNCATE])
    if not count:
        raise invalid_value(TRUNCATE, "-1 or an integer >= 1", count)
    for other, is_set in (("echo", echo), ("suffix", suffix is not None)):
        if is_set:
            raise ParameterError(TRUNCATE, f"{TRUNCATE} cannot be combined with {other}")
    return Truncation(count, keeps_end=given.get(SIDE, "left") == "left")  # the side on which tokens are removed


def read_suffix(given: Mapping[str, Any], prompts: Sequence[str | tuple[int, ...]], *, echo: bool) -> str | None:
    """Read the text after the output; None for an empty one. Raises ParameterError."""
    suffix: str = given.get("suffix", "")
    if not suffix:
        return None
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ParameterError("suffix", "suffix needs prompts of text, not of token ids")
    for name, is_set in (("echo", echo), (USE_BEAM_SEARCH, given.get(USE_BEAM_SEARCH))):
        if is_set:
            raise ParameterError("suffix", f"suffix cannot be combined with {name}")
    return suffix


BUDGET = "thinking_token_budget"
COMMON: Mapping[str, Declared] = {
    "model": Field(NAME, "The model name.", "a non-empty string"),
    "stream": Field(BOOLEAN, "Stream the response as server-sent events."),
    "stream_options": Field(OBJECT, "With stream: include_usage, continuous_usage_stats."),
    "echo": Field(
        BOOLEAN, "Start each completion with its prompt; in a chat, with the final message if it is the assistant's."
    ),
    "priority": Field(
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        "Lower runs first; other than 0 needs --scheduling-policy priority.",
        "an integer >= -2**63 and < 2**63",
    ),
    TRUNCATE: Field(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**63 - 1}, {"enum": [-1]}]},
        "Keep so many tokens of the prompt; -1: as many as fit the context.",
    ),
    SIDE: Field(
        {"type": "string", "enum": ["left", "right"]},
        "The side on which tokens are removed; by default left.",
        "left or right",
    ),
    BUDGET: replace(FIELDS["max_reasoning_tokens"], name=BUDGET, default=MISSING, help="As max_reasoning_tokens."),
    "return_token_ids": Field(BOOLEAN, "Also return prompt_token_ids; token_ids are always returned."),
    "return_tokens_as_token_ids": Field(BOOLEAN, "In logprobs, write tokens as token_id:ID."),
    **BEAM_FIELDS,
}
"""Fields of both endpoints."""
BEST_OF = replace(
    FIELDS["n"],
    name="best_of",
    default=MISSING,
    help="Generate this many sequences and return the n with the highest mean logprob.",
)
TOP_LOGPROBS = replace(
    FIELDS["logprobs"], name="top_logprobs", optional=False, help="Number of top logprobs per token, with logprobs."
)
MAX_COMPLETION_TOKENS = replace(FIELDS["max_tokens"], name="max_completion_tokens")
