"""sample, probabilities and explain: accepted inputs, errors and results."""

from __future__ import annotations

import enum
import importlib.util
import pickle
import re

import numpy as np
import pytest

import nucleate as nc
from nucleate.jit import kernel_libraries
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import functional
from nucleate.sampling.inputs import LogitsInput
from nucleate.sampling.pipeline import as_pipeline, simplify
from nucleate.sampling.stage import Stage
from nucleate.sampling.stages import (
    AdaptiveP,
    Allowed,
    BadWords,
    Categorical,
    Dry,
    DynamicTemperature,
    Frequency,
    Greedy,
    Gumbel,
    LogitBias,
    Logprobs,
    Mask,
    MinP,
    MinTokens,
    Mirostat,
    NoRepeatNgram,
    Presence,
    Repetition,
    Suppress,
    Temperature,
    TopH,
    TopK,
    TopP,
    Typical,
    Xtc,
)

LOGITS = np.array([[1.0, 3.0, 2.0, -1.0], [0.5, 0.25, 4.0, 0.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
SEEDED = nc.SamplingParams(seed=5)
EXPECTED = nc.sample(LOGITS, SEEDED).tolist()
TENSORS = ("torch", "composed stages")


# ---- logits


def test_float32_logits_are_not_copied():
    assert np.shares_memory(LogitsInput(LOGITS)[1], LOGITS)


def test_torch_steps_and_histories():
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[1, 2], [3, 0], [0, 0]])
    params = nc.SamplingParams(seed=5, presence_penalty=2)
    assert (nc.sample(LOGITS, params, output_ids=ids) == nc.sample(LOGITS, params, output_ids=ids.tolist())).all()


@pytest.mark.parametrize(
    "bad", [np.array([[1, 2]]), np.array([[True]]), np.array([[1j]]), np.array([["1"]]), [[1, 2]], [[None]]]
)
def test_logits_that_are_not_floats_are_rejected(bad):
    with pytest.raises(TypeError, match="logits must be floating-point numbers, got "):
        nc.sample(bad, SEEDED)


def test_torch_logits_that_are_not_floats_are_rejected():
    torch = pytest.importorskip("torch")
    for kind in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(TypeError, match="logits must be floating-point numbers, got "):
            nc.sample(torch.ones((1, 2), dtype=kind), SEEDED)


@pytest.mark.parametrize("shape", [(), (1, 2, 3), (3, 0), (0,), (0, 0)])
def test_logits_of_an_invalid_shape_are_rejected(shape):
    with pytest.raises(ValueError, match=r"logits must have the shape \[rows, vocabulary\], got \["):
        nc.sample(np.zeros(shape, np.float32), SEEDED)


def test_an_empty_batch_gives_an_empty_result():
    empty = np.zeros((0, 7), np.float32)
    for params in (SEEDED, (), []):
        tokens = nc.sample(empty, params)
        assert tokens.shape == (0,)
        assert tokens.dtype == np.int64
        assert nc.probabilities(empty, params).shape == (0, 7)
    assert nc.sample(empty, [], step=[], prompt_ids=[], output_ids=[]).shape == (0,)


def test_the_results_have_the_documented_types():
    assert nc.sample(LOGITS, SEEDED).dtype == np.int64
    p = nc.probabilities(LOGITS, SEEDED)
    assert (p.dtype, p.shape) == (np.float64, LOGITS.shape)
    assert p.sum(axis=1) == pytest.approx(np.ones(3))


# ---- rows without a token


def test_invalid_rows_are_named_and_the_others_sampled():
    logits = np.repeat(LOGITS[:1], 6, axis=0)
    logits[1, 2] = np.nan
    logits[3, 0] = np.inf
    logits[4] = -np.inf
    with pytest.raises(nc.LogitsError) as caught:
        nc.sample(logits, SEEDED)
    error = caught.value
    assert error.errors == {1: "NaN at token 2", 3: "+inf at token 0", 4: "every token is at -inf"}
    assert str(error) == "row 1: NaN at token 2; row 3: +inf at token 0; row 4: every token is at -inf"
    first = EXPECTED[0]
    assert error.token_ids.tolist() == [first, -1, first, -1, -1, first]
    assert isinstance(error, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.errors, again.token_ids.tolist()) == (str(error), error.errors, error.token_ids.tolist())
    with pytest.raises(nc.LogitsError, match="row 1: NaN at token 2; row 3"):
        nc.probabilities(logits, SEEDED)


def test_a_number_beyond_float32_is_an_error_of_its_row():
    with pytest.raises(nc.LogitsError, match=r"^row 0: \+inf at token 1$"):
        nc.sample(np.array([[0.0, 1e300], [0.0, -1e300]]), (Greedy(),))
    assert nc.sample(np.array([[0.0, -1e300]]), SEEDED).tolist() == [0]


# ---- the other arguments


def test_arguments_are_for_all_rows_or_per_row():
    many = [nc.SamplingParams(temperature=0), (TopK(1),), SEEDED]
    got = nc.sample(LOGITS, many, step=[0, 1, 0], prompt_ids=[[], [1], [2, 3]], output_ids=np.zeros((3, 2), int))
    assert got.tolist() == [1, 2, EXPECTED[2]]
    steps = [nc.sample(LOGITS[:1], SEEDED, step=step).tolist()[0] for step in range(3)]
    assert nc.sample(LOGITS[[0, 0, 0]], SEEDED, step=range(3)).tolist() == steps
    assert nc.sample(LOGITS[[0, 0, 0]], SEEDED, step=np.arange(3)).tolist() == steps
    assert nc.sample(LOGITS[[0, 0, 0]], SEEDED, step=(0, np.uint64(1), 2)).tolist() == steps
    assert nc.sample(LOGITS, SEEDED, step=2**64 - 1).shape == (3,)


def test_histories_reach_the_right_penalties():
    logits = np.zeros((1, 4), np.float32)
    penalised = nc.SamplingParams(presence_penalty=1, seed=0)
    p = nc.probabilities(logits, penalised, prompt_ids=[[0]], output_ids=[[1, 1]])[0]
    assert p == pytest.approx(np.array([1, np.exp(-1), 1, 1]) / (3 + np.exp(-1)))
    p = nc.probabilities(logits, nc.SamplingParams(frequency_penalty=1), prompt_ids=[[0]], output_ids=[[1, 1]])[0]
    assert p == pytest.approx(np.array([1, np.exp(-2), 1, 1]) / (3 + np.exp(-2)))
    p = nc.probabilities(logits + 1, nc.SamplingParams(repetition_penalty=2), prompt_ids=[[0]], output_ids=[[1, 1]])[0]
    assert p == pytest.approx(np.array([np.exp(-0.5)] * 2 + [1, 1]) / (2 + 2 * np.exp(-0.5)))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"params": [SEEDED]}, ValueError, "params has 1 entries, but the logits have 3 rows"),
        ({"params": []}, ValueError, "params has 0 entries, but the logits have 3 rows"),
        ({"params": None}, TypeError, "params must be a SamplingParams or a tuple of stages, got None"),
        (
            {"params": {"top_k": 1}},
            TypeError,
            r"a SamplingParams or a tuple of stages, got .*; pass SamplingParams\(\*\*",
        ),
        ({"params": TopK(1)}, TypeError, r"or a tuple of stages, got TopK\(1\); a pipeline is a tuple: \(stage,\)$"),
        ({"params": (SEEDED,) * 3}, TypeError, "params must be a SamplingParams or a tuple of stages"),
        ({"params": (TopK,)}, TypeError, "params must be a SamplingParams or a tuple of stages"),
        ({"params": [[TopK(1)]] * 3}, TypeError, "params must be a SamplingParams or a tuple of stages"),
        ({"params": (Stage(),)}, TypeError, "Stage has none of the shapes"),
        ({"params": (Gumbel(1), Gumbel(1))}, ValueError, "a pipeline has one draw, its last stage, got"),
        (
            {"params": (Greedy(), TopK(1))},
            ValueError,
            r"a pipeline has one draw, its last stage, got \(Greedy\(\), TopK\(1\)\)$",
        ),
        ({"step": [0, 1]}, ValueError, "step has 2 entries, but the logits have 3 rows"),
        ({"step": -1}, ParameterError, r"step must be an integer >= 0 and < 2\*\*64, got -1"),
        ({"step": [[0], [1], [2, 3]]}, ParameterError, "step must be an integer"),
        ({"prompt_ids": [[1], [2]]}, ValueError, "prompt_ids must hold one list of token ids per row: 3 rows, got 2"),
        ({"prompt_ids": [1, 2, 3]}, TypeError, "prompt_ids must hold one list of token ids per row, got"),
        ({"prompt_ids": [[[1]], [], []]}, TypeError, "prompt_ids must hold one list of token ids per row, got"),
        ({"output_ids": [["1"], [], []]}, TypeError, "output_ids must hold one list of token ids per row, got"),
        ({"output_ids": ["12", [], []]}, TypeError, "output_ids must hold one list of token ids per row, got"),
        ({"output_ids": [[4], [], []]}, ValueError, r"output_ids holds token ids outside the vocabulary \(0..3\)"),
        ({"output_ids": [[2**70], [], []]}, TypeError, "output_ids must hold one list of token ids per row"),
        ({"backend": "numpy"}, ParameterError, "backend must be one of auto, reference, cpu, got 'numpy'"),
        ({"params": (LogitBias({4: 1.0}),)}, ParameterError, "logit_bias names token 4, but the vocabulary ends at 3"),
        (
            {"params": (Logprobs(1), TopK(2), Logprobs(2))},
            ValueError,
            r"at most one Tap, got \(Logprobs\(1\), TopK\(2\), Logprobs\(2\)\)$",
        ),
        ({"mask": np.zeros((2, 1), np.int32)}, ValueError, r"mask must have the shape \[3, 1\], 32 tokens per word"),
        ({"params": (Suppress((9,)),)}, ParameterError, "suppress_token_ids names token 9, but the vocabulary"),
        ({"params": (Suppress((2**70,)),)}, ParameterError, "suppress_token_ids names token"),
    ],
)
def test_invalid_arguments_are_explained(arguments, error, words):
    with pytest.raises(error, match=words):
        nc.sample(**{"logits_BV": LOGITS, "params": SEEDED, **arguments})


