"""How many tokens a forward of the target gives with each proposer, on beginnings that it was not trained on.

Run: python training/tau.py CORPUS --tokens 4 --temperature 0 draft medusa eagle dflash
     python training/tau.py CORPUS --tokens 12 --branches 1 3 medusa eagle suffix
     python training/tau.py CORPUS --target DEEPER draft

A loop of its own over the packed model and the rules of ``nucleate.speculative.acceptance``: no engine. tau is the number of
tokens per forward, at most tokens + 1; a prompt's own forward and its token do not count. With --branches above 1 drafts
are trees, of so many tokens in all. --target is another model with the same vocabulary, for parts that read only tokens.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import corpus
import numpy as np
from tokenizers import Tokenizer

from nucleate.models.llama.batched_llama import BatchedLlama
from nucleate.models.llama.numpy_llama import Floats, Llama
from nucleate.models.loader import EMBEDDED
from nucleate.models.runner import BLOCK, ModelInput, Move
from nucleate.sampling.functional import probabilities, sample
from nucleate.sampling_params import SamplingParams
from nucleate.speculative import acceptance
from nucleate.speculative.config import COUPLED, TOKEN_METHODS, TREE_METHODS
from nucleate.speculative.draft import ROOT, Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.proposers.neural import NAMES, load
from nucleate.speculative.proposers.suffix import SuffixProposer

ENDS = (0, 4)
ONLY_TOKENS = (*TOKEN_METHODS, "draft")


@dataclass
class Text:
    """A sequence, its noise, and how far the target has read it."""

    key: int
    ids: list[int]
    prompt: int
    blocks: list[int]
    most: int
    params: SamplingParams
    read: int = 0
    forwards: int = 0
    told: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return len(self.told) > self.most or any(token in ENDS for token in self.told)

    def state(self, rule: str) -> DraftContext:
        temperature = self.params.temperature
        return DraftContext(self.key, self.ids, self.prompt, self.params.seed or 0, temperature, rule == COUPLED)


class Loop:
    """Verifies the drafts of a proposer with one rule, until all texts are over."""

    def __init__(self, model: Llama, proposer: Proposer, rule: str, tokens: int) -> None:
        self.runner, self.proposer, self.rule, self.tokens = BatchedLlama(model, 1 << 28), proposer, rule, tokens
        self.runner.capture_hidden_states(proposer.layers)
        self.seconds = 0.0

    def run(self, prompts: Sequence[Sequence[int]], most: int, params: SamplingParams) -> list[Text]:
        each = -(-(max(map(len, prompts)) + most + self.tokens + 2) // BLOCK)
        texts = [
            Text(key, [*ids], len(ids), [*range(key * each, key * each + each)], most, params.replace(seed=key))
            for key, ids in enumerate(prompts)
        ]
        self._step(texts, [Draft()] * len(texts))
        while going := [text for text in texts if not text.over]:
            begin = time.perf_counter()
            drafts = self.proposer.propose([text.state(self.rule) for text in going], [self.tokens] * len(going))
            self.seconds += time.perf_counter() - begin
            self._step(going, drafts)
            for text in going:
                text.forwards += 1
                if text.over:
                    self.proposer.forget(text.key, text.told)
        return texts

    def _step(self, texts: list[Text], drafts: list[Draft]) -> None:
        parts = []
        for text, draft in zip(texts, drafts, strict=True):
            ids, parents = [*text.ids, *draft.tokens], None if draft.chain else draft.parents
            parts.append(ModelInput(text.key, ids, text.read, len(ids), text.blocks, len(draft) + 1, parents))
        logits_LV = self.runner.forward(parts)
        firsts = np.cumsum([0, *(part.num_logits for part in parts)])
        if self.rule == COUPLED:
            verdicts = self._coupled(texts, drafts, logits_LV, firsts)
        else:
            verdicts = [
                self._ruled(text, draft, logits_LV[first : first + len(draft) + 1])
                for text, draft, first in zip(texts, drafts, firsts, strict=False)
            ]
        readings, moves, start = [], [], 0
        for text, draft, verdict, part in zip(texts, drafts, verdicts, parts, strict=True):
            new = verdict.tokens(draft)
            new = new[: next((place + 1 for place, token in enumerate(new) if token in ENDS), len(new))]
            length, before = len(text.ids), text.read
            text.ids, text.told, text.read = text.ids + new, text.told + new, length + len(new) - 1
            path = verdict.path[: len(new) - 1]
            if path != tuple(range(len(path))):
                moves.append(Move(text.key, text.blocks, [length + place for place in path], length))
            if self.proposer.layers:
                places = [*range(before, length), *(length + place for place in path)]
                features_TF = self.runner.hidden_states[np.array(places) - before + start]
                readings.append(TargetOutput(text.key, before, text.ids[before : text.read], features_TF))
            start += part.stop - part.start
        self.runner.move(moves)
        if readings:
            begin = time.perf_counter()
            self.proposer.read(readings)
            self.seconds += time.perf_counter() - begin

    def _coupled(
        self, texts: list[Text], drafts: list[Draft], logits_LV: Floats, firsts: Any
    ) -> list[acceptance.AcceptanceResult]:
        depths = [{ROOT: ROOT} | dict(enumerate(draft.depths())) for draft in drafts]

        def draw(sequences: list[int], places: list[int]) -> list[int]:
            rows = [firsts[sequence] + place + 1 for sequence, place in zip(sequences, places, strict=True)]
            steps = [len(texts[s].told) + depths[s][place] + 1 for s, place in zip(sequences, places, strict=True)]
            return [*map(int, sample(logits_LV[rows], [texts[s].params for s in sequences], step=steps))]

        return acceptance.coupled(drafts, draw)

    def _ruled(self, text: Text, draft: Draft, logits_LV: Floats) -> acceptance.AcceptanceResult:
        seed, step = text.params.seed or 0, len(text.told)
        p_LV = probabilities(logits_LV, text.params)
        coins = acceptance.acceptance_uniforms(seed, step, len(draft))
        return acceptance.RULES[self.rule].verify(p_LV, draft, coins, acceptance.residual_uniform(seed, step))


def tau(texts: Sequence[Text]) -> float:
    """Tokens per forward."""
    return sum(len(text.told) - 1 for text in texts) / sum(text.forwards for text in texts)


def prompts(folder: Path, count: int, seed: int = 0) -> list[list[int]]:
    """Beginnings of stories that were held out, and as many requests for such stories."""
    text, rng = corpus.load(folder), random.Random(seed)
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    weights = corpus.nouns([story.text for story in text.stories])
    made = []
    for place, story in enumerate(rng.sample(text.held_out, count)):
        if place % 2:
            asked = corpus.turn(corpus.USER, corpus.request(corpus.annotate(story, weights), rng)) + corpus.ASSISTANT
            made.append([0, *tokenizer.encode(asked).ids])
        else:
            made.append([0, *tokenizer.encode(story).ids[: rng.choice((16, 32, 64, 128))]])
    return [ids[1:] if ids[1:2] == [0] else ids for ids in made]


def proposer_of(name: str, branches: int) -> Proposer:
    """One for the embedded model, by its name."""
    if name in TOKEN_METHODS:
        return SuffixProposer(tree_width=branches) if name == "suffix" else TOKEN_METHODS[name]()
    return load(name, Llama(EMBEDDED), branches)


def cases(options: argparse.Namespace) -> Iterator[tuple[str, float, int, int, str]]:
    """Name, temperature, tokens, branches and rule of each that makes sense: chains where there are no trees."""
    for name in options.parts:
        for temperature in options.temperature:
            for tokens in options.tokens:
                for branches in options.branches if name in TREE_METHODS else [1]:
                    for rule in options.rules if temperature else [COUPLED]:
                        if branches == 1 or rule == COUPLED or acceptance.RULES[rule].trees:
                            yield name, temperature, tokens, branches, rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("parts", nargs="+", choices=(*TOKEN_METHODS, *NAMES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4])
    parser.add_argument("--branches", type=int, nargs="+", default=[1])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--rules", nargs="+", default=[COUPLED, "rejection", "block"])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--target", type=Path, default=EMBEDDED, help="the folder of another model to draft for")
    options = parser.parse_args()
    if options.target != EMBEDDED and (unfit := [name for name in options.parts if name not in ONLY_TOKENS]):
        parser.error(f"{', '.join(unfit)} read hidden states: for another target there are {', '.join(ONLY_TOKENS)}")
    model, texts = Llama(options.target), prompts(options.corpus, options.prompts)
    for name, temperature, tokens, branches, rule in cases(options):
        params = SamplingParams(temperature=temperature, top_p=options.top_p, top_k=options.top_k)
        begin = time.perf_counter()
        loop = Loop(model, proposer_of(name, branches), rule, tokens)
        done = loop.run(texts, options.length, params)
        shape = f"k={tokens}" + (f" branches={branches}" if branches > 1 else "")
        print(
            f"{name:7} T={temperature:g} {shape} {rule:9} tau {tau(done):.2f}"
            f"  {time.perf_counter() - begin:.1f} s, {loop.seconds:.1f} of them for drafts",
            flush=True,
        )


if __name__ == "__main__":
    main()
