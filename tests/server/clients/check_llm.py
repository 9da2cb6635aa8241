"""The program `llm`, with models of `extra-openai-models.yaml`, and `llm openai endpoint` without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import checks
from checks import absent, check, equal

FOLDER = Path(tempfile.mkdtemp(prefix="llm-"))
KINDS = {"tiny": "supports_tools: true\n  supports_schema: true", "text": "completion: true", "new": "responses: true\n  supports_tools: true"}
(FOLDER / "extra-openai-models.yaml").write_text(
    "".join(
        f"- model_id: {name}\n  model_name: {checks.MODEL}\n  api_base: {checks.URL}/v1\n  {more}\n"
        for name, more in KINDS.items()
    )
)
OPTIONS = ["-o", "temperature", "0.9", "-o", "seed", "7", "-o", "max_tokens", "16"]
FUNCTION = 'def get_weather(city: str) -> str:\n    """Get the weather."""\n    return f"Sunny in {city}."'


def llm(*arguments: str, code: int = 0) -> str:
    """Run the program and return what it prints."""
    command, variables = [sys.executable, "-m", "llm", *arguments], {**os.environ, "LLM_USER_PATH": str(FOLDER)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return (done.stdout if code == 0 else done.stderr).strip()


@check("chat", "also `llm openai endpoint URL`, without configuration")
def chat() -> None:
    text = llm("-m", "tiny", checks.STORY, *OPTIONS, "--no-stream")
    equal(json.loads(llm("logs", "--json", "-n", "1"))[0]["output_tokens"], 16)
    equal(llm("openai", "endpoint", f"{checks.URL}/v1", checks.STORY, "-m", checks.MODEL, *OPTIONS), text)


@check("stream")
def stream() -> None:
    equal(llm("-m", "tiny", checks.STORY, *OPTIONS), llm("-m", "tiny", checks.STORY, *OPTIONS, "--no-stream"))


@check("completions", "with `completion: true`")
def completions() -> None:
    equal(llm("-m", "text", checks.PROMPT, *OPTIONS), llm("-m", "text", checks.PROMPT, *OPTIONS, "--no-stream"))


@check("stop")
def stop() -> None:
    text = llm("-m", "tiny", checks.STORY, *OPTIONS, "-o", "stop", " a")
    assert llm("-m", "tiny", checks.STORY, *OPTIONS).startswith(f"{text} a")


@check("schema")
def schema() -> None:
    checks.Hero.model_validate_json(llm("-m", "tiny", "Who?", "--schema", json.dumps(checks.Hero.model_json_schema())))


@check("auto")
def auto() -> None:
    equal(llm("-m", "tiny", checks.PARIS, "--functions", FUNCTION, "--no-stream"), checks.ANSWER)
    calls = [call for entry in json.loads(llm("logs", "--json", "-n", "2")) for call in entry["tool_calls"]]
    equal([(call["name"], call["arguments"]) for call in calls], [("get_weather", {"city": "Paris"})])


@check("parallel")
def parallel() -> None:
    shown = llm("-m", "tiny", checks.BOTH, "--functions", FUNCTION, "--no-stream")
    equal(shown, f"{checks.ANSWER} Sunny in Rome.")


@check("streamed call")
def streamed_call() -> None:
    equal(llm("-m", "tiny", checks.BOTH, "--functions", FUNCTION), f"{checks.ANSWER} Sunny in Rome.")


@check("loop")
def loop() -> None:
    equal(llm("-m", "tiny", checks.PARIS, "--functions", FUNCTION), checks.ANSWER)
    equal(llm("-c", checks.BOTH, "--functions", FUNCTION), f"{checks.ANSWER} Sunny in Rome.")


@check("reasoning", "written to stderr")
def reasoning() -> None:
    equal(llm("-m", "tiny", checks.THINK), checks.THOUGHT_ANSWER)


@check("responses", "with `responses: true`")
def responses() -> None:
    equal(llm("-m", "new", checks.PARIS, "--functions", FUNCTION), checks.ANSWER)


@check("errors")
def errors() -> None:
    assert "maximum context length" in llm("-m", "tiny", checks.STORY, "-o", "max_tokens", "100000", code=1)


absent("logprobs", "only in its log, for `completion: true`")
absent("parameters", "no option; the plug-in of nucleate has them all ([integrations.md](integrations.md))")
absent("tool", "no tool choice")
checks.run("llm")
