"""Sampler: the state of a batch of rows. One call per step samples a token for each; rows can be added and removed."""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import BACKENDS
from nucleate.outputs import StepLogprobs
from nucleate.parameters.converters import install_extra
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import noise
from nucleate.sampling.companion import combined_rows
from nucleate.sampling.distributions import TargetDistributions, accept_sampled, is_stateful
from nucleate.sampling.history import History, HistoryView
from nucleate.sampling.host_batch import HostBatch, SamplerRow, known, row_path
from nucleate.sampling.incremental_history import HistoryMaker
from nucleate.sampling.inputs import LogitsInput, check_count, check_ids, check_token, history, per_row
from nucleate.sampling.pipeline import Params, PreparedPipeline, RequestParams, prepared, seed_of
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.route import TENSOR_BACKENDS
from nucleate.sampling.stage import Combine, Pipeline, Tap

if TYPE_CHECKING:
    from nucleate.sampling.gpu.batch_state import DecodeLoop, Forward
    from nucleate.sampling.gpu.device_batch import DeviceBatch


class SamplerOutput(NamedTuple):
    """The result of one step, for R rows in the order of their logits.

    token_ids is a torch tensor if the logits are one or the rows are on a device, otherwise a NumPy array. On a device,
    reading logprobs or errors synchronises with it.
    """

    token_ids: Any  #: int64 [R], NumPy or torch; -1 for a row with an error
    logprobs: Sequence[StepLogprobs | None] | None  #: of the rows that report them; None if no row does
    errors: Mapping[int, str]  #: {position in this call: message}; a row with an error does not advance
    seeds: NDArray[np.uint64]  #: [R], read-only; the seed reproduces the row


_sampled = functools.partial(tuple.__new__, SamplerOutput)
"""Takes half the time of ``SamplerOutput(...)``."""


