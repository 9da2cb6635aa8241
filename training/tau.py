"""Mean acceptance length (tau) of each draft method on held-out prompts.

Run: python training/tau.py CORPUS --tokens 4 --temperature 0 draft medusa eagle dflash
     python training/tau.py CORPUS --tokens 12 --branches 1 3 medusa eagle suffix
     python training/tau.py CORPUS --target DEEPER draft

Uses its own loop over the batched model and ``nucleate.speculative.acceptance``, without an engine. tau is the number of
tokens per forward pass, at most tokens + 1; the prefill and its token do not count. With --branches above 1, drafts are
trees with this number of tokens in total. --target: another model with the same vocabulary, for draft methods that use
only tokens.
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

from nucleate.models.batched_llama import BatchedLlama
from nucleate.models.loader import EMBEDDED
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.models.runner import BLOCK, ModelInput, Move
from nucleate.sampling.functional import probabilities, sample
from nucleate.sampling_params import SamplingParams
from nucleate.speculative import acceptance
from nucleate.speculative.config import COUPLED, TOKEN_METHODS, TREE_METHODS
from nucleate.speculative.draft import ROOT, Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.neural import EMBEDDED_METHODS, load
from nucleate.speculative.suffix import SuffixProposer

ENDS = (0, 4)
ONLY_TOKENS = (*TOKEN_METHODS, "draft")


@dataclass
class Text:
    """A sequence, its noise, and the number of tokens that the target has computed."""

    key: int
    ids: list[int]
    prompt: int
    blocks: list[int]
    max_tokens: int
    params: SamplingParams
    computed: int = 0
    forwards: int = 0
    output_ids: list[int] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return len(self.output_ids) > self.max_tokens or any(token in ENDS for token in self.output_ids)

    def state(self, rule: str) -> DraftContext:
        temperature = self.params.temperature
        return DraftContext(self.key, self.ids, self.prompt, self.params.seed or 0, temperature, rule == COUPLED)


class Loop:
    """Decodes with the drafts of a proposer and one acceptance rule, until all texts have ended."""

    def __init__(self, model: Llama, proposer: Proposer, rule: str, tokens: int) -> None:
        self.runner, self.proposer, self.rule, self.tokens = BatchedLlama(model, 1 << 28), proposer, rule, tokens
        self.runner.capture_hidden_states(proposer.layers)
        self.seconds = 0.0

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, params: SamplingParams) -> list[Text]:
        each = -(-(max(map(len, prompts)) + max_tokens + self.tokens + 2) // BLOCK)
        texts = [
            Text(key, [*ids], len(ids), [*range(key * each, key * each + each)], max_tokens, params.replace(seed=key))
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
                    self.proposer.forget(text.key, text.output_ids)
        return texts

    def _step(self, texts: list[Text], drafts: list[Draft]) -> None:
        inputs = []
        for text, draft in zip(texts, drafts, strict=True):
            ids, parents = [*text.ids, *draft.tokens], draft.parents
            inputs.append(ModelInput(text.key, ids, text.computed, len(ids), text.blocks, len(draft) + 1, parents))
        logits_LV = self.runner.forward(inputs)
        offsets = np.cumsum([0, *(each.num_logits for each in inputs)])
        if self.rule == COUPLED:
            results = self._coupled(texts, drafts, logits_LV, offsets)
        else:
            results = [
                self._ruled(text, draft, logits_LV[first : first + len(draft) + 1])
                for text, draft, first in zip(texts, drafts, offsets, strict=False)
            ]
        outputs, moves, start = [], [], 0
        for text, draft, result, each in zip(texts, drafts, results, inputs, strict=True):
            new = result.tokens(draft)
            new = new[: next((place + 1 for place, token in enumerate(new) if token in ENDS), len(new))]
            length, before = len(text.ids), text.computed
            text.ids, text.output_ids, text.computed = text.ids + new, text.output_ids + new, length + len(new) - 1
            path = result.path[: len(new) - 1]
            if path != tuple(range(len(path))):
                moves.append(Move(text.key, text.blocks, [length + place for place in path], length))
            if self.proposer.layers:
                indices = [*range(before, length), *(length + place for place in path)]
                hidden_states_TF = self.runner.hidden_states[np.array(indices) - before + start]
                outputs.append(TargetOutput(text.key, before, text.ids[before : text.computed], hidden_states_TF))
            start += each.stop - each.start
        self.runner.move(moves)
        if outputs:
            begin = time.perf_counter()
            self.proposer.observe(outputs)
            self.seconds += time.perf_counter() - begin

    def _coupled(
        self, texts: list[Text], drafts: list[Draft], logits_LV: Floats, offsets: Any
    ) -> list[acceptance.AcceptanceResult]:
        depths = [{ROOT: ROOT} | dict(enumerate(draft.depths())) for draft in drafts]

        def draw(sequences: list[int], indices: list[int]) -> list[int]:
            rows = [offsets[sequence] + place + 1 for sequence, place in zip(sequences, indices, strict=True)]
            steps = [
                len(texts[s].output_ids) + depths[s][place] + 1 for s, place in zip(sequences, indices, strict=True)
            ]
            return [*map(int, sample(logits_LV[rows], [texts[s].params for s in sequences], step=steps))]

        return acceptance.coupled(drafts, draw)

    def _ruled(self, text: Text, draft: Draft, logits_LV: Floats) -> acceptance.AcceptanceResult:
        seed, step = text.params.seed or 0, len(text.output_ids)
        p_LV = probabilities(logits_LV, text.params)
        coins = acceptance.acceptance_uniforms(seed, step, len(draft))
        return acceptance.RULES[self.rule].verify(p_LV, draft, coins, acceptance.residual_uniform(seed, step))


def tau(texts: Sequence[Text]) -> float:
    """Tokens per forward pass."""
    return sum(len(text.output_ids) - 1 for text in texts) / sum(text.forwards for text in texts)


def prompts(folder: Path, count: int, seed: int = 0) -> list[list[int]]:
    """Beginnings of held-out stories, and as many requests for such stories."""
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
    """A proposer for the embedded model, by name."""
    if name in TOKEN_METHODS:
        return SuffixProposer(tree_width=branches) if name == "suffix" else TOKEN_METHODS[name]()
    return load(name, Llama(EMBEDDED), branches)


def cases(options: argparse.Namespace) -> Iterator[tuple[str, float, int, int, str]]:
    """All valid combinations of name, temperature, tokens, branches and rule."""
    for name in options.methods:
        for temperature in options.temperature:
            for tokens in options.tokens:
                for branches in options.branches if name in TREE_METHODS else [1]:
                    for rule in options.rules if temperature else [COUPLED]:
                        if branches == 1 or rule == COUPLED or acceptance.RULES[rule].trees:
                            yield name, temperature, tokens, branches, rule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("methods", nargs="+", choices=(*TOKEN_METHODS, *EMBEDDED_METHODS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4])
    parser.add_argument("--branches", type=int, nargs="+", default=[1])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--rules", nargs="+", default=[COUPLED, "rejection", "block"])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--target", type=Path, default=EMBEDDED, help="folder of another target model")
    options = parser.parse_args()
    if options.target != EMBEDDED and (unfit := [name for name in options.methods if name not in ONLY_TOKENS]):
        parser.error(f"{', '.join(unfit)} need hidden states; for another target, use {', '.join(ONLY_TOKENS)}")
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
