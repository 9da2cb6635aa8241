"""``nucleate inspect --steps``: the tokens are those of ``generate``, and each is shown with its trace."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.cli.inspect import inspected
from nucleate.cli.main import main
from nucleate.models.loader import EMBEDDED

PROMPT = "The little dog found a"
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0},
    "greedy draw": {"draw": "greedy"},
    "categorical": {"draw": "categorical", "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3, "temperature": 1.0},
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "no_repeat_ngram_size": 2},
    "mirostat": {"mirostat_tau": 3.0, "repetition_penalty": 1.2},
    "mirostat v1": {"mirostat_v1_tau": 3.0},
    "adaptive-p": {"adaptive_p_target": 0.2},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "min_tokens": 4},
    "xtc, greedy draw": {"pipeline": "xtc(0.5, 0.05) | greedy()"},
    "another order": {"order": "llama.cpp", "min_p": 0.02, "frequency_penalty": 0.4, "mirostat_tau": 4.0},
    "guidance": {"guidance_scale": 1.5, "negative_prompt": "A sad story", "mirostat_tau": 3.0},
    "contrastive": {"contrastive_beta": 0.5},
    "regex": {"structured_outputs": nc.StructuredOutputs(regex="[0-9]{2} (dogs|cats)")},
    "regex, mirostat": {"structured_outputs": nc.StructuredOutputs(regex="[a-z ]+"), "mirostat_tau": 3.0},
    "choice": {"structured_outputs": nc.StructuredOutputs(choice=["happy", "sad"]), "frequency_penalty": 1.0},
    "pipeline": {"pipeline": "repetition(1.3) | temperature(0.9) | mirostat(3.0) | gumbel()"},
    "stop": {"stop": (".",), "max_tokens": 10},
    "stop token": {"logit_bias": {30: 8.0}, "stop_token_ids": (30,)},
}


@pytest.fixture(scope="module")
def both() -> nc.LLM:
    return nc.LLM(companion_model=EMBEDDED)


def printed(run: Any, *arguments: str, status: int = 0) -> str:
    return str(run("inspect", *arguments, status=status).out)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", CASES)
def test_the_tokens_are_those_of_generate(name: str, both: nc.LLM) -> None:
    values, steps = CASES[name], 9
    for seed in (1, 2, 3):
        params = both.default_params.override(**values, seed=seed)
        [completion] = both.generate(PROMPT, params.replace(max_tokens=min(steps, params.max_tokens or steps)))
        output = completion.outputs[0]
        tokens = [*inspected(both, both.encode(PROMPT), params, steps)]
        assert [token.trace.token_id for token in tokens] == [*output.token_ids]
        assert "".join(token.text for token in tokens) == output.text
        assert tokens[-1].finish == (output.finish_reason, output.stop_reason)
        for number, token in enumerate(tokens):
            assert token.trace.step == number
            assert token.trace.seed == output.seed == seed
            assert token.output_ids == tuple(output.token_ids[:number])
            assert (token.finish is None) == (token is not tokens[-1])


def test_without_a_seed_all_steps_share_a_random_one(llm: nc.LLM) -> None:
    first, second = ([*inspected(llm, llm.encode(PROMPT), llm.default_params, 3)] for _ in range(2))
    seeds = [{token.trace.seed for token in tokens} for tokens in (first, second)]
    assert [len(seed) for seed in seeds] == [1, 1]
    assert seeds[0] != seeds[1]
    again = [*inspected(llm, llm.encode(PROMPT), llm.default_params.replace(seed=seeds[0].pop()), 3)]
    assert [token.trace.token_id for token in again] == [token.trace.token_id for token in first]


def test_the_stages_that_are_shown_have_the_state_of_their_step(llm: nc.LLM) -> None:
    params = llm.default_params.override(mirostat_tau=3.0, seed=1)
    reprs = [repr(token.trace.steps[-2].stage) for token in inspected(llm, llm.encode(PROMPT), params, 3)]
    assert all(text.startswith("Mirostat(") for text in reprs)
    assert len({*reprs}) == 3


@pytest.mark.slow
def test_steps_end_with_the_output(llm: nc.LLM, run: Any) -> None:
    arguments = (PROMPT, "--logit-bias", "0=30", "--seed", "1", "--steps", "4")
    text = printed(run, *arguments)
    assert "step 1 of 4\n" in text
    assert "step 2" not in text
    assert text.endswith('\noutput  ""\nended after 1 of 4 tokens: end of sequence\n')
    text = printed(run, *arguments, "--ignore-eos")
    assert "step 4 of 4" in text
    assert "ended after" not in text
    text = printed(run, *arguments, "--ignore-eos", "--stop-token-ids", "0")
    assert text.endswith("ended after 1 of 4 tokens: stop token 0\n")
    text = printed(run, PROMPT, "--regex", "[0-9]", "--seed", "1", "--steps", "4")
    assert text.endswith("ended after 1 of 4 tokens: end of sequence\n")
    text = printed(run, "word " * 1019 + "word", "--seed", "1", "--steps", "4")
    assert text.endswith("ended after 2 of 4 tokens: max_tokens or the length of the context is reached\n")


def test_a_table_per_step_for_few_steps(llm: nc.LLM, run: Any) -> None:
    text = printed(run, PROMPT, "--seed", "1", "--steps", "3", "--top", "2")
    blocks = text.strip().split("\n\n")
    assert len(blocks) == 1 + 3 * 3 + 1
    tokens = [*inspected(llm, llm.encode(PROMPT), llm.default_params.replace(seed=1), 3)]
    names = [json.dumps(llm.tokenizer.decode([token.trace.token_id])) for token in tokens]
    assert blocks[1] == "step 1 of 3"
    assert blocks[4].endswith(f'" a" | {names[0]}')
    assert blocks[7].endswith(f'" a" | {names[0]} {names[1]}')
    for token, table in zip(tokens, blocks[2::3], strict=False):
        assert [line.rsplit("  ")[-1] for line in table.splitlines()[1:]] == [step.why for step in token.trace.steps]
    assert blocks[-1] == f"output  {json.dumps(llm.tokenizer.decode([token.trace.token_id for token in tokens]))}"


def test_a_row_per_step_for_many(llm: nc.LLM, run: Any) -> None:
    text = printed(run, PROMPT, "--seed", "1", "--top-k", "30", "--temperature", "1", "--steps", "8")
    _, table, end = text.strip().split("\n\n")
    head, *rows = table.splitlines()
    assert head.split() == ["step", "token", "before", "after", "entropy", "(nats)", "left", "removed", "by"]
    params = llm.default_params.override(seed=1, top_k=30, temperature=1)
    for row, token in zip(rows, inspected(llm, llm.encode(PROMPT), params, 8), strict=True):
        trace = token.trace
        assert row.startswith(f"{trace.step + 1:>4}  ")
        name = json.dumps(llm.tokenizer.decode([trace.token_id]))
        before, after = (trace.steps[at].probabilities[trace.token_id] for at in (0, -2))
        assert f"  {name} " in row
        assert f"{before:7.2%}  {after:7.2%}" in row
        assert f" {trace.steps[-2].entropy:.4f}  " in row
        assert f" {trace.steps[-2].left}  top_k 4066" in row
    assert end.startswith('output  "')


def test_rows_of_many_steps_keep_their_columns(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (PROMPT, "--seed", "2", "--temperature", "1.5", "--min-p", "0.05", "--steps", "12")
    for columns, names in ((60, "step token after left removed by"), (80, "step token after (nats) left removed by")):
        monkeypatch.setenv("COLUMNS", str(columns))
        table = printed(run, *arguments).split("\n\n")[1].splitlines()
        start = next(number for number, line in enumerate(table) if "removed by" in line)
        assert table[start].split() == names.split()
        column = table[start].index("removed by")
        assert all(line[column - 1] == " " and line[:column].strip()[-1:] != "," for line in table[start + 1 :])
        assert max(map(len, table)) <= columns


def test_json_of_several_steps(llm: nc.LLM, run: Any) -> None:
    rest = ("--seed", "5", "--temperature", "1", "--frequency-penalty", "0.5")
    page = json.loads(printed(run, PROMPT, *rest, "--json", "--steps", "4", "--top", "3"))
    output = json.loads(run("generate", PROMPT, *rest, "--json", "--max-tokens", "4").out)["outputs"][0]
    for name, expected in {"output_token_ids": "token_ids", **dict.fromkeys(("text", "finish_reason", "seed"))}.items():
        assert page[name] == output[expected or name]
    assert page["stop_reason"] is None
    assert [trace["token_id"] for trace in page["traces"]] == page["output_token_ids"]
    assert [trace["step"] for trace in page["traces"]] == [0, 1, 2, 3]
    single = json.loads(printed(run, PROMPT, *rest, "--json", "--top", "3"))
    assert page["traces"][0] == {name: single[name] for name in ("token_id", "error", "seed", "step", "steps")}
    assert {name: page[name] for name in ("prompt", "prompt_token_ids", "params", "origins", "entropy_unit")} == {
        name: single[name] for name in ("prompt", "prompt_token_ids", "params", "origins", "entropy_unit")
    }
    mentioned = {*page["prompt_token_ids"], *page["output_token_ids"]}
    for step in (step for trace in page["traces"] for step in trace["steps"]):
        mentioned |= {*step["touched"], *step["removed"], *(token for token, _, _ in step["top"])}
    assert {int(token) for token in page["tokens"]} == mentioned


@pytest.mark.slow
def test_a_later_step_without_a_token_is_an_error(run: Any) -> None:
    arguments = (PROMPT, "--allowed-token-ids", "376", "--no-repeat-ngram-size", "1", "--seed", "1")
    for steps in ("3", "6"):
        text = printed(run, *arguments, "--steps", steps, status=1)
        assert '" big"' in text
        assert text.endswith('output  " big"\n')
    page = json.loads(printed(run, *arguments, "--steps", "3", "--json", status=1))
    assert page["finish_reason"] == "error"
    assert page["output_token_ids"] == [376]
    assert page["traces"][1]["token_id"] is None
    assert page["traces"][1]["error"] == page["stop_reason"]


def test_invalid_logits_are_an_error(llm: nc.LLM, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        calls = 0

        def forward(self, token_ids: list[int]) -> Any:
            Context.calls += 1
            row = np.zeros(llm.model.vocab_size, np.float32)
            row[7] = np.nan if Context.calls == 2 else 9
            return row

    monkeypatch.setattr(type(llm.model), "begin", lambda self: Context())
    done = run("inspect", PROMPT, "--steps", "3", status=1)
    assert "step 1 of 3" in done.out
    assert done.err.startswith("nucleate: no token can be sampled: ")
    assert len(done.err.splitlines()) == 1
    assert main(["inspect", PROMPT, "--steps", "1", "--json"]) == 0


@pytest.mark.parametrize("steps", ["0", "-1", "2.5", "many", "9" * 5000])
def test_a_bad_number_of_steps(steps: str, run: Any) -> None:
    assert "--steps must be an integer >= 1" in run("inspect", PROMPT, f"--steps={steps}", status=2).err
