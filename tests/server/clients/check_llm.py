"""The program `llm`, with models of `extra-openai-models.yaml`, and `llm openai endpoint` without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import checks
from checks import equal

FOLDER = Path(tempfile.mkdtemp(prefix="llm-"))
KINDS = {
    "tiny": "supports_tools: true\n  supports_schema: true",
    "text": "completion: true",
    "new": "responses: true\n  reasoning: true\n  supports_tools: true",
}
(FOLDER / "extra-openai-models.yaml").write_text(
    "".join(
        f"- model_id: {name}\n  model_name: {checks.MODEL}\n  api_base: {checks.URL}/v1\n  {more}\n"
        for name, more in KINDS.items()
    )
)
OPTIONS = ["-o", "temperature", "0.9", "-o", "seed", "7", "-o", "max_tokens", "16"]
FUNCTION = 'def get_weather(city: str) -> str:\n    """Get the weather."""\n    return f"Sunny in {city}."'


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    command, variables = [sys.executable, "-m", "llm", *arguments], {**os.environ, "LLM_USER_PATH": str(FOLDER)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def llm(*arguments: str) -> str:
    """Return what the program prints."""
    return run(*arguments).stdout.strip()


def chat() -> None:
    text = llm("-m", "tiny", checks.STORY, *OPTIONS, "--no-stream")
    equal(json.loads(llm("logs", "--json", "-n", "1"))[0]["output_tokens"], 16)
    equal(llm("openai", "endpoint", f"{checks.URL}/v1", checks.STORY, "-m", checks.MODEL, *OPTIONS), text)


def stream() -> None:
    equal(llm("-m", "tiny", checks.STORY, *OPTIONS), llm("-m", "tiny", checks.STORY, *OPTIONS, "--no-stream"))


def completions() -> None:
    equal(llm("-m", "text", checks.PROMPT, *OPTIONS), llm("-m", "text", checks.PROMPT, *OPTIONS, "--no-stream"))


def stop() -> None:
    text = llm("-m", "tiny", checks.STORY, *OPTIONS, "-o", "stop", " a")
    assert llm("-m", "tiny", checks.STORY, *OPTIONS).startswith(f"{text} a")


def logprobs() -> None:
    llm("-m", "text", checks.PROMPT, *OPTIONS, "-o", "logprobs", "2")
    (entry,) = json.loads(llm("logs", "--json", "-n", "1"))
    assert json.dumps(entry).count("top_logprobs") > 1


def schema() -> None:
    checks.Hero.model_validate_json(llm("-m", "tiny", "Who?", "--schema", json.dumps(checks.Hero.model_json_schema())))


def auto() -> None:
    equal(llm("-m", "tiny", checks.PARIS, "--functions", FUNCTION, "--no-stream"), checks.ANSWER)
    calls = [call for entry in json.loads(llm("logs", "--json", "-n", "2")) for call in entry["tool_calls"]]
    equal([(call["name"], call["arguments"]) for call in calls], [("get_weather", {"city": "Paris"})])


def parallel() -> None:
    shown = llm("-m", "tiny", checks.BOTH, "--functions", FUNCTION, "--no-stream")
    equal(shown, f"{checks.ANSWER} Sunny in Rome.")


def streamed_call() -> None:
    equal(llm("-m", "tiny", checks.BOTH, "--functions", FUNCTION), f"{checks.ANSWER} Sunny in Rome.")


def loop() -> None:
    equal(llm("-m", "tiny", checks.PARIS, "--functions", FUNCTION), checks.ANSWER)
    equal(llm("-c", checks.BOTH, "--functions", FUNCTION), f"{checks.ANSWER} Sunny in Rome.")


def reasoning() -> None:
    done = run("-m", "new", checks.THINK)
    equal((done.stderr.strip(), done.stdout.strip()), (checks.THOUGHT, checks.THOUGHT_ANSWER))


def responses() -> None:
    equal(llm("-m", "new", checks.PARIS, "--functions", FUNCTION), checks.ANSWER)


def errors() -> None:
    assert "maximum context length" in run("-m", "tiny", checks.STORY, "-o", "max_tokens", "100000", code=1).stderr


NOTES = {
    "chat": "also `llm openai endpoint URL`, without configuration",
    "completions": "with `completion: true`",
    "logprobs": "with `completion: true`, in its log",
    "reasoning": "with `responses: true` and `reasoning: true`; it ignores that of chat completions",
    "responses": "with `responses: true`",
}
ABSENT = {
    "parameters": "no option; the plug-in of nucleate has them all ([integrations.md](integrations.md))",
    "tool": "no tool choice",
}
checks.run("llm")
