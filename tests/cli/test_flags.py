"""Flags of every type, on the command line and in a chat; logprobs in --json; the table of stages."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from typing import Any

import pytest

import nucleate as nc
from nucleate.cli import flags
from nucleate.cli.sampling_flags import add_sampling, read_values, set_parameter
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS
from nucleate.speculative.config import Speculation

GENERATE = ("generate", "Once upon a time", "--max-tokens", "6", "--seed", "1", "--json")


def params(*arguments: str) -> nc.SamplingParams:
    """The sampling parameters that a command line sets."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_sampling(parser)
    return nc.SamplingParams(**read_values(parser.parse_args([*arguments])))


def generate_json(run: Any, *arguments: str) -> dict[str, Any]:
    return dict(json.loads(run(*GENERATE, *arguments).out, parse_constant=pytest.fail))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--bad-words 'a b' --bad-words c,d", {"bad_words": ("a b", "c,d")}),
        ("--dry-sequence-breakers . --dry-sequence-breakers none", {"dry_sequence_breakers": (".", "none")}),
        ("--order llama.cpp", {"order": "llama.cpp"}),
        ("--order top_k,temperature", {"order": ("top_k", "temperature")}),
        ("--order 'top_k, min_p'", {"order": ("top_k", "min_p")}),
        ("--order top_k,", {"order": ("top_k",)}),
        ("--draw categorical", {"draw": "categorical"}),
        ("--logprobs 3 --logprobs-mode processed", {"logprobs": 3, "logprobs_mode": "processed"}),
        ("--logprobs none", {}),
        ("--top-h none", {}),
        ("--logprob-token-ids 5,7", {"logprob_token_ids": (5, 7)}),
        ("--penalty-last-n -1", {"penalty_last_n": -1}),
        ("--penalty-last-n none", {}),
        ("--xtc-exempt-token-ids 1,2 --xtc-probability 1", {"xtc_exempt_token_ids": (1, 2), "xtc_probability": 1}),
        ("--adaptive-p-target 0.4", {"adaptive_p_target": 0.4}),
        ("--p-less", {"p_less": True}),
    ],
)
def test_flags_of_every_type(arguments: str, expected: dict[str, Any]) -> None:
    assert params(*shlex.split(arguments)) == nc.SamplingParams(**expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--order vlm", "order must be one of canonical, vllm, hf, llama.cpp, akunu or a list of stage names"),
        ("--order top_k,topp", "unknown stage in order 'topp'; did you mean top_p"),
        ("--order top_k,,top_p", "order must be one of"),
        ("--order ,", "order must be one of"),
        ("--order top_k,top_k", "order has top_k twice"),
        ("--order top_k,greedy", "order does not name greedy"),
        ("--order top_k, --min-p 0.5", r"order \('top_k',\) does not include min_p"),
        ("--draw Greedy", "draw must be one of"),
        ("--logprobs -1", "logprobs must be an integer >= 0 or none, got '?-1"),
        ("--logprobs x", "logprobs must be an integer >= 0 or none, got 'x'"),
        ("--logprobs-mode cooked", "logprobs_mode must be one of raw, processed, got 'cooked'"),
        ("--bad-words ''", "bad_words must be a list of non-empty strings"),
    ],
)
def test_wrong_values_are_errors_that_name_the_field(arguments: str, words: str) -> None:
    for read in (params, chat_params):
        with pytest.raises(ParameterError, match=words):
            read(*shlex.split(arguments))


def chat_params(*arguments: str) -> nc.SamplingParams:
    """The sampling parameters that /set commands set."""
    made = nc.SamplingParams()
    for flag, value in zip(arguments[::2], arguments[1::2], strict=True):
        made = set_parameter(made, flag.removeprefix("--"), value)
    return made


def test_every_sampling_parameter_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_sampling(parser)
    names = {action.dest.removeprefix("param_") for action in parser._actions}
    assert FIELDS.keys() - {"structured_outputs"} <= names  # it has several flags


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("bad_words", "once upon", ("once upon",)),
        ("bad-words", "none", ("none",)),
        ("dry_sequence_breakers", ". ", (". ",)),
        ("order", "hf", "hf"),
        ("order", "temperature,top_k", ("temperature", "top_k")),
        ("draw", "greedy", "greedy"),
        ("logprobs", "2", 2),
        ("logprobs", "none", None),
        ("logprobs-mode", "processed", "processed"),
        ("p_less", "on", True),
        ("xtc_exempt_token_ids", "3,4", (3, 4)),
    ],
)
def test_set_reads_values_of_every_type(name: str, text: str, value: object) -> None:
    assert getattr(set_parameter(nc.SamplingParams(), name, text), name.replace("-", "_")) == value


# ---- --json


def test_json_has_logprobs_as_objects(run: Any) -> None:
    printed = generate_json(run, "--logprobs", "2", "--logprob-token-ids", "16,5", "--n", "2")
    for output in printed["outputs"]:
        assert len(output["logprobs"]) == len(output["token_ids"]) == 6
        for token, step in zip(output["token_ids"], output["logprobs"], strict=True):
            assert step.keys() == {"chosen", "top", "requested"}
            assert step["chosen"].keys() == {"token_id", "logprob", "rank"}
            assert step["chosen"]["token_id"] == token
            assert [one["rank"] for one in step["top"]] == [1, 2]
            assert [one["token_id"] for one in step["requested"]] == [16, 5]
        total = math.fsum(step["chosen"]["logprob"] for step in output["logprobs"])
        assert output["cumulative_logprob"] == pytest.approx(total)


