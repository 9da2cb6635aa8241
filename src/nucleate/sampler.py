"""Sampler: the state of a batch. Rows come and go; one call per step draws a token for each.

Refuses to know text and models: logits in, tokens out.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.backends.cpu.special.program import Program
from nucleate.backends.cpu.special.table import Table
from nucleate.columns import Columns, Structure, structure_of
from nucleate.core import noise
from nucleate.core.event import StepLogprobs
from nucleate.core.memory import Memory
from nucleate.core.parameter import ParameterError, unknown
from nucleate.core.stage import Pipeline, Tap
from nucleate.params import SamplingParams
from nucleate.pipeline import Params, as_pipeline, chains, runner, simplify
from nucleate.plan import Numbers, chain_of, compiled
from nucleate.presets import with_mask, without_mask
from nucleate.rows import Logits, check_ids, history, masks, per_row, where


class Sampled(NamedTuple):
    """What one step of a batch gives. R rows, in the order in which their logits were given."""

    token_ids: NDArray[np.int64]  #: [R]; -1 where there is an error
    logprobs: tuple[StepLogprobs | None, ...] | None  #: of the rows that asked for them; None if none did
    errors: Mapping[int, str]  #: {place in this call: why no token could be drawn}; such a row stays as it was
    seeds: NDArray[np.uint64]  #: [R]; with its seed a row can be drawn again


_Drawn = tuple[NDArray[np.int64], NDArray[np.uint64]]  # tokens [R] and seeds [R]


@dataclass
class _Row:
    stages: Pipeline
    memory: Memory
    seed: int
    tap: Tap | None  # of a row that the compiled chain can run, as are its edits
    program: Program | None


class Sampler:
    """A batch of rows, each with its own pipeline, seed, step and history.

    vocab_size: V, the length of a row of logits. backend, device: as in ``sample`` and ``explain``. Rows with the same
    structure, the types of their stages, form a group, whose parameters are columns (see ``groups``).
    """

    def __init__(self, vocab_size: int, backend: str = "auto", device: str = "cpu") -> None:
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int | np.integer) or vocab_size < 1:
            raise ParameterError("vocab_size", f"vocab_size must be an integer >= 1, got {vocab_size!r}")
        if device != "cpu":
            raise ParameterError("device", f"device must be 'cpu' (there is no CUDA backend yet), got {device!r}")
        compiled(backend, 0)  # it refuses one that does not exist
        self.backend = backend
        self.vocab_size = int(vocab_size)
        self.groups: dict[Structure, Columns] = {}
        self._known = Table(len(Numbers._fields))
        self._rows: dict[int, _Row] = {}
        self._plain: list[Memory] | None = None
        self._next = 0

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
        asked = as_pipeline(params)
        stages = simplify(asked)
        check_ids(stages, self.vocab_size)
        prompt = history(prompt_ids, self.vocab_size, "prompt_ids")
        output = history(output_ids, self.vocab_size, "output_ids")
        [answer] = per_row(index, 1, "index")
        own = params if isinstance(params, SamplingParams) else asked[-1]
        given = getattr(own, "seed", None) if seed is None else seed  # a greedy draw has none of its own
        own_seed = noise.fresh_seed() if given is None else (per_row(given, 1, "seed")[0] + answer) % 2**64
        memory = Memory(stages, prompt.tolist(), output.tolist())
        row, self._next = self._next, self._next + 1
        chain = chain_of(stages)
        tap = program = None
        if not isinstance(chain, str):
            tap, program = chain.tap, Program(chain.edits, memory, self.vocab_size) if chain.edits else None
            at = program.at if program else (0, 0)
            self._known.add(row, chain.numbers, at, own_seed, len(output))
        self._rows[row], self._plain = _Row(stages, memory, own_seed, tap, program), None
        structure = structure_of(stages)
        if structure not in self.groups:
            self.groups[structure] = Columns(stages)
        self.groups[structure].add(row, stages)
        return row

    def remove(self, row: int) -> None:
        """Forget a row. The others stay as they are."""
        structure = structure_of(self._row(row).stages)
        del self._rows[row]
        self._plain = None
        if row in self._known.slots:
            self._known.remove(row)
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
        """What a row has drawn."""
        return tuple(self._row(row).memory.output)

    def __call__(self, logits_RV: Any, rows: Iterable[int] | None = None, *, mask: Any = None) -> Sampled:
        """Draw the next token of some rows; their histories, steps and states advance.

        logits_RV: float [R, V], NumPy or torch. rows: whose they are, in this order; without it, those of ``rows``.
        mask: int32 [R, V / 32], the tokens a grammar allows, packed, lowest bit first. Nothing changes if the
        arguments are wrong (ValueError, TypeError, ParameterError).
        """
        logits = Logits(logits_RV)
        plain, drawn = self._plain_rows() if rows is None and mask is None else [], None
        if plain and logits.shape == (len(plain), self.vocab_size) and self._fast(logits):
            tokens_R, seeds_R = drawn = self._draw_known(logits, (0, 0))
            tokens = tokens_R.tolist()
            if min(tokens) >= 0:
                for memory, token in zip(plain, tokens, strict=True):
                    memory.push(token)
                return Sampled(tokens_R, None, {}, seeds_R)
        return self._step(logits, rows, mask, drawn)

    def _fast(self, logits: Logits) -> bool:
        return compiled(self.backend, logits.shape[0] * logits.shape[1])

    def _step(self, logits: Logits, rows: Iterable[int] | None, mask: Any, drawn: _Drawn | None) -> Sampled:
        """A step of any rows. drawn: what the chain has drawn already."""
        chosen, batch = self._chosen(rows)
        if logits.shape != (len(batch), self.vocab_size):
            raise ValueError(f"logits must have the shape {[len(batch), self.vocab_size]}, got {list(logits.shape)}")
        masks_R = masks(mask, len(batch), self.vocab_size)
        fast = bool(batch) and self._fast(logits)
        tokens_R, seeds_R = drawn or (self._draw_chains(logits, chosen, batch, masks_R) if fast else _none(batch))
        errors: dict[int, str] = {}
        reported: dict[int, StepLogprobs | None] = {}
        for place, (row, mask_W, token) in enumerate(zip(batch, masks_R, tokens_R.tolist(), strict=True)):
            if token >= 0:
                row.memory.push(token)
                if row.tap is not None:
                    reported[place] = self._report(logits, place, token, row.tap)
                continue
            stages = row.stages if mask_W is None else with_mask(row.stages)
            row.memory.mask = mask_W
            try:
                result = runner(fast)(logits[place], stages, row.seed, len(row.memory.output), row.memory)
            except (reference.RowError, ParameterError) as error:  # the latter of a stage of one's own
                errors[place] = str(error)
                continue
            tokens_R[place] = result.token
            if result.logprobs is not None:
                reported[place] = result.logprobs
            row.memory.push(result.token)
            self._move(chosen[place], row, result.stages if stages is row.stages else without_mask(result.stages))
            if chosen[place] in self._known.slots:
                self._known.steps[self._known.slots[chosen[place]]] += np.uint64(1)
        told = tuple(reported.get(place) for place in range(len(batch))) if reported else None
        return Sampled(tokens_R, told, errors, seeds_R)

    def _plain_rows(self) -> list[Memory]:
        """The memories of the rows, if all run through the chain and nothing more is to be done for them; else none."""
        if self._plain is None:
            plain = list(self._rows) == self._known.rows and all(
                row.tap is None and not (row.program and row.program.changes) for row in self._rows.values()
            )
            self._plain = [row.memory for row in self._rows.values()] if plain else []
        return self._plain

    def _draw_known(self, logits: Logits, given: tuple[int, int]) -> _Drawn:
        """Draw all rows of the chain: (tokens, seeds)."""
        known, count, _held = self._known, len(self._known.rows), self._known.held
        chains(self.vocab_size).draw(logits.lying(), count, known.at, given)
        return known.tokens[:count].copy(), known.seeds[:count].copy()

    def _chosen(self, rows: Iterable[int] | None) -> tuple[list[int], list[_Row]]:
        """The numbers of the rows of a call, and the rows."""
        if rows is None:
            return list(self._rows), list(self._rows.values())
        chosen = [operator.index(row) for row in rows]
        batch = [self._row(row) for row in chosen]
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"rows has one row twice, got {chosen!r:.60}")
        return chosen, batch

    def _draw_chains(
        self, logits: Logits, chosen: list[int], batch: list[_Row], masks_R: Sequence[NDArray[np.int32] | None]
    ) -> _Drawn:
        """Draw the rows that fit the compiled chain: (tokens, seeds of all). The others have -1, and odd ones."""
        known, _held = self._known, self._known.held
        for row in batch:
            if row.program is not None:
                row.program.refresh()
        if chosen == known.rows:
            return self._draw_known(logits, where(masks_R))
        tokens_R, seeds_R = _none(batch)
        pairs = [(place, known.slots[row]) for place, row in enumerate(chosen) if row in known.slots]
        if pairs:
            places, slots = np.array(pairs, np.int64).T.copy()
            control = known.part(places, slots)
            chains(self.vocab_size).draw(logits.lying(), len(pairs), control.ctypes.data, where(masks_R))
            tokens_R[places] = known.tokens[: len(pairs)]
        return tokens_R, seeds_R

    def _report(self, logits: Logits, place: int, token: int, tap: Tap) -> StepLogprobs:
        told: StepLogprobs = chains(self.vocab_size).report(logits.lying(), place, token, *tap.wanted)
        return told

    def _move(self, number: int, row: _Row, stages: Pipeline) -> None:
        """Stages with a state are as of the next step now."""
        if any(old is not new for old, new in zip(row.stages, stages, strict=True)):
            row.stages = stages
            self.groups[structure_of(stages)].update(number, stages)

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            raise unknown(str(row), map(str, self._rows), "row")
        return self._rows[row]


def _none(batch: list[_Row]) -> _Drawn:
    """No tokens yet, and the seeds of the rows."""
    return np.full(len(batch), -1, np.int64), np.array([row.seed for row in batch], np.uint64)
