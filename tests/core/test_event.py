"""What comes out is values."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from nucleate.core.event import Completion, Finish, Output, Piece, Usage


def test_a_completion_is_a_frozen_value():
    output = Output(index=0, text="a", token_ids=(1,), finish_reason="stop", stop_reason=None, seed=3)
    completion = Completion((5, 6), (output,), Usage(2, 1))
    assert completion.text == "a"
    assert completion.usage.total_tokens == 3
    assert pickle.loads(pickle.dumps(completion)) == completion
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion.usage = Usage(0, 0)


def test_a_piece_says_which_answer_it_belongs_to():
    piece = Piece("x", (7,), 1, 99, *Finish("error", "why"))
    assert (piece.index, piece.seed, piece.finish_reason, piece.stop_reason) == (1, 99, "error", "why")
    assert Piece("x", (7,), 1, 99).finish_reason is None
    assert pickle.loads(pickle.dumps(piece)) == piece
