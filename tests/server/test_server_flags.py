"""Flags that change every request: default parameters, which follow one rule everywhere, and watermarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server_process import Server

import nucleate as nc
from nucleate.cli.main import main
from nucleate.watermark import WatermarkKey, detect

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


@pytest.mark.slow
def test_the_same_parameters_and_seed_give_the_same_text(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(set(check_all_interfaces(server, "auto", capsys))) == len(REQUESTS)


@pytest.mark.slow
def test_the_same_without_generation_config(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with Server("--generation-config", "none") as plain:
        texts = check_all_interfaces(plain, "none", capsys)
    body = {"prompt": PROMPT, **REQUESTS[2], "max_tokens": 24}
    assert texts[2] != server.request("POST", "/v1/completions", body).json["choices"][0]["text"]


SECRET = b"correct horse battery staple"
MARKED = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True, "seed": 4}


@pytest.mark.slow
def test_every_request_is_marked_and_the_key_stays_on_the_server(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    key, shown = WatermarkKey(SECRET), []
    with Server("--watermark", "kgw(delta=4)", "--watermark-key", str(path)) as server:
        for more in ({}, {"temperature": 0}, {"pipeline": [{"stage": "temperature", "t": 0.9}]}, {"top_p": 0.9}):
            answer = server.request("POST", "/v1/completions", {**MARKED, **more})
            assert answer.status == 200, answer.data.decode()
            shown.append(answer.data.decode())
            text = answer.json["choices"][0]["text"]
            ids = server.request("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
            assert detect(ids, key).p_value < 1e-3
        for stage in ({"stage": "kgw"}, {"stage": "kgw", "key": "correct horse"}, {"stage": "gumbel_watermark"}):
            answer = server.request("POST", "/v1/completions", {**MARKED, "pipeline": [stage]})
            assert answer.status == 400
            shown.append(answer.data.decode())
        shown += [
            server.request("GET", route).data.decode()
            for route in ("/metrics", "/v1/models", "/openapi.json", "/health")
        ]
        shown.append(server.log)
    for text in shown:
        assert "horse" not in text
        assert SECRET.hex() not in text
