"""``ChatAPI``: another API for chats, whose requests become OpenAI's and whose responses are made from their chunks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from nucleate.chat.messages import read_arguments
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS
from nucleate.server.chat_encoder import ChatEncoder, EncoderInput
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.endpoints import LONG_NAMES_CHAT
from nucleate.server.openai.fields import Value, invalid_value, reject_deep_nesting, unknown_field
from nucleate.server.openai.response_format import RENAMED

WITHOUT_HINT = (re.compile(r'; set on_unsupported="ignore" to ignore it( \(.*\))?'), "")
"""Removes from errors what the API has no field for."""
Generate = Callable[[bytes], Coroutine[Any, Any, None]]

ENGINE_FIELDS = ("priority", "truncate_prompt_tokens", "truncation_side")
"""Fields of completions that the other APIs have too, by the same names."""
_UNUSED = ("n", "max_tokens", "logprobs", "prompt_logprobs")  # there is one output, and other fields set these


class TranslationError(ParameterError):
    """A body cannot be translated. The error names its own fields."""


@dataclass(frozen=True)
class Translation:
    """A request as a body of one of OpenAI's endpoints. new_encoder: makes the encoder of the response."""

    body: Mapping[str, Any]
    new_encoder: Callable[[EncoderInput], ChatEncoder]
    url: str = LONG_NAMES_CHAT.url


@dataclass(frozen=True)
class ChatAPI:
    """An endpoint of another API.

    translate: translates a decoded body; raises TranslationError. renamed: patterns and replacements for the names of
    OpenAI's fields in later errors. known: the names of all fields. known_options: those of the field ``options``.
    """

    url: str
    translate: Callable[[Any], Translation]
    renamed: Sequence[tuple[re.Pattern[str], str]]
    known: Collection[str]
    known_options: Collection[str] = ()

    def drop_unknown(self, body: Any) -> tuple[Any, list[str]]:
        """Return a body without its unknown fields and options, and their names."""
        body, ignored = drop_unknown(body, self.known)
        if self.known_options and isinstance(body, Mapping) and "options" in body:
            options, names = drop_unknown(body["options"], self.known_options)
            body, ignored = {**body, "options": options}, [*ignored, *(f"options.{name}" for name in names)]
        return body, ignored

    def with_own_names(self, generate: Generate) -> Generate:
        """Return a function like this one, whose errors name the fields of this API."""

        async def renaming(data: bytes) -> None:
            try:
                await generate(data)
            except (ParameterError, HTTPError) as error:
                raise self.own_error(error) from None

        return renaming

    def own_error(self, error: ParameterError | HTTPError) -> Exception:
        """Return an error that names the fields of this API."""
        if isinstance(error, TranslationError):
            return error
        if isinstance(error, ParameterError):
            return ParameterError(self._own(error.field), self._own_message(str(error)))
        param = None if error.param is None else self._own(error.param)
        message = self._own_message(error.message)
        return HTTPError(error.status, message, code=error.code, param=param, kind=error.kind, headers=error.headers)

    def _own_message(self, message: str) -> str:
        text, got, value = message.partition(", got ")  # the value is the client's
        return self._own(text) + got + value

    def _own(self, text: str) -> str:
        for pattern, replacement in self.renamed:
            text = pattern.sub(replacement, text)
        return text


def translator(read: Callable[[Any], Value]) -> Callable[[Any], Value]:
    """Decorate a function that translates a body: it raises TranslationError, also for deep nesting."""

    @wraps(read)
    def wrapper(body: Any) -> Value:
        try:
            return reject_deep_nesting(read)(body)
        except ParameterError as error:
            raise TranslationError(error.field, str(error)) from None

    return wrapper


def sampling_fields(*without: str) -> frozenset[str]:
    """Return the names of the sampling parameters that are fields of these APIs. without: those that are not."""
    return frozenset(FIELDS).difference(_UNUSED, without)


def renames(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Compile patterns of names, which match whole names only."""
    return tuple((re.compile(rf"(?<![\w.]){pattern}(?!\w)"), replacement) for pattern, replacement in pairs)


def drop_unknown(body: Any, known: Collection[str]) -> tuple[Any, list[str]]:
    """Return an object without its unknown fields, and their names. Constraints of older versions of vLLM stay."""
    if not isinstance(body, Mapping):
        return body, []
    unknown = [name for name, value in body.items() if value is not None and name not in known and name not in RENAMED]
    return {name: value for name, value in body.items() if name in known or name in RENAMED}, unknown


def present_fields(body: Any, known: Collection[str], where: str = "", field: str = "") -> dict[str, Any]:
    """Return the entries of an object that are not null. Raises ParameterError for an unknown one.

    where: its place in the body; "": it is the body. field: the top-level field that it belongs to.
    """
    if not isinstance(body, Mapping):
        raise invalid_value(where or "body", "an object" if where else "a JSON object", body, field)
    for name, value in body.items():
        if value is not None and name not in known:
            error = unknown_field(name, known, where)
            raise ParameterError(field, str(error)) if field else error
    return {name: value for name, value in body.items() if value is not None}


def read_list(value: Any, where: str, field: str = "") -> list[Any]:
    """Return a value that must be a list. Raises ParameterError."""
    if not isinstance(value, list):
        raise invalid_value(where, "a list", value, field)
    return value


def read_text(given: Mapping[str, Any], name: str, where: str = "", field: str = "", default: str | None = None) -> str:
    """Return a field that must be a string; one that must be set, unless there is a default. Raises ParameterError."""
    value = given.get(name, default)
    if not isinstance(value, str):
        raise invalid_value(f"{where}.{name}" if where else name, "a string", value, field)
    return value


def read_name(given: Mapping[str, Any], name: str, where: str, field: str) -> str:
    """Return a field that must be a non-empty string, such as an id. Raises ParameterError."""
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise invalid_value(f"{where}.{name}", "a non-empty string", value, field)
    return value


def read_call(call_id: str, name: str, arguments: Any, where: str, field: str) -> dict[str, Any]:
    """Return a tool call of a message. where: the place of its arguments, an object or its JSON text."""
    try:
        function = {"name": name, "arguments": read_arguments(arguments, where)}
    except ParameterError as error:
        raise ParameterError(field, str(error)) from None
    return {"id": call_id, "function": function}
