"""Checks client programs against a server and writes docs/clients.md: ``python tests/server/clients/matrix.py``."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
sys.path += [str(ROOT / "tests" / "support")]

from client_box import CLIENTS as PROGRAMS  # noqa: E402
from client_box import Box, missing_node  # noqa: E402
from server_process import Server  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"
MODEL, DEFAULT_URL = "nucleate-tiny", "http://127.0.0.1:8000"
FLAGS = ("--plugin", str(HERE / "scripted_model.py"), "--scripted", "1000", "--reasoning-parser", "qwen3")
FLAGS += ("--max-reasoning-tokens", "32")  # the bundled model would write until the context is full
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_DATASETS_OFFLINE": "1"}
FENCES = {".py": "python", ".mjs": "js", ".sh": "sh"}
CELLS = {"passed": "yes", "failed": "**no**", "absent": "-"}
FEATURES = {
    "chat": "a chat completion, with its usage",
    "stream": "a streamed chat has the text of the response",
    "completions": "completion of a text without chat template",
    "stop": "stop strings",
    "logprobs": "logprobs of the output, or for lm-eval of the prompt",
    "parameters": "sampling parameters outside OpenAI's API, such as `min_p` and `top_k`",
    "schema": "structured output, parsed by the client into its class or schema",
    "tool": "a required or named call",
    "auto": 'a call that the model chooses to make (`tool_choice` "auto", the default)',
    "parallel": "two calls in one response",
    "streamed call": "calls in a stream, assembled by the client",
    "loop": "call, result, answer: the client's agent if it has one, and messages by hand",
    "reasoning": "reasoning apart from the answer",
    "responses": "OpenAI's Responses API",
    "errors": "errors become the client's exceptions",
}
"""The columns. Each program reports every one."""

TEMPLATE = """\
# Clients

Client libraries and programs with their default settings, each in its own process, against `nucleate serve`. Written by
`python tests/server/clients/matrix.py`; do not edit. `make test-clients` runs the same checks and the examples as
tests, and compares the results with this page.

The bundled model writes stories and rarely calls a tool by itself. For the checks, a [stage](custom_stages.md) makes it
call one if a question is about the weather, answer from the result, and reason. All other output is the model's own,
under the grammar of the request if it has one.

{table}

`-`: the client does not have the feature, or it does not apply. `*`: see the notes after the example of the client.

| column | what is checked |
|---|---|
{columns}

The server has no embeddings, images and audio.

## Examples

The base URL of OpenAI's clients ends with `/v1`; that of Anthropic's and Ollama's does not. Any API key is accepted
unless the server runs with `--api-key` or `--api-key-file`. `nucleate serve` starts the server of the examples.

{sections}
"""


class Client(NamedTuple):
    """A client. program: its checks. module: what must be installed; empty for JavaScript."""

    name: str
    program: str
    module: str
    snippet: str
    arguments: tuple[str, ...] = ()

    @property
    def missing(self) -> str:
        """Why it cannot run; empty: it can."""
        if not self.module:
            return missing_node()
        return "" if importlib.util.find_spec(self.module) else f"{self.module} is not installed"

    def report(self, url: str, box: Box) -> dict[str, Any]:
        """Run the checks. Returns the versions, and per feature the status and the reason. Raises ClientError."""
        interpreter = sys.executable if self.module else "node"
        command = (interpreter, str(PROGRAMS / self.program), url, MODEL, *self.arguments)
        report: dict[str, Any] = json.loads(box.run_program(*command, **ENVIRONMENT).splitlines()[-1])
        unknown = set(report["results"]) ^ set(FEATURES)
        assert not unknown, f"{self.program} does not report exactly the known features: {sorted(unknown)}"
        return report

    def row(self, report: dict[str, Any]) -> str:
        """Return the row of the table."""
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        results = [report["results"][feature] for feature in FEATURES]
        cells = [CELLS[result["status"]] + ("*" if result["reason"] else "") for result in results]
        return f"| [{self.name}](#{anchor(self.name)}) | {versions} | {' | '.join(cells)} |"

    def section(self, report: dict[str, Any]) -> str:
        """Return how to use it, and the notes of the table."""
        code = (PROGRAMS / "snippets" / self.snippet).read_text("utf-8")
        reasons: dict[str, list[str]] = {}
        for name in FEATURES:
            reasons.setdefault(report["results"][name]["reason"], []).append(name)
        notes = [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items() if reason]
        fence = FENCES[Path(self.snippet).suffix]
        return "\n".join([f"### {self.name}", "", f"```{fence}", f"{code}```", *([""] if notes else []), *notes])


CLIENTS = (
    Client("OpenAI SDK for Python", "check_openai.py", "openai", "openai.py"),
    Client("OpenAI SDK for Node", "js/check_openai.mjs", "", "openai.mjs"),
    Client("litellm", "check_litellm.py", "litellm", "litellm.py"),
    Client("LangChain", "check_langchain.py", "langchain", "langchain.py"),
    Client("instructor", "check_instructor.py", "instructor", "instructor.py"),
    Client("pydantic-ai", "check_pydantic_ai.py", "pydantic_ai", "pydantic_ai.py"),
    Client("OpenAI Agents SDK", "check_openai_agents.py", "agents", "openai_agents.py"),
    Client("AI SDK, OpenAI-compatible", "js/check_ai.mjs", "", "ai_compatible.mjs", ("@ai-sdk/openai-compatible",)),
    Client("AI SDK, OpenAI provider", "js/check_ai.mjs", "", "ai_openai.mjs", ("@ai-sdk/openai",)),
    Client("llm", "check_llm.py", "llm", "llm.sh"),
    Client("Anthropic SDK", "check_anthropic.py", "anthropic", "anthropic.py"),
    Client("Ollama SDK", "check_ollama.py", "ollama", "ollama.py"),
    Client("lm-eval", "check_lm_eval.py", "lm_eval", "lm_eval.sh"),
)


def anchor(heading: str) -> str:
    """Return the anchor of a heading."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c == "-")


def page(reports: dict[str, dict[str, Any]]) -> str:
    """Return docs/clients.md. reports: by the name of the client."""
    rows = "\n".join(client.row(reports[client.name]) for client in CLIENTS)
    columns = "\n".join(f"| {name} | {what} |" for name, what in FEATURES.items())
    head = f"| client | version | {' | '.join(FEATURES)} |\n|---|---|{'---|' * len(FEATURES)}"
    sections = "\n\n".join(client.section(reports[client.name]) for client in CLIENTS)
    return TEMPLATE.format(table=f"{head}\n{rows}", columns=columns, sections=sections)


def main() -> int:
    reports: dict[str, dict[str, Any]] = {}
    with Server(*FLAGS) as server:
        for client in CLIENTS:
            if client.missing:
                print(f"{client.name}: {client.missing}; the page needs all clients")
                return 1
            with tempfile.TemporaryDirectory() as folder:
                reports[client.name] = client.report(server.url, Box(Path(folder)))
            statuses = [result["status"] for result in reports[client.name]["results"].values()]
            print(client.name, {status: statuses.count(status) for status in CELLS}, flush=True)
    PAGE.write_text(page(reports), "utf-8")
    results = [result for report in reports.values() for result in report["results"].values()]
    return int(any(result["status"] == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
