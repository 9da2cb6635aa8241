"""The checks of exercise_top_p.ipynb: compare the functions of a student with nucleate, and explain what is wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

import nucleate as nc


class CheckFailedError(AssertionError):
    """What is wrong with a solution. Notebooks show only its message."""

    def _render_traceback_(self) -> list[str]:
        return [f"Not correct yet: {self}"]


def check(function: Callable) -> Callable:
    """Say that a solution is correct, or that there is none yet."""

    @functools.wraps(function)
    def run(solution: Callable, *others: Callable) -> None:
        try:
            function(solution, *others)
        except NotImplementedError:
            print(f"{solution.__name__}: not implemented yet")
        else:
            print(f"{solution.__name__}: correct")

    return run


def require(holds: object, message: str) -> None:
    if not holds:
        raise CheckFailedError(message)


@check
def check_softmax(softmax: Callable) -> None:
    """softmax(x_V): the probabilities of scores, float [V]."""
    x_V = np.array([1.0, 3.0, 2.0])
    before, p_V = x_V.copy(), _array(softmax(x_V), 3)
    require(np.array_equal(x_V, before), "softmax changes its argument. Work on a copy.")
    require(
        np.isclose(p_V.sum(), 1),
        f"the probabilities must add up to 1, but softmax([1, 3, 2]) adds up to {p_V.sum():.4g}.",
    )
    expected = nc.probabilities([x_V], ())[0]
    require(np.allclose(p_V, expected), f"softmax([1, 3, 2]) must be {_shown(expected)}, got {_shown(p_V)}.")
    with np.errstate(all="ignore"):
        p_V = softmax(np.array([1000.0, 999.0]))
    require(np.all(np.isfinite(p_V)), "exp(1000) overflows. Subtract the highest score first: it changes nothing else.")
    p_V = softmax(np.array([0.0, -np.inf, 0.0]))
    require(np.allclose(p_V, [0.5, 0, 0.5]), f"a token with the score -inf has the probability 0; got {_shown(p_V)}.")


@check
def check_keep_top_p(keep_top_p: Callable) -> None:
    """keep_top_p(p_V, p): which tokens stay, bool [V]."""

    def kept(p_V: list[float], p: float) -> list[bool]:
        given = np.array(p_V)
        found = np.asarray(keep_top_p(given, p))
        require(found.dtype == bool and found.shape == given.shape, "return an array of booleans, one per token.")
        require(np.array_equal(given, p_V), "keep_top_p changes its argument. Work on a copy.")
        return found.tolist()

    sorted_V = [0.5, 0.3, 0.15, 0.05]
    found = kept(sorted_V, 0.7)
    require(
        sum(found) != 1, f"off by one: 0.5 is below 0.7, so the token that makes {sorted_V} reach 0.7 must stay too."
    )
    require(
        sum(found) != 3,
        f"off by one: the first two of {sorted_V} reach 0.7. A token stays if the sum before it is below p.",
    )
    require(found == [True, True, False, False], f"of {sorted_V}, the first two must stay for p = 0.7; got {found}.")

    mixed_V = [0.05, 0.5, 0.15, 0.3]
    found = kept(mixed_V, 0.75)
    require(
        found != [True, True, False, False], f"the result is in sorted order. Token i of {mixed_V} belongs to place i."
    )
    require(
        found == [False, True, False, True],
        f"not sorted: the most likely tokens of {mixed_V} are 1 and 3; got {found}.",
    )

    equal_V = [0.25, 0.25, 0.25, 0.25]
    found = kept(equal_V, 0.5)
    require(
        sum(found) == 2,
        f"at the boundary: two of {equal_V} reach 0.5 exactly, and that is enough; got {sum(found)} tokens.",
    )
    require(
        found[:2] == [True, True], f"ties: of equally likely tokens, the lowest ids stay (a stable sort); got {found}."
    )
    require(any(kept(sorted_V, 1e-6)), "the most likely token must always stay.")
    require(all(kept(sorted_V, 1.0)), "p = 1 keeps all tokens.")
    for x_V, p, expected_V in random_rows():
        found = kept(nc.probabilities([x_V], ())[0].tolist(), p)
        require(found == (expected_V > 0).tolist(), f"a random row with p = {p:.2f}: nucleate keeps other tokens.")


@check
def check_top_p_probabilities(top_p_probabilities: Callable) -> None:
    """top_p_probabilities(x_V, p): the distribution after top-p, float [V]."""
    x_V = np.log([0.05, 0.5, 0.15, 0.3])
    found = _array(top_p_probabilities(x_V, 0.75), 4)
    require(
        np.all(found[[0, 2]] == 0), f"the tokens 0 and 2 are removed, so their probability is 0; got {_shown(found)}."
    )
    total = found.sum()
    require(
        np.isclose(total, 1),
        f"not renormalised: the remaining probabilities add up to {total:.4g}. Divide by their sum.",
    )
    expected = nc.probabilities([x_V], nc.SamplingParams(top_p=0.75))[0]
    require(np.allclose(found, expected), f"the result must be {_shown(expected)}, got {_shown(found)}.")
    for x_V, p, expected_V in random_rows():
        found = top_p_probabilities(x_V, p)
        require(
            np.allclose(found, expected_V, atol=1e-5),
            f"a random row with p = {p:.2f}: nucleate has other probabilities.",
        )


@check
def check_draw(draw: Callable, parts: int = 2000) -> None:
    """draw(p_V, u): the token that a uniform number u, 0 <= u < 1, selects."""
    p_V = np.array([0.0, 0.4, 0.0, 0.35, 0.25])
    counts = np.zeros(5)
    for u in (np.arange(parts) + 0.5) / parts:
        token = draw(p_V, u)
        require(0 <= token < 5, f"draw must return a token id from 0 to 4, got {token!r}.")
        counts[token] += 1
    error = np.abs(counts / parts - p_V).max()
    require(
        error < 0.002, f"for evenly spaced u, the frequencies are {_shown(counts / parts)} instead of {_shown(p_V)}."
    )
    require(
        p_V[draw(p_V, 0.0)] > 0,
        "u = 0 selects a token with the probability 0. The sum has to exceed u, not to reach it.",
    )
    tenths = np.full(10, 0.1)  # adds up to slightly less than 1
    require(
        0 <= draw(tenths, 1 - 2**-53) < 10, "u just below 1 selects no token, as the sum of rounded numbers is below u."
    )


def story(top_p_probabilities: Callable, draw: Callable, prompt: str = "Once upon a time", p: float = 0.9) -> None:
    """Print a text of the embedded model, sampled with the student's functions."""
    llm, rng = nc.LLM(), np.random.default_rng(1)
    context, ids = llm.model.begin(), llm.encode(prompt)
    logits_V = context.forward(ids)
    for _ in range(50):
        try:
            ids.append(int(draw(top_p_probabilities(logits_V / 0.8, p), rng.random())))
        except NotImplementedError:
            print("the functions are not implemented yet")
            return
        logits_V = context.forward(ids[-1:])
    print(llm.tokenizer.decode(ids))


def random_rows() -> Iterator[tuple[np.ndarray, float, np.ndarray]]:
    """Random logits, p, and the distribution of nucleate. No sum is so close to p that rounding decides."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        x_V, p = rng.normal(0, rng.uniform(0.5, 4), 50).astype(np.float32), rng.uniform(0.1, 0.99)
        sums = np.cumsum(np.sort(nc.probabilities([x_V], ())[0])[::-1])
        if np.abs(sums - p).min() > 1e-4:
            yield x_V, p, nc.probabilities([x_V], nc.SamplingParams(top_p=p))[0]


def _array(found: object, size: int) -> np.ndarray:
    given = np.asarray(found)
    require(given.shape == (size,), f"return an array of {size} numbers, one per token; got the shape {given.shape}.")
    return given


def _shown(numbers: np.ndarray) -> str:
    return "[" + ", ".join(f"{number:.3g}" for number in numbers) + "]"
