"""What of a generation config of Transformers becomes sampling parameters, and which logits processors remain."""

from __future__ import annotations

from typing import Any

from nucleate.models.model_files import ALWAYS, SAMPLING

PROCESSORS = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "SequenceBiasLogitsProcessor": "sequence_bias",
}
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
