"""A plug-in for the command line tool ``llm``: models of nucleate, with every sampling parameter as an option.

``llm`` finds it by its entry point. The bundled model is there without configuration; others are listed in the file
``nucleate-models.json`` in the folder of ``llm`` (``llm.user_dir()``): a folder, a Hugging Face id, or arguments of
``LLM`` by name of the model.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import llm

from nucleate.models import BUNDLED_MODEL

logger = logging.getLogger("nucleate")

FILE = "nucleate-models.json"


@llm.hookimpl
def register_models(register: Any) -> None:
    """Register a synchronous and an asynchronous model for each configured one."""
    for name, arguments in configured_models().items():
        register(NucleateModel(name, arguments), AsyncNucleateModel(name, arguments))


def configured_models() -> dict[str, dict[str, Any]]:
    """The arguments of ``LLM`` by name of the model. An invalid file is reported, and does not stop ``llm``."""
    path = llm.user_dir() / FILE
    given: Any = {}
    try:
        given = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        logger.warning("%s is not valid JSON: %s", path, error)
    if not isinstance(given, dict) or not all(isinstance(value, str | dict) for value in given.values()):
        rule = "must be an object with a folder, a Hugging Face id or arguments of LLM for each model name"
        logger.warning("%s %s", path, rule)
        given = {}
    found = {name: {"model": value} if isinstance(value, str) else value for name, value in given.items()}
    return {BUNDLED_MODEL: {}, **found}


class _Options:
    """The class ``Options`` of a model, created on first use: ``llm`` imports plug-ins for every command."""

    @cached_property
    def made(self) -> type[Any]:
        return options_class(llm.Options)

    def __get__(self, instance: object, owner: type[Any]) -> type[Any]:
        return self.made


class _Shared:
    """What synchronous and asynchronous models have in common."""

    can_stream = True
    supports_schema = True
    Options = _Options()

    def __init__(self, model_id: str, arguments: Mapping[str, Any]) -> None:
        self.model_id, self._arguments = model_id, json.dumps(arguments, sort_keys=True)

    def __str__(self) -> str:
        return f"nucleate: {self.model_id}"

    def _chunks(self, prompt: Any, response: Any) -> Iterator[str]:
        """Generate, and report usage, seed and finish reason to the response. Errors are those of ``llm``."""
        model, values = _loaded(self._arguments), given_values(prompt.options)
        if prompt.schema is not None:
            if "structured_outputs" in values:
                raise llm.ModelError("give either a schema or the option structured_outputs, not both")
            values["structured_outputs"] = {"json_schema": prompt.schema}
        messages = _messages(prompt)
        params = model.default_params.override(**values)
        if model.tokenizer.chat_template is not None:
            ids, chunks = model.encode_chat(messages), model.stream_chat(messages, params)
        elif [message["role"] for message in messages] == ["user"]:
            ids = model.encode(messages[0]["content"])
            chunks = model.stream(ids, params)
        else:
            reason = "has no chat template: it continues one prompt, without a system prompt or a conversation"
            raise llm.ModelError(f"{self.model_id} {reason}")
        count, last, logprobs = 0, None, list[Any]()
        for chunk in chunks:
            count, last = count + len(chunk.token_ids), chunk
            logprobs += chunk.logprobs or ()
            if chunk.text:
                yield chunk.text
        if last is None or last.finish_reason == "error":
            raise llm.ModelError(f"generation failed: {None if last is None else last.stop_reason}")
        response.set_usage(input=len(ids), output=count)
        response.response_json = {name: getattr(last, name) for name in ("seed", "finish_reason", "stop_reason")}
        if logprobs:
            response.response_json["logprobs"] = [
                {"token_id": step.chosen.token_id, "logprob": step.chosen.logprob} for step in logprobs
            ]


class NucleateModel(_Shared, llm.Model):
    """A model for ``llm``."""

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        yield from self._chunks(prompt, response)


class AsyncNucleateModel(_Shared, llm.AsyncModel):
    """The same, for asyncio. Concurrent prompts share one engine."""

    async def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> AsyncIterator[str]:
        chunks = self._chunks(prompt, response)
        while (text := await asyncio.to_thread(next, chunks, None)) is not None:
            yield text


@lru_cache(maxsize=1)
def _loaded(arguments: str) -> Any:
    """The model with these arguments, as JSON."""
    from nucleate.llm import LLM

    return LLM(**json.loads(arguments))


def _messages(prompt: Any) -> list[dict[str, str]]:
    """The conversation with its last prompt."""
    found = []
    for message in prompt.messages:
        texts = [part.text for part in message.parts if hasattr(part, "text")]
        if len(texts) < len(message.parts):
            raise llm.ModelError("this model takes text only, no attachments and no tools")
        found.append({"role": message.role, "content": "\n".join(texts)})
    return found


WITHOUT = ("n", "prompt_logprobs")
"""Fields that are no options: a response has one text."""


def options_class(base: type[Any]) -> type[Any]:
    """A subclass of the class ``Options`` of ``llm`` with a field per sampling parameter. Values are checked."""
    from pydantic import Field, create_model, field_validator

    from nucleate.sampling_params import FIELDS

    kinds: Mapping[str, Any] = {"float": float | None, "int": int | None, "bool": bool | None, "str": str | None}
    fields: dict[str, Any] = {
        name: (kinds.get(parameter.kind, Any), Field(default=None, description=parameter.described))
        for name, parameter in FIELDS.items()
        if name not in WITHOUT
    }

    def check(value: Any, info: Any) -> Any:
        return checked(info.field_name, value)

    validators: dict[str, Any] = {"check": field_validator(*fields, mode="before")(check)}
    made: type[Any] = create_model("Options", __base__=base, __validators__=validators, **fields)
    return made


def checked(name: str, value: Any) -> Any:
    """A value in plain JSON types, which ``llm`` logs. Text is parsed as on the command line. Raises ParameterError."""
    from nucleate.cli.sampling_flags import parse_text
    from nucleate.sampling_params import FIELDS, plain

    if value is None:
        return None
    return plain(parse_text(name, value) if isinstance(value, str) else FIELDS[name].check(value))


def given_values(options: Any) -> dict[str, Any]:
    """The sampling parameters among the options that are set."""
    from nucleate.sampling_params import FIELDS

    found = options.model_dump(exclude_none=True)
    return {name: value for name, value in found.items() if name in FIELDS}
