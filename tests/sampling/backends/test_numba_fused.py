"""The fused CPU kernel equals the reference: the same token for every row, parameter, seed and step."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tiers

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.cpu import evaluation as generic
from nucleate.sampling.cpu.block_ops import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, convert_row
from nucleate.sampling.pipeline import simplify, to_fused_pipeline
from nucleate.sampling.stages import Categorical, Greedy, Gumbel, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from nucleate.sampling.token_logprobs import logprobs

SIZES = (1, 2, 5, 100, 255, 256, 257, 1000, 5000, 20_000)
KINDS = ("smooth", "ties", "holes", "equal", "peaked", "island", "huge", "tiny", "shifted", "signed zeros")


def row(rng: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Logits of a kind; each could break some shortcut."""
    x = rng.normal(size=size) * rng.choice([0.1, 1.0, 3.0, 10.0])
    match kind:
        case "ties":
            x = np.round(x)
        case "holes":
            x[rng.random(size) < 0.5] = -np.inf
            x[rng.integers(size)] = 1.0
        case "equal":
            x[:] = x[0]
        case "peaked":
            x[rng.integers(size, size=3)] += 10.0
        case "island":  # a grammar leaves a few tokens of one group
            start = rng.integers(size)
            inside = x[start : start + 30].copy()
            x[:] = -np.inf
            x[start : start + 30] = inside
        case "huge":
            x *= 1e30
        case "tiny":
            x *= 1e-30
        case "shifted":
            x += 1000.0
        case "signed zeros":
            x = np.where(rng.random(size) < 0.5, 0.0, -0.0)
    return x.astype(np.float32)


def params(rng: np.random.Generator, size: int) -> nc.SamplingParams:
    def one(*values: float) -> float:
        return float(rng.choice(values))

    return nc.SamplingParams(
        temperature=one(1, 1, 0.7, 0.8, 1.5, 0.01, 5, 0),
        top_n_sigma=one(0, 0, 0, 1, 0.1, 3),
        top_k=int(one(0, 0, 1, 2, 5, 40, 300, 1000, 3000, size)),
        min_p=one(0, 0, 0.05, 0.3, 1e-4, 1),
        top_p=one(1, 1, 0.9, 0.5, 0.99, 0.1, 1e-9, 1 - 1e-9),
        seed=int(rng.integers(2**63)) * 2 + int(rng.integers(2)),
    )


def shifted(rng: np.random.Generator, requested: nc.SamplingParams, size: int) -> nc.SamplingParams:
    """Parameters with penalties, bias and bans added."""
    ids = [int(i) for i in rng.integers(size, size=4)]
    changes = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.5,
        "logit_bias": {ids[0]: 3.5, ids[1]: -100.0},
        "suppress_token_ids": ids[:2],
        "allowed_token_ids": sorted({*ids, *range(0, size, 3)}),
        "no_repeat_ngram_size": 2,
        "dry_multiplier": 0.8,
        "bad_words": [[ids[2]], [ids[0], ids[3]]],
        "penalty_last_n": 7,
    }
    chosen = rng.choice(list(changes), size=rng.integers(1, 5), replace=False)
    return requested.replace(**{name: changes[name] for name in chosen})


