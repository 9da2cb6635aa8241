"""Renders conversations with Jinja chat templates, as Transformers does; has those of well-known formats by name.

A template comes with a model and is not trusted: it runs in Jinja's sandbox, with limits on its size, its output and
its time. The limits are checked between pieces of output, at calls and at multiplications; a single filter cannot be
interrupted.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from nucleate.parameters.converters import one_line
from nucleate.parameters.parameter import ParameterError

if TYPE_CHECKING:
    import jinja2

    from nucleate.tokenization.tokenizer import Tokenizer

MAX_TEMPLATE: Final = 1_000_000  # characters
MAX_PROMPT: Final = 16_000_000  # characters
MAX_SECONDS: Final = 5.0

_END_MARK: Final = "\ue000end of the final message\ue001"
"""Marks the end of the final message in a rendered text; a template may trim the space after it."""

_TEXT = (
    "{% macro text(message) %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content or [] if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('the roles of this format are system, user and assistant, not ' ~ message.role) }}"
    "{% endfor %}"
)
"""The start of each named template: its only macro, and the check of the roles."""
_GEMMA = """{% set first = namespace(text='') %}\
{% for message in messages %}\
{% if message.role == 'system' %}{% set first.text = first.text ~ text(message) | trim ~ '\\n\\n' %}\
{% elif message.role == 'user' %}\
{{ '<start_of_turn>user\\n' ~ first.text ~ text(message) | trim ~ '<end_of_turn>\\n' }}\
{% set first.text = '' %}\
{% else %}{{ '<start_of_turn>model\\n' ~ text(message) | trim ~ '<end_of_turn>\\n' }}{% endif %}\
{% endfor %}\
{% if first.text %}{{ '<start_of_turn>user\\n' ~ first.text | trim ~ '<end_of_turn>\\n' }}{% endif %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
_MISTRAL = """{% set first = namespace(text='') %}\
{% for message in messages %}\
{% if message.role == 'system' %}{% set first.text = first.text ~ text(message) ~ '\\n\\n' %}\
{% elif message.role == 'user' %}{{ '[INST] ' ~ first.text ~ text(message) ~ '[/INST]' }}{% set first.text = '' %}\
{% else %}{{ ' ' ~ text(message) | trim ~ '</s>' }}{% endif %}\
{% endfor %}\
{% if first.text %}{{ '[INST] ' ~ first.text | trim ~ '[/INST]' }}{% endif %}"""
NAMED_TEMPLATES: Final[Mapping[str, str]] = {
    "chatml": """{% for message in messages %}\
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ text(message) ~ '<|im_end|>\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "llama3": """{% for message in messages %}\
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ text(message) | trim ~ '<|eot_id|>' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "gemma": _GEMMA,
    "mistral": _MISTRAL,
    "plain": """{% if messages[0].role != 'system' %}\
The following is a conversation between a user and an assistant. The assistant answers every question.{{ '\\n\\n' }}\
{% endif %}\
{% for message in messages %}\
{{ '' if message.role == 'system' else message.role | capitalize ~ ':\\n' }}{{ text(message) | trim ~ '\\n\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}""",
}
"""The Jinja sources of formats by name, after ``_TEXT``.

chatml: of Qwen and many others. gemma and mistral have no system role: its text precedes the next message of the user.
plain: for models that were not trained to chat, without special tokens; without a system message, its first line tells
the model what follows.
"""

_deadline: ContextVar[float] = ContextVar("deadline")


@dataclass(frozen=True)
class ChatTemplateOptions:
    """How a conversation becomes a prompt.

    add_generation_prompt: append the header of the assistant's next message. continue_final_message: end the prompt
    with the content of the final message, for the model to continue; excludes add_generation_prompt.
    add_special_tokens: add the tokenizer's special tokens to those of the template. variables: additional template
    variables. split_special_tokens: the texts of special tokens in messages, tools and variables are text, as with
    the argument of this name in Transformers; if false, they become special tokens.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)
    split_special_tokens: bool = True


DEFAULT_OPTIONS: Final = ChatTemplateOptions()


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    options: ChatTemplateOptions = DEFAULT_OPTIONS,
    special_tokens: Mapping[str, str] | None = None,
) -> str:
    """The prompt for a conversation.

    ``messages`` are ``{"role": ..., "content": ...}``, with content a string, a list of parts, or None where a message
    has ``tool_calls``; other keys are passed to the template unchanged. ``special_tokens``: template variables such as
    ``bos_token``, which take precedence over ``options.variables``.

    Raises ParameterError with one line: for an invalid message (with index and field), an invalid template, one that
    raises an error for the conversation, one that exceeds the limits above, and one that omits a final message to be
    continued.
    """
    check_messages(messages)
    if (size := len(template)) > MAX_TEMPLATE:
        raise ParameterError("messages", f"the chat template has {size} characters; allowed are {MAX_TEMPLATE}")
    variables = {**options.variables, **(special_tokens or {})}
    context: dict[str, object] = {"tools": None, "documents": None, **variables}  # templates test these against None
    if options.continue_final_message:
        messages = [*messages[:-1], _marked(messages[-1])]
    token = _deadline.set(time.monotonic() + MAX_SECONDS)
    try:
        add_generation_prompt = options.add_generation_prompt and not options.continue_final_message
        parts = _compiled(template).generate(messages=messages, add_generation_prompt=add_generation_prompt, **context)
        text = _joined(parts)
    except Exception as error:  # noqa: BLE001 - a template can raise any exception
        raise ParameterError("messages", f"chat template: {_line(error)}") from None
    finally:
        _deadline.reset(token)
    return _until_mark(text) if options.continue_final_message else text


def find_template(given: str | os.PathLike[str], tokenizer: Tokenizer) -> str:
    """The Jinja source of a chat template.

    given: a name in ``NAMED_TEMPLATES``, or a Jinja file. A named template begins with the BOS token if the tokenizer
    adds one to a text. Raises ParameterError, also for a file that is not a template.
    """
    if isinstance(given, str) and given in NAMED_TEMPLATES:
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
        return f"{_TEXT}{'{{ bos_token }}' if adds_bos else ''}{NAMED_TEMPLATES[given]}"
    allowed = f"{', '.join(NAMED_TEMPLATES)} or a Jinja file"
    if not isinstance(given, str | os.PathLike):
        raise ParameterError("chat_template", f"chat_template must be {allowed}, got {given!r:.60}")
    try:
        template = Path(given).expanduser().read_text("utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        near = difflib.get_close_matches(str(given).lower(), NAMED_TEMPLATES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        reason = getattr(error, "strerror", None) or "not a text in UTF-8"
        message = f"chat_template must be {allowed}, got {str(given)!r:.200} ({reason}){hint}"
        raise ParameterError("chat_template", message) from None
    if len(template) > MAX_TEMPLATE:
        message = f"chat_template: {given} has {len(template)} characters; allowed are {MAX_TEMPLATE}"
        raise ParameterError("chat_template", message)
    try:
        _compiled(template)
    except Exception as error:  # noqa: BLE001 - Jinja raises several
        raise ParameterError("chat_template", f"chat_template: {given}: {_line(error)}") from None
    return template


_MARKER = re.compile(r"\s*(<[^\s<>]+>|\[[^\s\[\]]+\])")
_ANSWER, _QUESTION = "nucleateanswer", "nucleatequestion"


def turn_ends(template: str, special_tokens: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The texts that end an answer in a chat template; none if a conversation does not show them.

    These are the markers after a message of the assistant, such as ``<|im_end|>`` and ``<|im_start|>``; without any,
    the lines that begin the next message, such as ``User:``. special_tokens: see ``render``.
    """
    roles = (("user", _QUESTION), ("assistant", _ANSWER), ("user", _QUESTION))
    try:
        text = render(template, [{"role": role, "content": content} for role, content in roles], DEFAULT_OPTIONS,
                      special_tokens)  # fmt: skip
    except ParameterError:
        return ()
    _, answer, rest = text.rpartition(_ANSWER)
    between, question, after = rest.partition(_QUESTION)
    if not answer or not question:
        return ()
    if found := _MARKER.match(between):
        following = _MARKER.match(between, found.end())
        return (found[1],) if following is None else tuple(dict.fromkeys((found[1], following[1])))
    if not any(character.isalpha() for character in between):
        return ()
    line = between.strip()
    breaks = between[: len(between) - len(between.lstrip())]
    own = [f"{breaks}{line}"]
    if "\n" in breaks:  # a model may write fewer line breaks, or go on with another answer
        generation = _until_newline(after)
        own += [f"\n{line}", *(f"{lead}{generation}" for lead in (breaks, "\n") if generation)]
    return tuple(dict.fromkeys(own))


def _until_newline(after: str) -> str:
    """The first line of text after a question: the header of an answer."""
    return next((line.rstrip() for line in after.strip().splitlines() if any(map(str.isalpha, line))), "")


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the mark at the end of its text."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": f"{content}{_END_MARK} "}
    last = content[-1] if content else None
    if not isinstance(last, Mapping) or not isinstance(last.get("text"), str):
        raise ParameterError("messages", "continue_final_message needs a final message that ends with text")
    return {**message, "content": [*content[:-1], {**last, "text": f"{last['text']}{_END_MARK} "}]}


