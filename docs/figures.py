"""Draws the pictures of docs/explanation with the embedded model: `python docs/figures.py [FOLDER]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import svg
from numpy.typing import NDArray

import nucleate as nc
from nucleate.sampling import noise

FOLDER = Path(__file__).parent / "pictures"
UNSURE, SURE = "The bear was sad. The bear was sad because the bear", "Once upon a time, there was a little girl"
SEED = 13
LLM = nc.LLM(generation_config="none")
Row = NDArray[np.float64]


def scores(prompt: str) -> Row:
    """The logarithms of the model's probabilities of the next token: [V]."""
    [completion] = LLM.generate(prompt, temperature=0, max_tokens=1, logprobs=LLM.model.vocab_size)
    scores_V = np.empty(LLM.model.vocab_size)
    for token in completion.outputs[0].logprobs[0].top:  # type: ignore[index]
        scores_V[token.token_id] = token.logprob
    return scores_V


def piece(token: int) -> str:
    """The text of a token, with a visible space."""
    return LLM.tokenizer.decode([token]).replace(" ", "·")


def panel(x: float, y: float, title: str, before_V: Row, after_V: Row, tokens: Sequence[int], unit: float) -> list[str]:
    """Bars of the probabilities of some tokens before (outlined) and after (filled) a stage. unit: pixels of p = 1."""
    shapes = [
        svg.text(x, y, title, "title"),
        svg.text(x, y + 16, f"{np.count_nonzero(after_V):,} tokens left", "small"),
    ]
    for place, token in enumerate(tokens):
        top, before, after = y + 24 + 17 * place, before_V[token], after_V[token]
        shapes += [svg.text(x + 58, top + 11, piece(token), "end" if after else "end small")]
        shapes += [svg.box(x + 64, top + 1, unit * after, 12, "more" if after > 1.0001 * before else "kept")]
        shapes += [svg.box(x + 64, top + 1, max(1.0, unit * before), 12, "before")]
        shapes += [svg.text(x + 70 + unit * max(before, after), top + 11, f"{after:.1%}" if after else "0", "small")]
    return shapes


def stages(title: str, prompts: Sequence[str], panels: Mapping[str, Mapping[str, Any]], count: int) -> str:
    """A row of panels for each prompt. panels: sampling parameters by title."""
    shapes, height = list[str](), 48 + 17 * count
    for place, prompt in enumerate(prompts):
        scores_V, y = scores(prompt), 22.0 + place * height
        before_V, tokens = np.exp(scores_V), np.argsort(-scores_V, kind="stable")[:count].tolist()
        for column, (name, values) in enumerate(panels.items()):
            params, past = nc.SamplingParams(**values), [LLM.encode(prompt)]
            after_V = nc.probabilities(scores_V[None], params, prompt_ids=past, output_ids=past)[0]
            unit = 100.0 / max(before_V.max(), after_V.max())
            shapes += panel(10 + 210 * column, y, name, before_V, after_V, tokens, unit)
    return svg.document(210 * len(panels) + 20, 6 + height * len(prompts), title, shapes)


def pipeline(trace: nc.Trace) -> str:
    """One bar per stage, divided among the tokens: how a distribution becomes a token."""
    shapes = list[str]()
    for place, step in enumerate(trace.steps):
        y, x = 12 + 46 * place, 170.0
        shapes += [svg.text(160, y + 15, step.name if step.stage is None else repr(step.stage), "end title")]
        shapes += [svg.text(160, y + 29, f"{step.left:,} left, entropy {step.entropy:.2f}", "end small")]
        for rank, token in enumerate(step.most_likely(min(step.left, 40))):
            width = 620 * float(step.probabilities[token])
            shapes += [svg.box(x, y, width, 32, "more" if token == trace.token_id else ("kept", "pale")[rank % 2])]
            if width > 40:
                shapes += [svg.text(x + width / 2, y + 20, piece(int(token)), "middle")]
            x += width
        if x < 789:
            shapes += [svg.box(x, y, 790 - x, 32, "gone")]
    return svg.document(800, 14 + 46 * len(trace.steps), "The stages of one step, from the logits to a token", shapes)


