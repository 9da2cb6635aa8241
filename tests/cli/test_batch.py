"""``nucleate batch``: one record per input line, for any input and after any interruption."""

from __future__ import annotations

import fcntl
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import tiers
from batch_folder import CHAT, Folder, Records, number, request
from hypothesis import given, settings
from hypothesis import strategies as st

import nucleate as nc
from nucleate.batch.batch_records import MAX_LINE_BYTES, JsonLine, has_failed, lines, read_line
from nucleate.cli import batch
from nucleate.cli.argument_parser import UsageError
from nucleate.cli.batch import BatchOutput
from nucleate.cli.main import main
from nucleate.engine.engine import Engine
from nucleate.server.openai.endpoints import CHAT as CHAT_ENDPOINT
from nucleate.server.openai.endpoints import COMPLETIONS

SHORT = ("--max-tokens", "2")


INPUT_LINES = [
    value
    for seed in range(40)
    for value in (
        {"prompt": "Once upon a time", "seed": seed, "max_tokens": 20 + seed, "n": 1 + seed % 2},
        request(f"chat-{seed}", "/v1/chat/completions", seed=seed, max_tokens=12),
        request(f"completion-{seed}", prompt=["The dog", "A cat"], seed=seed, logprobs=1),
    )
]
"""Lines of all kinds, each with its seed, so that their outputs are always the same."""


def stripped(records: Records) -> str:
    """Records without timestamps, logprobs, whose last digits depend on the batch, and tokens found in the cache."""
    return re.sub(r'"(created|cached_tokens)": \d+|-?\d+\.\d+(e-\d+)?', "", json.dumps(records))


