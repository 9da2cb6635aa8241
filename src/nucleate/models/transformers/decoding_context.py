"""One sequence of a Transformers model: with the model's own cache, or recomputed from its start for each token.

The logits after a token are those of Transformers' ``generate``. For most models, a forward pass without a cache over
the sequence up to that token gives the same. ``decoding_of`` finds out with a few tokens whether the cache can be used.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import one_line

Floats = NDArray[np.float32]

TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.15, torch.float64: 1e-5}
"""Tolerance: deviation of a token's logits from the stock ones, relative to their own deviation from the mean."""

TOKENS = 9
"""Tokens of the comparison. The first call has six: some convolutions treat fewer as a special case."""


class Decoding(NamedTuple):
    """How a model computes the next token of a sequence."""

    cache: str | None  #: the argument for its cache; None: sequences are recomputed from their start
    reason: str = ""  #: why they are recomputed
    positions: bool = False  #: whether to pass the positions of tokens, as ``generate`` does
    single: bool = False  #: whether only the first call may have several tokens
    long_rope: int = 0  #: a longer sequence is recomputed, as the positions of all its tokens change; 0: never


class TransformersContext:
    """See ``DecodingContext``."""

    def __init__(self, model: Any, decoding: Decoding) -> None:
        self.model, self.decoding, self.cache = model, decoding, None
        self.token_ids: list[int] = []

    def forward(self, token_ids: Sequence[int]) -> Floats:
        """See ``DecodingContext.forward``."""
        logits: Floats = self._forward(list(token_ids), 1)[-1]
        return logits

    def forward_all(self, token_ids: Sequence[int]) -> Floats:
        """See ``DecodingContext.forward_all``."""
        return self._forward(list(token_ids), len(token_ids))

    def _forward(self, ids: list[int], count: int) -> Floats:
        """Compute more tokens: the logits of the last ``count`` of them."""
        if not ids:
            raise ValueError("forward needs one or more token ids")
        decoding, start = self.decoding, len(self.token_ids)
        stop = start + len(ids)
        if decoding.cache is None:
            self.token_ids += ids
            with torch.inference_mode():
                return np.concatenate([self._recomputed(end) for end in range(stop - count + 1, stop + 1)])
        if decoding.single and start and len(ids) > 1:
            return np.concatenate([self._forward([token], 1) for token in ids])[-count:]
        if start <= decoding.long_rope < stop:
            if stop - count < decoding.long_rope:  # the first logits are those of a short sequence
                short = decoding.long_rope - start
                first = self._forward(ids[:short], count - len(ids) + short)
                return np.concatenate([first, self._forward(ids[short:], len(ids) - short)])
            ids, self.token_ids, self.cache = self.token_ids + ids, [], None
        with torch.inference_mode():
            return self._cached(ids, count)

    def _cached(self, ids: list[int], count: int) -> Floats:
        decoding, start = self.decoding, len(self.token_ids)
        ids_1T = torch.tensor([ids], device=self.model.device)
        name = str(decoding.cache)
        settings: dict[str, Any] = {name: self.cache, "use_cache": True, "logits_to_keep": count}
        if decoding.positions:
            settings["position_ids"] = positions(self.model, start, start + len(ids))
        out = self.model(input_ids=ids_1T, **settings)
        if out.get(name) is None:
            raise ModelError("it does not return its cache")
        self.cache, self.token_ids = out[name], self.token_ids + ids
        return _logits(out, count)

    def _recomputed(self, end: int) -> Floats:
        """The logits [1, V] after the first tokens, as ``generate`` computes them without a cache."""
        ids_1T = torch.tensor([self.token_ids[:end]], device=self.model.device)
        settings = {"position_ids": positions(self.model, 0, end)} if self.decoding.positions else {}
        inputs = self.model.prepare_inputs_for_generation(
            ids_1T, attention_mask=torch.ones_like(ids_1T), is_first_iteration=True, use_cache=False, **settings
        )
        return _logits(self.model(**inputs, return_dict=True), 1)


def positions(model: Any, start: int, stop: int) -> Any:
    """The positions of tokens [1, T]. Some models count them in another way if none are passed."""
    return torch.arange(start, stop, device=model.device)[None]


def _logits(out: Any, count: int) -> Floats:
    logits: Floats = out.logits[0, -count:].float().cpu().numpy()
    return logits


