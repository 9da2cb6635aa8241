"""A parsed request body, its prompts as token ids, and the engine requests made from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nucleate.chat.chat_format import RenderedChat
from nucleate.chat.output_parser import ChunkParser
from nucleate.engine.beam_params import BeamRequest
from nucleate.engine.beam_scheduler import ValidatedBeamRequest
from nucleate.engine.request import Request, ValidatedRequest
from nucleate.llm import LLM
from nucleate.llm.chat_request import chat_request
from nucleate.server.http_errors import too_long, too_many_tokens
from nucleate.server.openai.requests import ParsedRequest
from nucleate.server.openai.responses import ResponseHead


class EncodedPrompt(NamedTuple):
    """A prompt as token ids. chat: the chat that it was made from."""

    token_ids: Sequence[int]
    chat: RenderedChat | None = None

    def engine_request(self, parsed: ParsedRequest, prepare: Callable[[Request], object]) -> Request | BeamRequest:
        """Return the engine request. prepare: compiles a constraint, see ``chat_request``. Raises ParameterError."""
        if self.chat is None or parsed.beam_params is not None:
            return parsed.engine_request(self.token_ids)
        request = chat_request(self.chat, self.token_ids, parsed.engine_params, prepare)
        return replace(request, priority=parsed.priority) if parsed.priority else request


@dataclass(frozen=True)
class GenerationCall:
    """A parsed request body and the engine requests made from it."""

    head: ResponseHead
    parsed: ParsedRequest
    prompts: Sequence[EncodedPrompt]
    prepared: Sequence[ValidatedRequest | ValidatedBeamRequest] = ()  #: the request of each, validated by the engine

    @property
    def prompt_token_ids(self) -> list[Sequence[int]]:
        """The token ids of each prompt."""
        return [one.token_ids for one in self.prompts]

    @property
    def sequences_per_prompt(self) -> int:
        """The number of sequences that finish per prompt."""
        return self.parsed.best_of if self.parsed.beam_params is None else self.parsed.params.n

    @property
    def sequence_counts(self) -> list[int]:
        """The number of sequences that each prompt runs, with their companions."""
        companions = [one.companion is not None for one in self.prepared if isinstance(one, ValidatedRequest)]
        return [self.parsed.best_of * (1 + has) for has in companions or [False] * len(self.prepared)]

    @property
    def structured_output_kind(self) -> str | None:
        """The kind of structured output, one of ``spec.KINDS``; None: unconstrained."""
        spec = self.parsed.params.structured_outputs
        if self.parsed.tool_use.callable_tools:
            return "structural_tag"
        return None if spec is None else spec.kind

    @property
    def structured_output_field(self) -> str | None:
        """The body field with the constraint, if there is one."""
        if self.parsed.tool_use.callable_tools:
            return "tools"
        return None if self.parsed.params.structured_outputs is None else self.parsed.requested_format.field

    def chunk_parser(self) -> ChunkParser | None:
        """Return a parser for the chunks of a chat; None if they are text only."""
        chat = self.prompts[0].chat
        return None if chat is None else chat.chunk_parser(self.parsed.params.max_reasoning_tokens)


def encode_prompts(llm: LLM, parsed: ParsedRequest, max_model_len: int) -> list[EncodedPrompt]:
    """Return the prompts, or the chat, as token ids.

    Raises HTTPError if a prompt fills the context, or if the body sets ``max_tokens`` to more than fits after it;
    ParameterError, ModelError.
    """
    if parsed.messages is not None:
        options = parsed.template_options
        chat = llm.render_chat(parsed.messages, parsed.tool_use, options)
        prompts = [EncodedPrompt(chat.encode(add_special_tokens=options.add_special_tokens), chat)]
    else:
        prompts = [EncodedPrompt(llm.encode(prompt, parsed.suffix)) for prompt in parsed.prompts]
    max_tokens, field = parsed.params.max_tokens, parsed.max_tokens_field
    if parsed.truncation is not None:
        room = max_model_len - (max_tokens or 1)
        prompts = [prompt._replace(token_ids=parsed.truncation.apply([*prompt.token_ids], room)) for prompt in prompts]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest >= max_model_len + parsed.prompt_only:  # without an output, the prompt may fill the context
        raise too_long("prompt" if parsed.messages is None else "messages", longest, max_model_len)
    if field is not None and max_tokens is not None and longest + max_tokens > max_model_len:
        raise too_many_tokens(field, max_tokens, longest, max_model_len)
    return prompts


def with_fill_stops(llm: LLM, parsed: ParsedRequest) -> ParsedRequest:
    """Return a request; one with a suffix also ends at the model's fill-in-the-middle tokens. Raises ParameterError."""
    return parsed if parsed.suffix is None else replace(parsed, params=llm.fill_params(parsed.params))