def test_integers_of_any_type_are_accepted():
    class Step(enum.IntEnum):
        SECOND = 1

    assert nc.sample(LOGITS, SEEDED, step=Step.SECOND).tolist() == nc.sample(LOGITS, SEEDED, step=1).tolist()
    ids = [np.array([1], np.uint8), np.array([2], np.uint64), (np.int32(3),)]
    params = nc.SamplingParams(seed=5, presence_penalty=2)
    assert (nc.sample(LOGITS, params, output_ids=ids) == nc.sample(LOGITS, params, output_ids=[[1], [2], [3]])).all()


def test_without_a_seed_rows_and_calls_differ():
    logits = np.zeros((64, 1000), np.float32)
    first, second = nc.sample(logits, nc.SamplingParams()), nc.sample(logits, ())
    assert len(set(first)) > 40
    assert (first != second).any()
    seeded = nc.sample(logits, nc.SamplingParams(seed=0))
    assert len(set(seeded)) == 1


# ---- pipelines as values


def test_a_draw_is_added_if_there_is_none():
    assert as_pipeline(()) == (Gumbel(),)
    assert as_pipeline((TopK(5),)) == (TopK(5), Gumbel())
    assert as_pipeline((TopK(5), Greedy())) == (TopK(5), Greedy())


@pytest.mark.parametrize(
    ("stages", "simple"),
    [
        ((TopK(0), TopP(1.0), MinP(0), Temperature(1), Gumbel(3)), (Gumbel(3),)),
        ((Temperature(0), TopP(0.9), Gumbel(3)), (Greedy(),)),
        ((TopP(0.9), TopK(1), Gumbel(3)), (Greedy(),)),
        ((TopP(0.9), Greedy()), (Greedy(),)),
        ((Presence(1), TopP(0.9), Temperature(0), Gumbel(3)), (Presence(1), Greedy())),
        ((TopP(0.9), Presence(1), MinP(0.1), Categorical(3)), (TopP(0.9), Presence(1), MinP(0.1), Categorical(3))),
        ((TopP(0.9), Presence(1), MinP(0.1), Greedy()), (TopP(0.9), Presence(1), Greedy())),
        ((TopP(0.9), TopK(1), MinP(0.1), Suppress((1,)), Gumbel(3)), (TopK(1), Suppress((1,)), Greedy())),
        ((MinTokens(0, (1,)), Gumbel(3)), (Gumbel(3),)),
        ((TopP(0.9), Typical(0.5), MinP(0.1), Temperature(0), Gumbel(3)), (TopP(0.9), Typical(0.5), Greedy())),
        ((TopP(0.9), Xtc(0.5), MinP(0.1), Greedy()), (TopP(0.9), Xtc(0.5), Greedy())),
        ((AdaptiveP(0.5), TopK(9), TopK(1), Gumbel(3)), (AdaptiveP(0.5), Greedy())),
        ((Mirostat(5), TopH(0.5), Temperature(2), Greedy()), (Greedy(),)),
        ((DynamicTemperature(0, 0), Xtc(0.5), Gumbel(3)), (Greedy(),)),
        ((DynamicTemperature(0, 1), Gumbel(3)), (DynamicTemperature(0, 1), Gumbel(3))),
        ((Temperature(0), Xtc(0.5), Suppress((1,)), Gumbel(3)), (Temperature(0), Suppress((1,)), Greedy())),
        ((Logprobs(1), TopP(0.9), Temperature(0), Gumbel(3)), (Logprobs(1), Greedy())),
        ((TopP(0.9), TopK(0), Logprobs(1), Greedy()), (TopP(0.9), Logprobs(1), Greedy())),
        (
            (Temperature(0), Logprobs(ids=(1,)), MinP(0.5), Gumbel(3)),
            (Temperature(0), Logprobs(ids=(1,)), MinP(0.5), Gumbel(3)),
        ),
        ((Logprobs(), Repetition(1, 5), Dry(0), Xtc(0), AdaptiveP(), Mirostat(), Typical(), Gumbel(3)), (Gumbel(3),)),
        ((Mask(), Temperature(0), Gumbel(3)), (Mask(), Greedy())),
        ((Gumbel(3),), (Gumbel(3),)),
    ],
)
def test_simplify(stages, simple):
    assert simplify(stages) == simple
    assert simplify(simple) == simple