def _until_mark(text: str) -> str:
    """Return a rendered text until the mark. If the template trims messages, the final one is trimmed at its end."""
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        message = "continue_final_message: the chat template does not contain the final message"
        raise ParameterError("continue_final_message", message)
    return before if after.startswith(" ") else before.rstrip()


def _joined(parts: Iterable[str]) -> str:
    pieces: list[str] = []
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_PROMPT:
            raise ValueError(f"the prompt grew beyond {MAX_PROMPT} characters")
        _check_time()
        pieces.append(part)
    return "".join(pieces)


def _check_time() -> None:
    if time.monotonic() > _deadline.get():
        raise ValueError(f"it took longer than {MAX_SECONDS} s")


def _line(error: Exception) -> str:
    number = getattr(error, "lineno", None)
    return f"line {number}: {one_line(error)}" if number else one_line(error)


def check_messages(messages: object) -> None:
    """Raise ParameterError for an invalid message, see ``render``."""
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", "a list with at least one message", messages)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _wrong(where, "an object with role and content", message)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _wrong(f"{where}.role", "a non-empty string", role)
        content = message.get("content")
        if isinstance(content, list):
            for place, part in enumerate(content):
                if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
                    raise _wrong(f"{where}.content[{place}]", "an object with a type", part)
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise _wrong(f"{where}.content", "a string or a list of parts", content)


def _wrong(where: str, allowed: str, value: object) -> ParameterError:
    return ParameterError("messages", f"{where}: must be {allowed}, not {value!r:.60}")


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks assistant text for training; it has no effect here."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            number = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(number)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def call(self, *args: Any, **kwargs: Any) -> Any:
            _check_time()
            return super().call(*args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_time()
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: object) -> NoReturn:
        raise jinja2.TemplateError(str(message))

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - the local date
    return environment


def _check_operands(operator: str, left: object, right: object) -> None:
    """Reject operations that create a huge value in one step: repeated text or lists, powers, formats with a width."""
    if operator == "*":
        length = next((len(side) for side in (left, right) if isinstance(side, (str, list, tuple))), 0)
        count = next((side for side in (left, right) if isinstance(side, int)), 0)
        too_large = length * count > MAX_PROMPT
    elif operator == "**":
        too_large = not all(isinstance(side, (int, float)) and abs(side) <= 1000 for side in (left, right))
    else:
        too_large = isinstance(left, str)
    if too_large:
        raise ValueError(f"the operator {operator} may not be used like this in a chat template")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes for <, > and & of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
