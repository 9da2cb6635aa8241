"""Converts a checkpoint to the model folder that ships: weights, tokenizer, chat template, defaults, model card.

Run: python training/export.py CHECKPOINT src/nucleate/models/embedded
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import corpus
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('roles are system, user and assistant, got ' ~ message['role']) }}{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CARD = """---
license: apache-2.0
language: en
tags: [tiny, stories, test-model]
---
# nucleate-tiny

A Llama of {parameters:,} parameters that tells short stories for children, so that the whole pipeline runs on a fresh machine
with no model download. It exists for demonstrations and tests: it knows nothing of the world and must not be relied on.

| | |
|---|---|
| architecture | Llama, 6 layers, width 192, 6 heads (2 of keys and values), context 1024, tied embeddings, bfloat16 |
| tokenizer | byte-level BPE, 4096 ids, learned on the same text |
| trained on | {trained_tokens:,} tokens, {minutes} minutes on two CPU cores, by `training/` of the nucleate repository |
| held-out loss | {held_out_nats_per_token:.4f} nats per token, {held_out_nats_per_byte:.4f} nats ({held_out_bits_per_byte:.4f} bits) per byte |
| held-out text | {held_out_bytes:,} bytes ({held_out_tokens:,} tokens): two in a hundred of the TinyStories, chosen by digest; the checkpoint was chosen on it too |
| recommended | temperature 0.7, top_p 0.9, top_k 50 (in `generation_config.json`) |

## What it can do
- Continue a story: `Once upon a time`.
- Chat, one or a few turns: `Tell me a story about a fox and a drum.`
- Write a record about a story: `Describe the story as JSON.` gives `{{"title": ..., "hero": ..., "place": ...}}`.

Requests and records were derived from the stories by the rules in `training/corpus.py`.

## Sources and licences of the training text
The text itself is not part of this repository; only what was learned from it is.

| source | licence |
|---|---|
| TinyStories (Eldan and Li, 2023, arXiv 2305.07759), a deduplicated subset of 10,910 stories | CDLA-Sharing-1.0 |
| African Storybook, and Pratham Books / StoryWeaver: 567 picture-book texts | CC BY, by their authors and translators |
| Fairy tales from Project Gutenberg, the simpler ones | public domain |

The weights, the tokenizer and this card are under the Apache License 2.0.
"""


def export(checkpoint: Path, out: Path, minutes: str) -> None:
    """Write every file of the model folder."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    first = corpus.SEPARATOR
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(checkpoint / name, out / name)
    end = tokenizer.token_to_id(corpus.END)
    write(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", bos_token=first, eos_token=first,
          clean_up_tokenization_spaces=False, model_max_length=1024, chat_template=CHAT_TEMPLATE)  # fmt: skip
    write(out / "generation_config.json", bos_token_id=0, eos_token_id=[0, end], do_sample=True, temperature=0.7,
          top_p=0.9, top_k=50)  # fmt: skip
    report = json.loads((checkpoint / "training.json").read_text())
    per_byte = report["held_out_nats_per_token"] * report["held_out_tokens"] / report["held_out_bytes"]
    (out / "README.md").write_text(CARD.format(**report, held_out_nats_per_byte=per_byte, minutes=minutes))


def write(path: Path, **values: object) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "126")