@with_suggestions
class Sampler:
    """Samples a batch of rows, each with its own pipeline, seed, step and history.

    vocab_size: V, the length of a row of logits. backend: "auto", "reference", "cpu", "torch" or "triton". device:
    "cpu", or a torch device such as "cuda:0". The backends "torch" and "triton" run on the device; with device "cpu",
    "torch" uses tensors on the CPU.

    On a GPU, all row state and the sampled tokens stay on the device. A step does not synchronise unless some row runs
    on the CPU (see ``explain``); reading ``token_ids`` with ``tolist`` does. Other synchronising methods say so.
    """

    def __init__(self, vocab_size: int, backend: str = "auto", device: str = "cpu") -> None:
        check_count(vocab_size, "vocab_size")
        if backend not in (names := (*BACKENDS, *TENSOR_BACKENDS)):
            raise ParameterError("backend", f"backend must be one of {', '.join(names)}, got {backend!r:.60}")
        self.backend = backend
        self.vocab_size = int(vocab_size)
        self._rows: dict[int, SamplerRow] = {}
        self._combines: dict[int, Combine] = {}
        self._next = 0
        self._histories = HistoryMaker(self.vocab_size)
        self._host = HostBatch(self.vocab_size, "auto" if backend in TENSOR_BACKENDS else backend, self._rows)
        self._device: DeviceBatch | None = None
        self._batch: HostBatch | DeviceBatch = self._host
        if device != "cpu" or backend in TENSOR_BACKENDS:
            if importlib.util.find_spec("torch") is None:
                raise ParameterError("device", f"device {device!r:.60} needs torch: {install_extra('cuda')}")
            from nucleate.sampling.gpu.device_batch import DeviceBatch  # imports torch

            self._batch = self._device = DeviceBatch(self.vocab_size, device, backend, self._rows, self._host)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of the rows, in the order in which they were added."""
        return tuple(self._rows)

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
        """Add a row and return its number, which is not used again.

        output_ids: tokens that the row has already generated. seed: overrides the seed in params. index: of the output
        among n; the row's seed is seed + index. eos_token_ids: of the model, for ``min_tokens``. Raises ParameterError
        for token ids outside the vocabulary, for text in parameters, which needs a tokenizer (see
        ``SamplingParams.build_pipeline``), and for fields that need an engine, such as ``stop``.
        """
        ends = tuple(history(eos_token_ids, self.vocab_size, "eos_token_ids").tolist())
        if isinstance(params, RequestParams):
            params.check_for_sampler(ends)
        elif ends:
            raise ParameterError(
                "eos_token_ids", "eos_token_ids needs SamplingParams; in a pipeline, use MinTokens(n, ids)"
            )
        pipeline = params if isinstance(params, PreparedPipeline) else prepared(params, ends)
        given, stages, fused, combine = pipeline
        if params is not pipeline:
            check_ids(stages, self.vocab_size)
        memory = self._histories.new(stages, prompt_ids, output_ids)
        [offset] = per_row(index, 1, "index")
        base_seed = seed_of(params, given) if seed is None else seed
        row_seed = noise.fresh_seed() if base_seed is None else (per_row(base_seed, 1, "seed")[0] + offset) % 2**64
        row = SamplerRow(stages, memory, row_seed)
        number, self._next = self._next, self._next + 1
        self._batch.add(number, row, fused)
        self._rows[number] = row
        if combine is not None:
            self._combines[number] = combine
        return number

    def distributions(
        self,
        row: int,
        logits_NV: Any,
        tokens: Sequence[int] = (),
        masks: Any = None,
        *,
        parents: Sequence[int] | None = None,
        companion: Any = None,
    ) -> TargetDistributions:
        """The distributions from which a row's next tokens are sampled: now, and after each of N - 1 draft tokens.

        The result has the shape [N, V], float64. The row does not change. logits_NV: float [N, V], NumPy or torch.
        tokens: the draft tokens. masks: a bitmask int32 [W] or None per position. parents: the index of the token that
        each token follows, -1 for the row itself; by default the previous token. companion: [N, V], as in a call. XTC
        is averaged over its random decision. Computed on the CPU. Raises ValueError for logits of another shape.
        """
        own, logits = self._up_to_date(row), LogitsInput(logits_NV)
        if row in self._combines:
            logits = LogitsInput(combined_rows([self._combines[row]] * len(logits), logits_NV, companion))
        if logits.shape != (len(tokens) + 1, self.vocab_size):
            raise ValueError(
                f"logits must have the shape {[len(tokens) + 1, self.vocab_size]}, got {list(logits.shape)}"
            )
        fast = self._host.fast(self.vocab_size)
        return TargetDistributions(
            own.stages, own.memory.prompt, own.memory.output, logits, tokens, masks, parents=parents, fast=fast
        )

    def accept(
        self,
        row: int,
        token: int,
        logits_V: Any = None,
        mask_W: Any = None,
        *,
        distribution: NDArray[np.float64] | None = None,
    ) -> StepLogprobs | None:
        """Append a token that this sampler did not sample, and update stateful stages.

        Without logits the token is forced: no other was allowed. With logits_V, float [V], it was sampled elsewhere
        from this row's distribution, under the bitmask mask_W if there is one; the token's logprobs are returned if
        the row reports them. distribution: float64 [V], as ``distributions`` returns it, if it is known; otherwise it
        is computed. On a device, a call with logits synchronises, unless the distribution is given and no stage has a
        state or reports logprobs. Logits of a row with guidance are combined ones. Raises ParameterError for a
        token outside the vocabulary, and ValueError for a token whose probability is 0.
        """
        own = known(self._rows, row)
        check_token(token, self.vocab_size)
        token = int(token)
        if logits_V is None:
            self._batch.push(row, token)
            return None
        is_updated = any(isinstance(stage, Tap) or is_stateful(stage) for stage in own.stages)
        if is_updated or distribution is None:
            own = self._up_to_date(row)
            logits = LogitsInput(logits_V[None] if hasattr(logits_V, "detach") else np.asarray(logits_V)[None])
            if logits.shape[1] != self.vocab_size:
                raise ValueError(f"logits must have the shape {[self.vocab_size]}, got {[logits.shape[1]]}")
            stages = own.stages if mask_W is None else with_mask(own.stages)
            past = History(own.memory.prompt, own.memory.output, mask_W)
            if distribution is None:
                distribution = row_path(self._host.fast(self.vocab_size)).probabilities(logits[0], stages, past)
        if not distribution[token] > 0:
            raise ValueError(f"token {token} cannot be sampled from row {row}: its probability is 0")
        if not is_updated:
            self._batch.push(row, token)
            return None
        result = accept_sampled(logits[0], stages, token, past)
        self._batch.push(row, token, result.stages if stages is own.stages else without_mask(result.stages))
        return result.logprobs

    def remove(self, row: int) -> None:
        """Remove a row. The other rows do not change."""
        known(self._rows, row)
        del self._rows[row]
        self._combines.pop(row, None)
        self._batch.remove(row)

    def seed(self, row: int) -> int:
        """The seed of a row: the given one, or the one generated when the row was added."""
        return known(self._rows, row).seed

    def stages(self, row: int) -> Pipeline:
        """The simplified pipeline of a row for its next step. Synchronises with the device if a stage has a state."""
        own = known(self._rows, row)
        return self._up_to_date(row).stages if any(map(is_stateful, own.stages)) else own.stages

    def output_ids(self, row: int) -> tuple[int, ...]:
        """The output tokens of a row so far. Synchronises with the device."""
        return tuple(self._up_to_date(row).memory.output)

    def history(self, row: int) -> HistoryView:
        """The tokens of a row so far, as its stages read them. Synchronises with the device."""
        return self._up_to_date(row).memory

    def __call__(
        self, logits_RV: Any, rows: Iterable[int] | None = None, *, mask: Any = None, companion: Any = None
    ) -> SamplerOutput:
        """Sample the next token of each row, append it, and update stateful stages.

        logits_RV: float [R, V], NumPy or torch. rows: the numbers of the rows, in the order of the logits; by default
        all rows. mask: int32 [R, V / 32], bitmask of the allowed tokens, lowest bit first.
        companion: float [R, V], the logits of the companion sequences; other rows than those with guidance or
        contrastive decoding ignore theirs. Append each sampled token to its companion too. Invalid arguments raise
        ValueError, TypeError or ParameterError, and change no row. Tensors on the sampler's device are not copied: do
        not overwrite the logits before reading ``errors``, whose messages are computed from them.
        """
        requested = None if rows is None else [operator.index(row) for row in rows]
        if self._combines:
            numbers = self._host.batch(requested).numbers
            logits_RV = combined_rows([self._combines.get(number) for number in numbers], logits_RV, companion)
        return _sampled(self._batch.step(requested, logits_RV, mask))

    def loop(
        self,
        forward: Forward,
        first_ids: Sequence[int],
        rows: Iterable[int] | None = None,
        *,
        steps: int,
        stop_ids: Sequence[int] = (),
    ) -> DecodeLoop:
        """Generate up to ``steps`` tokens per row in a loop on the device, without synchronising; see ``DecodeLoop``.

        forward(token_ids [R], active [R]) returns logits [R, V]. first_ids: the token ids of its first call, the last
        token of each prompt. stop_ids: token ids that end a row. On CUDA the loop is captured as one graph. Raises
        ParameterError for rows that run on the CPU or report logprobs.
        """
        numbers = list(self._rows) if rows is None else [operator.index(row) for row in rows]
        for number in numbers:
            known(self._rows, number)
        if self._device is None:
            raise ParameterError("device", "a loop runs on a device: Sampler(vocab_size, device=...)")
        return self._device.loop(numbers, forward, first_ids, steps, stop_ids)

    def _up_to_date(self, row: int) -> SamplerRow:
        """A row whose history and state on the host are complete. Synchronises with the device."""
        own = known(self._rows, row)
        self._batch.synchronise()
        return own
