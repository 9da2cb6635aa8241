"""ShardedSampler: samples from logits whose vocabulary is sharded over ranks, the same tokens as one Sampler."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
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
from nucleate.sampling.dispatch.route import TENSOR_BACKENDS
from nucleate.sampling.distributions import TargetDistributions
from nucleate.sampling.inputs import check_count, check_token, like, masks
from nucleate.sampling.pipeline import Params, PreparedPipeline, RequestParams, prepared, seed_of
from nucleate.sampling.presets import with_mask
from nucleate.sampling.sampler import Sampler, SamplerOutput
from nucleate.sampling.stage import Combine, Pipeline
from nucleate.sampling.stages.constraints.mask import Mask
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


class SampledRows(NamedTuple):
    """What was sampled. Keys are indices of the rows in the call."""

    tokens: dict[int, int]
    errors: dict[int, str]
    logprobs: dict[int, StepLogprobs]

    def include(self, other: SampledRows, places: Sequence[int]) -> None:
        """Add the results of rows at some places of this call."""
        self.tokens.update({places[at]: token for at, token in other.tokens.items()})
        self.errors.update({places[at]: error for at, error in other.errors.items()})
        self.logprobs.update({places[at]: one for at, one in other.logprobs.items()})


Masks = Sequence[NDArray[np.int32] | None]
"""A bitmask per row; None for all rows if the step has none."""


class FoundSampling:
    """Samples such rows with a Sampler. The buffer of their logits is reused."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._buffer_RV = np.full((0, sampler.vocab_size), -np.inf, np.float32)

    def __call__(self, numbers: Sequence[int], found: Sequence[FoundTokens], masks_R: Masks) -> SampledRows:
        """Sample rows, by their numbers in the sampler."""
        chunk, result = max(1, CHUNK_SCORES // self.sampler.vocab_size), SampledRows({}, {}, {})
        for start in range(0, len(numbers), chunk):
            part = slice(start, start + chunk)
            result.include(self._sample(list(numbers[part]), found[part], masks_R[part]), range(start, len(numbers)))
        return result

    def _sample(self, numbers: list[int], found: Sequence[FoundTokens], masks_R: Masks) -> SampledRows:
        if len(self._buffer_RV) < len(numbers):
            self._buffer_RV = np.full((len(numbers), self.sampler.vocab_size), -np.inf, np.float32)
        x_RV = self._buffer_RV[: len(numbers)]
        for x_V, (ids_N, raw_N) in zip(x_RV, found, strict=True):
            x_V[ids_N] = raw_N
        result = sampled_rows(self.sampler, x_RV, numbers, masks_R)
        for x_V, (ids_N, _) in zip(x_RV, found, strict=True):
            x_V[ids_N] = -np.inf
        return result


def sampled_rows(
    sampler: Sampler, logits_RV: object, numbers: list[int], masks_R: Masks, companion_RV: object = None
) -> SampledRows:
    """The results of a sampler's step, by index."""
    given = [mask_W for mask_W in masks_R if mask_W is not None]
    out = sampler(logits_RV, numbers, mask=np.stack(given) if given else None, companion=companion_RV)
    tokens = {at: token for at, token in enumerate(out.token_ids.tolist()) if token >= 0}
    logprobs = {at: one for at, one in enumerate(out.logprobs or ()) if one is not None}
    return SampledRows(tokens, dict(out.errors), logprobs)


class ShardRows:
    """The rows, as they are on every rank. shared_seed: from which rows without a seed get theirs."""

    def __init__(self, vocab_size: int, backend: str, shared_seed: int) -> None:
        self.sampler, self.log, self.plans = Sampler(vocab_size, backend), RowLog(), dict[int, RowPlan]()
        self.combines: dict[int, Combine] = {}
        self._stages: dict[int, Pipeline] = {}
        """Pipelines of rows as added: their Shifts and draws do not change."""
        self._size, self._shared_seed, self._added = vocab_size, shared_seed, 0
        self._own, self._other = FoundSampling(self.sampler), FoundSampling(Sampler(vocab_size, backend))
        self._other_rows: dict[int, int] = {}  # rows with a ``RowPlan.kept``: their numbers in the other sampler

    def add(
        self,
        params: Params | PreparedPipeline,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        seed: int | None,
        index: int,
        eos_token_ids: Sequence[int],
    ) -> int:
        """Add a row, see ``Sampler.add``."""
        ends = tuple(int(token) for token in eos_token_ids)
        if isinstance(params, RequestParams):
            params.check_for_sampler(ends)
        one = prepared(params, ends)
        if seed is None and seed_of(params, one.given) is None:
            seed, index = self._fresh_seed(), 0
        row = self.sampler.add(
            params, prompt_ids, output_ids=output_ids, seed=seed, index=index, eos_token_ids=eos_token_ids
        )
        self._added += 1
        stages = self._stages[row] = self.sampler.stages(row)
        plan, seed = plan_of(stages, one.combine), self.sampler.seed(row)
        self.plans[row] = plan
        if one.combine is not None:
            self.combines[row] = one.combine
        if plan.kept is not None:
            self._other_rows[row] = self._other.sampler.add(plan.kept, prompt_ids, output_ids=output_ids, seed=seed)
        self.log.record("rows", "add", row)
        self.log.record("parameters of the rows", one.given)
        self.log.record("seeds of the rows", seed)
        self.log.record("tokens of the rows", [int(token) for token in prompt_ids], self.sampler.output_ids(row))
        return row

    def _fresh_seed(self) -> int:
        """A random seed that is the same on all ranks."""
        seed, step = np.array([self._shared_seed], np.uint64), np.zeros(1, np.uint64)
        high, low, *_ = noise.block_words(seed, step, noise.TOKEN, np.array([self._added]))
        return int(high[0]) << 32 | int(low[0])

    def remove(self, row: int) -> None:
        """Remove a row."""
        self.sampler.remove(row)
        del self.plans[row]
        del self._stages[row]
        self.combines.pop(row, None)
        if row in self._other_rows:
            self._other.sampler.remove(self._other_rows.pop(row))
        self.log.record("rows", "remove", row)

    def follow(self, row: int, token: int) -> None:
        """Append a token that ``sampler`` has already."""
        if row in self._other_rows:
            self._other.sampler.accept(self._other_rows[row], token)

    def step_row(self, row: int, mask_W: NDArray[np.int32] | None) -> StepRow | str:
        """What a step exchanges for a row; or why it needs the whole row."""
        plan = self.plans[row]
        if plan.path == WHOLE:
            return plan.why
        past, shifts, stages = self.sampler.history(row), plan.shifts, self._stages[row]
        if mask_W is not None and with_mask(stages) is not stages:
            shifts = (*shifts, Mask())
        try:
            key = self.sampler.seed(row), len(past.output)
            if plan.path == GROUPS:
                key = reference.noise_of(stages, past, *key)
            return StepRow(plan, RowShifts(shifts, past, mask_W, self._size) if shifts else None, key)
        except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything; the whole row reports it
            return f"{type(error).__name__}: {error}"

    def sample(self, rows: Sequence[int], found: Sequence[FoundTokens], masks_R: Masks) -> SampledRows:
        """Sample rows from the tokens that decide them."""
        result = SampledRows({}, {}, {})
        for sampling in (self._own, self._other):
            mine = [at for at, row in enumerate(rows) if (row in self._other_rows) == (sampling is self._other)]
            numbers = [self._other_rows.get(rows[at], rows[at]) for at in mine]
            result.include(sampling(numbers, [found[at] for at in mine], [masks_R[at] for at in mine]), mine)
        for at, token in result.tokens.items():
            if rows[at] in self._other_rows:
                self.sampler.accept(rows[at], token)
        return result


class ShardedCall:
    """A call for some rows. logits_RN: the logits of this rank's shard, from id ``first`` on.

    Computes what needs no other rank; ``run`` exchanges.
    """

    def __init__(
        self,
        exchange: RankExchange,
        rows: ShardRows,
        logits_RN: torch.Tensor,
        first: int,
        numbers: list[int],
        masks_R: Masks,
    ) -> None:
        self._exchange, self._rows, self._logits_RN = exchange, rows, logits_RN
        self._numbers, self._masks_R = numbers, masks_R
        self._step_rows: dict[int, StepRow] = {}
        self.whole: dict[int, str] = {}
        """The rows that are exchanged whole, by index, with the reason."""
        for at, (row, mask_W) in enumerate(zip(numbers, masks_R, strict=True)):
            step_row = rows.step_row(row, mask_W)
            if isinstance(step_row, str):
                self.whole[at] = step_row
            else:
                self._step_rows[at] = step_row
        self._places = list(self._step_rows)
        if self._places:
            count = max(0, min(first + logits_RN.shape[1], rows.sampler.vocab_size) - first)
            part_BN = logits_RN if len(self._places) == len(numbers) else logits_RN[self._places]
            raw_BN = part_BN[:, :count].float().contiguous()
            self._step = ShardStep(exchange, raw_BN, first, [*self._step_rows.values()])

    def run(self, layout: ShardLayout, companion_RN: torch.Tensor | None) -> SampledRows:
        """The results, by index."""
        result = SampledRows({}, {}, {})
        if self._places:
            self._sample_found(layout, result)
        if self.whole:
            self._sample_whole(layout, sorted(self.whole), companion_RN, result)
        return result

    def _sample_found(self, layout: ShardLayout, result: SampledRows) -> None:
        places = self._places
        tokens = dict(enumerate(self._step.run(layout)))
        self.whole |= {places[at]: why for at, why in tokens.items() if isinstance(why, str)}
        found = {at: one for at, one in tokens.items() if not isinstance(one, str)}
        mine = [places[at] for at in found]
        rows, masks_R = [self._numbers[at] for at in mine], [self._masks_R[at] for at in mine]
        result.include(self._rows.sample(rows, [*found.values()], masks_R), mine)
        reporting = {
            at: (token, float(one.raw_N[np.searchsorted(one.ids_N, token)]))
            for at, one in found.items()
            if self._step_rows[places[at]].plan.tap is not None and (token := result.tokens.get(places[at], -1)) >= 0
        }
        if reporting:
            result.logprobs.update({places[at]: one for at, one in self._step.logprobs.report(reporting).items()})

    def _sample_whole(
        self, layout: ShardLayout, places: list[int], companion_RN: torch.Tensor | None, result: SampledRows
    ) -> None:
        logits_RV = gather_rows(self._exchange, layout, self._logits_RN[places])
        other_RV = None if companion_RN is None else gather_rows(self._exchange, layout, companion_RN[places])
        rows, masks_R = [self._numbers[at] for at in places], [self._masks_R[at] for at in places]
        sampled = sampled_rows(self._rows.sampler, logits_RV, rows, masks_R, other_RV)
        result.include(sampled, places)
        for at, token in sampled.tokens.items():
            self._rows.follow(rows[at], token)


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
        self._rows = ShardRows(self.vocab_size, backend, agree_on_setup(self._exchange, self.vocab_size))
        self._sampler = self._rows.sampler

    def __len__(self) -> int:
        return len(self._sampler)

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of the rows, in the order in which they were added."""
        return self._sampler.rows

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
        return self._rows.add(params, prompt_ids, output_ids, seed, index, eos_token_ids)

    def remove(self, row: int) -> None:
        """Remove a row. The other rows do not change."""
        self._rows.remove(row)

    @property
    def sampler(self) -> Sampler:
        """The ``Sampler`` that has the state of the rows; for methods on whole rows that change nothing."""
        return self._sampler

    def seed(self, row: int) -> int:
        """The seed of a row."""
        return self._sampler.seed(row)

    def stages(self, row: int) -> Pipeline:
        """The simplified pipeline of a row for its next step."""
        return self._sampler.stages(row)

    def output_ids(self, row: int) -> tuple[int, ...]:
        """The output tokens of a row so far."""
        return self._sampler.output_ids(row)

    def explain(self, row: int) -> str:
        """What is exchanged for a row: "candidates", "top-p" or "groups"; or "whole row", with the reason.

        A row of the first three is exchanged whole in a step in which it is invalid, flat or close to a tie.
        """
        self._sampler.seed(row)  # raises ParameterError for an unknown row
        return described(self._rows.plans[row], self._rows.plans[row].why)

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
        logits_RN, first, problem = self._columns(logits_local, first_id, problem)
        wait = self._begin(logits_RN, first, problem, arguments)
        if problem is not None:
            wait()
            raise problem
        call = ShardedCall(self._exchange, self._rows, logits_RN, first, numbers, masks_R)
        result = call.run(wait(), None if companion is None else shard_logits(companion))  # compared while it computed
        self.last_paths = tuple(
            described(self._rows.plans[row], call.whole.get(at, "")) for at, row in enumerate(numbers)
        )
        self.stats.calls += 1
        self.stats.rows.update(path.partition(":")[0] for path in self.last_paths)
        tokens_R = np.array([result.tokens.get(at, -1) for at in range(len(numbers))], np.int64)
        self._rows.log.record("tokens of the rows", tokens_R.tolist())
        reported = tuple(map(result.logprobs.get, range(len(numbers)))) if result.logprobs else None
        seeds_R = np.array([self.seed(row) for row in numbers], np.uint64)
        seeds_R.flags.writeable = False
        return SamplerOutput(like(logits_local, tokens_R), reported, dict(sorted(result.errors.items())), seeds_R)

    def _checked(self, numbers: list[int], logits_local: Any, mask: Any, companion: Any) -> Masks:
        """The masks of rows, after a check of all arguments. Raises ValueError, TypeError."""
        for row in numbers:
            self.seed(row)
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"rows has one row twice, got {numbers!r:.60}")
        if len(logits_local) != len(numbers):
            raise ValueError(f"logits must have a row for each of {len(numbers)} rows, got {len(logits_local)}")
        combines = [self._rows.combines.get(row) for row in numbers]
        if companion is None:
            combined_rows(combines, None, None)  # raises ParameterError if a row needs it
        elif tuple(companion.shape) != tuple(logits_local.shape):
            expected, got = list(logits_local.shape), list(companion.shape)
            raise ValueError(f"companion must have the shape {expected}, like the logits, got {got}")
        return masks(mask, len(numbers), self.vocab_size)

    def _columns(
        self, logits_local: Any, first_id: int, problem: Exception | None
    ) -> tuple[torch.Tensor, int, Exception | None]:
        """The logits of this shard, and their first id; or what is wrong with them."""
        try:
            logits_RN, first = shard_logits(logits_local), operator.index(first_id)
            if not 0 <= first < 2**31:
                raise ValueError(f"first_id must be an integer >= 0 and < 2**31, got {first}")
        except (ValueError, TypeError) as error:
            return torch.zeros((0, 0)), 0, problem or error
        return logits_RN, first, problem

    def _begin(
        self, logits_RN: torch.Tensor, first: int, problem: Exception | None, arguments: dict[str, Any]
    ) -> Callable[[], ShardLayout]:
        """Start to agree with the other ranks on a step. The result waits for the layout. Raises ``problem`` there."""
        checksums = {name: zlib.crc32(repr(value).encode()) for name, value in arguments.items()}
        facts = {**checksums, **self._rows.log.facts, "data types of logits": zlib.crc32(str(logits_RN.dtype).encode())}
        receive = agree_on_step(self._exchange, facts, first, logits_RN.shape[1], str(problem or ""))

        def wait() -> ShardLayout:
            first_ids, columns = receive()
            if problem is not None:
                raise problem
            if self._layout is None or (self._layout.first_ids, self._layout.columns) != (first_ids, columns):
                self._layout = ShardLayout(first_ids, columns, self.vocab_size)
            return self._layout

        return wait

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
        return self._sampler.distributions(row, logits_NV, tokens, masks, parents=parents, companion=other_NV)

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
        logprobs = self._sampler.accept(row, int(token), logits_V, mask_W, distribution=distribution)
        self._rows.follow(row, int(token))
        self._rows.log.record("tokens of the rows", row, int(token))
        return logprobs

    def _whole(self, logits_local: Any, first_id: int, row: int, tokens: list[int]) -> torch.Tensor:
        """Whole rows of logits, from the columns of all ranks."""
        logits_RN, first, problem = self._columns(logits_local, first_id, None)
        arguments = {"kinds of calls": "whole rows", "requested rows": row, "tokens": tokens}
        return gather_rows(self._exchange, self._begin(logits_RN, first, problem, arguments)(), logits_RN)
