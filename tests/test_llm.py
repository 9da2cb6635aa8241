"""``LLM``: generate, stream and chat with the embedded model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import nucleate as nc
from nucleate.models.loader import EMBEDDED
from nucleate.tokenization.tokenizer import Tokenizer

SHORT = nc.SamplingParams(temperature=0.7, top_p=0.9, top_k=50, max_tokens=40, seed=1)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_and_another_seed_does_not(llm: nc.LLM) -> None:
    texts = [llm.generate("Once upon a time", SHORT.replace(seed=seed))[0].text for seed in (1, 1, 2, 2**64 - 1)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@pytest.mark.slow
def test_prompts_as_text_lists_and_ids_are_equivalent(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode("Once upon a time")
    prompts = ("Once upon a time", ["Once upon a time"], [ids], [np.array(ids)], np.array([ids]), iter([tuple(ids)]))
    results = [llm.generate(prompt, SHORT)[0].text for prompt in prompts]
    assert len(set(results)) == 1


def test_many_prompts_each_with_its_own_parameters(llm: nc.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    params = [SHORT.replace(max_tokens=3), SHORT.replace(max_tokens=5)]
    completions = llm.generate(["The dog", "The cat"], params, use_tqdm=True)
    assert [len(completion.outputs[0].token_ids) for completion in completions] == [3, 5]
    assert "2/2" in capsys.readouterr().err
    assert llm.generate([]) == []


PROMPTS, PARAMS = (
    "prompts must be a string, or a list of strings or of lists of token ids",
    "a SamplingParams, a tuple of",
)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], None, "the prompt is empty"),
        ([1, 2, 3], None, r"a list of prompts.*\[\[1, 2, 3\]\]"),
        *(
            (prompts, None, "a prompt is a string or a list of token ids")
            for prompts in ([[1, "a"]], [b"Once"], [{1, 2}])
        ),
        *(([[token]], None, "a prompt is a string or a list of token ids") for token in (True, 1.5)),
        *((prompts, None, PROMPTS) for prompts in (None, 5, {"prompt": "x"}, b"Once")),
        ("word " * 2000, None, "the prompt has .* tokens, but the context holds 1024"),
        ("\ud800", None, "not valid Unicode"),
        (["a", "b"], [SHORT], "a list of sampling_params must have one per prompt; got 1 of them for 2 prompts"),
        ("a", {"temperature": 1}, r"got {'temperature': 1}; pass fields as keywords"),
        *(("a", params, f"{PARAMS} stages, or a list with one of these per prompt, got") for params in (3, "x", ["x"])),
        ("a", (nc.stages.Gumbel(), nc.stages.TopK(3)), r"pipeline\[0\] gumbel is a draw, which must be the last stage"),
        ("a", nc.stages.TopK(3), r"got TopK\(3\); a pipeline is a tuple of stages"),
        ("a", SHORT.replace(max_tokens=None, min_tokens=9999), "min_tokens is 9999, but the context has room for 1022"),
    ],
)
def test_bad_input_is_one_clear_error(llm: nc.LLM, prompts: object, params: object, message: str) -> None:
    with pytest.raises(nc.ParameterError, match=message):
        llm.generate(prompts, params)  # type: ignore[arg-type]


def test_keywords_replace_fields_of_the_params(llm: nc.LLM) -> None:
    prompts = ["The dog", "The cat"]
    several = [SHORT.replace(seed=5), (nc.stages.TopK(3), nc.stages.Gumbel(2))]
    found = llm.generate(prompts, several, max_tokens=4)  # of each
    assert found[0].outputs == llm.generate(prompts[0], SHORT.replace(seed=5, max_tokens=4))[0].outputs
    assert found[1].outputs == llm.generate(prompts[1], nc.SamplingParams(pipeline=several[1], max_tokens=4))[0].outputs
    assert [len(one.token_ids) for one in found] == [4, 4]
    assert found[0].token_ids == found[0].outputs[0].token_ids
    one = llm.generate("Once", SHORT, seed=9, max_tokens=5)[0]
    assert one.outputs == llm.generate("Once", SHORT.replace(seed=9, max_tokens=5))[0].outputs
    assert "".join(chunk.text for chunk in llm.stream("Once", SHORT, seed=9, max_tokens=5)) == one.text
    messages = [{"role": "user", "content": "Hello!"}]
    assert llm.chat(messages, SHORT, seed=9) == llm.chat(messages, SHORT.replace(seed=9))
    with pytest.raises(nc.ParameterError, match="min_tokens must be at most max_tokens"):
        llm.generate("Once", SHORT.replace(min_tokens=8), max_tokens=5)
    with pytest.raises(nc.ParameterError, match="unknown parameter 'sed'; did you mean seed"):
        llm.generate("Once", SHORT, sed=9)


def test_an_empty_prompt_generates_from_bos(llm: nc.LLM) -> None:
    bos = llm.tokenizer.bos_token_id
    expected = llm.generate([[bos]], SHORT)[0].outputs
    assert llm.generate("", SHORT)[0].outputs == expected
    assert [one.outputs for one in llm.generate(["", ""], SHORT)] == [expected] * 2
    assert "".join(chunk.text for chunk in llm.stream("", SHORT)) == expected[0].text
    assert llm.beam_search("", num_beams=2, max_tokens=3)[0].prompt_token_ids == (bos,)


def test_an_empty_prompt_without_bos() -> None:
    llm = nc.LLM()
    backend = tokenizers.Tokenizer.from_str(llm.tokenizer.backend.to_str())
    backend.post_processor = tokenizers.processors.Sequence([])
    llm.tokenizer = Tokenizer(backend, bos_token_id=7)  # which the tokenizer does not add, as that of GPT-2
    assert llm.encode("") == [7]
    assert llm.encode("Once") == backend.encode("Once").ids
    llm.tokenizer = Tokenizer(backend)
    for call in (llm.generate, llm.stream, llm.beam_search):
        with pytest.raises(nc.ParameterError, match="the prompt is empty, and this tokenizer has no BOS token"):
            call("", max_tokens=1)  # type: ignore[operator]


def test_one_invalid_request_stops_the_call_before_the_first_runs(llm: nc.LLM) -> None:
    with pytest.raises(nc.ParameterError, match="logit_bias"):
        llm.generate(["a", "b"], [SHORT, SHORT.replace(logit_bias={9999: 1.0})])


def test_chat_uses_the_models_template(llm: nc.LLM) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hello!"}]
    ids = llm.encode_chat(messages)
    text = llm.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|endoftext|><|system|>S<|end|><|user|>Hello!<|end|><|assistant|>"
    completion = llm.chat(messages, SHORT)
    assert completion.text
    assert "".join(delta.text for delta in llm.stream_chat(messages, SHORT)) == completion.text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages"),
        *(([{"role": "user", **content}], "content") for content in ({}, {"content": 5})),
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ("hello", r"messages must be a list of messages, such as \[{.*}\], or of such lists, got 'hello'"),
        (["hello"], r"messages must be a list of messages, .* got \['hello'\]"),
        ({"role": "user", "content": "x"}, r"messages must be a list of messages, .* got {'role': 'user'"),
        *((value, f"messages must be a list of messages, .* got {value}") for value in (5, None)),
    ],
)
def test_bad_messages_are_one_clear_error(llm: nc.LLM, messages: object, message: str) -> None:
    with pytest.raises(nc.ParameterError, match=message):
        llm.chat(messages)  # type: ignore[arg-type]
    with pytest.raises(nc.ParameterError, match=message):
        llm.stream_chat(messages)  # type: ignore[arg-type]


def test_stream_chat_takes_one_conversation(llm: nc.LLM) -> None:
    with pytest.raises(nc.ParameterError, match="stream_chat answers one conversation, got"):
        llm.stream_chat([[{"role": "user", "content": "x"}]])  # type: ignore[list-item]


@pytest.mark.slow
def test_the_models_defaults_apply_to_fields_that_are_not_given(llm: nc.LLM) -> None:
    assert llm.default_params == nc.SamplingParams(temperature=0.7, top_p=0.9, top_k=50)
    given = {"seed": 3, "max_tokens": 30, "temperature": 1.0}  # 1 is the default of the field, but it was given
    expected = nc.SamplingParams(top_p=0.9, top_k=50, **given)
    messages = [{"role": "user", "content": "A story"}]
    own = nc.SamplingParams(**given)
    texts = {
        llm.generate("The", expected)[0].text,
        llm.generate("The", own)[0].text,
        llm.generate(["The"], [own])[0].text,
        llm.generate("The", **given)[0].text,
        "".join(chunk.text for chunk in llm.stream("The", own)),
        "".join(chunk.text for chunk in llm.stream("The", **given)),
    }
    assert len(texts) == 1
    assert llm.chat(messages, own) == llm.chat(messages, expected) == llm.chat(messages, **given)


@pytest.mark.slow
def test_without_generation_config_the_fields_have_their_own_defaults(llm: nc.LLM) -> None:
    plain = nc.LLM(generation_config="none")
    assert plain.default_params == nc.SamplingParams()
    given = nc.SamplingParams(seed=3, max_tokens=30)
    neutral = given.replace(temperature=1.0, top_p=1.0, top_k=0)
    assert plain.generate("The", given) == plain.generate("The", neutral) == llm.generate("The", neutral)
    assert plain.generate("The", given)[0].text != llm.generate("The", given)[0].text
    with pytest.raises(nc.ParameterError, match="generation_config must be auto or none, got 'vllm'"):
        nc.LLM(generation_config="vllm")


def test_an_invalid_generation_config_is_a_model_error(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 7}))
    with pytest.raises(nc.ModelError, match=r"generation_config\.json: top_p must be a number >= 0 and <= 1, got 7"):
        nc.LLM(tmp_path)


def test_an_eos_beyond_the_logits_has_no_effect(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9999]}))
    output = nc.LLM(tmp_path).generate("Once", SHORT.replace(min_tokens=5))[0].outputs[0]
    assert len(output.token_ids) >= 5


# ---- logprobs


def raw_rows(llm: nc.LLM, output: nc.CompletionOutput, prompt: str) -> list[np.ndarray]:
    """The logits that each token of an output was sampled from."""
    context = llm.model.begin()
    rows = [context.forward(llm.encode(prompt))]
    rows += [context.forward((token,)) for token in output.token_ids[:-1]]
    return [np.array(row, np.float64) for row in rows]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_are_of_the_models_logits_or_the_sampled_distribution(llm: nc.LLM, mode: str) -> None:
    params = SHORT.replace(max_tokens=12, logprobs=3, logprob_token_ids=[7], logprobs_mode=mode, repetition_penalty=1.2)
    [output] = llm.generate("Once upon a time", params)[0].outputs
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    prompt = llm.encode("Once upon a time")
    for step, (logits_V, step_logprobs) in enumerate(
        zip(raw_rows(llm, output, "Once upon a time"), output.logprobs, strict=True)
    ):
        distribution_params = (
            nc.SamplingParams() if mode == "raw" else params.replace(logprobs=None, logprob_token_ids=())
        )
        history = {"prompt_ids": [prompt], "output_ids": [output.token_ids[:step]]}
        p_V = nc.probabilities(logits_V[None], distribution_params, **history)[0]
        order = [int(i) for i in np.argsort(-p_V, kind="stable") if p_V[i] > 0]
        assert step_logprobs.chosen.token_id == output.token_ids[step]
        assert [one.token_id for one in step_logprobs.top] == order[:3]
        for one in (step_logprobs.chosen, *step_logprobs.top, *step_logprobs.requested):
            with np.errstate(divide="ignore"):
                # the engine runs the model on ragged batches: sums of float32 in another order
                assert one.logprob == pytest.approx(np.log(p_V[one.token_id]), rel=2e-6, abs=1e-5)
            assert one.rank == (1 + order.index(one.token_id) if p_V[one.token_id] else None)


def test_the_logprob_of_an_output_is_the_sum_of_its_tokens(llm: nc.LLM) -> None:
    for n in (0, 2):
        outputs = llm.generate("The dog", SHORT.replace(n=2, logprobs=n, max_tokens=9))[0].outputs
        for output in outputs:
            assert output.logprobs is not None
            assert all(len(step.top) == n for step in output.logprobs)
            assert output.cumulative_logprob == pytest.approx(sum(step.chosen.logprob for step in output.logprobs))
    assert outputs[0].cumulative_logprob != outputs[1].cumulative_logprob
    plain = llm.generate("The dog", SHORT.replace(max_tokens=9))[0].outputs[0]
    assert (plain.logprobs, plain.cumulative_logprob) == (None, None)
    assert plain.token_ids == outputs[0].token_ids  # reporting changes nothing


def test_chunks_join_to_the_completion_and_have_the_logprobs_of_their_token(llm: nc.LLM) -> None:
    chunks = list(llm.stream("The dog", SHORT.replace(max_tokens=8, logprobs=1)))
    [completion] = llm.generate("The dog", SHORT.replace(max_tokens=8))
    assert "".join(delta.text for delta in chunks) == completion.text
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    for delta in chunks:
        assert delta.logprobs is not None
        [step] = delta.logprobs
        assert (step.chosen.token_id,) == delta.token_ids
    assert all(delta.logprobs is None for delta in llm.stream("The dog", SHORT.replace(max_tokens=2)))


# ---- seeds, words, and stages with a state


@pytest.mark.parametrize("draw", ["gumbel", "categorical", "greedy"])
def test_outputs_have_the_given_seeds_for_every_draw(llm: nc.LLM, draw: str) -> None:
    params = SHORT.replace(n=3, seed=2**64 - 2, draw=draw, max_tokens=6)
    [completion] = llm.generate("The fox", params)
    outputs = completion.outputs
    assert [output.seed for output in outputs] == [2**64 - 2, 2**64 - 1, 0]
    assert [output.index for output in outputs] == [0, 1, 2]
    assert completion.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
    assert len({output.text for output in outputs}) == (1 if draw == "greedy" else 3)
    for output in outputs:
        again = llm.generate("The fox", params.replace(n=1, seed=output.seed))[0].outputs[0]
        assert again.token_ids == output.token_ids


BAD = ["was", "little", "Lily", "a time", "there"]


@pytest.mark.slow
def test_bad_words_never_appear_with_or_without_a_space(llm: nc.LLM) -> None:
    def text(prompt: str, seed: int, **changes: object) -> str:
        return llm.generate(prompt, SHORT.replace(seed=seed, max_tokens=50, **changes))[0].text

    plain = [text("Once upon", seed) for seed in range(3)]
    assert all(any(word in one for one in plain) for word in BAD)
    found = [text(prompt, seed, bad_words=BAD) for seed in range(3) for prompt in ("Once upon", "Once upon a time,")]
    pattern = re.compile(rf"\b({'|'.join(BAD)})\b")
    assert not any(pattern.search(one) for one in found)
    assert min(map(len, found)) > 40
    greedy = text("Once upon", 1, bad_words=BAD, temperature=0)
    assert not pattern.search(greedy)


def test_bad_words_may_be_ids(llm: nc.LLM) -> None:
    first = llm.generate("Once upon a time", SHORT.replace(temperature=0))[0].outputs[0].token_ids
    banned = (
        llm.generate("Once upon a time", SHORT.replace(temperature=0, bad_words=[first[:3]]))[0].outputs[0].token_ids
    )
    assert banned[:2] == first[:2]
    assert banned[2] != first[2]
    with pytest.raises(nc.ParameterError, match="bad_words names token 4096, but the vocabulary ends at 4095"):
        llm.generate("x", SHORT.replace(bad_words=[[1, 4096]]))


def longest_repeat(ids: tuple[int, ...]) -> int:
    """The length of the longest token sequence that occurs twice."""
    for length in range(len(ids) - 1, 0, -1):
        runs = [ids[i : i + length] for i in range(len(ids) - length + 1)]
        if len(set(runs)) < len(runs):
            return length
    return 0


@pytest.mark.slow
def test_dry_breaks_loops_and_breakers_may_be_text(llm: nc.LLM) -> None:
    params = nc.SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    prompt = "Tim ran and ran. Tim ran and ran. Tim ran and ran."

    def ids(**changes: object) -> tuple[int, ...]:
        return llm.generate(prompt, params.replace(**changes))[0].outputs[0].token_ids

    plain, dry = ids(), ids(dry_multiplier=2.0)
    assert longest_repeat(dry) < longest_repeat(plain)
    assert longest_repeat(dry) <= 6
    assert ids(dry_multiplier=2.0, dry_sequence_breakers=["\n", ":", '"', "*"]) == dry  # the default breakers
    assert ids(dry_multiplier=2.0, dry_sequence_breakers=[" ", ".", ",", "e", "a"]) != dry
    assert ids(dry_multiplier=2.0, dry_last_n=0) == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"mirostat_tau": 3.0, "mirostat_eta": 0.5},
        {"adaptive_p_target": 0.4, "adaptive_p_decay": 0.5},
        {"xtc_probability": 0.5, "xtc_threshold": 0.05},
        {"mirostat_tau": 4.0, "order": "llama.cpp", "xtc_probability": 0.3, "adaptive_p_target": 0.5},
        {"xtc_probability": 0.5, "draw": "categorical"},
    ],
    ids=str,
)
@pytest.mark.fast_cases(0)
def test_a_seed_reproduces_stages_with_a_state_or_random_decisions(llm: nc.LLM, changes: dict[str, object]) -> None:
    params = nc.SamplingParams(max_tokens=25, ignore_eos=True, **changes)
    first = llm.generate("Once upon a time", params)[0].outputs[0]  # without a seed
    assert llm.generate("Once upon a time", params.replace(seed=first.seed))[0].outputs[0] == first
    off = nc.SamplingParams(max_tokens=25, ignore_eos=True, seed=first.seed, draw=params.draw)
    differs = [
        llm.generate("Once upon a time", one.replace(seed=seed))[0].text for seed in range(3) for one in (params, off)
    ]
    assert differs[::2] != differs[1::2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bad_words": ["x"]}, "bad_words has the text 'x', but"),
        ({"bad_words": [(1,), "x y"]}, "bad_words has the text 'x y', but"),
        ({"dry_multiplier": 1.0, "dry_sequence_breakers": ["\n"]}, r"dry_sequence_breakers has the text '\\n', but"),
    ],
)
def test_text_without_a_tokenizer_is_an_explained_error(changes: dict[str, object], words: str) -> None:
    logits = np.zeros((1, 9), np.float32)
    params = nc.SamplingParams(**changes)
    for call in (nc.sample, nc.probabilities):
        with pytest.raises(nc.ParameterError, match=words) as caught:
            call(logits, params, output_ids=[[1, 2, 1, 2]])
        assert caught.value.field == words.split(maxsplit=1)[0]
    with pytest.raises(nc.ParameterError, match=words):
        nc.trace(logits[0], params)
    with pytest.raises(nc.ParameterError, match=words):
        nc.Sampler(9).add(params)
    assert nc.sample(logits, params.replace(bad_words=(), dry_multiplier=0)).shape == (1,)


@pytest.mark.parametrize("count", ["4", 1.5, None, 0])
def test_an_engine_for_an_invalid_number_of_sequences(llm: nc.LLM, count: object) -> None:
    with pytest.raises(nc.ParameterError, match="max_num_seqs must be an integer >= 1, got") as caught:
        llm.new_engine(max_num_seqs=count)
    assert caught.value.field == "max_num_seqs"


def test_a_completion_has_its_prompt(llm: nc.LLM) -> None:
    text, ids = llm.generate("The dog", SHORT)[0], llm.generate([llm.encode("The dog")], SHORT)[0]
    assert (text.prompt, ids.prompt) == ("The dog", None)
    assert text.outputs == ids.outputs
    assert llm.chat([{"role": "user", "content": "Hi"}], SHORT).prompt.count("Hi") == 1


def test_several_conversations_give_a_list(llm: nc.LLM) -> None:
    conversations = [[{"role": "user", "content": content}] for content in ("Hi", "A dog", "Sing")]
    assert llm.chat(conversations, SHORT) == [llm.chat(one, SHORT) for one in conversations]
    assert llm.chat(conversations[:1], SHORT) == [llm.chat(conversations[0], SHORT)]
