"""The recorded runs of the inspector: what each token was sampled from, kept within a limit of bytes and time.

A recorded step can be traced again, under the parameters of its run or under others (`step_inputs`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, NamedTuple, final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.request import RecordedStep, Request, SamplingInputs, ValidatedRequest
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.companion import split_combine
from nucleate.sampling.distributions import is_stateful
from nucleate.sampling.stage import Pipeline, Stage
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import SamplingParams
from nucleate.structured_output import CompiledGrammar, Guide

MAX_BYTES: Final = 256 * 2**20
"""Default: 16,000 steps of a vocabulary of 4,096 tokens, 500 of 128,000."""
MAX_SECONDS: Final = 1800.0
"""Default: runs that nobody has looked at for so long are dropped."""
MAX_RUNS: Final = 256


class InspectorError(Exception):
    """A run or step that cannot be shown. code: "run_not_found" or "step_not_stored"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class Run:
    """One inspected output. It is the ``StepRecorder`` of its request.

    owner: identifies the client; only the same client can read the run. output_ids: the tokens with which the output
    began, those of a branch.
    """

    owner: str
    params: SamplingParams
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    seed: int
    store: InspectionStore
    prompt: str | None = None
    messages: Sequence[object] | None = None
    id: str = field(default_factory=lambda: uuid4().hex)
    steps: list[RecordedStep] = field(default_factory=list)
    drafted: set[int] = field(default_factory=set)  #: positions of accepted draft tokens
    rejected: dict[int, tuple[int, ...]] = field(default_factory=dict)  #: rejected draft tokens, by position

    @property
    def token_ids(self) -> list[int]:
        return [step.token_id for step in self.steps if step.token_id >= 0]

    def record(self, step: RecordedStep) -> None:
        self.steps.append(step)
        self.store.added(self, step)

    def record_draft(self, output_index: int, position: int, accepted: int, rejected: Sequence[int]) -> None:
        self.drafted.update(range(position, position + accepted))
        if rejected:
            self.rejected[position + accepted] = tuple(rejected)

    def inputs(self, position: int) -> SamplingInputs:
        """What the token of a step was sampled from. Raises InspectorError."""
        if not 0 <= position < len(self.steps):
            raise InspectorError("step_not_stored", f"the run has {len(self.steps)} steps, not a step {position}")
        found = self.steps[position]
        if found.origin != "sampled":
            raise InspectorError("step_not_stored", f"the token of step {position} was {found.origin}, not sampled")
        if found.inputs is None:
            raise InspectorError("step_not_stored", f"the logits of step {position} are no longer stored")
        return found.inputs


