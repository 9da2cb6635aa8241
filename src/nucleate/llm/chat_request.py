"""Makes the engine request of a rendered chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nucleate.chat.chat_format import RenderedChat
from nucleate.chat.reasoning import effort_variables
from nucleate.engine.request import Request
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.sampling_params import SamplingParams
from nucleate.tokenization.chat_template import ChatTemplateOptions


def template_options(
    reasoning_effort: Any = None, chat_template_kwargs: Any = None, split_special_tokens: Any = None
) -> ChatTemplateOptions:
    """Return the options of the chat template from the arguments of a chat. Raises ParameterError."""
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise invalid_value("chat_template_kwargs", "a mapping", chat_template_kwargs)
    if not isinstance(split_special_tokens, bool | None):
        raise invalid_value("split_special_tokens", "true or false", split_special_tokens)
    effort = {} if reasoning_effort is None else effort_variables(reasoning_effort)
    variables = {**effort, **(chat_template_kwargs or {})}
    return ChatTemplateOptions(variables=variables, split_special_tokens=split_special_tokens is not False)


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
        spec = constraint.resolve(lambda one: prepare(Request((0,), SamplingParams(structured_outputs=one))))
        if spec != given:
            params = params.replace(structured_outputs=spec)
    return Request(
        prompt_ids,
        params,
        kept_token_ids=chat.kept_token_ids,
        reasoning=chat.section,
        turn_ends=chat.format.turn_ends,
    )
