"""The two OpenAI endpoints: the fields of their bodies that are supported, ignored or rejected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from nucleate.sampling_params import FIELDS
from nucleate.server.openai.beam_search import BODY_FIELDS as BEAM_FIELDS
from nucleate.server.openai.messages import TEMPLATE_FIELDS, TOOL_FIELDS
from nucleate.server.openai.response_format import RESPONSE_FORMAT

_NO_TOOLS = ("none", "auto")  # accepted values without tools
_IGNORED = frozenset(  # for OpenAI's accounting, caches and queues
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"]
)


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

    @cached_property
    def field_names(self) -> frozenset[str]:
        """The names of all fields of a body."""
        return frozenset({*FIELDS, *self.prompt_fields, *self.supported, *self.ignored, *self.unsupported})


COMPLETIONS = Endpoint(
    "/v1/completions",
    ("prompt",),
    max_tokens=16,
    supported=frozenset({"model", "stream", "stream_options", "best_of", "echo", RESPONSE_FORMAT, *BEAM_FIELDS}),
    ignored=_IGNORED,
    unsupported=MappingProxyType({"suffix": ("",)}),
)
CHAT = Endpoint(
    "/v1/chat/completions",
    ("messages",),
    supported=frozenset(
        [
            *("model", "stream", "stream_options", "max_completion_tokens", "top_logprobs"),
            *(RESPONSE_FORMAT, *TEMPLATE_FIELDS, *TOOL_FIELDS, *BEAM_FIELDS),
        ]
    ),
    ignored=_IGNORED,
    unsupported=MappingProxyType(
        {
            "functions": ([],),
            "function_call": _NO_TOOLS,
            "modalities": (["text"],),
            **dict.fromkeys(("audio", "prediction", "verbosity", "web_search_options"), ()),
        }
    ),
)
TEXT = replace(COMPLETIONS, url="text", max_tokens=None)
"""Completions of other APIs: without a default of ``max_tokens``."""
PLAIN = Endpoint("", ("prompt", "messages"))
"""A batch line without a URL: one prompt or chat, and fields of SamplingParams."""

ENDPOINTS: Mapping[str, Endpoint] = {endpoint.url: endpoint for endpoint in (COMPLETIONS, CHAT)}
"""OpenAI's endpoints by path."""