def test_explain_reports_the_pipeline_that_runs(monkeypatch):
    monkeypatch.setattr(kernel_libraries.KERNELS, "ready", True)
    plan = nc.explain(nc.SamplingParams(temperature=0.7, top_p=0.9, seed=1))
    assert plan.backend == "cpu"
    assert plan.given == plan.stages == (Temperature(0.7), TopP(0.9), Gumbel(1))
    assert str(plan).splitlines() == [
        "cpu backend, fused kernel",
        "  scale   Temperature(0.7)",
        "  prefix  TopP(0.9)",
        "  draw    Gumbel(1)",
    ]


def test_explain_lists_removed_and_added_stages():
    plan = nc.explain((TopK(5), Suppress((1,)), TopK(5), MinP(0), Greedy()))
    assert plan.stages == (TopK(5), Suppress((1,)), Greedy())
    assert str(plan).splitlines()[1:] == [
        "  prefix  TopK(5)",
        "  shift   Suppress((1,))",
        "  prefix  TopK(5)  (removed: it cannot change the result)",
        "  floor   MinP()  (removed: it cannot change the result)",
        "  draw    Greedy()",
    ]
    lines = str(nc.explain((Temperature(0), TopK(5), Gumbel(3)))).splitlines()[1:]
    assert lines == [
        "  scale   Temperature(0.0)  (removed: it cannot change the result)",
        "  prefix  TopK(5)  (removed: it cannot change the result)",
        "  draw    Gumbel(3)  (removed: it cannot change the result)",
        "  draw    Greedy()",
    ]


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ((Logprobs(1), LogitBias({1: 2.0}), Repetition(1.2, 9), Presence(1.0, 9), Suppress((1,)), TopP(0.9)), ""),
        ((MinTokens(3, (1,)), BadWords(((5,), (6,))), Allowed((1, 2)), Frequency(0.5), TopK(5)), ""),
        ((Temperature(0), TopK(5)), ""),
        ((TopP(0.9), Suppress((1,))), r"Suppress\(\(1,\)\) comes after a stage that uses the whole row"),
        ((Dry(0.5), Dry(0.8)), r"Dry\(0.8\) is the second of its kind"),
        ((Dry(0.5), BadWords(((5, 6),)), NoRepeatNgram(3), TopK(9)), ""),
        ((Frequency(0.5), Repetition(1.2)), ""),
        ((Frequency(0.5), Presence(0.5, 9), LogitBias({1: 2.0})), ""),
        ((Frequency(0.5, 5000),), ""),
    ],
)
def test_explain_reports_what_a_device_runs(monkeypatch, stages, why):
    monkeypatch.setattr(kernel_libraries.KERNELS, "ready", True)
    for device in ("cuda", "cuda:3"):
        plan = nc.explain((*stages, Gumbel(1)), device=device)
        if why:
            assert (plan.backend, plan.path) == ("cpu", "composed stages")
            assert re.match(f"on the CPU, because .*{why}", plan.why), plan.why
        else:
            has_triton = importlib.util.find_spec("triton") is not None
            assert (plan.backend, plan.path) == (("triton", "fused kernel") if has_triton else TENSORS)
    assert (nc.explain((*stages, Gumbel(1)), device="mps").backend == "torch") == (not why)


