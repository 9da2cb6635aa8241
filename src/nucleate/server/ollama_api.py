"""Ollama's API: ``/api/chat`` and ``/api/generate``, and what clients ask about the server and its model.

Request bodies become those of chat completions; one without a prompt asks to load the model, which is loaded already.
Responses are one object, or lines with an object each. ``/api/pull`` downloads models where the operator allows it.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import Any, ClassVar, final

from nucleate.models.model_store import pull, read_hub_name, weights_size
from nucleate.models.protocol import ModelError
from nucleate.outputs import StepLogprobs, Usage
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.server import chat_api
from nucleate.server.generation_endpoint import answer
from nucleate.server.http_errors import HTTPError, http_error, unavailable
from nucleate.server.openai import fields
from nucleate.server.openai.endpoints import TEXT as COMPLETION
from nucleate.server.openai.json_encoding import Encoded, dumps, json_parts
from nucleate.server.openai.messages import TOOL_FIELDS
from nucleate.server.openai.responses import JSON
from nucleate.server.request_context import RequestContext, reply_with
from nucleate.server.service import Service

_FIELDS: Mapping[str, fields.Field] = {
    **dict.fromkeys(("role", "tool_name", "tool_call_id", "name", "images"), fields.ANY),
    **dict.fromkeys(("content", "thinking"), fields.Field(fields.TEXT)),
    "tool_calls": fields.Field(fields.ARRAY),
}


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raises ParameterError.

    Calls without an id get one, and so does the result that follows: that of the first open call of this name.
    """
    if not isinstance(value, list) or not value:
        raise invalid_value("messages", "a list with at least one message", value)
    open_calls: list[tuple[str, str]] = []  # names and ids
    return [_message(message, index, open_calls) for index, message in enumerate(value)]


