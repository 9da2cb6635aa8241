"""Results are immutable values."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from nucleate.outputs import Completion, CompletionOutput, StepLogprobs, TokenLogprob, Usage


def test_a_completion_is_immutable():
    output = CompletionOutput(index=0, text="a", token_ids=(1,), finish_reason="stop", stop_reason=None, seed=3)
    completion = Completion((5, 6), (output,), Usage(2, 1))
    assert completion.text == "a"
    assert completion.usage.total_tokens == 3
    assert pickle.loads(pickle.dumps(completion)) == completion
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion.usage = Usage(0, 0)


def test_the_logprob_of_an_output_is_the_exact_sum_of_its_tokens():
    def output_of(*logprobs):
        steps = tuple(StepLogprobs(TokenLogprob(7, one, 1), (), ()) for one in logprobs)
        return CompletionOutput(0, "", (7,) * len(logprobs), "stop", None, 3, steps)

    assert output_of(*[-0.1] * 10).cumulative_logprob == -1.0  # a plain sum is -0.9999999999999999
    assert output_of(-1e16, -1.0, 1e16).cumulative_logprob == -1.0
    assert output_of(-1.0, -math.inf).cumulative_logprob == -math.inf
    assert CompletionOutput(0, "", (), "stop", None, 3).cumulative_logprob is None
    assert pickle.loads(pickle.dumps(output_of(-0.5))) == output_of(-0.5)