def test_every_kind_of_line_gets_the_output_of_the_library(folder: Folder, llm: nc.LLM) -> None:
    params = llm.default_params.replace(seed=3, max_tokens=4)
    ids = llm.encode("The fox")
    folder.write(
        "The fox",
        {"prompt": ids, "n": 2},
        {"messages": CHAT, "logprobs": 1, "custom_id": "mine", "prompt_logprobs": 0},
        request("a", prompt=[ids, ids], n=2, user="me", model="nucleate-tiny"),
        request("b", "/v1/chat/completions", max_completion_tokens=3, logprobs=True),
    )
    status, found, err = folder.run("--seed", "3", "--max-tokens", "4")
    assert status == 0, err
    fox = llm.generate("The fox", params.replace(n=2))[0]
    assert found[0]["text"] == fox.text
    assert {"line": 1, "prompt": "The fox", "finish_reason": "length", "seed": 3}.items() <= found[0].items()
    counts = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert found[0]["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    assert found[1]["prompt"] == ids
    assert [output["text"] for output in found[1]["outputs"]] == [output.text for output in fox.outputs]
    chat = llm.chat(CHAT, params)
    assert (found[2]["text"], found[2]["messages"], found[2]["custom_id"]) == (chat.text, CHAT, "mine")
    assert len(found[2]["logprobs"]) == 4
    assert found[2]["prompt_logprobs"][0] is None
    body = found[3]["response"]["body"]
    response = {"status_code": 200, "request_id": f"req-{found[3]['id']}", "body": body}
    assert found[3] == {"id": found[3]["id"], "custom_id": "a", "response": response, "error": None}
    assert (body["object"], body["model"], len(body["choices"])) == ("text_completion", "nucleate-tiny", 4)
    assert [choice["text"] for choice in body["choices"]] == [output.text for output in fox.outputs] * 2
    assert abs(body["created"] - time.time()) < 600
    [choice] = found[4]["response"]["body"]["choices"]
    assert choice["message"]["content"] == llm.chat(CHAT, params.replace(max_tokens=3)).text
    assert re.search(r"^\[5 lines done, 0 failed; 35 tokens, \d+ tokens/s on numpy float32\]\n$", err)


@pytest.mark.slow
def test_the_example_lines_of_the_batch_page_run(folder: Folder) -> None:
    page = (Path(__file__).parents[2] / "docs" / "batch.md").read_text("utf-8")
    [block] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    folder.input.write_text(block)
    status, found, err = folder.run(*SHORT)
    assert (status, len(found)) == (0, 7), err
    for endpoint in (COMPLETIONS, CHAT_ENDPOINT):
        for name in endpoint.fields.keys() - {"stream_options", *endpoint.prompt_fields}:
            assert f"`{name}`" in page or f'"{name}"' in page


@pytest.mark.slow
def test_missing_length_limits_fall_back_to_the_context(folder: Folder) -> None:
    folder.write(request("a", ignore_eos=True), request("b", ignore_eos=True, max_tokens=None))
    assert [r["response"]["body"]["usage"]["completion_tokens"] for r in folder.run()[1]] == [16, 16]
    folder.write(request("a", ignore_eos=True), request("b", ignore_eos=True, max_tokens=3))
    found = folder.run("--overwrite", "--max-tokens", "20")[1]
    assert [r["response"]["body"]["usage"]["completion_tokens"] for r in found] == [20, 3]
    folder.write(request("a", ignore_eos=True), {"prompt": "The fox", "ignore_eos": True})
    found = folder.run("--overwrite", "--max-tokens", "none", "--max-model-len", "30")[1]
    assert found[0]["response"]["body"]["usage"]["total_tokens"] == found[1]["usage"]["total_tokens"] == 30


BAD: list[tuple[Any, int | None, str | None, str]] = [
    # the line, its HTTP status if it has one, its error code, a part of its message
    (b"{", None, "invalid_json", "must be JSON"),
    (b'{"prompt": "x"} {"prompt": "y"}', None, "invalid_json", "Extra data"),
    (b'{"prompt": "\xff"}', None, "invalid_json", "not UTF-8: invalid start byte at byte 12"),
    (b'{"prompt": "x", "temperature": NaN}', None, "invalid_json", "NaN"),
    (b'{"prompt": "x", "top_k": -Infinity}', None, "invalid_json", "-Infinity"),
    (b'{"prompt": "x", "prompt": "y"}', None, "invalid_json", "duplicate name 'prompt'"),
    (b"[" * 100_000, None, "invalid_json", "depth"),
    (b'{"prompt": ' + b"[" * 400 + b"]" * 400 + b"}", None, "invalid_request", "prompt must be"),
    (b'{"custom_id": "deep", "url": ' + b"[" * 900 + b"]" * 900 + b"}", None, "invalid_line", "is missing"),
    (b'"' + b"x" * MAX_LINE_BYTES + b'"', None, "line_too_long", "too long"),
    (b"5", None, "invalid_line", "a line must be a JSON object or string, got 5"),
    (b"[1, 2]", None, "invalid_line", "a line must be"),
    ({}, None, "invalid_request", "prompt or messages must be set"),
    ({"prompt": "\ud800"}, None, "invalid_request", "not valid Unicode"),
    ({"prompt": []}, None, "invalid_request", "prompt must be a string or a list of token ids, got []"),
    ({"prompt": [99999]}, None, "invalid_request", "outside the vocabulary"),
    ({"prompt": [-1]}, None, "invalid_request", "outside the vocabulary"),
    ({"prompt": [0] * 2000}, None, "context_length_exceeded", "length is 1024 tokens"),
    ({"prompt": "x", "messages": CHAT}, None, "invalid_request", "not both"),
    ({"prompt": "x", "temperatur": 1}, None, "invalid_request", "did you mean temperature"),
    ({"prompt": "x", "top_p": 2}, None, "invalid_request", "top_p must be a number >= 0 and <= 1, got 2"),
    ({"prompt": "x", "top_p": 1e999}, None, "invalid_json", "Infinity"),
    (b'{"prompt": "x", "top_p": 1e999}', None, "invalid_request", "top_p must be"),
    ({"prompt": "x", "stop_regex": "("}, None, "invalid_request", "stop_regex"),
    ({"prompt": "x", "logit_bias": {"99999": 1}}, None, "invalid_request", "names token 99999"),
    ({"prompt": "x", "min_tokens": 5, "max_tokens": 1}, None, "invalid_request", "min_tokens must be at most"),
    ({"prompt": "x", "custom_id": 5}, None, "invalid_line", "custom_id must be a non-empty string, got 5"),
    ({"messages": [{"role": "user"}]}, None, "invalid_request", "messages[0].content"),
    ({**request("no method"), "method": "GET"}, None, "invalid_line", "method must be POST, got 'GET'"),
    ({**request("no url"), "url": "/v1/embeddings"}, None, "invalid_line", "url must be one of /v1/completions"),
    ({**request("more"), "bdy": 1}, None, "invalid_line", "'bdy'; did you mean body?"),
    ({"method": "POST", "url": "/v1/completions", "body": {}}, None, "invalid_line", "custom_id is missing"),
    ({**request("no body"), "body": 7}, 400, None, "body must be a JSON object, got 7"),
    (request("no prompt", prompt=None), 400, None, "prompt is missing"),
    (request("prompts", prompt=["x", [1]]), 400, None, "prompt must be"),
    (request("one bad prompt", prompt=["x", "y " * 2000]), 400, "context_length_exceeded", "length is 1024 tokens"),
    (request("long", prompt="x", max_tokens=1024), 400, "context_length_exceeded", "max_tokens is 1024"),
    (request("stream", stream=True), 400, None, "stream must be false in a batch"),
    (request("suffix", suffix="x"), 400, None, "suffix needs a model with fill-in-the-middle tokens"),
    (request("best", best_of=1, n=2), 400, None, "best_of must be at least n (2), got 1"),
    (request("silent", max_tokens=0), 400, None, "max_tokens must be an integer >= 1, or 0 with echo"),
    (request("tools", "/v1/chat/completions", tools=[1]), 400, None, "tools[0] must be an object"),
    (request("top", "/v1/chat/completions", top_logprobs=1), 400, None, "top_logprobs needs logprobs"),
    (
        request("model", model="gpt-5"),
        404,
        "model_not_found",
        "the model 'gpt-5' does not exist; this batch uses 'nucleate-tiny'",
    ),
    ({"prompt": "x", "structured_outputs": {"regex": "("}}, None, "invalid_request", "structured_outputs.regex: "),
    (
        {"prompt": "x", "structured_outputs": {"regex": "a", "choice": ["b"]}},
        None,
        "invalid_request",
        "must have exactly one of",
    ),
    (
        request("unique", structured_outputs={"json_schema": {"uniqueItems": True}}),
        400,
        None,
        "structured_outputs.json_schema: cannot enforce uniqueItems",
    ),
    (request("good"), None, "duplicate_custom_id", "an earlier line has the same custom_id 'good'"),
]


@pytest.mark.slow
def test_bad_lines_are_reported_and_the_others_are_processed(folder: Folder) -> None:
    folder.write(request("good"), *(line for line, *_ in BAD), "The end")
    status, found, err = folder.run(*SHORT)
    assert status == 1
    assert [number(record) for record in found] == list(range(1, len(BAD) + 3))
    assert [has_failed(record) for record in found] == [False] + [True] * len(BAD) + [False]
    for line_number, (record, (line, http, code, message)) in enumerate(zip(found[1:], BAD, strict=False), 2):
        assert re.search(rf"^nucleate: line {line_number}: ", err, re.MULTILINE), line
        if http is None:
            assert record.get("response") is None
            error = record["error"]
        else:
            assert (record["error"], record["response"]["status_code"]) == (None, http)
            error = record["response"]["body"]["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"]
        assert (error["code"], message in error["message"]) == (code, True), record
        assert error["message"].startswith(f"line {line_number}: ")
        if isinstance(line, dict) and isinstance(line.get("custom_id"), str):
            assert record["custom_id"] == line["custom_id"]
    assert f"[2 lines done, {len(BAD)} failed; 4 tokens, " in err
    assert folder.run(*SHORT) == (1, found, f"[{len(BAD) + 2} lines done before ({len(BAD)} of them failed)]\n")


@settings(max_examples=tiers.count(12, 50))
@given(data=st.binary(max_size=60) | st.text(max_size=30).map(lambda text: json.dumps(text).encode()))
def test_each_line_yields_one_entry(data: bytes) -> None:
    entry = read_line(JsonLine(3, 4, data))
    assert (entry.id, entry.number) == ("line-3-0000000000000004", 3)
    assert (entry.endpoint is None) == (entry.failure is not None)


def test_repeated_prompts_prompt_logprobs_and_best_of(folder: Folder, llm: nc.LLM) -> None:
    kwargs = {"chat_template_kwargs": {"thinking": True}}
    folder.write(
        request("echo", echo=True, logprobs=1),
        request("score", echo=True, logprobs=1, max_tokens=0),
        request("best", best_of=4, seed=1),
        request("kwargs", "/v1/chat/completions", **kwargs),
        request("ours", "/v1/chat/completions", chat_template_kwargs={"messages": []}),
    )
    _, found, err = folder.run(*SHORT)
    bodies = [record["response"]["body"] for record in found]
    (echo,), (score,), (best,) = (body["choices"] for body in bodies[:3])
    size = len(llm.encode("The fox"))
    assert echo["text"].startswith("The fox")
    assert (score["text"], len(score["logprobs"]["tokens"])) == ("The fox", size)
    assert len(echo["logprobs"]["tokens"]) == size + 2
    assert (best["index"], best["logprobs"], bodies[2]["usage"]["completion_tokens"]) == (0, None, 8), err
    assert bodies[3]["choices"][0]["finish_reason"] == "length"
    assert bodies[4]["error"]["param"] == "chat_template_kwargs"


def test_an_output_that_ends_with_an_error_is_a_failure(folder: Folder) -> None:
    nothing = {"allowed_token_ids": [5], "suppress_token_ids": [5]}
    banned = {"structured_outputs": {"regex": "aaaa"}, "suppress_token_ids": list(range(4096))}
    lines = [{"prompt": "x", **fields} for fields in (nothing, banned)]
    lines += [request(name, prompt=["x", "y"], **fields) for name, fields in (("a", nothing), ("b", banned))]
    folder.write(*lines, {"prompt": "x"})
    status, found, err = folder.run(*SHORT)
    assert (status, [has_failed(record) for record in found]) == (1, [True] * 4 + [False]), err
    errors = [record["error"] or record["response"]["body"]["error"] for record in found[:4]]
    assert [error["param"] for error in errors] == ["allowed_token_ids", "structured_outputs"] * 2
    assert all("structured-output constraint" in error["message"] for error in errors[1::2])
    assert found[0]["error"]["code"] == "invalid_request"
    assert found[2]["response"]["status_code"] == 400
    assert found[2]["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert "line 3: allowed_token_ids: invalid logits" in err


def test_files_with_windows_line_ends(folder: Folder) -> None:
    folder.input.write_bytes(b'\xef\xbb\xbf"The fox"\r\n\r\n   \n{"prompt": "caf\xc3\xa9"}\r\n"no end"')
    status, found, _ = folder.run(*SHORT)
    assert status == 0
    assert [(record["line"], record["prompt"]) for record in found] == [(1, "The fox"), (4, "café"), (5, "no end")]
    folder.input.write_bytes(b'"The fox"\n\n\n{"prompt": "caf\xc3\xa9"}\n"no end"\n')
    assert folder.run(*SHORT)[0] == 0  # the same lines as ``BAD``


@given(
    parts=st.lists(
        st.sampled_from([b"a", b"bcd", b"\n", b"\r\n", b" ", b"x" * 7, b"\xef\xbb\xbf", b"\0"]), max_size=12
    ),
    most=st.integers(1, 9),
)
def test_lines_equal_those_of_splitting_the_full_text(parts: list[bytes], most: int) -> None:
    data = b"".join(parts)
    expected = []
    for line_number, raw in enumerate(data.split(b"\n"), 1):
        trimmed = raw.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r")
        if len(raw) > most:
            expected.append((line_number, int.from_bytes(blake2b(raw, digest_size=8).digest()), None))
        elif trimmed:
            expected.append((line_number, int.from_bytes(blake2b(trimmed, digest_size=8).digest()), trimmed))
    assert list(lines(io.BytesIO(data), most)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_killed_at_any_moment_no_line_is_lost_or_repeated(folder: Folder, most: int) -> None:
    input_lines = INPUT_LINES[: 12 if most < 10 else None]
    folder.write(*input_lines)
    status, uninterrupted, err = folder.run("--max-num-seqs", "3")
    assert (status, len(uninterrupted)) == (0, len(input_lines)), err
    folder.output.unlink()
    rng, kills, done = random.Random(most), 0, False
    while not done:
        size = folder.output.stat().st_size if folder.output.exists() else 0
        with folder.begun("--max-num-seqs", "3") as process:
            if kills == most:
                pass
            elif kills % 3 < 2 or most < 10:  # soon after something was written
                while process.poll() is None and (not folder.output.exists() or folder.output.stat().st_size <= size):
                    time.sleep(0.002)
                time.sleep(rng.choice([0, 0, 0.01, 0.1]))
                process.kill()
            else:
                time.sleep(rng.uniform(0, 3))
                process.kill()
            _, errors = process.communicate(timeout=100)
        kills += process.returncode == -signal.SIGKILL
        done = process.returncode == 0
        assert done or process.returncode == -signal.SIGKILL, errors
    assert kills >= 2
    assert stripped(folder.records()) == stripped(uninterrupted)


@pytest.mark.slow
def test_an_incomplete_record_is_cut_off_wherever_it_ends(folder: Folder) -> None:
    folder.write(request("a", seed=1), request("b", seed=2), {"prompt": "x", "seed": 3})
    _, uninterrupted, _ = folder.run(*SHORT)
    data = folder.output.read_bytes()
    second = data.rindex(b"\n", 0, -1) + 1
    source = io.BytesIO()
    for end in range(second, len(data)):
        folder.output.write_bytes(data[:end])
        with BatchOutput(str(folder.output), source) as journal:
            assert journal.count == 2
        assert folder.output.read_bytes() == data[:second]
    for end in (0, 1, 13, second - 1, second + 40, len(data) - 1):
        folder.output.write_bytes(data[:end])
        assert folder.run(*SHORT)[0] == 0
        assert stripped(folder.records()) == stripped(uninterrupted)


@pytest.mark.parametrize(
    "content",
    [
        b"my notes\n",
        b"my notes",
        b'{"id": "a"}\n',
        b'{"id": 5}\n',
        b"[]\n",
        b"\n",
        b'{"id": "line-0-0000000000000001"}\n',
        b'{"id": "line-1-0000000000000001", "response": []}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\n",
    ],
)
def test_a_file_of_another_program_is_not_changed(folder: Folder, content: bytes) -> None:
    folder.write("x")
    folder.output.write_bytes(content)
    with pytest.raises(UsageError, match=r"line 1 is not a record of nucleate batch; use another output file"):
        BatchOutput(str(folder.output), io.BytesIO())
    assert folder.output.read_bytes() == content
    with BatchOutput(str(folder.output), io.BytesIO(), overwrite=True):
        assert folder.output.read_bytes() == b""


def test_a_changed_input_is_an_error(folder: Folder) -> None:
    folder.write({"prompt": "x", "seed": 1}, {"prompt": "y"})
    _, first, _ = folder.run(*SHORT)
    for changed in ([{"prompt": "x", "seed": 2}, {"prompt": "y"}], [{"prompt": "x", "seed": 1}], []):
        folder.write(*changed)
        status, found, err = folder.run(*SHORT)
        assert (status, found) == (2, first)
        assert "; use another output file or --overwrite" in err
    folder.write({"prompt": "x", "seed": 1}, {"prompt": "y"}, {"prompt": "z"})  # appending more lines is allowed
    status, found, err = folder.run(*SHORT)
    assert (status, found[:2], len(found)) == (0, first, 3)
    assert err.startswith("[1 lines done, 0 failed, 2 lines done before; 2 tokens, ")
    folder.write({"prompt": "other"})
    status, found, err = folder.run("--overwrite", *SHORT)
    assert (status, [record["prompt"] for record in found]) == (0, ["other"])


def test_failed_lines_are_retried_only_if_requested(folder: Folder) -> None:
    folder.write("x", request("a", model="other"), b"{", request("a"))
    status, first, _ = folder.run(*SHORT)
    folder.output.chmod(0o640)
    served = ("--served-model-name", "other", *SHORT)
    assert folder.run(*served) == (status, first, "[4 lines done before (3 of them failed)]\n")
    link = folder.output.with_name("link.jsonl")
    folder.output.rename(link)
    folder.output.symlink_to(link)
    status, found, err = folder.run("--retry-errors", *served)
    assert (status, [has_failed(record) for record in found]) == (1, [False, False, True, True])
    assert err.endswith("on numpy float32]\n")
    assert "[1 lines done, 2 failed, 1 lines done before; 2 tokens" in err
    assert found[0] == first[0]
    assert found[1]["response"]["body"]["model"] == "other"
    assert found[3]["error"]["code"] == "duplicate_custom_id"
    assert folder.output.is_symlink()
    assert link.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in link.parent.iterdir()) == ["in.jsonl", "link.jsonl", "out.jsonl"]


def test_the_last_of_duplicate_lines_counts_after_an_interruption_too(folder: Folder) -> None:
    folder.write(request("a", seed=1), request("a", seed=2), request("b"))
    _, first, _ = folder.run(*SHORT)
    others = [record for record in folder.output.read_bytes().splitlines(keepends=True) if b'"line-2-' not in record]
    for records in (others, others[:1], []):
        folder.output.write_bytes(b"".join(records))
        assert folder.run(*SHORT)[0] == 1
        assert [has_failed(record) for record in folder.records()] == [has_failed(record) for record in first]


def test_two_processes_cannot_write_one_file(folder: Folder) -> None:
    folder.write("x")
    with folder.output.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        status, found, err = folder.run(*SHORT)
        assert (status, found) == (2, [])
        assert err == f"nucleate: {folder.output} is locked by another process\n"
    assert folder.run(*SHORT)[0] == 0


def test_a_replaced_file_is_still_locked(folder: Folder) -> None:
    folder.write("x", b"{")
    folder.run(*SHORT)
    with BatchOutput(str(folder.output), io.BytesIO(), retry=True) as journal:
        assert (journal.count, journal.failed) == (1, 0)
        assert len(folder.records()) == 1
        with pytest.raises(UsageError, match="is locked by another process"):
            BatchOutput(str(folder.output), io.BytesIO())
        journal.write({"id": "line-2-0000000000000001", "error": None})
    assert len(folder.records()) == 2


def test_a_file_that_is_both_input_and_output_is_not_changed(folder: Folder) -> None:
    folder.write("x")
    folder.output.symlink_to(folder.input)
    for flags in ((), ("--overwrite",)):
        assert main(["batch", str(folder.input), str(folder.output), *flags]) == 2
    assert folder.input.read_bytes() == b'"x"\n'


@pytest.mark.slow
def test_an_interrupt_keeps_finished_lines_and_reports_how_to_resume(folder: Folder) -> None:
    folder.write("x", *[{"prompt": "x", "max_tokens": 900, "ignore_eos": True}] * 6)
    with folder.begun("--max-num-seqs", "2", "--seed", "1", "--max-tokens", "1") as process:
        while process.poll() is None and not (folder.output.exists() and folder.output.stat().st_size):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b""), err
    assert [number(record) for record in folder.records()][:1] == [1]
    assert err.endswith(b"nucleate: interrupted; run the same command again to resume\n")
    assert b"Traceback" not in err


@pytest.mark.parametrize("source", ["-", "pipe"])
@pytest.mark.fast_cases(0)
def test_stdin_to_stdout(folder: Folder, source: str) -> None:
    os.mkfifo(folder.input) if source == "pipe" else None
    name = str(folder.input) if source == "pipe" else "-"
    script = f"{sys.executable} -m nucleate batch {name} - --seed 1 --max-tokens 2"
    script = f"cat > {folder.input} & {script}" if source == "pipe" else script
    script = script.replace("cat >", "cat <&3 >")
    text = b'"x"\n"y"\n{\n'
    done = subprocess.run(
        ["bash", "-c", f"exec 3<&0; {script}"], input=text, capture_output=True, check=False, timeout=100
    )
    assert done.returncode == 1, done.stderr
    found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=number)
    assert [record.get("prompt") for record in found] == ["x", "y", None]
    assert b"[2 lines done, 1 failed; 4 tokens" in done.stderr


