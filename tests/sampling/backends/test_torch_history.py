"""Lists that depend on the order of the history, computed on a device: equal to ``Shift.listing``, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.maths import absolute, exp, maximum, minimum, sqrt, where
from nucleate.sampling.signature import UnsupportedError, shifts_spec
from nucleate.sampling.stage import Shift, TokenInfo, param
from nucleate.sampling.stages import (
    Allowed,
    BadWords,
    Dry,
    Frequency,
    Gumbel,
    LogitBias,
    MinTokens,
    NoRepeatNgram,
    Presence,
    Repetition,
    Suppress,
)

torch = pytest.importorskip("torch", reason="rows on a device are tensors")

from nucleate.sampling.gpu import batch_sampling  # noqa: E402
from nucleate.sampling.gpu import batch_state as on_device  # noqa: E402
from nucleate.sampling.gpu.batch_state import BatchState  # noqa: E402
from nucleate.sampling.gpu.ranked_tokens import RowConstants  # noqa: E402
from nucleate.sampling.gpu.torch_device import Slots  # noqa: E402

SIZE = 6
HERE = torch.device("cpu")
TOKENS = st.integers(0, SIZE - 1)
FEW = st.integers(0, 1)  # then there are many repeats
TOKEN_LISTS = st.one_of(st.lists(TOKENS, max_size=14), st.lists(FEW, max_size=14))
WORD = st.lists(TOKENS, min_size=1, max_size=4).map(tuple)
STAGE = st.one_of(
    st.builds(
        Dry,
        multiplier=st.sampled_from([0.8, 3.0, 1e30]),
        base=st.sampled_from([1.0, 1.00001, 1.75, 1e6]),
        allowed_length=st.integers(1, 4),
        breakers=st.one_of(st.none(), st.lists(WORD, max_size=3).map(tuple)),
        last_n=st.sampled_from([-1, 0, 1, 2, 5, 9, 40]),
    ),
    st.builds(NoRepeatNgram, st.integers(1, 5)),
    st.builds(BadWords, st.lists(WORD, min_size=1, max_size=4).map(tuple)),
)


def rows_of(pipelines: list[tuple[Shift, ...]], histories: list[tuple[list[int], list[int]]], ring: int) -> BatchState:
    """Rows on a device, with an initial ring size."""
    device_rows = BatchState(SIZE, HERE, "torch", lambda row, tokens: None)
    device_rows._slots = Slots(HERE, torch.float64, ring)
    for number, (shifts, (prompt, output)) in enumerate(zip(pipelines, histories, strict=True)):
        device_rows.add(number, shifts_spec(shifts), 1, prompt, output)
    return device_rows


@settings(max_examples=tiers.count(15, 60))
@given(
    rows=st.lists(st.tuples(STAGE, TOKEN_LISTS, TOKEN_LISTS), min_size=1, max_size=4),
    new_tokens=st.lists(st.lists(st.one_of(FEW, st.integers(-1, SIZE - 1)), min_size=4, max_size=4), max_size=12),
    ring=st.sampled_from([1, 2, 8, 64]),
)
@example(rows=[(Dry(0.8, 1.75, 1, None, 5), [0] * 7, [])], new_tokens=[[0] * 4] * 3, ring=2)
@example(
    rows=[(Dry(0.8, 1.75, 1, ((1,), (0, 2)), -1), [0, 1] * 4, [])],
    new_tokens=[[0] * 4, [2] * 4, [0] * 4, [2] * 4],
    ring=2,
)
@example(
    rows=[(BadWords(((9, 1), (1, 0))), [], []), (Dry(0.8, 1.75, 1, ((SIZE + 3, 0),)), [0, 0], [])],
    new_tokens=[],
    ring=8,
)
def test_device_lists_equal_the_listings_of_the_stages(rows: Any, new_tokens: Any, ring: int) -> None:
    """The additions to scores of 0: rows with one Shift at a time."""
    histories = [(list(prompt), list(output)) for _, prompt, output in rows]
    device_rows = rows_of(
        [(stage,) for stage, *_ in rows], [([*prompt], [*output]) for prompt, output in histories], ring
    )
    for tokens in [None, *new_tokens]:
        part = device_rows.view(range(len(rows)))
        if tokens is not None:
            tokens_R = torch.tensor(tokens[: len(rows)])
            device_rows.reserve(part, 1)
            device_rows._slots.push(part.slots_R, tokens_R)
            device_rows._update_repeats(part.groups[0], tokens_R)
            for (_, output), token in zip(histories, tokens_R.tolist(), strict=True):
                output.extend([token] * (token >= 0))
        added_RV = device_rows._apply_shifts(part.groups[0], torch.zeros(len(rows), SIZE, dtype=torch.float64)).tolist()
        for added_V, (stage, *_), (prompt, output) in zip(added_RV, rows, histories, strict=True):
            expected = {token: x for token, x in stage.listing(History(prompt, output)).items() if token < SIZE}
            assert {token: x for token, x in enumerate(added_V) if x} == pytest.approx(expected, rel=1e-11)


class Squeeze(Shift):
    """A custom rule: scores of seen tokens move towards 0, the more the more often they occurred."""

    rank = 25
    touches = "seen"
    s: float = param("how much", default=0.5, low=0.0)
    both: bool = param("the prompt too", default=True, name="squeeze_both")
    last_n: int | None = param("of the last", default=None, low=-1, name="squeeze_last_n")

    @property
    def window(self) -> int | None:
        return self.last_n

    def apply(self, x: Any, token: TokenInfo) -> Any:
        times = token.output_count + (token.prompt_count if self.both else 0.0)
        return where(times > 0, sqrt(absolute(x) + 1.0) / (1.0 + self.s * times), minimum(x, self.s))


class Pull(Shift):
    """A custom list with a custom rule."""

    rank = 26
    touches = "listed"
    to: float = param("where to", default=1.0)
    ids: tuple[int, ...] = param("which", default=(1, 2), low=0, name="pull_ids")

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return maximum(x, self.to + token.listed - exp(-absolute(x)))

    def listing(self, history: History) -> Any:
        return dict.fromkeys(self.ids, 0.25)


WINDOW = st.sampled_from([None, -1, 0, 1, 3, 8, 2**70])
SHIFT = st.one_of(
    st.builds(Repetition, st.sampled_from([0.5, 1.5]), WINDOW),
    st.builds(Frequency, st.sampled_from([-0.5, 0.7]), WINDOW),
    st.builds(Presence, st.sampled_from([-1.0, 0.3]), WINDOW),
    st.builds(Squeeze, st.sampled_from([0.1, 2.0]), st.booleans(), WINDOW),
    st.builds(Pull, st.sampled_from([-1.0, 2.0]), st.lists(TOKENS, min_size=1, max_size=3).map(tuple)),
    st.builds(LogitBias, st.dictionaries(TOKENS, st.sampled_from([-3.0, 0.5, 2.0]), min_size=1, max_size=4)),
    st.builds(MinTokens, st.integers(1, 6), st.lists(TOKENS, min_size=1, max_size=2).map(tuple)),
    st.builds(Suppress, st.lists(TOKENS, min_size=1, max_size=2).map(tuple)),
    st.builds(Allowed, st.lists(TOKENS, min_size=3, max_size=6).map(tuple)),
    STAGE,
)


def scores(x_V: Any, stages: tuple[Shift, ...], history: History) -> Any:
    """The reference's scores, -inf where a token is masked; all NaN for an error."""
    try:
        survivors = reference.survivors(x_V, stages, history)
    except reference.RowError:
        return np.full(SIZE, np.nan)
    y_V = np.full(SIZE, -np.inf)
    y_V[survivors.ids_N] = survivors.x_N
    return y_V