def shifted_differences(count: int, seed: int) -> tuple[int, list[object]]:
    """The number of valid rows with histories and masks, and the rows whose token differs."""
    rng, found, valid = np.random.default_rng(seed), [], 0
    for _ in range(count):
        size, kind = int(rng.choice(SIZES[2:-1])), str(rng.choice(KINDS))
        requested = shifted(rng, params(rng, size), size)
        logits, num_tokens = row(rng, size, kind), int(rng.integers(1, size + 1))
        histories = [rng.integers(num_tokens, size=(1, rng.integers(40))) for _ in range(2)]
        words = rng.integers(-(2**31), 2**31, size=(1, -(-size // 32))).astype(np.int32)
        given = {
            "prompt_ids": histories[0],
            "output_ids": histories[1],
            "mask": words if rng.random() < 0.3 else None,
        }
        try:
            expected = int(nc.sample(logits[None], requested, step=3, backend="reference", **given)[0])
        except nc.LogitsError as error:
            with pytest.raises(nc.LogitsError) as caught:
                nc.sample(logits[None], requested, step=3, backend="cpu", **given)
            assert caught.value.errors == error.errors  # noqa: PT017  # both raise equal errors
            continue
        valid += 1
        if int(nc.sample(logits[None], requested, step=3, backend="cpu", **given)[0]) != expected:
            found.append((size, kind, requested))
    return valid, found


def differences(count: int, seed: int) -> list[object]:
    """The random rows whose token differs, through the public function."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        size, kind = int(rng.choice(SIZES)), str(rng.choice(KINDS))
        logits, requested, step = row(rng, size, kind), params(rng, size), int(rng.integers(2**40))
        assert not isinstance(to_fused_pipeline(simplify(requested.build_pipeline())), str)
        got = int(nc.sample(logits[None], requested, step=step, backend="cpu")[0])
        if got != (expected := int(nc.sample(logits[None], requested, step=step, backend="reference")[0])):
            found.append((size, kind, requested, step, got, expected))
    return found


def test_every_token_equals_the_reference() -> None:
    assert differences(tiers.count(400, 4000), 0) == []


def test_every_token_after_penalties_bans_and_masks_equals_the_reference() -> None:
    count = tiers.count(300, 3000)
    valid, found = shifted_differences(count, 0)
    assert valid > 0.5 * count
    assert len(found) <= 3, found  # edited scores are float32 here: nearly equal ones may become equal


@pytest.mark.exhaustive
def test_every_token_of_very_many_rows_equals_the_reference() -> None:
    assert differences(100_000, 1) == []


@pytest.mark.parametrize("size", [32_000, 50_257, 128_256, 151_936])
@pytest.mark.fast_cases(2)
def test_full_vocabularies(size: int) -> None:
    rng = np.random.default_rng(size)
    for scale in (1.0, 2.5):
        logits = (rng.normal(size=(1, size)) * scale).astype(np.float32)
        logits[0, rng.integers(size, size=40)] += np.linspace(2, 12, 40) * (scale > 1)
        for requested in (
            nc.SamplingParams(temperature=0.7, seed=1),
            nc.SamplingParams(temperature=0.8, top_k=40, min_p=0.05, top_p=0.95, seed=2),
            nc.SamplingParams(top_p=0.9, seed=3),
            nc.SamplingParams(top_k=1000, top_p=0.9, seed=4),
            nc.SamplingParams(top_k=20_000, seed=4),
            nc.SamplingParams(min_p=0.001, top_p=0.99, seed=5),
            nc.SamplingParams(temperature=0),
        ):
            step = int(rng.integers(1000))
            got = nc.sample(logits, requested, step=step, backend="cpu")
            assert got.tolist() == nc.sample(logits, requested, step=step, backend="reference").tolist(), requested


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("position", [0, 255, 256, 700, 999])
def test_an_invalid_row_is_an_error_and_affects_no_other_row(bad: float, position: int) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 1000)).astype(np.float32)
    good = nc.sample(logits, (Temperature(0.7), TopP(0.9), Gumbel(1)), backend="cpu")
    logits[1, position] = bad
    for stages in ((Temperature(0.7), TopP(0.9), Gumbel(1)), (TopK(5), Gumbel(1)), (Greedy(),)):
        with pytest.raises(nc.LogitsError) as caught:
            nc.sample(logits, stages, backend="cpu")
        assert caught.value.errors == {1: f"{'+inf' if bad == np.inf else 'NaN'} at token {position}"}
    with pytest.raises(nc.LogitsError) as caught:
        nc.sample(logits, (Temperature(0.7), TopP(0.9), Gumbel(1)), backend="cpu")
    assert caught.value.token_ids is not None
    assert caught.value.token_ids.tolist() == [good[0], -1, good[2]]
    logits[1] = -np.inf
    with pytest.raises(nc.LogitsError, match="row 1: every token is at -inf"):
        nc.sample(logits, (TopK(5), Gumbel(1)), backend="cpu")


def assert_logprobs_close(one: object, other: object) -> None:
    """Check logprobs for equal tokens and ranks, and nearly equal values."""
    for actual, expected in zip(one or (), other or (), strict=True):  # type: ignore[call-overload]
        assert (actual is None) == (expected is None)
        if actual is not None:
            pairs = [
                *zip(
                    (actual.chosen, *actual.top, *actual.requested),
                    (expected.chosen, *expected.top, *expected.requested),
                    strict=True,
                )
            ]
            assert [a[::2] for a, _ in pairs] == [b[::2] for _, b in pairs]
            assert [a.logprob for a, _ in pairs] == pytest.approx([b.logprob for _, b in pairs], abs=1e-6)


def test_the_sampler_samples_a_mixed_batch_like_the_reference() -> None:
    rng = np.random.default_rng(3)
    requested = [params(rng, 1000) for _ in range(12)]
    requested[3] = requested[3].replace(typical_p=0.9)
    requested[5] = requested[5].replace(repetition_penalty=1.3)
    requested[7] = nc.SamplingParams(mirostat_tau=3.0, seed=7)
    requested[9] = requested[9].replace(logprobs=2)
    both = [nc.Sampler(1000, backend=backend) for backend in ("cpu", "reference")]
    rows = [[sampler.add(one, prompt_ids=[1, 2, 3]) for one in requested] for sampler in both]
    for turn in range(12):
        logits = np.stack([row(rng, 1000, "smooth") for _ in range(12)])
        if turn == 4:
            logits[2, 5] = np.nan
        if turn == 6:
            for sampler, own in zip(both, rows, strict=True):
                sampler.remove(own[0])
                sampler.remove(own[6])
        remaining = [list(sampler.rows) for sampler in both]
        chosen = rng.permutation(len(remaining[0]))[: len(remaining[0]) - turn % 3]
        one, other = (
            sampler(logits[: len(chosen)], [own[i] for i in chosen])
            for sampler, own in zip(both, remaining, strict=True)
        )
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.errors == other.errors
        assert_logprobs_close(one.logprobs, other.logprobs)
        assert [both[0].output_ids(r) for r in remaining[0]] == [both[1].output_ids(r) for r in remaining[1]]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ">f4"])
def test_logits_of_every_type_and_layout_give_the_same_tokens(kind: object) -> None:
    logits = np.random.default_rng(0).normal(size=(5, 1024)).astype(np.float16).astype(np.float32) * 4
    requested = [nc.SamplingParams(temperature=0.7, top_p=0.9, seed=i) for i in range(5)]
    expected = nc.sample(logits, requested, backend="reference").tolist()
    given = logits.astype(kind)
    frozen = given.copy()
    frozen.flags.writeable = False
    wide = np.zeros((5, 2048), given.dtype)
    wide[:, ::2] = given
    for layout in (given, frozen, wide[:, ::2], given[:, ::-1].copy()[:, ::-1], np.asfortranarray(given)):
        assert nc.sample(layout, requested, backend="cpu").tolist() == expected
    assert frozen.tobytes() == given.tobytes()


def test_torch_logits_give_the_same_tokens() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
    logits = torch.randn((4, 777), generator=torch.Generator().manual_seed(0)).bfloat16()
    requested = [nc.SamplingParams(temperature=0.7, top_p=0.9, seed=i) for i in range(4)]
    expected = nc.sample(logits, requested, backend="reference").tolist()
    for kind in (torch.bfloat16, torch.float32, torch.float64):
        assert nc.sample(logits.to(kind), requested, backend="cpu").tolist() == expected


def test_logits_are_not_modified() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 1024)).astype(np.float32)
    before = logits.tobytes()
    nc.sample(logits, nc.SamplingParams(top_p=0.5, seed=1), backend="cpu")
    assert logits.tobytes() == before


def test_many_rows_on_several_threads_equal_single_rows() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(300, 32_000)).astype(np.float32)
    requested = [nc.SamplingParams(temperature=0.7, top_p=0.9, top_k=50, seed=i) for i in range(300)]
    together = nc.sample(logits, requested, backend="cpu").tolist()
    assert together[::37] == [
        int(nc.sample(logits[i : i + 1], requested[i], backend="cpu")[0]) for i in range(0, 300, 37)
    ]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = nc.sample(logits, requested, backend="cpu").tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == together for i in range(3))


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ((Typical(0.9), Gumbel(1)), r"Typical\(0.9\) is not supported by the fused kernel"),
        ((TopP(0.9), TopK(5), Gumbel(1)), r"TopK\(5\) is not supported by the fused kernel at this position"),
        (
            (MinP(0.1), Temperature(0.5), TopK(5), Gumbel(1)),
            r"TopK\(5\) is not supported by the fused kernel at this position",
        ),
        (
            (TopK(5), TopNSigma(1.0), Gumbel(1)),
            r"TopNSigma\(1.0\) is not supported by the fused kernel at this position",
        ),
        ((TopK(5), TopK(3), Gumbel(1)), r"TopK\(3\) is not"),
        ((TopK(5, with_ties=True), Gumbel(1)), r"TopK\(k=5, with_ties=True\) is not"),
        ((TopP(0.5, of_full_mass=True), Gumbel(1)), r"of_full_mass=True\) is not"),
        ((Temperature(1e-9), Gumbel(1)), r"its temperature is not from 0.0001 to 10000"),
        ((Temperature(0.01), TopP(0.5), Temperature(0.001), Gumbel(1)), r"its temperature is not from 0.0001 to 10000"),
        ((TopP(0.5), Categorical(1)), r"Categorical\(1\) is not supported by the fused kernel"),
    ],
)
def test_unsupported_pipelines_return_a_reason(stages: tuple[object, ...], why: str) -> None:
    plan = nc.explain(stages, backend="cpu")  # type: ignore[arg-type]
    assert plan.backend == "cpu"
    assert plan.path == "composed stages"
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(plan.why)
    logits = np.random.default_rng(0).normal(size=(1, 300)).astype(np.float32)
    expected = reference.draw(logits[0], stages, 1, 0)  # type: ignore[arg-type]
    assert nc.sample(logits, stages, backend="cpu").tolist() == [expected]  # type: ignore[arg-type]


def test_logprobs_equal_the_reference() -> None:
    rng = np.random.default_rng(0)
    for turn in range(tiers.count(120, 800)):
        size, kind = int(rng.choice(SIZES)), str(rng.choice(KINDS))
        x = row(rng, size, kind)
        inside = np.flatnonzero(x > -np.inf)
        top, requested = int(rng.choice([0, 1, 5, 20, 300, 10_000])), rng.integers(size, size=turn % 4).tolist()
        actual = generic.step_logprobs(x, int(rng.choice(inside)), (top, tuple(requested)))
        expected = logprobs(np.arange(size), x, actual.chosen.token_id, top, tuple(requested))
        assert_logprobs_close([actual], [expected])
        assert [one.token_id for one in actual.top] == [one.token_id for one in expected.top]


def test_every_half_precision_number_is_converted_exactly() -> None:
    bits = np.arange(65536).astype(np.uint16)
    for start, stop in ((0, 65536), (3, 65533), (7, 7), (5, 20), (65530, 65536)):
        part = bits[start:stop]
        wide = np.full(len(part) + 1, 5.0, np.float32)
        convert_row(part.ctypes.data, FLOAT16, wide[:-1])
        assert np.array_equal(wide[:-1], part.view(np.float16).astype(np.float32), equal_nan=True)
        convert_row(part.ctypes.data, BFLOAT16, wide[:-1])
        assert np.array_equal(wide[:-1], (part.astype(np.uint32) << 16).view(np.float32), equal_nan=True)
        assert wide[-1] == 5.0


def test_float64_is_rounded_like_numpy() -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(2**64, size=20_001, dtype=np.uint64).view(np.float64)
    wide[:4000] = rng.normal(size=4000) * 10.0 ** rng.integers(-50, 45, size=4000)
    wide[4000:4003] = 1e39, -1e39, 3.4028235677973366e38
    narrow = np.empty(len(wide), np.float32)
    convert_row(wide.ctypes.data, FLOAT64, narrow)
    with np.errstate(all="ignore"):
        expected = wide.astype(np.float32)
    assert np.array_equal(narrow, expected, equal_nan=True)
    again = np.empty(len(wide), np.float32)
    convert_row(narrow.ctypes.data, FLOAT32, again)
    assert np.array_equal(again.view(np.uint32), narrow.view(np.uint32))