@final
class InspectionStore:
    """Runs by id. Thread-safe. When the logits exceed ``max_bytes``, those of the oldest steps are dropped.

    A run that was not used for ``max_seconds`` is dropped as a whole, and so is the oldest of more than MAX_RUNS.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_seconds: float = MAX_SECONDS) -> None:
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self._runs: OrderedDict[str, tuple[Run, float]] = OrderedDict()  # the least recently used first
        self._stored: deque[tuple[Run, int]] = deque()  # steps with logits, the oldest first
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The size of all stored logits and masks."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: Run) -> None:
        with self._lock:
            self._runs[run.id] = run, monotonic()
            self._expire()

    def get(self, run_id: str, owner: str) -> Run:
        """The run of a client. Raises InspectorError, also for the run of another client."""
        with self._lock:
            self._expire()
            run, _ = self._runs.get(run_id, (None, 0.0))
            if run is None or run.owner != owner:
                raise InspectorError("run_not_found", "there is no such run: it may have expired; generate again")
            self._runs[run_id] = run, monotonic()
            self._runs.move_to_end(run_id)
            return run

    def added(self, run: Run, step: RecordedStep) -> None:
        """Count the last step of a run, and drop old ones beyond the limit."""
        with self._lock:
            if step.inputs is None:
                return
            if run.id not in self._runs:
                run.steps[-1] = step._replace(inputs=None)
                return
            self._stored.append((run, len(run.steps) - 1))
            self._bytes += _size(step)
            while self._bytes > self._max_bytes:
                self._drop(*self._stored.popleft())

    def _drop(self, run: Run, position: int) -> None:
        self._bytes -= _size(run.steps[position])
        run.steps[position] = run.steps[position]._replace(inputs=None)

    def _expire(self) -> None:
        expired = set()
        while self._runs:
            run, used = next(iter(self._runs.values()))
            if len(self._runs) <= MAX_RUNS and monotonic() - used <= self._max_seconds:
                break
            expired.add(self._runs.popitem(last=False)[1][0])
        if expired:
            kept = deque[tuple[Run, int]]()
            for run, position in self._stored:
                if run in expired:
                    self._drop(run, position)
                else:
                    kept.append((run, position))
            self._stored = kept


def _size(step: RecordedStep) -> int:
    if step.inputs is None:
        return 0
    return step.inputs.logits.nbytes + (0 if step.inputs.mask is None else step.inputs.mask.nbytes)


_COMBINED = tuple(
    parameter.name
    for name in ("guidance", "contrastive")
    for parameter in STAGES[name].parameters.values()
    if parameter.public
)
"""Parameters of the stages that combine two rows of logits: only the result is recorded."""

Prepare = Callable[[Request], ValidatedRequest]
"""``Engine.prepare``."""


class StepInputs(NamedTuple):
    """What ``trace`` needs for a recorded step."""

    logits: NDArray[np.float32]  #: [V]
    stages: Pipeline  #: with their state, and with the seed in the draw
    words: dict[str, Any]  #: prompt_ids, output_ids, step and mask


def step_inputs(run: Run, position: int, params: SamplingParams, prepare: Prepare) -> StepInputs:
    """The inputs of a trace of a step under some parameters. Raises InspectorError, ParameterError."""
    recorded = run.inputs(position)
    for name in _COMBINED:
        if getattr(params, name) != getattr(run.params, name):
            raise ParameterError(name, f"{name} cannot be changed for a step that was sampled before: generate again")
    request = prepare(Request(run.prompt_ids, params))
    output_ids = run.token_ids[:position]
    mask = recorded.mask
    if params.structured_outputs != run.params.structured_outputs:
        mask = None if request.grammar is None else _mask(request.grammar, output_ids, params)
    _, stages = split_combine(request.pipeline.given)
    state = {type(stage): stage for stage in recorded.stages}
    stages = tuple(_with_state(stage, state.get(type(stage), stage)) for stage in stages)
    words = {"prompt_ids": run.prompt_ids, "output_ids": output_ids, "step": position, "mask": mask}
    return StepInputs(recorded.logits, _with_seed(stages, run.seed), words)


def _mask(grammar: CompiledGrammar, output_ids: list[int], params: SamplingParams) -> NDArray[np.int32]:
    guide = Guide(grammar, ignore_eos=params.ignore_eos)
    for token in output_ids:
        guide.accept_token(token)
        if guide.error is not None:
            raise ParameterError("structured_outputs", "structured_outputs does not allow the tokens before this step")
    mask: NDArray[np.int32] = guide.mask()[0]
    return mask


def _with_state(stage: Stage, recorded: Stage) -> Stage:
    """The recorded stage, if it is the same one with the state of its step; otherwise the stage as it starts."""
    public = [name for name, parameter in type(stage).parameters.items() if parameter.public]
    same = all(getattr(stage, name) == getattr(recorded, name) for name in public)
    return recorded if same and is_stateful(recorded) else stage


def _with_seed(stages: Pipeline, seed: int) -> Pipeline:
    draw = stages[-1]
    if getattr(draw, "seed", 0) is None:
        draw = dataclasses.replace(draw, seed=seed)  # type: ignore[type-var]
    return (*stages[:-1], draw)
