"""``nucleate chat``: commands, messages of several lines, and the terminal: editing, history, completion, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import chat_models
import pytest
from pty_program import PtyProgram
from server_process import begun
from test_cli import nucleate

import nucleate as nc
from nucleate.cli.chat import ChatSession, InputLines
from nucleate.cli.main import main


@pytest.fixture
def chat(llm: nc.LLM) -> ChatSession:
    """A conversation without a terminal."""
    params = nc.SamplingParams(max_tokens=8, temperature=0.7, seed=5)
    return ChatSession(llm, llm.default_params.override(**params.to_dict()), None)


def run(chat: ChatSession, capsys: pytest.CaptureFixture[str], *lines: str) -> Any:
    """Runs lines and returns what they print: out and err."""
    capsys.readouterr()
    for line in lines:
        chat.handle(line)
    return capsys.readouterr()


def test_a_seed_starts_again_and_retry_takes_the_next(chat: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(chat, capsys, "Tell me a story.")
    assert "seed 5" in first.err
    again = run(chat, capsys, "/retry")
    assert "seed 6" in again.err
    assert len(chat.messages) == 2
    assert run(chat, capsys, "/seed 5", "/retry").out == first.out
    assert "seed 5," not in run(chat, capsys, "/seed", "/retry").err
    assert chat.params.seed is None
    assert "seed must be an integer" in run(chat, capsys, "/seed x").err


def test_edit_replaces_the_last_message(chat: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no message for /edit" in run(chat, capsys, "/edit x").err
    run(chat, capsys, "One", "Two", "/edit Three is a number")
    assert [one["content"] for one in chat.messages if one["role"] == "user"] == ["One", "Three is a number"]
    before = chat.messages
    assert "/edit needs a text" in run(chat, capsys, "/edit").err
    assert chat.messages == before


def test_probs_shows_the_tokens_of_the_reply(chat: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no reply of this program" in run(chat, capsys, "/probs").err
    reply = run(chat, capsys, "/set min_tokens 8", "Tell me a story.").out.strip()
    before = list(chat.messages)
    header, *rows = run(chat, capsys, "/probs 2").out.splitlines()
    assert "likeliest" in header
    found = [re.fullmatch(r' *([\d.]+)%  (".*?") +(".*" [\d.]+%)  (".*" [\d.]+%)', row) for row in rows]
    assert all(found)
    assert "".join(json.loads(match[2]) for match in found if match).strip() == reply
    for match in found:  # the likeliest come first, and are as likely as they are shown
        assert match is not None
        first, second = (float(text.rpartition(" ")[2].rstrip("%")) for text in (match[3], match[4]))
        assert first >= second
        assert first >= float(match[1])
    assert chat.messages == before
    for wrong in ("0", "21", "x", "1.5", "-1"):
        assert "/probs takes the number of likeliest tokens, 1 to 20" in run(chat, capsys, f"/probs {wrong}").err
    assert "there is no reply" in run(chat, capsys, "/new", "/probs").err


def test_save_and_load(chat: ChatSession, capsys: pytest.CaptureFixture[str], tmp_path: Path, llm: nc.LLM) -> None:
    file, other = tmp_path / "a chat.json", tmp_path / "notes.txt"
    other.write_text("precious")
    run(chat, capsys, "/system Be kind.", "Caf\u00e9 \U0001f98a", "/set stop END", f"/save {file}")
    assert [*tmp_path.iterdir()] != []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a chat.json", "notes.txt"]
    again = ChatSession(llm, llm.default_params, None)
    run(again, capsys, f"/load {file}")
    assert (again.messages, again.params, again.system) == (chat.messages, chat.params, "Be kind.")
    run(again, capsys, "/new", f"/save {file}")  # a saved conversation may be replaced
    assert json.loads(file.read_text("utf-8"))["messages"] == [{"role": "system", "content": "Be kind."}]
    for command in ("save", "load"):
        assert "is not a conversation that /save has written" in run(chat, capsys, f"/{command} {other}").err
        assert f"/{command} needs the name of a file" in run(chat, capsys, f"/{command}").err
    assert other.read_text() == "precious"
    assert "No such file or directory" in run(chat, capsys, f"/load {tmp_path / 'none'}").err
    assert "No such file or directory" in run(chat, capsys, f"/save {tmp_path / 'no' / 'folder'}").err
    for bad in ('{"messages": 3, "sampling_params": {}}', '{"messages": [{"role": "user", "content": 3}]}', "[]"):
        other.write_text(bad)
        assert "is not a conversation" in run(chat, capsys, f"/load {other}").err
    other.write_text('{"messages": [], "sampling_params": {"top_p": 7}}')
    assert "top_p must be a number" in run(chat, capsys, f"/load {other}").err
    assert chat.system == "Be kind."


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        (['"""one', "  two", 'three"""', "four"], ["one\n  two\nthree", "four"]),
        (['"""', "/quit", '"""', "/quit", "x"], [" /quit"]),
        (['"""one line"""'], ["one line"]),
        (["one\\", "two \\", "three"], ["one\ntwo \nthree"]),
        (['"""never ends', "so"], ["never ends\nso"]),
        (["open\\"], ["open"]),
        (["", "  ", "a"], ["a"]),
    ],
)
def test_messages_of_several_lines(monkeypatch: pytest.MonkeyPatch, typed: list[str], messages: list[str]) -> None:
    left = iter(typed)

    def line(_prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", line)
    assert [*InputLines(interactive=False)] == messages


def test_a_model_without_a_template_chats_in_the_plain_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = chat_models.folder(tmp_path, "")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    for arguments, lines in (((), 1), (("--chat-template", "chatml"), 0)):
        left = iter(["Hello", "/quit"])
        monkeypatch.setattr("builtins.input", lambda _prompt, left=left: next(left))
        assert main(["chat", "-m", str(folder), "--max-tokens", "4", *arguments]) == 0
        printed = capsys.readouterr()
        assert printed.err.count("has no chat template: chatting in the format plain (see --chat-template)") == lines
        assert "tokens/s" in printed.err


@pytest.mark.slow
def test_chat_executes_commands_and_replies_to_lines() -> None:
    lines = [
        "/set seed 3", "/set temperature 0.5", "/set top_p 7", "/set nothing 1", "/show", "/help", "/retry",
        "/nonsense", "Tell me a story about a fox.", "/retry", "/system You are a storyteller.", "Hello!", "/new",
        "/quit", "never read",
    ]  # fmt: skip
    done = nucleate("chat", "--max-tokens", "15", text="\n".join(lines))
    assert "seed=3" in done.stdout
    assert "temperature=0.5" in done.stdout
    assert "/set NAME VALUE" in done.stdout
    assert "top_p must be a number >= 0 and <= 1" in done.stderr
    assert "unknown parameter 'nothing'" in done.stderr
    assert "there is no message for /retry" in done.stderr
    assert "unknown command /nonsense" in done.stderr
    assert len(re.findall(r"\[\d+ tokens, ", done.stderr)) == 3
    assert done.returncode == 0  # a usage error is not a failure of the program


@pytest.mark.slow
def test_chat_keeps_the_history_and_drops_the_oldest_when_the_context_is_full() -> None:
    lines = "\n".join(["Tell me a story about a dog. " * 12] * 12)
    done = nucleate("chat", "--max-tokens", "60", "--ignore-eos", text=lines)
    assert done.returncode == 0, done.stderr
    assert "the oldest messages were removed" in done.stderr


@pytest.mark.slow
def test_an_invalid_or_too_long_message_leaves_the_conversation_unchanged() -> None:
    def chat(*lines: str) -> subprocess.CompletedProcess[str]:
        flags = ("--max-tokens", "5", "--temperature", "0")
        return nucleate("chat", *flags, text="\n".join(lines), errors="surrogateescape")

    good = chat("Tell me a story.", "Who is the fox?")
    done = chat("Tell me a story.", "caf\udcff", "word " * 2000, "Who is the fox?")
    assert (done.returncode, done.stdout) == (0, good.stdout)
    errors = [line for line in done.stderr.splitlines() if line.startswith("nucleate")]
    assert [error[:26] for error in errors] == ["nucleate: messages: text i", "nucleate: the prompt has 2"]
    assert "removed" not in done.stderr


@pytest.mark.slow
def test_set_without_a_value_restores_the_default() -> None:
    changes = "/set stop The end\n/set temperature 2\n/set  ignore_eos  True\n/set max-tokens 9\n/show\n"
    done = nucleate("chat", text=f"{changes}/set max-tokens\n/set stop\n/set temperature\n/set ignore_eos\n/show")
    assert (done.returncode, done.stderr) == (0, "")
    changed, back = (line for line in done.stdout.splitlines() if line.startswith("parameters"))
    assert "max_tokens=9, stop=('The end',), ignore_eos=True" in changed
    assert back == "parameters    SamplingParams(temperature=0.7, top_k=50, top_p=0.9)"


@pytest.mark.slow
def test_quit_ignores_the_lines_after_it() -> None:
    done = nucleate("chat", text="/quit now\n/show\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_ctrl_c_ends_a_chat_that_reads_a_pipe() -> None:
    with begun("-m", "nucleate", "chat", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write("/show\n/show\n")
        process.stdin.flush()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


@pytest.mark.slow
def test_ctrl_c_in_a_chat_stops_the_reply_but_not_the_program() -> None:
    terminal = PtyProgram("chat", "--ignore-eos", "--min-tokens", "900", environment={"XDG_STATE_HOME": "/dev/null"})
    terminal.expect("> ")
    terminal.type(b"Tell me a story about a fox.\n")
    terminal.expect("the ")
    terminal.type(b"\x03")
    terminal.expect("interrupted]")
    terminal.expect("> ")
    terminal.type(b"/show\n")
    terminal.expect("min_tokens=900")
    terminal.expect("> ")
    terminal.type(b"\x04")
    assert terminal.end() == 0


@pytest.mark.slow
def test_a_terminal_has_history_completion_editing_and_pasted_lines(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    terminal = PtyProgram("chat", "--max-tokens", "4", environment=state)
    terminal.expect("> ")
    terminal.type(b"/sh\t\n")  # completed
    terminal.expect("conversation  0 messages")
    terminal.expect("> ")
    terminal.type(b"/set temperat\t 0.25\n")
    terminal.expect("> ")
    terminal.type(b"/show\n")
    terminal.expect("temperature=0.25")
    terminal.expect("> ")
    terminal.type(b"\x1b[200~first line\nsecond line\x1b[201~\n")  # pasted: one message
    terminal.expect("tokens/s")
    terminal.expect("> ")
    terminal.type(b"/edit\n")
    terminal.expect("second line")
    terminal.type(b" and more\n")
    terminal.expect("tokens/s")
    terminal.expect("> ")
    terminal.type(b"half a message\x03")  # Ctrl-C at the prompt clears it
    terminal.expect("> ")
    terminal.type(f"/save {tmp_path}/chat.json\n".encode())
    terminal.expect("saved 2 messages")
    terminal.expect("> ")
    terminal.type(b"\x04")
    assert terminal.end() == 0
    assert json.loads((tmp_path / "chat.json").read_text())["messages"][0]["content"] == (
        "first line\nsecond line and more"
    )
    history = tmp_path / "nucleate" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    terminal = PtyProgram("chat", environment=state)
    terminal.expect("> ")
    terminal.type(b"\x1b[A")  # the line before, of the other session
    terminal.expect("/save")
    terminal.type(b"\x15\x04")
    assert terminal.end() == 0
    assert history.read_text().count("/save") == 1


@pytest.mark.slow
def test_the_first_ctrl_c_keeps_the_engine_and_probs_shows_what_there_is(tmp_path: Path) -> None:
    terminal = PtyProgram("chat", "--ignore-eos", "--seed", "1", environment={"XDG_STATE_HOME": "/dev/null"})
    terminal.expect("> ")
    terminal.type(b"Tell me a story.\n")
    terminal.expect("the ")
    terminal.type(b"\x03")
    terminal.expect("interrupted]")
    terminal.expect("> ")
    terminal.type(b"/probs 1\n")
    terminal.expect("likeliest")
    terminal.expect("%")
    terminal.expect("> ")
    terminal.type(b"/quit\n")
    assert terminal.end() == 0  # without a place for the history
