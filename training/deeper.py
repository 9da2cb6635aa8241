"""Trains a larger target model: a Llama of 8 layers of width 512 that predicts what the embedded model predicts.

Run: python training/samples.py CORPUS OWN.npz && python training/deeper.py CORPUS OUT --samples OWN.npz --minutes 20

It starts from the embedded model expanded to this size (``grow.py``), with noise on all weights, and is trained by
distillation. The result is for measurements of draft models (``training/tau.py --target OUT``, ``benchmarks/deeper.py
--target OUT``); it is not shipped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
from drafts import LENGTH, ROWS, Stream, Target, optimizers, rate
from grow import WIDTH, disturb, grown
from parts import anchors, divergence, take
from torch import Tensor
from train import evaluate, save
from transformers import LlamaForCausalLM

from nucleate.models.loader import EMBEDDED

BESIDE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@torch.no_grad()
def weakest(model: LlamaForCausalLM, rows: list[Tensor]) -> dict[str, float]:
    """The loss without the least important parts of the model: no part should be redundant."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def without(*parts: Tensor) -> float:
        for part in parts:
            part.zero_()
        found = nats(model, rows)
        model.load_state_dict(state)
        return found

    layers = model.model.layers
    channels = [[each.self_attn.o_proj.weight, each.mlp.down_proj.weight] for each in layers]
    quarters = [slice(start, start + WIDTH // 4) for start in range(0, WIDTH, WIDTH // 4)]
    return {
        "without_a_layer": min(without(*pair) for pair in channels),
        "without_a_quarter_of_the_width": min(
            without(model.model.embed_tokens.weight[:, q], *(weight[q] for pair in channels for weight in pair))
            for q in quarters
        ),
        "without_a_quarter_of_the_neurons": min(
            without(*(each.mlp.down_proj.weight[:, q] for each in layers))
            for q in (slice(at, None, 4) for at in range(4))
        ),
    }


def held_out_rows(stream: Stream, count: int, length: int = 512) -> list[Tensor]:
    told = (stream.tokenizer.encode(story).ids for story in stream.text.held_out[:count])
    return [torch.tensor([0, *ids, 0][:length]) for ids in told]


def nats(model: LlamaForCausalLM, rows: list[Tensor]) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return evaluate(model, rows)


def write(model: LlamaForCausalLM, out: Path, report: dict[str, float]) -> None:
    """Write the model in the Transformers format, with the tokenizer of the embedded model."""
    save(model, out, report)
    for name in BESIDE:
        shutil.copy(EMBEDDED / name, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=Path, nargs="+", required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--start", type=Path, help="continue from this checkpoint")
    parser.add_argument(
        "--noise", type=float, default=0.5, help="noise on all weights, relative to their size [default 0.5]"
    )
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument(
        "--decay", type=float, default=0.3, help="share of the run after which the learning rate decays"
    )
    parser.add_argument("--held-out", type=int, default=120, help="number of held-out stories for the loss")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    stream, target = Stream(options.corpus, options.samples, options.seed), Target()
    held = held_out_rows(stream, options.held_out)
    report: dict[str, float] = {"tokens": 0}
    if options.start:
        model = LlamaForCausalLM.from_pretrained(options.start, dtype=torch.float32)
        report |= json.loads((options.start / "training.json").read_text())
    else:
        model = grown(target.model)
        disturb(model, options.noise)
        report |= {"parameters": sum(p.numel() for p in model.parameters()), "noise": options.noise}
        report |= {"embedded": nats(target.model, held), "begun": nats(model, held)}
    before = report["tokens"]
    print(report, flush=True)
    made, recent = optimizers(model, options.rate), 0.0
    start = saved = time.monotonic()
    progress, step = 0.0, 0
    while progress < 1.0:
        step += 1
        progress = (time.monotonic() - start) / (60 * options.minutes)
        for group in (group for optimizer in made for group in optimizer.param_groups):
            group["lr"] = options.rate * rate(progress, options.decay)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = target.read(stream.rows())
            places = anchors(ROWS, LENGTH, LENGTH // 2)
            hidden = model.model(input_ids=rows.ids_BT, use_cache=False).last_hidden_state
            loss = divergence(model.lm_head(take(hidden, places)), take(rows.logits_BTV, places)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = loss.item() if step == 1 else 0.95 * recent + 0.05 * loss.item()
        seconds = time.monotonic() - start
        if step % 10 == 0:
            print(
                f"{seconds / 60:6.1f} min  step {step}  {step * ROWS * LENGTH / seconds:.0f} tokens/s  {recent:.4f}",
                flush=True,
            )
        if progress >= 1.0 or time.monotonic() - saved > max(180.0, 15 * options.minutes):
            saved = time.monotonic()
            report |= {"held_out": nats(model, held), "tokens": before + step * ROWS * LENGTH, "divergence": recent}
            write(model, options.out, report)
            print(report, flush=True)
    report |= weakest(model, held[:30]) | {"with_all": nats(model, held[:30])}
    write(model, options.out, report)
    print(report, flush=True)


if __name__ == "__main__":
    main()
