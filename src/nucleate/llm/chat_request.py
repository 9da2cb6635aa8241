"""Makes the engine request of a rendered chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.chat.chat_format import RenderedChat
from nucleate.chat.reasoning import effort_variables
from nucleate.chat.tool_choice import ToolUse
from nucleate.engine.request import Request
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.tokenization.chat_template import ChatTemplateOptions


class ChatValues(NamedTuple):
    """The arguments of a chat that are not sampling parameters."""

    use: ToolUse
    template_options: ChatTemplateOptions


_TOOL_NAMES = ("tools", "tool_choice", "parallel_tool_calls")
_TEMPLATE_NAMES = ("reasoning_effort", "chat_template_kwargs", "split_special_tokens")


def split_chat_values(values: Mapping[str, Any]) -> tuple[ChatValues, dict[str, Any]]:
    """Split keyword arguments into those of a chat and sampling parameters. Raises ParameterError."""
    use = ToolUse.read(*(values.get(name) for name in _TOOL_NAMES))
    effort, given, splits = (values.get(name) for name in _TEMPLATE_NAMES)
    if given is not None and not isinstance(given, Mapping):
        raise ParameterError("chat_template_kwargs", f"chat_template_kwargs must be a mapping, got {shown(given)}")
    if splits is None:
        splits = True
    elif not isinstance(splits, bool):
        raise ParameterError("split_special_tokens", f"split_special_tokens must be true or false, got {shown(splits)}")
    variables = {**({} if effort is None else effort_variables(effort)), **(given or {})}
    others = {name: value for name, value in values.items() if name not in (*_TOOL_NAMES, *_TEMPLATE_NAMES)}
    return ChatValues(use, ChatTemplateOptions(variables=variables, split_special_tokens=splits)), others


def chat_request(
    chat: RenderedChat, prompt_ids: Sequence[int], params: SamplingParams, prepare: Callable[[Request], object]
) -> Request:
    """Return the request of a chat, with its constraint. prepare: compiles a constraint, as ``Engine.prepare``.

    Raises ParameterError for a constraint that cannot be enforced.
    """
    given = params.structured_outputs
    if given is not None and chat.use.mode == "required":
        message = "structured_outputs cannot be combined with required tool calls"
        raise ParameterError("structured_outputs", message)
    constraint = chat.constraint(given)
    if constraint.constrains:
        spec = constraint.resolve(lambda one: prepare(_compilation(one)))
        if spec != given:
            params = params.replace(structured_outputs=spec)
    return Request(prompt_ids, params, kept_token_ids=chat.kept_token_ids, reasoning=chat.section)


def _compilation(spec: StructuredOutputs) -> Request:
    """Return a request to compile a constraint with."""
    return Request((0,), SamplingParams(structured_outputs=spec))