def decoding_of(model: Any, vocab_size: int) -> Decoding:
    """How to decode with a model. Runs a few tokens. Raises ModelError if the model cannot continue token ids."""
    ids = np.random.default_rng(0).integers(0, vocab_size, TOKENS).tolist()
    name, decoding = type(model).__name__, declared_decoding(model)
    try:
        recomputed = TransformersContext(model, decoding._replace(cache=None))
        expected_2V = np.stack([recomputed.forward(ids[:-1]), recomputed.forward(ids[-1:])])
    except Exception as error:  # the model's code may raise anything
        raise ModelError(f"{name} cannot continue a text: {type(error).__name__}: {one_line(error)}") from error
    if expected_2V.shape[1] != vocab_size:
        raise ModelError(f"{name} returns {expected_2V.shape[1]} logits per token; its head has {vocab_size}")
    if decoding.cache is None:
        return decoding
    try:
        context = TransformersContext(model, decoding)
        context.forward(ids[:-3])
        actual_2V = np.stack([context.forward_all(ids[-3:-1])[-1], context.forward(ids[-1:])])
    except Exception as error:  # noqa: BLE001 - the model's code may raise anything
        reason = f"decoding with its cache raises {type(error).__name__}: {one_line(error)}"
        return decoding._replace(cache=None, reason=reason)
    worst = deviation(actual_2V, expected_2V, model.dtype)
    if worst > TOLERANCE.get(model.dtype, 0) and not _equals_generate(model, decoding, ids):
        return decoding._replace(cache=None, reason=f"with its cache, its logits differ by {worst:.1%}")
    return decoding._replace(single=decoding.single and not _takes_several(model, decoding, ids))


def _takes_several(model: Any, decoding: Decoding, ids: list[int]) -> bool:
    """Whether later calls, too, may have several tokens: fewer than a convolution reads, and more."""
    single, several = (TransformersContext(model, decoding._replace(single=one)) for one in (True, False))
    ids = [*ids[:-1], *ids]
    with suppress(Exception):  # the model's code may raise anything
        for start, stop in ((0, 6), (6, 8), (8, 16), (16, 17)):
            actual_V, expected_V = several.forward(ids[start:stop]), single.forward(ids[start:stop])
            if not deviation(actual_V[None], expected_V[None], model.dtype) <= TOLERANCE.get(model.dtype, 0):
                return False
        return True
    return False


def deviation(actual_LV: Floats, expected_LV: Floats, dtype: Any) -> float:
    """The largest deviation of the logits of a token, relative to their spread."""
    spread_L = np.linalg.norm(expected_LV - expected_LV.mean(-1, keepdims=True), axis=-1)
    deviation_L = np.linalg.norm(actual_LV - expected_LV, axis=-1) / spread_L
    # In 16-bit types, rounding routes some tokens to other experts, which changes much: ignore all but the best token.
    return float(deviation_L.min() if dtype.itemsize == 2 else deviation_L.max())


def _equals_generate(model: Any, decoding: Decoding, ids: list[int]) -> bool:
    """Whether the cache gives the logits of ``generate``: some models have other logits without a cache."""
    prompt = torch.tensor([ids], device=model.device)
    settings = {"min_new_tokens": 2, "max_new_tokens": 2, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    try:
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), **settings, return_dict_in_generate=True, output_logits=True
        )
    except Exception:  # noqa: BLE001 - the model's code may raise anything
        return False
    context = TransformersContext(model, decoding)
    actual_2V = np.stack([context.forward(ids), context.forward(out.sequences[0, len(ids) : -1].tolist())])
    expected_2V = torch.cat(out.logits).float().cpu().numpy()
    return deviation(actual_2V[1:], expected_2V[1:], model.dtype) <= TOLERANCE.get(model.dtype, 0)


def declared_decoding(model: Any) -> Decoding:
    """How the model's code and config say that it decodes."""
    parameters = inspect.signature(type(model).forward).parameters
    cache = next((name for name in ("past_key_values", "cache_params", "state") if name in parameters), None)
    has_positions = "position_ids" in parameters and not model.config.is_encoder_decoder
    stateful = bool(getattr(model, "_is_stateful", False))  # some of these take several tokens in the first call only
    return Decoding(cache, "" if cache else "it has no cache", has_positions, stateful, long_rope_length(model))


def long_rope_length(model: Any) -> int:
    """The length of a sequence up to which LongRoPE uses its short factors; 0 for a model without LongRoPE."""
    lengths = {
        rope["original_max_position_embeddings"]
        for module in model.modules()
        for rope in rope_parameters(module)
        if rope.get("rope_type") == "longrope"
    }
    return min(lengths, default=0)


def rope_parameters(module: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of a rotary embedding, those of each layer type; none for another module."""
    kinds = getattr(module, "rope_type", None)
    if kinds is None:
        return []
    parameters = getattr(module.config, "rope_parameters", None) or {}
    return [parameters[kind] for kind in kinds] if isinstance(kinds, dict) else [parameters]
