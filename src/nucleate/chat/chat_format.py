"""``ChatFormat``: how a model writes tool calls and reasoning, by name or from its chat template; and its messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

from nucleate.chat.constraint import ChatConstraint
from nucleate.chat.output_parser import ChunkParser, OutputParser
from nucleate.chat.reasoning import FORMATS as REASONING_FORMATS
from nucleate.chat.reasoning import THINK, ReasoningFormat, ReasoningSection, ReasoningTracker
from nucleate.chat.tool_formats.deepseek import CALLS as DEEPSEEK_CALLS
from nucleate.chat.tool_formats.deepseek import CODE, DeepSeek
from nucleate.chat.tool_formats.harmony import CHANNEL, MESSAGE, Harmony
from nucleate.chat.tool_formats.hermes import START, Hermes, with_tools_as_text
from nucleate.chat.tool_formats.llama import PYTHON_TAG, Llama
from nucleate.chat.tool_formats.mistral import ARGUMENTS, CALLS, ID_LENGTH, Mistral
from nucleate.chat.tool_formats.tool_format import ToolFormat
from nucleate.chat.tools import Tool, ToolUse
from nucleate.parameters.parameter import ParameterError, invalid_value, read_json
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.tokenization.chat_template import ChatTemplateOptions, check_messages, render, turn_ends
from nucleate.tokenization.message_text import SpecialTexts, encode_split, mark_messages, take_marks
from nucleate.tokenization.tokenizer import Tokenizer

TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    "hermes": Hermes(),
    "llama3_json": Llama(),
    "mistral": Mistral(lists=True),
    "mistral_v11": Mistral(lists=False),
    "deepseek_v3": DeepSeek(blocks=True),
    "deepseek_v31": DeepSeek(blocks=False),
    "openai": Harmony(),
    "plain": Hermes(in_template=False),
}
"""By the names of vLLM's ``--tool-call-parser``, apart from ``plain`` and ``mistral_v11``."""


def is_harmony(template: str) -> bool:
    """Whether a chat template is that of GPT-OSS."""
    return CHANNEL in template and MESSAGE in template


def find_format(template: str, tokens: Collection[str]) -> str | None:
    """Return the name of the format for a chat template. tokens: the added tokens of the tokenizer.

    None: the template describes tools in a format that is not supported.
    """
    if is_harmony(template):
        return "openai"
    if DEEPSEEK_CALLS in template:
        return "deepseek_v3" if CODE in template else "deepseek_v31"
    if CALLS in template:
        return "mistral_v11" if ARGUMENTS in template or ARGUMENTS in tokens else "mistral"
    if START in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters": ' in template):
        return "llama3_json"
    return None if "tools" in template else "plain"


TOOL_CALL_PARSERS: Final = ("auto", *TOOL_FORMATS)
REASONING_PARSERS: Final = ("auto", "none", *REASONING_FORMATS)
NO_TOOLS: Final = ToolUse()
_BRACKETS: Final = frozenset("<>[]|｜")  # noqa: RUF001  # of markers; other added tokens are words and spaces


