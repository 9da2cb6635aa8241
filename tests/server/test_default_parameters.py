"""Where defaults of sampling parameters come from: one rule for Python, the command line and the server."""

from __future__ import annotations

from typing import Any

import pytest
from server_process import Server

import nucleate as nc
from nucleate.cli.main import main

PROMPT = "Once upon a time"
REQUESTS: list[dict[str, Any]] = [
    {"seed": 1, "temperature": 2.0},
    {"seed": 2, "temperature": 1.0},
    {"seed": 3},
    {"seed": 4, "top_k": 0, "repetition_penalty": 1.2},
    {"seed": 5, "mirostat_tau": 3.0},
    {"seed": 6, "order": "vllm", "min_p": 0.05},
    {"seed": 7, "guidance_scale": 2.0, "negative_prompt": "A sad story"},
]


def with_the_command_line(capsys: pytest.CaptureFixture[str], source: str, values: dict[str, Any]) -> str:
    flags = [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    capsys.readouterr()
    assert main(["generate", PROMPT, "--generation-config", source, *flags]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def check_all_interfaces(server: Server, source: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    llm, texts = nc.LLM(generation_config=source), []
    for given in REQUESTS:
        values = {**given, "max_tokens": 24}
        response = server.request("POST", "/v1/completions", {"prompt": PROMPT, **values})
        found = {
            "sampling_params": llm.generate(PROMPT, nc.SamplingParams(**values))[0].text,
            "keywords": llm.generate(PROMPT, **values)[0].text,
            "command line": with_the_command_line(capsys, source, values),
            "server": response.json["choices"][0]["text"],
        }
        assert len(set(found.values())) == 1, found
        texts.append(found["keywords"])
    return texts


def test_the_same_parameters_and_seed_give_the_same_text(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(set(check_all_interfaces(server, "auto", capsys))) == len(REQUESTS)


@pytest.mark.slow
def test_the_same_without_generation_config(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Server("--generation-config", "none") as plain:
        texts = check_all_interfaces(plain, "none", capsys)
    assert texts != check_all_interfaces(server, "auto", capsys)
