"""Fill-in-the-middle prompts: one case per format, the texts around the output, and models without such tokens."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization import prompts
from nucleate.tokenization.prompts import FORMATS, FillFormat, encode_fill, fill_stop_token_ids, find_format
from nucleate.tokenization.tokenizer import Tokenizer
from nucleate.tokenization.tokenizer_sources import VocabularyTokenizer

PREFIX, SUFFIX = "def f(x):\n    ", "\n    return x"
BEFORE_EACH = {
    "<|fim_prefix|>": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "<fim_prefix>": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "<fim-prefix>": "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",
    "▁<PRE>": "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",
    "<｜fim▁begin｜>": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "[PREFIX]": "[SUFFIX]{suffix}[PREFIX]{prefix}",
}
"""The prompts, as the models' authors document them."""


def build(name: str, found: FillFormat, *, bos: bool = False, special: bool = True) -> Tokenizer:
    backend = small_tokenizers.BUILDERS[name]()
    backend.add_special_tokens(small_tokenizers.SPECIAL)
    (backend.add_special_tokens if special else backend.add_tokens)([*found.tokens, *found.ends])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return Tokenizer(backend, bos_token_id=backend.token_to_id("<s>"))


@pytest.mark.parametrize("found", FORMATS, ids=lambda one: one.prefix)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_each_format(found: FillFormat, bos: bool, special: bool) -> None:
    tokenizer = build("byte-level", found, bos=bos, special=special)
    assert find_format(tokenizer) is found
    ids = encode_fill(tokenizer, PREFIX, SUFFIX)
    expected = BEFORE_EACH[found.prefix].format(prefix=PREFIX, suffix=SUFFIX)
    assert tokenizer.decode(ids, skip_special_tokens=False) == ("<s>" if bos else "") + expected
    assert ids == tokenizer.encode(expected)
    stops = {tokenizer.pieces.tokens[token] for token in fill_stop_token_ids(tokenizer)}
    assert stops == {*found.tokens, *found.ends}


class ByteVocabulary:
    """The vocabulary of a model file: bytes, and the tokens of a format, which texts do not spell."""

    special_tokens: Mapping[str, str] = {}
    eos_token_ids, bos_token_id, strips_first_space = frozenset[int](), None, False

    def __init__(self, found: FillFormat) -> None:
        names = [*found.tokens, *found.ends]
        self._texts = [*(f"<0x{byte:02X}>" for byte in range(256)), *names]
        self._pieces = [*(bytes([byte]) for byte in range(256)), *(name.encode() for name in names)]
        self.size, self.special_ids = len(self._texts), frozenset(range(256, len(self._texts)))

    def text(self, token: int) -> str:
        return self._texts[token]

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return [*text.encode()]


@pytest.mark.parametrize("found", FORMATS, ids=lambda one: one.prefix)
def test_the_vocabulary_of_a_model_file(found: FillFormat) -> None:
    tokenizer = VocabularyTokenizer(ByteVocabulary(found))
    assert find_format(tokenizer) is found
    ids = encode_fill(tokenizer, PREFIX, SUFFIX)
    assert tokenizer.decode(ids, False) == BEFORE_EACH[found.prefix].format(prefix=PREFIX, suffix=SUFFIX)
    assert len(fill_stop_token_ids(tokenizer)) == len(found.tokens) + len(found.ends)
    assert find_format(VocabularyTokenizer(ByteVocabulary(FillFormat("a", "b", "c")))) is None


def test_a_part_of_a_format_is_not_enough() -> None:
    for found in FORMATS:
        backend = small_tokenizers.byte_level()
        backend.add_special_tokens([*found.tokens[:-1], *found.ends])
        tokenizer = Tokenizer(backend)
        assert find_format(tokenizer) is None
        with pytest.raises(ParameterError, match="fill-in-the-middle") as caught:
            encode_fill(tokenizer, "a", "b")
        assert caught.value.field == "suffix"
        with pytest.raises(ParameterError, match="fill-in-the-middle"):
            fill_stop_token_ids(tokenizer)


def test_eos_is_not_a_stop_token_of_the_request() -> None:
    tokenizer = build("byte-level", FORMATS[0])
    tokenizer.eos_token_ids = frozenset({tokenizer.backend.token_to_id("<|endoftext|>")})
    assert not tokenizer.eos_token_ids & set(fill_stop_token_ids(tokenizer))


