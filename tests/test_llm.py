"""The front door: text in, text out, with the embedded model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import nucleate as nc
from nucleate.models.load import EMBEDDED

SHORT = nc.SamplingParams(temperature=0.7, top_p=0.9, top_k=50, max_tokens=40, seed=1)


def test_the_same_seed_gives_the_same_text_and_another_another(llm: nc.LLM) -> None:
    texts = [llm.generate("Once upon a time", SHORT.replace(seed=seed))[0].text for seed in (1, 1, 2, 2**64 - 1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_a_reported_seed_gives_the_text_again(llm: nc.LLM) -> None:
    first = llm.generate("Once upon a time", SHORT.replace(seed=None))[0].outputs[0]
    again = llm.generate("Once upon a time", SHORT.replace(seed=first.seed))[0].outputs[0]
    assert first == again


def test_n_answers_use_seed_plus_i(llm: nc.LLM) -> None:
    [completion] = llm.generate("The fox", SHORT.replace(n=3, seed=2**64 - 2))
    assert [output.seed for output in completion.outputs] == [2**64 - 2, 2**64 - 1, 0]
    assert [output.index for output in completion.outputs] == [0, 1, 2]
    alone = llm.generate("The fox", SHORT.replace(seed=0))[0]
    assert completion.outputs[2].text == alone.text
    assert completion.usage.completion_tokens == sum(len(output.token_ids) for output in completion.outputs)


def test_streamed_pieces_join_to_the_completion(llm: nc.LLM) -> None:
    pieces = list(llm.stream("Once upon a time", SHORT))
    [completion] = llm.generate("Once upon a time", SHORT)
    assert "".join(piece.text for piece in pieces) == completion.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == completion.outputs[0].token_ids
    assert completion.text == llm.tokenizer.decode(completion.outputs[0].token_ids)


def test_prompts_as_text_lists_and_ids_are_one(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode("Once upon a time")
    prompts = ("Once upon a time", ["Once upon a time"], [ids], [np.array(ids)], np.array([ids]), iter([tuple(ids)]))
    results = [llm.generate(prompt, SHORT)[0].text for prompt in prompts]
    assert len(set(results)) == 1


def test_many_prompts_each_with_its_own_parameters(llm: nc.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = [SHORT.replace(max_tokens=3), SHORT.replace(max_tokens=5)]
    completions = llm.generate(["The dog", "The cat"], params, progress=True)
    assert [len(completion.outputs[0].token_ids) for completion in completions] == [3, 5]
    assert "2/2" in capsys.readouterr().err
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "the prompt is empty"),
        ([""], None, "the prompt is empty"),
        ([[]], None, "the prompt is empty"),
        ([1, 2, 3], None, r"a list of prompts.*\[\[1, 2, 3\]\]"),
        ([[1, "a"]], None, "a prompt is a string or a list of token ids"),
        ("word " * 2000, None, "the prompt has .* tokens, but the context holds 1024"),
        (["a", "b"], [SHORT], "params has 1 entries for 2 prompts"),
        ("a", {"temperature": 1}, "params must be a list, got"),
        ("a", 3, "params must be a list, got 3"),
        ("a", ["x"], "params must be a SamplingParams, got 'x'"),
        (None, None, "prompts must be a list, got None"),
        ({"prompt": "x"}, None, "prompts must be a list"),
        (b"Once", None, "prompts must be a list"),
        ([b"Once"], None, "a prompt is a string or a list of token ids, got b'Once'"),
        ([{1, 2}], None, "a prompt is a string or a list of token ids"),
        ([[True]], None, "a prompt is a string or a list of token ids"),
        ([[1.5]], None, "a prompt is a string or a list of token ids"),
        ("a", SHORT.replace(max_tokens=None, min_tokens=9999), "min_tokens is 9999, but the context has room for 1022"),
        ("\ud800", None, "not valid Unicode"),
    ],
)
def test_bad_input_is_one_clear_error(llm: nc.LLM, prompts: object, params: object, message: str) -> None:
    with pytest.raises(nc.ParameterError, match=message):
        llm.generate(prompts, params)  # type: ignore[arg-type]


def test_one_bad_request_stops_the_call_before_the_first_runs(llm: nc.LLM) -> None:
    with pytest.raises(nc.ParameterError, match="logit_bias"):
        llm.generate(["a", "b"], [SHORT, SHORT.replace(logit_bias={9999: 1.0})])


def test_chat_goes_through_the_models_own_template(llm: nc.LLM) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello!"}]
    ids = llm.encode_chat(messages)
    text = llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|endoftext|><|system|>S<|end|><|user|>Hello!<|end|><|assistant|>"
    completion = llm.chat(messages, SHORT)
    assert completion.text
    assert "".join(piece.text for piece in llm.stream_chat(messages, SHORT)) == completion.text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages"),
        ([{"role": "user"}], "content"),
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ("hello", "messages"),
        ([{"role": "user", "content": 5}], "content"),
    ],
)
def test_bad_messages_are_one_clear_error(llm: nc.LLM, messages: object, message: str) -> None:
    with pytest.raises(nc.ParameterError, match=message):
        llm.chat(messages)  # type: ignore[arg-type]


def test_defaults_are_the_models_recommendation_and_given_parameters_are_taken_as_they_are(llm: nc.LLM) -> None:
    assert llm.default_params == nc.SamplingParams(temperature=0.7, top_p=0.9, top_k=50)
    plain = nc.SamplingParams(seed=3, max_tokens=30)
    recommended = llm.default_params.replace(seed=3, max_tokens=30)
    assert llm.generate("The", plain)[0].text != llm.generate("The", recommended)[0].text


def test_stories_are_stories(llm: nc.LLM) -> None:
    """Not a proof of coherence: it catches a broken model, template or loop."""
    params = llm.default_params.replace(max_tokens=150)
    stories = [llm.generate("Once upon a time", params.replace(seed=seed))[0].text.lower().split() for seed in range(4)]
    assert min(map(len, stories)) > 40
    assert all(len(set(words)) > len(words) / 4 for words in stories)
    assert {"the", "was", "and", "to"} <= set().union(*stories)
    named = 0
    for topics in (("cat", "ball"), ("dog", "boat"), ("bear", "cake"), ("bird", "tree")):
        question = [{"role": "user", "content": "Tell me a story about a {} and a {}".format(*topics)}]
        for seed in range(4):
            answer = llm.chat(question, params.replace(seed=seed)).text.lower()
            named += sum(topic in answer for topic in topics)
    assert named >= 18  # of 32; a story that ignores the question has about 6


def test_a_broken_recommendation_is_the_folders_fault(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 7}))
    with pytest.raises(nc.ModelError, match=r"generation_config\.json: top_p must be a number > 0 and <= 1, got 7"):
        nc.LLM(tmp_path)


def test_an_end_beyond_the_logits_is_never_drawn_and_harms_nothing(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9999]}))
    output = nc.LLM(tmp_path).generate("Once", SHORT.replace(min_tokens=5))[0].outputs[0]
    assert len(output.token_ids) >= 5
