"""Trains draft methods on the output of the embedded model: a draft model, and heads that use its hidden states.

Run: python training/samples.py CORPUS OWN.npz && python training/drafts.py CORPUS OUT draft medusa --samples OWN.npz

The target is frozen; one forward pass serves all parts that are trained together. The schedule follows the clock, as in
``train.py``. Every few minutes each part is written to OUT, to continue with --start.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from pathlib import Path

import corpus
import numpy as np
import torch
from parts import LAYERS, PARTS, Rows, weights
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from nucleate.models.loader import EMBEDDED

ROWS, LENGTH = 4, 512
OWN = 0.9  # the share of rows that the target generated


class Stream:
    """An endless stream of rows of token ids: the target's samples, and documents of the corpus."""

    def __init__(self, folder: Path, samples: list[Path], seed: int) -> None:
        self.random = random.Random(seed)
        self.text, self.tokenizer = corpus.load(folder), Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
        self.samples = [sample for path in samples for sample in stored(path)]
        self.waiting: dict[bool, list[int]] = {True: [], False: []}

    def rows(self) -> Tensor:
        return torch.tensor([self._row(self.random.random() < OWN) for _ in range(ROWS)])

    def _row(self, own: bool) -> list[int]:
        if len(self.waiting[own]) < LENGTH:
            if own:
                self.random.shuffle(self.samples)
                more = [token for sample in self.samples for token in sample.tolist()]
            else:
                made = corpus.documents(self.text.stories, self.text.easy, self.random)[:2000]
                more = [token for found in self.tokenizer.encode_batch(made) for token in (0, *found.ids)]
            self.waiting[own] += more
        row, self.waiting[own] = self.waiting[own][:LENGTH], self.waiting[own][LENGTH:]
        return row


def stored(path: Path) -> list[np.ndarray]:
    """The samples of a file, each an array of ids."""
    with np.load(path) as found:
        return np.split(found["ids"].astype(np.int64), found["lengths"].cumsum()[:-1])


class Target:
    """The embedded model, with the hidden states of its layers."""

    def __init__(self) -> None:
        self.model = LlamaForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
        self.table_VX = self.model.get_input_embeddings().weight.detach().float()
        self.seen: dict[int, Tensor] = {}
        layers = [*self.model.model.layers, self.model.model.norm]
        for place in LAYERS:
            layers[place].register_forward_pre_hook(lambda _, given, place=place: self.seen.update({place: given[0]}))

    @torch.no_grad()
    def read(self, ids_BT: Tensor) -> Rows:
        last = self.model.model(input_ids=ids_BT, use_cache=False).last_hidden_state.float()
        return Rows(ids_BT, dict(self.seen), last, last @ self.table_VX.T)


def optimizers(part: nn.Module, full: float) -> list[torch.optim.Optimizer]:
    hidden = [p for p in part.parameters() if p.ndim == 2 and len(p) > 8]
    other = [p for p in part.parameters() if not (p.ndim == 2 and len(p) > 8)]
    made: list[torch.optim.Optimizer] = [
        torch.optim.Muon(hidden, lr=full, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    ]
    return [*made, torch.optim.AdamW(other, lr=full, betas=(0.9, 0.98), weight_decay=0.0)] if other else made


def rate(progress: float, decay: float) -> float:
    """The learning rate at this progress (0..1), relative to its maximum."""
    return max(0.0, min(1.0, progress / 0.01, (1.0 - progress) / (1.0 - decay)))


def save(part: nn.Module, path: Path, seconds: float, tokens: int) -> None:
    """Write bfloat16 weights, with the target that they were trained for."""
    target = hashlib.sha256((EMBEDDED / "model.safetensors").read_bytes()).hexdigest()
    state = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in part.state_dict().items()}
    about = {"target": target, "minutes": f"{seconds / 60:.0f}", "tokens": str(tokens)}
    save_file(state, path.with_suffix(".new"), metadata=about)
    path.with_suffix(".new").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--samples", type=Path, nargs="+", required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--start", type=Path, help="folder of parts to continue from")
    parser.add_argument("--rate", type=float, default=5e-3, help="highest learning rate")
    parser.add_argument(
        "--decay", type=float, default=0.4, help="share of the run after which the learning rate decays"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    stream, target = Stream(options.corpus, options.samples, options.seed), Target()
    parts = {name: PARTS[name]() for name in options.parts}
    if options.start:
        for name, part in parts.items():
            part.load_state_dict({k: v.float() for k, v in load_file(options.start / f"{name}.safetensors").items()})
    made = {name: optimizers(part, options.rate) for name, part in parts.items()}
    recent: dict[str, Tensor] = {}
    start = saved = time.monotonic()
    progress, step = 0.0, 0
    while progress < 1.0:
        step += 1
        progress = (time.monotonic() - start) / (60 * options.minutes)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = target.read(stream.rows())
        for name, part in parts.items():
            for optimizer in made[name]:
                for group in optimizer.param_groups:
                    group["lr"] = options.rate * rate(progress, options.decay)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = part(rows, target.table_VX)
            (losses * weights(len(losses))).sum().backward()
            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
            for optimizer in made[name]:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses = losses.detach()
            recent[name] = losses if step == 1 else 0.97 * recent[name] + 0.03 * losses
        seconds = time.monotonic() - start
        if step % 50 == 0:
            told = "  ".join(f"{name} " + " ".join(f"{x:.3f}" for x in loss) for name, loss in recent.items())
            print(
                f"{seconds / 60:6.1f} min  step {step}  {step * ROWS * LENGTH / seconds:.0f} tokens/s  {told}",
                flush=True,
            )
        if progress >= 1.0 or time.monotonic() - saved > min(180.0, 6 * options.minutes):
            saved = time.monotonic()
            for name, part in parts.items():
                save(part, options.out / f"{name}.safetensors", seconds, step * ROWS * LENGTH)


if __name__ == "__main__":
    main()
