"""nucleate inside SGLang: a custom logit processor that samples, and allows the sampled token alone.

    python -m sglang.launch_server --model ... --enable-custom-logit-processor

A request sends ``custom_logit_processor=NucleateLogitProcessor.to_str()`` and ``custom_params=nucleate_params(...)``.
SGLang creates a new processor when it likes, so the rows are kept here, and each ends with its request.
"""

from __future__ import annotations

import json
import logging
import weakref
from itertools import count, groupby
from typing import Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from nucleate.integrations.engine_rows import (
    FIELD,
    FOLLOWING,
    PENALTIES,
    EngineRows,
    allow_only,
    request_params,
    seed_of_text,
)
from nucleate.llm.model_loading import load_sampler
from nucleate.parameters.parameter import ParameterError

logger = logging.getLogger("nucleate")

WHERE = f"custom_params[{FIELD!r}]"
ATTRIBUTE = "nucleate_row"
"""Where a request of SGLang keeps its row."""
ALL_TOKENS = 1 << 30
"""The top_k of SGLang that keeps all tokens."""

_engines: dict[int, EngineRows] = {}  # by the length of a row of logits
_keys = count()


def nucleate_params(**fields: Any) -> dict[str, Any]:
    """The ``custom_params`` of a request, checked.

    fields: of SamplingParams. Those that SGLang has itself (``temperature``, ``top_k``, ``top_p``, ``min_p``, and the
    seed, ``sampling_seed``) may be set there instead. Raises ParameterError for unknown fields and values, for those
    that end an output, and for those that need a second sequence.
    """
    params = request_params(fields, {}, WHERE)
    return {FIELD: json.dumps(params.to_dict())}


class NucleateLogitProcessor(CustomLogitProcessor):
    """Samples the requests with ``custom_params`` of ``nucleate_params``, with the tokens of ``LLM``, seed for seed.

    The logits are copied to the CPU, where nucleate samples. A request whose parameters are refused is sampled by
    SGLang, and the log says why. Speculative decoding needs ``--disable-overlap-schedule``, and drafts in a chain.
    """

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        """Sample. logits: float [rows, V], changed in place. custom_param_list: of the request of each row."""
        size = int(logits.shape[1])
        given = [params or {} for params in custom_param_list or ()]
        requests = [_row_of(params, size) if FIELD in params else None for params in given]
        places: dict[Any, list[int]] = {}
        for row, group in groupby(range(len(requests)), requests.__getitem__):
            rows = [*group]
            if row is not None and row.key is not None and row.follow(given[rows[0]]["__req__"], len(rows)):
                places[row.key] = rows
        if places:
            allow_only(logits, _engines[size].sample(logits, places))
        return logits


class _Row:
    """The row of a request of SGLang, kept by the request. first: the length of its output when decoding began."""

    def __init__(self, engine: EngineRows, request: Any, params: dict[str, Any]) -> None:
        self._engine, self.first = engine, 0
        self.key: int | None = None
        own = request.sampling_params
        parameters = {name: getattr(own, name, None) for name in (*FOLLOWING, *PENALTIES)}
        parameters |= {"seed": own.sampling_seed, "top_k": 0 if own.top_k == ALL_TOKENS else own.top_k}
        try:
            checked = request_params(params[FIELD], parameters, WHERE)
            if own.n > 1 and checked.seed is not None:
                raise ParameterError("seed", f"seed cannot be set with n = {own.n}: all outputs would be the same")
            key, prompt = next(_keys), [*request.origin_input_ids]
            engine.start(key, checked, prompt, [*request.output_ids], seed_of_text(request.rid))
        except (ParameterError, ValueError, TypeError) as error:
            self._give_up(request, error)
            return
        self.key = key
        weakref.finalize(self, engine.drop, key)

    def _give_up(self, request: Any, error: Exception) -> None:
        logger.error("request %s is sampled by SGLang: %s", request.rid, error)
        self.key = None

    def follow(self, request: Any, rows: int) -> bool:
        """Make the row equal to what SGLang has kept of the output, of which it may know the last token later."""
        output, steps = request.output_ids, request.decode_batch_idx
        if not steps:
            self.first = len(output)
        length = len(output) if rows > 1 else self.first + steps
        recent = max(min(length, self._engine.length(self.key)) - rows - 8, 0)
        try:
            self._engine.follow(self.key, length, [*output[recent:length]], recent)
        except RuntimeError as error:
            self._give_up(request, error)
        return self.key is not None


def _row_of(params: dict[str, Any], size: int) -> _Row:
    """The row of the request of some parameters."""
    request = params["__req__"]
    row: _Row | None = getattr(request, ATTRIBUTE, None)
    if row is None:
        if size not in _engines:
            from sglang.srt.runtime_context import get_server_args

            server = get_server_args()
            config = "none" if getattr(server, "sampling_defaults", "model") == "openai" else "auto"
            tokenizer = None if server.tokenizer_path in (None, server.model_path) else server.tokenizer_path
            own = load_sampler(
                server.model_path,
                vocab_size=size,
                generation_config=config,
                tokenizer=tokenizer,
                revision=getattr(server, "revision", None),
            )
            _engines[size] = EngineRows(own)
        row = _Row(_engines[size], request, params)
        setattr(request, ATTRIBUTE, row)
    return row
