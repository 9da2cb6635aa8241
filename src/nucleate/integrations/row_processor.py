"""Samples the rows of a generation loop that belongs to another library, and checks that it appends what was sampled.

The scores are torch tensors. Each row has its own sampling parameters, stop criteria and output.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from nucleate.engine.request import stop_rules
from nucleate.engine.running_request import OutputProcessor
from nucleate.outputs import Completion, CompletionChunk, Finish, FinishReason, StepLogprobs
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.functional import LogitsError
from nucleate.sampling.inputs import check_ids
from nucleate.sampling.pipeline_format import is_pipeline
from nucleate.sampling.sampler import Sampler
from nucleate.sampling_params import SamplingParams
from nucleate.structured_output import Guide, error_message
from nucleate.structured_output.compiler import GrammarManager
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

NEED_TEXT = ("stop", "stop_regex", "stop_json", "structured_outputs")
"""Fields that need a tokenizer."""


def params_of_rows(given: Any, count: int, copies: int, defaults: SamplingParams | None = None) -> list[SamplingParams]:
    """The parameters of each row: ``given`` for all, or a list with one entry per prompt, each with ``copies`` rows.

    An entry is a SamplingParams or a pipeline. defaults: for fields that an entry does not set. Raises ParameterError.
    """
    is_list = isinstance(given, list | tuple) and not is_pipeline(given)
    entries, prompts = (list(given) if is_list else [given] * (count // copies)), count // copies
    if len(entries) != prompts:
        got = f"got {len(entries)} of them for {prompts} prompts"
        raise ParameterError("sampling_params", f"a list of sampling_params must have one per prompt; {got}")
    return [_params(one, defaults) for one in entries for _ in range(copies)]


def _params(given: Any, defaults: SamplingParams | None) -> SamplingParams:
    params = SamplingParams(pipeline=given) if isinstance(given, tuple) else given
    params = SamplingParams() if given is None else params
    if not isinstance(params, SamplingParams):
        allowed = "a SamplingParams, a tuple of stages, or a list with one of these per prompt"
        raise ParameterError("sampling_params", f"sampling_params must be {allowed}, got {shown(given)}")
    if params.n != 1:
        raise ParameterError("n", f"n must be 1: num_return_sequences sets the outputs per prompt, got {params.n}")
    if params.prompt_logprobs is not None:
        raise ParameterError("prompt_logprobs", "prompt_logprobs needs LLM: the logits of the prompt are not available")
    return params if defaults is None else params.with_defaults(defaults)


class DecodingRows:
    """Samples a batch of rows, each until its own stop criteria end it.

    params, prompts: one per row. copies: rows per prompt; the seed of row i is that of its parameters plus i modulo
    copies. tokenizer: needed for NEED_TEXT and for text in other fields. Raises ParameterError.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        copies: int = 1,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._sampler, self.tokens = Sampler(vocab_size), [-1] * len(params)
        self._grammars = None if tokenizer is None else GrammarManager(tokenizer, vocab_size, None)
        self._prompts, self._copies = prompts, copies
        ends = tuple(sorted(token for token in eos_token_ids if token < vocab_size))  # others cannot be sampled
        self.rows: list[_Row] = []
        for place, (one, prompt) in enumerate(zip(params, prompts, strict=True)):
            if tokenizer is None and (names := [name for name in NEED_TEXT if getattr(one, name)]):
                raise ParameterError(names[0], f"{names[0]} needs the tokenizer of the model")
            stages = one.build_pipeline(ends, tokenizer)
            check_ids(stages, vocab_size)
            number = self._sampler.add(stages, prompt, seed=one.seed, index=place % copies)
            rules = stop_rules(one, eos_token_ids, one.max_tokens, tokenizer=tokenizer)
            seed = self._sampler.seed(number)
            grammar = None if self._grammars is None else self._grammars.compile(one.structured_outputs)
            guide = None if grammar is None else Guide(grammar, ignore_eos=one.ignore_eos)
            new_detokenizer: Any = _NoText
            if tokenizer is not None:
                new_detokenizer = partial(Detokenizer, tokenizer, prompt, one.skip_special_tokens)
            self.rows.append(_Row(OutputProcessor(place % copies, seed, new_detokenizer, rules, guide)))

    @property
    def unfinished(self) -> list[int]:
        return [place for place, row in enumerate(self.rows) if not row.finished]

    def log_probabilities(self, logits_RV: Any) -> Any:
        """The logarithms of the distributions of the next tokens [R, V]; 0 in rows that have finished."""
        found_RV = torch.zeros_like(logits_RV)
        for place in self.unfinished:
            guide = self.rows[place].guide
            masks = None if guide is None else [guide.mask()[0]]
            p_V = np.asarray(self._sampler.distributions(place, logits_RV[place][None], masks=masks)[0])
            with np.errstate(divide="ignore"):
                found_RV[place] = torch.from_numpy(np.log(p_V)).to(logits_RV)
        return found_RV

    def sample(self, logits_RV: Any) -> list[int]:
        """Sample the next token of each unfinished row; the others keep their last token. Raises LogitsError."""
        active = self.unfinished
        if not active:
            return self.tokens
        guides = [self.rows[place].guide for place in active]
        mask = None if self._grammars is None else self._grammars.mask(guides)
        out = self._sampler(logits_RV[active], active, mask=mask)
        if out.errors:
            raise LogitsError({active[i]: error_message(text, guides[i]) for i, text in out.errors.items()})
        logprobs = out.logprobs or [None] * len(active)
        for place, token, step in zip(active, out.token_ids.tolist(), logprobs, strict=True):
            self.tokens[place] = token
            self.rows[place].push(token, step)
        return self.tokens

    def completions(self) -> list[Completion]:
        """A completion per prompt, with the text if there is a tokenizer. Ends all rows."""
        for row in self.rows:
            row.end("length")
        starts = range(0, len(self.rows), self._copies)
        return [
            Completion.from_chunks(
                self._prompts[start], [chunk for row in self.rows[start : start + self._copies] for chunk in row.chunks]
            )
            for start in starts
        ]


