"""Trains an EAGLE-3 head for a model of Transformers, writes it in the public layout, reads it back and measures it.

Run: python training/eagle3.py text MODEL CORPUS TEXT.npz --minutes 3
     python training/eagle3.py train MODEL CORPUS OUT --text TEXT.npz --rows 600 --minutes 7 [--start OUT]
     python training/eagle3.py measure MODEL CORPUS OUT

"text" lets the model continue beginnings of stories, half of them greedily. "train" runs the model over this text and
over stories, and trains the head (``parts.py``) on its hidden states. "measure" loads the head as any other one, and
decodes beginnings of held-out stories with it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import corpus
import numpy as np
import torch
from drafts import rate
from parts import EPSILON, Eagle, Mixing, Norm, Rows, linear, weights
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import nucleate as nc
from nucleate.speculative.neural.eagle_checkpoint import RENAMED, default_layers

BATCH, PROMPT, LENGTH = 64, 32, 160
ROWS, TOKENS = 8, 8192
"""Rows of a training step, and size of the head's vocabulary."""
HEADS, KV_HEADS, SIZE, INNER = 8, 2, 64, 1280
NAMES = {"fuse.": "fc.", "token_norm.": "midlayer.input_layernorm.", "hidden_norm.": "midlayer.hidden_norm."}
NAMES |= {f"layer.{ours}.": f"midlayer.{theirs}." for theirs, ours in RENAMED.items()}


