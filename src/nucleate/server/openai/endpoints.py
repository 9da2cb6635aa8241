"""The two OpenAI endpoints: the fields of their bodies that are supported, ignored or rejected.

The names and meanings of fields beyond OpenAI's are those of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from nucleate.chat.tools import MAX_NAME
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, unknown
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.fields import (
    BEST_OF,
    BOOLEAN,
    COMMON,
    MAX_COMPLETION_TOKENS,
    NO_EFFECT,
    TOP_LOGPROBS,
    Declared,
    Field,
    unsupported,
)
from nucleate.server.openai.fields import TEXT as TEXT_SCHEMA
from nucleate.server.openai.messages import MESSAGES, TEMPLATE_FIELDS, TOOL_FIELDS
from nucleate.server.openai.response_format import DECLARED_FORMATS, RENAMED

_IGNORED = dict.fromkeys(  # for OpenAI's accounting, caches and queues
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"],
    NO_EFFECT,
)
_UNSUPPORTED: Mapping[str, Field] = {
    "spaces_between_special_tokens": unsupported(True),
    "detokenize": unsupported(True),
    "return_token_offsets": unsupported(False),
    "watermarking": unsupported(False),
    "stream_interval": unsupported(1),
    "logits_processors": unsupported([]),
    "vllm_xargs": unsupported({}),
    "kv_transfer_params": unsupported({}),
    **dict.fromkeys(("cache_salt", "repetition_detection", "request_id"), unsupported()),
}
_PROMPT = Field({}, "Text or token ids, or a list of either.")


@dataclass(frozen=True)
class Endpoint:
    """A kind of request body. fields: those besides SamplingParams, or with another meaning than there."""

    url: str
    prompt_fields: tuple[str, ...]  #: a body has one of these
    fields: Mapping[str, Declared] = field(hash=False)
    max_tokens: int | None = None  #: default if neither body nor flags set it; None: up to the context length
    max_tool_name: int = 64  #: maximum length of a tool's name
    vocab_size: int = 0  #: what -1 means for a number of logprobs; 0: -1 is not allowed

    @cached_property
    def field_names(self) -> frozenset[str]:
        """The names of all fields of a body."""
        return frozenset({*FIELDS, *self.fields})

    @property
    def completes_prompts(self) -> bool:
        """Whether bodies have several prompts of text or token ids."""
        return bool(self.url) and "prompt" in self.prompt_fields

    def given_fields(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a body that have an effect. Raises ParameterError for an unknown or unsupported one.

        A field that is null is absent, whatever its name.
        """
        given = dict[str, Any]()
        for name, value in body.items():
            if value is None:
                continue
            declared = self.fields.get(name)
            if declared is None and name not in FIELDS:
                if name in RENAMED:
                    raise ParameterError(name, f"unknown field {shown(name)}; use {RENAMED[name]}")
                raise unknown(name[:100], self.field_names, "field")
            if isinstance(declared, Field):
                declared.check(name, value)
                if not declared.is_supported:
                    continue
            given[name] = value
        return given


COMPLETIONS = Endpoint(
    "/v1/completions",
    ("prompt",),
    {
        "prompt": _PROMPT,
        **COMMON,
        **DECLARED_FORMATS,
        "best_of": BEST_OF,
        "suffix": Field(TEXT_SCHEMA, "Text after the output, for models with fill-in-the-middle tokens."),
        **_IGNORED,
        **_UNSUPPORTED,
        "add_special_tokens": unsupported(True),
        "prompt_embeds": unsupported(),
    },
    max_tokens=16,
)
CHAT = Endpoint(
    "/v1/chat/completions",
    ("messages",),
    {
        "messages": MESSAGES,
        **COMMON,
        **DECLARED_FORMATS,
        "max_completion_tokens": MAX_COMPLETION_TOKENS,
        "top_logprobs": TOP_LOGPROBS,
        "logprobs": Field(
            BOOLEAN,
            "Return logprobs; top_logprobs is the number.",
            "true or false (top_logprobs is the number)",
        ),
        "include_reasoning": Field(BOOLEAN, "Whether messages have their reasoning; by default true."),
        **TEMPLATE_FIELDS,
        **TOOL_FIELDS,
        **_IGNORED,
        **_UNSUPPORTED,
        "functions": unsupported([]),
        "function_call": unsupported("none", "auto"),  # accepted values without tools
        "modalities": unsupported(["text"]),
        "documents": unsupported([]),
        "mm_processor_kwargs": unsupported({}),
        "media_io_kwargs": unsupported({}),
        **dict.fromkeys(("chat_template", "audio", "prediction", "web_search_options"), unsupported()),
    },
)
TEXT = replace(COMPLETIONS, url="text", max_tokens=None)
"""Completions of other APIs: without a default of ``max_tokens``."""
LONG_NAMES_CHAT = replace(CHAT, url="chat", max_tool_name=MAX_NAME)
"""Chats of other APIs, which allow longer names of tools."""
PLAIN = Endpoint("", ("prompt", "messages"), {"prompt": _PROMPT, "messages": MESSAGES})
"""A batch line without a URL: one prompt or chat, and fields of SamplingParams."""

INVOCATIONS = "/invocations"
"""The path of Amazon SageMaker, for bodies of either endpoint."""
ENDPOINTS: Mapping[str, Endpoint] = {endpoint.url: endpoint for endpoint in (COMPLETIONS, CHAT)}