@pytest.mark.parametrize("name", ["byte-level", "llama", "gemma"])
@pytest.mark.parametrize("suffix", ["dog", " dog", "  dog", "\ndog", ")", "😀", "é", "1", "the end", " "])
def test_the_suffix_gets_no_space(name: str, suffix: str) -> None:
    """Tokenizers such as Llama's put a space before a text. The suffix continues one."""
    tokenizer = build(name, FORMATS[1])
    ids = encode_fill(tokenizer, "fox", suffix)
    known = tokenizer.decode(tokenizer.encode(f"x{suffix}", False), False).lstrip().removeprefix("x")
    assert tokenizer.decode(ids, False).partition("<fim_suffix>")[2] == f"{known}<fim_middle>"
    start = [tokenizer.backend.token_to_id("<fim_prefix>"), *tokenizer.encode("fox", False)]
    assert ids[: len(start)] == start  # the prefix is encoded as any prompt


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(prefix=st.text(max_size=12), suffix=st.text(max_size=12), name=st.sampled_from(["byte-level", "llama"]))
def test_all_texts(prefix: str, suffix: str, name: str) -> None:
    tokenizer = build(name, FORMATS[0])
    ids = encode_fill(tokenizer, prefix, suffix)
    marks = [tokenizer.backend.token_to_id(token) for token in FORMATS[0].tokens]
    assert [token for token in ids if token in marks] == marks
    assert ids[0] == marks[0]
    assert ids[-1] == marks[2]
    if name == "byte-level":
        expected = f"<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>"
        assert tokenizer.decode(ids, False) == expected
        assert ids == tokenizer.encode(expected)


def test_invalid_texts() -> None:
    tokenizer = build("byte-level", FORMATS[0])
    for texts, field in ((("\ud800", "a"), "prompt"), (("a", "\ud800"), "suffix")):
        with pytest.raises(ParameterError, match="not valid Unicode") as caught:
            encode_fill(tokenizer, *texts)
        assert caught.value.field == field


@pytest.fixture
def filling(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> nc.LLM:
    """The bundled model with three of its tokens as fill-in-the-middle tokens."""
    tokenizer = llm.tokenizer
    tokens = [tokenizer.pieces.tokens[token] for token in (300, 301, 302)]
    found = FillFormat(*tokens, ends=(tokenizer.pieces.tokens[303],))
    monkeypatch.setattr(prompts, "FORMATS", (found,))
    return llm


def test_generate_and_stream(filling: nc.LLM) -> None:
    params = nc.SamplingParams(seed=1, max_tokens=8, stop_token_ids=[301, 7])
    expected = filling.tokenizer.encode("Once upon")
    [completion] = filling.generate("Once upon", params, suffix=" a time")
    ids = [token for token in completion.prompt_token_ids if token not in (300, 301, 302)]
    assert ids[: len(expected)] == expected or ids[1 : len(expected)] == expected[1:]
    assert completion.prompt_token_ids[-1] == 302
    chunks = [*filling.stream("Once upon", params, suffix=" a time")]
    assert "".join(chunk.text for chunk in chunks) == completion.text
    assert filling.fill_params(params).stop_token_ids == (301, 7, 300, 302, 303)
    assert filling.fill_params(params.replace(ignore_eos=True)).stop_token_ids == (301, 7)
    two = filling.generate(["a", ""], params, suffix="b")
    assert len(two) == 2
    with pytest.raises(ParameterError, match="must be strings") as caught:
        filling.generate([[1, 2]], params, suffix="b")
    assert caught.value.field == "suffix"


def test_a_fill_token_ends_the_output(filling: nc.LLM) -> None:
    params = nc.SamplingParams(max_tokens=5, logit_bias={303: 1000.0})
    [completion] = filling.generate("Once", params, suffix="x")
    assert completion.outputs[0].finish_reason == "stop"
    assert completion.outputs[0].token_ids == (303,)
    assert completion.text == ""


def test_a_model_without_these_tokens(llm: nc.LLM) -> None:
    with pytest.raises(ParameterError, match="suffix needs a model with fill-in-the-middle tokens"):
        llm.generate("a", suffix="b")
    with pytest.raises(ParameterError, match="suffix needs a model"):
        llm.stream("a", suffix="b")
