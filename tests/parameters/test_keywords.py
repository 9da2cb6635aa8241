"""Unknown keywords of everything public: the error suggests the right name, also for names of other projects."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.models.gguf.gguf_options import GgufOptions
from nucleate.parameters import keywords
from nucleate.parameters.keywords import PEER_NAMES, WITHOUT_PARAMETER, UnknownKeywordError, with_suggestions
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS

sys.path.append(str(Path(__file__).parents[2] / "docs"))

from generate.api import members, resolve
from generate.api_names import PAGES

UNLISTED = (
    *("models.gguf.gguf_options.GgufOptions", "server.service.ServiceOptions"),
    *("structured_output.grammar_limits.GrammarLimits", "sharding.sharded_sampler.ShardedSampler"),
)
"""Classes that users construct, but that are on no page of the API reference."""
RESULTS = {
    *("Completion", "CompletionOutput", "CompletionChunk", "Usage", "ToolCall", "ToolCallDelta", "EngineOutput"),
    *("outputs.Finish", "outputs.Validation", "StepLogprobs", "TokenLogprob", "SamplerOutput", "BeamCompletion"),
    *("BeamOutput", "outputs.EngineStats", "outputs.SpeculativeStats", "Trace", "Comparison"),
    *("sampling.trace.TraceStep", "sampling.trace_reasons.StageChange", "sampling.history.History"),
    *("sampling.stage.RowStats", "sampling.stage.TokenInfo", "sampling.stage.SampledToken"),
    *("watermark.Detection", "parameters.parameter.Parameter", "models.protocol.ModelLimits"),
}
"""Values that calls return, some for each token. Only the library constructs them."""
EXEMPT = {"sampling.stage.param", "Completion.from_chunks"}
"""Functions in modules that may not import this one."""


def things() -> Iterator[tuple[str, Any]]:
    """Every public class and function by name."""
    names = [name for page in PAGES for name in page.names]
    for name in (*names, *UNLISTED):
        thing = resolve(name)
        if inspect.ismodule(thing):
            yield from ((f"{name}.{member}", getattr(thing, member)) for member in members(thing))
        else:
            yield name, thing
    yield from ((f"stages.{kind.__name__}", kind) for kind in STAGES.values())


def is_callable_with_keywords(function: Any) -> bool:
    given = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    return any(p.default is not p.empty or p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in given)


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public constructor, every public function and method with optional parameters."""
    for name, thing in things():
        if inspect.isclass(thing):
            is_abstract = inspect.isabstract(thing) or thing.__name__ in dir(nc.sampling.stage)  # type: ignore[attr-defined]
            is_protocol = getattr(thing, "_is_protocol", False)
            if name not in RESULTS and not is_abstract and not is_protocol and not issubclass(thing, BaseException):
                yield name, thing
            for member, value in vars(thing).items():
                function = getattr(value, "__func__", value)
                is_public = inspect.isfunction(function) and not member.startswith("_") and not is_protocol
                if is_public and f"{name}.{member}" not in EXEMPT and is_callable_with_keywords(function):
                    yield f"{name}.{member}", function
        elif inspect.isfunction(thing) and name not in EXEMPT and is_callable_with_keywords(thing):
            yield name, thing


def names_of(function: Callable[..., Any]) -> list[str]:
    given = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in given if p.kind in named and p.name not in ("self", "cls")]