def gumbel(trace: nc.Trace) -> str:
    """Scores, noise and their sums, for the groups of tokens and for the tokens of the winning group."""
    scores_V = trace.steps[-2].scores
    groups = dict[int, list[int]]()
    for token in np.flatnonzero(trace.steps[-2].probabilities).tolist():
        groups.setdefault(token // noise.GROUP_SIZE, []).append(token)
    masses = [float(np.log(np.exp(scores_V[own]).sum())) for own in groups.values()]
    sums = with_noise(masses, list(groups), trace, noise.GROUP)
    winner = list(groups)[int(np.argmax(sums))]
    own, spans = groups[winner], {group: f"{256 * group} to {256 * group + 255}" for group in groups}
    own_scores = [float(scores_V[token]) for token in own]
    own_sums = with_noise(own_scores, own, trace, noise.TOKEN)
    if trace.token_id != own[int(np.argmax(own_sums))]:
        raise RuntimeError("the picture selects another token than the sampler")
    names = [f"{spans[group]}: {' '.join(map(piece, tokens))}" for group, tokens in groups.items()]
    y = 62 + 22 * len(groups)
    shapes = race(22, "1. Groups of 256 ids: logarithm of the sum of exp(score), plus noise", names, masses, sums)
    shapes += race(y, f"2. Ids {spans[winner]}: score plus noise", list(map(piece, own)), own_scores, own_sums)
    return svg.document(800, y + 16 + 22 * len(own), "A Gumbel-max draw in two levels", shapes)


def with_noise(values: Sequence[float], ids: Sequence[int], trace: nc.Trace, stream: int) -> list[float]:
    """The sums of scores and their Gumbel noise."""
    noises = noise.gumbel(noise.uniform(trace.seed, trace.step, stream, np.array(ids)))
    return [value + float(one) for value, one in zip(values, noises, strict=True)]


def race(y: float, title: str, names: Sequence[str], starts: Sequence[float], ends: Sequence[float]) -> list[str]:
    """Rows with a bar from each score to its sum with the noise; the highest sum is marked."""
    left, right = min(*starts, *ends) - 0.2, max(*starts, *ends) + 0.2
    shapes, best = [svg.text(10, y, title, "title")], max(ends)

    def at(value: float) -> float:
        return 330 + 320 * (value - left) / (right - left)

    for place, (name, start, end) in enumerate(zip(names, starts, ends, strict=True)):
        top, kind = y + 10 + 22 * place, "more" if end == best else "pale"
        shapes += [svg.text(320, top + 12, name, "end")]
        shapes += [svg.box(min(at(start), at(end)), top + 2, abs(at(end) - at(start)), 12, kind)]
        shapes += [svg.box(at(start) - 1.5, top, 3, 16, "kept")]
        shapes += [svg.text(790, top + 12, f"{start:.2f} {end - start:+.2f} = {end:.2f}", "end small")]
    return shapes


def coupled() -> str:
    """How often a draft token is accepted, by the distance of the draft's distribution from the model's."""
    count, scores_V = 4000, scores(UNSURE)
    errors_V = np.random.default_rng(0).normal(size=len(scores_V))
    distances, curves = list[float](), {"rejection": list[float](), "shared": list[float](), "own": list[float]()}
    p_V, seeds = np.exp(scores_V), np.arange(count)
    target = draws(scores_V, seeds)
    for size in (0.0, 0.2, 0.4, 0.6, 0.9, 1.2, 1.6, 2.0, 2.4):
        draft_V = scores_V + size * errors_V
        q_V = np.exp(draft_V - np.log(np.exp(draft_V).sum()))
        distances.append(0.5 * float(np.abs(p_V - q_V).sum()))
        curves["rejection"].append(1 - distances[-1])
        curves["shared"].append(float((draws(draft_V, seeds) == target).mean()))
        curves["own"].append(float((draws(draft_V, seeds + count) == target).mean()))
    return chart(distances, curves)


def draws(scores_V: Row, seeds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens of some seeds."""
    params = [nc.SamplingParams(seed=int(seed)) for seed in seeds]
    blocks = np.array_split(np.arange(len(seeds)), 16)
    sampled = [nc.sample(np.tile(scores_V, (len(b), 1)), [params[i] for i in b], step=0) for b in blocks]
    return np.concatenate([np.asarray(tokens) for tokens in sampled])


def chart(distances: Sequence[float], curves: Mapping[str, Sequence[float]]) -> str:
    """Lines over the total variation distance."""
    labels = {
        "rejection": ("rejection sampling: the optimum, other tokens", "pale line"),
        "shared": ("coupled, draft with the same noise: the same tokens", "kept line"),
        "own": ("coupled, draft with other random numbers", "more line"),
    }

    def at(distance: float, share: float) -> tuple[float, float]:
        return 60 + 640 * distance / 0.8, 290 - 250 * share

    shapes = [svg.line([at(0, 1), at(0, 0), at(0.8, 0)], "axis"), svg.text(60, 22, "accepted draft tokens", "title")]
    shapes += [svg.text(at(0, s)[0] - 8, at(0, s)[1] + 4, f"{s:.0%}", "end small") for s in (0, 0.25, 0.5, 0.75, 1)]
    shapes += [svg.text(at(d, 0)[0], 308, f"{d:.1f}", "middle small") for d in (0, 0.2, 0.4, 0.6, 0.8)]
    shapes += [
        svg.text(380, 328, "total variation distance between the draft's distribution and the model's", "middle small")
    ]
    for place, (name, (label, kind)) in enumerate(labels.items()):
        points = [at(d, share) for d, share in zip(distances, curves[name], strict=True)]
        shapes += [svg.line(points, kind), *(svg.box(x - 2.5, y - 2.5, 5, 5, kind.split()[0]) for x, y in points)]
        shapes += [
            svg.line([(360, 40 + 20 * place), (390, 40 + 20 * place)], kind),
            svg.text(398, 44 + 20 * place, label),
        ]
    return svg.document(760, 340, "Accepted draft tokens by distance of the distributions", shapes)


def figures() -> dict[str, str]:
    """All pictures by file name."""
    scales: dict[str, Any] = {
        "temperature 0.5": {"temperature": 0.5},
        "the model": {},
        "temperature 1.5": {"temperature": 1.5},
        "smoothing_factor 0.3": {"smoothing_factor": 0.3},
    }
    truncations: dict[str, Any] = {
        "the model": {}, "top_k 4": {"top_k": 4}, "top_p 0.8": {"top_p": 0.8}, "min_p 0.1": {"min_p": 0.1}
    }  # fmt: skip
    others: dict[str, Any] = {
        "typical_p 0.5": {"typical_p": 0.5},
        "epsilon_cutoff 0.03": {"epsilon_cutoff": 0.03},
        "top_n_sigma 3": {"top_n_sigma": 3},
        "top_h 0.5": {"top_h": 0.5},
    }
    creative: dict[str, Any] = {
        "XTC, threshold 0.08": {"xtc_probability": 1, "xtc_threshold": 0.08},
        "min_p 0.02, adaptive-p 0.1": {"min_p": 0.02, "adaptive_p_target": 0.1},
        "repetition_penalty 1.3": {"repetition_penalty": 1.3},
        "frequency_penalty 0.5": {"frequency_penalty": 0.5},
    }
    step = nc.trace(scores(UNSURE), nc.SamplingParams(temperature=1.3, top_k=20, min_p=0.05, top_p=0.9, seed=SEED))
    return {
        "stages-scales.svg": stages("Stages that transform all scores", [UNSURE], scales, 10),
        "stages-truncation.svg": stages(
            "Truncation where the model is unsure, and sure", [UNSURE, SURE], truncations, 8
        ),
        "stages-more-truncation.svg": stages("Other truncations", [UNSURE], others, 10),
        "stages-creative.svg": stages("XTC, adaptive-p and penalties", [UNSURE], creative, 10),
        "pipeline.svg": pipeline(step),
        "gumbel.svg": gumbel(step),
        "coupled.svg": coupled(),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, content in figures().items():
        (folder / name).write_text(content, "utf-8")
        print(f"{name}: {len(content):,} bytes")
