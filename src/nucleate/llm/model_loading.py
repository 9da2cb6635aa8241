"""What LLM loads beside a model in its process: its tokenizer, and a model that several processes share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nucleate.jit.native_library import warn_once
from nucleate.models.gguf.gguf_file import find_gguf
from nucleate.models.loader import ModelSource, is_openvino, resolve_tokenizer
from nucleate.models.protocol import Model, ModelError
from nucleate.models.transformers.transformers_model import convert_tokenizer, libraries, save_tokenizer
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError, invalid_value
from nucleate.sampling.sampler import Sampler
from nucleate.sampling_params import ENGINE_ONLY, SamplingParams
from nucleate.speculative.config import TOKEN_METHODS, Speculation
from nucleate.tokenization.tokenizer import Tokenizer, read_template
from nucleate.tokenization.tokenizer_sources import VocabularyTokenizer, fit_to_model, make_tokenizer

if TYPE_CHECKING:
    from nucleate.models.gguf.gguf_model import GgufSource


def model_tokenizer(
    given: Any, source: ModelSource | GgufSource, model: Model, *, needs_template: bool = True
) -> Tokenizer:
    """The tokenizer of a model, see ``LLM``. needs_template: whether to look for a chat template beside a GGUF file.

    Raises ModelError, ParameterError.
    """
    if given is not None:
        tokenizer = given_tokenizer(given)
    elif (vocabulary := getattr(model, "vocabulary", None)) is not None:
        template = getattr(model, "chat_template", None)
        if template is None and needs_template and source.folder is not None:
            template = template_beside(source.folder)
        tokenizer = VocabularyTokenizer(vocabulary, template, model)
    else:
        tokenizer = given_tokenizer(source.folder)
    try:
        unknown = fit_to_model(tokenizer, model.vocab_size, None if given is None else source.eos_token_ids())
    except ValueError as error:
        raise ModelError(f"the tokenizer does not fit the model: {error}") from None
    if unknown:
        warn_once(f"the tokenizer has {len(unknown)} added tokens that the model does not have, such as {unknown[0]}")
    return tokenizer


def template_beside(file: Path) -> str | None:
    """The chat template in the folder of a GGUF file, or in its folder ``tokenizer``. Raises ModelError."""
    try:
        found = [read_template(folder) for folder in (file.parent, file.parent / "tokenizer")]
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the chat template beside {file.name}: {error}") from error
    return next((one for one in found if one is not None), None)


def given_tokenizer(given: Any) -> Tokenizer:
    """A tokenizer in any form that ``LLM`` takes. Raises ModelError, ParameterError."""
    if isinstance(given, str | os.PathLike):
        if (path := find_gguf(given)) is not None:
            from nucleate.models.gguf.gguf_model import GgufModel

            model = GgufModel(path, vocab_only=True)
            return VocabularyTokenizer(model.vocabulary, model.chat_template, model)
        given = resolve_tokenizer(given)
    try:
        return make_tokenizer(given, convert=convert_tokenizer, save=save_tokenizer)
    except ParameterError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the tokenizer: {error}") from error


GENERATION_CONFIG = ("auto", "none")
"""Whether the sampling parameters in the model's generation_config.json are defaults."""

FIELD = "tensor_parallel"


def check_parallel(source: Any, speculation: Speculation | None) -> None:
    """Raise ParameterError for a model or a draft method that cannot be shared by processes."""
    if not isinstance(source, ModelSource) or source.folder is None:
        kind = "a model in memory" if isinstance(source, ModelSource) else "a GGUF file"
        raise ParameterError(FIELD, f"tensor_parallel needs a model folder or a Hugging Face id, got {kind}")
    if is_openvino(source.folder):
        raise ParameterError(FIELD, "tensor_parallel needs a model of Transformers, got one for OpenVINO")
    method = None if speculation is None else speculation.method
    if isinstance(method, str) and method not in TOKEN_METHODS:
        rule = f"with tensor_parallel, the methods are {', '.join(TOKEN_METHODS)} or a proposer"
        raise ParameterError("speculative_config", f"{rule}, got {shown(method)}")


def load_parallel(source: Any, size: int, options: Mapping[str, str]) -> Model:
    """Load a model that ``check_parallel`` allows on ``size`` processes. options: device, dtype and runtime.

    Raises ModelError, ParameterError.
    """
    libraries()  # raises ModelError
    from nucleate.sharding.tensor_parallel import load_sharded

    return load_sharded(source.folder, size, **options)


@with_suggestions
def load_sampler(
    model: str | os.PathLike[str] | Any | None = None,
    *,
    vocab_size: int | None = None,
    generation_config: str = "auto",
    tokenizer: str | os.PathLike[str] | Any | None = None,
    backend: str = "auto",
    device: str = "cpu",
    revision: str | None = None,
) -> Sampler:
    """A ``Sampler`` for the logits of a model that another engine runs. The weights are not loaded.

    Its rows get what ``LLM`` would give them: the sampling parameters that the model recommends, as defaults of those
    that are not set; the EOS ids; the tokenizer, for text in parameters. Recommended parameters that need an engine,
    such as ``stop``, are left out. So ``sampler.add(None, prompt_ids)`` is the row of a request without parameters.

    model: as in ``LLM``. vocab_size: V, the length of a row of logits; by default as in the model's config, which some
    engines pad. generation_config: "auto", or "none" for no recommended parameters. tokenizer: instead of that in the
    folder; needed for a model in memory. backend, device: as in ``Sampler``. revision: of a Hugging Face id. Raises
    ModelError for a model that cannot be read, ParameterError.
    """
    if generation_config not in GENERATION_CONFIG:
        raise invalid_value("generation_config", " or ".join(GENERATION_CONFIG), generation_config)
    source = ModelSource.find(model, device="auto", dtype="auto", runtime="auto", revision=revision)
    if isinstance(source, ModelSource):
        if source.folder is None and tokenizer is None:
            raise ParameterError("tokenizer", "a model in memory needs a tokenizer: load_sampler(model, tokenizer=...)")
        found = given_tokenizer(source.folder if tokenizer is None else tokenizer)
        size, values = source.vocab_size(), source.recommended
    else:
        from nucleate.models.gguf.gguf_model import GgufModel, recommended

        gguf = GgufModel(source.folder, vocab_only=True)
        found = VocabularyTokenizer(gguf.vocabulary, gguf.chat_template, gguf)
        size, values = gguf.vocabulary.size, partial(recommended, gguf.metadata)
    size = vocab_size or size
    if size is None:
        raise ParameterError("vocab_size", "vocab_size is needed: the model's config has none")
    fit_to_model(found, size, None if tokenizer is None else source.eos_token_ids())
    defaults = recommended_params(values() if generation_config == "auto" else {}, source.generation_config_name)
    defaults = SamplingParams(**{k: v for k, v in defaults.to_dict().items() if k not in ENGINE_ONLY})
    ends = sorted(token for token in found.eos_token_ids if token < size)  # others cannot be sampled
    return Sampler(size, backend, device, defaults=defaults, eos_token_ids=ends, tokenizer=found)


def recommended_params(values: Mapping[str, Any], name: str) -> SamplingParams:
    """The sampling parameters that a model recommends. name: of where they are from. Raises ModelError."""
    try:
        return SamplingParams(**values)
    except ParameterError as error:  # caused by the model, not by an argument
        raise ModelError(f"{name}: {error} (generation_config 'none' ignores the file)") from None
