"""Ollama's API: the bodies and responses of ``/api/chat`` and ``/api/generate``.

Request bodies become those of chat completions; one without a prompt asks to load the model. Responses are one object,
or lines with an object each. ``nucleate.server.ollama_routes`` has the other endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, final

from nucleate.outputs import StepLogprobs, Usage
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.server import chat_api
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai import fields
from nucleate.server.openai.endpoints import TEXT as COMPLETION
from nucleate.server.openai.json_encoding import Encoded, dumps, json_parts
from nucleate.server.openai.messages import TOOL_FIELDS
from nucleate.server.openai.responses import JSON

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
        return {"model": self.given.head.model, "created_at": now()}

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


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


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
