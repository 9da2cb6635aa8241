"""nc.compare and ``nucleate compare``: outputs, scores, resuming, files, errors; metrics and their definitions."""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.cli.main import main
from nucleate.comparison import compare as module
from nucleate.comparison import comparison as metrics
from nucleate.comparison.compare import BUILT_IN, named, parse, read_prompts, score
from nucleate.comparison.comparison import METRICS, estimate
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stages import Logprobs, Temperature, TopK

PROMPTS = ["Once upon a time", "The dog"]
SETTINGS = {"cold": {"temperature": 0.3}, "warm": "temperature=1.5 top_k=0", "own": (TopK(5), Temperature(2.0))}


@pytest.fixture(scope="module")
def found(llm: nc.LLM) -> nc.Comparison:
    return nc.compare(llm, SETTINGS, PROMPTS, seeds=[3, 5], max_tokens=6)


def test_the_outputs_are_those_of_generate(llm: nc.LLM, found: nc.Comparison) -> None:
    assert len(found.results) == 12
    for one in found.results:
        values: dict[str, Any] = {"cold": {"temperature": 0.3}, "warm": {"temperature": 1.5, "top_k": 0}}.get(
            one.setting, {"pipeline": SETTINGS["own"]}
        )
        [expected] = llm.generate(PROMPTS[one.prompt], seed=one.seed, max_tokens=6, **values)[0].outputs
        assert (one.token_ids, one.text, one.finish_reason) == (expected.token_ids, expected.text, "length")


def test_scores_are_of_the_unmodified_model(llm: nc.LLM, found: nc.Comparison) -> None:
    for one in found.results:
        prompt, params = llm.encode(PROMPTS[one.prompt]), {"temperature": 1, "top_k": 0, "top_p": 1, "max_tokens": 1}
        given = nc.SamplingParams(prompt_logprobs=0, seed=1, **params)
        steps = llm.generate([[*prompt, *one.token_ids]], given)[0].prompt_logprobs or ()
        chosen = [step.chosen.logprob for step in steps[len(prompt) :] if step]
        assert one.log_likelihood == pytest.approx(np.mean(chosen), abs=1e-4)
    [first] = [one for one in found.results if (one.setting, one.prompt, one.seed) == ("warm", 0, 3)]
    ids, entropies = llm.encode(PROMPTS[0]), []
    for i in range(6):
        logits = llm.model.begin().forward([*ids, *first.token_ids[:i]])
        p = nc.probabilities(logits[None], nc.SamplingParams())[0]
        entropies.append(-(p[p > 0] * np.log(p[p > 0])).sum())
    assert score(llm.model, ids, first.token_ids).entropy == pytest.approx(np.mean(entropies), abs=1e-4)
    assert first.entropy == pytest.approx(np.mean(entropies), abs=1e-4)
    assert found.estimates["cold"]["sampled_entropy"].mean < found.estimates["warm"]["sampled_entropy"].mean


def test_the_table_and_the_csv_have_every_setting_and_metric(found: nc.Comparison, tmp_path: Path) -> None:
    text = str(found)
    assert all(name in text for name in (*SETTINGS, *METRICS))
    assert repr(found) == text
    found.to_csv(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["setting"] for row in rows] == [*SETTINGS]
    for row in rows:
        mean, low, high = (float(row[f"distinct_2{end}"]) for end in ("", "_low", "_high"))
        assert 0 <= low <= mean <= high <= 1
        assert row["outputs"] == "4"
    assert found.frontier() == {row["setting"] for row in rows if row["on_curve"] == "True"}


def test_the_curve_has_the_settings_that_none_beats(found: nc.Comparison) -> None:
    points = {n: (own["log_likelihood"].mean, own["distinct_2"].mean) for n, own in found.estimates.items()}
    beaten = {n for n, (x, y) in points.items() for a, b in points.values() if a >= x and b >= y and (a, b) != (x, y)}
    assert found.frontier() == points.keys() - beaten
    with pytest.raises(ParameterError, match="unknown metric 'distinct_5'"):
        nc.Comparison(found.estimates, found.results, "distinct_5")


def same(one: nc.Comparison, other: nc.Comparison) -> bool:
    """Whether the tokens are equal, and the metrics nearly: logits depend on the batch in their last bits."""
    assert [result.token_ids for result in one.results] == [result.token_ids for result in other.results]
    return all(
        values == pytest.approx(other.estimates[name][metric], abs=1e-4, nan_ok=True)
        for name, own in one.estimates.items()
        for metric, values in own.items()
    )


