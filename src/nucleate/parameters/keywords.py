"""Errors for unknown keyword arguments: they suggest the closest name, or the one for a name of another project."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from nucleate.parameters.parameter import ParameterError, unknown

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_CLOSE = 0.8
"""The similarity from which a name here is more likely meant than the same name of another class."""

_PEERS: Mapping[str, Mapping[str, str]] = {
    "SamplingParams": {
        "max_tokens": "max_new_tokens max_length max_completion_tokens n_predict",
        "min_tokens": "min_new_tokens",
        "n": "num_return_sequences best_of",
        "temperature": "temp do_sample greedy",
        "repetition_penalty": "repeat_penalty penalty_repeat rep_pen",
        "penalty_last_n": "rep_pen_range repeat_last_n",
        "no_repeat_ngram_size": "no_repeat_ngram",
        "stop": "stop_strings stop_words",
        "stop_token_ids": "eos_token_id eos_token_ids",
        "bad_words": "bad_words_ids",
        "logprobs": "top_logprobs",
        "prompt_logprobs": "logits_all",
        "seed": "random_seed",
        "min_keep": "min_tokens_to_keep",
        "mirostat_tau": "mirostat",
        "top_n_sigma": "nsigma",
        "structured_outputs": "response_format",
        "max_reasoning_tokens": "thinking_token_budget",
    },
    "BeamParams": {
        "max_tokens": "max_new_tokens max_completion_tokens",
        "num_beams": "use_beam_search beam_width num_beams",
        "num_return_sequences": "n",
        "stop_token_ids": "eos_token_id",
        "num_beam_groups": "num_beam_groups",
        "length_penalty": "length_penalty",
        "early_stopping": "early_stopping",
        "diversity_penalty": "diversity_penalty",
    },
    "StructuredOutputs": {
        "json_schema": "json schema guided_json",
        "regex": "guided_regex pattern",
        "choice": "guided_choice",
        "grammar": "guided_grammar gbnf",
        "whitespace": "disable_any_whitespace",
    },
    "LLM": {
        "model": "model_path pretrained_model_name_or_path",
        "tokenizer": "tokenizer_path",
        "device": "device_map",
        "dtype": "torch_dtype",
        "tensor_parallel": "tensor_parallel_size tp_size",
        "kv_cache_memory": "gpu_memory_utilization mem_fraction_static kv_cache_memory_bytes",
        "max_model_len": "context_length max_length n_ctx",
        "max_num_batched_tokens": "n_batch",
        "max_num_seqs": "n_seq_max max_running_requests",
        "speculative_config": "assistant_model speculative_model draft_model",
        "watermark": "watermarking_config",
    },
    "Speculation": {"num_speculative_tokens": "num_assistant_tokens num_draft_tokens"},
    "GgufOptions": {
        "n_gpu_layers": "n_gpu_layers",
        "n_threads": "n_threads",
        "cache_type_k": "type_k",
        "cache_type_v": "type_v",
        "flash_attn": "flash_attn",
    },
    "LLM.generate": {"sampling_params": "params sampling_params"},
    "LLM.chat": {"tools": "tools functions", "tool_choice": "tool_choice"},
    "Request": {"params": "sampling_params", "prompt_ids": "prompt prompt_token_ids input_ids", "id": "request_id"},
}
"""Other projects' names of a parameter: {class or method here: {name here: names there}}. Equal names belong there."""

PEER_NAMES: Mapping[str, Mapping[str, str]] = {
    owner: {other: own for own, others in names.items() for other in others.split()} for owner, names in _PEERS.items()
}
"""What other projects call a parameter: {class or method here: {name there: name here}}."""

WITHOUT_PARAMETER: Mapping[str, str] = {
    "trust_remote_code": "code that comes with a model is never run",
    "quantization": "the files of a model say how it is quantized",
    "enforce_eager": "models run eagerly",
    "attn_implementation": "the engine replaces the attention of the model",
    "swap_space": "preempted requests are computed again, not swapped",
    "enable_chunked_prefill": "chunked prefill is always on",
    "pad_token_id": "nothing is padded",
    "chat_format": "the chat template is that of the tokenizer",
    "stream": "LLM.stream and LLM.stream_chat return chunks",
}
"""Parameters of other projects that have no counterpart, and why."""

