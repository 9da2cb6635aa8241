"""An error of the tokenizer, also a panic of its library, ends its request and no other."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import tokenizers
from toy_models import PagedToy, Toy
from toy_requests import drive

from nucleate.engine.async_engine import AsyncEngine
from nucleate.engine.beam_params import BeamParams, BeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

SPACE = 3
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def panicking_tokenizer() -> Tokenizer:
    """Its decoder panics in the library for a token that is one space."""
    words = {"a": 0, "b": 1, "c": 2, " ": SPACE}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    backend.decoder = tokenizers.decoders.Strip(" ", 1, 1)
    return Tokenizer(backend)


def repeat_last(seen: tuple[int, ...]) -> np.ndarray:
    """The logits of a model that repeats the last token."""
    return np.eye(4, dtype=np.float32)[seen[-1]] * 10


def engine_of(tokenizer: Tokenizer | None = None) -> Engine:
    return Engine(PagedToy(Toy(repeat_last, 4), 50), tokenizer or panicking_tokenizer(), backend="reference")


def test_a_panic_of_the_library_is_an_ordinary_exception() -> None:
    tokenizer = panicking_tokenizer()
    with pytest.raises(ValueError, match="the tokenizers library failed: slice index starts at 1"):
        tokenizer.decode([SPACE])
    with pytest.raises(ValueError, match="the tokenizers library failed"):
        Detokenizer(tokenizer, [0, SPACE])


@pytest.mark.parametrize("prompt", [[SPACE], [0, SPACE]])
def test_a_panic_ends_its_request_only(prompt: list[int]) -> None:
    engine = engine_of()
    failing, other = drive(engine, [Request(prompt, GREEDY), Request([0, 1], GREEDY)])
    last = failing[-1].chunk
    assert last.finish_reason == "error"
    assert "cannot be converted to text: the tokenizers library failed" in str(last.stop_reason)
    assert "".join(output.chunk.text for output in other) == "bbbb"
    assert other[-1].chunk.finish_reason == "length"
    assert engine.stats.num_used_kv_blocks == 0
    [again] = drive(engine, [Request([2], GREEDY)])
    assert "".join(output.chunk.text for output in again) == "cccc"


def test_an_exception_of_a_detokenizer_that_is_closed_again_ends_its_request_only() -> None:
    class Failing(Tokenizer):
        @property
        def pieces(self) -> object:  # type: ignore[override]
            raise KeyError("no pieces")

    engine = engine_of(Failing(panicking_tokenizer().backend))
    failing = engine.add(Request([1], GREEDY))
    [output] = engine.step()
    assert (output.request_id, output.chunk.finish_reason, output.chunk.token_ids) == (failing, "error", (1,))
    aborted = engine.add(Request([1], GREEDY))
    assert [output.chunk.finish_reason for output in engine.abort(aborted)] == ["abort"]
    assert not len(engine)


def test_an_aborted_request_whose_text_cannot_be_decoded_ends() -> None:
    engine = engine_of()
    aborted = engine.add(Request([2, 1], GREEDY))
    engine.step()
    engine._requests[aborted].sequences[0].processor._detokenizer._joiner._tokens.append(" ")  # type: ignore[union-attr]
    assert [output.chunk.finish_reason for output in engine.abort(aborted)] == ["abort"]


def test_a_panic_in_a_beam_search_ends_it_only() -> None:
    params = BeamParams(num_beams=1, max_tokens=2)
    failing, other = drive(engine_of(), [BeamRequest([SPACE], params), BeamRequest([2], params)])
    assert failing[-1].chunk.finish_reason == "error"
    assert failing[-1].usage is not None
    assert other[-1].chunk.text == "cc"


def test_a_panic_does_not_stop_an_async_engine() -> None:
    async def texts(engine: AsyncEngine, prompt: list[int]) -> tuple[str, object]:
        chunks = [output.chunk async for output in engine.generate(Request(prompt, GREEDY))]
        return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    async def main() -> None:
        async with AsyncEngine(engine_of()) as engine:
            assert (await texts(engine, [SPACE]))[1] == "error"
            assert await texts(engine, [1]) == ("bbbb", "length")

    asyncio.run(main())


def test_text_that_the_tokenizer_cannot_encode_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As raised by the library."""

    class Broken:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise PanicException("index out of bounds")

    tokenizer = panicking_tokenizer()
    tokenizer.backend = Broken()
    with pytest.raises(ParameterError, match=r"cannot encode the text: .* failed: index out of bounds"):
        tokenizer.encode("a b")