def test_explain_reports_that_triton_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plan = nc.explain((TopK(5), Gumbel(1)), device="cuda")
    assert (plan.backend, plan.path) == TENSORS
    assert str(plan).splitlines()[0] == "torch backend, composed stages: cuda has no Triton"


def test_explain_rejects_unknown_backends_and_devices():
    with pytest.raises(ParameterError, match="device must be 'cpu'"):
        nc.explain(SEEDED, device="tpu")
    with pytest.raises(ParameterError, match="device must be 'cpu'"):
        nc.explain(SEEDED, device=3)
    with pytest.raises(TypeError, match="params must be a SamplingParams or a tuple of stages"):
        nc.explain([TopK(1)])


# ---- speed: nothing that grows faster than the vocabulary


# ---- the backend of probabilities


@pytest.mark.parametrize("backend", ["reference", "cpu", "auto"])
def test_probabilities_use_the_requested_backend(monkeypatch, backend):
    calls = []

    def row_path(fast):
        calls.append(fast)
        return functional.reference

    monkeypatch.setattr(functional, "row_path", row_path)
    logits = np.zeros((2, 300), np.float32)
    nc.probabilities(logits, SEEDED, backend=backend)
    assert calls == [backend == "cpu"] * 2
    calls.clear()
    nc.probabilities(np.zeros((1, 9000), np.float32), SEEDED, backend=backend)
    assert calls == [backend == "cpu"]  # "auto" has no kernels yet
