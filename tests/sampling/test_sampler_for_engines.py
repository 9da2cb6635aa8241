"""What other engines need of a Sampler: tokens without appending, tokens taken back, their own row ids, saved rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED
from nucleate.sampling import stages
from nucleate.sampling.history import History
from nucleate.sampling.incremental_history import IncrementalHistory

V = 512
PARAMS = {
    "greedy": {"temperature": 0},
    "fused": {"temperature": 0.9, "top_p": 0.95, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "window": {"repetition_penalty": 1.5, "penalty_last_n": 4, "temperature": 0.7},
    "dry": {"dry_multiplier": 1.0, "dry_allowed_length": 1, "temperature": 0.6},
    "dry_window": {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_last_n": 6},
    "ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words": ((3, 4), (5,)), "logprobs": 2},
    "mirostat": {"mirostat_tau": 2.0},
    "adaptive": {"adaptive_p_target": 0.3, "min_p": 0.01},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "logprobs": 1, "logprobs_mode": "processed"},
    "order": {"temperature": 0.7, "top_k": 20, "order": "llama.cpp"},
    "watermark": {"draw": "categorical", "top_h": 0.7},
}
BACKENDS = [("auto", "cpu"), ("reference", "cpu"), pytest.param("torch", "cpu", marks=pytest.mark.slow)]


def logits_of(rng: Any, rows: int) -> Any:
    return rng.normal(0, 3, (rows, V)).astype(np.float32)


def sampler_on(backend: str, device: str) -> nc.Sampler:
    if backend == "torch":
        pytest.importorskip("torch", reason="needs the extra 'torch'")
    if backend == "auto":
        nc.warm()
    return nc.Sampler(V, backend, device)


def params_of(name: str, seed: int) -> nc.SamplingParams:
    return nc.SamplingParams(seed=seed, **PARAMS[name])


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_a_peek_is_the_next_step_and_changes_nothing(name: str, backend: str, device: str) -> None:
    rng = np.random.default_rng(1)
    sampler, twin = sampler_on(backend, device), nc.Sampler(V, "reference")
    for one in (sampler, twin):
        for row in range(3):
            one.add(params_of(name, row), [1, 2, 3, 1, 2], row_id=f"r{row}")
    for step in range(8):
        logits, order = logits_of(rng, 3), [f"r{row}" for row in rng.permutation(3)]
        if step == 4:
            logits[1, 7] = np.nan
        before = [(sampler.stages(row), sampler.output_ids(row)) for row in order]
        peeked = [sampler.peek(logits, order) for _ in range(2)]
        assert [(sampler.stages(row), sampler.output_ids(row)) for row in order] == before
        out, expected = sampler(logits, order), twin(logits, order)
        for one in (*peeked, out):
            assert one.token_ids.tolist() == expected.token_ids.tolist()
            assert dict(one.errors) == dict(expected.errors)
            assert (one.logprobs is None) == (expected.logprobs is None)
        if backend == "reference" and expected.logprobs is not None:
            assert peeked[0].logprobs == expected.logprobs
        assert [sampler.output_ids(row) for row in order] == [twin.output_ids(row) for row in order]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_drafts_are_sampled_as_if_they_had_been_appended(name: str, backend: str, device: str) -> None:
    rng = np.random.default_rng(2)
    sampler = sampler_on(backend, device)
    a, b, c = (sampler.add(params_of(name, row), [1, 2, 3, 1, 2]) for row in range(3))
    sampler(logits_of(rng, 3))
    logits = logits_of(rng, 6)  # a with two drafts, b with one, c with none
    first = sampler.peek(logits[[0, 3, 5]], [a, b, c]).token_ids.tolist()
    drafts = {a: [int(first[0]), 9], b: [int(np.argsort(logits[3])[7])]}
    before = [(sampler.output_ids(row), sampler.stages(row)) for row in (a, b, c)]
    out = sampler.peek(logits, [a, b, c], drafts=drafts)
    assert [(sampler.output_ids(row), sampler.stages(row)) for row in (a, b, c)] == before
    twin = nc.Sampler(V, "reference")
    expected = []
    for place, row in enumerate((a, b, c)):
        start = [0, 3, 5][place]
        for depth in range(len(drafts.get(row, ())) + 1):
            output, pipeline = list(before[place][0]), before[place][1]
            one = twin.add(pipeline, [1, 2, 3, 1, 2], output_ids=output, seed=sampler.seed(row))
            for earlier, token in enumerate(drafts.get(row, ())[:depth]):
                try:
                    twin.accept(one, token, logits[start + earlier])
                except ValueError:  # impossible: updates no stage
                    one = twin.add(
                        twin.stages(one),
                        [1, 2, 3, 1, 2],
                        output_ids=[*twin.output_ids(one), token],
                        seed=twin.seed(one),
                    )
            expected.append(int(twin(logits[start + depth][None], [one]).token_ids[0]))
    assert out.token_ids.tolist() == expected
    assert out.seeds.tolist() == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_rollback_goes_back(name: str, backend: str) -> None:
    """Random walks of steps, accepted tokens and rollbacks end where a sampler without the detours is."""
    rng = np.random.default_rng(3)
    sampler = sampler_on(backend, "cpu")
    row = sampler.add(
        params_of(name, 11), [4, 5, 4, 5], output_ids=[4, 5] if name not in ("mirostat", "adaptive") else ()
    )
    start = len(sampler.output_ids(row))
    logits, taken = logits_of(rng, 40), []
    snapshots = [(sampler.output_ids(row), sampler.stages(row))]
    for _ in range(40):
        at = len(snapshots) - 1
        if at and rng.random() < 0.35:
            count = int(rng.integers(1, min(at, 5) + 1))
            sampler.rollback(row, count)
            del snapshots[-count:], taken[-count:]
        elif rng.random() < 0.2:
            token = int(np.argmax(logits[at]))
            sampler.accept(row, token)
            taken.append(token)
            snapshots.append((sampler.output_ids(row), sampler.stages(row)))
        else:
            taken.append(int(sampler(logits[at][None], [row]).token_ids[0]))
            snapshots.append((sampler.output_ids(row), sampler.stages(row)))
        assert (sampler.output_ids(row), sampler.stages(row)) == snapshots[-1]
        assert sampler.output_ids(row)[start:] == tuple(taken)
        fresh = nc.Sampler(V, "reference")
        again = fresh.add(sampler.stages(row), [4, 5, 4, 5], output_ids=sampler.output_ids(row), seed=sampler.seed(row))
        at = len(snapshots) - 1
        expected = fresh.peek(logits[at % 40][None], [again]).token_ids.tolist()
        assert sampler.peek(logits[at % 40][None], [row]).token_ids.tolist() == expected


@pytest.mark.parametrize("window", [None, -1, 0, 1, 3, 100])
def test_counts_after_tokens_were_taken_back(window: int | None) -> None:
    rng = np.random.default_rng(4)
    prompt, pipeline = rng.integers(0, 5, 7).tolist(), (stages.Repetition(1.5), stages.Gumbel())
    history, output = IncrementalHistory(pipeline, prompt), []
    for _ in range(300):
        history.counts(window), history.context(2)
        if output and rng.random() < 0.4:
            count = int(rng.integers(1, len(output) + 1))
            history.pop(count)
            del output[-count:]
        else:
            output.append(int(rng.integers(0, 6)))
            history.push(output[-1])
        expected = History(prompt, output)
        found = sorted(zip(*(column.tolist() for column in history.counts(window)), strict=True))
        assert found == [
            row for row in zip(*(c.tolist() for c in expected.counts(window)), strict=True) if any(row[1:])
        ]
        assert history.context(2) == expected.context(2)


def test_rollback_refuses_what_it_cannot_take_back() -> None:
    sampler = nc.Sampler(V)
    row = sampler.add(nc.SamplingParams(), output_ids=[1, 2])
    for count in (3, -1, 1.0, True, "1"):
        with pytest.raises(
            nc.ParameterError, match="count must be an integer from 0 to 2 for row 0: its output tokens"
        ):
            sampler.rollback(row, count)
    sampler.rollback(row, 2)
    assert sampler.output_ids(row) == ()
    row = sampler.add(nc.SamplingParams(mirostat_tau=3), output_ids=[1, 2])
    with pytest.raises(nc.ParameterError, match=r"count must be an integer from 0 to 0 .* since the row was added"):
        sampler.rollback(row, 1)
    with pytest.raises(nc.ParameterError, match="row"):
        sampler.rollback(9, 1)
    row = sampler.add(nc.SamplingParams(mirostat_tau=3))
    for token in range(1100):
        sampler.accept(row, token % V)
    states = sampler.stages(row)
    with pytest.raises(nc.ParameterError, match="count must be an integer from 0 to 1024"):
        sampler.rollback(row, 1025)
    sampler.rollback(row, 1024)
    assert len(sampler.output_ids(row)) == 76
    assert sampler.stages(row) != states


def test_rows_have_the_ids_of_the_caller() -> None:
    sampler = nc.Sampler(V)
    assert sampler.add(nc.SamplingParams(seed=1), row_id="chat-1") == "chat-1"
    assert sampler.add(nc.SamplingParams(seed=2), row_id=7) == 7
    assert sampler.add(nc.SamplingParams(seed=3)) == 8
    assert sampler.add(nc.SamplingParams(seed=4), row_id=0) == 0
    assert sampler.rows == ("chat-1", 7, 8, 0)
    logits = logits_of(np.random.default_rng(0), 4)
    order = [np.int64(8), "chat-1", 0, np.int32(7)]
    out = sampler(logits, order)
    alone = nc.Sampler(V, "reference")
    expected = [
        alone(logits[at][None], [alone.add(nc.SamplingParams(seed=seed))]) for at, seed in enumerate((3, 1, 4, 2))
    ]
    assert out.token_ids.tolist() == [int(one.token_ids[0]) for one in expected]
    sampler.remove("chat-1")
    assert sampler.add(nc.SamplingParams(), row_id="chat-1") == "chat-1"
    for bad, message in ((7, "row_id 7 is in use"), (True, "a string or an integer"), (1.5, "a string or an integer")):
        with pytest.raises(nc.ParameterError, match=message):
            sampler.add(nc.SamplingParams(), row_id=bad)
    with pytest.raises(nc.ParameterError, match="unknown row"):
        sampler.remove("chat-2")
    with pytest.raises(TypeError):
        sampler(logits, [1.5, 0, 7, 8])


@pytest.mark.parametrize("name", PARAMS)
def test_a_saved_row_continues_elsewhere(name: str) -> None:
    rng = np.random.default_rng(6)
    sampler, other = nc.Sampler(V, "reference"), nc.Sampler(V, "reference")
    row = sampler.add(params_of(name, 21), [1, 2, 3, 1, 2])
    for _ in range(6):
        sampler(logits_of(rng, 1), [row])
        data = sampler.save(row)
        assert isinstance(data, bytes)
        moved = other.restore(data, row_id=f"from {len(sampler.output_ids(row))}")
        assert other.save(moved) == data
        logits = logits_of(rng, 1)
        assert other.peek(logits, [moved])[0].tolist() == sampler.peek(logits, [row])[0].tolist()
        assert other.stages(moved) == sampler.stages(row)


def test_saved_rows_are_checked() -> None:
    sampler = nc.Sampler(V)
    data = sampler.save(sampler.add(nc.SamplingParams(logit_bias={5: 1.0}), [1]))
    with pytest.raises(nc.ParameterError, match="a vocabulary of 512 tokens, not of 300"):
        nc.Sampler(300).restore(data)
    for bad in (b"", b"[]", b"\xff\xfe", b"{}", "text", json.dumps({"nucleate_row": 99}).encode()):
        with pytest.raises(nc.ParameterError, match="data"):
            sampler.restore(bad)
    for field in ("seed", "prompt", "output", "stages"):
        for value in (None, [V], {"stage": "no"}, [-1], "x"):
            broken = json.dumps({**json.loads(data), field: value}).encode()
            with pytest.raises((ValueError, TypeError)):
                sampler.restore(broken)
    assert len(sampler) == 1


def test_guidance_is_saved_and_peeked_with_its_companion() -> None:
    rng = np.random.default_rng(8)
    sampler = nc.Sampler(V)
    row = sampler.add((stages.Guidance(1.5), stages.Temperature(0.8), stages.Gumbel(3)), [1])
    logits, companion = logits_of(rng, 2), logits_of(rng, 2)
    with pytest.raises(nc.ParameterError, match="companion"):
        sampler.peek(logits[:1], [row])
    moved = sampler.restore(sampler.save(row))
    tokens = [sampler.peek(logits[:1], [one], companion=companion[:1]).token_ids.tolist() for one in (row, moved)]
    assert tokens[0] == tokens[1] == sampler(logits[:1], [row], companion=companion[:1]).token_ids.tolist()
    both = sampler.peek(logits, [row], drafts={row: [3]}, companion=companion).token_ids.tolist()
    sampler.accept(row, 3)
    assert both[1] == sampler(logits[1:], [row], companion=companion[1:]).token_ids.tolist()[0]


def test_peeks_check_their_arguments() -> None:
    sampler = nc.Sampler(V)
    row = sampler.add(nc.SamplingParams(mirostat_tau=3))
    logits = logits_of(np.random.default_rng(0), 2)
    for arguments, error in (
        ({"drafts": {row: [V]}}, ValueError),
        ({"drafts": {"other": [1]}}, nc.ParameterError),
        ({"drafts": {row: [1, 2]}}, ValueError),
        ({"drafts": {row: [1]}, "mask": np.zeros((1, V // 32), np.int32)}, ValueError),
    ):
        with pytest.raises(error):
            sampler.peek(logits, [row], **arguments)
        assert sampler.output_ids(row) == ()
    masked = np.zeros((2, V // 32), np.int32)
    masked[0, 0], masked[1, 1] = 1 << 5, 1 << 3
    assert sampler.peek(logits, [row], drafts={row: [5]}, mask=masked).token_ids.tolist() == [5, 35]
    logits[0, 3] = np.inf
    out = sampler.peek(logits, [row], drafts={row: [5]})
    assert out.token_ids[0] == -1
    assert out.errors == {0: "+inf at token 3"}
    assert out.token_ids[1] >= 0


def test_defaults_end_ids_and_text_are_those_of_the_model() -> None:
    sampler = nc.load_sampler()
    llm = nc.LLM()
    assert sampler.vocab_size == llm.model.vocab_size
    prompt, rng = llm.tokenizer.encode("Once upon a time"), np.random.default_rng(0)
    given = nc.SamplingParams(seed=4, bad_words=(" fox",), min_tokens=3, temperature=0.8, max_tokens=None)
    row = sampler.add(given, prompt)
    plain = nc.Sampler(sampler.vocab_size)
    built = given.with_defaults(llm.default_params).build_pipeline(tuple(llm.tokenizer.eos_token_ids), llm.tokenizer)
    twin = plain.add(built, prompt, seed=4)
    assert sampler.stages(row) == plain.stages(twin)
    logits = rng.normal(0, 3, (1, sampler.vocab_size)).astype(np.float32)
    assert sampler(logits, [row]).token_ids.tolist() == plain(logits, [twin]).token_ids.tolist()
    assert sampler.stages(sampler.add()) is not None
    with pytest.raises(nc.ParameterError, match="params must be a SamplingParams or a tuple of stages: there are no"):
        plain.add()
    with pytest.raises(nc.ParameterError, match="stop is for LLM"):
        sampler.add(nc.SamplingParams(stop=["x"]))


def test_recommended_parameters_of_a_folder(tmp_path: Any) -> None:
    for path in EMBEDDED.iterdir():
        if path.suffix != ".safetensors" and path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    config = {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": None,
        "repetition_penalty": 1.2,
        "max_new_tokens": 5,
    }
    before = (
        json.loads((tmp_path / "generation_config.json").read_text())
        if (tmp_path / "generation_config.json").exists()
        else {}
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({**before, **config, "stop_strings": ["x"]}))
    sampler = nc.load_sampler(tmp_path)
    assert sampler.stages(sampler.add()) == (
        stages.Repetition(1.2),
        stages.Temperature(0.5),
        stages.TopK(7),
        stages.Gumbel(),
    )
    assert stages.Temperature(0.9) in sampler.stages(sampler.add(nc.SamplingParams(temperature=0.9)))
    ignoring = nc.load_sampler(tmp_path, generation_config="none", vocab_size=5000)
    assert ignoring.stages(ignoring.add()) == (stages.Gumbel(),)
    assert ignoring.vocab_size == 5000
    with pytest.raises(nc.ParameterError, match="generation_config must be auto or none"):
        nc.load_sampler(tmp_path, generation_config="vllm")
    with pytest.raises(nc.ParameterError, match="defaults must be a SamplingParams"):
        nc.Sampler(10, defaults={"temperature": 1})
