"""ShardedSampler: samples from logits whose vocabulary is sharded over ranks, the same tokens as one Sampler.

The plan of a row says what the shards exchange. A row of which only the tokens that decide it are exchanged is sampled
with all others at -inf.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import BACKENDS
from nucleate.outputs import StepLogprobs
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import noise, reference
from nucleate.sampling.companion import combined_rows
from nucleate.sampling.distributions import TargetDistributions
from nucleate.sampling.inputs import check_count, check_token, like, masks
from nucleate.sampling.pipeline import Params, PreparedPipeline, RequestParams, prepared, seed_of
from nucleate.sampling.presets import with_mask
from nucleate.sampling.route import TENSOR_BACKENDS
from nucleate.sampling.sampler import Sampler, SamplerOutput
from nucleate.sampling.stage import Combine, Pipeline
from nucleate.sampling.stages.constraints.allowed import Mask
from nucleate.sharding.local_shard import RowShifts
from nucleate.sharding.rank_exchange import (
    CountedExchange,
    ProcessGroupExchange,
    RankExchange,
    RowLog,
    ShardStats,
    agree_on_setup,
    agree_on_step,
)
from nucleate.sharding.shard_layout import FoundTokens, ShardLayout, gather_rows, shard_logits
from nucleate.sharding.shard_plan import GROUPS, WHOLE, RowPlan, plan_of
from nucleate.sharding.shard_step import ShardStep, StepRow

CHUNK_SCORES = 1 << 21
"""The scores that are sampled at once: 8 MiB, which stay in the caches."""

Masks = Sequence[NDArray[np.int32] | None]
"""A bitmask per row; None for all rows if the step has none."""


class ShardedRow(NamedTuple):
    """A row, beside its state in the sampler."""

    plan: RowPlan
    stages: Pipeline  #: as added: its Shifts and draw do not change
    combine: Combine | None
    kept: int | None  #: the number of ``RowPlan.kept`` in the sampler of such pipelines


class SampledRow(NamedTuple):
    """The result of a row: its token, or -1 and the error."""

    token: int
    error: str | None
    logprobs: StepLogprobs | None


def sampled_rows(
    sampler: Sampler, logits_RV: object, numbers: list[int], masks_R: Masks, companion_RV: object = None
) -> list[SampledRow]:
    given = [mask_W for mask_W in masks_R if mask_W is not None]
    out = sampler(logits_RV, numbers, mask=np.stack(given) if given else None, companion=companion_RV)
    logprobs = out.logprobs or [None] * len(numbers)
    errors = map(out.errors.get, range(len(numbers)))
    return [*map(SampledRow, out.token_ids.tolist(), errors, logprobs)]


class FoundSampling:
    """Samples rows from the tokens that decide them. The buffer of their logits is reused."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self._chunk = sampler, max(1, CHUNK_SCORES // sampler.vocab_size)
        self._buffer_RV = np.full((0, sampler.vocab_size), -np.inf, np.float32)

    def __call__(self, numbers: list[int], found: Sequence[FoundTokens], masks_R: Masks) -> Iterator[SampledRow]:
        """Yield the results of rows, by their numbers in the sampler."""
        for start in range(0, len(numbers), self._chunk):
            part = slice(start, start + self._chunk)
            count = len(numbers[part])
            if len(self._buffer_RV) < count:
                self._buffer_RV = np.full((count, self._sampler.vocab_size), -np.inf, np.float32)
            x_RV = self._buffer_RV[:count]
            for x_V, (ids_N, raw_N) in zip(x_RV, found[part], strict=True):
                x_V[ids_N] = raw_N
            yield from sampled_rows(self._sampler, x_RV, numbers[part], masks_R[part])
            for x_V, (ids_N, _) in zip(x_RV, found[part], strict=True):
                x_V[ids_N] = -np.inf


def described(plan: RowPlan, why: str) -> str:
    """What is exchanged for a row, and why if it is the whole row."""
    return f"{WHOLE}: {why}" if why else plan.path


