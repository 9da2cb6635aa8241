"""The two OpenAI endpoints: the fields of their bodies that are supported, ignored or rejected.

The names and meanings of fields beyond OpenAI's are those of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from nucleate.chat.tools import MAX_NAME
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.fields import BEAM_FIELDS, json_equal, unknown_field
from nucleate.server.openai.messages import TEMPLATE_FIELDS, TOOL_FIELDS
from nucleate.server.openai.response_format import GRAMMAR_FIELDS, RENAMED, RESPONSE_FORMAT

_NO_TOOLS = ("none", "auto")  # accepted values without tools
_IGNORED = frozenset(  # for OpenAI's accounting, caches and queues
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)


_COMMON = frozenset(
    [
        *("model", "stream", "stream_options", "echo", "priority", "truncate_prompt_tokens", "truncation_side"),
        *("return_token_ids", "return_tokens_as_token_ids", RESPONSE_FORMAT, *GRAMMAR_FIELDS, *BEAM_FIELDS),
    ]
)
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "return_token_offsets": (False,),
    "watermarking": (False,),
    "stream_interval": (1,),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    **dict.fromkeys(("cache_salt", "repetition_detection", "request_id"), ()),
}


@dataclass(frozen=True)
class Endpoint:
    """A kind of request body: its fields besides those of SamplingParams."""

    url: str
    prompt_fields: tuple[str, ...]  #: a body has one of these
    max_tokens: int | None = None  #: default if neither body nor flags set it; None: up to the context length
    supported: frozenset[str] = frozenset()  #: supported fields of OpenAI's API
    ignored: frozenset[str] = frozenset()  #: fields without effect
    unsupported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    """Unsupported fields, and their values without effect, which are accepted."""
    max_tool_name: int = 64  #: maximum length of a tool's name
    vocab_size: int = 0  #: what -1 means for a number of logprobs; 0: -1 is not allowed

    @cached_property
    def field_names(self) -> frozenset[str]:
        """The names of all fields of a body."""
        return frozenset({*FIELDS, *self.prompt_fields, *self.supported, *self.ignored, *self.unsupported})

    @property
    def completes_prompts(self) -> bool:
        """Whether bodies have several prompts of text or token ids."""
        return bool(self.url) and "prompt" in self.prompt_fields

    def given_fields(
        self, body: Mapping[str, Any], *, ignore_unknown: bool = False
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of a body that have an effect, and the unknown ones that are ignored.

        A field that is null is absent, whatever its name. Raises ParameterError for an unsupported field and, unless
        ``ignore_unknown``, for an unknown one. A field that would constrain the output in older versions of vLLM is
        never ignored.
        """
        given, ignored = dict[str, Any](), list[str]()
        for name, value in body.items():
            if value is None:
                continue
            if name not in self.field_names:
                if name in RENAMED:
                    raise ParameterError(name, f"unknown field {shown(name)}; use {RENAMED[name]}")
                if not ignore_unknown:
                    raise unknown_field(name, self.field_names)
                ignored.append(name)
                continue
            accepted = self.unsupported.get(name)
            if accepted is None:
                given[name] = value
            elif not any(json_equal(value, one) for one in accepted):
                raise ParameterError(name, f"{name} is not supported, got {shown(value)}")
        return given, ignored


COMPLETIONS = Endpoint(
    "/v1/completions",
    ("prompt",),
    max_tokens=16,
    supported=_COMMON | {"best_of", "suffix"},
    ignored=_IGNORED,
    unsupported=MappingProxyType({**_UNSUPPORTED, "add_special_tokens": (True,), "prompt_embeds": ()}),
)
CHAT = Endpoint(
    "/v1/chat/completions",
    ("messages",),
    supported=_COMMON | {"max_completion_tokens", "top_logprobs", *TEMPLATE_FIELDS, *TOOL_FIELDS},
    ignored=_IGNORED,
    unsupported=MappingProxyType(
        {
            **_UNSUPPORTED,
            "functions": ([],),
            "function_call": _NO_TOOLS,
            "modalities": (["text"],),
            "documents": ([],),
            "mm_processor_kwargs": ({},),
            "media_io_kwargs": ({},),
            **dict.fromkeys(("chat_template", "audio", "prediction", "verbosity", "web_search_options"), ()),
        }
    ),
)
TEXT = replace(COMPLETIONS, url="text", max_tokens=None)
"""Completions of other APIs: without a default of ``max_tokens``."""
LONG_NAMES_CHAT = replace(CHAT, url="chat", max_tool_name=MAX_NAME)
"""Chats of other APIs, which allow longer names of tools."""
PLAIN = Endpoint("", ("prompt", "messages"))
"""A batch line without a URL: one prompt or chat, and fields of SamplingParams."""

ENDPOINTS: Mapping[str, Endpoint] = {endpoint.url: endpoint for endpoint in (COMPLETIONS, CHAT)}
"""OpenAI's endpoints by path."""
