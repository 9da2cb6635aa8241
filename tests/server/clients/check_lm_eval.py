"""lm-eval: a task of each request type. With options of its client as a third argument, it prints the scores and the
samples as one JSON object, which test_clients.py compares number by number with the library."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import checks
import lm_eval
from checks import equal
from lm_eval.tasks import TaskManager

FOLDER = Path(__file__).parents[1] / "data" / "lm_eval"
TASKS = ["nucleate_choice", "nucleate_rolling", "nucleate_story"]
SPECIAL = {"tokenizer_backend": "remote", "max_length": 512}
os.chdir(FOLDER)  # the tasks name their files relative to it


def evaluate(*, chat: bool = False, **options: Any) -> dict[str, Any]:
    """The scores and the samples. chat: the tasks use chat completions, which only support generation."""
    path = "chat/completions" if chat else "completions"
    arguments = {"model": checks.MODEL, "base_url": f"{checks.URL}/v1/{path}", **({} if chat else SPECIAL), **options}
    results = lm_eval.simple_evaluate(
        f"local-{path.replace('/', '-')}",
        model_args=arguments,
        tasks=TASKS[2:] if chat else TASKS,
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    samples = {
        task: [{"arguments": sample["arguments"], "responses": sample["resps"]} for sample in samples_of_task]
        for task, samples_of_task in results["samples"].items()
    }
    return {"results": results["results"], "samples": samples}


def chat() -> None:
    samples = evaluate(chat=True, num_concurrent=2, eos_string="<|end|>")["samples"]["nucleate_story"]
    assert all(sample["responses"][0][0] for sample in samples)


def completions() -> None:
    results = evaluate(batch_size=2, num_concurrent=2)["results"]
    equal(results["nucleate_choice"]["acc,none"], 1.0)
    assert results["nucleate_rolling"]["byte_perplexity,none"] > 1


logprobs, stop = completions, chat
NOTES = {
    "chat": "`local-chat-completions`, which only generates",
    "completions": "`local-completions`: generation, multiple choice and rolling likelihood",
}
ABSENT = dict.fromkeys({*checks.FEATURES} - {"chat", "completions", "logprobs", "stop"}, "no task needs it")
if options := sys.argv[3:]:
    print(json.dumps(evaluate(**json.loads(options[0])), default=str))
else:
    checks.run("lm_eval")
