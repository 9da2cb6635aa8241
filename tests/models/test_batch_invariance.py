"""The same bits in every batch: random inputs in random batches, against each sequence computed as a whole, alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers
from gguf_files import random_folder, write_gguf
from numpy.typing import NDArray
from toy_models import CellToy, Toy

import nucleate as nc
from nucleate.engine.request import Request
from nucleate.models.batch_invariance import is_batch_invariant
from nucleate.models.batched_llama import BatchedLlama
from nucleate.models.loader import EMBEDDED, runner_of
from nucleate.models.runner import ModelInput, Runner

SIZE = 16


def bits(logits_LV: Any) -> NDArray[np.int32]:
    return np.array(logits_LV, np.float32).view(np.int32)


def alone(runner: Runner, ids: list[int], key: int) -> NDArray[np.int32]:
    """The bits of all logits of a sequence, in chunks of at most 40 tokens."""
    blocks = range(-(-len(ids) // runner.block_size))
    cuts = [*range(0, len(ids), 40), len(ids)]
    rows = [
        bits(runner.forward([ModelInput(key, ids, start, stop, blocks, stop - start)]))
        for start, stop in pairwise(cuts)
    ]
    runner.forget(key)
    return np.concatenate(rows)


def check_chaos(new_runner: Callable[[], Runner], seed: int, longest: int = 90, sequences: int = 24) -> None:
    """Sequences start, advance by chunks of any size, and end, up to 12 at a time."""
    rng, runner = random.Random(seed), new_runner()
    assert runner.batch_invariant
    all_ids = [
        [rng.randrange(runner.vocab_size) for _ in range(rng.choice([1, 2, 5, 16, 17, rng.randint(20, longest)]))]
        for _ in range(sequences)
    ]
    expected = [alone(runner, ids, 1000 + key) for key, ids in enumerate(all_ids)]
    per_sequence = -(-longest // runner.block_size)
    free = [range(i * per_sequence, (i + 1) * per_sequence) for i in range(12)]
    waiting, running = [*range(sequences)], dict[int, tuple[range, int]]()
    while waiting or running:
        while waiting and free and rng.random() < 0.6:
            running[waiting.pop()] = free.pop(rng.randrange(len(free))), 0
        chosen = [key for key in running if rng.random() < 0.8]
        rng.shuffle(chosen)
        inputs = []
        for key in chosen:
            blocks, start = running[key]
            stop = min(len(all_ids[key]), start + rng.choice([1, 1, 1, 2, 5, 30]))
            inputs.append(ModelInput(key, all_ids[key], start, stop, blocks, rng.randint(0, stop - start)))
        rows = iter(bits(runner.forward(inputs)))
        for each in inputs:
            for position in range(each.stop - each.num_logits, each.stop):
                assert np.array_equal(next(rows), expected[each.key][position]), (each.key, position)
            running[each.key] = running[each.key][0], each.stop
            if each.stop == len(each.token_ids) or rng.random() < 0.05:  # at its end, or aborted
                runner.forget(each.key)
                free.append(running.pop(each.key)[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(tiers.count(2, 10)))
def test_numpy(seed: int, model: Any) -> None:
    check_chaos(lambda: runner_of(model, 32 << 20, batch_invariant=True), seed)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_transformers(kind: str, dtype: str, tmp_path: Path) -> None:
    """Gemma 2 has sliding windows and capped scores."""
    pytest.importorskip("torch")
    from nucleate.models.transformers.transformers_model import TransformersModel

    random_folder(kind, tmp_path)
    model = TransformersModel(tmp_path, "cpu", dtype)
    for seed in range(tiers.count(1, 5)):
        check_chaos(lambda: runner_of(model, 16 << 20, batch_invariant=True), seed)


CACHES = (
    {},
    {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
    pytest.param({"cache_type_k": "f32", "cache_type_v": "f32"}, marks=pytest.mark.slow),
    pytest.param({"n_threads": 2}, marks=pytest.mark.slow),
)


@pytest.mark.parametrize("options", CACHES, ids=["f16", "q8_0", "f32", "2 threads"])
@pytest.mark.parametrize(("file_type", "plain"), [("f16", True), ("q8_0", True), ("q8_0", False)])
def test_gguf(file_type: str, plain: bool, options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from nucleate.models.gguf.gguf_model import GgufModel
    from nucleate.models.gguf.gguf_options import GgufOptions

    path = tmp_path / "model.gguf"
    write_gguf().write(EMBEDDED, path, file_type)
    model = GgufModel(path, GgufOptions(**{"n_threads": 1, **options}), plain=plain)
    for seed in range(tiers.count(1, 5)):
        check_chaos(lambda: model.new_runner(1500 * model.token_bytes, batch_invariant=True), seed)


def test_no_micro_batch_has_a_single_token(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from nucleate.models.gguf.gguf_model import GgufModel
    from nucleate.models.gguf.llama_library import INVARIANT_ROWS, GgufContext

    write_gguf().write(EMBEDDED, tmp_path / "model.gguf", "q8_0")
    model = GgufModel(tmp_path / "model.gguf", plain=True)
    for multiple in (1, 2, 8):
        context = GgufContext(model, 256, 2, multiple)
        for count in range(1, 200):
            filled = count + context.padding(count)
            assert filled % multiple == 0
            assert filled % INVARIANT_ROWS != 1
            assert filled - count <= max(multiple - 1, 1)
    assert {GgufContext(model, 256, 2).padding(count) for count in range(1, 200)} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["numpy", "gguf"])
def test_engine(runtime: str, tmp_path: Path) -> None:
    """Random requests with drafts, prefixes, preemption, n > 1 and guidance give what each gives alone."""
    source, how = None, {}
    if runtime == "gguf":
        pytest.importorskip("llama_cpp")
        source, how = tmp_path / "model.gguf", {"gguf_options": {"n_threads": 1}}
        write_gguf().write(EMBEDDED, source, "q8_0")
    llm, rng = nc.LLM(source, batch_invariant=True, generation_config="none", **how), random.Random(1)
    prefix = [rng.randrange(4096) for _ in range(40)]
    requests = [
        Request(
            [*prefix[: rng.randint(1, 40)], *[rng.randrange(4096) for _ in range(rng.randint(0, 9))]],
            nc.SamplingParams(
                temperature=rng.choice([0.0, 1.0]),
                seed=seed,
                n=rng.choice([1, 3]),
                max_tokens=rng.randint(1, 12),
                logprobs=0,
                ignore_eos=True,
                guidance_scale=rng.choice([1.0, 1.0, 1.5]),
            ),
        )
        for seed in range(tiers.count(16, 100))
    ]

    def run(together: bool, **options: Any) -> list[dict[int, list[tuple[int, float]]]]:
        engine = llm.new_engine(**options)
        found: dict[str, dict[int, list[tuple[int, float]]]] = {}
        for request in requests:
            found[engine.add(request)] = {}
            while len(engine) and not together:
                take(engine, found)
            take(engine, found)
        while len(engine):
            take(engine, found)
        return [*found.values()]

    def take(engine: Any, found: dict[str, dict[int, list[tuple[int, float]]]]) -> None:
        for output in engine.step():
            request_id, chunk = output.request_id, output.chunk
            assert chunk.finish_reason != "error", chunk.stop_reason
            rows = [(one.chosen.token_id, one.chosen.logprob) for one in chunk.logprobs or ()]
            found[request_id].setdefault(chunk.index, []).extend(rows)

    expected = run(together=False, max_num_seqs=6, enable_prefix_caching=False)
    memory = 20 * SIZE * llm.model.token_bytes
    assert run(together=True, max_num_seqs=12, kv_cache_memory=memory, speculative_config="ngram") == expected
    assert llm.new_engine().stats.batch_invariant


def test_a_model_that_depends_on_the_batch_is_found() -> None:
    toy = Toy(lambda ids: np.float32(np.sin(np.arange(50) * sum(ids))), 50)
    runner = CellToy(toy, 8, SIZE)
    assert is_batch_invariant(runner)
    forward = runner.forward
    runner.forward = lambda inputs: forward(inputs) + np.float32(len(inputs) == 4) * np.float32(1e-6)
    assert not is_batch_invariant(runner)
    assert not is_batch_invariant(CellToy(toy, 4, SIZE))  # no room for the test


def test_the_argument(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(nc.ParameterError, match="batch_invariant must be true or false, got 'yes'"):
        nc.LLM(batch_invariant="yes")
    assert not nc.LLM().new_engine().batch_invariant

    class Plain:
        vocab_size, context_length, runtime = 8, 64, "plain"

        def begin(self) -> Any:
            raise NotImplementedError

    runner_of(Plain(), 1 << 20, batch_invariant=True)
    assert "not batch-invariant" in caplog.text


def test_matrices_that_the_kernel_cannot_multiply(model: Any) -> None:
    other = copy.copy(model)
    other.inner_size = 12
    assert not BatchedLlama(other, 1 << 20, batch_invariant=True).batch_invariant


def test_a_transformers_model_that_depends_on_the_batch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from nucleate.models.transformers import batched_model
    from nucleate.models.transformers.transformers_model import TransformersModel

    random_folder("llama", tmp_path)
    model = TransformersModel(tmp_path, "cpu", "bfloat16")
    monkeypatch.setattr(batched_model, "is_batch_invariant", lambda _runner, _many=0: False)
    found = []
    for wanted in (False, True):
        runner = runner_of(model, 16 << 20, batch_invariant=wanted)
        assert not runner.batch_invariant
        ids = [*range(1, 41)]
        runner.forward([ModelInput(0, ids, 0, 20, range(3), 1)])
        found.append(bits(runner.forward([ModelInput(0, ids, 20, 40, range(3), 3)])))
    assert np.array_equal(*found)


def test_products_in_pieces_do_not_depend_on_the_number_of_rows() -> None:
    torch = pytest.importorskip("torch")
    from nucleate.models.transformers.batched_model import in_pieces

    linear = torch.nn.Linear(64, 24)
    x_TX = torch.randn(40, 64)
    with torch.inference_mode():
        whole = in_pieces(linear, x_TX)
        torch.testing.assert_close(whole, linear(x_TX))
        for start, stop in ((0, 0), (3, 4), (5, 21), (7, 40)):
            found = in_pieces(linear, x_TX[None, start:stop])
            assert found.shape == (1, stop - start, 24)
            assert torch.equal(found[0], whole[start:stop])
