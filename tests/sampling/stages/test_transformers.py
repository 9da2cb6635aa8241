"""Transformers itself, in its own order, against the ``hf`` preset: same survivors and probabilities.

Both compute in float64 here. Remaining differences are in docs/differences.md, and are tested below.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import tiers

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.stages import Allowed, BadWords, Epsilon, Eta, Gumbel, TopH, TopK, TopP, Typical

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:Passing `.*` with `inputs_embeds`:UserWarning")  # of an empty prompt

BORDER = 1e-5
THEIR_TOP_H = 100  # it considers only this many tokens
EOS = 0


def distinct(rng, size):
    """Scores without duplicates."""
    while True:
        # among thousands of tokens flat rows would have one at every threshold
        x = (rng.normal(size=size) * rng.choice([0.3, 1.0, 3.0, 8.0][2 * (size > 1000) :])).astype(np.float32)
        if len(np.unique(x)) == size:
            return x


def tied(rng, size):
    """Scores of a few values, each of them many times."""
    return rng.integers(-3, 4, size).astype(np.float32) * np.float32(rng.choice([0.25, 1.0, 2.0]))


def ids(rng, size, most):
    return rng.integers(0, size, rng.integers(1, most + 1)).tolist()


def float32(number):
    return float(np.float32(number))


FIELDS = {  # fields of a GenerationConfig, in their order
    "sequence_bias": lambda rng, size: [[[token], float32(rng.normal() * 3)] for token in {*ids(rng, size, 4)}],
    "repetition_penalty": lambda rng, size: float(rng.choice([0.3, 1.1, 1.5, 20.0])),
    "no_repeat_ngram_size": lambda rng, size: int(rng.integers(1, 5)),
    "bad_words_ids": lambda rng, size: [word for n in (1, 3) for word in [ids(rng, size, n)] if word != [EOS]] or None,
    "min_new_tokens": lambda rng, size: int(rng.integers(1, 12)),
    "suppress_tokens": lambda rng, size: ids(rng, size, 4),
    "temperature": lambda rng, size: float(rng.uniform(0.2, 3)),
    "top_h": lambda rng, size: float(rng.uniform(0.02, 1)),
    "top_k": lambda rng, size: int(rng.integers(2, size + 5)),
    "top_p": lambda rng, size: float(rng.uniform(0.01, 0.999)),
    "min_p": lambda rng, size: float(rng.choice([rng.uniform(0.001, 1), 10 ** rng.uniform(-6, -1)])),
    "typical_p": lambda rng, size: float(rng.uniform(0.02, 0.99)),
    "epsilon_cutoff": lambda rng, size: float(10 ** rng.uniform(-5, -0.5)),
    "eta_cutoff": lambda rng, size: float32(10 ** rng.uniform(-5, -0.5)),
}
CUTS = ("top_h", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
TIES_DIFFER = ("typical_p", "epsilon_cutoff", "eta_cutoff")


def run_transformers(fields, logits, prompt, output):
    """(final scores as float64 [V], the names of the processors)."""
    config = transformers.GenerationConfig(do_sample=True, top_k=fields.get("top_k", 0))
    for name, value in fields.items():
        setattr(config, name, value)
    config._eos_token_tensor = torch.tensor([EOS])
    mixin = transformers.GenerationMixin
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    model._merge_criteria_processor_list = lambda default, custom: default
    processors = mixin._get_logits_processor(model, config, input_ids_seq_length=len(prompt), device="cpu")
    scores, history = torch.tensor(logits, dtype=torch.float64)[None], torch.tensor([[*prompt, *output]])
    for processor in processors:
        if scores.max() > -torch.inf:
            scores = processor(history, scores)
    return scores[0].numpy(), [type(processor).__name__ for processor in processors]


def our_pipeline(fields, size):
    """The pipeline of an equivalent request."""
    names = {"bad_words_ids": "bad_words", "min_new_tokens": "min_tokens", "suppress_tokens": "suppress_token_ids"}
    values = {names.get(name, name): value for name, value in fields.items() if name != "sequence_bias"}
    values["logit_bias"] = {token: bias for [token], bias in fields.get("sequence_bias", [])}
    stages = nc.SamplingParams(order="hf", seed=0, **values).build_pipeline((EOS,))
    if size <= THEIR_TOP_H:
        return stages
    return tuple(part for s in stages for part in ((TopK(THEIR_TOP_H), s) if isinstance(s, TopH) else (s,)))


def chances(scores):
    e = np.exp(scores - scores.max())
    return e / e.sum()


def agree(fields, logits, prompt, output, expected):
    """Whether the survivors and probabilities are equal; of equal scores the same number, with the lowest ids."""
    stages = our_pipeline(fields, len(logits))
    survivors = reference.survivors(logits, stages, History(prompt, output))
    p_theirs, p_ours = chances(expected), np.zeros(len(expected))
    p_ours[survivors.ids_N] = chances(survivors.x_N)
    if np.count_nonzero(expected > -np.inf) != len(survivors.ids_N):
        return False
    if not np.allclose(np.sort(p_theirs), np.sort(p_ours), rtol=1e-9, atol=1e-300):
        return False
    before_truncation = reference.survivors(
        logits, tuple(s for s in stages if s.name not in KEEPS), History(prompt, output)
    )
    if (np.diff(before_truncation.x_N) != 0).all():
        return bool(np.allclose(p_theirs, p_ours, rtol=1e-9, atol=1e-300))
    return survivors.ids_N.tolist() == before_truncation.ids_N[: len(survivors.ids_N)].tolist()


KEEPS = ("top_h", "top_k", "top_p", "min_p", "typical", "epsilon", "eta")


def compare(rng, fields, logits, prompt, output):
    """The result: "same"; "border", with a threshold within 1e-5 of the other side; "none", without survivors."""
    expected, _ = run_transformers(fields, logits, prompt, output)
    if expected.max() == -np.inf:
        with pytest.raises(reference.RowError):
            reference.survivors(logits, our_pipeline(fields, len(logits)), History(prompt, output))
        return "none"
    if agree(fields, logits, prompt, output, expected):
        return "same"
    cuts = [name for name in CUTS if name in fields]
    moved = (
        {**fields, **{name: min(fields[name] * factor, 1.0) for name, factor in zip(cuts, factors, strict=True)}}
        for factors in product((1, 1 - BORDER, 1 + BORDER), repeat=len(cuts))
    )
    assert any(agree(other, logits, prompt, output, expected) for other in moved), (
        fields,
        logits.tolist(),
        prompt,
        output,
    )
    return "border"


def trial(rng, names, size, ties=False):
    """One random row with all of these fields."""
    logits = (tied if ties else distinct)(rng, size)
    if size > 3 and rng.random() < 0.3:
        logits[rng.random(size) < 0.3] = -np.inf
        logits[rng.integers(size)] = 1.5
    history = rng.integers(0, min(size, int(rng.choice([2, 3, 5000]))), rng.integers(1, 14)).tolist()
    # our bad words match in the output only, theirs also in the prompt; so use no prompt with bad words
    cut = 0 if "bad_words_ids" in names else rng.integers(0, len(history) + 1)
    fields = {name: value for name in names if (value := FIELDS[name](rng, size)) is not None}
    return compare(rng, fields, logits, history[:cut], history[cut:])


def trials(names, seed, count, sizes, ties=False, pick=None):
    rng = np.random.default_rng(seed)
    found = Counter()
    for _ in range(count):
        chosen = names if pick is None else [name for name in names if rng.random() < pick]
        found[trial(rng, chosen, int(rng.choice(sizes)), ties)] += 1
    assert found["border"] <= 0.02 * count, found
    assert found["same"] >= 0.6 * count, found


SIZES = (1, 2, 3, 7, 30, 100, 101, 257, 1000)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.fast_cases(3)
def test_each_processor_alone(name):
    trials([name], 1, tiers.count(60, 250), SIZES)


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in TIES_DIFFER])
@pytest.mark.fast_cases(2)
def test_each_processor_alone_with_equal_scores(name):
    trials([name], 2, tiers.count(30, 120), SIZES, ties=True)


@pytest.mark.slow
def test_chains_in_the_order_of_transformers():
    trials(list(FIELDS), 3, 1800, SIZES, pick=0.45)


@pytest.mark.slow
def test_chains_in_the_order_of_transformers_with_equal_scores():
    trials([name for name in FIELDS if name not in TIES_DIFFER], 4, 800, SIZES, ties=True, pick=0.5)


@pytest.mark.exhaustive
def test_many_more_chains():
    trials(list(FIELDS), 5, 20000, SIZES, pick=0.45)
    trials(list(FIELDS), 6, 1500, (5000, 20000), pick=0.3)
    trials([name for name in FIELDS if name not in TIES_DIFFER], 7, 20000, SIZES, ties=True, pick=0.5)


def test_the_preset_has_the_order_of_transformers():
    rng = np.random.default_rng(0)
    fields = {name: FIELDS[name](rng, 50) for name in FIELDS}
    _, processors = run_transformers(fields, distinct(rng, 50), [1, 2], [3])
    assert processors == [
        "SequenceBiasLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
    ]
    kinds = {"logit_bias": 0, "repetition": 1, "no_repeat_ngram": 2, "bad_words": 3, "min_tokens": 4, "suppress": 5}
    kinds |= {"temperature": 6} | {name: 7 + index for index, name in enumerate(KEEPS)}
    stages = [stage.name for stage in our_pipeline(fields, 50)[:-1]]
    assert sorted(stages, key=kinds.__getitem__) == stages
    assert len(stages) == len(processors)


def surviving_ids(stages, logits, output=()):
    return sorted(reference.survivors(logits, (*stages, Gumbel(0)), History([], output)).ids_N.tolist())


def their_surviving_ids(fields, logits, output=(1,)):
    return np.flatnonzero(run_transformers(fields, logits, [], [*output])[0] > -np.inf).tolist()


def test_their_typical_keeps_all_tokens_equally_far_from_the_entropy():
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.2], np.float32))
    assert (their_surviving_ids({"typical_p": 0.3}, logits), surviving_ids([Typical(0.3)], logits)) == (
        [1, 2, 3],
        [1, 2],
    )


@pytest.mark.parametrize(("field", "kind"), [("epsilon_cutoff", Epsilon), ("eta_cutoff", Eta)])
def test_their_floors_keep_all_the_best_tokens_if_none_reaches_the_floor(field, kind):
    logits = np.zeros(4, np.float32)
    if kind is Eta:  # its floor is below the probability of equal tokens
        assert their_surviving_ids({field: 0.9}, logits) == surviving_ids([kind(0.9)], logits) == [0, 1, 2, 3]
    else:
        assert (their_surviving_ids({field: 0.9}, logits), surviving_ids([kind(0.9)], logits)) == ([0, 1, 2, 3], [0])


def test_their_top_p_may_keep_any_of_equal_tokens():
    logits = np.zeros(1000, np.float32)
    assert len(their_surviving_ids({"top_p": 0.3005}, logits)) == 301
    assert surviving_ids([TopP(0.3005)], logits) == list(range(301))


def test_their_top_h_considers_a_hundred_tokens():
    logits = np.linspace(0, 1, 1000).astype(np.float32)
    assert len(their_surviving_ids({"top_h": 0.5}, logits)) < THEIR_TOP_H
    assert len(surviving_ids([TopH(0.5)], logits)) == 396


def test_their_bad_words_match_in_the_prompt():
    logits = np.zeros(4, np.float32)
    words = [[1, 2]]
    their_scores, _ = run_transformers({"bad_words_ids": words}, logits, [1], [])
    assert np.flatnonzero(their_scores > -np.inf).tolist() == [0, 1, 3]
    survivors = reference.survivors(logits, (BadWords(words), Gumbel(0)), History([1], []))
    assert survivors.ids_N.tolist() == [0, 1, 2, 3]


def test_their_bad_words_leave_out_eos_alone():
    logits, words = np.zeros(4, np.float32), [[EOS], [2]]
    assert their_surviving_ids({"bad_words_ids": words}, logits) == [0, 1, 3]
    assert surviving_ids([BadWords(words)], logits) == [1, 3]


def test_forced_eos_is_an_allowed_list_in_the_last_step():
    logits = np.zeros(4, np.float32)
    fields = {"forced_eos_token_id": EOS, "max_length": 3}
    assert their_surviving_ids(fields, logits, [1, 1]) == surviving_ids([Allowed((EOS,))], logits) == [EOS]
    assert their_surviving_ids(fields, logits, [1]) == [0, 1, 2, 3]
