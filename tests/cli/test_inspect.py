"""``nucleate inspect``: the tables agree with the trace; with --web, the page is served."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Any

import pytest
from server_process import wait_until

import nucleate as nc
from nucleate.cli.inspect import settings_hash
from nucleate.cli.inspect_tables import bar, percent
from nucleate.cli.main import main
from nucleate.cli.terminal import Terminal, text_width
from nucleate.tokenization.tokenizer import token_text

ROOT = Path(__file__).parents[2]
PROMPT = "The cat sat on the"
OWN = ("--seed", "3", "--temperature", "0.8", "--top-k", "5", "--top-p", "0.9")


def shown(run: Any, *arguments: str, status: int = 0) -> str:
    return str(run("inspect", *arguments, status=status).out)


@pytest.mark.slow
def test_inspect_is_a_command() -> None:
    command = [sys.executable, "-m", "nucleate", "inspect", PROMPT, "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:5] == [
        '"<|endoftext|>" "The" " cat" " sat" " on" " the"   (6 tokens, seed 1)',
        "flags                   seed 1",
        "generation_config.json  temperature 0.7, top_k 50, top_p 0.9",
        "defaults                order canonical, draw gumbel",
        "",
    ]
    assert done.stdout.splitlines()[5].split("  ")[0] == "stage"


def test_the_tables_show_the_trace(llm: nc.LLM, run: Any) -> None:
    text = shown(run, PROMPT, *OWN, "--top", "7")
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


def test_a_sampled_token_outside_the_list_is_added(run: Any) -> None:
    text = shown(run, PROMPT, "--seed", "1", "--temperature", "5", "--top-k", "0", "--top-p", "1", "--top", "3")
    tokens = text.strip().split("\n\n")[2].splitlines()[1:]
    assert len(tokens) == 4
    assert tokens[3].endswith("<- sampled")


def test_json_names_every_token_it_mentions(llm: nc.LLM, run: Any) -> None:
    page = json.loads(shown(run, "héé🦊", *OWN, "--json", "--top", "4"), parse_constant=pytest.fail)
    assert page["prompt"] == "héé🦊"
    assert page["params"]["top_k"] == 5
    ids = {*page["prompt_token_ids"], page["token_id"]}
    for step in page["steps"]:
        assert len(step["top"]) <= 4
        ids |= {*step["touched"], *step["removed"], *(token for token, _, _ in step["top"])}
    assert page["tokens"].keys() == {str(token) for token in ids}
    assert page["tokens"]["0"] == "<|endoftext|>"
    assert "<0xC3>" in page["tokens"].values()  # half of an é, which is not a character


def test_a_token_is_shown_on_one_line(llm: nc.LLM, run: Any) -> None:
    assert [token_text(llm.tokenizer, token) for token in llm.encode("a\n")[-1:]] == ["\n"]
    text = shown(run, "a\nb", "--seed", "1")
    assert r'"\n"' in text.splitlines()[0]


def test_a_long_prompt_shows_its_end(run: Any) -> None:
    first = shown(run, "one two three four five six seven eight nine ten", "--seed", "1").splitlines()[0]
    assert first.startswith('... "')
    assert '" ten"' in first


def test_an_empty_distribution_is_one_line_and_an_exit_status(run: Any) -> None:
    arguments = ["inspect", "x", "--allowed-token-ids", "5", "--suppress-token-ids", "5", "--seed", "1"]
    done = run(*arguments, status=1)
    assert done.err == "nucleate: no token can be sampled: every token is at -inf after allowed\n"
    assert re.search(r"^Suppress\(\(5,\)\) +4095 ", done.out, re.MULTILINE)
    assert json.loads(run(*arguments, "--json", status=1).out)["error"] == "every token is at -inf after allowed"


def test_a_rare_token_is_not_shown_with_probability_0() -> None:
    expected = {
        1.0: "100.00%",
        0.123456: " 12.35%",
        0.0001: "  0.01%",
        1e-5: " 1e-03%",
        1e-30: " 1e-28%",
        0.0: "  0.00%",
    }
    assert {p: percent(p) for p in expected} == expected


def test_the_length_of_a_bar_is_proportional_to_the_probability() -> None:
    unicode, ascii_only = Terminal(), Terminal(encoding="ascii")
    parts = (1.0, 0.5, 0.25 + 1 / 48, 0.0)
    assert [bar(part, unicode) for part in parts] == ["█" * 24, "█" * 12, "█" * 6 + "▌", "▏"]
    assert [bar(part, unicode, 8) for part in (1.0, 0.5, 0.0)] == ["█" * 8, "█" * 4, "▏"]
    assert [bar(part, ascii_only) for part in (1.0, 0.5, 0.0)] == ["#" * 24, "#" * 12, "#"]


RICH = (*OWN, "--min-p", "0.01", "--repetition-penalty", "1.2", "--frequency-penalty", "0.5", "--dry-multiplier", "0.8")


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 120, 160])
@pytest.mark.parametrize("rest", [(), ("--steps", "2"), ("--steps", "7")], ids=" ".join)
def test_lines_fit_the_terminal_and_break_between_words(
    columns: int, rest: tuple[str, ...], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shown(run, PROMPT, *RICH, *rest)
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(run, PROMPT, *RICH, *rest)
    if columns >= 60:
        assert max(map(text_width, text.splitlines())) <= columns
    cut = {word for word in text.split() if "..." in word} | {*re.findall("[█▏▎▍▌▋▊▉]+", text)}
    assert {*text.split()} - cut <= {*whole.split()} | {"(nats)"}, "a word was broken"
    assert text.count("<- sampled") == whole.count("<- sampled")


@pytest.mark.parametrize(
    ("columns", "headers"),
    [
        (60, [["entropy"], ["stage", "left", "removed", "(nats)", "best", "p"]]),
        (80, [["stage", "left", "touched", "removed", "entropy", "(nats)", "best", "p"]]),
        (110, [["entropy"], ["stage", "left", "removed", "(nats)", "best", "p", "why"]]),
        (160, [["stage", "left", "touched", "removed", "entropy", "(nats)", "best", "p", "why"]]),
    ],
)
def test_the_table_of_stages_has_the_columns_that_fit(
    columns: int, headers: list[list[str]], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = shown(run, PROMPT, *OWN).split("\n\n")[1].splitlines()
    assert [line.split() for line in table[: len(headers)]] == headers
    rows = table[len(headers) :]
    if columns < 100:  # the reason is below each row
        assert [line[:2] == "  " for line in rows] == [False, True] * 5
        assert rows[5].startswith("  target 5 tokens, kept probability ")
    else:  # beside it, with a hanging indent
        indent = table[len(headers) - 1].index("why")
        assert all(line[indent - 2 : indent] == "  " for line in rows)
        assert {line[indent : indent + 3].isspace() for line in rows if line[0] == " "} <= {False}


@pytest.mark.slow
def test_colors_on_request_only(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (PROMPT, "--seed", "1", "--top-k", "3", "--steps", "2")
    plain = shown(run, *arguments)
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    colored = shown(run, *arguments)
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain
    assert colored.count("\x1b[1mTemperature\x1b[0m(0.7)") == 2
    assert re.search(r"\x1b\[2m.*removed: top_k\x1b\[0m\n", colored)
    assert re.search(r"\x1b\[1;32m.*\x1b\[36m█+[▏▎▍▌▋▊▉]?\x1b\[0m\x1b\[1;32m <- sampled\x1b\[0m\n", colored)
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(run, *arguments) == plain
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in shown(run, *arguments, "--json")


@pytest.mark.slow
def test_tokens_of_any_script_stay_aligned(llm: nc.LLM, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {300: "日本語", 301: "🦊", 302: "e\u0301", 303: "\x9b31m\u202e", 304: "한국", 305: "x" * 200, 306: 'a"\\\n'}
    decode = type(llm.tokenizer).decode

    def decoded(self: object, ids: list[int], **options: bool) -> str:
        return texts.get(ids[0]) or decode(llm.tokenizer, ids, **options) if len(ids) == 1 else "text"

    monkeypatch.setattr(type(llm.tokenizer), "decode", decoded)
    bias = ",".join(f"{token}={100 - token / 10:g}" for token in texts)
    arguments = (PROMPT, "--logit-bias", bias, "--temperature", "9", "--top-p", "1", "--seed", "1")
    for columns in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = shown(run, *arguments)
        assert "\x9b" not in text
        assert "\u202e" not in text
        assert ('"\\u009b31m\\u202e"' if columns > 60 else '"\\u009b31m"...') in text
        assert max(map(text_width, text.splitlines())) <= columns
        listed = text.split("\n\n")[2].splitlines()[1:]
        assert len({text_width(line[: line.index("%")]) for line in listed}) == 1, text
        assert any('"日本語"' in line for line in listed)
        assert any('xxx"...' in line for line in listed)


@pytest.mark.slow
def test_an_output_without_unicode(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-m", "nucleate", "inspect", "é 日 ", "--seed", "1", "--logit-bias", "5=20"]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("ascii")
    assert "####" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_origin_of_each_parameter(llm: nc.LLM, run: Any) -> None:
    page = json.loads(shown(run, PROMPT, "--top-p", "0.8", "--seed", "1", "--json"))
    own = dict.fromkeys(("temperature", "top_k"), "generation_config")
    assert page["origins"] == {"top_p": "flag", "seed": "flag", **own}
    assert page["origins"].keys() == page["params"].keys()
    assert page["entropy_unit"] == "nats"
    page = json.loads(shown(run, PROMPT, "--generation-config", "none", "--json"))
    assert page["origins"] == {}
    text = shown(run, PROMPT, "--generation-config", "none")
    assert text.splitlines()[1] == "defaults  order canonical, draw gumbel, seed random"


def test_a_recommended_parameter_that_gives_way_is_a_default(run: Any) -> None:
    arguments = (PROMPT, "--mirostat-tau", "3", "--seed", "1")
    page = json.loads(shown(run, *arguments, "--json"))
    assert (page["origins"]["mirostat_tau"], page["origins"]["top_k"]) == ("flag", "default")
    rows = shown(run, *arguments).splitlines()[1:4]
    assert rows == [
        "flags                   mirostat_tau 3.0, seed 1",
        "generation_config.json  temperature 0.7",
        "defaults                top_k 0, top_p 1.0, order canonical, draw gumbel",
    ]


@pytest.mark.slow
def test_a_pipeline_and_long_values_are_shown_on_few_lines(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    pipeline = "temperature(0.8) | top_k(20) | top_p(0.9) | min_p(0.05) | gumbel()"
    head = shown(run, PROMPT, "--pipeline", pipeline, "--seed", "1").split("\n\n")[0].splitlines()
    assert head[1:] == [
        "flags  seed 1, pipeline Temperature(0.8) | TopK(20) | TopP(0.9) | MinP(0.05) |",
        "       Gu...",
    ]
    head = shown(run, PROMPT, "--guidance-scale", "2", "--negative-prompt", 'A "sad" dog', "--seed", "1").splitlines()
    assert head[1] == 'flags                   guidance_scale 2.0, negative_prompt "A \\"sad\\" dog",'
    banned = ",".join(map(str, range(300)))
    head = shown(run, PROMPT, "--suppress-token-ids", banned, "--seed", "1").split("\n\n")[0]
    assert len(head.splitlines()) <= 6
    assert "..., " in head


def test_the_output_in_the_docs_is_real(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    [block] = re.findall(r"```text\n\$ nucleate inspect (.*?)```", page, re.DOTALL)
    command, _, output = block.partition("\n")
    monkeypatch.setenv("COLUMNS", str(max(map(len, output.splitlines()))))
    text = shown(run, *shlex.split(command))
    number = r"\d+\.\d+"
    assert [re.sub(f"{number}|[█▏▎▍▌▋▊▉]+", "#", line) for line in output.splitlines()] == [
        re.sub(f"{number}|[█▏▎▍▌▋▊▉]+", "#", line) for line in text.splitlines()
    ]
    found, expected = re.findall(number, text), re.findall(number, output)
    assert [*map(float, found)] == pytest.approx([*map(float, expected)], rel=2e-3, abs=1e-2)  # other BLAS


def test_the_hash_holds_prompt_and_parameters() -> None:
    hashed = settings_hash("Große 'Wörter' \U0001f98a", {"temperature": 0.5, "stop": ["x"]})
    text = hashed.removeprefix("#s=")
    assert re.fullmatch(r"[\w-]+", text)
    found = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert found == {"prompt": "Große 'Wörter' \U0001f98a", "params": {"temperature": 0.5, "stop": ["x"]}}
    assert settings_hash(None, {}) == ""


def test_wrong_parameters_are_found_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--web", "--temperature", "-1"]) == 2
    assert "temperature must be" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_is_served_until_ctrl_c() -> None:
    command = [sys.executable, "-m", "nucleate", "inspect", "--web", "--no-browser", "Tom saw", "--top-p", "0.9"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/inspector#s=[\w-]+", line)
            assert url is not None, line
            wait_until(lambda: page_of(url[0].partition("#")[0]), 120)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def page_of(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as page:
            return b"<script" in page.read()
    except OSError:
        return False
