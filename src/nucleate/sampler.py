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
from nucleate.columns import ChainRows, Columns, Structure, structure_of
from nucleate.core import noise
from nucleate.core.event import StepLogprobs
from nucleate.core.memory import Memory
from nucleate.core.parameter import ParameterError, unknown
from nucleate.core.stage import Pipeline, Shift, Tap
from nucleate.params import SamplingParams
from nucleate.pipeline import Params, as_pipeline, runner, simplify
from nucleate.plan import Numbers, chain_of, compiled
from nucleate.presets import with_mask, without_mask
from nucleate.rows import Logits, check_ids, history, masks, per_row
from nucleate.stages.mask import Mask


class Sampled(NamedTuple):
    """What one step of a batch gives. R rows, in the order in which their logits were given."""

    token_ids: NDArray[np.int64]  #: [R]; -1 where there is an error
    logprobs: tuple[StepLogprobs | None, ...] | None  #: of the rows that asked for them; None if none did
    errors: Mapping[int, str]  #: {place in this call: why no token could be drawn}; such a row stays as it was
    seeds: NDArray[np.uint64]  #: [R]; with its seed a row can be drawn again


@dataclass
class _Row:
    stages: Pipeline
    memory: Memory
    seed: int
    tap: Tap | None  # of a row that the compiled chain can run, as are its Shifts
    shifts: tuple[Shift, ...]


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
        self._chain_rows = ChainRows(len(Numbers._fields))
        self._rows: dict[int, _Row] = {}
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
        tap, shifts = (None, ()) if isinstance(chain, str) else chain[:2]
        self._rows[row] = _Row(stages, memory, own_seed, tap, shifts)
        structure = structure_of(stages)
        if structure not in self.groups:
            self.groups[structure] = Columns(stages)
        self.groups[structure].add(row, stages)
        if not isinstance(chain, str):
            self._chain_rows.add(row, chain.numbers, own_seed, len(output), bool(chain.shifts))
        return row

    def remove(self, row: int) -> None:
        """Forget a row. The others stay as they are."""
        structure = structure_of(self._row(row).stages)
        del self._rows[row]
        if row in self._chain_rows.slots:
            self._chain_rows.remove(row)
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
        chosen = list(self._rows) if rows is None else [operator.index(row) for row in rows]
        batch = [self._row(row) for row in chosen]
        if rows is not None and len(set(chosen)) < len(chosen):
            raise ValueError(f"rows has one row twice, got {chosen!r:.60}")
        if logits.shape != (len(batch), self.vocab_size):
            raise ValueError(f"logits must have the shape {[len(batch), self.vocab_size]}, got {list(logits.shape)}")
        masks_R = masks(mask, len(batch), self.vocab_size)
        tokens_R, errors = np.full(len(batch), -1, np.int64), {}
        fast = bool(batch) and compiled(self.backend, len(batch) * self.vocab_size)
        if fast and self._chain_rows.rows:
            self._draw_chains(logits, chosen, masks_R, tokens_R)
        run = runner(fast)
        reported: list[StepLogprobs | None] = [None] * len(batch)
        for place, (row, mask_W) in enumerate(zip(batch, masks_R, strict=True)):
            if (token := int(tokens_R[place])) >= 0:
                row.memory.push(token)
                if row.tap is not None:
                    reported[place] = self._report(logits[place], token, row.tap)
                continue
            stages = row.stages if mask_W is None else with_mask(row.stages)
            row.memory.mask = mask_W
            try:
                result = run(logits[place], stages, row.seed, len(row.memory.output), row.memory)
            except (reference.RowError, ParameterError) as error:  # the latter of a stage of one's own
                errors[place] = str(error)
                continue
            tokens_R[place], reported[place] = result.token, result.logprobs
            row.memory.push(result.token)
            self._move(chosen[place], row, result.stages if stages is row.stages else without_mask(result.stages))
            if chosen[place] in self._chain_rows.slots:
                self._chain_rows.steps[self._chain_rows.slots[chosen[place]]] += np.uint64(1)
        seeds_R = np.array([row.seed for row in batch], np.uint64)
        told = tuple(reported) if any(report is not None for report in reported) else None
        return Sampled(tokens_R, told, errors, seeds_R)

    def _draw_chains(
        self, logits: Logits, chosen: list[int], masks_R: list[NDArray[np.int32] | None], tokens_R: NDArray[np.int64]
    ) -> None:
        """Draw the rows that fit the compiled chain; one it cannot draw from is left to the reference, to say why."""
        from nucleate.backends.cpu.rows import chains  # it loads the compiler

        table, masked, groups = self._chain_rows, masks_R[0] is not None, []
        if chosen == table.rows and (masked or len(table.edited) in (0, len(chosen))):
            every = np.arange(len(chosen))
            groups.append((every, every, masked or bool(table.edited)))
        else:
            for edited in (False, True):
                pairs = [
                    (place, table.slots[row])
                    for place, row in enumerate(chosen)
                    if row in table.slots and (masked or row in table.edited) == edited
                ]
                if pairs:
                    groups.append((*np.array(pairs, np.int64).T.copy(), edited))
        for places, slots, edited in groups:
            edit = self._editor(chosen, masks_R) if edited else None
            tokens_R[places] = chains(self.vocab_size).draw(
                logits, places, slots, table.values, table.seeds, table.steps, edit
            )

    def _report(self, logits_V: NDArray[np.float32], token: int, tap: Tap) -> StepLogprobs:
        from nucleate.backends.cpu.rows import chains

        return chains(self.vocab_size).report(logits_V, token, *tap.wanted)

    def _editor(self, chosen: list[int], masks_R: list[NDArray[np.int32] | None]) -> Any:
        """What applies the Shifts of a row, and its mask."""
        from nucleate.backends.cpu import shifts

        def edit(place: int, x_V: NDArray[np.float32]) -> None:
            row = self._rows[chosen[place]]
            row.memory.mask = masks_R[place]
            own = row.shifts
            if masks_R[place] is not None and not any(stage.touches == "masked" for stage in own):
                own = (*own, Mask())
            shifts.edit_all(x_V, own, row.memory)

        return edit

    def _move(self, number: int, row: _Row, stages: Pipeline) -> None:
        """Stages with a state are as of the next step now."""
        if any(old is not new for old, new in zip(row.stages, stages, strict=True)):
            row.stages = stages
            self.groups[structure_of(stages)].update(number, stages)

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            raise unknown(str(row), map(str, self._rows), "row")
        return self._rows[row]
