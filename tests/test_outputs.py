"""Results are immutable values."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from nucleate.outputs import Completion, CompletionChunk, CompletionOutput, Finish, StepLogprobs, TokenLogprob, Usage


def test_a_completion_is_immutable():
    output = CompletionOutput(index=0, text="a", token_ids=(1,), finish_reason="stop", stop_reason=None, seed=3)
    completion = Completion((5, 6), (output,), Usage(2, 1))
    assert completion.text == "a"
    assert completion.usage.total_tokens == 3
    assert pickle.loads(pickle.dumps(completion)) == completion
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion.usage = Usage(0, 0)


def test_a_chunk_has_the_index_of_its_output():
    chunk = CompletionChunk("x", (7,), 1, 99, *Finish("error", "why"))
    assert (chunk.index, chunk.seed, chunk.finish_reason, chunk.stop_reason) == (1, 99, "error", "why")
    assert CompletionChunk("x", (7,), 1, 99).finish_reason is None
    assert pickle.loads(pickle.dumps(chunk)) == chunk


def test_the_logprob_of_an_output_is_the_exact_sum_of_its_tokens():
    def output_of(*logprobs):
        steps = tuple(StepLogprobs(TokenLogprob(7, one, 1), (), ()) for one in logprobs)
        return CompletionOutput(0, "", (7,) * len(logprobs), "stop", None, 3, steps)

    assert output_of(*[-0.1] * 10).cumulative_logprob == -1.0  # a plain sum is -0.9999999999999999
    assert output_of(-1e16, -1.0, 1e16).cumulative_logprob == -1.0
    assert output_of(-1.0, -math.inf).cumulative_logprob == -math.inf
    assert CompletionOutput(0, "", (), "stop", None, 3).cumulative_logprob is None
    assert pickle.loads(pickle.dumps(output_of(-0.5))) == output_of(-0.5)


def test_a_step_has_named_fields():
    out = TokenLogprob(3, -math.inf, None)
    step = StepLogprobs(TokenLogprob(1, -0.25, 1), (TokenLogprob(1, -0.25, 1),), (out,))
    assert (step.chosen.token_id, step.top[0].rank, step.requested[0].rank) == (1, 1, None)
    assert hash(step) == hash(pickle.loads(pickle.dumps(step)))
