"""Steps with drafts as tensors: verdicts are those of draws without drafts, and of ``engine.verify`` on their laws."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from verdicts import assert_is, chain, drafts, slow_rejection

import nucleate as nc
from nucleate.dispatch.chain import chain_of
from nucleate.engine import verify as slow
from nucleate.engine.draft.draft import Draft
from nucleate.pipeline import simplify

torch = pytest.importorskip("torch", reason="tensor code needs torch")
from nucleate.backends.cuda import verify, verify_step  # noqa: E402
from nucleate.backends.cuda.edits import Edits  # noqa: E402
from nucleate.backends.cuda.verify_places import Counted, Penalties, edits_ahead  # noqa: E402


def integers(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(x, np.int64))


class Case:
    """Random rows with drafts: as tensors, and as what a row without drafts is drawn with."""

    def __init__(self, numbers: np.random.Generator, rows: int, count: int, size: int, penalised: bool = False) -> None:
        self.logits_RNV = (numbers.normal(size=(rows, count + 1, size)) * 2).astype(np.float32)
        self.drafted_RK = drafts(numbers, rows, count, size)
        self.seeds, self.steps = numbers.integers(2**63, size=rows), numbers.integers(100, size=rows)
        self.stops_RS = numbers.integers(-1, 2 * size, size=(rows, 2))
        self.pasts = [[numbers.integers(size, size=n).tolist() for n in (3, 4)] for _ in range(rows)]
        self.masks_RNW = None
        self.params = [self.drawn_with(numbers, size, penalised) for _ in range(rows)]
        chains = [chain_of(simplify(nc.SamplingParams(**one).pipeline())) for one in self.params]
        self.numbers_RC = torch.tensor([list(one.numbers) for one in chains], dtype=torch.float64)
        self.edits = None
        if penalised:
            shape = rows, count + 1, -(-size // 32)
            self.masks_RNW = numbers.integers(-(2**31), 2**31, size=shape).astype(np.int32)
            self.edits = self.penalties()

    def drawn_with(self, numbers: np.random.Generator, size: int, penalised: bool) -> dict[str, Any]:
        penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3} if penalised else {}
        return {
            "order": "canonical" if penalised else str(numbers.choice(["canonical", "llama.cpp"])),
            "temperature": float(numbers.choice([0.0, 0.7, 1.0, 1.5])),
            "top_k": int(numbers.choice([0, 1, 5, size])),
            "top_p": float(numbers.choice([1.0, 0.9, 0.3])),
            "min_p": float(numbers.choice([0.0, 0.05])),
            **penalties,
        }

    def penalties(self) -> Edits:
        """Of each place, with the tokens drafted before it."""
        rows, places, size = self.logits_RNV.shape
        ids, table = np.full((rows, places, size), -1), np.tile([0.0, 1.0, 0.0], (rows, places, size, 1))
        for row, place in itertools.product(range(rows), range(places)):
            prompt, output = self.pasts[row][0], [*self.pasts[row][1], *chain(self.drafted_RK[row, :place])]
            for at, token in enumerate({*prompt, *output}):
                times = output.count(token)
                ids[row, place, at], table[row, place, at] = token, (0.0, 1.3, 0.4 * times - 0.3 * (times > 0))
        return Edits(integers(ids), *(torch.from_numpy(column.copy()) for column in np.moveaxis(table, 3, 0)))

    def tensors(self) -> tuple[Any, ...]:
        """What a step is given, but for laws."""
        masks = None if self.masks_RNW is None else torch.from_numpy(self.masks_RNW)
        return (
            *(torch.from_numpy(self.logits_RNV), integers(self.drafted_RK), self.numbers_RC),
            *(integers(self.seeds), integers(self.steps), integers(self.stops_RS), self.edits, masks),
        )

    def past(self, row: int, place: int) -> dict[str, Any]:
        """What a place of a row comes after."""
        prompt, output = self.pasts[row]
        output = [*output, *chain(self.drafted_RK[row, :place])]
        mask = None if self.masks_RNW is None else self.masks_RNW[row, place][None]
        return {"prompt_ids": [prompt], "output_ids": [output], "mask": mask}

    def draw(self, row: int, place: int) -> int:
        """A token as without drafts; -1 if there is none."""
        params = nc.SamplingParams(**self.params[row], seed=int(self.seeds[row]))
        step = int(self.steps[row]) + place
        try:
            logits_V = self.logits_RNV[row, place][None]
            return int(nc.sample(logits_V, params, step=step, backend="reference", **self.past(row, place))[0])
        except nc.LogitsError:
            return -1

    def law(self, row: int, place: int) -> np.ndarray:
        """What it is drawn from; NaN if from nothing."""
        logits_V = self.logits_RNV[row, place]
        try:
            return nc.probabilities(
                logits_V[None], nc.SamplingParams(**self.params[row]), backend="reference", **self.past(row, place)
            )[0]
        except nc.LogitsError:
            return np.full(len(logits_V), np.nan)

    def agree(self, numbers: np.random.Generator) -> None:
        """Draft what will be drawn, mostly."""
        for row, place in itertools.product(range(len(self.drafted_RK)), range(self.drafted_RK.shape[1])):
            if self.drafted_RK[row, place] >= 0 and numbers.random() < 0.8:
                self.drafted_RK[row, place] = self.draw(row, place)
        self.edits = None if self.edits is None else self.penalties()

    def counted(self) -> tuple[Any, ...]:
        """The pasts as entries of the device, with empty ones between; and the penalties."""
        rows, room = len(self.pasts), 12
        ids, counts = np.full((rows, room), -1), np.zeros((rows, 2, room), np.int64)
        for row, past in enumerate(self.pasts):
            for at, token in enumerate(sorted({*past[0], *past[1]}, reverse=True)):
                ids[row, at + at // 3], counts[row, :, at + at // 3] = token, [one.count(token) for one in past]
        zeros = torch.zeros(rows, room, dtype=torch.float64)
        penalties = (torch.full((rows, 1), number, dtype=torch.float64) for number in (1.3, 0.4, -0.3))
        counted = Counted(integers(ids), zeros, zeros.long(), *map(integers, counts.transpose(1, 0, 2)))
        return counted, Penalties(*penalties), integers(self.drafted_RK), integers(self.steps)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_edits_ahead_count_what_was_drafted(count: int) -> None:
    """Small vocabularies, so that drafts repeat themselves, and what was said."""
    for seed in range(20):
        case = Case(np.random.default_rng(seed), 4, count, 2 + seed, penalised=True)
        dense = []
        for edits in (case.edits, edits_ahead(*case.counted())):
            table = np.tile([0.0, 1.0, 0.0], (4, count + 1, 2 + seed, 1))
            for row, place, at in zip(*np.nonzero(edits.ids_RK.numpy() >= 0), strict=True):
                token = int(edits.ids_RK[row, place, at])
                assert (edits.ids_RK[row, place] == token).sum() == 1
                table[row, place, token] = [float(column[row, place, at]) for column in edits[1:]]
            dense.append(table)
        behind_RN = np.cumsum(np.pad(case.drafted_RK < 0, ((0, 0), (1, 0))), 1) > 0  # of no account
        assert np.allclose(dense[0][~behind_RN], dense[1][~behind_RN], rtol=1e-15)


def test_edits_ahead_ban_until_a_step() -> None:
    ids = integers([[3, 7], [5, -1]])
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    counted = Counted(ids, zeros + 0.5, integers([[0, 12], [11, 0]]), zeros.long(), zeros.long())
    neutral = Penalties(*(torch.full((2, 1), number, dtype=torch.float64) for number in (1.0, 0.0, 0.0)))
    got = edits_ahead(counted, neutral, integers([[7, 3], [1, -1]]), integers([10, 9]))
    assert got.ids_RK[:, :, :2].tolist() == [[row] * 3 for row in ids.tolist()]
    banned = (got.before_RK == -torch.inf) & (got.ids_RK >= 0)
    assert banned.nonzero().tolist() == [[0, 0, 1], [0, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert (got.before_RK[:, :, :2][got.ids_RK[:, :, :2] >= 0].clamp(min=0.0) == 0.5).sum() == 5


@pytest.mark.parametrize(
    ("count", "size", "penalised"), [(3, 7, False), (3, 300, True), (0, 40, True), (5, 257, False)]
)
def test_a_coupled_step_says_what_is_said_without_drafts(count: int, size: int, penalised: bool) -> None:
    numbers, rows = np.random.default_rng(count), 12
    case = Case(numbers, rows, count, size, penalised)
    case.logits_RNV[0, 0, 0] = np.nan
    case.logits_RNV[1, count, size - 1] = np.inf
    case.agree(numbers)
    got = verify_step.coupled_step(*case.tensors())
    for row in range(rows):
        stops = case.stops_RS[row].tolist()
        [verdict] = slow.coupled(
            [Draft(tuple(chain(case.drafted_RK[row])))],
            lambda _, places, row=row: [case.draw(row, places[0] + 1)],
            lambda _, token, stops=stops: token in stops,
        )
        ending = verdict.token >= 0 and verdict.token in stops
        assert_is(got, row, verdict, chain(case.drafted_RK[row]), [verdict.token] if ending else [])
    assert not count or got.kept_R.max() > 1


@pytest.mark.parametrize(("count", "size", "penalised"), [(3, 7, False), (3, 300, True), (0, 40, True), (5, 33, False)])
def test_a_rejection_step_is_the_slow_rule(count: int, size: int, penalised: bool) -> None:
    numbers, rows = np.random.default_rng(count), 12
    case = Case(numbers, rows, count, size, penalised)
    case.logits_RNV[0, 0, 0] = np.nan
    case.logits_RNV[1] = -np.inf
    case.agree(numbers)
    logits, drafted, *columns = case.tensors()
    given = numbers.dirichlet(np.ones(size), (rows, count)).reshape(rows, count, size)
    for q_RKV in (given, None):
        got = verify_step.rejection_step(logits, drafted, None if q_RKV is None else torch.from_numpy(q_RKV), *columns)
        for row in range(rows):
            tokens = chain(case.drafted_RK[row])
            p_NV = [case.law(row, place) for place in range(len(tokens) + 1)]
            seed, step = int(case.seeds[row]), int(case.steps[row])
            coins, coin = slow.coins(seed, step, len(tokens)), slow.last_coin(seed, step)
            verdict = slow_rejection(p_NV, tokens, None if q_RKV is None else q_RKV[row], coins, coin)
            assert_is(got, row, verdict, tokens, [stop for stop in case.stops_RS[row].tolist() if stop >= 0])
        assert not count or got.kept_R.max() > 0


@pytest.mark.parametrize(("penalised", "close"), [(False, 1e-12), (True, 1e-6)])
def test_laws_are_those_of_the_pipeline(penalised: bool, close: float) -> None:
    """Scores that were edited are float32, as those of the chain on the CPU."""
    case = Case(np.random.default_rng(4), 20, 2, 300, penalised)
    logits, _, numbers_RC, *_, edits, masks = case.tensors()
    p_RNV = verify_step.laws(logits, numbers_RC, edits, masks).numpy()
    for row, place in itertools.product(range(20), range(3)):
        assert p_RNV[row, place] == pytest.approx(case.law(row, place), rel=close, abs=0)


def counting_step(logits: Any, drafted: Any, numbers_RC: Any, seeds: Any, first: Any, stops: Any, said: Any) -> Any:
    """With edits that are worked out on the way."""
    edits = edits_ahead(*said, drafted, first)
    return verify_step.coupled_step(logits, drafted, numbers_RC, seeds, first, stops, edits)


def steps(count: int = 8) -> list[tuple[Any, tuple[Any, ...]]]:
    """Functions of tensors, with something to run on: the rules, a step that has a part of each, what is special."""
    case = Case(np.random.default_rng(5), 6, 3, 70, penalised=True)
    logits, drafted, *columns = case.tensors()
    q_RKV = torch.rand(6, 3, 70, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [
        (verify.coupled, (drafted, drafted.new_zeros(6, 4), columns[3])),
        (verify.rejection, (logits.exp(), drafted, q_RKV, q_RKV[:, :, 0], q_RKV[:, 0, 0], columns[3])),
        (counting_step, (logits, drafted, *columns[:4], case.counted()[:2])),
        (verify_step.coupled_step, (logits, drafted, *columns)),
        (verify_step.rejection_step, (logits, drafted, q_RKV, *columns)),
        (verify_step.rejection_step, (logits, drafted, None, *columns)),
        (verify_step.coupled_step, (logits[:, :1], drafted[:, :0], *columns[:3])),
        (verify_step.rejection_step, (logits[:, :1], drafted[:, :0], q_RKV[:, :0], *columns[:4])),
    ][:count]


def compiled(backend: str, count: int) -> None:
    """One graph each, and the same tokens as without."""
    for step, given_ in steps(count):
        torch._dynamo.reset()
        fast = torch.compile(step, fullgraph=True, backend=backend)
        for got, expected in zip(fast(*given_), step(*given_), strict=True):
            assert torch.equal(got, expected)


def test_it_compiles_without_a_graph_break() -> None:
    compiled("eager", 2)


@pytest.mark.slow
def test_what_is_special_compiles_too() -> None:
    compiled("eager", 8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_compiled_code_gives_the_same_tokens() -> None:
    compiled("inductor", 3)


def without_values(given_: Any) -> Any:
    """A tensor that has a shape alone."""
    if isinstance(given_, Edits | Counted | Penalties):
        return type(given_)(*map(without_values, given_))
    if isinstance(given_, tuple):
        return tuple(map(without_values, given_))
    return given_.to("meta") if isinstance(given_, torch.Tensor) else given_


def test_nothing_waits_for_a_value() -> None:
    """Tensors without values have none that could be waited for, and no shape may depend on one."""
    for step, given_ in steps():
        got = step(*map(without_values, given_))
        rows, count = given_[0 if step is verify.coupled else 1].shape
        assert [list(column.shape) for column in got] == [[rows], [rows, count + 1], [rows], [rows], [rows]]
