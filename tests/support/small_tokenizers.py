"""Small tokenizers of every family, trained on a few sentences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from nucleate.tokenization.tokenizer import Tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog. The dog does not care, does it?",
    "Grüße aus Köln! Ça va? Où est l'été, s'il vous plaît?",
    "  def f(x):\n        return {'a': [1, 2, 3]}\n\n",
    "我们今天去北京。你呢？ 日本語のテキストです。 한국어 문장입니다.",
    "Emoji: 😀👩‍👩‍👧‍👦🏳️‍🌈 and e\u0301 combining a\u0308o\u0302 marks, नमस्ते दुनिया, שלום",
    "We're here, they 've gone , it 's ' fine ' . do not stop !",
]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ADDED = [AddedToken("two words", normalized=False), AddedToken("🦊", normalized=False), AddedToken("café")]


def byte_level(size: int = 420, special: list[str] = SPECIAL) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def byte_fallback(*decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", *SPECIAL], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    model = models.BPE(
        vocab={token: index for index, token in enumerate(sorted(set(BYTES) | set(tokenizer.get_vocab())))},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer.model = model
    tokenizer.decoder = decoders.Sequence(list(decoder))
    return tokenizer


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def word_piece(cleanup: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["n't", " do not", "x ' y", " ."])
    return tokenizer


def words(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    """Words and unusual tokens, to test a decoder."""
    unusual = ["a", " b", "▁c▁", "</w>", "d</w>", "e</w>f</w>", "##g", "||", "Ġh", " "]
    unusual += [f"<0x{byte}>" for byte in ("C3", "A9", "ED", "20", "+A")]
    vocabulary = {token: index for index, token in enumerate(["[UNK]", *unusual])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


REPLACE, FUSE, FALLBACK = decoders.Replace("▁", " "), decoders.Fuse(), decoders.ByteFallback()
BUILDERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "llama": lambda: byte_fallback(REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)),
    "gemma": lambda: byte_fallback(REPLACE, FALLBACK, FUSE),
    "fallback-unfused": lambda: byte_fallback(FALLBACK, REPLACE),
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-first": lambda: metaspace("first"),
    "metaspace-never": lambda: metaspace("never"),
    "word-piece": lambda: word_piece(cleanup=True),
    "word-piece-raw": lambda: word_piece(cleanup=False),
    "no-decoder": lambda: words(None),
    "suffix": lambda: words(decoders.BPEDecoder("</w>")),
    "fuse": lambda: words(FUSE),
    "regex": lambda: words(decoders.Sequence([decoders.Replace(Regex("[a-d]+"), "(x)"), FALLBACK, FUSE])),
    "strip-each": lambda: words(decoders.Sequence([REPLACE, decoders.Strip(" ", 1, 0)])),
    "strip-more": lambda: words(decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 2, 0)])),
    "whole": lambda: words(decoders.CTC("a", "||", True)),
    "whole-replace": lambda: words(decoders.Sequence([FUSE, decoders.Replace("ca", "!")])),
}


def build(name: str) -> Tokenizer:
    backend = BUILDERS[name]()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(ADDED)
    return Tokenizer(backend)


@pytest.fixture(scope="session")
def tokenizers_by_name() -> dict[str, Tokenizer]:
    return {name: build(name) for name in BUILDERS}


@pytest.fixture(scope="session", params=sorted(BUILDERS))
def tokenizer(request: pytest.FixtureRequest, tokenizers_by_name: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_name[request.param]
