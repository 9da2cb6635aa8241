"""``nucleate inspect``: the tables agree with the trace."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import nucleate as nc
from nucleate.cli.inspect import bar, percent, token_text
from nucleate.cli.main import COMMANDS, main

PROMPT = "The cat sat on the"
OWN = ("--seed", "3", "--temperature", "0.8", "--top-k", "5", "--top-p", "0.9")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["inspect", *arguments]) == status
    return capsys.readouterr().out


def test_inspect_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nucleate", "inspect", PROMPT, "--seed", "1"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "inspect" in COMMANDS
    assert done.stdout.startswith('"<|endoftext|>" "The" " cat" " sat" " on" " the"   (6 tokens, seed 1)\n\nstage ')


def test_the_tables_show_the_trace(llm: nc.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, PROMPT, *OWN, "--top", "7")
    ids = llm.encode(PROMPT)
    params = nc.SamplingParams(seed=3, temperature=0.8, top_k=5, top_p=0.9)
    trace = nc.trace(llm.model.begin().forward(ids), params, prompt_ids=ids)
    head, stages, tokens = text.strip().split("\n\n")
    assert "seed 3" in head
    rows = stages.splitlines()[1:]
    assert [row.split()[0].split("(")[0] for row in rows] == ["logits", "Temperature", "TopK", "TopP", "Gumbel"]
    for row, step in zip(rows, trace.steps, strict=True):
        assert row.endswith(step.why)
        best = step.most_likely(1)[0]
        assert f'"{llm.tokenizer.decode([best])}"' in row
    listed = tokens.splitlines()
    assert listed[0].split() == ["id", "token", "before", "after"]
    surviving = trace.steps[-2].most_likely(7)
    assert [int(line.split()[0]) for line in listed[1 : 1 + len(surviving)]] == surviving
    assert len(listed) == 8
    assert [line for line in listed if line.endswith("<- sampled")] == [
        line for line in listed if line.split()[0] == str(trace.token_id)
    ]
    out = [line for line in listed[1:] if "removed: " in line]
    assert len(out) == 7 - len(surviving)
    assert {line.split("removed: ")[1] for line in out} <= {"top_k", "top_p"}


def test_generate_starts_with_the_token_that_was_inspected(llm: nc.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("1", "2", "3"):
        rest = ("--seed", seed, "--xtc-probability", "0.5", "--min-tokens", "3", "--repetition-penalty", "1.2")
        page = json.loads(shown(capsys, PROMPT, *rest, "--json"))
        assert main(["generate", PROMPT, *rest, "--json", "--max-tokens", "3"]) == 0
        output = json.loads(capsys.readouterr().out)
        assert page["token_id"] == output["outputs"][0]["token_ids"][0]
        assert page["seed"] == int(seed)


def test_a_sampled_token_outside_the_list_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, PROMPT, "--seed", "1", "--temperature", "5", "--top-k", "0", "--top-p", "1", "--top", "3")
    tokens = text.strip().split("\n\n")[2].splitlines()[1:]
    assert len(tokens) == 4
    assert tokens[3].endswith("<- sampled")


def test_json_names_every_token_it_mentions(llm: nc.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    page = json.loads(shown(capsys, "héé🦊", *OWN, "--json", "--top", "4"), parse_constant=pytest.fail)
    assert page["prompt"] == "héé🦊"
    assert page["params"]["top_k"] == 5
    ids = {*page["prompt_token_ids"], page["token_id"]}
    for step in page["steps"]:
        assert len(step["top"]) <= 4
        ids |= {*step["touched"], *step["removed"], *(token for token, _, _ in step["top"])}
    assert page["tokens"].keys() == {str(token) for token in ids}
    assert page["tokens"]["0"] == "<|endoftext|>"
    assert "<0xC3>" in page["tokens"].values()  # half of an é, which is not a character


def test_a_token_is_shown_on_one_line(llm: nc.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert [token_text(llm.tokenizer, token) for token in llm.encode("a\n")[-1:]] == ["\n"]
    text = shown(capsys, "a\nb", "--seed", "1")
    assert r'"\n"' in text.splitlines()[0]


def test_a_long_prompt_shows_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    first = shown(capsys, "one two three four five six seven eight nine ten", "--seed", "1").splitlines()[0]
    assert first.startswith('... "')
    assert '" ten"' in first


def test_an_empty_distribution_is_one_line_and_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", "x", "--allowed-token-ids", "5", "--suppress-token-ids", "5", "--seed", "1"]
    assert main(arguments) == 1
    done = capsys.readouterr()
    assert done.err == "nucleate: no token can be sampled: every token is at -inf after allowed\n"
    assert re.search(r"^Suppress\(\(5,\)\) +4095 ", done.out, re.MULTILINE)
    assert main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"] == "every token is at -inf after allowed"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["x", "--top", "0"], 2, "--top must be an integer >= 1, got '0'"),
        (["x", "--top", "ten"], 2, "--top must be an integer >= 1, got 'ten'"),
        (["x", "--top", "²"], 2, "--top must be an integer >= 1"),
        (["x", "--temperature", "-1"], 2, "temperature must be a number >= 0"),
        (["x", "--n", "2"], 2, "unrecognized arguments: --n 2"),
        (["x", "--stop", "a"], 2, "unrecognized arguments: --stop a"),
        (["x", "--logprobs", "2"], 2, "unrecognized arguments: --logprobs 2"),
        (["x", "--model", "/missing/model"], 1, "there is no model folder '/missing/model'"),
        (["x", "--logit-bias", "9999=1"], 2, "logit_bias names token 9999"),
        (["x", "--order", "vllm", "--top-a", "0.5"], 2, "order 'vllm' does not include top_a"),
        (["word " * 2000], 2, "the context holds 1024"),
        ([""], 2, "the prompt is empty"),
        (["x", "--file", "y"], 2, "cannot be combined"),
    ],
)
def test_bad_usage_is_one_line_and_exit_status_2(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", *arguments]) == status
    done = capsys.readouterr()
    assert done.out == ""
    assert message in done.err
    *usage, error = done.err.splitlines()
    assert error.startswith("nucleate: ")
    assert usage == ["usage: nucleate inspect [OPTIONS] [PROMPT]"] * ("unrecognized" in message)


def test_a_rare_token_is_not_shown_with_probability_0() -> None:
    assert [percent(p) for p in (1.0, 0.123456, 0.0001, 0.00001, 1e-30, 0.0)] == [
        "100.00%",
        " 12.35%",
        "  0.01%",
        " 1e-03%",
        " 1e-28%",
        "  0.00%",
    ]


def test_the_length_of_a_bar_is_proportional_to_the_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    class Out:
        encoding = "utf-8"

    monkeypatch.setattr(sys, "stdout", Out)
    assert [bar(part) for part in (1.0, 0.5, 0.25 + 1 / 48, 0.0)] == ["█" * 24, "█" * 12, "█" * 6 + "▌", "▏"]
    Out.encoding = "ascii"
    assert [bar(part) for part in (1.0, 0.5, 0.0)] == ["#" * 24, "#" * 12, "#"]