@pytest.mark.slow
@settings(max_examples=tiers.count(15, 60))
@given(
    rows=st.lists(st.tuples(st.lists(SHIFT, min_size=1, max_size=4), TOKEN_LISTS, TOKEN_LISTS), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_shifts_in_any_order_equal_the_reference(rows: Any, seed: int) -> None:
    rng, supported, histories = np.random.default_rng(seed), [], []
    for shifts, prompt, output in rows:
        stages = tuple(shift for shift in shifts if not shift.neutral)
        if sum(isinstance(stage, Dry) for stage in stages) > 1:
            with pytest.raises(UnsupportedError, match="second of its kind"):
                shifts_spec(stages)
            continue
        supported.append(stages)
        histories.append((prompt, list(output)))
    # the ring grows as needed
    device_rows = rows_of(supported, [(prompt, [*output]) for prompt, output in histories], 2)
    for _ in range(4 * bool(histories)):
        part = device_rows.view(range(len(histories)))
        device_rows.reserve(part, 1)
        x_RV = rng.normal(size=(len(histories), SIZE)).astype(np.float32) * 3
        x_RV[rng.random(x_RV.shape) < 0.1] = -np.inf
        x_RV[:, 0] = 1.0
        fixed = RowConstants(SIZE, len(histories), torch.float64, HERE)
        y_RV = device_rows._apply_shifts(part.groups[0], batch_sampling.to_scores(torch.from_numpy(x_RV), fixed.zero_1))
        y_RV = batch_sampling.apply_mask(fixed, y_RV, part.groups[0].allowed_RW)
        invalid_R = ~(y_RV.amax(1).abs() < torch.inf)
        for index, (stages, (prompt, output)) in enumerate(zip(supported, histories, strict=True)):
            expected = scores(x_RV[index], stages, History(prompt, output))
            assert bool(invalid_R[index]) == bool(np.isnan(expected).all())
            if not invalid_R[index]:
                np.testing.assert_allclose(y_RV[index].numpy(), expected, rtol=1e-12, atol=1e-12)
        tokens_R = torch.from_numpy(rng.integers(0, SIZE, len(histories)))
        device_rows._slots.push(part.slots_R, tokens_R)
        device_rows._update_repeats(part.groups[0], tokens_R)
        for (_, output), token in zip(histories, tokens_R.tolist(), strict=True):
            output.append(token)


@pytest.mark.slow
def test_shifts_compile_without_a_graph_break() -> None:
    shifts = Repetition(1.2), Dry(0.8, 1.75, 1), NoRepeatNgram(2), BadWords(((1, 2),)), LogitBias({1: 2.0})
    device_rows = rows_of([shifts, shifts], [([1, 2, 1], []), ([3], [3])], 8)
    part, x_RV = device_rows.view([0, 1]), torch.zeros(2, SIZE, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x_RV: device_rows._apply_shifts(part.groups[0], x_RV), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x_RV), device_rows._apply_shifts(part.groups[0], x_RV))


def test_a_loop_uses_the_history_like_single_steps() -> None:
    table_VV = torch.from_numpy(np.random.default_rng(3).normal(size=(9, 9)).astype(np.float32))
    stages = Repetition(1.1), Dry(0.8, 1.75, 1, ((2,),)), NoRepeatNgram(4), BadWords(((3, 4), (5, 6, 7)))
    looped, stepped = nc.Sampler(9, "torch"), nc.Sampler(9, "reference")
    for sampler in (looped, stepped):
        for seed in range(3):
            sampler.add((*stages, Gumbel(seed)), [1, seed])
    loop, last = (
        looped.loop(lambda tokens_R, active_R: table_VV[tokens_R], [0, 1, 2], steps=10, stop_ids=[8]),
        [0, 1, 2],
    )
    sampled = torch.cat([loop() for _ in range(5)], 1).tolist()
    for row, tokens in enumerate(sampled):
        for token in tokens:
            if token >= 0:
                assert stepped(table_VV[last[row]][None], [row]).token_ids.tolist() == [token]
                last[row] = token
    assert any(-1 in tokens for tokens in sampled)


def test_rings_grow_only_with_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that has ended uses no space, however long others continue."""
    monkeypatch.setattr(on_device, "MIN_RING_SIZE", 16)
    sampler, table_VV = nc.Sampler(50, "torch"), torch.eye(50).roll(1, 1) * 1000
    sampler.add((NoRepeatNgram(60), Gumbel(1)), [2])
    sampler.add((Repetition(1.01, 4), Gumbel(1)), [3])
    loop = sampler.loop(lambda tokens_R, active_R: table_VV[tokens_R], [2, 11], steps=5, stop_ids=[10])
    sampled = torch.cat([loop() for _ in range(9)], 1).tolist()
    assert sampled[0] == [*range(3, 11), *[-1] * 37]
    assert sampler._device._state._slots.ring_size == 16
    for token in range(20):
        sampler.accept(0, token)
    assert sampler._device._state._slots.ring_size == 32
    assert sampler.output_ids(0) == (*range(3, 11), *range(20))


def test_stages_that_still_run_on_the_host() -> None:
    class Told(Shift):
        """A list that depends on the history."""

        touches = "listed"
        amount: float = param("how much", default=1.0)

        def apply(self, x: Any, token: TokenInfo) -> Any:
            return x + self.amount * token.listed

        def listing(self, history: History) -> Any:
            return {len(history.output): 1.0}

    class Elsewhere(Shift):
        """A rule for tokens that are not on a list."""

        touches = "unlisted"
        elsewhere: float = param("how much", default=1.0)

        def apply(self, x: Any, token: TokenInfo) -> Any:
            return x - self.elsewhere

    class Odd(Shift):
        """A rule that is not an expression."""

        touches = "seen"
        factor: float = param("how much", default=1.0)

        def apply(self, x: Any, token: TokenInfo) -> Any:
            return np.sort(x) * self.factor

    for shifts, why in (
        ((Told(),), "depends on the history"),
        ((Elsewhere(),), "has a rule that cannot run on a device"),
        ((Odd(),), "Odd.apply names np"),
        ((Dry(0.8), Dry(0.5)), "is the second of its kind"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            shifts_spec(shifts)


def test_float32_columns_use_the_history_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """For devices without float64."""
    monkeypatch.setattr(on_device, "float_dtype", lambda device: torch.float32)
    monkeypatch.setattr(on_device, "MIN_RING_SIZE", 16)
    both, rng = [nc.Sampler(40, backend) for backend in ("torch", "reference")], np.random.default_rng(0)
    for sampler in both:
        sampler.add((Repetition(1.3, 5), Dry(0.9, 1.5, 1), NoRepeatNgram(3), Gumbel(1)), [1, 2, 1, 2])
        sampler.add((Dry(0.9, 1.5, 1), Squeeze(0.3), Frequency(0.4, 9), Repetition(1.3, 5), Gumbel(2)), [1, 2] * 4)
    for _ in range(30):
        x_RV = rng.normal(size=(2, 40)).astype(np.float32) * 2
        x_RV[:, :4] += 3.0
        assert both[0](x_RV).token_ids.tolist() == both[1](x_RV).token_ids.tolist()
