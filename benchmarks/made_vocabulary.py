"""A synthetic tokenizer of any size, similar to that of a large model: byte-level BPE of source code and English.

Nothing is downloaded. The text is Python's standard library; as it has too few words for 128k tokens, it is extended
with words of random syllables, in Zipf's proportions, with numbers and punctuation.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from nucleate.tokenization.tokenizer import Tokenizer

END = "<|end|>"
_ONSETS = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pr",
    "qu",
    "r",
    "s",
    "st",
    "t",
    "v",
    "w",
)
_CORES = ("a", "e", "i", "o", "u", "ea", "ou", "ie", "ü", "é")
_CODAS = ("", "", "n", "r", "s", "t", "nd", "ng", "ment", "tion", "ly", "ing", "ed", "er")
_BETWEEN = (" ", " ", " ", " ", " ", ", ", ". ", "\n", '": "', "', '", " = ", "(", ") ", "/", "-", "_", "\n    ")


def vocabulary(size: int, cached: Path | None = None) -> Tokenizer:
    """A tokenizer with ``size`` tokens; id 0 is EOS. Takes half a minute for 128256, unless cached in a file."""
    if cached is not None and cached.exists():
        return Tokenizer(tokenizers.Tokenizer.from_file(str(cached)), eos_token_ids=[0])
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # As in Llama 3: words with the preceding space, and at most three digits.
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=64,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    if tokenizer.get_vocab_size() != size:
        raise RuntimeError(f"the text is sufficient for {tokenizer.get_vocab_size()} tokens only, not for {size}")
    if cached is not None:
        tokenizer.save(str(cached))
    return Tokenizer(tokenizer, eos_token_ids=[0])


def _texts() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text("utf-8", errors="replace")
    rng = random.Random(0)
    words = [_word(rng) for _ in range(300_000)]
    chance = 1.0 / np.arange(10, 10 + len(words))
    picked = np.random.default_rng(0).choice(len(words), 4_000_000, p=chance / chance.sum())
    for start in range(0, len(picked), 1000):
        yield "".join(words[index] + rng.choice(_BETWEEN) for index in picked[start : start + 1000])


def _word(rng: random.Random) -> str:
    if rng.random() < 0.05:
        return str(rng.randrange(10 ** rng.randint(1, 6)))
    word = "".join(
        rng.choice(_ONSETS) + rng.choice(_CORES) + rng.choice(_CODAS) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))
    )
    return word.capitalize() if rng.random() < 0.2 else word