def test_an_interrupted_comparison_continues(
    llm: nc.LLM, found: nc.Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = tmp_path / "r.jsonl", {"seeds": [3, 5], "max_tokens": 6}
    monkeypatch.setattr(module, "BATCH", 5)
    original, calls = llm.generate, []

    def generate(prompts: Any, params: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(prompts, params)

    monkeypatch.setattr(llm, "generate", generate)
    with pytest.raises(KeyboardInterrupt):
        nc.compare(llm, SETTINGS, PROMPTS, output=path, **options)
    with path.open("a") as file:
        file.write('{"setting": "cold", "pro')  # cut off
    assert same(nc.compare(llm, SETTINGS, PROMPTS, output=path, **options), found)
    assert calls == [5, 5, 5, 2]
    again = nc.compare(llm, SETTINGS, PROMPTS, output=path, **options)
    assert same(again, found)
    assert len(calls) == 4
    nc.compare(llm, {**SETTINGS, "more": "top_k=3"}, PROMPTS, output=path, seeds=[3], max_tokens=6)
    assert calls[4:] == [2]
    nc.compare(llm, {"more": "top_k=3"}, PROMPTS, output=path, seeds=2, max_tokens=6)  # fewer settings, other seeds
    assert calls[5:] == [4]


@pytest.mark.parametrize(
    ("settings", "prompts", "tokens", "message"),
    [
        ({"cold": "temperature=0.4"}, PROMPTS, 6, "setting 'cold' was .*0.3.* is now .*0.4"),
        ({"cold": "temperature=0.3"}, PROMPTS, 7, "setting 'cold' was"),
        ({"cold": "temperature=0.3"}, PROMPTS[:1], 6, "prompts was"),
    ],
)
def test_changed_settings_are_detected(
    llm: nc.LLM, tmp_path: Path, settings: Any, prompts: Any, tokens: int, message: str
) -> None:
    path = tmp_path / "r.jsonl"
    nc.compare(llm, {"cold": "temperature=0.3"}, PROMPTS, seeds=1, max_tokens=6, output=path)
    with pytest.raises(ParameterError, match=message):
        nc.compare(llm, settings, prompts, seeds=1, max_tokens=tokens, output=path)
    path.write_text('{"a": 1}\n')
    with pytest.raises(ParameterError, match="is not a file of results"):
        nc.compare(llm, settings, prompts, seeds=1, output=path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "settings is empty"),
        ("temperature=1", "settings must be a mapping"),
        ({"a": "temperature"}, "setting 'a': must be NAME=VALUE words"),
        ({"a": "temprature=1"}, "setting 'a': .*did you mean temperature"),
        ({"a": "temperature=-1"}, "setting 'a': temperature must be"),
        ({"a": 5}, "setting 'a': must be an object of fields"),
        ({"a": "n=2"}, "setting 'a': n cannot be set"),
        ({"a": {"seed": 1}}, "setting 'a': seed cannot be set"),
        (["a=1", "a=1"], "has 'a=1' twice"),
        (["top_k=1 top_k=2"], "has top_k twice"),
        (["stop='a"], "cannot be read"),
    ],
    ids=str,
)
def test_settings_with_an_error_name_it(llm: nc.LLM, settings: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        nc.compare(llm, settings, PROMPTS)


def test_settings_as_text() -> None:
    given = ["warm: top_k=5", "top_k=1", "stop=a:b"]
    assert named(given) == {"warm": " top_k=5", "top_k=1": "top_k=1", "stop=a:b": "stop=a:b"}
    text = """temperature=0.5 order=llama.cpp stop='["a b"]' bad_words=[] pipeline='top_k(3) | greedy' p_less=true"""
    expected = {"temperature": 0.5, "order": "llama.cpp", "stop": ["a b"], "bad_words": [], "p_less": True}
    assert parse(text) == {**expected, "pipeline": "top_k(3) | greedy"}


@pytest.mark.parametrize(("seeds", "prompts"), [(0, PROMPTS), ([1, 1], PROMPTS), ([-1], PROMPTS), (1, []), (1, [""])])
def test_wrong_seeds_and_prompts_are_errors(llm: nc.LLM, seeds: Any, prompts: Any) -> None:
    with pytest.raises(ParameterError, match=r"seeds must be|prompts must be"):
        nc.compare(llm, ["top_k=1"], prompts, seeds=seeds)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text('plain text\n\n"a JSON string"\n{"prompt": "an object"}\n"Hello," he said.\n')
    assert read_prompts(path) == ["plain text", "a JSON string", "an object", '"Hello," he said.']
    path.write_text('ok\n{"text": "a"}\n')
    with pytest.raises(ParameterError, match="line 2 must have the field prompt"):
        read_prompts(path)
    assert len(BUILT_IN) == len({*BUILT_IN})


def test_outputs_that_end_at_once_and_pipelines_with_logprobs(llm: nc.LLM) -> None:
    end = min(llm.tokenizer.eos_token_ids)
    settings = {"ends": {"logit_bias": {end: 1000.0}}, "taps": (Temperature(0.5), Logprobs(1))}
    found = nc.compare(llm, settings, PROMPTS, seeds=2, max_tokens=4)
    assert math.isnan(found.estimates["taps"]["sampled_entropy"].mean)
    assert found.estimates["taps"]["entropy"].mean > 0
    assert "-" in str(found)


def test_a_pipeline_stage_that_fails_is_an_error_of_its_setting(llm: nc.LLM) -> None:
    settings = {"none": {"allowed_token_ids": []}}
    with pytest.raises(ParameterError, match="setting 'none': prompt 0, seed 0"):
        nc.compare(llm, settings, PROMPTS, seeds=1, max_tokens=4)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"cold": {"temperature": 0.3}, "warm": "temperature=1.5"}))
    shared = ["compare", "--settings", str(tmp_path / "s.json"), "--prompt", "The dog", "--seeds", "2"]
    arguments = [*shared, "--max-tokens", "4", "-o", str(tmp_path / "r.jsonl")]
    assert main([*arguments, "--setting", "plain: top_k=0", "--csv", str(tmp_path / "a.csv")]) == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["cold", "warm", "plain"]
    assert (tmp_path / "a.csv").is_file()
    assert main([*arguments, "--json", "--y", "entropy"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["setting"] for row in rows] == ["cold", "warm"]
    assert rows[0]["distinct_2_low"] is None  # one prompt
    assert main(["compare"]) == main([*arguments, "--setting", "cold: top_k=1"]) == main([*arguments, "--x", "a"]) == 2
    assert "nothing to compare" in capsys.readouterr().err


def test_a_plot_needs_matplotlib_and_a_known_type(found: nc.Comparison, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"ends with \.png, \.svg, \.pdf, got .*a.txt"):
        found.plot(tmp_path / "a.txt")
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        with pytest.raises(ParameterError, match=r"plot needs matplotlib.*pip install -e '\.\[plot\]'"):
            found.plot(tmp_path / "a.svg")
        return
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        found.plot(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    text = (tmp_path / "a.svg").read_text()
    found.plot(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text


def bleu(text: list[int], references: list[list[int]]) -> float:
    """BLEU-4 as in its definition: clipped precisions of each order, and the brevity penalty."""
    product = 1.0
    for n in range(1, 5):
        own = Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))
        others = [Counter(tuple(ref[i : i + n]) for i in range(len(ref) - n + 1)) for ref in references]
        matches = sum(min(count, max(other[gram] for other in others)) for gram, count in own.items())
        product *= (matches or 0.1) / max(sum(own.values()), 1)
    closest = min((abs(len(ref) - len(text)), len(ref)) for ref in references)[1]
    return product**0.25 * (1 if len(text) > closest else math.exp(1 - closest / len(text)))


def random_texts(numbers: random.Random) -> list[list[int]]:
    size = numbers.choice([2, 3, 10, 50])
    count = numbers.randint(2, 6)
    texts = [[numbers.randrange(size) for _ in range(numbers.randint(1, 12))] for _ in range(count)]
    return texts + texts[: numbers.randint(0, 2)]


def test_self_bleu_equals_its_definition() -> None:
    numbers = random.Random(1)
    for _ in range(200):
        texts = random_texts(numbers)
        expected = [bleu(text, texts[:i] + texts[i + 1 :]) for i, text in enumerate(texts)]
        assert metrics.self_bleu(texts) == pytest.approx(sum(expected) / len(expected))


def test_known_values() -> None:
    same = [[1, 2, 3, 4, 5]] * 3
    assert metrics.self_bleu(same) == pytest.approx(1.0)
    assert metrics.distinct(same, 1) == 5 / 15
    assert metrics.distinct([[1, 1, 1], [1, 2]], 2) == 2 / 3
    assert metrics.repetition((7, 7, 7, 7, 7), 4) == 0.5
    assert metrics.repetition(range(10), 2) == 0
    assert metrics.repetition((1, 2, 1, 2, 1, 2), 2) == pytest.approx(1 - 2 / 5)


def test_metrics_of_too_little_text_are_undefined() -> None:
    assert math.isnan(metrics.self_bleu([[1, 2]]))
    assert math.isnan(metrics.self_bleu([[1, 2], []]))
    assert math.isnan(metrics.distinct([[1], [2]], 2))
    assert math.isnan(metrics.repetition((1, 2, 3), 4))
    assert metrics.distinct([[1], [1, 2]], 2) == 1


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    numbers, covered = random.Random(3), 0
    for _ in range(200):
        found = estimate([[numbers.gauss(5, 2) for _ in range(2)] for _ in range(40)])
        covered += found.low <= 5 <= found.high
        assert found.low <= found.mean <= found.high
    assert 175 <= covered <= 199


def test_an_interval_needs_two_values() -> None:
    one = estimate([[3.0]])
    assert (one.mean, math.isnan(one.low), math.isnan(one.high)) == (3.0, True, True)
    assert math.isnan(estimate([[], [math.nan]]).mean)
    of_outputs = estimate([[1.0, 3.0, math.nan]])  # a single prompt
    assert (of_outputs.mean, of_outputs.low, of_outputs.high) == (2.0, 1.0, 3.0)
    assert estimate([[1.0, 3.0], [5.0, math.nan]]).mean == 3.5