def test_lines_from_stdin_are_recognized_on_resume(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.input = Path("-")
    for text, status in ((b'"x"\n', 0), (b'"x"\n"y"\n', 0), (b'"y"\n', 2), (b"", 2)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert folder.run(*SHORT)[0] == status
    assert [record["prompt"] for record in folder.records()] == ["x", "y"]


@pytest.mark.slow
def test_the_input_is_read_incrementally(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    consumed, sizes = 0, []

    def counting(stream: object) -> Iterator[JsonLine]:
        nonlocal consumed
        for consumed in range(1, 41):
            yield JsonLine(consumed, consumed, b'{"prompt": "x", "n": 2, "max_tokens": 3}')

    step = Engine.step

    def watched(engine: Engine) -> Any:
        sizes.append(consumed - folder.output.read_bytes().count(b"\n"))
        return step(engine)

    monkeypatch.setattr(batch, "lines", counting)
    monkeypatch.setattr(batch, "count_lines", lambda source, output: None)
    monkeypatch.setattr(Engine, "step", watched)
    folder.write()
    assert folder.run("--max-num-seqs", "4")[0] == 0
    assert max(sizes) <= 9
    assert sorted(map(number, folder.records())) == list(range(1, 41))


def test_the_progress_bar_needs_a_terminal_or_the_flag(folder: Folder) -> None:
    folder.write("x", "y")
    assert "%" not in folder.run(*SHORT)[2]
    _, _, err = folder.run("--overwrite", "--progress", *SHORT)
    assert "2/2" in err
    assert "tokens/s, 0 failed" in err
    assert err.splitlines()[-1].startswith("[2 lines done, 0 failed; 4 tokens, ")


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--temperature", "-1"], 2, "temperature must be"),
        (["--max-num-seqs", "0"], 2, "max_num_seqs must be an integer >= 1"),
        (["--max-num-batched-tokens", "3"], 2, "max_num_batched_tokens must be"),
        (["--max-num-seqs", "x"], 2, "invalid int value"),
        (["--overwrite", "--retry-errors"], 2, "not allowed with argument"),
        (["--model", "/missing/model"], 1, "there is no model folder"),
    ],
)
def test_bad_usage(folder: Folder, flags: list[str], status: int, message: str) -> None:
    folder.write("x")
    found, records, err = folder.run(*flags)
    assert (found, records) == (status, [])
    assert err.count("\n") == 1 + err.startswith("usage: nucleate batch [OPTIONS] INPUT OUTPUT\n")
    assert message in err


def test_missing_and_empty_files(folder: Folder) -> None:
    status, _, err = folder.run()
    assert (status, "in.jsonl: No such file" in err, folder.output.exists()) == (1, True, False)
    folder.write()
    assert folder.run() == (0, [], "[0 lines done before]\n")
    folder.write("x")
    folder.output = folder.output.parent / "missing" / "out.jsonl"
    assert folder.run()[0] == 1
    folder.output = folder.input.parent
    assert main(["batch", str(folder.input), str(folder.output)]) == 1


def test_the_output_may_be_a_flag(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.write({"prompt": "a"})
    other = tmp_path / "other.jsonl"
    for flag in ("-o", "--output"):
        assert main(["batch", str(folder.input), flag, str(other), "--overwrite", *SHORT]) == 0
        assert len(other.read_text().splitlines()) == 1
    capsys.readouterr()
    for arguments in ([], [str(folder.output), "-o", str(other)]):
        assert main(["batch", str(folder.input), *arguments, *SHORT]) == 2
        assert "set the output file once: as OUTPUT, or with -o" in capsys.readouterr().err
