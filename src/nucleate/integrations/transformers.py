"""Samplers of nucleate in ``generate`` of Transformers: as ``custom_generate``, or as a logits processor.

Both run inside Transformers' own loop, with its caches, streamers and model inputs. For many requests, ``LLM(model,
tokenizer)`` is faster.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria, MaxTimeCriteria

from nucleate.integrations.row_processor import RowProcessor, eos_ids_of
from nucleate.llm.model_loading import given_tokenizer
from nucleate.models.model_files import ALWAYS, SAMPLING, recommended_values
from nucleate.outputs import Completion
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@with_suggestions
class CustomGenerate:
    """``model.generate(**inputs, custom_generate=CustomGenerate(params, tokenizer))``: sample with nucleate.

    sampling_params: a SamplingParams or a pipeline for all rows, or a list with one per prompt. Fields that are not set
    take the values of the generation config (the model's, and arguments of ``generate``), as ``LLM`` does. Other
    settings of the generation config and other logits processors apply before. tokenizer: of the model, in any form
    that ``LLM`` takes; needed for stop strings, structured output and text in completions. streamer: pass it here, as
    ``generate`` does not hand it on.

    ``completions`` are those of the last call, as from ``LLM.generate``; with ``return_dict_in_generate`` they are an
    attribute of the result too, and its ``scores`` are the logarithms of the distributions sampled from. Raises
    ParameterError, also for beam search and assisted decoding.
    """

    def __init__(self, sampling_params: Any = None, tokenizer: Any = None, *, streamer: Any = None) -> None:
        self.sampling_params, self.streamer = sampling_params, streamer
        self._tokenizer = None if tokenizer is None else given_tokenizer(tokenizer)
        self.completions: list[Completion] = []

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_inputs: Any,
    ) -> Any:
        """The decoding loop, as ``generate`` calls it."""
        mode = generation_config.get_generation_mode()
        if mode not in MODES:
            name = "num_beams" if "beam" in mode else "generation_config"
            text = f"CustomGenerate samples one sequence per row: {mode.replace('_', ' ')} is not supported"
            raise ParameterError(name, f"{text}; see LLM.beam_search and speculative_config of LLM")
        values = set_values(model, generation_config)
        mask = model_inputs.get("decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask")
        eos = eos_ids_of(generation_config)
        processor = RowProcessor(
            self.sampling_params,
            self._tokenizer,
            eos_token_ids=eos,
            attention_mask=mask,
            copies=generation_config.num_return_sequences or 1,
            defaults=SamplingParams(**recommended_values(values, "generation_config", float("inf"))),
            keep_scores=bool(generation_config.return_dict_in_generate and generation_config.output_scores),
        )
        config = _sampling_config(generation_config, input_ids)
        processors = other_processors(model, logits_processor, generation_config, input_ids, model_inputs)
        others = [one for one in stopping_criteria if not _is_eos(one, eos)]
        lengths = [one for one in others if isinstance(one, MaxLengthCriteria)]
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        found = model._sample(  # noqa: SLF001 - the loop that ``generate`` would run
            input_ids,
            logits_processor=LogitsProcessorList([*processors, processor]),
            stopping_criteria=StoppingCriteriaList([*lengths, SamplingStoppingCriteria(processor, others)]),
            generation_config=config,
            synced_gpus=synced_gpus,
            streamer=self.streamer,
            **model_inputs,
        )
        self.completions = processor.completions
        if generation_config.return_dict_in_generate:
            found.completions = self.completions
            if processor.keep_scores:
                found.scores = tuple(processor.scores)
        return found


def _sampling_config(config: Any, input_ids: Any) -> Any:
    """The config of the loop: it takes the best token, which is the sampled one, and pads rows that have finished."""
    found = copy.copy(config)
    found.do_sample = False
    if found._pad_token_tensor is None:  # noqa: SLF001 - what ``generate`` prepares
        if len(input_ids) > 1:
            raise ParameterError("pad_token_id", "rows may end at different lengths: pass pad_token_id to generate")
        found._pad_token_tensor = input_ids.new_zeros(())  # noqa: SLF001 - never used
    return found


def _is_eos(criteria: Any, eos: frozenset[int]) -> bool:
    return type(criteria) is EosTokenCriteria and frozenset(criteria.eos_token_id.flatten().tolist()) == eos


@with_suggestions
class SamplingLogitsProcessor(RowProcessor, LogitsProcessor):
    """A logits processor whose result allows one token per row, the sampled one: for any flow of ``generate``.

    ``model.generate(..., logits_processor=[processor], stopping_criteria=[processor.stopping_criteria])``. Pass it as
    the last processor, and a new one to each call. It samples from the scores that other processors leave, so that
    ``do_sample=False`` turns off those that ``generate`` makes from temperature, top_k and others. sampling_params,
    tokenizer: as in ``CustomGenerate``. eos_token_ids, pad_token_id: by default those of the tokenizer. attention_mask:
    of the prompts; without one, tokens ``pad_token_id`` at the start of a row are padding. num_return_sequences: as
    passed to ``generate``. Raises ParameterError, LogitsError.
    """

    def __init__(
        self,
        sampling_params: Any = None,
        tokenizer: Any = None,
        *,
        eos_token_ids: Any = None,
        pad_token_id: int | None = None,
        attention_mask: Any = None,
        num_return_sequences: int = 1,
    ) -> None:
        read = None if tokenizer is None else given_tokenizer(tokenizer)
        if eos_token_ids is None:
            eos_token_ids = () if read is None else read.eos_token_ids
        if pad_token_id is None:
            pad_token_id = getattr(tokenizer, "pad_token_id", None)
        super().__init__(
            sampling_params,
            read,
            eos_token_ids=frozenset([eos_token_ids] if isinstance(eos_token_ids, int) else eos_token_ids),
            attention_mask=attention_mask,
            pad_token_id=pad_token_id,
            copies=num_return_sequences,
            checked=True,
        )

    @property
    def stopping_criteria(self) -> SamplingStoppingCriteria:
        """Ends rows by the stop criteria of their parameters."""
        return SamplingStoppingCriteria(self)


class SamplingStoppingCriteria(StoppingCriteria):
    """Ends the rows of a processor by their own stop criteria, and by others."""

    def __init__(self, processor: RowProcessor, others: Any = ()) -> None:
        self._processor, self._others = processor, others
        self.eos_token_id = None  # tells ``generate`` to pad the rows that have finished

    def __call__(self, input_ids: Any, scores: Any, **settings: Any) -> Any:
        """Which rows have finished, bool [B]."""
        for criteria in self._others:
            limit = isinstance(criteria, MaxLengthCriteria | MaxTimeCriteria)
            self._processor.end(criteria(input_ids, scores, **settings), "length" if limit else "stop")
        return self._processor.finished(input_ids)


PROCESSORS = (
    *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TopHLogitsWarper"),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "RepetitionPenaltyLogitsProcessor"),
    *("NoRepeatNGramLogitsProcessor", "NoBadWordsLogitsProcessor", "SuppressTokensLogitsProcessor"),
    *("MinNewTokensLengthLogitsProcessor", "SequenceBiasLogitsProcessor"),
)
"""The processors that ``generate`` makes from parameters with a counterpart, which replaces them."""

BY_GENERATE = ("max_new_tokens", "stop_strings")
"""Parameters that ``generate`` itself applies."""


def set_values(model: Any, config: Any) -> dict[str, Any]:
    """The parameters with a counterpart that the model or the caller of ``generate`` has set.

    ``generate`` fills the others with defaults, such as 50 for top_k. config: with these defaults.
    """
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    own, values = model.generation_config.to_dict(), config.to_dict()
    names = [name for name in ("do_sample", *SAMPLING, *ALWAYS) if name not in BY_GENERATE]
    given = {name: values.get(name) for name in names}
    return {
        name: value
        for name, value in given.items()
        if value is not None and (own.get(name) is not None or value != defaults.get(name))
    }


def other_processors(model: Any, given: Any, config: Any, input_ids: Any, model_inputs: dict[str, Any]) -> list[Any]:
    """The processors that sampling parameters do not replace: those of the caller, and of parameters without one."""
    made = model._get_logits_processor(  # noqa: SLF001 - what ``generate`` made itself, to tell it from the caller's
        generation_config=config,
        input_ids_seq_length=input_ids.shape[1],
        encoder_input_ids=input_ids,
        prefix_allowed_tokens_fn=None,
        logits_processor=[],
        device=input_ids.device,
        model_kwargs=model_inputs,
    )
    replaced = {type(one) for one in made if type(one).__name__ in PROCESSORS}
    return [one for one in given if type(one) not in replaced]
