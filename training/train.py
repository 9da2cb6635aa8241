"""Trains the embedded model: a small Llama on one machine, CPU or GPU, in a given number of minutes.

Run: python training/tokenizer.py CORPUS OUT && python training/train.py CORPUS OUT --minutes 110

The schedule follows the clock: warm-up, constant rate, linear decay to zero over the last third. Hidden matrices are
trained with Muon, everything else with AdamW. Every few minutes the held-out loss is measured, and the best checkpoint
is written to OUT in the Transformers format. A small model eventually memorises a small corpus: a short second run with
--start, --noise and more --chats undoes some of that, and makes stories follow the requests more closely.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import corpus
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 1024
TOKENS_PER_STEP = 8192
HARD_UNTIL = 0.6  # share of the run that uses the old fairy tales
LONG_FROM = 0.75  # rows have CONTEXT tokens from here on, half as many before
DECAY_FROM = 0.62


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


class Stream:
    """An endless stream of rows of token ids, from newly derived documents each epoch."""

    def __init__(self, text: corpus.Corpus, tokenizer: Tokenizer, seed: int, chats: float) -> None:
        self.text, self.tokenizer, self.random, self.chats = text, tokenizer, random.Random(seed), chats
        self.progress, self.epoch = 0.0, 0
        self.ids: list[int] = []

    def rows(self, rows: int, length: int) -> torch.Tensor:
        need = rows * length + 1
        while len(self.ids) < need:
            plain = self.text.easy + (self.text.hard if self.progress < HARD_UNTIL and self.epoch % 2 == 0 else [])
            made = corpus.documents(self.text.stories, plain, self.random, self.chats)
            self.epoch += 1
            for encoding in self.tokenizer.encode_batch(made):
                self.ids += [0, *encoding.ids]
        taken, self.ids = self.ids[:need], self.ids[need - 1 :]
        return torch.tensor(taken)


def rate(progress: float) -> float:
    """The learning rate at this progress (0..1), relative to its maximum."""
    return min(1.0, progress / 0.01, max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM)))


@torch.inference_mode()
def evaluate(model: LlamaForCausalLM, rows: list[torch.Tensor]) -> float:
    """Mean loss in nats per token over held-out stories, each alone in its row."""
    model.eval()
    total = sum(
        float(model(input_ids=row[None, :-1], labels=None).logits[0].log_softmax(-1).gather(1, row[1:, None]).sum())
        for row in rows
    )
    model.train()
    return -total / sum(len(row) - 1 for row in rows)


def save(model: LlamaForCausalLM, out: Path, report: dict[str, float]) -> None:
    """Write config and bfloat16 weights in the Transformers format, with the measurements."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.to(torch.bfloat16).save_pretrained(out)
    model.to(torch.float32)
    model.load_state_dict(state)
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")


def batches(stream: Stream, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        length = CONTEXT if stream.progress > LONG_FROM else CONTEXT // 2
        ids = stream.rows(TOKENS_PER_STEP // length, length).to(device)
        yield ids[:-1].view(-1, length), ids[1:].view(-1, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=110.0)
    parser.add_argument("--start", type=Path, help="continue from this checkpoint")
    parser.add_argument("--rate", type=float, default=6e-3, help="highest learning rate")
    parser.add_argument("--chats", type=float, default=0.5, help="share of the stories in chats")
    parser.add_argument("--noise", type=float, default=0.0, help="share of the input tokens replaced by random ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    text = corpus.load(options.corpus)
    held = [torch.tensor([0, *tokenizer.encode(story).ids, 0][:CONTEXT]).to(options.device) for story in text.held_out]
    held_bytes = sum(len(story.encode()) + 1 for story in text.held_out)
    held_tokens = sum(len(row) - 1 for row in held)

    model = LlamaForCausalLM(config()).to(options.device)
    before = 0
    if options.start:
        started = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        model.load_state_dict(started.state_dict())
        text.hard.clear()  # used in the first run
        before = json.loads((options.start / "training.json").read_text())["trained_tokens"]
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    other = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(hidden, lr=options.rate, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    peak = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]

    stream = Stream(text, tokenizer, options.seed, options.chats)
    start = checkpoint = time.monotonic()
    recent, best = 0.0, math.inf
    for step, (inputs, targets) in enumerate(batches(stream, options.device), 1):
        stream.progress = (time.monotonic() - start) / (60 * options.minutes)
        for group, full in zip((g for o in optimizers for g in o.param_groups), peak, strict=True):
            group["lr"] = full * rate(stream.progress)
        noisy = torch.rand(inputs.shape, device=inputs.device) < options.noise
        inputs = torch.where(noisy, torch.randint_like(inputs, 5, 4096), inputs)
        with torch.autocast(options.device, dtype=torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = float(loss) if step == 1 else 0.95 * recent + 0.05 * float(loss)
        if step % 25 == 0:
            seconds = time.monotonic() - start
            print(
                f"{seconds / 60:6.1f} min  step {step}  epoch {stream.epoch}  loss {recent:.4f}  {step * TOKENS_PER_STEP / seconds:.0f} tokens/s",
                flush=True,
            )
        done = stream.progress >= 1.0
        if done or time.monotonic() - checkpoint > min(300.0, 6 * options.minutes):
            checkpoint = time.monotonic()
            nats = evaluate(model, held)
            report = {
                "held_out_nats_per_token": nats,
                "held_out_bits_per_byte": nats * held_tokens / held_bytes / math.log(2),
                "held_out_tokens": held_tokens,
                "held_out_bytes": held_bytes,
                "trained_tokens": before + step * TOKENS_PER_STEP,
                "parameters": sum(p.numel() for p in model.parameters()),
            }
            if nats < best:
                best = nats
                save(model, options.out, report)
            print(
                f"        held out {nats:.4f} nats/token (best {best:.4f}), {report['held_out_bits_per_byte']:.4f} bits/byte",
                flush=True,
            )
        if done:
            break


if __name__ == "__main__":
    main()
