"""``CompiledGrammar`` and ``Guide``: a compiled constraint, the state of one sequence under it, and its validation.

A guide has the token masks of a sequence. A text is validated against a whole JSON schema with the package jsonschema,
within a time limit. Validators that could take unbounded time are replaced: backtracking regular expressions, remote
references and references that expand exponentially. Patterns and formats mean the same as in token masks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from time import thread_time
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.outputs import Finish, Validation
from nucleate.parameters.converters import install_extra, shown
from nucleate.parameters.parameter import ParameterError, read_json
from nucleate.sampling.stage import Pipeline, Shift, Tap, Transform
from nucleate.structured_output.grammar_matcher import GrammarMatcher, InitialMatcher, MatcherError
from nucleate.structured_output.json_schema import FORMATS, applies_to_strings, escaped_step
from nucleate.structured_output.pattern_syntax import python_pattern
from nucleate.structured_output.spec import StructuredOutputs

CONSTRAINT_FAILED = (
    "the output cannot satisfy its structured-output constraint",
    "no token satisfies the structured-output constraint",
)
"""Prefixes of the error message of a sequence that its grammar ended, alone or together with other token bans."""
VALIDATION_SECONDS = 0.1
"""Maximum time to validate an output whose schema has ignored keywords, in seconds."""
MAX_SECONDS: Final = 1.0
MAX_ERRORS: Final = 10
UNTIMED_STEPS: Final = 1000
"""Steps of a validation before its time counts. So a pause, as for garbage collection, does not fail a short text."""
_VALUES = ("const", "enum", "default", "example", "examples")
_EVERY_STEP = ("$ref", "$dynamicRef", "$recursiveRef", "properties", "items", "allOf", "anyOf", "oneOf", "contains")


@final
@dataclass(frozen=True, eq=False, repr=False)
class CompiledGrammar:
    """A constraint compiled for one vocabulary.

    ignored: the schema keywords that are not enforced, and their places. unknown: words that are not keywords but look
    like misspelled ones. num_words: length W of a bitmask, in words of 32 tokens. num_bytes: approximate memory.
    """

    spec: StructuredOutputs
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]
    initial: InitialMatcher
    num_words: int
    num_bytes: int

    @cached_property
    def unchecked(self) -> tuple[str, ...]:
        """What neither masks nor ``validate`` check: formats, or the ignored keywords of a structural tag."""
        return self.ignored if self.spec.structural_tag or not self.ignored else unchecked_formats(self.spec.schema)

    def matcher(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """Create the matcher of a new sequence, on any thread. ignore_eos: allow EOS only if nothing else follows."""
        return GrammarMatcher(self.initial, ignore_eos=ignore_eos)

    def validate(self, text: str, seconds: float = MAX_SECONDS) -> list[str]:
        """Validate a JSON text against the whole schema, ignored keywords included; see ``validate``.

        Returns no errors for a structural tag, whose sections are not validated.
        """
        return [] if self.spec.structural_tag else validate(self.spec, text, seconds)


@final
class Guide:
    """The constraint of one sequence. ignore_eos: allow EOS only if no other token is allowed."""

    def __init__(self, grammar: CompiledGrammar, *, ignore_eos: bool = False) -> None:
        self.grammar, self.matcher = grammar, grammar.matcher(ignore_eos=ignore_eos)
        self._text: list[str] = []
        self._rejection: str | None = None  # the error if the matcher rejects a token that the mask allowed

    @property
    def error(self) -> str | None:
        """Why the sequence cannot continue, or None."""
        return self._rejection or self.matcher.error

    def mask(self) -> NDArray[np.int32]:
        """Return the bitmask [1, W] of the allowed next tokens; all zero after an error."""
        mask_1W = np.empty((1, self.grammar.num_words), np.int32)
        with suppress(MatcherError):  # stored in ``error``
            self.matcher.fill_bitmask(mask_1W[0])
        if self.error is not None:
            mask_1W[:] = 0
        return mask_1W

    def accept_token(self, token: int) -> bool:
        """Advance by a sampled token. Returns whether the output is complete. An error clears the next mask."""
        try:
            self.matcher.accept_token(token)
            return self.matcher.terminated
        except MatcherError:
            return False
        except ValueError as error:  # unexpected: end only this sequence
            self._rejection = str(error)
            return False

    def jump_forward_tokens(self) -> tuple[int, ...]:
        """Return the next tokens if they are determined, for jump-forward decoding."""
        try:
            return self.matcher.jump_forward_tokens()
        except MatcherError:
            return ()

    def add_text(self, text: str, finish: Finish | None) -> Validation | None:
        """Record generated text. At its end, return its validation if the schema has ignored or unknown keywords.

        Unknown keywords are named only: the text obeys the schema without them.
        """
        grammar = self.grammar
        if not (grammar.ignored or grammar.unknown):
            return None
        if grammar.ignored:
            self._text.append(text)
        if finish is None or finish.reason in ("abort", "error"):
            return None
        errors = grammar.validate("".join(self._text), VALIDATION_SECONDS) if grammar.ignored else ()
        return Validation((*grammar.ignored, *grammar.unknown), tuple(errors), grammar.unchecked)


def error_message(error: str, guide: Guide | None) -> str:
    """Return the error message for a sequence that has no token to sample. error: the error of the sampler."""
    if guide is None:
        return f"invalid logits: {error}"
    if guide.error is not None:
        return f"{CONSTRAINT_FAILED[0]}: {guide.error}"
    return f"{CONSTRAINT_FAILED[1]}: {error}"


def can_jump_forward(stages: Pipeline) -> bool:
    """Return whether jump-forward tokens need no logits: no stage could ban them, and none reports logprobs."""
    return not any(
        isinstance(stage, Tap | Transform) or (isinstance(stage, Shift) and stage.touches not in ("seen", "output"))
        for stage in stages
    )


Check = Callable[[Any, Any, Any, Any], Any]


def validate(spec: StructuredOutputs, text: str, seconds: float = MAX_SECONDS) -> list[str]:
    """Return the errors of a JSON text, at most ten, one line each; an empty list if it is valid.

    Formats are checked if token masks enforce them; see ``unchecked_formats`` for the others. A timeout counts as an
    error; seconds: of CPU time, of which all searches of patterns take as much at most. Raises ModuleNotFoundError if
    jsonschema is not installed, and ValueError for a constraint that is not JSON.
    """
    if not spec.kind.startswith("json"):
        raise ValueError(f"only JSON can be validated, not {spec.kind}")
    load_validator()
    try:
        value = read_json(text, "the text")
    except ParameterError as error:
        return [f"not JSON: {str(error)[:200]}"]
    try:
        found = islice(_validator(spec.schema, seconds).iter_errors(value), MAX_ERRORS)
        return [f"{error.json_path}: {shown(error.message)[1:-1]}" for error in found]
    except TimeoutError:
        return [f"validation took longer than {seconds} s"]
    except RecursionError:
        return ["the schema has an endless reference"]
    except Exception as error:  # noqa: BLE001 - jsonschema may raise anything for an invalid schema
        return [f"the schema cannot be applied: {type(error).__name__}: {shown(str(error))[1:-1]}"]


def unchecked_formats(schema: dict[str, Any]) -> tuple[str, ...]:
    """Return the formats in a schema that neither masks nor ``validate`` check, with their places."""
    found: dict[str, None] = {}
    stack: list[tuple[str, Any]] = [("", schema)]
    while stack:
        pointer, value = stack.pop()
        if isinstance(value, list):
            stack += [(f"{pointer}/{index}", item) for index, item in enumerate(value)][::-1]
        elif isinstance(value, dict):
            name = value.get("format")
            if isinstance(name, str) and name not in FORMATS and applies_to_strings(value):
                found[f"format {shown(name)}{f' at {shown(pointer)[1:-1]}' if pointer else ''}"] = None
            children = [(key, child) for key, child in value.items() if key not in _VALUES]
            stack += [(f"{pointer}/{escaped_step(key)}", child) for key, child in children][::-1]
    return tuple(found)


def load_validator() -> None:
    """Import the packages in advance. Raises ModuleNotFoundError, which names the package to install."""
    try:
        import jsonschema  # type: ignore[import-untyped]  # noqa: F401
        import referencing  # noqa: F401
        import regex  # type: ignore[import-untyped]  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"validation needs jsonschema: {install_extra('structured')}") from None


def _validator(schema: dict[str, Any], seconds: float) -> Any:
    import jsonschema
    import referencing

    validator_class = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    known, checks = validator_class.VALIDATORS, _Checks(seconds)
    validators = {name: checks.counted(known[name]) for name in _EVERY_STEP if name in known}
    validators |= {"pattern": checks.pattern, "patternProperties": checks.pattern_properties}
    validators |= {"format": checks.format, "additionalProperties": checks.additional_properties}
    if "unevaluatedProperties" in known and "patternProperties" in json.dumps(schema):
        validators["unevaluatedProperties"] = _unevaluated
    extended = jsonschema.validators.extend(validator_class, validators)
    return extended(schema, registry=referencing.Registry())


@final
class _Checks:
    """Validators for jsonschema, and the time limit of one validation.

    The limit does not depend on the load of the machine, nor on pauses of a short validation.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, thread_time() + seconds
        self._steps, self._searching = 0, 0.0

    def counted(self, check: Check) -> Check:
        """Return a validator that counts its calls as steps."""

        def checked(*arguments: Any) -> Iterator[Any]:
            self._count_step()
            yield from check(*arguments) or ()

        return checked

    def pattern(self, validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not self._search(pattern, instance):
            yield _error(f"{instance!r} does not match {pattern!r}")

    def format(self, validator: Any, name: Any, instance: Any, _: Any) -> Iterator[Any]:
        known = FORMATS.get(name) if isinstance(name, str) and validator.is_type(instance, "string") else None
        too_long = known is not None and len(instance) > (known.max_length or len(instance))
        if known is not None and (too_long or not self._search(known.search_pattern, instance)):
            yield _error(f"does not have the format {name!r}: {instance!r}")

    def pattern_properties(self, validator: Any, patterns: dict[str, Any], instance: Any, _: Any) -> Iterator[Any]:
        for pattern, subschema in patterns.items() if validator.is_type(instance, "object") else ():
            for name, value in instance.items():
                if self._search(pattern, name):
                    yield from validator.descend(value, subschema, path=name, schema_path=pattern)

    def additional_properties(self, validator: Any, rest: Any, instance: Any, schema: Any) -> Iterator[Any]:
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in instance.items() if validator.is_type(instance, "object") else ():
            if name in named or any(self._search(pattern, name) for pattern in patterns):
                continue
            if isinstance(rest, dict):
                yield from validator.descend(value, rest, path=name)
            elif rest is False:
                yield _error(f"additional property {name!r} is not allowed")

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > UNTIMED_STEPS and thread_time() > self._end:
            raise TimeoutError

    def _search(self, pattern: str, text: str) -> bool:
        import regex

        self._count_step()
        compiled = regex.compile(python_pattern(pattern), regex.V1)
        if (left := self._seconds - self._searching) <= 0:
            raise TimeoutError
        begin = thread_time()
        found = compiled.search(text, timeout=left) is not None
        self._searching += thread_time() - begin
        return found


def _unevaluated(*_: Any) -> Any:
    raise ValueError("unevaluatedProperties with patternProperties cannot be validated")


def _error(message: str) -> Any:
    import jsonschema

    return jsonschema.ValidationError(message)
