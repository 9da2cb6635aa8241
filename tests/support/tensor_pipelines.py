"""Compares composed tensor pipelines with the reference on random rows. Also a script for ``triton_interpreter``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pipeline_cases as cases
import triton_interpreter as interpreted

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.inputs import check_ids
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.stage import Combine, Shift, Tap, Transform
from nucleate.sampling.stages import STAGES, Logprobs

NEAR = 1e-9


def near(one: Any, other: Any, part: float = NEAR) -> bool:
    """Equal up to rounding of floats."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= part * max(1.0, abs(one), abs(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(near(a, b, part) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def parameters(stages: Any) -> list[Any]:
    return [(stage.name, *(getattr(stage, name) for name in stage.parameters if name != "key")) for stage in stages]


def drawing(
    rows: list[tuple[Any, ...]], seeds: list[int], steps: list[int], size: int, floats: Any = None
) -> tuple[Any, ...]:
    """Inputs of ``batch_sampling.run`` for rows of one pipeline signature: the batch, the steps, the parameters."""
    import torch

    from nucleate.sampling import signature
    from nucleate.sampling.gpu import batch_sampling

    signatures = [signature.pipeline_signature(stages) for stages in rows]
    assert len({one.signatures for one in signatures}) == 1
    seeds_R, steps_R = (torch.tensor([word - 2**64 * (word >= 2**63) for word in words]) for words in (seeds, steps))
    floats = floats or torch.float64
    params_RP = torch.tensor([one.params for one in signatures], dtype=floats).view(len(signatures), -1)
    batch = batch_sampling.make_batch(signatures, seeds_R, size, floats)
    return batch, steps_R, params_RP if batch.stateful else None


def outcome(given: Any, logits: Any) -> Any:
    from nucleate.sampling.gpu import batch_sampling

    batch, steps_R, params_RP = given
    return batch_sampling.run(
        batch,
        batch_sampling.StepInput(
            batch_sampling.to_scores(logits, batch.constants.zero_1), steps_R, params_RP=params_RP
        ),
    )


def watched(stages: Any, size: int) -> Any:
    """The stages with a Tap before the selection that reports all surviving tokens, unless they have a Tap."""
    return stages if any(isinstance(stage, Tap) for stage in stages) else (*stages[:-1], Logprobs(size), stages[-1])


def difference(x: Any, stages: Any, seed: int, step: int) -> str:
    """How a row differs from the reference (token, survivors, scores, state), or ""."""
    return _difference(x, stages, seed, step)[:500]  # pytest is slow to compare long texts


def _difference(x: Any, stages: Any, seed: int, step: int) -> str:
    import torch

    from nucleate.sampling import signature

    stages = watched(simplify(stages), len(x))
    index = next(i for i, stage in enumerate(stages) if isinstance(stage, Tap))
    try:
        expected = reference.run(x, stages, seed, step)
    except Exception as error:  # noqa: BLE001  # compared with the result of the kernels
        expected = error
    given = drawing([stages], [seed], [step], len(x))
    got = outcome(given, torch.from_numpy(x)[None])
    token = got.tokens_R.tolist()[0]
    if isinstance(expected, Exception):
        return "" if token == -1 else f"drew {token}, the reference raised {expected!r}: {stages}"
    if token != expected.token:
        return f"drew {token}, the reference {expected.token}: {stages}"
    left = reference.survivors_per_stage(x, stages, History(), reference.xtc_uniform(stages, seed, step))[index]
    reported_V = got.tapped_RV[0].numpy()
    if np.flatnonzero(reported_V > -np.inf).tolist() != sorted(left.ids_N.tolist()):
        return f"left {np.flatnonzero(reported_V > -np.inf)}, the reference {sorted(left.ids_N)}: {stages}"
    if not near(reported_V[left.ids_N].tolist(), left.x_N.tolist()):
        return f"other scores: {stages}"
    moved = (
        signature.with_state(stages, given[0].signatures, got.params_RP.tolist()[0]) if given[0].stateful else stages
    )
    return "" if near(parameters(moved), parameters(expected.stages)) else f"{moved}, the reference {expected.stages}"


