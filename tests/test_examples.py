"""The scripts in examples/ run, print what their docstrings say, and are short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"), key=lambda path: path.name)
MAX_LINES = 60
SLOW = {"openai_client", "sweep_temperature", "torch_decode_loop", "watermark_text"}  # those of more than two seconds
OUTPUT = {
    "async_cancellation": r"story 1: .{20,}\nstory 2: .{20,}\nfirst sentence: '[^.]+\.'\ncancelled: CancelledError",
    "beam_search": r"^beams.*(\n +-\d\.\d{3}  ' .+'){4}\ndiverse beams(\n +-\d\.\d{3}  ' .+'){4}$",
    "classify": r"lost her favourite toy.* -> sad 0\.9.*\nTim got a new ball.* -> happy 0\.\d+, sad 0\.\d+, scared 0",
    "compare_presets": r"vllm .* 4 tokens: temperature min_p top_k .*\nhf .* 5 tokens: .*\nllama.cpp .* 3 tokens",
    "custom_stage": r"before: \[0\.5 .*\]\nafter:  \[0\.625 0\.375 0\. +0\. +\]\ntext: +\S",
    "first_story": r"(?s)seed 7, length: Once upon .*seed 8, .*seed 9, .*5 prompt tokens, 120 generated tokens",
    "json_from_pydantic": r"^(stop Hero\(name='[A-Z][a-z]+', animal='(fox|owl|bear)', age=\d+, friends=.*\)\n?){3}$",
    "openai_client": r"^Once upon .*\nnucleate-tiny: (yes|no), \d tokens$",
    "regex_choice_grammar": r"regex .*\(stop\)\nchoice +(happy|sad|very tired)  .*\ngrammar +[0-9()+]+  \(stop\)",
    "reproducible_batches": r"^.+(\nbatch of \d, row \d: the same text){3}$",
    "sample_logits": r"tokens: \[2 0\]\nflat: +\[0\.379 .*\nsharp: +\[0\.735 0\.265 0\. .*\nflat: +\[0\.(3[5-9]|40)",
    "score_text": r"named Lily\.\n  perplexity 1\.4;.*\n.* tax return\.\n  perplexity 16\.0; .*: ' return'",
    "speculative_decoding": r"none +48 steps.*\nngram +4[0-7] steps, the same text.*\ndraft +[12]\d steps, the same",
    "streaming_chat": r"(?s)\[stop, stop reason '\. One day'\].*\[length, stop reason None\]",
    "sweep_temperature": r"^T +distinct_2, all tokens .*(\n +\d\.\d( +-?\d\.\d{3} \(-?\d.\d+ to -?\d.\d+\)){4}){5}$",
    "tool_calls": r"reason: tool_calls\ncount_animals\(\{.*\}\) -> (\d+) animals of .*\nanswer: \S",
    "torch_decode_loop": r"^(tokens \[\d+, \d+\], logprob .*\n){8}row 0: (\(.*\))\nrow 1: (?!\2)\(.*\)$",
    "trace_token": r"logits +4096 (?s:.*)TopP\(0\.9\) +4 .* reached 0\.911\n(?s:.*)sampled: ' big'\n.*\n.*: 0\.089$",
    "watermark_text": r"\nmarked +p = \S+e-0[4-9] .*\nmarked, wrong key +p = \S+e-0[12] .*\nunmarked +p = \S+e-0[12] ",
}
"""A pattern of the output of each script."""


def test_every_script_has_an_expected_output() -> None:
    assert [script.stem for script in SCRIPTS] == sorted(OUTPUT)
    assert len(SCRIPTS) >= 10


def test_the_index_lists_everything() -> None:
    index = (FOLDER / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)]+)\)", index)
    files = [*SCRIPTS, *FOLDER.glob("notebooks/*.ipynb"), *FOLDER.glob("notebooks/*.py")]
    assert {link for link in links if link.endswith((".py", ".ipynb"))} == {
        str(path.relative_to(FOLDER)) for path in files
    }
    assert len(links) == len({*links})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_short_and_documented(script: Path) -> None:
    source = script.read_text("utf-8")
    assert len(source.splitlines()) <= MAX_LINES
    text = ast.get_docstring(ast.parse(source)) or ""
    assert text.splitlines()[0].endswith(".")
    assert "Prints " in text.replace("\n", " ")


@pytest.mark.parametrize(
    "script",
    [pytest.param(one, marks=[pytest.mark.slow] if one.stem in SLOW else []) for one in SCRIPTS],
    ids=[script.stem for script in SCRIPTS],
)
@pytest.mark.fast_cases(0)
def test_a_script_prints_what_it_shows(script: Path, tmp_path: Path) -> None:
    if script.stem == "torch_decode_loop":
        pytest.importorskip("transformers", reason="the script samples from a model of Transformers")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    messages = [line for line in done.stderr.splitlines() if not line.startswith("compiling the CPU kernels")]
    assert messages == []
    assert re.search(OUTPUT[script.stem], done.stdout.strip()), done.stdout
    assert [*tmp_path.iterdir()] == []
