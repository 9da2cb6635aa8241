"""compare: generates the outputs of all settings, prompts and seeds, scores them, and computes the metrics.

Outputs are scored by the unmodified model, in one forward pass each.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nucleate.comparison.comparison import DIVERSITY, QUALITY, Comparison, check_metrics
from nucleate.comparison.inputs import BUILT_IN, check_prompts, read_settings
from nucleate.comparison.results_file import OutputResult, ResultsFile
from nucleate.llm import LLM, progress_bar
from nucleate.models.protocol import Model
from nucleate.outputs import CompletionOutput
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import Tap
from nucleate.sampling_params import SamplingParams

BATCH = 64
"""Outputs that are generated together, before their results are written."""
Job = tuple[str, int, int]
"""The setting, the index of the prompt, and the seed of an output."""


@with_suggestions
def compare(
    llm: LLM,
    settings: Mapping[str, Any] | Sequence[str],
    prompts: Sequence[str] | None = None,
    *,
    seeds: int | Sequence[int] = 8,
    max_tokens: int = 64,
    output: str | Path | None = None,
    use_tqdm: bool = False,
    x: str = QUALITY,
    y: str = DIVERSITY,
) -> Comparison:
    """Compare settings over prompts and seeds. Raises ParameterError.

    settings: a mapping of names to SamplingParams, pipelines, mappings of fields, or text such as ``temperature=0.8
    top_p=0.9``; or a list of such texts. prompts: None for built-in ones. seeds: how many (0, 1, ...), or a list.
    max_tokens: for settings that do not set it. output: a JSONL file to which results are appended; a comparison that
    was interrupted continues from it. use_tqdm: show a progress bar on stderr. x, y: the metrics of the trade-off.
    """
    check_metrics(x, y)
    chosen = read_settings(settings, llm.default_params, max_tokens)
    texts = check_prompts(BUILT_IN if prompts is None else prompts)
    numbers = _seeds(seeds)
    file = ResultsFile(output, _header(llm, chosen, texts))
    jobs = [(name, index, seed) for name in chosen for index in range(len(texts)) for seed in numbers]
    missing = [job for job in jobs if job not in file.results]
    prompt_ids = [llm.encode(text) for text in texts]
    with progress_bar(total=len(jobs), unit="output", shown=use_tqdm) as bar:
        bar.update(len(jobs) - len(missing))
        for start in range(0, len(missing), BATCH):
            batch = missing[start : start + BATCH]
            file.add([*_generate(llm, chosen, prompt_ids, batch)])
            bar.update(len(batch))
    return Comparison.from_results([*chosen], [file.results[job] for job in jobs], x, y)


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    found = [*range(seeds)] if isinstance(seeds, int) else [*seeds]
    if not found or len({*found}) < len(found) or not all(isinstance(one, int) and one >= 0 for one in found):
        raise ParameterError(
            "seeds", f"seeds must be a number from 1, or a list of different seeds, got {shown(seeds)}"
        )
    return found


def _header(llm: LLM, settings: Mapping[str, SamplingParams], prompts: Sequence[str]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    values = {name: params.to_dict() for name, params in settings.items()}
    model = type(llm.model).__name__ if llm.folder is None else llm.folder.name
    return {"model": model, "prompts": digest, "settings": values}


def _generate(
    llm: LLM, settings: Mapping[str, SamplingParams], prompt_ids: Sequence[Sequence[int]], jobs: Sequence[Job]
) -> Iterator[OutputResult]:
    params = [_with_logprobs(settings[name]).replace(seed=seed) for name, _, seed in jobs]
    completions = llm.generate([prompt_ids[index] for _, index, _ in jobs], params)
    for (name, index, seed), completion in zip(jobs, completions, strict=True):
        [found] = completion.outputs
        if found.finish_reason == "error":
            raise ParameterError("settings", f"setting {name!r}: prompt {index}, seed {seed}: {found.stop_reason}")
        ends = int(found.finish_reason == "stop" and found.stop_reason is None and bool(found.token_ids))
        scores = score(llm.model, prompt_ids[index], found.token_ids)._asdict()
        chances = _sampled_entropy(found) if _reports_processed(settings[name]) else None
        texts = found.token_ids, found.text, found.finish_reason
        yield OutputResult(name, index, seed, *texts, ends, sampled_entropy=chances, **scores)


def _reports_processed(params: SamplingParams) -> bool:
    """Whether the comparison may request logprobs: a pipeline with a Tap of its own reports others."""
    return not any(isinstance(stage, Tap) for stage in params.pipeline or ())


def _with_logprobs(params: SamplingParams) -> SamplingParams:
    """The parameters with logprobs of the distribution that is sampled from."""
    return params.replace(logprobs=0, logprobs_mode="processed") if _reports_processed(params) else params


def _sampled_entropy(output: CompletionOutput) -> float | None:
    if not output.logprobs:
        return None
    return -math.fsum(step.chosen.logprob for step in output.logprobs) / len(output.logprobs)


class OutputScores(NamedTuple):
    """Means over the tokens of an output, in nats, by the model at temperature 1; None without tokens."""

    log_likelihood: float | None  #: of the tokens
    entropy: float | None  #: of the distribution before each token


def score(model: Model, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> OutputScores:
    """Score an output."""
    if not token_ids:
        return OutputScores(None, None)
    context = model.begin()
    logits_TV = np.asarray(context.forward_all([*prompt_ids, *token_ids[:-1]]))[-len(token_ids) :]
    chosen, entropies = [], []
    for logits_V, token in zip(logits_TV, token_ids, strict=True):  # one at a time: float64 copies take memory
        x_V = logits_V.astype(np.float64)
        x_V -= x_V.max()
        e_V = np.exp(x_V)
        mass = e_V.sum()
        chosen.append(x_V[token] - np.log(mass))
        entropies.append(np.log(mass) - (e_V * np.where(e_V > 0, x_V, 0.0)).sum() / mass)
    return OutputScores(float(np.mean(chosen)), float(np.mean(entropies)))
