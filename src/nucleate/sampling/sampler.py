"""Sampler: the state of a batch of rows. One call per step samples a token for each; rows can be added and removed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.readiness import BACKENDS
from nucleate.outputs import StepLogprobs
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import noise
from nucleate.sampling.cpu_paths import chances
from nucleate.sampling.device_batch import DeviceBatch
from nucleate.sampling.dispatch.route import TENSOR_BACKENDS
from nucleate.sampling.distributions import TargetDistributions, accept_sampled, is_stateful
from nucleate.sampling.history import History
from nucleate.sampling.host_batch import HostBatch, SamplerRow, known
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.inputs import LogitsInput, check_count, check_ids, check_token, history, per_row
from nucleate.sampling.pipeline import Params, PreparedPipeline, RequestParams, prepared
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.stage import DrawnToken, Pipeline, Tap

if TYPE_CHECKING:
    from nucleate.sampling.backends.torch.decode_loop import DecodeLoop, Forward


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
        self._next = 0
        self._host = HostBatch(self.vocab_size, "auto" if backend in TENSOR_BACKENDS else backend, self._rows)
        self._device: DeviceBatch | None = None
        if device != "cpu" or backend in TENSOR_BACKENDS:
            self._device = DeviceBatch(self.vocab_size, device, backend, self._rows, self._host.alone)

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
        ``SamplingParams.pipeline``), and for fields that need an engine, such as ``stop``.
        """
        ends = tuple(history(eos_token_ids, self.vocab_size, "eos_token_ids").tolist())
        if isinstance(params, RequestParams):
            params.check_for_sampler(ends)
        elif ends:
            raise ParameterError(
                "eos_token_ids", "eos_token_ids is for SamplingParams: a pipeline says MinTokens(n, ids)"
            )
        pipeline = params if isinstance(params, PreparedPipeline) else prepared(params, ends)
        requested, stages, chain = pipeline
        if params is not pipeline:
            check_ids(stages, self.vocab_size)
        prompt = history(prompt_ids, self.vocab_size, "prompt_ids")
        output = history(output_ids, self.vocab_size, "output_ids")
        [answer] = per_row(index, 1, "index")
        own = params if isinstance(params, RequestParams) else requested[-1]
        given = getattr(own, "seed", None) if seed is None else seed  # a greedy draw has none of its own
        own_seed = noise.fresh_seed() if given is None else (per_row(given, 1, "seed")[0] + answer) % 2**64
        row = SamplerRow(stages, IncrementalHistory(stages, prompt.tolist(), output.tolist()), own_seed)
        number, self._next = self._next, self._next + 1
        if self._device is not None:
            self._device.add(number, stages, chain, row.memory, own_seed)
        elif not isinstance(chain, str):
            self._host.add(number, row, chain)
        self._rows[number] = row
        self._host.forget()
        return number

    def distributions(
        self,
        row: int,
        logits_NV: Any,
        tokens: Sequence[int] = (),
        masks: Any = None,
        *,
        parents: Sequence[int] | None = None,
    ) -> TargetDistributions:
        """The distributions of a row's next tokens, [N, V] float64: now, and after each of some tokens.

        logits_NV: float [N, V], NumPy or torch, with N - 1 tokens; masks: what a grammar allows, int32 [W] for each of
        the N, or None. parents: for each token which one it follows, -1 for none; without it the one before. Nothing
        changes; with XTC it is the average over what its coin may say, as in
        ``probabilities``. Worked out on the host. Raises ValueError.
        """
        own, logits = self._up_to_date(row), LogitsInput(logits_NV)
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
        """Append a token that this sampler did not draw, and update stateful stages.

        Without logits the token is forced: no other was allowed. With logits_V, float [V], it was sampled elsewhere
        from this row's distribution, under the bitmask mask_W if there is one; the token's logprobs are returned if
        the row reports them. distribution: float64 [V], as ``distributions`` returns it, if it is known; otherwise it
        is computed. On a device, logits make the call wait, unless the distribution is given and no stage has a state
        or reports logprobs. Raises ParameterError for a token outside the vocabulary, ValueError for a token whose
        probability is 0.
        """
        own = known(self._rows, row)
        check_token(token, self.vocab_size)
        token = int(token)
        if logits_V is None:
            self._append(row, token)
            return None
        return self._accept_sampled(row, own, token, logits_V, mask_W, distribution)

    def _append(self, row: int, token: int) -> None:
        """Append a token whose probability was 1."""
        own = known(self._rows, row)
        if self._device is not None and row in self._device:
            self._device.push(row, token)
            return
        self._host.push(row, own, token)
        own.move(tuple(stage.after(DrawnToken(token, 0.0, 0.0)) for stage in own.stages))

    def _accept_sampled(
        self, row: int, own: SamplerRow, token: int, logits_V: Any, mask_W: Any, law: NDArray[np.float64] | None
    ) -> StepLogprobs | None:
        is_updated = any(isinstance(stage, Tap) or is_stateful(stage) for stage in own.stages)
        if is_updated or law is None:
            own = self._up_to_date(row)
            logits = LogitsInput(logits_V[None] if hasattr(logits_V, "detach") else np.asarray(logits_V)[None])
            if logits.shape[1] != self.vocab_size:
                raise ValueError(f"logits must have the shape {[self.vocab_size]}, got {[logits.shape[1]]}")
            stages = own.stages if mask_W is None else with_mask(own.stages)
            past = History(own.memory.prompt, own.memory.output, mask_W)
            law = chances(self._host.fast(self.vocab_size))(logits[0], stages, past) if law is None else law
        if not law[token] > 0:
            raise ValueError(f"token {token} cannot be sampled from row {row}: its probability is 0")
        if not is_updated:
            self._append(row, token)
            return None
        result = accept_sampled(logits[0], stages, token, past)
        if self._device is not None and row in self._device:
            self._device.push(row, token, result.stages)
            return result.logprobs
        self._host.push(row, own, token)
        own.move(result.stages if stages is own.stages else without_mask(result.stages))
        return result.logprobs

    def remove(self, row: int) -> None:
        """Forget a row. The others stay as they are."""
        known(self._rows, row)
        del self._rows[row]
        self._host.remove(row)
        self._host.forget()
        if self._device is not None:
            self._device.remove(row)

    def seed(self, row: int) -> int:
        """The seed of a row, as given or as taken when it was added."""
        return known(self._rows, row).seed

    def stages(self, row: int) -> Pipeline:
        """The pipeline of a row as of its next step, simplified. Waits for the device, if a stage has a state."""
        own = known(self._rows, row)
        return self._up_to_date(row).stages if any(map(is_stateful, own.stages)) else own.stages

    def output_ids(self, row: int) -> tuple[int, ...]:
        """What a row has drawn. Waits for the device."""
        return tuple(self._up_to_date(row).memory.output)

    def __call__(self, logits_RV: Any, rows: Iterable[int] | None = None, *, mask: Any = None) -> SamplerOutput:
        """Draw the next token of some rows; their histories, steps and states advance.

        logits_RV: float [R, V], NumPy or torch. rows: whose they are, in this order; without it, those of ``rows``.
        mask: int32 [R, V / 32], the tokens a grammar allows, packed, lowest bit first. Nothing changes if the
        arguments are wrong (ValueError, TypeError, ParameterError). On a device, tensors that are there already are not
        copied, and logits are not to be written to before errors have been looked at, if these are to be.
        """
        requested = None if rows is None else [operator.index(row) for row in rows]
        if self._device is not None:
            batch = self._host.batch(requested)
            return _sampled((*self._device.step(batch.numbers, logits_RV, mask), batch.seeds))
        return _sampled(self._host.step(requested, logits_RV, mask))

    def loop(
        self,
        forward: Forward,
        first_ids: Sequence[int],
        rows: Iterable[int] | None = None,
        *,
        steps: int,
        stop_ids: Sequence[int] = (),
    ) -> DecodeLoop:
        """Draw the next tokens of some rows in a loop that a device runs without the host, see ``DecodeLoop``.

        forward(token_ids [R], active [R]) gives logits [R, V]; first_ids: what it is to read first, the last token of
        each prompt. On CUDA it is captured as one graph. Raises ParameterError where the host is needed: for rows that
        the device does not run, or that want logprobs.
        """
        numbers = list(self._rows) if rows is None else [operator.index(row) for row in rows]
        for number in numbers:
            known(self._rows, number)
        if self._device is None:
            raise ParameterError("device", "a loop runs on a device: Sampler(vocab_size, device=...)")
        return self._device.loop(numbers, forward, first_ids, steps, stop_ids)

    def _up_to_date(self, row: int) -> SamplerRow:
        """A row with all that it has said."""
        own = known(self._rows, row)
        if self._device is not None:
            self._device.catch_up()
        return own
