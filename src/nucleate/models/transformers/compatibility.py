"""Checks whether a Transformers model can run batched: by its config, its attention calls, and a numeric comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nucleate.models.paged_cache import NO_SINKS, AttentionRule
from nucleate.models.runner import ModelInput
from nucleate.models.transformers.decoding_context import TOLERANCE, Decoding, long_rope_length, positions
from nucleate.models.transformers.ragged_attention import (
    MASKS,
    NAME,
    PROBE,
    AttentionLayer,
    IncompatibleModelError,
    OwnMaskError,
    implement,
)
from nucleate.models.transformers.transformers_model import layer_configs

HARMLESS = {"dropout", "position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states"}
HARMLESS |= {"scaling", "softcap", "sliding_window", "s_aux", "cache_position", "output_router_logits", "return_dict"}
HARMLESS |= {"logits_to_keep"}
"""Arguments of an attention function that ``AttentionRule`` covers or that change nothing."""

LENGTH, WINDOW = 24, 128
"""Tokens of a sequence in the comparison; longer, to exceed a sliding window, if that is at most WINDOW tokens."""
MAX_NOISE = 3.0
"""In 16-bit types, logits may deviate so many times as much as the stock model's own do in another batch."""


class Probe:
    """A first forward pass that records how every layer attends."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []
        self.masks: list[tuple[bool, int | None]] = []  #: see ``note_mask``

    def note(self, module: Any, query: Any, key: Any, value: Any, mask: Any, settings: Mapping[str, Any]) -> Any:
        """See ``dispatch``. Returns the value: with one token, attention is the identity."""
        if mask is not None and bool((~mask if mask.dtype == torch.bool else mask).any()):
            raise OwnMaskError("its attention adds a mask of its own to the scores")
        if unsupported := sorted(
            name for name, value in settings.items() if value is not None and name not in HARMLESS
        ):
            raise IncompatibleModelError(f"its attention has unsupported arguments: {', '.join(unsupported)}")
        causal = settings.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise IncompatibleModelError("its attention is not causal")
        if query.shape[1] % key.shape[1] or value.shape[1] != key.shape[1]:
            raise IncompatibleModelError("its query heads cannot be grouped by key heads")
        scaling = settings.get("scaling")
        sinks = settings.get("s_aux")
        rule = AttentionRule(
            query.shape[3] ** -0.5 if scaling is None else float(scaling),
            settings.get("sliding_window") or 0,
            float(settings.get("softcap") or 0),
            NO_SINKS if sinks is None else np.ascontiguousarray(sinks.detach().float().cpu().numpy()),
        )
        shapes = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
        self.layers.append(AttentionLayer(module, rule, None if sinks is None else sinks.detach(), *shapes))
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2)


@contextmanager
def probing(model: Any) -> Iterator[Probe]:
    """Within this context, a forward pass of a model copy records its attention. Raises IncompatibleModelError."""
    probe = Probe()
    token = MASKS.set(probe.masks)
    implement(model, PROBE)
    try:
        with torch.inference_mode():
            yield probe
    finally:
        MASKS.reset(token)
        implement(model, NAME)
    if any(custom for custom, _ in probe.masks):
        raise IncompatibleModelError("its attention has a custom mask")


def layers_of(model: Any) -> list[AttentionLayer]:
    """The attention layers of a model copy, in call order. Raises IncompatibleModelError."""
    if reason := why_not(model):
        raise IncompatibleModelError(reason)
    with probing(model) as probe:
        ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        model(input_ids=ids, position_ids=ids, use_cache=False, nucleate=probe)
    layers, config = probe.layers, model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    if len(layers) != count or len({id(layer.module) for layer in layers}) != count:
        raise IncompatibleModelError(f"{len(layers)} of its {count} layers have their own KV cache")
    kinds = getattr(config, "layer_types", None) or [None] * count
    windows = {size for _, size in probe.masks if size is not None}
    for layer, kind in zip(layers, kinds, strict=True):
        expected = {"sliding_attention": windows, "full_attention": set()}.get(kind, windows)
        if {layer.rule.window} - {0} != expected:
            mask = ", ".join(map(str, sorted(expected))) or "none"
            raise IncompatibleModelError(
                f"its attention has the window {layer.rule.window or 'none'}, its mask has {mask}"
            )
    return layers


def why_not(model: Any) -> str | None:
    """The reason that a model's config gives against batching; None if there is none."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if not any(getattr(each, "_supports_attention_backend", False) for each in (model, model.get_decoder())):
        return "its attention cannot be replaced"
    if unsupported := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        return f"it has layers of type {', '.join(sorted(map(str, unsupported)))}"
    if any(getattr(layer, "attention_chunk_size", None) for layer in layer_configs(config)):
        return "its attention is chunked"
    if 0 < long_rope_length(model) < config.max_position_embeddings:
        return "its positions (longrope) depend on the length of the sequence"
    return None


