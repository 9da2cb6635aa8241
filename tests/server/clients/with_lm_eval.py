"""lm-eval: prints its scores and the samples of the tasks in a folder as one JSON object.

Arguments: the server's URL, the model, the folder, and options of lm-eval's client as JSON. With "chat" among them, the
tasks use chat completions, which only support generation.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = ["nucleate_choice", "nucleate_rolling", "nucleate_story"]
SPECIAL = {"tokenizer_backend": "remote", "max_length": 512}


def main(url: str, model: str, folder: str, options: str) -> dict[str, Any]:
    given = json.loads(options)
    chat = given.pop("chat", False)
    path = "chat/completions" if chat else "completions"
    arguments = {"model": model, "base_url": f"{url}/v1/{path}", **({} if chat else SPECIAL), **given}
    results = lm_eval.simple_evaluate(
        f"local-{path.replace('/', '-')}",
        model_args=arguments,
        tasks=TASKS[2:] if chat else TASKS,
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        apply_chat_template=chat,
        bootstrap_iters=0,
    )
    samples = {
        task: [{"arguments": sample["arguments"], "responses": sample["resps"]} for sample in samples_of_task]
        for task, samples_of_task in results["samples"].items()
    }
    return {"results": results["results"], "samples": samples}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), default=str))
