"""The sampler of an engine on rank 0: every rank has a ``ShardedSampler`` with the same rows. See ``Sampler``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nucleate.outputs import StepLogprobs
from nucleate.parameters.converters import one_line
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.dispatch.route import TENSOR_BACKENDS
from nucleate.sampling.distributions import TargetDistributions
from nucleate.sampling.pipeline import PreparedPipeline
from nucleate.sampling.sampler import Sampler, SamplerOutput
from nucleate.sampling.stage import Pipeline
from nucleate.sharding.rank_channel import encode
from nucleate.sharding.rank_group import RankGroup
from nucleate.sharding.sharded_logits import ShardedLogits


class RankedSampler:
    """The methods of ``Sampler`` that an engine needs. Logits are ``ShardedLogits``, or whole rows.

    Raises ParameterError for a backend that needs whole rows on a device.
    """

    def __init__(self, group: RankGroup, vocab_size: int, backend: str) -> None:
        if backend in TENSOR_BACKENDS:
            raise ParameterError("backend", f"backend {backend!r} samples on one device; tensor_parallel needs 'auto'")
        self.vocab_size, self._group = vocab_size, group
        self._number = group.number(self)
        group.call("new_sampler", self._number, backend)

    @property
    def _own(self) -> Sampler:
        sampler: Sampler = self._group.rank.get(self._number).sampler
        return sampler

    def add(
        self,
        pipeline: PreparedPipeline,
        prompt_ids: Sequence[int] = (),
        *,
        output_ids: Sequence[int] = (),
        seed: int,
    ) -> int:
        """See ``Sampler.add``."""
        added: int = self._group.call("add", self._number, pipeline, list(prompt_ids), list(output_ids), seed)
        return added

    @staticmethod
    def check_pipeline(pipeline: PreparedPipeline) -> None:
        """Raise ParameterError for a pipeline that the other processes cannot make."""
        rule = "with tensor_parallel, other processes sample as well, so stages must be defined in an importable module"
        try:
            encode(pipeline)
            for stage in pipeline.given:
                if type(stage).__module__ == "__main__":
                    raise TypeError(f"{type(stage).__name__} is defined in __main__")
        except Exception as error:  # pickle raises errors of many types
            raise ParameterError("sampling_params", f"{rule}: {one_line(error)}") from error

    def remove(self, row: int) -> None:
        """See ``Sampler.remove``."""
        self._group.call("remove", self._number, row)

    def stages(self, row: int) -> Pipeline:
        """See ``Sampler.stages``."""
        return self._own.stages(row)

    def seed(self, row: int) -> int:
        """See ``Sampler.seed``."""
        return self._own.seed(row)

    def output_ids(self, row: int) -> tuple[int, ...]:
        """See ``Sampler.output_ids``."""
        return self._own.output_ids(row)

    def distributions(
        self,
        row: int,
        logits_NV: Any,
        tokens: Sequence[int] = (),
        masks: Any = None,
        *,
        parents: Sequence[int] | None = None,
    ) -> TargetDistributions:
        """See ``Sampler.distributions``. Gathers whole rows; rank 0 computes."""
        return self._own.distributions(row, np.asarray(logits_NV), tokens, masks, parents=parents)

    def accept(
        self, row: int, token: int, logits_V: Any = None, mask_W: Any = None, *, distribution: Any = None
    ) -> StepLogprobs | None:
        """See ``Sampler.accept``."""
        source = None if logits_V is None else _source(logits_V[None])
        accepted: StepLogprobs | None = self._group.call(
            "accept", self._number, row, int(token), source, mask_W, distribution
        )
        return accepted

    def __call__(self, logits_RV: Any, rows: Sequence[int], *, mask: Any = None) -> SamplerOutput:
        """See ``Sampler.__call__``."""
        sampled: SamplerOutput = self._group.call("sample", self._number, _source(logits_RV), list(rows), mask)
        return sampled


def _source(logits_RV: Any) -> Any:
    """What ``Rank.sample`` takes: whole rows are those that rank 0 has combined with others."""
    return logits_RV.source if isinstance(logits_RV, ShardedLogits) else np.asarray(logits_RV)
