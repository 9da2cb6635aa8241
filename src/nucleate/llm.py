"""LLM: text in, text out, over ``generate`` one sequence at a time. Knows no batch and no network."""

from __future__ import annotations

import numbers
import operator
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from nucleate.core.event import Completion, Output, Piece, Usage
from nucleate.core.noise import fresh_seed
from nucleate.core.parameter import ParameterError
from nucleate.generate import generate
from nucleate.models.load import load, recommended, resolve
from nucleate.models.model import ModelError
from nucleate.params import SamplingParams
from nucleate.text.template import render
from nucleate.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model with its tokenizer.

    model: None for the embedded model, a folder in the Transformers format, or a Hugging Face id. device, dtype:
    "auto", or as torch names them ("cpu", "cuda:0"; "float32", "bfloat16", "float16"). runtime: "auto", "numpy" or
    "torch", see ``nucleate.models.load.load``. Raises ModelError with one line that says what is wrong.

    ``params=None`` in the methods means ``default_params``: what the model's own generation_config.json recommends.
    Parameters that are given are taken as they are.
    """

    def __init__(
        self, model: str | Path | None = None, device: str = "auto", dtype: str = "auto", *, runtime: str = "auto"
    ) -> None:
        self.folder = resolve(model)
        try:
            self.default_params = SamplingParams(**recommended(self.folder))
        except ParameterError as error:  # the folder's fault, not the user's
            raise ModelError(f"{self.folder / 'generation_config.json'}: {error}") from None
        self.model = load(self.folder, device, dtype, runtime)
        self.tokenizer = _tokenizer(self.folder, self.model.vocab_size)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete prompts (text or token ids): one Completion each, in order.

        params: one for all, or a list of one per prompt. progress: show a bar on stderr. Every request is checked
        before the first one runs; raises ParameterError.
        """
        given = [prompts] if isinstance(prompts, str) else _listed("prompts", prompts)
        if given and isinstance(given[0], numbers.Integral):
            raise ParameterError("prompts", f"prompts must be a string or a list of prompts, such as [{given!r:.40}]")
        shared = params is None or isinstance(params, SamplingParams)
        chosen = [params] * len(given) if shared else _listed("params", params)
        if len(chosen) != len(given):
            raise ParameterError("params", f"params has {len(chosen)} entries for {len(given)} prompts")
        requests = [
            (ids := self.encode(prompt), self._answers(ids, one)) for prompt, one in zip(given, chosen, strict=True)
        ]
        return [_collect(ids, answers) for ids, answers in _shown(requests, progress)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """The pieces of a completion as they come; with n > 1, one answer after the other (see ``Piece.index``)."""
        return _chain(self._answers(self.encode(prompt), params))

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answer a conversation, [{"role": ..., "content": ...}, ...], through the model's own chat template.

        As in Transformers, text in a message that spells a special token becomes that token: who serves strangers
        must look for them.
        """
        ids = self.encode_chat(messages)
        return _collect(ids, self._answers(ids, params))

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[Piece]:
        """The pieces of an answer to a conversation as they come."""
        return _chain(self._answers(self.encode_chat(messages), params))

    def encode(self, prompt: Prompt | Sequence[object]) -> list[int]:
        """The token ids of a prompt, with the special tokens the model expects (ids are taken as they are)."""
        if isinstance(prompt, str):
            if not prompt:
                raise ParameterError("prompt", "the prompt is empty; it must have at least one token")
            return self.tokenizer.encode(prompt)
        try:
            tokens = _listed("prompt", prompt)
            if any(isinstance(token, bool) for token in tokens):
                raise TypeError
            return [operator.index(token) for token in tokens]
        except (TypeError, ParameterError):
            raise ParameterError("prompt", f"a prompt is a string or a list of token ids, got {prompt!r:.60}") from None

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        template = self.tokenizer.chat_template
        if template is None:
            raise ModelError(f"the model in {self.folder} has no chat template; use generate with a plain prompt")
        text = render(template, list(messages), variables=self.tokenizer.special_tokens)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _answers(self, prompt_ids: list[int], params: SamplingParams | None) -> list[Iterator[Piece]]:
        """The n answers, admitted but not started. Without a seed they share a fresh one, and use seed + i as ever."""
        chosen = self.default_params if params is None else params
        if not isinstance(chosen, SamplingParams):
            raise ParameterError("params", f"params must be a SamplingParams, got {chosen!r:.60}")
        if chosen.seed is None:
            chosen = chosen.replace(seed=fresh_seed())
        return [generate(self.model, self.tokenizer, prompt_ids, chosen, i) for i in range(chosen.n)]


def _listed(name: str, value: Any) -> list[Any]:
    """The items of a list, or of what is as good as one. Strings, bytes, mappings and sets are not."""
    if isinstance(value, str | bytes | Mapping | AbstractSet) or not isinstance(value, Iterable):
        raise ParameterError(name, f"{name} must be a list, got {value!r:.60}")
    return list(value)


def _tokenizer(folder: Path, size: int) -> Tokenizer:
    try:
        if (folder / "tokenizer.json").is_file():
            return Tokenizer(folder, padded_size=size)
        from nucleate.models.transformers import convert_tokenizer

        with tempfile.TemporaryDirectory() as converted:
            convert_tokenizer(folder, Path(converted))
            return Tokenizer(converted, padded_size=size)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error


def _chain(answers: list[Iterator[Piece]]) -> Iterator[Piece]:
    for answer in answers:
        yield from answer


def _collect(prompt_ids: list[int], answers: list[Iterator[Piece]]) -> Completion:
    outputs, prompt_logprobs = [], None
    for answer in answers:
        pieces = list(answer)
        prompt_logprobs = prompt_logprobs or pieces[0].prompt_logprobs
        last = pieces[-1]
        token_ids = tuple(token for piece in pieces for token in piece.token_ids)
        text = "".join(piece.text for piece in pieces)
        reason = last.finish_reason or "abort"
        steps = tuple(step for piece in pieces for step in piece.logprobs or ())
        logprobs = steps if len(steps) == len(token_ids) > 0 else None
        outputs.append(Output(last.index, text, token_ids, reason, last.stop_reason, last.seed, logprobs))
    usage = Usage(len(prompt_ids), sum(len(output.token_ids) for output in outputs))
    return Completion(tuple(prompt_ids), tuple(outputs), usage, prompt_logprobs)


def _shown(
    requests: list[tuple[list[int], list[Iterator[Piece]]]], progress: bool
) -> Iterator[tuple[list[int], list[Iterator[Piece]]]]:
    if not progress:
        return iter(requests)
    from tqdm import tqdm

    return iter(tqdm(requests, unit="prompt"))