_USES: Mapping[str, str] = {
    "BeamParams": "BeamParams({}=...) for LLM.beam_search",
    "StructuredOutputs": "structured_outputs=StructuredOutputs({}=...)",
    "Engine": "LLM.new_engine({}=...)",
    "Speculation": "LLM(speculative_config=Speculation({}=...))",
    "GgufOptions": 'LLM(gguf_options={{"{}": ...}})',
}
"""How to pass a parameter of a class; by default ``Class(name=...)``."""

_classes: dict[str, type] = {}
"""The decorated classes by name."""


class UnknownKeywordError(ParameterError, TypeError):
    """A keyword argument that does not exist: a TypeError too, as Python raises. known: those that exist."""

    def __init__(self, field: str, message: str, known: Iterable[str] = ()) -> None:
        super().__init__(field, message)
        self.known = tuple(known)


def unknown_keyword(
    name: str, known: Iterable[str], aliases: Mapping[str, str] = MappingProxyType({})
) -> UnknownKeywordError:
    """The error for an unknown keyword argument: it suggests the right name, also of another class.

    aliases: as in ``with_suggestions``.
    """
    known = tuple(known)
    peers = [(owner, names[name]) for owner, names in PEER_NAMES.items() if name in names]
    near = [aliases[name]] if name in aliases else list(dict.fromkeys(own for _, own in peers if own in known))
    if not near and not difflib.get_close_matches(name, known, cutoff=_CLOSE):
        if name in WITHOUT_PARAMETER:
            return UnknownKeywordError(name, f"unknown parameter {name!r}: {WITHOUT_PARAMETER[name]}", known)
        others = [(owner, name) for owner, kind in _classes.items() if name in inspect.signature(kind).parameters]
        near = [_use(*one) for one in peers or reversed(others)]
    return UnknownKeywordError(name, str(unknown(name, known, near=near)), known)


def with_suggestions(decorated: Decorated, aliases: Mapping[str, str] = MappingProxyType({})) -> Decorated:
    """Decorate a function or a class, so that an unknown keyword argument is an ``UnknownKeywordError``.

    Of a class, this covers the constructor and the public methods with optional parameters, but not ``__call__``: the
    call takes about 0.1 us longer. aliases: other names of parameters, and the names here.
    """
    if not isinstance(decorated, type):
        return _wrapped(decorated, aliases)  # type: ignore[return-value]  # the same signature
    _classes[decorated.__name__] = decorated
    for name, value in [*vars(decorated).items()]:
        function = getattr(value, "__func__", value)  # of a class method
        if name == "__init__" or (not name.startswith("_") and _has_options(function)):
            wrapped = _wrapped(function, aliases)
            setattr(decorated, name, wrapped if function is value else type(value)(wrapped))
    return decorated


def _has_options(function: Any) -> bool:
    """Whether a member is a function with optional parameters."""
    if not inspect.isfunction(function):
        return False
    has_defaults = bool(function.__defaults__ or function.__code__.co_kwonlyargcount)
    return has_defaults or bool(function.__code__.co_flags & inspect.CO_VARKEYWORDS)


def _wrapped(function: Callable[..., Any], aliases: Mapping[str, str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            better = _better(error, function, kwargs, aliases)
            if better is None:
                raise
            raise better from None

    return call


def _better(
    error: TypeError, function: Callable[..., Any], given: Iterable[str], aliases: Mapping[str, str]
) -> UnknownKeywordError | None:
    """The error for an unknown name among the given ones; None if there is none, or the error says it already."""
    parameters = inspect.signature(function).parameters.values()
    known = [one.name for one in parameters if one.kind in _NAMED and one.name not in ("self", "cls")]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):  # the function has passed them on
        if isinstance(error, UnknownKeywordError) and error.field in given:
            return unknown_keyword(error.field, (*known, *error.known), aliases)
        return None
    wrong = next((name for name in given if name not in known), None)
    return None if wrong is None else unknown_keyword(wrong, known, aliases)


def _use(owner: str, name: str) -> str:
    """How to pass a parameter of a class or a method."""
    return _USES.get(owner, f"{owner}({{}}=...)").format(name)