@dataclass(frozen=True)
class ChatFormat:
    """The formats of a model. tool_format: None if that of its template is not supported; reasoning: None without."""

    tokenizer: Tokenizer
    tool_format: ToolFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def find(cls, tokenizer: Tokenizer, tool_call_parser: str = "auto", reasoning_parser: str = "auto") -> ChatFormat:
        """Choose the formats by name, or (auto) from the chat template. Raises ParameterError for an unknown name."""
        for field, name, known in (
            ("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS),
            ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
        ):
            if name not in known:
                raise invalid_value(field, f"one of {', '.join(known)}", name)
        template = tokenizer.chat_template or ""
        automatic = find_format(template, tokenizer.special_texts)
        found = automatic if tool_call_parser == "auto" else tool_call_parser
        reasoning = _find_reasoning(template) if reasoning_parser == "auto" else REASONING_FORMATS.get(reasoning_parser)
        return cls(tokenizer, None if found is None else TOOL_FORMATS[found], reasoning)

    def render(
        self, messages: Sequence[Mapping[str, Any]], use: ToolUse, options: ChatTemplateOptions, template: str
    ) -> RenderedChat:
        """Render a conversation with its tools. Raises ParameterError."""
        tools = use.tools
        if tools and self.tool_format is None:
            message = "the tool calls of this model are in an unknown format; set tool_call_parser to the one to use"
            raise ParameterError("tools", message)
        own = template_messages(messages, template, self.tool_format, tools)
        if tools and self.tool_format is not None and self.tool_format.in_template:
            options = replace(options, variables={**options.variables, "tools": [tool.to_dict() for tool in tools]})
        special, of_answers = self._special_texts
        mark = ""
        if options.split_special_tokens:
            parts = [(one, of_answers if one["role"] == "assistant" else special) for one in own]
            (*own, variables), mark = mark_messages([*parts, (options.variables, special)])
            options = replace(options, variables=variables)
        text, splits = take_marks(render(template, own, options, self.tokenizer.special_tokens), mark, special)
        return RenderedChat(text, self, use, options.continue_final_message, splits)

    @cached_property
    def turn_ends(self) -> tuple[str, ...]:
        """The texts that end an answer in the chat template. Those of harmony end messages, not the answer."""
        template = self.tokenizer.chat_template
        if template is None or is_harmony(template):
            return ()
        return turn_ends(template, self.tokenizer.special_tokens)

    @cached_property
    def _special_texts(self) -> tuple[SpecialTexts, SpecialTexts]:
        """What is a control token in a message, and in one of the assistant: that may have reasoning and calls.

        These are the special tokens, and the other added tokens that the template writes, such as ``<tool_call>``. The
        markers of harmony end messages too, so that nobody may write them.
        """
        texts, template = self.tokenizer.pieces.tokens, self.tokenizer.chat_template or ""
        added = (texts[token] for token in self.tokenizer.added_ids if token in texts)
        found = {text for text in added if text in template and not _BRACKETS.isdisjoint(text)}
        found.update(self.tokenizer.special_texts)
        formats = () if is_harmony(template) else (self.reasoning, self.tool_format)
        markers = {token for one in formats if one is not None for token in one.special_tokens}
        return SpecialTexts(found), SpecialTexts(found - markers)


@dataclass(frozen=True)
class RenderedChat:
    """The prompt of a chat, and what its outputs look like.

    continues: outputs continue the final message. splits: places in the text where a special token is split, because it
    is in a message.
    """

    text: str
    format: ChatFormat
    use: ToolUse = NO_TOOLS
    continues: bool = False
    splits: tuple[int, ...] = ()

    def encode(self, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of the prompt. add_special_tokens: add those of the tokenizer. Raises ParameterError."""
        try:
            return encode_split(self.format.tokenizer, self.text, self.splits, add_special_tokens=add_special_tokens)
        except ParameterError as error:
            raise ParameterError("messages", f"messages: {error}") from None

    @property
    def _reasoning(self) -> ReasoningFormat | None:
        """The format of the section that an output may begin with."""
        found = self.format.reasoning
        if found is None or found.in_messages:
            return found
        if found.is_closed(self.text) or (self.continues and not found.is_open(self.text)):
            return None
        return found

    @property
    def _opened(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_open(self.text)

    @property
    def _tool_format(self) -> ToolFormat | None:
        """The format that outputs are parsed with."""
        own = self.format.tool_format
        if self.format.reasoning is not None and self.format.reasoning.in_messages:
            return TOOL_FORMATS["openai"]  # answers are in its messages too
        return own if self.use.callable_tools else None

    @property
    def section(self) -> ReasoningSection | None:
        """The reasoning section of the outputs."""
        reasoning = self._reasoning
        if reasoning is None:
            return None
        closing = reasoning.end
        if reasoning.in_messages:
            closing += "<|start|>assistant"
            required = self.use.mode == "required"
            closing += "<|channel|>commentary to=functions." if required else "<|channel|>final<|message|>"
        ids = tuple(self.format.tokenizer.encode(closing, add_special_tokens=False))
        return ReasoningSection(reasoning, self._opened, ids)

    @property
    def kept_token_ids(self) -> frozenset[int]:
        """The special tokens that stay in the text of the outputs, because they mark their parts."""
        formats = (self._reasoning, self._tool_format)
        markers = {token for one in formats if one is not None for token in one.special_tokens}
        if not markers:
            return frozenset()
        known = self.format.tokenizer.special_texts
        return frozenset(known[marker] for marker in markers if marker in known)

    def constraint(self, given: StructuredOutputs | None) -> ChatConstraint:
        """Return what constrains the outputs. given: the structured output of the request."""
        reasoning = self._reasoning
        special: Sequence[str] = ()
        if reasoning is not None:
            known = self.format.tokenizer.special_texts
            special = [marker for marker in reasoning.special_tokens if marker in known]
        return ChatConstraint(self.use, given, self.format.tool_format, reasoning, self._opened, special)

    def chunk_parser(self, max_reasoning_tokens: int | None = None) -> ChunkParser | None:
        """Return a parser for the chunks of the outputs; None if they are text only."""
        reasoning, tool_format = self._reasoning, self._tool_format
        if reasoning is None and tool_format is None:
            return None
        names = [tool.name for tool in self.use.callable_tools]
        new_parser = partial(OutputParser, reasoning, tool_format, names, opened=self._opened)
        section, tokenizer = self.section, self.format.tokenizer
        if section is None:
            return ChunkParser(new_parser, lambda: None)
        return ChunkParser(new_parser, partial(ReasoningTracker, section, tokenizer, max_reasoning_tokens))


def _find_reasoning(template: str) -> ReasoningFormat | None:
    if is_harmony(template):
        return REASONING_FORMATS["openai_gptoss"]
    for name in ("mistral", "seed_oss"):
        if REASONING_FORMATS[name].end in template:
            return REASONING_FORMATS[name]
    return THINK if THINK.end in template or THINK.start in template else None


def template_messages(
    messages: Sequence[Mapping[str, Any]], template: str, tool_format: ToolFormat | None, tools: Sequence[Tool]
) -> list[Mapping[str, Any]]:
    """Return messages as a template expects them.

    The arguments of tool calls become objects, the role developer becomes system unless the template has it, and tools
    become text if the template has none. Messages without tools are not changed. Raises ParameterError.
    """
    check_messages(messages)
    made = [_message(message, index, template, tool_format) for index, message in enumerate(messages)]
    has_tools = tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in made)
    if has_tools and (tool_format is None or not tool_format.in_template):
        return [*with_tools_as_text(made, tools)]
    return made


def _message(
    message: Mapping[str, Any], index: int, template: str, tool_format: ToolFormat | None
) -> Mapping[str, Any]:
    made = message
    if message.get("role") == "developer" and "developer" not in template:
        made = {**made, "role": "system"}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        made = {**made, "reasoning_content": reasoning, "thinking": reasoning}
    if message.get("tool_calls"):
        calls = read_calls(message["tool_calls"], f"messages[{index}].tool_calls")
        made = {**made, "tool_calls": [_template_call(call, tool_format) for call in calls]}
    if message.get("role") == "tool":
        if isinstance(message.get("content"), list):
            made = {**made, "content": "".join(part.get("text", "") for part in message["content"])}
        if isinstance(tool_format, Mistral) and isinstance(message.get("tool_call_id"), str):
            made = {**made, "tool_call_id": _mistral_id(message["tool_call_id"])}
    return made


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls of a message with their arguments as objects. where: their place. Raises ParameterError."""
    if not isinstance(value, list | tuple):
        raise invalid_value(where, "a list", value, "messages")
    made = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            allowed = 'an object such as {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
            raise invalid_value(f"{where}[{index}]", allowed, call, "messages")
        if not isinstance(call.get("id"), str | None):
            raise invalid_value(f"{where}[{index}].id", "a string", call["id"], "messages")
        arguments = read_arguments(function.get("arguments"), f"{where}[{index}].function.arguments")
        made.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return made


def _template_call(call: dict[str, Any], tool_format: ToolFormat | None) -> dict[str, Any]:
    if tool_format is not None and tool_format.arguments_are_text:
        function = call["function"]
        call = {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
    if isinstance(tool_format, Mistral) and isinstance(call.get("id"), str):
        call = {**call, "id": _mistral_id(call["id"])}
    return call


def read_arguments(value: Any, where: str) -> Any:
    """Return the arguments of a call as an object; they are a JSON text in OpenAI's API. where: their place."""
    if isinstance(value, str):
        try:
            value = read_json(value or "{}", where)
        except ParameterError as error:
            raise ParameterError("messages", str(error)[:300]) from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid_value(where, "a JSON object, or its text", value, "messages")
    return dict(value)


def _mistral_id(value: str) -> str:
    """Return an id of the form that Mistral's templates require: this one, or one derived from it."""
    if len(value) == ID_LENGTH and value.isascii() and value.isalnum():
        return value
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:ID_LENGTH]
