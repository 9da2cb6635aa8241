"""Samples the rows of a generation loop of torch tensors, and checks that the loop appends what was sampled."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from nucleate.integrations.decoding_rows import DecodingRows, params_of_rows
from nucleate.outputs import Completion, FinishReason
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams
from nucleate.tokenization.tokenizer import Tokenizer

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
            self.scores.append(_log_probabilities(rows, scores))
        tokens_B1 = torch.tensor(rows.sample(scores), device=scores.device)[:, None]
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens_B1, 0.0)

    def _start(self, input_ids: Any, scores: Any) -> DecodingRows:
        params = params_of_rows(self._params, len(input_ids), self._copies, self._defaults)
        if self._checked and _looks_like_beams(input_ids, scores, self._copies):
            raise ParameterError("num_beams", f"the rows are beams, with normalised scores: {UNEXPECTED}")
        tokenizer = copy.copy(self._tokenizer)
        if tokenizer is not None:
            tokenizer.padded_size = max(tokenizer.padded_size, scores.shape[1])
        self._rows = DecodingRows(
            params,
            self._prompts(input_ids),
            scores.shape[1],
            copies=self._copies,
            eos_token_ids=self._eos,
            tokenizer=tokenizer,
        )
        return self._rows

    def _prompts(self, input_ids: Any) -> list[list[int]]:
        """The prompts without padding."""
        mask, ids = self._mask, input_ids.tolist()
        if mask is not None:
            kept = mask.repeat_interleave(len(ids) // max(len(mask), 1), 0)
            if kept.shape != input_ids.shape:
                shapes = f"{list(mask.shape)} for prompts {list(input_ids.shape)}"
                raise ParameterError(
                    "attention_mask", f"attention_mask must have the shape of the prompts, got {shapes}"
                )
            return [
                [token for token, keep in zip(*row, strict=True) if keep]
                for row in zip(ids, kept.tolist(), strict=True)
            ]
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
        """End rows that the caller has ended."""
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


def _log_probabilities(rows: DecodingRows, scores: Any) -> Any:
    """The logarithms of the distributions [B, V]; 0 in rows that have finished."""
    found = torch.zeros_like(scores)
    for place, p_V in enumerate(rows.distributions(scores)):
        if p_V is not None:
            with np.errstate(divide="ignore"):
                found[place] = torch.from_numpy(np.log(p_V)).to(scores)
    return found
