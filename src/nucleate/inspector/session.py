"""The inspector of one model, independent of how its front end is connected: web page or notebook widget.

It runs requests, whose outputs are events: the start, the tokens with their place in the model's distribution, the end.
It answers questions about their steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, final

import numpy as np

from nucleate.engine.request import Request, SamplingInputs, ValidatedRequest
from nucleate.inspector.draws import MAX_DRAWS, draw_counts, draws_view
from nucleate.inspector.protocol import branch_tokens, describe_stages, read_generate, read_step, run_params
from nucleate.inspector.store import InspectionStore, Prepare, Run, StepInputs, step_inputs
from nucleate.inspector.trace_view import MAX_TOKENS as MAX_SHOWN
from nucleate.inspector.trace_view import trace_view
from nucleate.jit.kernel_libraries import compiled
from nucleate.llm import LLM
from nucleate.outputs import CompletionChunk, Usage
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.host_batch import row_path
from nucleate.sampling.noise import fresh_seed
from nucleate.sampling.presets import ORDER_PARAMETERS, PRESETS, with_mask
from nucleate.sampling.reference import RowError
from nucleate.sampling.stage import shape_of
from nucleate.sampling.trace import trace
from nucleate.sampling_params import SamplingParams
from nucleate.speculative.config import COUPLED
from nucleate.tokenization.tokenizer import token_text

Event = dict[str, Any]


class TokenStatistics(NamedTuple):
    """Where a token is in the distributions of its step; see the fields of the same names in the event."""

    probability: float  #: in the distribution from which it was sampled
    model_probability: float  #: in the model's distribution, before all stages
    surprisal: float  #: -log(model_probability), in nats
    entropy: float  #: of the model's distribution, in nats
    rank: int  #: in the model's distribution, from 1
    kept: int  #: the tokens that survived all stages


def token_statistics(run: Run, position: int, token: int, inputs: SamplingInputs) -> TokenStatistics:
    x_V = inputs.logits
    top = float(x_V.max())
    d_V = (x_V - np.float32(top)).astype(np.float32, copy=False)
    e_V = np.exp(d_V)
    mass = float(e_V.sum(dtype=np.float64))
    finite = d_V > -np.inf
    moment = float((e_V * np.where(finite, d_V, np.float32(0))).sum(dtype=np.float64))
    log_p = float(x_V[token]) - top - float(np.log(mass))
    rank = 1 + int(np.count_nonzero(x_V > x_V[token])) + int(np.count_nonzero(x_V[:token] == x_V[token]))
    kept, probability = _sampled_from(run, position, token, inputs)
    entropy = max(0.0, float(np.log(mass)) - moment / mass)
    return TokenStatistics(probability, float(np.exp(log_p)), -log_p, entropy, rank, kept)


def _sampled_from(run: Run, position: int, token: int, inputs: SamplingInputs) -> tuple[int, float]:
    """The number of tokens that survived all stages, and the probability of the sampled one among them."""
    output_ids = np.array(run.token_ids[:position], np.int64)
    past = History(np.array(run.prompt_ids, np.int64), output_ids, inputs.mask)
    stages = inputs.stages if inputs.mask is None else with_mask(inputs.stages)
    u = reference.xtc_uniform(stages, run.seed, position)
    ids_N, x_N, _ = row_path(compiled("auto", len(inputs.logits))).survivors(inputs.logits, stages, past, u)
    place = np.flatnonzero(ids_N == token)
    e_N = np.exp(x_N - x_N.max())
    return len(ids_N), float(e_N[place[0]] / e_N.sum()) if len(place) else 0.0


MAX_TOKENS, DEFAULT_TOKENS = 16_384, 256
"""The most tokens of an inspected output, and the default of ``max_tokens``."""
DEFAULT_TOP, DEFAULT_DRAWS_TOP = 40, 20
"""Tokens in a trace and in a comparison of draws, by default."""


class Inspector:
    """Starts inspected requests, and answers questions about their steps. Its methods may run on any thread.

    prepare: ``Engine.prepare`` of the engine that runs the requests. defaults: the parameters that a request does not
    set.
    """

    def __init__(
        self, llm: LLM, prepare: Prepare, store: InspectionStore, defaults: SamplingParams, *, name: str, length: int
    ) -> None:
        self.store, self._llm, self._prepare, self._defaults, self._name = store, llm, prepare, defaults, name
        self._length, self.max_tokens = length, min(MAX_TOKENS, length)

    def text(self, token: int) -> str:
        return token_text(self._llm.tokenizer, token)

    def settings(self, *, needs_key: bool = False) -> dict[str, Any]:
        """Describe the model and the parameters, for the controls of the page."""
        model, tokenizer = self._llm.model, self._llm.tokenizer
        given = {name: value for name, value in self._defaults.to_dict().items() if name != "pipeline"}
        orders = {name: [one if isinstance(one, str) else one[0] for one in order] for name, order in PRESETS.items()}
        return {
            "version": 1,
            "nucleate": version("nucleate"),
            "model": {
                "name": self._name,
                "vocab_size": model.vocab_size,
                "context_length": self._length,
                "chat": tokenizer.chat_template is not None,
            },
            "stages": describe_stages(model.vocab_size),
            "draws": list(ORDER_PARAMETERS["draw"].choices),
            "orders": orders,
            "defaults": given,
            "origins": dict.fromkeys(given, "generation_config"),
            "limits": {"max_top": MAX_SHOWN, "max_draws": MAX_DRAWS, "max_tokens": self.max_tokens},
            "needs_key": needs_key,
            "example": "Once upon a time",
        }

    def start(self, body: Any, owner: str = "") -> tuple[Run, ValidatedRequest, Event]:
        """Read the body of ``generate``: the run, its request and its first event. Raises ParameterError.

        owner: identifies the client, which alone can read the run.
        """
        given = read_generate(body)
        output_ids, values = tuple[int, ...](), dict(given.params)
        if given.parent is not None:
            parent = self.store.get(given.parent.run, owner)
            prompt_ids, prompt, messages = parent.prompt_ids, parent.prompt, parent.messages
            output_ids = branch_tokens(given.parent, parent, self._llm.tokenizer)
            values = {"seed": parent.seed, **values}
        elif given.messages is not None:
            prompt_ids, prompt, messages = tuple(self._llm.encode_chat(given.messages)), None, given.messages
        elif isinstance(given.prompt, list):
            prompt_ids, prompt, messages = tuple(given.prompt), None, None
        else:
            prompt_ids, prompt, messages = tuple(self._llm.encode(given.prompt or "")), given.prompt, None
        default_tokens = len(output_ids) + DEFAULT_TOKENS
        params = run_params(values, self._defaults, self.max_tokens, min(default_tokens, self.max_tokens))
        params = params.replace(seed=fresh_seed() >> 11 if params.seed is None else params.seed)
        run = Run(owner, params, prompt_ids, output_ids, params.seed or 0, self.store, prompt, messages)
        ends = () if messages is None else self._llm.chat_format.turn_ends
        validated = self._prepare(Request(prompt_ids, params, output_ids=output_ids, recorder=run, turn_ends=ends))
        self.store.add(run)
        return run, validated, self._start_event(run, validated, values)

    def _start_event(self, run: Run, validated: ValidatedRequest, given: dict[str, Any]) -> Event:
        params = run.params.to_dict()
        kept = self._defaults.fields_set - given.keys()
        sources = {**dict.fromkeys(given, "request"), **dict.fromkeys(kept, "generation_config")}
        speculation = self._llm.speculative_config
        return {
            "type": "start",
            "run": run.id,
            "model": self._name,
            "seed": run.seed,
            "prompt": [{"id": token, "text": self.text(token)} for token in run.prompt_ids],
            "params": params,
            "origins": {name: sources[name] for name in params if name in sources},
            "stages": [
                {"name": stage.name, "shape": shape_of(stage).lower(), "label": repr(stage)}
                for stage in validated.pipeline.given
            ],
            "given": len(run.output_ids),
            "replayable": speculation is None or speculation.acceptance_rule == COUPLED,
        }

    def trace(self, body: Any, owner: str = "") -> dict[str, Any]:
        """What each stage did in a step, under the parameters of its run or under others. Raises ParameterError."""
        begin, given = perf_counter(), read_step(body, DEFAULT_TOP)
        if not all(token < self._llm.model.vocab_size for token in given.include):
            raise ParameterError("include", f"include names tokens beyond the vocabulary: {shown(given.include)}")
        run, params, inputs = self._step(given.run, given.step, given.params, owner)
        seed = params.seed if params.seed is not None else run.seed
        found = trace(inputs.logits, inputs.stages, **inputs.words, seed=seed)
        sampled = run.steps[given.step].token_id
        include = given.include if sampled < 0 else (*given.include, sampled)
        view = trace_view(found, self.text, given.top, include)
        return {
            **view,
            "run": run.id,
            "step": given.step,
            "params": params.to_dict(),
            "sampled": None if sampled < 0 else {"id": sampled, "text": self.text(sampled)},
            "milliseconds": round(1000 * (perf_counter() - begin), 2),
        }

    def draws(self, body: Any, owner: str = "") -> dict[str, Any]:
        """How often each token is sampled with many seeds, and its exact probability. Raises ParameterError."""
        given = read_step(body, DEFAULT_DRAWS_TOP)
        run, _, inputs = self._step(given.run, given.step, given.params, owner)
        try:
            counts = draw_counts(inputs.logits, inputs.stages, **inputs.words, count=given.count, first_seed=run.seed)
        except RowError as error:
            raise ParameterError("params", f"no token can be sampled in this step: {error}") from None
        return draws_view(counts, self.text, given.top)

    def _step(
        self, run_id: str, position: int, values: dict[str, Any] | None, owner: str
    ) -> tuple[Run, SamplingParams, StepInputs]:
        run = self.store.get(run_id, owner)
        params = run.params
        if values is not None:
            params = run_params({"seed": run.seed, **values}, self._defaults, self.max_tokens, self.max_tokens)
        return run, params, step_inputs(run, position, params, self._prepare)


@final
class OutputEvents:
    """Turns the chunks of a run into events."""

    def __init__(self, inspector: Inspector, run: Run) -> None:
        self._inspector, self._run = inspector, run
        self._count, self._text = 0, ""

    def of(self, chunks: list[CompletionChunk], usage: Usage | None) -> Iterator[Event]:
        """The events of new chunks. usage: that of the last one."""
        if tokens := [self._token(token, chunk.text) for chunk in chunks for token in chunk.token_ids]:
            yield {"type": "tokens", "tokens": tokens}
        self._text += "".join(chunk.text for chunk in chunks)
        if chunks and chunks[-1].finish_reason is not None:
            last = chunks[-1]
            counts = None
            if usage is not None:
                counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
            end = {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
            yield {"type": "end", **end, "text": self._text, "usage": counts}

    def _token(self, token: int, released: str) -> Event:
        run, position, text = self._run, self._count, self._inspector.text
        self._count += 1
        step = run.steps[position]
        found: dict[str, Any] = dict.fromkeys(TokenStatistics._fields)
        if step.inputs is not None:
            found = token_statistics(run, position, token, step.inputs)._asdict()
        return {
            "step": position,
            "id": token,
            "text": text(token),
            "released": released,
            "origin": "draft" if position in run.drafted else step.origin,
            **found,
            "rejected": [{"id": each, "text": text(each)} for each in run.rejected.get(position, ())],
        }


@final
class InspectorSession(Inspector):
    """The inspector of an LLM in this process: it runs requests on the LLM's own engine."""

    def __init__(self, llm: LLM, *, store: InspectionStore | None = None) -> None:
        name = "model in memory" if llm.folder is None else Path(llm.folder).name
        store, length = InspectionStore() if store is None else store, llm.model.context_length

        def prepare(request: Request) -> ValidatedRequest:
            return llm.shared_engine.prepare(request)  # the first request starts the engine

        super().__init__(llm, prepare, store, llm.default_params, name=name, length=length)

    def generate(self, body: Any) -> Iterator[Event]:
        """Run a request, and yield its events. Raises ParameterError."""
        run, validated, event = self.start(body)
        yield event
        events = OutputEvents(self, run)
        for _, output in self._llm.shared_engine.run([validated]):
            yield from events.of([output.chunk], output.usage)