class Head(Eagle):
    """The head. Its inputs are divided by ``scale`` [layers * width]; a written ``fc`` contains that."""

    def __init__(self, model: Any, target_ids: Tensor, scale: Tensor) -> None:
        nn.Module.__init__(self)
        width = model.config.get_text_config().hidden_size
        self.steps, self.scale, self.target_ids = 5, scale, target_ids
        self.fuse = linear(len(scale), width)
        self.token_norm, self.hidden_norm, self.norm = Norm(width), Norm(width), Norm(width)
        self.layer = Mixing(2 * width, INNER, width, HEADS, KV_HEADS, SIZE)
        self.lm_head = nn.Linear(width, len(target_ids), bias=False)
        self.lm_head.weight.data = model.get_output_embeddings().weight.detach()[target_ids].float()

    def inputs(self, rows: Rows) -> Tensor:
        return torch.cat([*rows.hidden.values()], -1).float() / self.scale

    def unembed(self, x: Tensor, table_VX: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(x)
        return logits

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        state = {**self.state_dict()}
        state["fuse.weight"] = state["fuse.weight"] / self.scale
        tensors = {_public(name): tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
        tensors["d2t"] = self.target_ids - torch.arange(len(self.target_ids))
        save_file(tensors, folder / "model.safetensors")
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": len(self.norm.weight), "num_hidden_layers": 1,
            "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": SIZE, "rms_norm_eps": EPSILON, "rope_theta": 10000.0, "draft_vocab_size": len(self.target_ids),
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    def read(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        state = {name: tensors[_public(name)].float() for name in self.state_dict()}
        state["fuse.weight"] = state["fuse.weight"] * self.scale
        self.load_state_dict(state)


def _public(name: str) -> str:
    """The name of a tensor in the public layout."""
    own = next((own for own in NAMES if name.startswith(own)), "")
    return NAMES.get(own, "") + name[len(own) :]


def beginnings(
    tokenizer: nc.Tokenizer, folder: Path, seed: int, count: int, length: int = PROMPT, *, held_out: bool = False
) -> list[list[int]]:
    """The first ``length`` tokens of ``count`` random stories that have more."""
    stories = [text for path in sorted(folder.glob("*.txt")) for text in corpus.read(path)]
    stories = [text for text in stories if corpus.held_out(text) == held_out and len(text) > 8 * length]
    chosen = random.Random(seed).sample(stories, min(count, len(stories)))
    return [tokenizer.encode(text[: 8 * length])[:length] for text in chosen]


def write_text(options: argparse.Namespace) -> None:
    llm, begin, rows = nc.LLM(options.model), time.monotonic(), []
    prompts = beginnings(llm.tokenizer, options.corpus, options.seed, 4000)
    while time.monotonic() - begin < 60 * options.minutes:
        batch, prompts = prompts[:BATCH], prompts[BATCH:]
        engine = llm.new_engine(max_num_seqs=BATCH)
        found = {}
        for index, ids in enumerate(batch):
            params = nc.SamplingParams(temperature=float(index % 2), max_tokens=LENGTH - PROMPT, ignore_eos=True)
            found[engine.add(nc.Request(ids, params))] = [*ids]
        while len(engine):
            for output in engine.step():
                found[output.request_id] += output.chunk.token_ids
        rows += [ids for ids in found.values() if len(ids) == LENGTH]
        print(f"{time.monotonic() - begin:.0f} s  {len(rows) * LENGTH} tokens", flush=True)
    np.savez(options.out, ids=np.array(rows, np.int32))


@torch.inference_mode()
def features(model: Any, ids_NT: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of the head's layers [N, T, layers * width], and the normalized last states [N, T, width]."""
    layers = default_layers(model.config.get_text_config().num_hidden_layers)
    parts, lasts = [], []
    for ids_BT in ids_NT.split(16):
        out = model.get_decoder()(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
        parts.append(torch.cat([out.hidden_states[layer] for layer in layers], -1).to(torch.bfloat16))
        lasts.append(out.last_hidden_state.to(torch.bfloat16))
    return torch.cat(parts).clone(), torch.cat(lasts).clone()


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    stories = beginnings(nc.LLM(options.model).tokenizer, options.corpus, options.seed, options.rows, LENGTH)
    ids_NT = torch.tensor([ids for ids in stories if len(ids) == LENGTH])
    texts = [torch.from_numpy(np.load(path)["ids"].astype(np.int64)) for path in options.text]
    own = sum(map(len, texts))
    ids_NT, begin = torch.cat([*texts, ids_NT]), time.monotonic()
    hidden_NTF, last_NTX = features(model, ids_NT)
    print(f"{ids_NT.numel()} tokens, read in {time.monotonic() - begin:.0f} s", flush=True)
    table_VX = model.get_input_embeddings().weight.detach()
    counted = Counter(ids_NT.flatten().tolist())
    target_ids = torch.tensor(sorted(token for token, _ in counted.most_common(TOKENS)))
    scale_F = hidden_NTF.float().flatten(0, 1).square().mean(0).sqrt()
    head = Head(model, target_ids, scale_F + 1e-3)
    if options.start:
        head.read(options.start)
    body = [p for name, p in head.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(body, lr=options.rate, momentum=0.95, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in head.parameters() if p.ndim == 1], lr=options.rate, weight_decay=0.0),
        torch.optim.AdamW(head.lm_head.parameters(), lr=options.rate / 10, weight_decay=0.0),
    ]
    highest = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    unembedding_DX = model.get_output_embeddings().weight.detach()[target_ids]
    layers = default_layers(model.config.get_text_config().num_hidden_layers)
    begin, progress, step, recent = time.monotonic(), 0.0, 0, torch.zeros(head.steps)
    while progress < 1.0:
        step += 1
        progress = (time.monotonic() - begin) / (60 * options.minutes)
        for optimizer, most in zip(optimizers, highest, strict=True):
            optimizer.param_groups[0]["lr"] = most * rate(progress, options.decay)
        chosen = torch.cat([torch.randint(own or len(ids_NT), (ROWS // 2,)), torch.randint(len(ids_NT), (ROWS // 2,))])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = dict(zip(layers, hidden_NTF[chosen].chunk(len(layers), -1), strict=True))
            rows = Rows(ids_NT[chosen], hidden, last_NTX[chosen], last_NTX[chosen] @ unembedding_DX.T)
            losses = head(rows, table_VX)
        (losses * weights(len(losses))).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = losses.detach() if step == 1 else 0.97 * recent + 0.03 * losses.detach()
        if step % 20 == 0 or progress >= 1.0:
            told = " ".join(f"{loss:.3f}" for loss in recent.tolist())
            print(f"{(time.monotonic() - begin) / 60:.1f} min  step {step}  {told}", flush=True)
        if step % 200 == 0 or progress >= 1.0:
            head.write(options.out)


def measure(options: argparse.Namespace) -> None:
    config = {"method": "eagle", "model": options.head, "num_speculative_tokens": options.drafted, "adaptive": False}
    llm = nc.LLM(options.model, dtype="float32", speculative_config=config)  # a batch in bfloat16 rounds differently
    prompts = beginnings(llm.tokenizer, options.corpus, options.seed, options.prompts, held_out=True)
    for temperature in (0.0, 1.0):
        texts = []
        for speculation in ("configured", None):
            engine = llm.new_engine(max_num_seqs=8, **({} if speculation else {"speculative_config": None}))
            found = {}
            for seed, ids in enumerate(prompts):
                params = nc.SamplingParams(temperature=temperature, seed=seed, max_tokens=64, ignore_eos=True)
                found[engine.add(nc.Request(ids, params))] = list[int]()
            while len(engine):
                for output in engine.step():
                    found[output.request_id] += output.chunk.token_ids
            texts.append([*found.values()])
            if speculation:
                stats = engine.stats.speculative
        pairs = zip(stats.accepted_tokens_per_position, stats.verified_tokens_per_position, strict=True)
        told = " ".join(f"{accepted / max(1, verified):.2f}" for accepted, verified in pairs)
        same = sum(one == other for one, other in zip(*texts, strict=True))
        print(
            f"T={temperature:g}  mean acceptance length {stats.mean_acceptance_length:.2f}, by position {told};"
            f" {same} of {len(prompts)} outputs are those without drafts",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(required=True)
    made = {name: commands.add_parser(name) for name in ("text", "train", "measure")}
    for name, command in made.items():
        command.set_defaults(run={"text": write_text, "train": train, "measure": measure}[name])
        command.add_argument("model", type=Path)
        command.add_argument("corpus", type=Path)
        command.add_argument("head" if name == "measure" else "out", type=Path)
        command.add_argument("--seed", type=int, default=1)
    made["text"].add_argument("--minutes", type=float, default=3.0)
    made["train"].add_argument("--text", type=Path, nargs="*", default=[], help="files of text; half of all rows")
    made["train"].add_argument("--rows", type=int, default=600, help="number of stories")
    made["train"].add_argument("--minutes", type=float, default=7.0)
    made["train"].add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    made["train"].add_argument("--decay", type=float, default=0.3, help="share of the run before the rate decays")
    made["train"].add_argument("--start", type=Path, help="continue from this head")
    made["measure"].add_argument("--prompts", type=int, default=24)
    made["measure"].add_argument("--drafted", type=int, default=4, help="draft tokens of a step")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