@with_suggestions
class ShardedSampler:
    """Samples a batch of rows whose logits are sharded by columns. Every rank gets the tokens of one ``Sampler``.

    vocab_size: V. group: a process group of torch.distributed, or None for the default one; or a ``RankExchange``.
    backend: "auto", "cpu" or "reference", which samples from the exchanged tokens. timeout: seconds after which a rank
    that does not answer is an error. All ranks make the same calls with the same
    arguments, except for their logits. Shards may be uneven and start at any id; columns from V on are padding.

    Common pipelines exchange less than 1/64 of a row (``explain``). Raises ShardError on all
    ranks if setups, rows, parameters, seeds or masks differ; and in every call after an exchange has failed.
    """

    def __init__(self, vocab_size: int, group: Any = None, *, backend: str = "auto", timeout: float = 60.0) -> None:
        check_count(vocab_size, "vocab_size")
        if not timeout > 0:
            raise ParameterError("timeout", f"timeout must be a number of seconds > 0, got {timeout!r:.60}")
        self.vocab_size, self.stats = int(vocab_size), ShardStats()
        self.last_paths: tuple[str, ...] = ()
        """What the rows of the last call exchanged, in their order, as in ``explain``."""
        if backend in TENSOR_BACKENDS:
            raise ParameterError("backend", f"backend must be one of {', '.join(BACKENDS)}, got {backend!r:.60}")
        if group is None or isinstance(group, torch.distributed.ProcessGroup):
            group = ProcessGroupExchange(group, timeout)
        self._exchange: RankExchange = CountedExchange(group, self.stats)
        self._layout: ShardLayout | None = None
        self._shared_seed, self._added = agree_on_setup(self._exchange, self.vocab_size), 0
        self._log, self._rows = RowLog(), dict[int, ShardedRow]()
        self.sampler = Sampler(self.vocab_size, backend)
        """The ``Sampler`` that has the state of the rows; for methods on whole rows that change nothing."""
        self._kept_sampler = Sampler(self.vocab_size, backend)
        self._sample_own, self._sample_kept = FoundSampling(self.sampler), FoundSampling(self._kept_sampler)

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of the rows, in the order in which they were added."""
        return self.sampler.rows

    def add(
        self,
        params: Params | PreparedPipeline,
        prompt_ids: Sequence[int] = (),
        *,
        output_ids: Sequence[int] = (),
        seed: int | None = None,
        index: int = 0,
        eos_token_ids: Sequence[int] = (),
    ) -> int:
        """Add a row and return its number, as ``Sampler.add``. Without a seed, all ranks get the same random one."""
        ends = tuple(int(token) for token in eos_token_ids)
        if isinstance(params, RequestParams):
            params.check_for_sampler(ends)
        one = prepared(params, ends)
        if seed is None and seed_of(params, one.given) is None:
            seed, index = self._fresh_seed(), 0
        row: int = self.sampler.add(
            params, prompt_ids, output_ids=output_ids, seed=seed, index=index, eos_token_ids=eos_token_ids
        )
        self._added += 1
        stages, seed, kept = self.sampler.stages(row), self.sampler.seed(row), None
        plan = plan_of(stages, one.combine)
        if plan.kept is not None:
            kept = self._kept_sampler.add(plan.kept, prompt_ids, output_ids=output_ids, seed=seed)
        self._rows[row] = ShardedRow(plan, stages, one.combine, kept)
        self._log.record("rows", "add", row)
        self._log.record("parameters of the rows", one.given)
        self._log.record("seeds of the rows", seed)
        self._log.record("tokens of the rows", [int(token) for token in prompt_ids], self.sampler.output_ids(row))
        return row

    def _fresh_seed(self) -> int:
        """A random seed that is the same on all ranks."""
        seed, step = np.array([self._shared_seed], np.uint64), np.zeros(1, np.uint64)
        high, low, *_ = noise.block_words(seed, step, noise.TOKEN, np.array([self._added]))
        return int(high[0]) << 32 | int(low[0])

    def remove(self, row: int) -> None:
        """Remove a row. The other rows do not change."""
        self.sampler.remove(row)
        kept = self._rows.pop(row).kept
        if kept is not None:
            self._kept_sampler.remove(kept)
        self._log.record("rows", "remove", row)

    def seed(self, row: int) -> int:
        """The seed of a row."""
        return self.sampler.seed(row)

    def stages(self, row: int) -> Pipeline:
        """The simplified pipeline of a row for its next step."""
        return self.sampler.stages(row)

    def output_ids(self, row: int) -> tuple[int, ...]:
        """The output tokens of a row so far."""
        return self.sampler.output_ids(row)

    def explain(self, row: int) -> str:
        """What is exchanged for a row: "candidates", "top-p" or "groups"; or "whole row", with the reason.

        A row of the first three is exchanged whole in a step in which it is invalid, flat or close to a tie.
        """
        self.seed(row)  # raises ParameterError for an unknown row
        return described(self._rows[row].plan, self._rows[row].plan.why)

    def __call__(
        self,
        logits_local: Any,
        first_id: int,
        rows: Iterable[int] | None = None,
        *,
        mask: Any = None,
        companion: Any = None,
    ) -> SamplerOutput:
        """Sample the next token of each row, append it, and update stateful stages, as ``Sampler``.

        logits_local: float [R, N], NumPy or torch, the columns from first_id on. rows, mask: as in ``Sampler``; the
        mask covers the whole vocabulary. companion: float [R, N], the same columns of the companions' logits. Invalid
        arguments of one rank are an error on all ranks, and change no row.
        """
        numbers: list[int] = []
        masks_R: Masks = []
        problem: Exception | None = None
        try:
            numbers = list(self.rows) if rows is None else [operator.index(row) for row in rows]
            masks_R = self._checked(numbers, logits_local, mask, companion)
        except (ValueError, TypeError) as error:
            problem = error
        arguments = {
            "kinds of calls": "sample",
            "requested rows": numbers,
            "arguments companion": companion is not None,
            "masks": [] if mask is None else [zlib.crc32(mask_W.tobytes()) for mask_W in masks_R if mask_W is not None],
        }
        logits_RN, first, wait = self._begin(logits_local, first_id, arguments, problem)
        results, whole = self._run(logits_RN, first, numbers, masks_R, wait, companion)
        self.last_paths = tuple(described(self._rows[row].plan, whole.get(at, "")) for at, row in enumerate(numbers))
        self.stats.calls += 1
        self.stats.rows.update(path.partition(":")[0] for path in self.last_paths)
        tokens_R = np.array([one.token for one in results], np.int64)
        self._log.record("tokens of the rows", tokens_R.tolist())
        logprobs = tuple(one.logprobs for one in results)
        errors = {at: one.error for at, one in enumerate(results) if one.error is not None}
        seeds_R = np.array([self.seed(row) for row in numbers], np.uint64)
        seeds_R.flags.writeable = False
        return SamplerOutput(like(logits_local, tokens_R), logprobs if any(logprobs) else None, errors, seeds_R)

    def _checked(self, numbers: list[int], logits_local: Any, mask: Any, companion: Any) -> Masks:
        """The masks of rows, after a check of all arguments. Raises ValueError, TypeError."""
        for row in numbers:
            self.seed(row)
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"rows has one row twice, got {numbers!r:.60}")
        if len(logits_local) != len(numbers):
            raise ValueError(f"logits must have a row for each of {len(numbers)} rows, got {len(logits_local)}")
        if companion is None:
            combined_rows([self._rows[row].combine for row in numbers], None, None)  # ParameterError if a row needs it
        elif tuple(companion.shape) != tuple(logits_local.shape):
            expected, got = list(logits_local.shape), list(companion.shape)
            raise ValueError(f"companion must have the shape {expected}, like the logits, got {got}")
        return masks(mask, len(numbers), self.vocab_size)

    def _begin(
        self, logits_local: Any, first_id: int, arguments: dict[str, Any], problem: Exception | None = None
    ) -> tuple[torch.Tensor, int, Callable[[], ShardLayout]]:
        """Start to agree on a step. Returns the logits of this shard, their first id, and a function that waits.

        Raises what is wrong with the arguments, after the other ranks know it.
        """
        logits_RN, first = torch.zeros((0, 0)), 0
        try:
            logits_RN, first = shard_logits(logits_local), operator.index(first_id)
            if not 0 <= first < 2**31:
                raise ValueError(f"first_id must be an integer >= 0 and < 2**31, got {first}")
        except (ValueError, TypeError) as error:
            problem, first = problem or error, 0
        checksums = {name: zlib.crc32(repr(value).encode()) for name, value in arguments.items()}
        facts = {**checksums, **self._log.facts, "data types of logits": zlib.crc32(str(logits_RN.dtype).encode())}
        receive = agree_on_step(self._exchange, facts, first, logits_RN.shape[1], str(problem or ""))
        if problem is not None:
            receive()
            raise problem

        def wait() -> ShardLayout:
            first_ids, columns = receive()
            if self._layout is None or (self._layout.first_ids, self._layout.columns) != (first_ids, columns):
                self._layout = ShardLayout(first_ids, columns, self.vocab_size)
            return self._layout

        return logits_RN, first, wait

    def _run(
        self,
        logits_RN: torch.Tensor,
        first: int,
        numbers: list[int],
        masks_R: Masks,
        wait: Callable[[], ShardLayout],
        companion: Any,
    ) -> tuple[list[SampledRow], dict[int, str]]:
        """The results of rows, and by index why some were exchanged whole. First what needs no other rank."""
        planned = [self._step_row(row, mask_W) for row, mask_W in zip(numbers, masks_R, strict=True)]
        whole = {at: one for at, one in enumerate(planned) if isinstance(one, str)}
        step_rows = {at: one for at, one in enumerate(planned) if not isinstance(one, str)}
        step, places, results = None, [*step_rows], dict[int, SampledRow]()
        if places:
            count = max(0, min(first + logits_RN.shape[1], self.vocab_size) - first)
            part_BN = logits_RN if len(places) == len(numbers) else logits_RN[places]
            step = ShardStep(self._exchange, part_BN[:, :count].float().contiguous(), first, [*step_rows.values()])
        layout = wait()
        if step is not None:
            tokens = dict(zip(places, step.run(layout), strict=True))
            whole |= {at: why for at, why in tokens.items() if isinstance(why, str)}
            found = {at: one for at, one in tokens.items() if not isinstance(one, str)}
            results = self._sample_found(found, numbers, masks_R)
            reporting = {
                place: (token, float(found[at].raw_N[np.searchsorted(found[at].ids_N, token)]))
                for place, at in enumerate(places)
                if step_rows[at].plan.tap is not None and at in found and (token := results[at].token) >= 0
            }
            for place, logprobs in step.logprobs.report(reporting).items():
                results[places[place]] = results[places[place]]._replace(logprobs=logprobs)
        if whole:
            places = sorted(whole)
            rows, masks_P = [numbers[at] for at in places], [masks_R[at] for at in places]
            logits_PV, other_PV = gather_rows(self._exchange, layout, logits_RN[places]), None
            if companion is not None:
                other_PV = gather_rows(self._exchange, layout, shard_logits(companion)[places])
            results |= zip(places, sampled_rows(self.sampler, logits_PV, rows, masks_P, other_PV), strict=True)
            for at in places:
                if results[at].token >= 0:
                    self._follow(numbers[at], results[at].token)
        return [results[at] for at in range(len(numbers))], whole

    def _step_row(self, row: int, mask_W: NDArray[np.int32] | None) -> StepRow | str:
        """What a step exchanges for a row; or why it needs the whole row."""
        plan, stages, *_ = self._rows[row]
        if plan.path == WHOLE:
            return plan.why
        past, shifts = self.sampler.history(row), plan.shifts
        if mask_W is not None and with_mask(stages) is not stages:
            shifts = (*shifts, Mask())
        try:
            key = self.seed(row), len(past.output)
            if plan.path == GROUPS:
                key = reference.noise_of(stages, past, *key)
            return StepRow(plan, RowShifts(shifts, past, mask_W, self.vocab_size) if shifts else None, key)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything; the whole row reports it
            return f"{type(error).__name__}: {error}"

    def _sample_found(self, found: dict[int, FoundTokens], numbers: list[int], masks_R: Masks) -> dict[int, SampledRow]:
        """The results of rows from the tokens that decide them, by index."""
        own, kept = dict[int, int](), dict[int, int]()
        for at in found:
            number = self._rows[numbers[at]].kept
            if number is None:
                own[at] = numbers[at]
            else:
                kept[at] = number
        results: dict[int, SampledRow] = {}
        for sampling, rows in ((self._sample_own, own), (self._sample_kept, kept)):
            sampled = sampling([*rows.values()], [found[at] for at in rows], [masks_R[at] for at in rows])
            results |= zip(rows, sampled, strict=True)
        for at in kept:
            if results[at].token >= 0:
                self.sampler.accept(numbers[at], results[at].token)
        return results

    def _follow(self, row: int, token: int) -> None:
        """Append a token that ``sampler`` has already."""
        kept = self._rows[row].kept
        if kept is not None:
            self._kept_sampler.accept(kept, token)

    def distributions(
        self,
        row: int,
        logits_local: Any,
        first_id: int,
        tokens: Sequence[int] = (),
        masks: Any = None,
        *,
        parents: Sequence[int] | None = None,
        companion: Any = None,
    ) -> TargetDistributions:
        """The distributions of a row's next tokens, as ``Sampler.distributions``. Exchanges whole rows, [N, V]."""
        logits_NV = self._whole(logits_local, first_id, row, list(tokens))
        other_NV = None if companion is None else self._whole(companion, first_id, row, list(tokens))
        return self.sampler.distributions(row, logits_NV, tokens, masks, parents=parents, companion=other_NV)

    def accept(
        self,
        row: int,
        token: int,
        logits_local: Any = None,
        first_id: int = 0,
        mask_W: Any = None,
        *,
        distribution: Any = None,
    ) -> StepLogprobs | None:
        """Append a token that this sampler did not sample, as ``Sampler.accept``.

        Without logits the token is forced, and nothing is exchanged. logits_local: float [N], the columns from first_id
        on of the logits from which the token was sampled.
        """
        self.seed(row)
        check_token(token, self.vocab_size)
        logits_V = None if logits_local is None else self._whole(logits_local[None], first_id, row, [int(token)])[0]
        logprobs = self.sampler.accept(row, int(token), logits_V, mask_W, distribution=distribution)
        self._follow(row, int(token))
        self._log.record("tokens of the rows", row, int(token))
        return logprobs

    def _whole(self, logits_local: Any, first_id: int, row: int, tokens: list[int]) -> torch.Tensor:
        """Whole rows of logits, from the columns of all ranks."""
        arguments = {"kinds of calls": "whole rows", "requested rows": row, "tokens": tokens}
        logits_RN, _, wait = self._begin(logits_local, first_id, arguments)
        return gather_rows(self._exchange, wait(), logits_RN)
