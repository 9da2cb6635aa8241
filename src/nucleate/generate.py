"""START HERE: the whole loop, for one sequence: prefill, sample, detokenize, stop, stream. No batch, no tricks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nucleate.backends import reference
from nucleate.core import noise
from nucleate.core.event import Finish, Piece
from nucleate.core.parameter import ParameterError
from nucleate.core.stage import History
from nucleate.models.model import Model
from nucleate.params import SamplingParams
from nucleate.pipeline import simplify
from nucleate.text.detokenize import Detokenizer
from nucleate.text.stop import StopMatcher, StopRules
from nucleate.text.tokenizer import Tokenizer


def generate(
    model: Model, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams, index: int = 0
) -> Iterator[Piece]:
    """Answer ``index`` to a prompt, a piece per token. Arguments are checked now, the model runs as pieces are taken.

    Raises ParameterError for a prompt that is empty, too long or outside the vocabulary, and for parameters that the
    model or the stop rules refuse. Logits without a token to draw end the answer with finish_reason "error".
    """
    rules = admit(model, tokenizer, prompt_ids, params)
    seed = noise.fresh_seed() if params.seed is None else (params.seed + index) % 2**64
    return run(model, tokenizer, tuple(prompt_ids), params, rules, seed, index)


def run(
    model: Model,
    tokenizer: Tokenizer,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    rules: StopRules,
    seed: int,
    index: int,
) -> Iterator[Piece]:
    """The loop itself."""
    ends = tuple(token for token in tokenizer.eos_token_ids if token < model.vocab_size)  # others cannot be drawn
    stages = simplify(params.pipeline(ends))
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens)
    matcher = StopMatcher(rules)
    context = model.begin()
    output: list[int] = []
    logits_V = context.forward(prompt_ids)
    while True:
        try:
            token = reference.draw(logits_V, stages, seed, len(output), History(prompt_ids, output))
        except reference.RowError as error:
            text = "".join(matcher.close("".join(detokenizer.close())))
            yield Piece(text, (), index, seed, *Finish("error", f"invalid logits: {error}"))
            return
        output.append(token)
        hidden = matcher.is_stop_token(token) and not rules.include_stop_str_in_output
        text = "".join(matcher.push(token, "" if hidden else "".join(detokenizer.push(token))))
        if matcher.finish is not None:
            text += "".join(matcher.close("".join(detokenizer.close())))
            yield Piece(text, (token,), index, seed, *matcher.finish)
            return
        yield Piece(text, (token,), index, seed)
        logits_V = context.forward((token,))


def admit(model: Model, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> StopRules:
    """Check a request against the model before anything runs, and make its stop rules."""
    size, room = model.vocab_size, model.context_length - len(prompt_ids)
    if not len(prompt_ids):
        raise ParameterError("prompt", "the prompt is empty; it must have at least one token")
    if not all(0 <= token < size for token in prompt_ids):
        raise ParameterError("prompt", f"the prompt holds token ids outside the vocabulary (0..{size - 1})")
    if room < 1:
        raise ParameterError(
            "prompt",
            f"the prompt has {len(prompt_ids)} tokens, but the context holds {model.context_length} with the answer",
        )
    if params.min_tokens > room:
        message = f"min_tokens is {params.min_tokens}, but the context has room for {room} tokens after the prompt"
        raise ParameterError("min_tokens", message)
    for name in ("stop_token_ids", "suppress_token_ids", "allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= size:
                raise ParameterError(name, f"{name} names token {token}, but the vocabulary ends at {size - 1}")
    return StopRules(
        stop=params.stop,
        stop_token_ids=frozenset(params.stop_token_ids),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        stop_regex=params.stop_regex,
        stop_json=params.stop_json,
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        min_tokens=params.min_tokens,
    )