def survey(seeds: list[int], sizes: Any = cases.SIZES, most: int = 6) -> list[str]:
    """The differences for random pipelines without Shifts, by seed."""
    found = []
    cases.SIZES, before = sizes, cases.SIZES
    for seed in seeds:
        x, stages, _, step = cases.case(seed, most=most)
        stages = tuple(stage for stage in stages if not isinstance(stage, Shift | Transform))
        draw_seed = getattr(stages[-1], "seed", None)
        if why := difference(x, stages, 7 if draw_seed is None else draw_seed, step):
            found.append(f"{seed}: {why}")
    cases.SIZES = before
    return found


def every_stage(seeds: list[int], sizes: Any) -> list[str]:
    """Tests each stage other than Shifts alone, after a truncation, and before a scale, with extreme parameters."""
    found = []
    for seed in seeds:
        for name, kind in STAGES.items():
            if issubclass(kind, Combine | Shift | Tap | Transform):
                continue
            rng = random.Random(f"{name} {seed}")
            size = rng.choice(sizes)
            one, x = cases.stage(rng, name, size), cases.row(rng, size)
            ways = [(one, cases.stage(rng, rng.choice(cases.DRAWS), size))]
            if name in cases.DRAWS:
                ways = [(one,), (STAGES["top_p"](0.8), one)]
            else:
                ways += [(STAGES["top_k"](40), one, STAGES["gumbel"](seed))]
                ways += [(one, STAGES["temperature"](0.7), STAGES["gumbel"](seed))]
            found += [why for stages in ways if (why := difference(x, stages, seed, seed))]
    return found


def pipeline(rng: random.Random, size: int) -> tuple[Any, ...]:
    """A random pipeline, in canonical order."""
    while True:
        names = rng.sample(cases.OTHERS, rng.randrange(1, 6))
        narrow = [name for name in names if not issubclass(STAGES[name], Shift)]
        names = sorted(narrow if rng.random() < 0.6 else names, key=lambda name: STAGES[name].rank)
        stages = (*(cases.stage(rng, name, size) for name in names), cases.stage(rng, rng.choice(cases.DRAWS), size))
        try:
            check_ids(simplify(stages), size)
        except ParameterError:
            continue
        return stages


def mixed(backend: str, seed: int, size: int, steps: int, kinds: int = 4) -> list[Any]:
    """The results of a Sampler with rows of several pipeline signatures, and their states."""
    import torch

    rng, sampler, results = random.Random(seed), nc.Sampler(size, backend), []
    for _ in range(kinds):
        stages = pipeline(rng, size)
        for _ in range(rng.randrange(1, 3)):
            sampler.add(stages, [rng.randrange(size) for _ in range(3)], seed=rng.getrandbits(64))
    for _ in range(steps):
        x_RV = np.stack([cases.row(rng, size) for _ in sampler.rows])
        if rng.random() < 0.3:
            x_RV[rng.randrange(len(x_RV)), rng.randrange(size)] = np.nan
        mask = np.stack([np.resize(cases.mask(rng, size), -(-size // 32)) for _ in sampler.rows])
        out = sampler(torch.from_numpy(x_RV), mask=mask if rng.random() < 0.4 else None)
        results.append((out.token_ids.tolist(), sorted(out.errors.items()), logprobs_as_lists(out.logprobs)))
        row, token = rng.choice(sampler.rows), rng.randrange(size)
        if rng.random() < 0.3:
            try:
                sampler.accept(row, token)
            except ParameterError:  # the state is not finite any more
                return results
        results.append([parameters(sampler.stages(row)) for row in sampler.rows])
    return results


def logprobs_as_lists(logprobs: Any) -> Any:
    """Logprobs as lists; the rank of a masked token is None."""
    if logprobs is None or not any(logprobs):
        return None
    return [
        one and [[tuple(each) for each in part] for part in ([one.chosen], one.top, one.requested)] for one in logprobs
    ]


if __name__ == "__main__":
    interpreted.serve(globals())
