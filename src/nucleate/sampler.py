"""Sampler: the state of a batch. Rows come and go; one call per step draws a token for each.

Refuses to know text and models: logits in, tokens out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.backends.cpu.special.program import Program
from nucleate.backends.cpu.special.table import NOT_DRAWN, Part, Table
from nucleate.columns import Columns, Structure, structure_of
from nucleate.core import noise
from nucleate.core.event import StepLogprobs
from nucleate.core.history import History
from nucleate.core.memory import Memory
from nucleate.core.parameter import ParameterError, unknown
from nucleate.core.stage import Drawn, Pipeline, Tap
from nucleate.device import Device
from nucleate.laws import Laws, learns
from nucleate.params import SamplingParams
from nucleate.pipeline import Params, chains, prepared, runner
from nucleate.plan import TENSOR_BACKENDS, Numbers, compiled
from nucleate.presets import with_mask, without_mask
from nucleate.rows import Logits, check_ids, history, lying_plainly, masks, per_row, where

if TYPE_CHECKING:
    from nucleate.backends.cuda.loop import Forward, Loop


class Sampled(NamedTuple):
    """What one step of a batch gives. R rows, in the order in which their logits were given.

    On a device, token_ids is a tensor there; logprobs and errors wait for the device when they are looked at.
    """

    token_ids: Any  #: int64 [R], NumPy or torch; -1 where there is an error
    logprobs: Sequence[StepLogprobs | None] | None  #: of the rows that asked for them; None if none did
    errors: Mapping[int, str]  #: {place in this call: why no token could be drawn}; such a row stays as it was
    seeds: NDArray[np.uint64]  #: [R], read-only; with its seed a row can be drawn again


KEPT_BATCHES = 32
"""Of different calls."""

_sampled = functools.partial(tuple.__new__, Sampled)
"""In half the time of ``Sampled(...)``."""


@dataclass(slots=True)
class _Row:
    stages: Pipeline
    memory: Memory
    seed: int
    tap: Tap | None  # of a row that the compiled chain can run, as are its edits
    program: Program | None


class _Batch(NamedTuple):
    """The rows of a call. Kept for the next one, as long as it asks for the same and none has come or gone."""

    asked: list[int] | None  #: None: all
    numbers: list[int]
    rows: list[_Row]
    shape: tuple[int, int]
    seeds: NDArray[np.uint64]  #: not to be written to: calls share them
    places: list[int]  #: of those that run through the chain
    part: Part  #: these
    memories: list[Memory] | None  #: if all do, and nothing more is to be done for them


class Sampler:
    """A batch of rows, each with its own pipeline, seed, step and history.

    vocab_size: V, the length of a row of logits. backend, device: as in ``sample`` and ``explain``. Rows with the same
    structure, the types of their stages, form a group, whose parameters are columns (see ``groups``).

    With another device than "cpu", histories, seeds, steps and numbers of rows are there, and so are the tokens: only
    ``tolist`` on them waits for it, where ``explain`` says of every row that it runs there; what else waits says so.
    The backend may then be "triton" or "torch" too, as it may with the device "cpu": rows are tensors then.
    """

    def __init__(self, vocab_size: int, backend: str = "auto", device: str = "cpu") -> None:
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int | np.integer) or vocab_size < 1:
            raise ParameterError("vocab_size", f"vocab_size must be an integer >= 1, got {vocab_size!r}")
        self._host = "auto" if backend in TENSOR_BACKENDS else backend
        compiled(self._host, 0)  # it refuses one that does not exist
        self.backend = backend
        self.vocab_size = int(vocab_size)
        self.groups: dict[Structure, Columns] = {}
        self._known = Table(len(Numbers._fields))
        self._rows: dict[int, _Row] = {}
        self._batch: _Batch | None = None
        self._batches: dict[tuple[int, ...] | None, _Batch] = {}
        self._next = 0
        self._device: Device | None = None
        if device != "cpu" or backend in TENSOR_BACKENDS:
            self._device = Device(self.vocab_size, device, backend, self._rows, self._on_host)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows there are, in the order in which they were added."""
        return tuple(self._rows)

    def add(
        self,
        params: Params,
        prompt_ids: Sequence[int] = (),
        *,
        output_ids: Sequence[int] = (),
        seed: int | None = None,
        index: int = 0,
    ) -> int:
        """Add a row and return its number, which is never used again.

        output_ids: what it has drawn before, to go on from there. seed: if given, instead of the one in params.
        index: which of n answers; its seed is seed + index.
        Raises ParameterError for token ids outside the vocabulary, and for text, which needs a tokenizer (see
        ``SamplingParams.pipeline``).
        """
        asked, stages, chain = prepared(params)
        check_ids(stages, self.vocab_size)
        prompt = history(prompt_ids, self.vocab_size, "prompt_ids")
        output = history(output_ids, self.vocab_size, "output_ids")
        [answer] = per_row(index, 1, "index")
        own = params if isinstance(params, SamplingParams) else asked[-1]
        given = getattr(own, "seed", None) if seed is None else seed  # a greedy draw has none of its own
        own_seed = noise.fresh_seed() if given is None else (per_row(given, 1, "seed")[0] + answer) % 2**64
        memory = Memory(stages, prompt.tolist(), output.tolist())
        row, self._next = self._next, self._next + 1
        tap = program = None
        if self._device is not None:
            self._device.add(row, chain, memory, own_seed)
        elif not isinstance(chain, str):
            tap, program = chain.tap, Program(chain.edits, memory, self.vocab_size) if chain.edits else None
            at = program.at if program else (0, 0)
            self._known.add(row, chain.numbers, at, own_seed, len(output))
        self._rows[row] = _Row(stages, memory, own_seed, tap, program)
        self._forget_batches()
        structure = structure_of(stages)
        if structure not in self.groups:
            self.groups[structure] = Columns(stages)
        self.groups[structure].add(row, stages)
        return row

    def push(self, row: int, token: int) -> None:
        """A row goes on with a token that was not drawn, as no other could have been: the rest is as if it were.

        Raises ParameterError for a token outside the vocabulary.
        """
        own = self._row(row)
        if not 0 <= token < self.vocab_size:
            raise ParameterError("token", f"token must be in 0..{self.vocab_size - 1}, got {token!r:.60}")
        if self._device is not None and row in self._device:
            self._device.push(row, token)
            return
        self._count(row, own, token)
        self._move(row, own, tuple(stage.after(Drawn(token, 0.0, 0.0)) for stage in own.stages))

    def laws(
        self,
        row: int,
        logits_NV: Any,
        tokens: Sequence[int] = (),
        masks: Any = None,
        *,
        parents: Sequence[int] | None = None,
    ) -> Laws:
        """What a row's next tokens would be drawn from, [N, V] float64: now, and after each of some tokens.

        logits_NV: float [N, V], NumPy or torch, with N - 1 tokens; masks: what a grammar allows, int32 [W] for each of
        the N, or None. parents: for each token which one it follows, -1 for none; without it the one before. Nothing
        changes; with XTC it is the average over what its coin may say, as in
        ``probabilities``. Worked out on the host. Raises ValueError.
        """
        own, logits = self._up_to_date(row), Logits(logits_NV)
        if logits.shape != (len(tokens) + 1, self.vocab_size):
            raise ValueError(
                f"logits must have the shape {[len(tokens) + 1, self.vocab_size]}, got {list(logits.shape)}"
            )
        fast = compiled(self._host, self.vocab_size)
        return Laws(own.stages, own.memory.prompt, own.memory.output, logits, tokens, masks, parents=parents, fast=fast)

    def take(self, row: int, logits_V: Any, token: int, mask_W: Any = None) -> StepLogprobs | None:
        """A row goes on with a token that was chosen by its law, as if it had been drawn: stages learn from it.

        Returns its logprobs, if they were asked for; then it waits for the device. Raises ValueError for a token that
        cannot be drawn.
        """
        own = self._row(row)
        if not any(isinstance(stage, Tap) or learns(stage) for stage in own.stages):
            self.push(row, token)
            return None
        own = self._up_to_date(row)
        stages = own.stages if mask_W is None else with_mask(own.stages)
        past = History(own.memory.prompt, own.memory.output, mask_W)
        result = reference.take(Logits(logits_V[None])[0], stages, token, past)
        if self._device is not None and row in self._device:
            self._device.push(row, token)
            return result.logprobs
        self._count(row, own, token)
        self._move(row, own, result.stages if mask_W is None else without_mask(result.stages))
        return result.logprobs

    def remove(self, row: int) -> None:
        """Forget a row. The others stay as they are."""
        structure = structure_of(self._row(row).stages)
        del self._rows[row]
        self._forget_batches()
        if row in self._known.slots:
            self._known.remove(row)
        if self._device is not None:
            self._device.remove(row)
        self.groups[structure].remove(row)
        if not len(self.groups[structure]):
            del self.groups[structure]

    def seed(self, row: int) -> int:
        """The seed of a row, as given or as taken when it was added."""
        return self._row(row).seed

    def stages(self, row: int) -> Pipeline:
        """The pipeline of a row as of its next step, simplified."""
        return self._row(row).stages

    def output_ids(self, row: int) -> tuple[int, ...]:
        """What a row has drawn. Waits for the device."""
        return tuple(self._up_to_date(row).memory.output)

    def __call__(self, logits_RV: Any, rows: Iterable[int] | None = None, *, mask: Any = None) -> Sampled:
        """Draw the next token of some rows; their histories, steps and states advance.

        logits_RV: float [R, V], NumPy or torch. rows: whose they are, in this order; without it, those of ``rows``.
        mask: int32 [R, V / 32], the tokens a grammar allows, packed, lowest bit first. Nothing changes if the
        arguments are wrong (ValueError, TypeError, ParameterError). On a device, tensors that are there already are not
        copied, and logits are not to be written to before errors have been looked at, if these are to be.
        """
        asked = None if rows is None else [operator.index(row) for row in rows]
        if self._device is not None:
            of_all = self._known_batch(asked)
            return _sampled((*self._device.step(of_all.numbers, logits_RV, mask), of_all.seeds))
        batch = self._batch
        if batch is None or batch.asked != asked:
            batch = self._batch = self._known_batch(asked)
        memories = batch.memories if mask is None else None
        lying = lying_plainly(logits_RV, batch.shape) if memories else None
        if not memories or lying is None or not compiled(self._host, batch.shape[0] * batch.shape[1]):
            return self._step(Logits(logits_RV), batch, mask, None)
        chains(self.vocab_size).draw(lying, batch.shape[0], batch.part.at)
        tokens_R = batch.part.tokens.copy()
        tokens = tokens_R.tolist()
        if NOT_DRAWN in tokens:
            return self._step(Logits(logits_RV), batch, mask, tokens_R)
        for memory, token in zip(memories, tokens, strict=True):
            memory.push(token)
        return _sampled((tokens_R, None, {}, batch.seeds))

    def loop(
        self,
        forward: Forward,
        first_ids: Sequence[int],
        rows: Iterable[int] | None = None,
        *,
        steps: int,
        stop_ids: Sequence[int] = (),
    ) -> Loop:
        """Draw the next tokens of some rows in a loop that a device runs without the host, see ``Loop``.

        forward(token_ids [R], active [R]) gives logits [R, V]; first_ids: what it is to read first, the last token of
        each prompt. On CUDA it is captured as one graph. Raises ParameterError where the host is needed: for rows that
        the device does not run, or that want logprobs.
        """
        numbers = list(self._rows) if rows is None else [operator.index(row) for row in rows]
        for number in numbers:
            self._row(number)
        if self._device is None:
            raise ParameterError("device", "a loop runs on a device: Sampler(vocab_size, device=...)")
        return self._device.loop(numbers, forward, first_ids, steps, stop_ids)

    def _known_batch(self, asked: list[int] | None) -> _Batch:
        """The rows of a call, as gathered for one before: who verifies drafts asks for all, for fewer, and for all."""
        key = None if asked is None else tuple(asked)
        batch = self._batches.get(key)
        if batch is None:
            if len(self._batches) >= KEPT_BATCHES:
                self._batches.clear()
            batch = self._batches[key] = self._gathered(asked)
        return batch

    def _gathered(self, asked: list[int] | None) -> _Batch:
        """The rows of a call."""
        numbers = list(self._rows) if asked is None else asked
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"rows has one row twice, got {numbers!r:.60}")
        rows, slots = [self._row(row) for row in numbers], self._known.slots
        places = [place for place, row in enumerate(numbers) if row in slots]
        part = self._known.part([numbers[place] for place in places], places)
        more = len(places) < len(rows) or any(row.tap or (row.program and row.program.changes) for row in rows)
        memories = None if more else [row.memory for row in rows]
        seeds = np.array([row.seed for row in rows], np.uint64)
        seeds.flags.writeable = False
        return _Batch(asked, numbers, rows, (len(rows), self.vocab_size), seeds, places, part, memories)

    def _step(self, logits: Logits, batch: _Batch, mask: Any, drawn: NDArray[np.int64] | None) -> Sampled:
        """A step of any rows. drawn: what the chain has drawn already."""
        count = len(batch.rows)
        if logits.shape != batch.shape:
            raise ValueError(f"logits must have the shape {list(batch.shape)}, got {list(logits.shape)}")
        masks_R = masks(mask, count, self.vocab_size)
        fast = count > 0 and compiled(self._host, count * self.vocab_size)
        tokens_R = np.full(count, NOT_DRAWN, np.int64) if drawn is None else drawn
        if fast and drawn is None and batch.places:
            self._draw_chains(logits, batch, masks_R, tokens_R)
        errors: dict[int, str] = {}
        reported: dict[int, StepLogprobs] = {}
        for place, (row, token) in enumerate(zip(batch.rows, tokens_R.tolist(), strict=True)):
            if token >= 0:
                told = None if row.tap is None else self._report(logits, place, token, row.tap)
            else:
                alone = self._draw_alone(logits[place], batch.numbers[place], row, masks_R[place], fast)
                if isinstance(alone, str):
                    errors[place] = alone
                    continue
                token, told = alone
                tokens_R[place] = token
            row.memory.push(token)
            if told is not None:
                reported[place] = told
        logprobs = tuple(reported.get(place) for place in range(count)) if reported else None
        return Sampled(tokens_R, logprobs, errors, batch.seeds)

    def _draw_chains(self, logits: Logits, batch: _Batch, masks_R: Any, tokens_R: NDArray[np.int64]) -> None:
        """Draw the rows that run through the compiled chain, but for odd ones."""
        for row in batch.rows:
            if row.program is not None:
                row.program.refresh()
        chains(self.vocab_size).draw(logits.lying(), len(batch.places), batch.part.at, where(masks_R))
        tokens_R[batch.places] = batch.part.tokens

    def _draw_alone(
        self, logits_V: NDArray[np.float32], number: int, row: _Row, mask_W: NDArray[np.int32] | None, fast: bool
    ) -> tuple[int, StepLogprobs | None] | str:
        """Draw a row that the compiled chain does not run; or why nothing can be drawn from it."""
        stages = row.stages if mask_W is None else with_mask(row.stages)
        row.memory.mask = mask_W
        try:
            result = runner(fast)(logits_V, stages, row.seed, len(row.memory.output), row.memory)
        except Exception as error:  # noqa: BLE001  # a stage of one's own may raise anything
            known = isinstance(error, reference.RowError | ParameterError)
            return str(error) if known else f"{type(error).__name__}: {error}"
        self._move(number, row, result.stages if stages is row.stages else without_mask(result.stages))
        if number in self._known.slots:
            self._known.steps[self._known.slots[number]] += np.uint64(1)
        return result.token, result.logprobs

    def _report(self, logits: Logits, place: int, token: int, tap: Tap) -> StepLogprobs:
        told: StepLogprobs = chains(self.vocab_size).report(logits.lying(), place, token, *tap.wanted)
        return told

    def _count(self, number: int, row: _Row, token: int) -> None:
        """A row has a token that was not drawn here."""
        row.memory.push(token)
        if number in self._known.slots:
            self._known.steps[self._known.slots[number]] += np.uint64(1)

    def _move(self, number: int, row: _Row, stages: Pipeline) -> None:
        """Stages with a state are as of the next step now."""
        if stages is not row.stages and any(old is not new for old, new in zip(row.stages, stages, strict=True)):
            row.stages = stages
            self.groups[structure_of(stages)].update(number, stages)

    def _on_host(
        self, number: int, logits_V: NDArray[np.float32], mask_W: NDArray[np.int32] | None
    ) -> tuple[int, StepLogprobs | None] | str:
        """Draw a row that the device does not run."""
        row = self._rows[number]
        drawn = self._draw_alone(logits_V, number, row, mask_W, compiled(self._host, self.vocab_size))
        if not isinstance(drawn, str):
            row.memory.push(drawn[0])
        return drawn

    def _up_to_date(self, row: int) -> _Row:
        """A row with all that it has said."""
        own = self._row(row)
        if self._device is not None:
            self._device.catch_up()
        return own

    def _forget_batches(self) -> None:
        """Rows have come or gone, and columns are elsewhere."""
        self._batch = None
        self._batches.clear()

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            raise unknown(str(row), map(str, self._rows), "row")
        return self._rows[row]