def test_json_has_null_for_the_logprob_of_a_masked_token(run: Any) -> None:
    printed = generate_json(
        run, "--logprobs", "3", "--logprobs-mode", "processed", "--top-k", "2", "--logprob-token-ids", "5"
    )
    steps = printed["outputs"][0]["logprobs"]
    assert [step["requested"][0] for step in steps] == [{"token_id": 5, "logprob": None, "rank": None}] * 6
    assert all(1 <= len(step["top"]) <= 2 for step in steps)


def test_json_has_prompt_logprobs_as_objects(run: Any) -> None:
    printed = generate_json(run, "--prompt-logprobs", "1")
    first, *others = printed["prompt_logprobs"]
    assert first is None
    assert [step["chosen"]["token_id"] for step in others] == printed["prompt_token_ids"][1:]


def test_json_has_null_without_logprobs(run: Any) -> None:
    printed = generate_json(run)
    [output] = printed["outputs"]
    assert (output["logprobs"], output["cumulative_logprob"], printed["prompt_logprobs"]) == (None, None, None)
    assert output.keys() == {
        *("index", "text", "token_ids", "finish_reason", "stop_reason", "seed", "logprobs", "cumulative_logprob")
    }
    assert printed["params"] == {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 1, "max_tokens": 6}


@pytest.mark.parametrize(
    "rest",
    [
        ("--logit-bias", "300=100"),
        ("--allowed-token-ids", "300,301"),
        ("--stop-regex", "[xyz]"),
        ("--order", "temperature,top_p,top_k,bad_words", "--bad-words", "the"),
        ("--dry-multiplier", "0.8", "--dry-sequence-breakers", "a"),
    ],
    ids=" ".join,
)
def test_flags_reach_the_output_and_it_can_be_reproduced(rest: tuple[str, ...], run: Any) -> None:
    first = generate_json(run, *rest)
    assert rest[0][2:].replace("-", "_") in first["params"]
    assert generate_json(run, *rest) == first


# ---- nucleate stages


def test_the_table_of_stages_is_readable(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    for columns in ("60", "120", "400"):  # a width below 80 becomes 80
        monkeypatch.setenv("COLUMNS", columns)
        lines = run("stages").out.splitlines()
        assert max(map(len, lines)) <= max(80, int(columns))
        assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(STAGES)
    for name in FIELDS:
        if any(p.name == name for kind in STAGES.values() for p in kind.parameters.values()):
            assert any(line.startswith(f"  {name} ") for line in lines)
    [top_p] = [line for line in lines if line.startswith("  top_p ")]
    assert top_p.endswith("[a number >= 0 and <= 1; default 1]")
    assert any(line.endswith("[true or false; default false]") for line in lines)
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("  penalty_last_n")][1:] == [
        "same as for repetition"
    ] * 2


def test_the_stages_as_json(run: Any) -> None:
    rows = json.loads(run("stages --json").out, parse_constant=pytest.fail)
    assert [row["name"] for row in rows] == list(STAGES)
    shapes = ("combine", "shift", "scale", "floor", "prefix", "ceiling", "transform", "tap", "draw")
    assert {row["shape"] for row in rows} == {*shapes}
    for row in rows:
        for parameter in row["parameters"]:
            field = FIELDS[parameter["name"]]
            assert (parameter["help"], parameter["allowed"]) == (field.help, field.allowed)
            assert field.check(parameter["default"]) == field.default


def drafts(arguments: str) -> Any:
    """The speculation parameters that a command line sets."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_model(parser)
    return flags.model_options(parser.parse_args(arguments.split())).get("speculative_config")


def test_speculation_flags() -> None:
    assert drafts("") is None
    assert drafts("--speculative ngram") == Speculation("ngram")
    config = drafts("--speculative suffix --num-speculative-tokens 7 --speculative-acceptance-rule block")
    assert config == Speculation("suffix", 7, "block")
    config = drafts("--speculative medusa --num-speculative-tokens 16 --speculative-tree-width 3")
    assert config == Speculation("medusa", 16, tree_width=3)
    for arguments, message in {
        "--num-speculative-tokens 3": "--num-speculative-tokens needs --speculative",
        "--speculative-tree-width 3": "--speculative-tree-width needs --speculative",
        "--speculative ngram --speculative-tree-width 2": "tree_width must be 1 for the method 'ngram', got 2",
        "--speculative ngram --num-speculative-tokens 0": r"must be an integer in 1\.\.64, got 0",
    }.items():
        with pytest.raises(nc.ParameterError, match=message):
            drafts(arguments)
    with pytest.raises(argparse.ArgumentError, match="medusa"):
        drafts("--speculative unknown")


def test_speculation_does_not_change_the_output(run: Any) -> None:
    plain = generate_json(run, "--max-tokens", "30", "--stop", "girl")
    for name in ("ngram", "suffix"):
        assert generate_json(run, "--max-tokens", "30", "--stop", "girl", "--speculative", name) == plain


def test_flags_of_the_model_are_arguments_of_llm() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_model(parser)
    given = {"model": "a/b", "tokenizer": "c", "revision": "v1", "speculative": "draft", "speculative-model": "d/e"}
    arguments = [f"--{name}={value}" for name, value in given.items()]
    assert flags.model_options(parser.parse_args(arguments)) == {
        "model": "a/b",
        "tokenizer": "c",
        "revision": "v1",
        "companion_model": None,
        **dict.fromkeys(("tool_call_parser", "reasoning_parser", "device", "dtype", "runtime"), "auto"),
        "generation_config": "auto",
        "tensor_parallel": 1,
        "batch_invariant": False,
        "chat_template": None,
        "speculative_config": Speculation("draft", model="d/e"),
    }
    assert flags.model_options(parser.parse_args([]))["revision"] is None
    for flag in ("--tensor-parallel", "--tensor-parallel-size"):
        assert flags.model_options(parser.parse_args([flag, "2"]))["tensor_parallel"] == 2
