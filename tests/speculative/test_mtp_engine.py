"""An engine with MTP drafts has the same output, and the same distribution, as without."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from test_speculation_distributions import assert_marginals, text_counts
from test_speculation_embedded import comparable
from toy_requests import drive, is_empty

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.loader import runner_of
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import Draft, DraftContext

pytestmark = pytest.mark.usefixtures("one_torch_thread")
torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
pytest.importorskip("transformers", reason="needs the extra 'torch'")

from mtp_models import SIZE, modules_of, predictable_of  # noqa: E402

from nucleate.speculative.neural.mtp import Mtp  # noqa: E402

MEMORY = 8 << 20
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_p": 0.85},
    {"min_p": 0.08, "temperature": 1.3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4},
    {"n": 3, "temperature": 0.9},
    {"stop_token_ids": (7, 8, 9), "temperature": 0.9},
]


def requests(count: int, seed: int) -> list[Request]:
    """Requests, some of which share a prefix."""
    rng = random.Random(seed)
    common = [rng.randrange(3, SIZE) for _ in range(40)]
    made = []
    for way in [*WAYS, *WAYS][:count]:
        own = [rng.randrange(3, SIZE) for _ in range(rng.randint(1, 30))]
        params = nc.SamplingParams(seed=rng.randrange(2**64), max_tokens=rng.randint(8, 30), **way)
        made.append(Request([*common[: rng.choice([0, 33, 40])], *own], params))
    return made


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("family", ["glm4_moe", "mellum", "deepseek_v3, 3", "qwen2", "qwen3"])
@pytest.mark.parametrize("blocks", [None, 14], ids=["", "few blocks"])
def test_text_is_that_without_drafts(llm: nc.LLM, family: str, blocks: int | None) -> None:
    """In a mixed batch, with shared prefixes, and with preemption."""
    stock = predictable_of(family, 0.06)
    modules, batch = modules_of(*stock), requests(14, 3)
    engines = []
    for speculation in (None, Speculation(lambda: Mtp(modules), 4, adaptive=False)):
        runner = runner_of(TransformersModel.of(stock[0]), MEMORY)
        if blocks is not None:
            runner.allocate(blocks)  # type: ignore[attr-defined]
        engines.append(
            Engine(runner, llm.tokenizer, speculative_config=speculation, max_num_batched_tokens=64, max_num_seqs=16)
        )
    plain, engine = engines
    for request, expected, found in zip(batch, drive(plain, batch), drive(engine, batch), strict=True):
        assert comparable(found) == comparable(expected), request.params
    assert is_empty(engine)
    drafts, stats = engine.stats.speculative, engine.stats
    assert 0.1 * drafts.draft_tokens < drafts.accepted_tokens < 0.95 * drafts.draft_tokens
    assert stats.num_steps < plain.stats.num_steps
    assert bool(stats.num_preemptions) == (blocks is not None)


@pytest.mark.slow
def test_perfect_drafts_are_always_accepted(llm: nc.LLM) -> None:
    """Every draft token is accepted, greedy or sampled with the noise of the target."""
    stock = predictable_of("glm4_moe", 0.0)
    modules = modules_of(*stock)
    for temperature in (0.0, 1.0):
        runner = runner_of(TransformersModel.of(stock[0]), MEMORY)
        config = Speculation(lambda: Mtp(modules), 3, adaptive=False)
        engine = Engine(runner, llm.tokenizer, speculative_config=config)
        params = nc.SamplingParams(seed=1, max_tokens=33, temperature=temperature, ignore_eos=True)
        drive(engine, [Request([5, 6, 7 + i], params.replace(seed=i)) for i in range(4)])
        assert engine.stats.speculative.mean_acceptance_length > 3.5


class Misreporting(Mtp):
    """Reports other distributions than those it samples from."""

    def propose(self, states: Any, counts: Any) -> list[Draft]:
        return [
            Draft(
                draft.tokens,
                None,
                draft.distributions and tuple(np.roll(distribution, 1) for distribution in draft.distributions),
            )  # type: ignore[arg-type]
            for draft in super().propose(states, counts)
        ]


PROMPT = [3, 2, 4]


def text_probabilities(model: Any) -> np.ndarray:
    """The probability of each text of four tokens."""
    prefixes = list(itertools.product(range(5), repeat=3))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])).logits
    p = logits[:, len(PROMPT) - 1 :].double().div(1.2).softmax(-1).numpy()
    found = np.zeros((5,) * 4)
    for row, prefix in enumerate(prefixes):
        before = np.prod([p[row, index, token] for index, token in enumerate(prefix)])
        found[prefix] = before * p[row, 3]
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "proposer", "rule"),
    [("glm4_moe", Mtp, "rejection"), ("deepseek_v3, 3", Mtp, "block"), ("mellum", Misreporting, "rejection")],
)
def test_texts_have_the_model_distribution(family: str, proposer: type[Mtp], rule: str, llm: nc.LLM) -> None:
    stock = predictable_of(family, 0.25, vocab_size=5)
    p_4 = text_probabilities(stock[0])
    assert p_4.sum() == pytest.approx(1)
    modules = modules_of(*stock)
    config = Speculation(lambda: proposer(modules), 2, rule, adaptive=False)
    runner = runner_of(TransformersModel.of(stock[0]), 32 << 20)
    engine = Engine(runner, llm.tokenizer, speculative_config=config, max_num_seqs=256)
    counts_4 = text_counts(engine, nc.SamplingParams(temperature=1.2), 500, PROMPT)
    assert engine.stats.speculative.accepted_tokens < 0.9 * engine.stats.speculative.draft_tokens
    if proposer is Mtp:
        assert_marginals(counts_4, p_4)
    else:  # the test detects a wrong distribution
        with pytest.raises(AssertionError, match="chi-square"):
            assert_marginals(counts_4, p_4)


def test_hidden_states_stay_on_the_device_of_the_logits() -> None:
    """Hidden states may be tensors on a device, with the same result."""
    stock = predictable_of("glm4_moe", 0.25)
    modules, ids = modules_of(*stock), [5, 6, 7, 8, 9, 3, 4]
    runner: Any = runner_of(TransformersModel.of(stock[0]), MEMORY)
    runner.capture_hidden_states((2,))
    from nucleate.models.runner import ModelInput
    from nucleate.speculative.draft import TargetOutput

    drafts = []
    for runner.asynchronous in (False, True):
        proposer = Mtp(modules)
        runner.forward([ModelInput(0, ids, 0, 6, [0], 1)])
        assert isinstance(runner.hidden_states, torch.Tensor if runner.asynchronous else np.ndarray)
        proposer.observe([TargetOutput(0, 0, ids[:6], runner.hidden_states)])
        drafts.append(proposer.propose([DraftContext(0, ids, temperature=0.0)], [4])[0].tokens)
    assert len(drafts[0]) == 4
    assert drafts[0] == drafts[1]
