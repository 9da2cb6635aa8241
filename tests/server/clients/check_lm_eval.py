"""lm-eval: a task of each request type. Its arguments are the same as those of with_lm_eval.py, which test_clients.py
compares number by number with the library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import checks
import with_lm_eval
from checks import absent, check, equal

TASKS = Path(__file__).parents[1] / "data" / "lm_eval"
os.chdir(TASKS)  # the tasks name their files relative to it


def evaluate(**options: Any) -> Any:
    return with_lm_eval.main(checks.URL, checks.MODEL, str(TASKS), json.dumps({"num_concurrent": 2, **options}))


@check("chat", "`local-chat-completions`, which only generates")
def chat() -> None:
    samples = evaluate(chat=True, eos_string="<|end|>")["samples"]["nucleate_story"]
    assert all(sample["responses"][0][0] for sample in samples)


@check("completions", "`local-completions`: generation, multiple choice and rolling likelihood")
def completions() -> None:
    results = evaluate(batch_size=2)["results"]
    equal(results["nucleate_choice"]["acc,none"], 1.0)
    assert results["nucleate_rolling"]["byte_perplexity,none"] > 1


check("logprobs")(completions)
check("stop")(chat)
for feature in (
    "stream",
    "parameters",
    "schema",
    "tool",
    "auto",
    "parallel",
    "streamed call",
    "loop",
    "reasoning",
    "responses",
    "errors",
):
    absent(feature, "no task needs it")
checks.run("lm_eval")
