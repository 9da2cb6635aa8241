"""Beam search on the command line: output and errors."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.cli.main import main

GENERATE = ("generate", "Once upon a time", "--num-beams", "4", "--max-tokens", "9")


def test_the_best_beam_is_printed(llm: nc.LLM, run: Any) -> None:
    out, err = run(*GENERATE)
    [found] = llm.beam_search("Once upon a time", num_beams=4, max_tokens=9)
    assert out == f"{found.text}\n"
    assert err.startswith("[9 tokens, ")
    assert err.endswith("4 beams]\n")


def test_several_beams_are_printed_with_their_scores(llm: nc.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--n", "2", "--echo", "--length-penalty", "0.5", "--early-stopping", "never", "--ignore-eos")
    assert main([*GENERATE, *more]) == 0
    params = dict(
        num_beams=4, max_tokens=9, length_penalty=0.5, early_stopping="never", ignore_eos=True, num_return_sequences=2
    )
    first, second = llm.beam_search("Once upon a time", **params)[0].outputs
    out = capsys.readouterr().out
    assert re.sub(r"-\d\.\d{4}", "SCORE", out) == (
        f"--- beam 1 of 2, score SCORE, length\nOnce upon a time{first.text}\n"
        f"\n--- beam 2 of 2, score SCORE, length\nOnce upon a time{second.text}\n"
    )
    scores = [float(score) for score in re.findall(r"-\d\.\d{4}", out)]
    assert scores == pytest.approx([first.score, second.score], abs=1e-3)


def test_json_has_all_fields(llm: nc.LLM, run: Any) -> None:
    more = ("--n", "3", "--json", "--num-beam-groups", "2", "--diversity-penalty", "1.5", "--logprobs", "1")
    printed = json.loads(run(*GENERATE, *more).out)
    params = dict(
        num_beams=4, max_tokens=9, num_beam_groups=2, diversity_penalty=1.5, num_return_sequences=3, logprobs=1
    )
    [found] = llm.beam_search("Once upon a time", **params)
    assert [beam["text"] for beam in printed["outputs"]] == [beam.text for beam in found.outputs]
    assert [beam["score"] for beam in printed["outputs"]] == pytest.approx(
        [beam.score for beam in found.outputs], abs=1e-4
    )
    assert [len(beam["logprobs"]) for beam in printed["outputs"]] == [len(beam.token_ids) for beam in found.outputs]
    assert printed["params"]["num_beam_groups"] == 2
    assert printed["usage"]["prompt_tokens"] == len(found.prompt_token_ids)


def test_structured_output(run: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    found = run("generate 'Tim had' --num-beams 3 --choice 'a dog' --choice 'a cat'").out
    assert found in ("a dog\n", "a cat\n")


def test_a_failed_search_is_a_failure(llm: nc.LLM, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nucleate.engine import beam_search

    def broken(logits_BV: np.ndarray) -> np.ndarray:
        raise beam_search.SearchError(0, "NaN at token 3")

    monkeypatch.setattr(beam_search, "logprobs", broken)
    assert "nucleate: beam search failed: invalid logits: NaN at token 3" in run(*GENERATE, status=1).err
    out, _ = run(*GENERATE, "--json", status=1)
    assert json.loads(out)["outputs"][0]["score"] is None
