"""The exercise for teachers: its checks accept the solution, and say what is wrong with wrong ones."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
TASKS = ("softmax", "keep_top_p", "top_p_probabilities", "draw")
WRONG = {
    "softmax overflows": ("softmax", "e_V = np.exp(x_V); return e_V / e_V.sum()", "overflows"),
    "softmax in place": ("softmax", "x_V -= x_V.max(); return np.exp(x_V) / np.exp(x_V).sum()", "changes its argument"),
    "softmax without a sum": ("softmax", "return np.exp(x_V - x_V.max())", r"add up to 1, but .* adds up to 1\.503"),
    "softmax of negated scores": ("softmax", "e_V = np.exp(-x_V); return e_V / e_V.sum()", r"must be \[0\.09, 0\.665,"),
    "ids": ("keep_top_p", "return np.argsort(-p_V)[: int((np.cumsum(np.sort(-p_V)) > -p).sum()) + 1]", "booleans"),
    "in place": ("keep_top_p", "p_V[::-1].sort(); return np.cumsum(p_V) - p_V < p", "changes its argument"),
    "the last one is missing": ("keep_top_p", "KEEP(np.cumsum(p_V[order]) <= p)", "^off by one: 0.5 is below 0.7"),
    "one too many": ("keep_top_p", "KEEP(np.arange(len(p_V)) < (np.cumsum(p_V[order]) < p).sum() + 2)", "first two of"),
    "at the boundary": ("keep_top_p", "KEEP(np.cumsum(p_V[order]) - p_V[order] <= p)", "^at the boundary: .*got 3"),
    "not sorted": ("keep_top_p", "return np.cumsum(p_V) - p_V < p", "^not sorted: .* are 1 and 3; got"),
    "ascending": (
        "keep_top_p",
        "order = np.argsort(p_V); KEEP(np.cumsum(p_V[order]) - p_V[order] < p)",
        "the first two",
    ),
    "sorted result": ("keep_top_p", "return np.cumsum(p_V[order]) - p_V[order] < p", "sorted order"),
    "ties": ("keep_top_p", "order = np.argsort(p_V)[::-1]; KEEP(np.cumsum(p_V[order]) - p_V[order] < p)", "^ties: "),
    "all ties stay": ("keep_top_p", "q = np.sort(p_V)[::-1]; return p_V >= q[np.cumsum(q) - q < p].min()", "boundary"),
    "always two": ("keep_top_p", "KEEP(np.arange(len(p_V)) < 2)", "p = 1 keeps all"),
    "min-p": (
        "keep_top_p",
        "return (p_V >= 0.3) | (p == 1) | ((p_V == 0.25) & (np.arange(len(p_V)) < 2))",
        "random row",
    ),
    "not renormalised": ("top_p_probabilities", "p_V = softmax(x_V); return p_V * keep_top_p(p_V, p)", "^not renormal"),
    "zero as a score": (
        "top_p_probabilities",
        "return softmax(np.where(keep_top_p(softmax(x_V), p), x_V, 0))",
        "is 0; got",
    ),
    "uniform": ("top_p_probabilities", "keep_V = keep_top_p(softmax(x_V), p); return keep_V / keep_V.sum()", "must be"),
    "truncated twice": (
        "top_p_probabilities",
        "q_V = SOLUTION.top_p_probabilities(x_V, p); return SOLUTION.top_p_probabilities(np.log(q_V), 0.97)",
        "random row",
    ),
    "greedy": ("draw", "return int(np.argmax(p_V))", "frequencies"),
    "a list of tokens": ("draw", "return len(p_V)", "token id from 0 to 4"),
    "zero": ("draw", "return int(np.searchsorted(np.cumsum(p_V), u * p_V.sum()))", "^u = 0 selects"),
    "beyond the end": ("draw", "return int(np.searchsorted(np.cumsum(p_V), u, side='right'))", "^u just below 1"),
}
"""Wrong solutions: the task, the body of the function, and a pattern of the message. ``order`` is the rank order."""


RIGHT = {
    "softmax in float32": ("softmax", "e_V = np.exp((x_V - x_V.max()).astype('f4')); return e_V / e_V.sum()"),
    "softmax by logarithms": ("softmax", "m = x_V.max(); return np.exp(x_V - m - np.log(np.exp(x_V - m).sum()))"),
    "a number of tokens": ("keep_top_p", "KEEP(np.arange(len(p_V)) <= np.searchsorted(np.cumsum(p_V[order]), p))"),
    "float32": ("keep_top_p", "q_V = p_V[order].astype('f4'); KEEP(np.cumsum(q_V) - q_V < np.float32(p))"),
    "a loop": (
        "keep_top_p",
        (
            "total, chosen = 0.0, []\nfor token in order:\n    if total < p:\n        chosen.append(token)\n"
            "    total += p_V[token]\nreturn np.isin(np.arange(len(p_V)), chosen)"
        ),
    ),
    "-inf as a score": (
        "top_p_probabilities",
        "return softmax(np.where(keep_top_p(softmax(x_V), p), x_V, -np.inf))",
    ),
    "the last token at the end": ("draw", "return min(int(np.searchsorted(np.cumsum(p_V), u, 'right')), len(p_V) - 1)"),
    "in rank order": ("draw", "order = np.argsort(-p_V); return order[(np.cumsum(p_V[order])[:-1] <= u).sum()]"),
}
"""Other correct solutions: the task, and the body of the function."""


@pytest.fixture
def exercise(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(FOLDER)
    import top_p_checks
    import top_p_solution

    return SimpleNamespace(checks=top_p_checks, solution=top_p_solution)


def function(task: str, body: str, solution: ModuleType) -> object:
    """A solution of a task with this body. KEEP(sorted_keep) puts booleans in rank order to the places of their ids."""
    arguments = str(inspect.signature(getattr(solution, task)))
    body = re.sub(r"\bKEEP\((.*)\)$", r"keep_V = np.zeros(len(p_V), bool); keep_V[order] = \1; return keep_V", body)
    if task == "keep_top_p" and "order = " not in body:
        body = f"order = np.argsort(-p_V, kind='stable')\n{body}"
    names = {"np": np, "softmax": solution.softmax, "keep_top_p": solution.keep_top_p, "SOLUTION": solution}
    exec(f"def {task}{arguments}:\n{textwrap.indent(body, '    ')}", names)
    return names[task]


@pytest.mark.parametrize("task", TASKS)
def test_the_solution_is_correct(task: str, exercise: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    getattr(exercise.checks, f"check_{task}")(getattr(exercise.solution, task))
    assert capsys.readouterr().out == f"{task}: correct\n"


@pytest.mark.parametrize("name", RIGHT)
def test_other_correct_solutions_are_accepted(
    name: str, exercise: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    task, body = RIGHT[name]
    getattr(exercise.checks, f"check_{task}")(function(task, body, exercise.solution))
    assert capsys.readouterr().out == f"{task}: correct\n"


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_solution_is_found_and_explained(name: str, exercise: SimpleNamespace) -> None:
    task, body, message = WRONG[name]
    with pytest.raises(exercise.checks.CheckFailedError, match=message) as caught:
        getattr(exercise.checks, f"check_{task}")(function(task, body, exercise.solution))
    assert caught.value._render_traceback_() == [f"Not correct yet: {caught.value}"]


def test_nearly_all_random_rows_are_compared(exercise: SimpleNamespace) -> None:
    assert len([*exercise.checks.random_rows()]) > 90


def test_the_notebook_leaves_the_tasks_open_and_its_functions_are_those_of_the_solution(
    exercise: SimpleNamespace,
) -> None:
    notebook = json.loads((FOLDER / "exercise_top_p.ipynb").read_text("utf-8"))
    tagged = {tag: cell for cell in notebook["cells"] for tag in cell["metadata"].get("tags", [])}
    assert [*tagged] == [f"task-{task}" for task in TASKS]
    for task in TASKS:
        first, *_, last = "".join(tagged[f"task-{task}"]["source"]).splitlines()
        assert first == f"def {task}{inspect.signature(getattr(exercise.solution, task))}:"
        assert last == "    raise NotImplementedError"