def is_open(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


CALLABLES = dict(callables())
CLOSED = {name: one for name, one in CALLABLES.items() if not is_open(one)}


def open_calls(llm: nc.LLM) -> dict[str, tuple[Callable[..., Any], list[str]]]:
    """Functions that pass keywords on, as calls, and the names that they take."""
    fields, (chat, *_) = [*FIELDS], typing.get_overloads(inspect.unwrap(nc.LLM.chat))
    chats, hello = [*names_of(chat)[2:], *fields], [{"role": "user", "content": "Hello"}]
    return {
        "LLM.generate": (lambda **given: llm.generate("a", **given), ["suffix", "use_tqdm", *fields]),
        "LLM.stream": (lambda **given: llm.stream("a", **given), ["suffix", *fields]),
        "LLM.beam_search": (lambda **given: llm.beam_search("a", **given), ["use_tqdm", *names_of(nc.BeamParams)]),
        "LLM.chat": (lambda **given: llm.chat(hello, **given), chats),
        "LLM.stream_chat": (lambda **given: llm.stream_chat(hello, **given), chats),
        "LLM.chat_request": (lambda **given: llm.chat_request(hello, **given), chats),
        "LLM.new_engine": (llm.new_engine, names_of(nc.Engine)[2:]),
        "SamplingParams.replace": (nc.SamplingParams().replace, fields),
        "SamplingParams.override": (nc.SamplingParams().override, fields),
        "inspect": (lambda **given: nc.inspect(llm, "a", **given), ["params", *fields]),
    }


FREE = {"integrations.transformers.CustomGenerate.__call__", "server.request_log.RequestLog.request"}
FREE |= {"server.request_log.RequestLog.event"}
"""Functions that take any keyword."""


def check(call: Callable[..., Any], right: str) -> None:
    wrong = f"{right}x"
    with pytest.raises(UnknownKeywordError) as caught:
        call(**{wrong: 1})
    assert caught.value.field == wrong
    hint = str(caught.value).partition("; did you mean ")[2].partition("?")[0]
    assert str(caught.value).startswith(f"unknown parameter {wrong!r}; did you mean ")
    assert right in hint.split(" or "), str(caught.value)


@pytest.mark.parametrize("name", sorted(CLOSED))
def test_a_misspelled_keyword_suggests_the_right_name(name: str) -> None:
    function = CLOSED[name]
    for right in names_of(function):
        check(function, right)


@pytest.mark.slow
def test_functions_that_pass_keywords_on_suggest_the_names_of_both(llm: nc.LLM) -> None:
    pytest.importorskip("anywidget")
    calls = open_calls(llm)
    assert calls.keys() == CALLABLES.keys() - CLOSED.keys() - FREE
    for call, names in calls.values():
        for right in names:
            check(call, right)


def test_signatures_do_not_change() -> None:
    assert names_of(nc.sample)[:3] == ["logits_BV", "params", "step"]
    assert names_of(nc.Speculation) == [field.name for field in dataclasses.fields(nc.Speculation)]
    for name, function in CALLABLES.items():
        assert not {"args", "kwargs"} & {*inspect.signature(function).parameters}, name
        assert function.__name__ == name.rpartition(".")[2]


def resolve_owner(owner: str) -> Any:
    """Return a class, or a method as its first overload, by its name for users."""
    kind, _, method = owner.partition(".")
    found: Any = GgufOptions if kind == "GgufOptions" else getattr(nc, kind)
    if method:
        found = inspect.unwrap(getattr(found, method))
        found = (typing.get_overloads(found) or [found])[0]
    return found


@pytest.mark.parametrize(
    ("owner", "other", "own"), [(owner, *pair) for owner, names in PEER_NAMES.items() for pair in names.items()]
)
def test_names_of_other_projects_lead_to_parameters_that_exist(owner: str, other: str, own: str) -> None:
    known = names_of(resolve_owner(owner))
    assert own in known
    assert other == own or other not in known
    if owner not in ("LLM.generate", "LLM.chat"):
        assert other == own or f"did you mean {own}?" in str(keywords.unknown_keyword(other, known))
    for kind, name in re.findall(r"([A-Z]\w+(?:\.\w+)?)\((\w+)=", keywords._use(owner, own)):
        assert name in names_of(resolve_owner(kind)) or kind == "LLM.new_engine"
        assert name in names_of(nc.Engine) or kind != "LLM.new_engine"


def test_reasons_name_what_exists() -> None:
    for reason in (*WITHOUT_PARAMETER.values(), *keywords._USES.values()):
        for kind, member in re.findall(r"\b([A-Z]\w+)\.([a-z]\w+)", reason):
            assert hasattr(getattr(nc, kind), member)


@pytest.mark.parametrize(
    ("call", "wrong", "message"),
    [
        (nc.StructuredOutputs, "json", "; did you mean json_schema?"),
        (nc.LLM, "tensor_parallel_size", "; did you mean tensor_parallel?"),
        (nc.LLM, "n_ctx", "; did you mean max_model_len?"),
        (nc.LLM, "n_gpu_layers", '; did you mean LLM(gguf_options={"n_gpu_layers": ...})?'),
        (nc.LLM, "temperature", "; did you mean SamplingParams(temperature=...)?"),
        (nc.LLM, "enable_prefix_caching", "; did you mean LLM.new_engine(enable_prefix_caching=...)?"),
        (nc.LLM, "num_draft_tokens", "; did you mean LLM(speculative_config=Speculation(num_speculative_tokens=...))?"),
        (nc.LLM, "trust_remote_code", ": code that comes with a model is never run"),
        (nc.LLM, "zzz", ""),
        (nc.SamplingParams, "length_penalty", "; did you mean BeamParams(length_penalty=...) for LLM.beam_search?"),
        (nc.SamplingParams, "guided_regex", "; did you mean structured_outputs=StructuredOutputs(regex=...)?"),
        (nc.SamplingParams, "tp_size", "; did you mean LLM(tensor_parallel=...)?"),
        (nc.stages.TopP, "top_p", "; did you mean p? (known: min_keep, of_full_mass, p)"),
        (nc.Sampler(4).add, "prompt", "; did you mean prompt_ids? (known: eos_token_ids, index, output_ids, params,"),
        (nc.sample, "seed", "; did you mean SamplingParams(seed=...)? (known: backend, companion, logits_BV, mask,"),
    ],
)
def test_names_that_belong_elsewhere(call: Callable[..., Any], wrong: str, message: str) -> None:
    with pytest.raises(TypeError) as caught:  # as Python raises
        call(**{wrong: 1})
    assert isinstance(caught.value, nc.ParameterError)
    assert str(caught.value).startswith(f"unknown parameter {wrong!r}{message}")
    assert message or str(caught.value) == f"unknown parameter {wrong!r}"


def test_other_type_errors_stay() -> None:
    @with_suggestions
    def closed(a: int, b: int = 1) -> None:
        raise TypeError("of the body")

    @with_suggestions
    def opened(**values: int) -> None:
        nc.SamplingParams(temprature=1)

    for given in ({"a": 1}, {"a": 1, "b": 2}):
        with pytest.raises(TypeError, match=r"^of the body$"):
            closed(**given)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        closed(b=1)
    with pytest.raises(UnknownKeywordError) as caught:  # of another call than this one
        opened(temprature=2, a=1)
    assert "a" not in caught.value.known or caught.value.field == "temprature"
    with pytest.raises(UnknownKeywordError, match="unknown parameter 'temprature'; did you mean temperature"):
        opened(a=1)


def test_the_error_survives_pickling() -> None:
    with pytest.raises(UnknownKeywordError) as caught:
        nc.sample(np.zeros(4), (), stp=1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again), again.field, again.known) == (
        UnknownKeywordError,
        str(caught.value),
        "stp",
        caught.value.known,
    )