def compare(runner: Any, stock: Any, decoding: Decoding) -> None:
    """Compare two sequences computed in a batch, in chunks, with the stock model. Raises IncompatibleModelError.

    It replaces the KV cache of the runner.
    """
    windows = [layer.rule.window for layer in runner.layers if 0 < layer.rule.window <= WINDOW]
    length = min(max([LENGTH, *(window + LENGTH for window in windows)]), runner.context_length)
    if length < 4:
        raise IncompatibleModelError(f"its context of {length} tokens is too short for the comparison")
    ids_of_blocks, third = range(2 * -(-length // runner.block_size)), length // 3
    blocks = ids_of_blocks[::-2], ids_of_blocks[::2]
    forwards = (  # (sequence, start, stop) of each forward pass
        ((0, 0, third), (1, 0, length - 2)),
        ((1, length - 2, length - 1), (0, third, length - 2)),
        ((0, length - 2, length - 1), (1, length - 1, length)),
        ((0, length - 1, length),),
    )
    ids_2T = np.random.default_rng(0).integers(0, runner.vocab_size, (2, length))
    settings = {"position_ids": positions(stock, 0, length)} if decoding.positions else {}
    expected = stock(input_ids=torch.from_numpy(ids_2T).to(runner.device), use_cache=False, **settings)
    expected_2TV = runner.local_logits(expected.logits)
    runner.allocate(len(ids_of_blocks))
    ids = ids_2T.tolist()
    decode: list[float] = []
    prefill: list[float] = []  # deviations of the tokens of inputs of one token, and of longer inputs
    for chunks in forwards:
        inputs = [ModelInput(row, ids[row], start, stop, blocks[row], stop - start) for row, start, stop in chunks]
        actual_LV = torch.as_tensor(runner.forward(inputs), device=runner.device)
        stock_LV = torch.cat([expected_2TV[row, start:stop] for row, start, stop in chunks])
        deviations = iter(_deviations(actual_LV, stock_LV).tolist())
        for _, start, stop in chunks:
            (decode if stop - start == 1 else prefill).extend(next(deviations) for _ in range(start, stop))
    half = runner.dtype.itemsize == 2
    worst = max(_most(decode, half=half), _most(prefill, half=half))
    if not worst <= TOLERANCE.get(runner.dtype, 0):
        limit = 0.0
        if half:  # models with large activations differ from themselves: in batches of two, and alone
            alone = [
                stock(input_ids=torch.tensor([row], device=runner.device), use_cache=False, **settings) for row in ids
            ]
            alone_2TV = torch.cat([runner.local_logits(one.logits) for one in alone])
            limit = MAX_NOISE * _most(_deviations(alone_2TV, expected_2TV).flatten().tolist(), half=True)
        if not worst <= limit:
            raise IncompatibleModelError(f"its batched logits differ by {worst:.1%}")


def _deviations(actual: Any, expected: Any) -> Any:
    """The deviation of the logits [..., V] of each token, relative to their spread."""
    actual, expected = actual.float(), expected.float()
    return (actual - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)


def _most(deviations: Sequence[float], *, half: bool) -> float:
    """The largest deviation. half: of a 16-bit type, without the worst quarter.

    Rounding routes some tokens to other experts, which changes much.
    """
    return float(np.quantile(deviations, 0.75 if half else 1, method="lower"))
