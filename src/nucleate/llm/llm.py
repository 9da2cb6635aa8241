"""LLM: a model with its tokenizer, for offline inference. All calls share one engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from nucleate.chat.chat_format import NO_TOOLS, ChatFormat, RenderedChat
from nucleate.chat.output_parser import ChunkParser
from nucleate.chat.tools import Tool, ToolUse
from nucleate.engine.beam_params import BeamCompletion, BeamParams, BeamRequest
from nucleate.engine.engine import MAX_NUM_SEQS, Engine
from nucleate.engine.request import Request
from nucleate.jit.kernel_libraries import MODELS, SAMPLER
from nucleate.jit.native_library import load_in_background
from nucleate.llm.chat_request import chat_request, template_options
from nucleate.llm.model_loading import (
    GENERATION_CONFIG,
    check_parallel,
    load_parallel,
    model_tokenizer,
    recommended_params,
)
from nucleate.llm.shared_engine import SharedEngine, completions, in_order, with_progress
from nucleate.models.loader import ModelSource, check_vocabulary, is_in_memory, runners_of
from nucleate.models.protocol import Model, ModelError
from nucleate.outputs import Completion, CompletionChunk
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.sampling.inputs import check_count
from nucleate.sampling.pipeline_format import is_pipeline
from nucleate.sampling.stage import Pipeline, Stage
from nucleate.sampling_params import SamplingParams
from nucleate.speculative.config import Speculation
from nucleate.tokenization.chat_template import DEFAULT_OPTIONS, NAMED_TEMPLATES, ChatTemplateOptions, find_template
from nucleate.tokenization.prompts import (
    check_prompts,
    encode_fill,
    encode_prompt,
    fill_stop_token_ids,
    is_conversation,
)
from nucleate.watermark.kinds import check_watermark

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
ToolLike = Tool | Mapping[str, Any] | Callable[..., Any]


@with_suggestions
class LLM:
    """A model with its tokenizer.

    model: None for the embedded model, a folder in the Transformers format, a Hugging Face id, a GGUF file or
    ``owner/name:Q4_K_M`` (both run by llama.cpp), or a model of Transformers in memory, which is not changed.
    tokenizer: a folder, a Hugging Face id, a ``tokenizers.Tokenizer``, or a tokenizer of Transformers; None: that
    of the model. device, dtype: "auto", or as torch names them ("cpu", "cuda:0"; "float32", "bfloat16", "float16").
    runtime: "auto", "numpy", "torch" or "openvino", see ``nucleate.models.loader.load``. revision: a branch, tag or
    commit of a Hugging Face id. generation_config: "auto" uses the sampling parameters that the model recommends as
    defaults, "none" ignores them. speculative_config: speculative decoding, which generates the same text in fewer
    forward passes: a method ("ngram", "suffix", or one with weights trained for the model: "draft", "medusa",
    "eagle", "dflash", "mtp"), or a ``Speculation``; None turns it off. chat_template: a Jinja file, or the name of a
    format ("chatml", "llama3", "gemma", "mistral", "plain"), instead of the model's chat template; None: the one in
    the model's files, or for a GGUF file without one, that in its folder. watermark: a stage of ``nucleate.watermark``
    for all outputs except beams. companion_model: the weaker model of contrastive decoding, with the same
    vocabulary. tool_call_parser, reasoning_parser: the formats of tool calls and of the reasoning section, see
    ``docs/tools.md``; "auto" chooses them from the chat template. gguf_options: of a GGUF model, a ``GgufOptions``
    or a dict with its fields. openvino_properties: of a model for OpenVINO, such as ``{"KV_CACHE_PRECISION":
    "f16"}``. tensor_parallel: the number of processes that share the model, see ``docs/scale.md``. batch_invariant:
    compute the same logits, to the last bit, whatever else runs at the time, so that a seed gives the same text in
    every batch; slower, see ``docs/how-to/reproducible_output.md``. max_num_seqs,
    max_num_batched_tokens, max_model_len, kv_cache_memory: see ``new_engine``. Raises ModelError, ParameterError.

    ``default_params`` are the defaults of sampling parameters. They apply to every field that a request does not set:
    ``generate(prompt, temperature=1)`` and ``generate(prompt, SamplingParams(temperature=1))`` are the same.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any | None = None,
        tokenizer: str | os.PathLike[str] | Any | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        runtime: str = "auto",
        revision: str | None = None,
        generation_config: str = "auto",
        speculative_config: str | Speculation | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        watermark: Stage | None = None,
        companion_model: str | os.PathLike[str] | Any | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        gguf_options: Any = None,
        openvino_properties: Any = None,
        tensor_parallel: int = 1,
        batch_invariant: bool = False,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        kv_cache_memory: int | None = None,
    ) -> None:
        if generation_config not in GENERATION_CONFIG:
            raise invalid_value("generation_config", " or ".join(GENERATION_CONFIG), generation_config)
        options = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "kv_cache_memory": kv_cache_memory,
        }
        if batch_invariant not in (True, False):
            got = shown(batch_invariant)
            raise ParameterError("batch_invariant", f"batch_invariant must be true or false, got {got}")
        self._engine_options = {name: value for name, value in options.items() if value is not None}
        for name, value in self._engine_options.items():
            check_count(value, name)
        self._batch_invariant = batch_invariant
        speculation, self.watermark = Speculation.of(speculative_config), check_watermark(watermark)
        if tokenizer is None and is_in_memory(model):
            raise ParameterError("tokenizer", "a model in memory needs a tokenizer: LLM(model, tokenizer)")
        check_count(tensor_parallel, "tensor_parallel")
        how = {"device": device, "dtype": dtype, "runtime": runtime}
        source = ModelSource.find(
            model,
            **how,
            revision=revision,
            gguf_options=gguf_options,
            openvino_properties=openvino_properties,
            batch_invariant=batch_invariant,
        )
        if tensor_parallel > 1:
            check_parallel(source, speculation)
        load_in_background((*SAMPLER, MODELS), compiling=False)
        self.folder = source.folder
        recommended = source.recommended() if generation_config == "auto" else {}
        self.default_params = recommended_params(recommended, source.generation_config_name)
        self.model: Model = source.load() if tensor_parallel == 1 else load_parallel(source, tensor_parallel, how)
        self.companion_model: Model | None = None
        if companion_model is not None:
            other = ModelSource.find(companion_model, **how, revision=None, batch_invariant=batch_invariant)
            self.companion_model = other.load()
            check_vocabulary("companion model", self.companion_model, self.model, other.folder, source.folder)
        self.tokenizer = model_tokenizer(tokenizer, source, self.model, needs_template=chat_template is None)
        self._parsers = tool_call_parser, reasoning_parser
        self.chat_format = ChatFormat.find(self.tokenizer, *self._parsers)
        if chat_template is not None:
            self.use_chat_template(chat_template)
        self.speculative_config = None if speculation is None else speculation.bind_model(self.model)
        self._engine = SharedEngine(self.new_engine)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Pipeline | Sequence[SamplingParams | Pipeline] | None = None,
        *,
        suffix: str | None = None,
        use_tqdm: bool = False,
        **values: Any,
    ) -> list[Completion]:
        """Complete prompts. Returns one Completion per prompt, in order.

        prompts: a string, or a list of strings or of lists of token ids. sampling_params: one for all prompts, or a
        list with one per prompt; a tuple of stages stands for ``SamplingParams(pipeline=stages)``. suffix: text that
        follows the output, for prompts of text and models with fill-in-the-middle tokens. use_tqdm: show a progress bar
        on stderr. values: fields of SamplingParams, as in
        ``generate(prompt, max_tokens=30)``; they replace those of sampling_params, of each in a list.
        ``default_params`` applies to fields that are not set. All requests are checked before the first one runs.
        Raises ParameterError.
        """
        given = check_prompts(prompts)
        if isinstance(sampling_params, list | tuple) and not is_pipeline(sampling_params):
            chosen = [self._params(one, values) for one in sampling_params]
            if len(chosen) != len(given):
                got = f"got {len(chosen)} of them for {len(given)} prompts"
                raise ParameterError("sampling_params", f"a list of sampling_params must have one per prompt; {got}")
        else:
            chosen = [self._params(sampling_params, values)] * len(given)
        if suffix is not None:
            chosen = [self.fill_params(one) for one in chosen]
        requests = [Request(self.encode(prompt, suffix), one) for prompt, one in zip(given, chosen, strict=True)]
        outputs = with_progress(self._engine.run(requests), len(requests), use_tqdm)
        return completions(requests, outputs, [prompt if isinstance(prompt, str) else None for prompt in given])

    def beam_search(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: BeamParams | None = None,
        use_tqdm: bool = False,
        **values: Any,
    ) -> list[BeamCompletion]:
        """Complete prompts by beam search. Returns one BeamCompletion per prompt, in order, with the best beam first.

        params: the parameters for all prompts. values: its fields as keywords (``num_beams=8``), which replace those of
        params. use_tqdm: show a progress bar on stderr. ``default_params`` does not apply. Raises ParameterError.
        """
        if params is not None and not isinstance(params, BeamParams):
            raise ParameterError("params", f"params must be a BeamParams, got {params!r:.60}")
        chosen = BeamParams(**values) if params is None else replace(params, **values)
        requests = [BeamRequest(self.encode(prompt), chosen) for prompt in check_prompts(prompts)]
        chunks: list[list[Any]] = [[] for _ in requests]
        for index, output in with_progress(self._engine.run(requests), len(requests), use_tqdm):
            chunks[index].append(output.chunk)
        return [BeamCompletion.from_chunks(one.prompt_ids, own) for one, own in zip(requests, chunks, strict=True)]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Pipeline | None = None,
        *,
        suffix: str | None = None,
        **values: Any,
    ) -> Iterator[CompletionChunk]:
        """Complete a prompt and yield chunks as they are generated; with n > 1, one output after the other.

        sampling_params, suffix, values: as in ``generate``.
        """
        params = self._params(sampling_params, values)
        params = params if suffix is None else self.fill_params(params)
        return self._stream(Request(self.encode(prompt, suffix), params))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | Pipeline | None = None,
        *,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        reasoning_effort: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        split_special_tokens: bool = True,
        **values: Any,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Pipeline | None = None,
        **values: Any,
    ) -> list[Completion]: ...

    def chat(
        self, messages: Sequence[Any], sampling_params: SamplingParams | Pipeline | None = None, **values: Any
    ) -> Completion | list[Completion]:
        """Answer a conversation, ``[{"role": ..., "content": ...}, ...]``, using the model's chat template.

        A list of conversations gives a list of Completions. sampling_params, values: as in ``generate``.

        tools: Python functions (with type hints), OpenAI tool objects or ``Tool`` values that the model may call; the
        calls are the ``tool_calls`` of the outputs. tool_choice: "auto", "none", "required", or the name of the tool to
        call. parallel_tool_calls: whether there may be several calls. reasoning_effort, chat_template_kwargs: variables
        for the chat template. split_special_tokens: special tokens in the text of messages are text; if false, they
        become special tokens, as in Transformers. Reasoning is in the ``reasoning`` of the outputs.

        Raises ParameterError.
        """
        several = not is_conversation(messages)
        made = [self._chat_request(one, sampling_params, **values) for one in (messages if several else [messages])]
        requests, parsers, texts = zip(*made, strict=True) if made else ((), (), ())
        found = completions(requests, self._engine.run(requests), texts, parsers)
        return found if several else found[0]

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | Pipeline | None = None, **values: Any
    ) -> Iterator[CompletionChunk]:
        """Answer a conversation and yield chunks as they are generated. Arguments: those of ``chat``."""
        if not is_conversation(messages):
            raise ParameterError("messages", f"stream_chat answers one conversation, got {shown(messages)}")
        request, parser = self.chat_request(messages, sampling_params, **values)
        chunks = self._stream(request)
        return chunks if parser is None else map(parser.parse, chunks)

    def chat_request(
        self, messages: Sequence[Message], sampling_params: SamplingParams | Pipeline | None = None, **values: Any
    ) -> tuple[Request, ChunkParser | None]:
        """Return the engine request of a conversation, and what parses its chunks (None: they are text only).

        For callers that run an engine themselves, such as ``AsyncEngine``. Arguments: those of ``chat``.
        """
        return self._chat_request(messages, sampling_params, **values)[:2]

    @with_suggestions
    def _chat_request(
        self,
        messages: Sequence[Message],
        sampling_params: Any,
        *,
        tools: Any = None,
        tool_choice: Any = None,
        parallel_tool_calls: Any = None,
        reasoning_effort: Any = None,
        chat_template_kwargs: Any = None,
        split_special_tokens: Any = None,
        **values: Any,
    ) -> tuple[Request, ChunkParser | None, str]:
        """Also returns the text of the prompt."""
        use = ToolUse.read(tools, tool_choice, parallel_tool_calls)
        options = template_options(reasoning_effort, chat_template_kwargs, split_special_tokens)
        params = self._params(sampling_params, values)
        rendered = self.render_chat(messages, use, options)
        request = chat_request(rendered, rendered.encode(), params, self._engine.prepare)
        return request, rendered.chunk_parser(params.max_reasoning_tokens), rendered.text

    def use_chat_template(self, chat_template: str | os.PathLike[str]) -> None:
        """Use another chat template for the conversations that follow.

        chat_template: a Jinja file or the name of a format, see ``LLM``. Raises ParameterError.
        """
        self.tokenizer.chat_template = find_template(chat_template, self.tokenizer)
        self.chat_format = ChatFormat.find(self.tokenizer, *self._parsers)

    def render_chat(
        self, messages: Sequence[Message], use: ToolUse = NO_TOOLS, options: ChatTemplateOptions = DEFAULT_OPTIONS
    ) -> RenderedChat:
        """Return the prompt of a conversation with tools, and what its outputs look like.

        messages: as in ``chat``. use: the tools and ``tool_choice``. options: variables of the chat template. Raises
        ParameterError, and ModelError if there is no chat template.
        """
        template = self.tokenizer.chat_template
        if template is None:
            where = self.folder or "memory"
            named = ", ".join(NAMED_TEMPLATES)
            raise ModelError(
                f"the model in {where} has no chat template; set chat_template (--chat-template) to {named} or a Jinja "
                "file, or use generate with a plain prompt"
            )
        return self.chat_format.render(list(messages), use, options, template)

    def new_engine(self, **options: Any) -> Engine:
        """Return a new engine for this model, for callers that run its steps themselves.

        options: keyword arguments of ``Engine``, and ``kv_cache_memory``, the size of the KV cache in bytes; None:
        enough for ``max_num_seqs`` sequences of full length, but at most a quarter of the free memory. Options that are
        not given are those of the LLM. Raises ModelError, ParameterError.
        """
        options = {**self._engine_options, **options}
        kv_cache_memory = options.pop("kv_cache_memory", None)
        if kv_cache_memory is not None:
            check_count(kv_cache_memory, "kv_cache_memory")
        invariant = options.pop("batch_invariant", self._batch_invariant)
        sequences = options.get("max_num_seqs", MAX_NUM_SEQS)
        tokens = self.model.context_length * (max(sequences, 1) if isinstance(sequences, int) else 1)  # checked later
        speculation = Speculation.of(options.pop("speculative_config", self.speculative_config))
        options["speculative_config"] = None if speculation is None else speculation.bind_model(self.model)
        options.setdefault("watermark", self.watermark)
        runner, *others = runners_of(
            self.model, self.companion_model, kv_cache_memory, tokens, batch_invariant=invariant
        )
        return Engine(runner, self.tokenizer, companion_runner=others[0] if others else None, **options)

    @property
    def shared_engine(self) -> SharedEngine:
        """The engine that all calls share, for tools that run their own requests on it."""
        return self._engine

    def close(self) -> None:
        """End the other processes of a model with ``tensor_parallel``; it cannot be used again. Others need no end."""
        if hasattr(self.model, "close"):
            self.model.close()

    def reset_prefix_cache(self) -> None:
        """Forget the cached prompt prefixes. Call it after the weights of a model in memory have changed.

        Requests that are running end with an error.
        """
        self._engine = SharedEngine(self.new_engine)

    def encode(self, prompt: Prompt | Sequence[object], suffix: str | None = None) -> list[int]:
        """Return the token ids of a prompt. Text gets the model's special tokens; ids are not changed.

        An empty text is the BOS token alone.

        suffix: text that follows the output (fill-in-the-middle). Raises ParameterError, also for a model without it.
        """
        if suffix is not None:
            if not isinstance(prompt, str) or not isinstance(suffix, str):
                given = suffix if isinstance(prompt, str) else prompt
                raise ParameterError("suffix", f"suffix and the prompt must be strings, got {shown(given)}")
            return encode_fill(self.tokenizer, prompt, suffix)
        return encode_prompt(self.tokenizer, prompt)

    def fill_params(self, params: SamplingParams) -> SamplingParams:
        """Return parameters for a prompt with a suffix: tokens such as ``<|fim_pad|>`` end the output, like EOS."""
        if params.ignore_eos:
            return params
        more = [token for token in fill_stop_token_ids(self.tokenizer) if token not in params.stop_token_ids]
        return params.replace(stop_token_ids=(*params.stop_token_ids, *more))

    def encode_chat(
        self, messages: Sequence[Message], options: ChatTemplateOptions = DEFAULT_OPTIONS, use: ToolUse = NO_TOOLS
    ) -> list[int]:
        """Return the token ids of a conversation after the chat template. Arguments: those of ``render_chat``."""
        return self.render_chat(messages, use, options).encode(add_special_tokens=options.add_special_tokens)

    def _params(self, given: Any, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request, with ``default_params`` for the fields that it does not set."""
        if given is None:
            return self.default_params.override(**values) if values else self.default_params
        if isinstance(given, tuple) and is_pipeline(given):
            given = SamplingParams(pipeline=given)
        if not isinstance(given, SamplingParams):
            hint = ""
            if isinstance(given, Mapping):
                hint = "; pass fields as keywords, as in generate(prompt, temperature=0.5)"
            elif isinstance(given, Stage):
                hint = "; a pipeline is a tuple of stages"
            allowed = "a SamplingParams, a tuple of stages, or a list with one of these per prompt"
            raise ParameterError("sampling_params", f"sampling_params must be {allowed}, got {shown(given)}{hint}")
        return (given.replace(**values) if values else given).with_defaults(self.default_params)

    def _stream(self, request: Request) -> Iterator[CompletionChunk]:
        self._engine.prepare(request)  # now, not at the first chunk
        return in_order(output.chunk for _, output in self._engine.run([request]))
