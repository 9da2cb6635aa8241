"""compare: generates the outputs of all settings, prompts and seeds, scores them, and computes the metrics.

Outputs are scored by the unmodified model, in one forward pass each. The results can be a JSONL file, so that an
interrupted comparison continues: a header describes the comparison, each further line is the result of one output. A
header is written again when settings are added. Settings are fields of SamplingParams as keywords, as text
(``temperature=0.8 top_p=0.9``), or a pipeline. Prompts are built-in ones, or those of a file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nucleate.comparison.comparison import DIVERSITY, QUALITY, Comparison, OutputResult, check_metrics
from nucleate.llm import LLM, progress_bar
from nucleate.models.protocol import Model
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.sampling.pipeline_format import is_pipeline
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
        raise invalid_value("seeds", "a number from 1, or a list of different seeds", seeds)
    return found


def _header(llm: LLM, settings: Mapping[str, SamplingParams], prompts: Sequence[str]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    values = {name: params.to_dict() for name, params in settings.items()}
    model = type(llm.model).__name__ if llm.folder is None else llm.folder.name
    return {"model": model, "prompts": digest, "settings": values}


def _generate(
    llm: LLM, settings: Mapping[str, SamplingParams], prompt_ids: Sequence[Sequence[int]], jobs: Sequence[Job]
) -> Iterator[OutputResult]:
    # a pipeline with a Tap of its own reports other logprobs than those of the sampled distribution
    tapped = {name for name, own in settings.items() if any(isinstance(stage, Tap) for stage in own.pipeline or ())}
    processed = {"logprobs": 0, "logprobs_mode": "processed"}
    params = [settings[name].replace(seed=seed, **({} if name in tapped else processed)) for name, _, seed in jobs]
    completions = llm.generate([prompt_ids[index] for _, index, _ in jobs], params)
    for (name, index, seed), completion in zip(jobs, completions, strict=True):
        [found] = completion.outputs
        if found.finish_reason == "error":
            raise ParameterError("settings", f"setting {name!r}: prompt {index}, seed {seed}: {found.stop_reason}")
        ends = int(found.finish_reason == "stop" and found.stop_reason is None and bool(found.token_ids))
        scores = score(llm.model, prompt_ids[index], found.token_ids)._asdict()
        logprobs = () if name in tapped else [step.chosen.logprob for step in found.logprobs or ()]
        chances = -math.fsum(logprobs) / len(logprobs) if logprobs else None
        texts = found.token_ids, found.text, found.finish_reason
        yield OutputResult(name, index, seed, *texts, ends, sampled_entropy=chances, **scores)


class OutputScores(NamedTuple):
    """Means over the tokens of an output, in nats, by the model at temperature 1; None without tokens."""

    log_likelihood: float | None  #: of the tokens
    entropy: float | None  #: of the distribution before each token


def score(model: Model, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> OutputScores:
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


FORMAT = "nucleate compare 1"


class ResultsFile:
    """A file of results; without a path, only memory. Raises ParameterError for the results of another comparison."""

    def __init__(self, path: str | Path | None, header: Mapping[str, Any]) -> None:
        """header: values that must not change; ``settings`` in it maps names to fields, and may grow."""
        self.path = None if path is None else Path(path)
        self.header = {"format": FORMAT, **json.loads(json.dumps(header))}
        self.results: dict[tuple[str, int, int], OutputResult] = {}
        known: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            data = self.path.read_bytes()
            end = data.rfind(b"\n") + 1
            if end < len(data):
                os.truncate(self.path, end)  # the incomplete line of an interrupted run
            for line in data[:end].splitlines():
                known = self._read(line, known)
        settings = {**known.get("settings", {}), **self.header["settings"]}
        if known.get("settings") != settings:
            self._append([{**self.header, "settings": settings}])

    def _read(self, line: bytes, known: dict[str, Any]) -> dict[str, Any]:
        """Read a line. Returns the header so far."""
        try:
            record = json.loads(line)
            if "format" in record:
                self._check(record)
                return dict(record)
            if not known:
                raise ValueError
            result = OutputResult(**{**record, "token_ids": tuple(record["token_ids"])})
        except ParameterError:
            raise
        except (ValueError, TypeError, KeyError):
            raise ParameterError("output", f"{self.path} is not a file of results; use another file") from None
        self.results[result.key] = result
        return known

    def _check(self, other: Mapping[str, Any]) -> None:
        """Raise ParameterError if the file is of another comparison."""
        pairs = [(name, other.get(name), value) for name, value in self.header.items() if name != "settings"]
        before = other.get("settings", {})
        pairs += [(f"setting {name!r}", before.get(name, now), now) for name, now in self.header["settings"].items()]
        for name, then, now in pairs:
            if then != now:
                change = f"{name} was {shown(then)} and is now {shown(now)}"
                raise ParameterError("output", f"{self.path} has results of another comparison: {change}")

    def add(self, results: Sequence[OutputResult]) -> None:
        self.results.update((one.key, one) for one in results)
        self._append(map(asdict, results))

    def _append(self, records: Iterable[Mapping[str, Any]]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)


FIELD = "settings"
OWN = {"n": 1, "seed": None, "prompt_logprobs": None}
"""Fields that the comparison sets itself, with their values here."""


def read_settings(given: Any, defaults: SamplingParams, max_tokens: int) -> dict[str, SamplingParams]:
    """Return the settings by name, with defaults for fields that they do not set. Raises ParameterError.

    given: a mapping of names to settings, or a list of settings as text, which are their own names.
    """
    if not isinstance(given, Mapping):
        if isinstance(given, str) or not all(isinstance(one, str) for one in given):
            raise ParameterError(FIELD, f"settings must be a mapping of names, or a list of texts, got {shown(given)}")
        given = named(given)
    if not given:
        raise ParameterError(FIELD, "settings is empty; give at least one, such as 'temperature=0.8 top_p=0.9'")
    return {str(name): _read(str(name), one, defaults, max_tokens) for name, one in given.items()}


def named(texts: Iterable[str]) -> dict[str, str]:
    """Return settings by name: that in front of a colon (``warm: temperature=1.2``), or the whole text."""
    found: dict[str, str] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        name, fields = (name, rest) if colon and "=" not in name and name.strip() else (text.strip() or "default", text)
        if name.strip() in found:
            raise ParameterError(FIELD, f"settings has {name.strip()!r} twice")
        found[name.strip()] = fields
    return found


def _read(name: str, given: Any, defaults: SamplingParams, max_tokens: int) -> SamplingParams:
    try:
        params = _params(given, defaults)
        for field, own in OWN.items():
            if getattr(params, field) != own:
                why = "the comparison sets the seeds, with one output each"
                raise ParameterError(field, f"{field} cannot be set: {why}, got {shown(getattr(params, field))}")
        return params if params.max_tokens is not None else params.replace(max_tokens=max_tokens)
    except ParameterError as error:
        raise ParameterError(FIELD, f"setting {name!r}: {error}") from None


def _params(given: Any, defaults: SamplingParams) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given.with_defaults(defaults)
    if isinstance(given, tuple) and is_pipeline(given):
        return defaults.override(pipeline=given)
    if isinstance(given, str):
        given = parse(given)
    if not isinstance(given, Mapping):
        allowed = "an object of fields, text such as 'temperature=0.8', a SamplingParams or a pipeline"
        raise ParameterError(FIELD, f"must be {allowed}, got {shown(given)}")
    return defaults.override(**{str(name): value for name, value in given.items()})


def parse(text: str) -> dict[str, Any]:
    """Return the fields of a text, ``NAME=VALUE ...``. Values are JSON, or else text; quotes as in a shell."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ParameterError(FIELD, f"{text!r} cannot be read: {error}") from None
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ParameterError(FIELD, f"must be NAME=VALUE words, such as temperature=0.8, got {word!r}")
        if name in found:
            raise ParameterError(FIELD, f"has {name} twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


BUILT_IN = (
    "Once upon a time",
    "The little dog ran to the",
    "One day, a girl named Lily found a",
    "The sun was shining and the birds",
    "Tom and his sister wanted to build a",
    "It was raining, so the children",
    "The old man looked at the sea and",
    "There was a small house near the forest.",
)
"""Prompts for the embedded model, which tells stories."""


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts of a file, one per line: text, a JSON string, or an object with a prompt. Raises OSError."""
    found = []
    for number, line in enumerate(Path(path).read_text("utf-8-sig").splitlines(), 1):
        if line.strip():
            found.append(_prompt(line.strip(), f"{path}, line {number}"))
    return check_prompts(found)


def _prompt(line: str, place: str) -> str:
    if not line.startswith(("{", '"')):
        return line
    try:
        value: Any = json.loads(line)
    except ValueError:
        if line.startswith('"'):  # a line of dialogue
            return line
        raise ParameterError("prompts", f"{place} begins with {{ but is not JSON: {shown(line)}") from None
    value = value.get("prompt") if isinstance(value, Mapping) else value
    if not isinstance(value, str):
        raise ParameterError("prompts", f"{place} must have the field prompt with a string, got {shown(line)}")
    return value


def check_prompts(prompts: Sequence[str]) -> list[str]:
    """Return the prompts as a list. Raises ParameterError."""
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise ParameterError("prompts", f"prompts must be a list of non-empty strings, got {shown(given)}")
    return given
