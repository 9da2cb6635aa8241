"""A hobbyist's first five minutes: pull a GGUF file from a hub, list it, chat in a terminal, serve it, use the page.

The model is a real one that was not trained to chat, and has no chat template.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import real_models
from browser_fixtures import browser
from chat_page import ChatPage
from conftest import present
from fake_hub import fake_hub
from pty_program import PtyProgram
from server_process import Server

__all__ = ["browser"]

NAME = "hobby/gemma-3-270m-gguf:Q4_K_M"
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 60, "seed": 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user who has pulled the model. The hub is gone then."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (make setup-gguf)")
    data = Path(present(real_models.GGUF)).read_bytes()
    own = tmp_path_factory.mktemp("home")
    environment = {"HF_HOME": str(own / "hf"), "XDG_STATE_HOME": str(own / "state"), "HF_HUB_OFFLINE": "0"}
    repository = {"README.md": b"# Gemma", "gemma-3-270m-Q4_K_M.gguf": data, "gemma-3-270m-F16.gguf": b"GGUF"}
    with fake_hub({"hobby/gemma-3-270m-gguf": repository}) as hub:
        terminal = PtyProgram("pull", "hobby/gemma-3-270m-gguf", environment={**environment, **hub.environment})
        assert "gemma-3-270m-Q4_K_M.gguf: 100%" in terminal.expect(f"{NAME}: GGUF, 253.1 MB, checksums verified")
        terminal.expect(f"nucleate chat -m {NAME}")
        assert terminal.end() == 0
        assert not any("F16" in request for request in hub.requests)
    return {**environment, "HF_HUB_OFFLINE": "1"}


def test_list_names_the_model(home: dict[str, str]) -> None:
    command = [sys.executable, "-m", "nucleate", "list"]
    listed = subprocess.run(command, env={**os.environ, **home}, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^{re.escape(NAME)} +GGUF +253\.1 MB\b", listed, re.MULTILINE)


def test_chat_in_a_terminal(home: dict[str, str], tmp_path: Path) -> None:
    terminal = PtyProgram("chat", "-m", NAME, "--n-threads", "1", "--max-tokens", "60", "--seed", "2", environment=home)
    terminal.expect("The model has no chat template: chatting in the format plain (see --chat-template).")
    terminal.expect("> ")
    terminal.type(b'"""What is the capital\nof France?"""\n')
    reply = terminal.expect("tokens/s on llama.cpp")
    assert "User:" not in reply.partition('"""\r\n')[2]
    assert "stop]" in terminal.expect("\n")
    terminal.expect("> ")
    terminal.type(b"/probs 2\n")
    terminal.expect("likeliest")
    terminal.expect("%")
    terminal.expect("> ")
    terminal.type(b"/set ignore_eos true\n")
    terminal.expect("> ")
    terminal.type(b"/set max_tokens 5000\n")
    terminal.expect("> ")
    terminal.type(b"Tell me a long story.\n")
    terminal.expect("\n")
    terminal.expect(" ")
    terminal.type(b"\x03")  # ends the reply, not the program
    terminal.expect("interrupted]")
    terminal.expect("> ")
    terminal.type(f"/save {tmp_path}/chat.json\n".encode())
    terminal.expect("saved 4 messages")
    terminal.expect("> ")
    terminal.type(b"\x04")
    assert terminal.end() == 0
    saved = json.loads((tmp_path / "chat.json").read_text("utf-8"))
    assert saved["messages"][0]["content"] == "What is the capital\nof France?"


def test_serve_says_what_is_missing_and_then_chats(home: dict[str, str]) -> None:
    flags = ("-m", NAME, "--n-threads", "1", "--max-num-seqs", "4", "--n-ctx", "4096")
    with Server(*flags, environment=home) as server:
        answer = server.request("POST", "/v1/chat/completions", QUESTION)
        assert answer.status == 400
        assert "start the server with --chat-template" in answer.json["error"]["message"]
        assert answer.json["error"]["code"] == "no_chat_template"
    with Server(*flags, "--chat-template", "plain", environment=home) as server:
        answer = server.request("POST", "/v1/chat/completions", {**QUESTION, "model": NAME})
        assert answer.status == 200, answer.json
        [choice] = answer.json["choices"]
        assert choice["finish_reason"] == "stop"
        assert "User:" not in choice["message"]["content"]
        [model] = server.request("GET", "/api/ps").json["models"]
        assert (model["name"], model["details"]["quantization_level"]) == (NAME, "Q4_K_M")
        assert model["details"]["parameter_size"] == "268M"
        ollama = {"model": NAME, **{name: QUESTION[name] for name in ("messages",)}, "stream": False}
        answer = server.request("POST", "/api/chat", {**ollama, "options": {"num_predict": 60, "seed": 2}})
        assert answer.json["message"]["content"] == choice["message"]["content"]


def test_a_chat_in_the_browser(home: dict[str, str], browser: Any) -> None:
    """With serve, and nothing else. The reply is that of the API, and its tokens have probabilities."""
    flags = ("-m", NAME, "--n-threads", "1", "--max-num-seqs", "4", "--n-ctx", "4096", "--chat-template", "plain")
    with Server(*flags, environment=home) as server:
        chat = ChatPage(browser.new_page())
        chat.page.set_default_timeout(60_000)
        chat.open(server.url)
        chat.set(seed=2, max_tokens=60)
        chat.send(QUESTION["messages"][0]["content"])
        [choice] = server.request("POST", "/v1/chat/completions", QUESTION).json["choices"]
        question, reply = chat.messages()
        assert question == QUESTION["messages"][0]["content"]
        assert reply.split() == choice["message"]["content"].split()
        assert "%" in chat.point_at(0).inner_text()
        chat.page.close()
