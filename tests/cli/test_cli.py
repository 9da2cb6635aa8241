"""The command line as a process: stdout, stderr and exit status."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import begun

import nucleate as nc
from nucleate.cli import stages
from nucleate.cli.main import main
from nucleate.sampling.stage import Floor


def nucleate(*arguments: str, text: str | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    stdin = {"input": text} if text is not None else {"stdin": subprocess.DEVNULL}
    command = [sys.executable, "-m", "nucleate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **{**stdin, **options})


GENERATE = ("generate", "Once upon a time", "--max-tokens", "20")


@pytest.mark.slow
def test_text_goes_to_stdout_and_statistics_to_stderr() -> None:
    done = nucleate(*GENERATE, "--seed", "1")
    assert done.returncode == 0
    assert len(done.stdout) > 30
    assert re.fullmatch(r"\[20 tokens, \d+ tokens/s on numpy float32, seed 1, length\]\n", done.stderr)


@pytest.mark.slow
def test_a_reported_seed_reproduces_the_text_and_another_seed_does_not() -> None:
    first = nucleate(*GENERATE)
    [seed] = re.findall(r"seed (\d+)", first.stderr)
    assert nucleate(*GENERATE, "--seed", seed).stdout == first.stdout
    assert nucleate(*GENERATE, "--seed", str(int(seed) ^ 1)).stdout != first.stdout


@pytest.mark.slow
def test_the_prompt_comes_from_stdin_a_file_or_is_empty(
    tmp_path: Path, llm: nc.LLM, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = ("--max-tokens", "10", "--seed", "1")
    (tmp_path / "prompt.txt").write_text("Once upon a time")
    (tmp_path / "empty.txt").touch()
    expected, of_nothing = (one.text + "\n" for one in llm.generate(["Once upon a time", ""], max_tokens=10, seed=1))
    assert nucleate("generate", *rest, text="Once upon a time").stdout == expected
    assert nucleate("generate", *rest).stdout == "Once upon a time" + expected

    def generated(*source: str, text: str = "", status: int = 0) -> Any:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return run("generate", *source, *rest, status=status)

    assert generated("-", text="Once upon a time").out == expected
    assert generated("--file", str(tmp_path / "prompt.txt")).out == expected
    assert generated("").out == of_nothing
    for source, name in ((["-"], "stdin"), (["--file", str(tmp_path / "empty.txt")], str(tmp_path / "empty.txt"))):
        printed = generated(*source, status=2)
        assert printed.out == ""
        assert f"{name} is empty: to generate from the BOS token, pass '' as the prompt" in printed.err


@pytest.mark.slow
def test_a_prompt_is_utf8_and_keeps_its_line_ends_from_any_source(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("café\r\n".encode())
    for source in (["--file", str(path)], ["-"]):
        with path.open() as stdin:
            done = nucleate(
                "generate", *source, "--json", "--max-tokens", "1", stdin=stdin, env={"PYTHONIOENCODING": "latin-1"}
            )
        assert json.loads(done.stdout)["prompt"] == "café\r\n"
    path.write_bytes(b"caf\xe9")
    for source, name in ((["--file", str(path)], str(path)), (["-"], "stdin")):
        with path.open() as stdin:
            done = nucleate("generate", *source, stdin=stdin)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"nucleate: {name} is not UTF-8: unexpected end of data at byte 3\n"


@pytest.mark.slow
def test_a_prompt_after_two_dashes_may_look_like_a_flag() -> None:
    for prompt in ("-x", "--debug"):
        done = nucleate("generate", "--max-tokens", "1", "--json", "--", prompt)
        assert json.loads(done.stdout)["prompt"] == prompt


@pytest.mark.slow
def test_echo_precedes_every_output() -> None:
    done = nucleate("generate", "The fox", "--max-tokens", "2", "--n", "2", "--seed", "1", "--echo")
    assert re.findall(r"^--- completion . of 2, seed .\nThe fox", done.stdout, re.MULTILINE) == [
        f"--- completion {seed} of 2, seed {seed}\nThe fox" for seed in (1, 2)
    ]


@pytest.mark.slow
def test_a_terminal_without_the_characters_shows_escapes() -> None:
    done = nucleate("generate", "café", "--echo", "--max-tokens", "1", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("caf\\xe9")


@pytest.mark.parametrize(
    ("redirection", "status", "out", "err"),
    [
        ("generate x --max-tokens 1 2>&-", 0, "^(?!.*tokens/s)", "^$"),  # no digits in the text
        ("generate x --max-tokens 1 >&-", 0, "^$", "tokens/s"),
        ("generate - <&-", 2, "^$", "^nucleate: no prompt: stdin is closed\n$"),
        ("chat <&-", 2, "^$", "^nucleate: nothing to read: stdin is closed\n$"),
    ],
)
@pytest.mark.fast_cases(0)
def test_closed_streams(redirection: str, status: int, out: str, err: str) -> None:
    script = f"{sys.executable} -m nucleate {redirection}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == status
    assert re.search(out, done.stdout, re.DOTALL)
    assert re.search(err, done.stderr)


@pytest.mark.slow
def test_json_output() -> None:
    done = nucleate(*GENERATE, "--seed", "1", "--json", "--n", "2", "--temperature", "0.5")
    result = json.loads(done.stdout)
    assert [output["seed"] for output in result["outputs"]] == [1, 2]
    counts = {"prompt_tokens": len(result["prompt_token_ids"]), "completion_tokens": 40, "cached_tokens": 0}
    assert result["usage"] == counts
    assert result["params"]["temperature"] == 0.5
    assert result["params"]["top_k"] == 50  # the model's recommended value stays
    assert nucleate(*GENERATE, "--seed", "1", "--temperature", "0.5").stdout == result["outputs"][0]["text"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["generate", "x", "--temperature", "-1"], 2, "temperature must be a number >= 0, got"),
        (["generate", "x", "--top-p", "2"], 2, "top_p must be a number >= 0 and <= 1, got"),
        (["generate", "x", "--top-k", "x"], 2, "top_k must be an integer"),
        (["generate", "x", "--temperature", "nan"], 2, "temperature must be a number"),
        (["generate", "x", "--seed", "-1"], 2, "seed must be an integer"),
        (["generate", "x", "--logit-bias", "1:2"], 2, "logit_bias must be"),
        (["generate", "x", "--logit-bias", "9999=1"], 2, "logit_bias names token 9999"),
        (["generate", "x", "--stop-regex", "("], 2, "stop_regex"),
        (["generate", "x", "--tempratur", "1"], 2, "arguments: --tempratur 1; did you mean --temperature?"),
        (["generate", "--temprature=0.5", "hi"], 2, "--temprature=0.5; did you mean --temperature?"),
        (["generate", "x", "--top_p=1", "--see", "2"], 2, "--see 2; did you mean --top-p, --seed?"),
        (["generate", "x", "--model", "/missing/model"], 1, "there is no model folder '/missing/model'"),
        (["generate", "x", "--device", "cuda", "--runtime", "numpy"], 1, "the numpy runtime"),
        (["generate", "word " * 2000], 2, "tokens, but the context holds 1024"),
        (["generate", "x", "--file", "y"], 2, "cannot be combined"),
        (["generate", "--file", "/missing.txt"], 1, "/missing.txt: No such file or directory"),
        (["genrate"], 2, "did you mean generate?"),
        (["generate", "x", "--dtype", "int3"], 2, "dtype must be one of"),
        (["chat", "--n", "2"], 2, "unrecognized arguments: --n 2 (see nucleate chat --help)"),
        (["generate", "x", "--logit-bias", "1=2,1=3"], 2, "logit_bias must be a mapping"),
        (["generate", "x", "--stop-token-ids", "none"], 2, "got 'none'"),
        (["generate", "x", "--stop", "---"], 2, "write a value that begins with - as --flag=VALUE"),
        (["inspect", "x", "--top", "0"], 2, "--top must be an integer >= 1, got '0'"),
        (["inspect", "x", "--top", "ten"], 2, "--top must be an integer >= 1, got 'ten'"),
        (["inspect", "x", "--top", "²"], 2, "--top must be an integer >= 1"),
        (["inspect", "x", "--n", "2"], 2, "unrecognized arguments: --n 2"),
        (["inspect", "x", "--stop", "a"], 2, "unrecognized arguments: --stop a"),
        (["inspect", "x", "--logprobs", "2"], 2, "unrecognized arguments: --logprobs 2"),
        (["inspect", "x", "--order", "vllm", "--top-a", "0.5"], 2, "order 'vllm' does not include top_a"),
        *((["generate", "x", "--num-beams", n], 2, f"must be an integer >= 1 and <= 1024, got '{n}'") for n in "0x"),
        *(
            (["generate", "x", "--num-beams", "4", *arguments], 2, message)
            for arguments, message in [
                (["--n", "5"], "n must be at most num_beams (4), got 5"),
                (["--num-beam-groups", "3"], "num_beam_groups must divide num_beams (4), got 3"),
                (["--length-penalty", "inf"], "length_penalty must be a number"),
                (["--early-stopping", "soon"], "early_stopping must be true, false or"),
                (["--diversity-penalty", "-1"], "diversity_penalty must be"),
                (["--temperature", "1", "--top-k", "3"], "top_k is not supported with use_beam_search, got 3"),
            ]
        ),
        (["generate", "x", "--length-penalty", "2"], 2, "length_penalty needs --num-beams"),
        (["generate", "x", "--early-stopping", "false"], 2, "early_stopping needs --num-beams"),
        *(
            (["serve", "--port", "0", *arguments], 2, message)
            for arguments, message in [
                (["--max-queued-seqs", "-1"], "nucleate: max_queued_seqs must be an integer >= 0"),
                (["--max-queued-seqs", "x"], "nucleate: max_queued_seqs must be an integer >= 0"),
                (["--max-completion-tokens", "x"], "nucleate: max_completion_tokens must be an integer >= 1"),
                (["--max-request-body-bytes", "10"], "nucleate: max_request_body_bytes must be"),
                (["--request-timeout-seconds", "0"], "nucleate: request_timeout_seconds must be a number > 0"),
                (["--top-p", "2"], "top_p must be"),
                (["--api-key", ""], "must not be blank"),
                (["--port", "70000"], "--port must be"),
                (["--api-key-file", "/nowhere/keys"], "cannot be read"),
                (["--max-num-seqs", "0"], "max_num_seqs must be an integer >= 1"),
                (["--root-path", "llm"], "--root-path must be a path such as /llm"),
            ]
        ),
        (["serve", "--log-format", "xml"], 2, "invalid choice: 'xml'"),
        (["bench", "--rows=0"], 2, "--rows must be at least 1, got 0"),
        (["bench", "--vocabulary=-5"], 2, "--vocabulary must be at least 1, got -5"),
        (["bench", "--seconds=nan"], 2, "--seconds must be at least 0, got nan"),
        (["bench", "--logits=round"], 2, "invalid choice: 'round'"),
        *(
            ([command, "x", *arguments], 2, message)
            for command in ("generate", "inspect")
            for arguments, message in [
                (["--regex", "("], "nucleate: regex: "),
                (["--json-schema", '{"uniqueItems": true}'], "json_schema: cannot enforce uniqueItems; set on_unsu"),
                (["--grammar", "start: nothing"], "nucleate: grammar: "),
                (["--choice", "a" * 20_001], "nucleate: choice is too large: 20001 characters"),
                (["--json-schema", "/dev/nullx"], "json_schema must be JSON"),
            ]
        ),
    ],
)
def test_bad_usage_is_one_line_and_exit_status_2(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert (out, message in err) == ("", True), err
    *usage, error = err.splitlines()
    assert error.startswith("nucleate: ")
    shown = any(words in message for words in ("unrecognized", "arguments:", "did you mean --", "--flag", "choice:"))
    assert [line.startswith(f"usage: nucleate {arguments[0]} [OPTIONS]") for line in usage] == [True] * shown


@pytest.mark.slow
def test_an_invalid_thread_count_is_an_error_before_anything_runs() -> None:
    done = nucleate("generate", "Once", env={**os.environ, "NUCLEATE_THREADS": "zero"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nucleate: NUCLEATE_THREADS must be an integer >= 1, got 'zero'\n"


@pytest.mark.slow
def test_debug_shows_the_traceback() -> None:
    assert "Traceback" in nucleate("generate", "x", "--model", "/missing", "--debug").stderr
    assert "Traceback" not in nucleate("generate", "x", "--model", "/missing").stderr


@pytest.mark.slow
def test_help_is_fast_and_imports_no_torch() -> None:
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert nucleate("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3, seconds


@pytest.mark.slow
def test_a_closed_pipe_is_no_error() -> None:
    script = f"{sys.executable} -m nucleate generate 'Once' --max-tokens 200 --ignore-eos | head -c 5"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_the_output_so_far() -> None:
    arguments = "-m", "nucleate", "generate", "Once", "--ignore-eos", "--max-tokens", "1000"
    with begun(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted]" in stderr
    assert "Traceback" not in stderr


def test_no_arguments_show_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out
    assert main(["--version"]) == main(["help"]) == 0
    assert capsys.readouterr().out.startswith("nucleate 0.")


def test_stages_prints_aligned_columns_for_names_of_any_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class MuchLikelierThanTheAverage(Floor):
        """Keep some."""

    monkeypatch.setattr(stages, "STAGES", {**stages.STAGES, "long": MuchLikelierThanTheAverage})
    assert main(["stages"]) == 0
    assert "\nmuch_likelier_than_the_average floor     Keep some.\n" in capsys.readouterr().out