class _NoText:
    """Stands for the detokenizer of a row without a tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def close(self) -> str:
        return ""


class _Row:
    """The output of one row."""

    def __init__(self, output: OutputProcessor) -> None:
        self._output, self.guide = output, output.guide
        self.finished, self.chunks = False, list[CompletionChunk]()

    def push(self, token: int, logprobs: StepLogprobs | None) -> None:
        complete = self.guide is not None and self.guide.accept_token(token)
        self.chunks.append(self._output.push(token, logprobs, complete=complete))
        self.finished = self.chunks[-1].finish_reason is not None

    def end(self, reason: FinishReason, *, drop: bool = False) -> None:
        """End the row, unless it has ended. drop: without its last token."""
        if not self.finished:
            if drop:
                self.chunks.pop()
            self.finished = True
            self.chunks.append(self._output.end(Finish(reason)))


UNEXPECTED = (
    "the rows do not continue with the sampled tokens. A SamplingLogitsProcessor is for one call of generate, and must "
    "be its last processor; beam search and assisted decoding are not supported"
)


def eos_ids_of(config: Any) -> frozenset[int]:
    """The EOS ids that ``generate`` has prepared in a config."""
    eos = config._eos_token_tensor  # noqa: SLF001
    return frozenset() if eos is None else frozenset(eos.flatten().tolist())


class RowProcessor:
    """Samples a token per row from scores, see ``SamplingLogitsProcessor``.

    defaults: for fields that are not set. checked: compare the tokens that are appended with the sampled ones.
    keep_scores: collect the logarithms of the distributions in ``scores``.
    """

    def __init__(
        self,
        sampling_params: Any,
        tokenizer: Tokenizer | None,
        *,
        eos_token_ids: frozenset[int],
        attention_mask: Any = None,
        pad_token_id: int | None = None,
        copies: int = 1,
        defaults: SamplingParams | None = None,
        checked: bool = False,
        keep_scores: bool = False,
    ) -> None:
        self._params, self._tokenizer, self._eos, self._mask = sampling_params, tokenizer, eos_token_ids, attention_mask
        self._pad, self._copies, self._defaults, self._checked = pad_token_id, copies, defaults, checked
        self.keep_scores, self.scores = keep_scores, list[Any]()
        self._rows: DecodingRows | None = None
        self._seen: Any = None  #: the tokens at the last call

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Sample: the scores of the sampled tokens are 0, all others -inf."""
        rows = self._start(input_ids, scores) if self._rows is None else self._rows
        if self._checked and self._seen is not None:
            self._compare(rows, input_ids)
        self._seen = input_ids
        if self.keep_scores:
            self.scores.append(rows.log_probabilities(scores))
        tokens_B1 = torch.tensor(rows.sample(scores), device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B1, 0.0)

    def _start(self, input_ids: Any, scores: Any) -> DecodingRows:
        params = params_of_rows(self._params, len(input_ids), self._copies, self._defaults)
        if self._checked and _looks_like_beams(input_ids, scores, self._copies):
            raise ParameterError("num_beams", f"the rows are beams, with normalised scores: {UNEXPECTED}")
        tokenizer = copy.copy(self._tokenizer)
        if tokenizer is not None:
            tokenizer.padded_size = max(tokenizer.padded_size, scores.shape[1])
        options: dict[str, Any] = {"copies": self._copies, "eos_token_ids": self._eos, "tokenizer": tokenizer}
        self._rows = DecodingRows(params, self._prompts(input_ids), scores.shape[1], **options)
        return self._rows

    def _prompts(self, input_ids: Any) -> list[list[int]]:
        """The prompts without padding."""
        mask, ids = self._mask, input_ids.tolist()
        if mask is not None:
            kept = mask.repeat_interleave(len(ids) // max(len(mask), 1), 0)
            if kept.shape != input_ids.shape:
                got = f"got {list(mask.shape)} for prompts {list(input_ids.shape)}"
                raise ParameterError("attention_mask", f"attention_mask must have the shape of the prompts, {got}")
            rows = zip(ids, kept.tolist(), strict=True)
            return [[token for token, keep in zip(*row, strict=True) if keep] for row in rows]
        starts = [next((i for i, token in enumerate(row) if token != self._pad), len(row) - 1) for row in ids]
        return [row[max(start, 0) :] for row, start in zip(ids, starts, strict=True)]

    def _compare(self, rows: DecodingRows, input_ids: Any) -> None:
        """Check that the sampled tokens were appended; ``generate`` appends padding to rows that it has ended."""
        if input_ids.shape[1] != self._seen.shape[1] + 1 or not torch.equal(input_ids[:, :-1], self._seen):
            raise ParameterError("logits_processor", UNEXPECTED)
        for place, token in enumerate(input_ids[:, -1].tolist()):
            row = rows.rows[place]
            if row.finished or token == rows.tokens[place]:
                continue
            if token != self._pad and token not in self._eos:
                hint = "" if self._pad is not None else " (if generate pads rows that have ended: pass pad_token_id)"
                raise ParameterError("logits_processor", f"{UNEXPECTED}{hint}")
            row.end("stop", drop=True)

    def end(self, done_B: Any, reason: FinishReason) -> None:
        if self._rows is not None:
            for row, done in zip(self._rows.rows, done_B.tolist(), strict=True):
                if done:
                    row.end(reason)

    def finished(self, input_ids: Any) -> Any:
        """Which rows have finished, bool [B]."""
        finished = [row.finished for row in self._rows.rows] if self._rows is not None else [False] * len(input_ids)
        return torch.tensor(finished, device=input_ids.device)

    @property
    def completions(self) -> list[Completion]:
        """A completion per prompt, as from ``LLM.generate``. Read it after the call."""
        return [] if self._rows is None else self._rows.completions()


def _looks_like_beams(input_ids: Any, scores: Any, copies: int) -> bool:
    """Whether equal rows follow each other and all scores are logarithms of probabilities, as in beam search."""
    if len(input_ids) < 2 or copies > 1 or not torch.equal(input_ids[0], input_ids[1]):
        return False
    return bool((scores.float().logsumexp(-1).abs() < 1e-3).all())
