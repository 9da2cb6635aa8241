"""Trains the tokenizer of the embedded model: byte-level BPE, 4096 ids.

Run: python training/tokenizer.py CORPUS_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
SPECIAL = (corpus.SEPARATOR, corpus.SYSTEM, corpus.USER, corpus.ASSISTANT, corpus.END)


def learn(folder: Path) -> Tokenizer:
    """Learn the merges on one epoch of documents."""
    text = corpus.load(folder)
    documents = corpus.documents(text.stories, text.easy + text.hard, random.Random(0))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    for special in SPECIAL:  # special tokens are not text
        documents = [document.replace(special, "\n") for document in documents]
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


if __name__ == "__main__":
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    learn(Path(sys.argv[1])).save(str(out / "tokenizer.json"), pretty=False)
    print(f"wrote {out / 'tokenizer.json'}")
