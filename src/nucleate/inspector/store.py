"""The recorded runs of the inspector: what each token was sampled from, kept within a limit of bytes and time."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, final
from uuid import uuid4

from nucleate.engine.request import RecordedStep, SamplingInputs
from nucleate.sampling_params import SamplingParams

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
        """The tokens of the output so far."""
        return [step.token_id for step in self.steps if step.token_id >= 0]

    def record(self, step: RecordedStep) -> None:
        """See ``StepRecorder``."""
        self.steps.append(step)
        self.store.added(self, step)

    def record_draft(self, output_index: int, position: int, accepted: int, rejected: Sequence[int]) -> None:
        """See ``StepRecorder``."""
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
        """Add a run."""
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
