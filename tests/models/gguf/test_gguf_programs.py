"""GGUF models on the command line and in the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import Server

import nucleate as nc
from nucleate.cli.main import main

PROMPT = "Once upon a time"
EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--n-threads", "1")


def test_info(files: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["info", str(files["q8_0"])]) == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    for text in (
        "architecture llama",
        "Q8_0, 3.37 million parameters, 3.42 MiB",
        "context length 1024",
        "1.5 KiB per token",
        "gpt2, 4096 tokens",
        "ends <|endoftext|>, <|end|>",
        "temperature 0.7, top_k 50, top_p 0.9",
    ):
        assert text in shown
    assert main(["info", str(files["f32"]), "--json", "--metadata"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["weights"] == "F32, 3.37 million parameters, 12.9 MiB"
    assert facts["metadata"]["llama.block_count"] == "6"
    assert main(["info", str(files["f32"]), "--metadata"]) == 0
    assert "llama.block_count" in capsys.readouterr().out
    assert main(["info", str(tmp_path / "missing.gguf")]) == 1
    assert "there is no file" in capsys.readouterr().err


def test_info_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for text in ("architecture    llama", "bfloat16, 6.4", "4096 tokens", "345 characters", "top_p 0.9"):
        assert text in shown
    assert main(["info", "--metadata"]) == 2
    assert "--metadata needs a GGUF model" in capsys.readouterr().err


def test_generate(llm: nc.LLM, files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    wanted = nc.SamplingParams(seed=3, max_tokens=20)
    flags = ["--seed", "3", "--max-tokens", "20", "--json", *EXACT, "--n-ctx", "256"]
    assert main(["generate", PROMPT, "-m", str(files["f32"]), *flags]) == 0
    expected = llm.generate(PROMPT, wanted)[0].text
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == expected
    for flags, message in (
        (["-m", str(files["f32"]), "--n-ctx", "0"], "n_ctx must be an integer in 1..2147483647, got 0"),
        (["--n-ctx", "256"], "gguf_options needs a GGUF model"),
        (["-m", "missing.gguf"], "there is no file missing.gguf"),
    ):
        assert main(["generate", PROMPT, *flags]) in (1, 2)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_chat_batch_and_server(llm: nc.LLM, files: dict[str, Path], tmp_path: Path) -> None:
    model = ("-m", str(files["f32"]), *EXACT)
    messages = [{"role": "user", "content": "Tell me a story about a dog."}]
    expected = llm.chat(messages, nc.SamplingParams(seed=2, max_tokens=25)).text
    chat = [sys.executable, "-m", "nucleate", "chat", *model, "--seed", "2", "--max-tokens", "25"]
    done = subprocess.run(chat, input=messages[0]["content"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected.strip()
    body = {"messages": messages, "seed": 2, "max_tokens": 25}
    given, written = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"
    )
    batch = [sys.executable, "-m", "nucleate", "batch", str(given), str(written), *model]
    done = subprocess.run(batch, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.dumps(expected)[1:-1] in written.read_text()
    with Server(*model, "--speculative", "ngram", "--max-num-seqs", "8") as server:
        answer = server.request("POST", "/v1/chat/completions", body).json
        assert answer["choices"][0]["message"]["content"] == expected
        assert "llama_" not in server.log
