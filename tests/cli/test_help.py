"""Help, suggestions and shell completion of the command line."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from nucleate.cli.argument_parser import SYNONYMS, UsageError
from nucleate.cli.main import COMMANDS, command_parser, main

LONG = ("generate", "chat", "serve", "batch", "inspect", "compare")
"""Commands with more options than fit on a screen."""


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert not caught.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("columns", "lines"), [("80", 24), ("100", 40)])
def test_help_fits_on_a_screen(
    command: str, columns: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = printed(capsys, command, "--help")
    assert len(text.splitlines()) < lines
    assert max(map(len, text.splitlines())) <= int(columns)
    assert text.startswith(f"usage: nucleate {command}")
    assert ("--help-all" in text) == (command in LONG)
    assert printed(capsys, "help", command) == printed(capsys, command, "-h") == text


@pytest.mark.parametrize("command", LONG)
def test_the_full_help_has_every_option_in_a_group(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, command, "--help-all")
    parser = command_parser(command)
    for action in parser._actions:
        assert all(re.search(rf"(?<![\w-]){flag}(?![\w-])", text) for flag in action.option_strings)
        assert action.help
        assert not action.help[0].islower(), action.help
        assert action.help.endswith("."), action.help
    titles = ("truncation:", "penalties:", "structured output")
    for title in ("model:", *(titles if command != "compare" else ())):
        assert f"\n{title}" in text
    assert max(map(len, text.splitlines())) <= 100


def test_synonyms_are_suggested() -> None:
    suggested = set()
    for flag, own in SYNONYMS.items():
        for command in ("generate", "serve"):
            parser = command_parser(command)
            known = {name for action in parser._actions for name in action.option_strings}
            assert flag not in known
            if own in known:
                with pytest.raises(UsageError, match=re.escape(f"did you mean {own}?")) as caught:
                    parser.parse_args([flag, "1"])
                assert caught.value.usage.startswith(f"usage: nucleate {command}")
                suggested.add(own)
    assert suggested == set(SYNONYMS.values())


def test_short_flags(run: Any) -> None:
    arguments = ["generate", "Once", "--max-tokens", "2", "--seed", "1", "--json"]
    outputs = []
    for rest in (["-t", "0.5", "-n", "2"], ["--temp", "0.5", "--n", "2"], ["--temperature", "0.5", "-n", "2"]):
        outputs.append(run(*arguments, *rest).out)
    assert len(set(outputs)) == 1
    assert "/missing/model" in run("generate x -m /missing/model", status=1).err


def test_help_of_an_unknown_command(run: Any) -> None:
    assert "did you mean generate?" in run("help genrate", status=2).err
    assert "generate" in run("help").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts(shell: str, run: Any) -> None:
    pytest.importorskip("shtab", reason="install the dependencies again")
    script = run("completion", shell).out
    assert all(name in script for name in COMMANDS)
    if shell == "bash":
        complete = 'COMP_WORDS=(nucleate generate --top); COMP_CWORD=2; _shtab_nucleate; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{complete}"], capture_output=True, text=True, check=True)
        assert {"--top-k", "--top-p", "--top-n-sigma"} <= set(done.stdout.split())