def _message(message: Any, index: int, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    where = f"messages[{index}]"
    given = fields.present_fields(message, _FIELDS, where, "messages")
    check_no_images(given, where, "messages")
    role = fields.read_name(given, "role", where, "messages")
    content, calls = given.get("content", ""), given.get("tool_calls", [])
    made: dict[str, Any] = {"role": role, "content": content}
    if given.get("thinking"):
        made["reasoning_content"] = given["thinking"]
    for number, call in enumerate(calls):
        own = _call(call, f"{where}.tool_calls[{number}]", f"call_{index}_{number}")
        open_calls.append((own["function"]["name"], own["id"]))
        made.setdefault("tool_calls", []).append(own)
    if calls and role != "assistant":
        raise ParameterError("messages", f"{where}.tool_calls needs the role assistant")
    if calls and not content:
        made["content"] = None
    return made | _answered(given, where, open_calls) if role == "tool" else made


def _call(call: Any, where: str, new_id: str) -> dict[str, Any]:
    given = fields.present_fields(call, ("id", "type", "function"), where, "messages")
    known = ("name", "arguments", "index", "description")
    function = fields.present_fields(given.get("function"), known, f"{where}.function", "messages")
    name = fields.read_name(function, "name", f"{where}.function", "messages")
    call_id = fields.read_name(given, "id", where, "messages") if given.get("id") else new_id
    return chat_api.read_call(call_id, name, function.get("arguments"), f"{where}.function.arguments", "messages")


def _answered(given: Mapping[str, Any], where: str, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of a result: the name of the tool and the id of the call."""
    name = given.get("tool_name") or given.get("name")
    if name is not None and not isinstance(name, str):
        raise invalid_value(f"{where}.tool_name", "a string", name, "messages")
    made = {} if name is None else {"name": name}
    if given.get("tool_call_id"):
        return {**made, "tool_call_id": fields.read_name(given, "tool_call_id", where, "messages")}
    found = next((call for call in open_calls if name in (None, call[0])), None)
    if found is not None:
        open_calls.remove(found)
        made["tool_call_id"] = found[1]
    return made


def check_no_images(given: Mapping[str, Any], where: str, field: str) -> None:
    """Raise ParameterError if there are images."""
    if given.get("images"):
        raise ParameterError(field, f"{where}.images is not supported" if where else "images is not supported")


RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n"}
"""Options, and the sampling parameters that they are."""
IGNORED_OPTIONS = dict.fromkeys(
    [
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
    ],
    fields.NO_EFFECT,
)
"""Options for loading a model: this server has loaded it."""
UNLIMITED = (-1, -2)
"""Values of ``num_predict``: as many tokens as fit the context."""
_MIROSTAT = {1: "mirostat_v1", 2: "mirostat"}
MIROSTAT_TAU = 5.0
"""Ollama's default."""
LEVELS = ("low", "medium", "high", "max")


OPTIONS: Mapping[str, fields.Declared] = {
    **chat_api.sampling_fields("structured_outputs"),
    **dict.fromkeys((*RENAMED, "mirostat"), fields.ANY),
    **IGNORED_OPTIONS,
    "tfs_z": fields.unsupported(1, 1.0),
    "penalize_newline": fields.unsupported(True),
}
"""All options: Ollama's and every sampling parameter."""
_NOT_PASSED = frozenset({*RENAMED, *IGNORED_OPTIONS, "tfs_z", "penalize_newline"})


def read_options(value: Any) -> dict[str, Any]:
    """Return the sampling parameters of ``options``. Raises ParameterError."""
    given = fields.present_fields(value, OPTIONS, "options", "options")
    made = {name: item for name, item in given.items() if name not in _NOT_PASSED}
    for name, own in RENAMED.items():
        if name in given:
            if own in made:
                raise ParameterError("options", f"options.{name} and options.{own} are the same; set one of them")
            made[own] = given[name]
    if any(fields.json_equal(made.get("max_tokens"), one) for one in UNLIMITED):
        del made["max_tokens"]
    if fields.json_equal(made.get("seed"), -1):
        del made["seed"]
    return _with_mirostat(made) if "mirostat" in made else made


def _with_mirostat(given: dict[str, Any]) -> dict[str, Any]:
    """Return parameters for ``mirostat``: the version, 0 for off."""
    version = given.pop("mirostat")
    tau, eta = given.pop("mirostat_tau", MIROSTAT_TAU), given.pop("mirostat_eta", None)
    if fields.json_equal(version, 0):
        return given
    if not isinstance(version, int) or isinstance(version, bool) or version not in _MIROSTAT:
        raise invalid_value("options.mirostat", "0, 1 or 2", version, "options")
    name = _MIROSTAT[version]
    return {**given, f"{name}_tau": tau, **({} if eta is None else {f"{name}_eta": eta})}


def read_format(value: Any) -> dict[str, Any]:
    """Return the field for ``format``: "json" or a schema; "" for none. Raises ParameterError."""
    if value == "":
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(value, Mapping):
        raise invalid_value("format", "json or a JSON schema", value)
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": value}}}


NANOSECONDS = 10**9


@final
class OllamaEncoder(chat_api.ChatEncoder):
    """in_message: whether text, reasoning and calls are in a message, as in chats."""

    content_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, given: chat_api.EncoderInput, *, in_message: bool) -> None:
        super().__init__(given)
        self._in_message = in_message

    def _content(self, text: str, reasoning: str, calls: Sequence[chat_api.Block]) -> JSON:
        """Return the fields for the content."""
        thinking = {"thinking": reasoning} if reasoning else {}
        if not self._in_message:
            return {"response": text, **thinking}
        called = {"tool_calls": map(_call_body, calls)} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thinking, **called}}

    def body(self, usage: Usage) -> JSON:
        texts = {kind: [b.text for b in self.blocks.all if b.kind == kind] for kind in ("text", "reasoning")}
        calls = [block for block in self.blocks.all if block.kind == "call"]
        content = self._content("".join(texts["text"]), "".join(texts["reasoning"]), calls)
        steps = [step for block in self.blocks.all for step in block.logprobs]
        logprobs = {"logprobs": map(self.tokens.step, steps)} if steps else {}
        return {**self._head(), **content, **logprobs, **self._totals(usage)}

    def error(self, error: HTTPError) -> bytes:
        return (dumps({"error": error.body["error"]["message"]}) + "\n").encode()

    def _start(self) -> str:
        return ""

    def _idle(self) -> str:
        return self._line("", "", ())

    def _event(self, event: chat_api.BlockEvent) -> str:
        block = event.block
        if block.kind == "call":
            return self._line("", "", [block]) if event.kind == "close" else ""
        if event.kind != "add":
            return ""
        text, reasoning = (event.text, "") if block.kind == "text" else ("", event.text)
        return self._line(text, reasoning, (), event.logprobs)

    def _end(self, usage: Usage) -> str:
        return dumps({**self._head(), **self._content("", "", ()), **self._totals(usage)}) + "\n"

    def _line(
        self, text: str, reasoning: str, calls: Sequence[chat_api.Block], logprobs: Sequence[StepLogprobs] = ()
    ) -> str:
        steps = {"logprobs": map(self.tokens.step, logprobs)} if logprobs else {}
        line = {**self._head(), **self._content(text, reasoning, calls), **steps, "done": False}
        return "".join(json_parts(line)) + "\n"

    def _head(self) -> JSON:
        return {"model": self.given.head.model, "created_at": _now()}

    def _totals(self, usage: Usage) -> JSON:
        """Return the fields of the last object. Durations are in nanoseconds."""
        last, (total, first) = self.blocks.last, self.given.timing()
        return {
            "done": True,
            "done_reason": "length" if last is not None and last.finish_reason == "length" else "stop",
            "total_duration": int(total * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(first * NANOSECONDS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((total - first) * NANOSECONDS),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _pull_line(**content: str) -> bytes:
    return (dumps(content) + "\n").encode()


def _call_body(block: chat_api.Block) -> JSON:
    arguments = Encoded(block.arguments)
    return {"id": block.id, "function": {"index": block.call_index, "name": block.name, "arguments": arguments}}


CHAT_URL, GENERATE_URL = "/api/chat", "/api/generate"
CHAT_LINES, GENERATE_LINES = (partial(OllamaEncoder, in_message=one) for one in (True, False))
_COMMON: Mapping[str, fields.Declared] = {
    "model": fields.COMMON["model"],
    "stream": fields.Field(fields.BOOLEAN, "Stream the response as lines of JSON; the default."),
    "options": fields.Field(fields.OBJECT, "Ollama's options and every sampling parameter by its name."),
    "format": fields.Field({"anyOf": [{"enum": ["", "json"]}, fields.OBJECT]}, "json, or a JSON schema."),
    "think": fields.Field(
        {"enum": [True, False, *LEVELS]},
        "Whether, or how much, the model reasons.",
        f"true, false, or one of {', '.join(LEVELS)}",
    ),
    "logprobs": fields.Field(fields.BOOLEAN, "Return logprobs.", "true or false (top_logprobs is the number)"),
    "top_logprobs": fields.TOP_LOGPROBS,
    **chat_api.ENGINE_FIELDS,
    **dict.fromkeys(("keep_alive", "truncate", "shift"), fields.NO_EFFECT),
}
"""No effect have fields for loading models, and for prompts that do not fit the context, which are errors here."""
CHAT_FIELDS: Mapping[str, fields.Declared] = {
    **_COMMON,
    "messages": fields.Field(fields.LIST, "The messages, with role, content, thinking and tool_calls."),
    "tools": TOOL_FIELDS["tools"],
}
_EMPTY = fields.unsupported("", 0, False, [], {})
GENERATE_FIELDS: Mapping[str, fields.Declared] = {
    **_COMMON,
    "prompt": fields.Field(fields.NAME, "The prompt; a message of the user unless raw is set.", "a string"),
    "system": fields.Field(fields.TEXT, "A system message."),
    "suffix": fields.Field(fields.TEXT, "Text after the output."),
    "raw": fields.Field(fields.BOOLEAN, "Complete the prompt without the chat template."),
    **dict.fromkeys(("template", "context", "width", "height", "steps"), _EMPTY),
    "images": fields.Field({"anyOf": [_EMPTY.schema]}, _EMPTY.help),  # the error does not quote them
}


class LoadRequest(Exception):  # noqa: N818  # control flow
    """A request without a prompt, which only loads the model. content: the fields of its response."""

    def __init__(self, model: str | None, content: JSON) -> None:
        super().__init__(model)
        self.model, self.content = model, content


@chat_api.translator
def translate_chat(body: Any) -> chat_api.Translation:
    """Translate a body of ``/api/chat``. Raises ParameterError, and LoadRequest without messages."""
    given = fields.present_fields(body, CHAT_FIELDS)
    if given.get("messages", []) == []:
        raise LoadRequest(_common(given)["model"], {"message": {"role": "assistant", "content": ""}})
    made = {**_common(given), **_chat(given), "messages": read_messages(given.get("messages"))}
    if made["messages"][-1]["role"] == "assistant":  # the response continues it
        made["continue_final_message"] = True
    if "tools" in given:
        made["tools"] = given["tools"]
    return chat_api.Translation(made, CHAT_LINES)


@chat_api.translator
def translate_generate(body: Any) -> chat_api.Translation:
    """Translate a body of ``/api/generate``: a chat, or with ``raw`` or ``suffix`` a completion.

    Raises ParameterError, and LoadRequest without a prompt.
    """
    if isinstance(body, Mapping) and body.get("prompt") == "":
        body = {name: value for name, value in body.items() if name != "prompt"}
    given = fields.present_fields(body, GENERATE_FIELDS)
    if "prompt" not in given:
        raise LoadRequest(_common(given)["model"], {"response": ""})
    check_no_images(given, "", "images")
    prompt, system, suffix = given["prompt"], given.get("system", ""), given.get("suffix", "")
    made = _common(given)
    if not given.get("raw") and not suffix:
        messages = [{"role": "system", "content": system}] if system else []
        made["messages"] = [*messages, {"role": "user", "content": prompt}]
        return chat_api.Translation({**made, **_chat(given)}, GENERATE_LINES)
    if system or given.get("think"):
        name = "system" if system else "think"
        raise ParameterError(name, f"{name} cannot be combined with raw or suffix, which have no chat template")
    made |= {"prompt": prompt, "suffix": suffix or None}
    if given.get("logprobs"):
        made["logprobs"] = given.get("top_logprobs", 0)
    return chat_api.Translation(made, GENERATE_LINES, COMPLETION.url)


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    made = {"stream": given.get("stream", True), **read_options(given.get("options", {}))}
    made |= {name: given[name] for name in chat_api.ENGINE_FIELDS if name in given}
    model = given.get("model")
    made["model"] = model and model.removesuffix(":latest")
    return made | read_format(given.get("format", ""))


def _chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat only. think: whether the model reasons, or how much."""
    made = {name: given[name] for name in ("logprobs", "top_logprobs") if name in given}
    think = given.get("think")
    if isinstance(think, bool):
        made["chat_template_kwargs"] = {"enable_thinking": think, "thinking": think}
    elif think is not None:
        made["reasoning_effort"] = think
    return made


_RENAMES = chat_api.renames(
    (r"response_format\.json_schema(\.schema)?", "format"),
    (r"response_format", "format"),
    (r"reasoning_effort", "think"),
    *((own, name) for name, own in RENAMED.items()),
)
CHAT_API = chat_api.ChatAPI(CHAT_URL, translate_chat, (chat_api.WITHOUT_HINT, *_RENAMES), CHAT_FIELDS, OPTIONS)
GENERATE_API = chat_api.ChatAPI(
    GENERATE_URL,
    translate_generate,
    (chat_api.WITHOUT_HINT, *_RENAMES, *chat_api.renames((r"messages", "prompt"))),
    GENERATE_FIELDS,
    OPTIONS,
)


VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients check it."""
ARCHITECTURE = "nucleate"
SHOW: Mapping[str, fields.Declared] = {
    "model": fields.COMMON["model"],
    "name": fields.Field(fields.TEXT, "The model name, if model is not set."),
    **dict.fromkeys(("verbose", "system", "template", "options"), fields.NO_EFFECT),
}
PULL: Mapping[str, fields.Declared] = {
    "model": fields.Field(fields.TEXT, "The model: OWNER/NAME or OWNER/NAME:FILE on the Hugging Face hub."),
    "name": fields.Field(fields.TEXT, "The model, if model is not set."),
    "stream": fields.Field(fields.BOOLEAN, "Stream the progress as lines of JSON; the default."),
    "insecure": fields.NO_EFFECT,
}
PULL_SECONDS = 1.0
"""Time between two lines of progress."""
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""


class OllamaRoutes:
    """The handlers of these endpoints."""

    def __init__(self, service: Service) -> None:
        self._service, self._pulling = service, False
        llm = service.llm
        known = {
            name: getattr(llm.model, name, None) for name in ("architecture", "file_type", "num_parameters", "size")
        }
        is_file = llm.folder is not None and llm.folder.is_file()
        self._size = known["size"] or (weights_size(llm.folder) if llm.folder is not None and not is_file else 0)
        family, count = known["architecture"] or ARCHITECTURE, known["num_parameters"]
        self._details = {
            "parent_model": "",
            "format": "gguf" if is_file else "",
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e6:.0f}M"
            if count and count < 1e9
            else f"{count / 1e9:.1f}B"
            if count
            else "",
            "quantization_level": re.sub(r" - (\w)\w*", r"_\1", known["file_type"] or ""),  # Q4_K - Medium: Q4_K_M
        }

    def routes(self) -> dict[str, tuple[str, Callable[[RequestContext], Awaitable[None]]]]:
        return {
            "/api/tags": ("GET", partial(reply_with, lambda: {"models": self._models()})),
            "/api/ps": ("GET", partial(reply_with, self._running)),
            "/api/show": ("POST", partial(answer, self._service, known=SHOW, make=self._show)),
            "/api/pull": ("POST", self._pull),
            "/api/version": ("GET", partial(reply_with, lambda: {"version": VERSION})),
        }

    def with_loading(
        self, generate: Callable[[RequestContext], Awaitable[None]]
    ) -> Callable[[RequestContext], Awaitable[None]]:
        """Return the handler of generation requests, which also answers those that only load the model."""

        async def handle(context: RequestContext) -> None:
            try:
                await generate(context)
            except LoadRequest as load:
                self._service.check_model(load.model)
                head = {"model": self._service.name, "created_at": _now()}
                await context.reply(200, {**head, **load.content, "done": True, "done_reason": "load"})

        return handle

    def _models(self) -> list[dict[str, Any]]:
        return [self._model(name) for name in self._service.names]

    def _running(self) -> dict[str, Any]:
        """Return the served model under each of its names."""
        own = {"expires_at": NEVER, "size_vram": 0, "context_length": self._service.max_model_len}
        return {"models": [{**one, **own} for one in self._models()]}

    def _model(self, name: str) -> dict[str, Any]:
        digest = sha256(name.encode(errors="replace")).hexdigest()
        model = {"name": name, "model": name, "modified_at": self._created(), "size": self._size, "digest": digest}
        return {**model, "details": self._details}

    async def _pull(self, context: RequestContext) -> None:
        """Download a model; its progress are lines. A client that leaves does not end the download."""
        service = self._service
        with service.request_slot():
            data = await context.body(service.limits.max_request_body_bytes)
            body, ignored = service.known_fields(service.decode_body(data), PULL)
            context.report_ignored_fields(ignored)
            given = fields.present_fields(body, PULL)
            name = str(given.get("model") or given.get("name", ""))
            download = None if name.removesuffix(":latest") in service.names else self._download(name)
            if not given.get("stream", True):
                if download is not None:
                    await download
                await context.reply(200, {"status": "success"})
                return
            context.error_frame = lambda error: _pull_line(error=error.message)
            await context.start_response(200, content_type=OllamaEncoder.content_type)
            await context.write(_pull_line(status="pulling manifest"))
            while download is not None and not (await asyncio.wait({download}, timeout=PULL_SECONDS))[0]:
                await context.write(_pull_line(status=f"pulling {name}"))
            if download is not None:
                download.result()
                await context.write(_pull_line(status="verifying sha256 digest"))
            await context.write(_pull_line(status="success"), last=True)

    def _download(self, name: str) -> asyncio.Future[None]:
        """Begin a download on a thread that does not outlive the program. Raises HTTPError, ParameterError."""
        if not self._service.options.allow_pull:
            message = "This server does not download models (see --allow-pull)."
            raise HTTPError(403, message, code="pull_not_allowed", param="model")
        read_hub_name(name)
        if self._pulling:
            raise unavailable("Another model is being downloaded.", code="pull_in_progress")
        loop, self._pulling = asyncio.get_running_loop(), True
        future: asyncio.Future[None] = loop.create_future()

        def end(error: HTTPError | None) -> None:
            self._pulling = False
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # the client may have left: no warning that nobody read it

        def work() -> None:
            error: HTTPError | None = None
            try:
                pull(name, progress=False)
            except ModelError as failure:
                error = HTTPError(502, str(failure), code="pull_failed", param="model", kind="model")
            except Exception as failure:  # noqa: BLE001  # it must not be lost with its thread
                error = http_error(failure) or HTTPError(500, f"The download failed: {failure}", kind="internal")
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(end, error)

        threading.Thread(target=work, name="nucleate-pull", daemon=True).start()
        return future

    def _show(self, body: Any) -> dict[str, Any]:
        service, given = self._service, fields.present_fields(body, SHOW)
        name = given.get("model") or given.get("name", "")
        service.check_model(name.removesuffix(":latest") or None)
        chat, template = service.llm.chat_format, service.llm.tokenizer.chat_template
        capabilities = ["completion"]
        capabilities += ["tools"] if template and chat.tool_format is not None else []
        capabilities += ["thinking"] if chat.reasoning is not None else []
        return {
            "modelfile": "",
            "parameters": "",
            "template": template or "",
            "modified_at": self._created(),
            "details": self._details,
            "model_info": {
                "general.architecture": ARCHITECTURE,
                f"{ARCHITECTURE}.context_length": service.max_model_len,
                f"{ARCHITECTURE}.vocab_size": service.vocab_size,
            },
            "capabilities": capabilities,
        }

    def _created(self) -> str:
        return datetime.fromtimestamp(self._service.created, UTC).isoformat().replace("+00:00", "Z")
