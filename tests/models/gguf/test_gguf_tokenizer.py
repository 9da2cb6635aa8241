"""Tokenizers of GGUF files: llama.cpp's own tokens and texts, in our detokenizer."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_vocabulary

import nucleate as nc
from nucleate.models.gguf.gguf_model import GgufModel
from nucleate.models.gguf.gguf_options import GgufOptions
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer_sources import OnDemand, VocabularyTokenizer

TEXTS = (
    "Once upon a time, there was a little dog.",
    "  two spaces,\n\ttabs\r\nand lines ",
    "Grüße, 世界 🎉! naïve 👩‍👩‍👧",
    "<|user|>Hello<|end|><|assistant|>",
    "x" * 3000,
    "\x00\x01",
    "1234567890 3.14",
    "",
)


def vocabulary(path: Path, kind: str) -> VocabularyTokenizer:
    write_vocabulary(path / f"{kind}.gguf", kind)
    model = GgufModel(path / f"{kind}.gguf", GgufOptions(n_gpu_layers=0), vocab_only=True)
    return VocabularyTokenizer(model.vocabulary, owner=model)


def test_the_tokenizer_of_the_file_is_that_of_the_folder(llm: nc.LLM, exact: nc.LLM) -> None:
    ours, theirs = exact.tokenizer, llm.tokenizer
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, special), text
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(4096) for _ in range(rng.randint(1, 30))]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip)
    assert ours.special_ids == theirs.special_ids
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.vocab_size == theirs.vocab_size
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    assert ours.containing("dog") == theirs.containing("dog")
    assert ours.spellings("dog") == theirs.spellings("dog")
    assert [ours.pieces.as_bytes(token) for token in range(4096)] == [
        theirs.pieces.as_bytes(token) for token in range(4096)
    ]


def test_chat_is_that_of_llama_cpp_python(llm: nc.LLM, exact: nc.LLM) -> None:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    messages = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "A story about a dog, please."},
    ]
    formatter = Jinja2ChatFormatter(exact.tokenizer.chat_template, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    assert exact.encode_chat(messages) == exact.tokenizer.encode(formatter(messages=messages).prompt, False)
    wanted = nc.SamplingParams(seed=1, max_tokens=30)
    assert exact.chat(messages, wanted).text == llm.chat(messages, wanted).text


@pytest.mark.parametrize("kind", ["llama", "t5", "bert"])
def test_texts_are_those_of_llama_cpp(files: Any, tmp_path: Path, kind: str) -> None:
    """SentencePiece, Unigram and WordPiece: the text of any tokens, at once and streamed, after any prompt."""
    tokenizer = vocabulary(tmp_path, kind)
    own, rng = tokenizer._vocabulary, random.Random(1)
    assert own.has_tokenizer
    for text in ("the cat sat on a mat", "the cat", "un the é 世界", "xyz 🎉", "  sat", "the<added>cat"):
        ids = tokenizer.encode(text)
        assert ids == own.tokenize(text, add_special=True)
        words = ids[1:] if ids[:1] == [own.bos_token_id] else ids  # llama.cpp keeps the first space after BOS
        assert tokenizer.decode(ids) == tokenizer.decode(words) == own.detokenize(words).decode(errors="replace")
    if kind == "llama":
        assert tokenizer.decode(tokenizer.encode("the cat sat on a mat")) == "the cat sat on a mat"
    plain = [token for token in range(own.size) if token not in own.special_ids]
    for _ in range(300):
        ids = [rng.choice(plain) for _ in range(rng.randint(1, 12))]
        text = tokenizer.decode(ids)
        assert text == own.detokenize(ids).decode(errors="replace")
        split = rng.randrange(len(ids))
        detokenizer = Detokenizer(tokenizer, ids[:split])
        streamed = "".join([*map(detokenizer.push, ids[split:]), detokenizer.close()])
        assert text.endswith(streamed)
        before = tokenizer.decode(ids[:split]) if split else ""
        assert (before + streamed == text) or "\ufffd" in before


def test_a_tokenizer_without_its_llm(files: dict[str, Path], llm: nc.LLM) -> None:
    """It keeps the vocabulary in memory; a GGUF file can also be given as a tokenizer only."""
    tokenizer = nc.LLM(files["q8_0"]).tokenizer
    gc.collect()
    assert tokenizer.decode(tokenizer.encode(TEXTS[2])) == llm.tokenizer.decode(llm.tokenizer.encode(TEXTS[2]))
    other = nc.LLM(tokenizer=files["f16"])
    assert other.generate("Once", seed=1, max_tokens=5)[0].text == llm.generate("Once", seed=1, max_tokens=5)[0].text


def test_special_tokens_and_errors(files: Any, tmp_path: Path, llm: nc.LLM) -> None:
    tokenizer = vocabulary(tmp_path, "llama")
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.special_tokens["bos_token"] == "<s>"
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", False)[0] != 1
    assert tokenizer.decode([1, *tokenizer.encode("the", False)]) == "the"
    assert tokenizer.decode([1], skip_special_tokens=False) == "<s>"
    with pytest.raises(ValueError, match="is not in the vocabulary"):
        tokenizer.decode([10**6])
    with pytest.raises(nc.ParameterError, match="not valid Unicode"):
        tokenizer.encode("\ud800")


def test_structured_output_with_a_sentencepiece_vocabulary(files: Any, tmp_path: Path) -> None:
    from nucleate.structured_output import GrammarCompiler

    tokenizer = vocabulary(tmp_path, "llama")
    compiled = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    assert compiled is not None


def test_values_of_tokens_are_computed_on_demand() -> None:
    calls: list[int] = []
    table = OnDemand(3, lambda token: calls.append(token) or f"<{token}>")  # type: ignore[func-returns-value]
    assert (len(table), list(table), calls) == (3, [0, 1, 2], [])
    assert [table[2], table[np.int64(2)], table.get(1)] == ["<2>", "<2>", "<1>"]
    assert calls == [2, 1]
    assert [one in table for one in (0, 2, 3, -1, "0", None)] == [True, True, False, False, False, False]
    for unknown in (3, -1, "0"):
        with pytest.raises(KeyError):
            table[unknown]  # type: ignore[index]
