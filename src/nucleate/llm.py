"""LLM: a model with its tokenizer, for offline inference. All calls share one engine."""

from __future__ import annotations

import numbers
import operator
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import MappingProxyType
from typing import Any, overload

from nucleate.engine.beam.params import BeamCompletion, BeamParams, BeamRequest, beam_params
from nucleate.engine.engine import MAX_NUM_SEQS, Engine
from nucleate.engine.request import Request
from nucleate.engine.shared_engine import SharedEngine
from nucleate.jit.kernel_libraries import MODELS, SAMPLER
from nucleate.jit.native_library import load_in_background
from nucleate.models.loader import load, recommended, resolve, runner_of
from nucleate.models.protocol import ModelError
from nucleate.outputs import Completion, CompletionChunk, EngineOutput
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.inputs import check_count
from nucleate.sampling_params import SamplingParams
from nucleate.speculative.config import Speculation
from nucleate.tokenization.chat_template import render
from nucleate.tokenization.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
_NONE: Mapping[str, object] = MappingProxyType({})


class LLM:
    """A model with its tokenizer.

    model: None for the embedded model, a folder in the Transformers format, or a Hugging Face id. device, dtype:
    "auto", or as torch names them ("cpu", "cuda:0"; "float32", "bfloat16", "float16"). runtime: "auto", "numpy" or
    "torch", see ``nucleate.models.loader.load``. speculative_config: speculative decoding, which generates the same
    text in fewer forward passes: a method ("ngram", "suffix", or one with weights trained for the model: "draft",
    "medusa", "eagle", "dflash", "mtp"), or a ``Speculation``; None turns it off. Raises ModelError, ParameterError.

    ``default_params`` are the sampling parameters that the model's generation_config.json recommends; methods use them
    if no sampling_params are given. ``default_params.override(...)`` changes some of them.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        device: str = "auto",
        dtype: str = "auto",
        *,
        runtime: str = "auto",
        speculative_config: str | Speculation | None = None,
    ) -> None:
        load_in_background((*SAMPLER, MODELS), compiling=False)
        speculation = Speculation.of(speculative_config)
        self.folder = resolve(model)
        try:
            self.default_params = SamplingParams(**recommended(self.folder))
        except ParameterError as error:  # caused by the folder, not by an argument
            raise ModelError(f"{self.folder / 'generation_config.json'}: {error}") from None
        self.model = load(self.folder, device, dtype, runtime)
        self.tokenizer = _tokenizer(self.folder, self.model.vocab_size)
        self.speculative_config = None if speculation is None else speculation.bind_model(self.model)
        self._engine = SharedEngine(self.new_engine)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **values: Any,
    ) -> list[Completion]:
        """Complete prompts. Returns one Completion per prompt, in order.

        prompts: a string, or a list of strings or of lists of token ids. sampling_params: one for all prompts, or a
        list with one per prompt. use_tqdm: show a progress bar on stderr. values: fields of SamplingParams that change
        ``default_params``, as in ``generate(prompt, max_tokens=30)``, instead of sampling_params. All requests are
        checked before the first one runs. Raises ParameterError.
        """
        given = _prompts(prompts)
        if isinstance(sampling_params, Sequence):
            chosen = [self._params(one, values) for one in sampling_params]
            if len(chosen) != len(given):
                got = f"got {len(chosen)} of them for {len(given)} prompts"
                raise ParameterError("sampling_params", f"a list of sampling_params must have one per prompt; {got}")
        else:
            chosen = [self._params(sampling_params, values)] * len(given)
        requests = [Request(self.encode(prompt), one) for prompt, one in zip(given, chosen, strict=True)]
        chunks: list[list[CompletionChunk]] = [[] for _ in requests]
        for index, output in _with_progress(self._engine.run(requests), len(requests), use_tqdm):
            chunks[index].append(output.chunk)
        return [
            Completion.from_chunks(request.prompt_ids, own, prompt if isinstance(prompt, str) else None)
            for request, own, prompt in zip(requests, chunks, given, strict=True)
        ]

    def beam_search(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: BeamParams | None = None,
        use_tqdm: bool = False,
        **values: Any,
    ) -> list[BeamCompletion]:
        """Complete prompts by beam search. Returns one BeamCompletion per prompt, in order, with the best beam first.

        params: the parameters for all prompts; or pass its fields as keywords (``num_beams=8``). use_tqdm: show a
        progress bar on stderr. ``default_params`` does not apply. Raises ParameterError.
        """
        chosen = beam_params(params, values)
        requests = [BeamRequest(self.encode(prompt), chosen) for prompt in _prompts(prompts)]
        chunks: list[list[CompletionChunk]] = [[] for _ in requests]
        for index, output in _with_progress(self._engine.run(requests), len(requests), use_tqdm):
            chunks[index].append(output.chunk)
        return [
            BeamCompletion.from_chunks(request.prompt_ids, own) for request, own in zip(requests, chunks, strict=True)
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **values: Any
    ) -> Iterator[CompletionChunk]:
        """Complete a prompt and yield chunks as they are generated; with n > 1, one output after the other.

        sampling_params, values: as in ``generate``.
        """
        return self._stream(self.encode(prompt), self._params(sampling_params, values))

    @overload
    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **values: Any
    ) -> Completion: ...

    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], sampling_params: SamplingParams | None = None, **values: Any
    ) -> list[Completion]: ...

    def chat(
        self, messages: Sequence[Any], sampling_params: SamplingParams | None = None, **values: Any
    ) -> Completion | list[Completion]:
        """Answer a conversation, ``[{"role": ..., "content": ...}, ...]``, using the model's chat template.

        A list of conversations gives a list of Completions. sampling_params, values: as in ``generate``. As in
        Transformers, text in a message that spells a special token is encoded as that token: check untrusted messages.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        params, conversations = self._params(sampling_params, values), messages if several else [messages]
        texts = [self._chat_text(one) for one in conversations]
        requests = [Request(self._encode_rendered(text), params) for text in texts]
        chunks: list[list[CompletionChunk]] = [[] for _ in requests]
        for index, output in self._engine.run(requests):
            chunks[index].append(output.chunk)
        found = [
            Completion.from_chunks(request.prompt_ids, own, text)
            for request, own, text in zip(requests, chunks, texts, strict=True)
        ]
        return found if several else found[0]

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **values: Any
    ) -> Iterator[CompletionChunk]:
        """Answer a conversation and yield chunks as they are generated."""
        return self._stream(self.encode_chat(messages), self._params(sampling_params, values))

    def new_engine(self, *, kv_cache_memory: int | None = None, **options: Any) -> Engine:
        """Return a new engine for this model, for callers that run its steps themselves.

        kv_cache_memory: size of the KV cache in bytes; None: enough for ``max_num_seqs`` sequences of full length, but
        at most a quarter of the free memory. options: keyword arguments of ``Engine``; ``speculative_config`` defaults
        to that of the LLM. Raises ModelError, ParameterError.
        """
        if kv_cache_memory is not None:
            check_count(kv_cache_memory, "kv_cache_memory")
        sequences = options.get("max_num_seqs", MAX_NUM_SEQS)
        count = max(sequences, 1) if isinstance(sequences, int) else 1  # Engine rejects invalid values
        tokens = count * self.model.context_length
        speculation = Speculation.of(options.pop("speculative_config", self.speculative_config))
        options["speculative_config"] = None if speculation is None else speculation.bind_model(self.model)
        return Engine(runner_of(self.model, kv_cache_memory, tokens), self.tokenizer, **options)

    def encode(self, prompt: Prompt | Sequence[object]) -> list[int]:
        """Return the token ids of a prompt. Text gets the model's special tokens; ids are not changed."""
        if isinstance(prompt, str):
            if not prompt:
                raise ParameterError("prompt", "the prompt is empty; it must have at least one token")
            return self.tokenizer.encode(prompt)
        try:
            tokens = _as_list("prompt", prompt)
            if any(isinstance(token, bool) for token in tokens):
                raise TypeError
            return [operator.index(token) for token in tokens]
        except (TypeError, ParameterError):
            raise ParameterError("prompt", f"a prompt is a string or a list of token ids, got {prompt!r:.60}") from None

    def encode_chat(self, messages: Sequence[Message], variables: Mapping[str, object] = _NONE) -> list[int]:
        """Return the token ids of a conversation after the chat template. variables: additional template variables."""
        return self._encode_rendered(self._chat_text(messages, variables))

    def _chat_text(self, messages: Sequence[Message], variables: Mapping[str, object] = _NONE) -> str:
        template = self.tokenizer.chat_template
        if template is None:
            raise ModelError(f"the model in {self.folder} has no chat template; use generate with a plain prompt")
        return render(template, list(messages), variables={**variables, **self.tokenizer.special_tokens})

    def _encode_rendered(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _params(self, given: SamplingParams | None, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request: either given, or the defaults with the changed values."""
        if given is None:
            return self.default_params.override(**values) if values else self.default_params
        if not isinstance(given, SamplingParams):
            raise ParameterError("sampling_params", f"sampling_params must be a SamplingParams, got {given!r:.60}")
        if values:
            names = ", ".join(values)
            raise ParameterError("sampling_params", f"give either sampling_params or {names}, not both")
        return given

    def _stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[CompletionChunk]:
        request = Request(prompt_ids, params)
        self._engine.check(request)  # now, not at the first chunk
        return _in_order(output.chunk for _, output in self._engine.run([request]))


def _prompts(prompts: Any) -> list[Any]:
    given = [prompts] if isinstance(prompts, str) else _as_list("prompts", prompts)
    if given and isinstance(given[0], numbers.Integral):
        raise ParameterError("prompts", f"prompts must be a string or a list of prompts, such as [{given!r:.40}]")
    return given


def _as_list(name: str, value: Any) -> list[Any]:
    """Return a sequence or iterator as a list. Raises ParameterError for strings, bytes, mappings and sets."""
    if isinstance(value, str | bytes | Mapping | AbstractSet) or not isinstance(value, Iterable):
        raise ParameterError(name, f"{name} must be a list, got {value!r:.60}")
    return list(value)


def _tokenizer(folder: Path, size: int) -> Tokenizer:
    try:
        if (folder / "tokenizer.json").is_file():
            return Tokenizer(folder, padded_size=size)
        from nucleate.models.transformers.transformers_model import convert_tokenizer

        with tempfile.TemporaryDirectory() as converted:
            convert_tokenizer(folder, Path(converted))
            return Tokenizer(converted, padded_size=size)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error


def _in_order(chunks: Iterable[CompletionChunk]) -> Iterator[CompletionChunk]:
    """Yield the chunks of one output after the other. Those of later outputs are buffered."""
    buffered: dict[int, list[CompletionChunk]] = {}
    index = 0
    for chunk in chunks:
        buffered.setdefault(chunk.index, []).append(chunk)
        while own := buffered.pop(index, None):
            yield from own
            index += own[-1].finish_reason is not None


def _with_progress(
    outputs: Iterator[tuple[int, EngineOutput]], total: int, use_tqdm: bool
) -> Iterator[tuple[int, EngineOutput]]:
    """Yield the outputs; with ``use_tqdm``, show the number of finished requests, and tokens per second."""
    tokens, start = 0, time.perf_counter()
    with progress_bar(total=total, unit="prompt", shown=use_tqdm) as bar:
        for index, output in outputs:
            tokens += len(output.chunk.token_ids)
            if output.finished:
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                bar.update()
            yield index, output


def progress_bar(items: Iterable[Any] | None = None, *, total: int | None = None, unit: str, shown: bool = True) -> Any:
    """Return a tqdm progress bar on stderr, over items or advanced by ``update``. total: number of items, if known."""
    from tqdm import tqdm

    return tqdm(items, total=total, unit=unit, disable=not shown, file=sys.stderr, dynamic_ncols=True)
