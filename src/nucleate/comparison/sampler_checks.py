"""Checks of a sampler, given as a function: logits and parameters in, one token id per row out.

The function is called as ``sample(logits, parameters, seeds)`` and returns a sequence of R token ids.

- logits: float32 [R, V], NumPy. The function must not change it. Most calls repeat one row.
- parameters: a dict, the same for all rows, without those at their neutral values. Its keys are ``temperature``,
  ``top_k``, ``top_p``, ``min_p``, ``logit_bias`` (a dict from token ids to amounts), ``presence_penalty``,
  ``frequency_penalty``, ``repetition_penalty``, and the history that penalties need, ``prompt_token_ids`` and
  ``output_token_ids`` (lists).
- seeds: R integers from 0 to 2**63 - 1. A row's token may depend on its own seed only.

For a parameter that the sampler does not have, the function raises NotImplementedError; for an invalid value any other
exception. As all logits are known, every expected distribution is exact.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.comparison.exact_tests import (
    ORDERS,
    Check,
    Difference,
    Findings,
    Label,
    NotTested,
    Progress,
    Question,
    Stages,
    TopTokens,
    apply,
    follow,
    order_questions,
    pick,
    power_statement,
    questions,
    run_checks,
    surely,
)
from nucleate.parameters.parameter import ParameterError

SampleRows = Callable[[NDArray[np.float32], dict[str, Any], list[int]], Any]
V = 512
ROWS = 256
"""Rows per call."""


def load_sampler(name: str) -> SampleRows:
    """Return the function ``MODULE:NAME``, of a module that can be imported from here. Raises ParameterError."""
    module, colon, path = name.partition(":")
    if not (colon and all(re.fullmatch(r"[A-Za-z_][\w.]*", part) for part in (module, path))):
        raise ParameterError("url", f"must be an http:// or https:// URL or MODULE:FUNCTION, got {name!r:.200}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ParameterError("url", f"cannot load {name}: {error}") from None
    if not callable(found):
        raise ParameterError("url", f"{name} must be a function, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


class SamplerChecks:
    """The checks of a sampler. sample: see the module. draws: per exact test. seed: the first of all seeds."""

    def __init__(self, sample: SampleRows, draws: int = 1280, seed: int = 0) -> None:
        self._sample, self.draws = sample, draws
        self._next_seed = 1000 + seed * 1_000_000
        self.row = np.random.default_rng(3).normal(0, 3, V).astype(np.float32)
        self.listed = self.top_tokens(self.row)
        self.best = int(self.listed.labels[0])  # type: ignore[call-overload]

    @staticmethod
    def top_tokens(row: NDArray[np.float32]) -> TopTokens:
        """Return the distribution of a row of logits [V], in rank order."""
        x = row.astype(np.float64)
        p = np.exp(x - x.max())
        order = np.argsort(-x, kind="stable")
        return TopTokens(tuple(map(int, order)), (p / p.sum())[order])

    def tokens(self, logits: NDArray[np.float32], seeds: Sequence[int], **parameters: Any) -> list[int]:
        """Call the sampler. Raises Difference for a result that is not a token id per row, and for exceptions."""
        given = logits.copy()
        try:
            found = np.asarray(self._sample(given, dict(parameters), [*seeds]))
        except NotImplementedError as error:
            raise NotTested(f"not supported: {error or 'NotImplementedError'}") from None
        except Exception as error:
            raise Difference(f"raises {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        if found.shape != (len(logits),) or found.dtype.kind not in "iu":
            raise Difference(f"returns {found.dtype} of shape {found.shape} for {len(logits)} rows")
        if (found < 0).any() or (found >= logits.shape[1]).any():
            raise Difference(f"returns the token id {int(found.max())} of {logits.shape[1]} tokens")
        if not np.array_equal(given, logits, equal_nan=True):
            raise Difference("changes the logits that it is given")
        return [int(token) for token in found]

    def same(self, rows: int, **parameters: Any) -> list[int]:
        """Sample copies of the row, with the same seeds at each call."""
        return self.tokens(np.tile(self.row, (rows, 1)), range(rows), **parameters)

    def drawer(self, row: NDArray[np.float32], more: Mapping[str, Any]) -> Callable[..., Counter[Label]]:
        """Return the function that draws tokens of a row. more: parameters of all draws."""

        def draw(count: int, fields: Mapping[str, Any]) -> Counter[Label]:
            found: Counter[Label] = Counter()
            for start in range(0, count, ROWS):
                size = min(ROWS, count - start)
                self._next_seed += size
                seeds = range(self._next_seed - size, self._next_seed)
                found.update(self.tokens(np.tile(row, (size, 1)), seeds, **{**fields, **more}))
            return found

        return draw

    def _changes(self, field: str, value: Any, more: Mapping[str, Any]) -> str:
        if self.same(64, **{field: value}, **more) == self.same(64):
            raise Difference(f"{field} {value} changes nothing")
        return f"{field} {value} changes the tokens"

    def _is_greedy(self, field: str, value: Any) -> str:
        hot = {} if field == "temperature" else {"temperature": 2.0}
        found = {*self.same(64, **hot, **{field: value})}
        if found != {self.best}:
            raise Difference(f"{field} {value:g} gives {len(found)} tokens, such as {sorted(found)[:4]}")
        return "always the most likely token"

    def _ties(self) -> str:
        row = np.zeros(V, np.float32)
        row[[7, 70, 300]] = 3.0
        found = {*self.tokens(np.tile(row, (16, 1)), range(16), temperature=0)}
        if found != {7}:
            raise Difference(f"of the equal best tokens 7, 70 and 300, greedy selects {sorted(found)}")
        kept = {*self.tokens(np.tile(row, (128, 1)), range(128), top_k=2)}
        if kept != {7, 70}:
            raise Difference(f"of the equal best tokens 7, 70 and 300, top_k 2 draws {sorted(kept)}")
        return "of equal tokens, greedy selects the lowest id, and top_k 2 keeps the two lowest"

    def _seeds(self) -> str:
        one, again = self.same(64), self.same(64)
        if one != again:
            raise Difference("the same seeds give other tokens the second time")
        if len({*one}) == 1:
            raise Difference("64 seeds give one token")
        return f"seeds repeat; 64 of them give {len({*one})} tokens"

    def _rows(self) -> str:
        rows = np.random.default_rng(5).normal(0, 2, (8, V)).astype(np.float32)
        together = self.tokens(rows, range(40, 48), temperature=1.3)
        for index, token in enumerate(together):
            alone = self.tokens(rows[index : index + 1], [40 + index], temperature=1.3)[0]
            if alone != token:
                raise Difference(f"row {index} gives token {token} among others and {alone} alone")
        return "eight rows give the same tokens together and alone"

    def _constant(self) -> str:
        rows = np.tile(self.row, (64, 1))
        rounded = (np.round(rows * 64) / 64).astype(np.float32)  # exact after the sum
        if self.tokens(rounded, range(64)) != self.tokens(rounded + np.float32(100), range(64)):
            raise Difference("logits that are all larger by 100 give other tokens")
        return "a constant that is added to all logits changes nothing"

    def _follows(self, stages: Stages) -> str:
        others = {"no stage": apply(self.listed, ())} if stages else {}
        return follow(self.drawer(self.row, {}), dict(stages), surely(self.listed, stages), others, self.draws)

    def _picked(self, made: Iterable[Question]) -> str:
        stages, others = pick(self.listed, made)
        alone: dict[str, Stages] = {f"{stage[0]} alone": (stage,) for stage in stages} if len(stages) > 1 else {}
        named = {name: apply(self.listed, other) for name, other in {**alone, "no truncation": (), **others}.items()}
        return follow(self.drawer(self.row, {}), dict(stages), surely(self.listed, stages), named, self.draws)

    def _masked(self) -> str:
        row = self.row.copy()
        row[::2] = -np.inf
        counts = self.drawer(row, {})(self.draws, {"temperature": 3.0})
        bad = sum(counts[token] for token in range(0, V, 2))
        if bad:
            raise Difference(f"{bad} of {self.draws:,} draws are tokens at -inf")
        return f"{self.draws:,} draws at temperature 3, and none of a token at -inf"

    def _shifted(self, fields: Mapping[str, Any], amounts: Mapping[int, float], **history: list[int]) -> str:
        """Compare draws with the distribution after amounts are subtracted from scores."""
        expected = surely(self.listed, (("shift", amounts),))
        others = {
            "no penalty": apply(self.listed, ()),
            "twice the amounts": apply(self.listed, (("shift", {k: 2 * v for k, v in amounts.items()}),)),
        }
        return follow(self.drawer(self.row, history), fields, expected, others, self.draws)

    def _repetition(self) -> str:
        seen = [int(each) for each in (self.listed.labels[0], self.listed.labels[3], self.listed.labels[-1])]  # type: ignore[call-overload]
        x = {token: float(self.row[token]) for token in seen}
        amounts = {token: value - (value / 1.1 if value > 0 else value * 1.1) for token, value in x.items()}
        history = {"prompt_token_ids": [seen[0], seen[0], seen[2]], "output_token_ids": [seen[1], seen[0]]}
        return self._shifted({"repetition_penalty": 1.1}, amounts, **history)

    def _refuses(self, rows: NDArray[np.float32], **parameters: Any) -> str:
        try:
            found = self.tokens(rows, range(len(rows)), **parameters)
        except Difference as difference:
            if "raises" in str(difference):
                return str(difference)
            raise
        raise Difference(f"gives the tokens {found[:4]}")

    def checks(self) -> Iterator[Check]:
        """Yield all checks in their order."""
        penalized = {"output_token_ids": [self.best] * 2, "prompt_token_ids": [self.best]}
        for field, value in (("temperature", 0.1), ("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
            yield Check("fields", field, partial(self._changes, field, value, {}))
        yield Check("fields", "logit_bias", partial(self._changes, "logit_bias", {5: 100.0}, {}))
        for field, value in (("presence_penalty", 2.0), ("frequency_penalty", 2.0), ("repetition_penalty", 5.0)):
            yield Check("fields", field, partial(self._changes, field, value, penalized))
        for field, value in (("temperature", 0), ("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
            yield Check("identities", f"{field} {value:g} is greedy", partial(self._is_greedy, field, value))
        yield Check("identities", "equal tokens", self._ties)
        yield Check("identities", "seed", self._seeds)
        yield Check("identities", "seed among others", self._rows)
        yield Check("identities", "constant", self._constant)
        for temperature in (1.0, 0.6, 1.6):
            stages = () if temperature == 1 else (("temperature", temperature),)
            yield Check("distribution", f"temperature {temperature:g}", partial(self._follows, stages))
        for field in ("top_k", "top_p", "min_p"):
            run = partial(self._picked, questions(field, self.listed))
            yield Check("distribution", f"{field} keeps", run)
        yield Check("distribution", "tokens at -inf", self._masked)
        bias = {int(label): 1.0 + index for index, label in enumerate(self.listed.labels[1:3])}  # type: ignore[call-overload]
        biased = partial(self._shifted, {"logit_bias": bias}, {token: -value for token, value in bias.items()})
        yield Check("distribution", "amount of logit_bias", biased)
        for first, second in ORDERS:
            yield Check(
                "order", f"{first}, then {second}", partial(self._picked, order_questions(first, second, self.listed))
            )
        both = {"presence_penalty": 0.2, "frequency_penalty": 0.4}
        prompt = {"prompt_token_ids": [self.best] * 5, "output_token_ids": []}
        yield Check("penalties", "the prompt", partial(self._shifted, both, {}, **prompt))
        output = {"prompt_token_ids": [], "output_token_ids": [self.best] * 2}
        yield Check("penalties", "amounts", partial(self._shifted, both, {self.best: 1.0}, **output))
        yield Check("penalties", "repetition", self._repetition)
        rows = self.row[None]
        for field, value in (("temperature", -1.0), ("top_k", -5), ("top_p", 1.5), ("min_p", 1.5), ("temprature", 0.5)):
            yield Check("errors", f"{field} {value:g}", partial(self._refuses, rows, **{field: value}))
        yield Check("errors", "NaN", partial(self._refuses, np.where(rows == rows.max(), np.nan, rows)))
        yield Check("errors", "no finite score", partial(self._refuses, np.full_like(rows, -np.inf)))


def check_sampler(
    sample: SampleRows, name: str = "sampler", draws: int = 1280, seed: int = 0, progress: Progress = str
) -> Findings:
    """Check a sampler.

    sample: ``sample(logits, parameters, seeds)``, see the module. name: of the report. draws: per exact test. seed:
    changes the draws. progress: see ``Progress``.
    """
    start = time.perf_counter()
    checks = SamplerChecks(sample, draws, seed)
    findings = [*run_checks(checks.checks(), progress)]
    power = power_statement(surely(checks.listed, ()), draws)
    about = {"seconds": round(time.perf_counter() - start, 1), "draws per test": draws, "power": power}
    return Findings(name, about, findings)
