"""The detokenizer equals decoding all tokens, for every family, any ids and any split into prompt and output."""

from __future__ import annotations

import random

import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer


def prompt_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The reference's text of the prompt, without bytes at the end of an incomplete character."""
    kept = [i for i in ids if not (skip and i in tokenizer.special_ids)]
    family, table = tokenizer.pieces.family, tokenizer.pieces.table
    if family == "utf8":
        data = b"".join(map(tokenizer.pieces.as_bytes, kept))
        cut = next((size for size in range(min(3, len(data)), 0, -1) if begins_character(data[-size:])), 0)
        return data[: len(data) - cut].decode(errors="replace")
    count = 0
    if family == "text":
        run = b""
        for piece in map(table.__getitem__, reversed(kept)):
            if not isinstance(piece, bytes):
                break
            run = piece + run
        count = next((size for size in range(min(3, len(run)), 0, -1) if begins_character(run[-size:])), 0)
        count = count if decodes(run[: len(run) - count]) else 0
    return tokenizer.decode(kept[: len(kept) - count], skip_special_tokens=skip)


def decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def begins_character(data: bytes) -> bool:
    """Whether some bytes are an incomplete character: with others after them, they are one."""
    rests = (b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\x80\x80\x80", b"\xbf\x80\x80", b"\xbf\xbf\xbf")
    return any(decodes(data + rest) and len((data + rest).decode()) == 1 for rest in rests)


def full(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """The reference implementation: decode everything, then remove the prompt's text."""
    return tokenizer.decode(prompt + output, skip)[len(prompt_text(tokenizer, prompt, skip)) :]


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> list[str]:
    after_prompt = Detokenizer(tokenizer, prompt, skip, hold_bytes=None)
    detokenizer, other = after_prompt.fork(), after_prompt.fork()
    pushed = []
    for token_id in output:  # forks do not affect each other
        pushed.append(detokenizer.push(token_id))
        other.push(output[0])
    return [text for text in (*pushed, detokenizer.close()) if text]


def check(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> None:
    expected = full(tokenizer, prompt, output, skip)
    assert "".join(streamed(tokenizer, prompt, output, skip)) == expected, (prompt, output, skip)


@pytest.mark.fast_cases(3)
def test_any_ids(tokenizer: Tokenizer) -> None:
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)

    @settings(max_examples=tiers.count(40, 150))
    @given(ids, ids, st.booleans())
    def check_split(prompt: list[int], output: list[int], skip: bool) -> None:
        check(tokenizer, prompt, output, skip)

    check_split()


def test_seeded_fuzz(tokenizer: Tokenizer) -> None:
    draw = random.Random(7)
    byte_ids = [i for i, piece in tokenizer.pieces.table.items() if isinstance(piece, bytes)]
    special = sorted(tokenizer.special_ids)
    everything = sorted(tokenizer.pieces.tokens)
    for _ in range(400):
        pool = draw.choice([everything, byte_ids or everything, byte_ids * 3 + special + everything[-40:]])
        ids = draw.choices(pool, k=draw.randint(0, 40))
        cut = draw.choice([0, draw.randint(0, len(ids))])
        check(tokenizer, ids[:cut], ids[cut:], draw.random() < 0.5)


TEXTS = [
    "Hello, wörld! 😀👩‍👩‍👧‍👦 我们今天去北京 e\u0301 नमस्ते two words 🦊 café\n\n    indented  twice",
    " leading space",
    "\ufffd literal replacement \ufffd\ufffd",
    "ends in an emoji 😀",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_of_a_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for cut in range(len(ids) + 1):
        check(tokenizer, ids[:cut], ids[cut:], True)
        check(tokenizer, [], ids[:cut], False)


def single_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each byte."""
    found: dict[int, int] = {}
    for token_id in tokenizer.pieces.table:
        data = tokenizer.pieces.as_bytes(token_id)
        if len(data) == 1 and (
            isinstance(tokenizer.pieces.table[token_id], bytes) or tokenizer.pieces.family == "utf8"
        ):
            found[data[0]] = token_id
    return found


@pytest.mark.parametrize("name", ["byte-level", "llama"])
def test_every_kind_of_invalid_utf8(tokenizers_by_name: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers_by_name[name]
    token_of = single_bytes(tokenizer)
    assert len(token_of) == 256
    leads = [0x00, 0x41, 0x7F, 0x80, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEF, 0xF0, 0xF3, 0xF4, 0xF5, 0xFF]
    rests = [0x41, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xED, 0xF0]
    draw = random.Random(3)
    for lead in leads:
        for _ in range(60):
            data = [lead, *draw.choices(rests, k=draw.randint(0, 4)), *draw.choices(leads, k=draw.randint(0, 2))]
            ids = [token_of[byte] for byte in data]
            cut = draw.randint(0, len(ids))
            check(tokenizer, [], ids, True)
            check(tokenizer, ids[:cut], ids[cut:], True)


def test_an_incomplete_character_is_buffered_and_invalid_bytes_are_not(
    tokenizers_by_name: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers_by_name["byte-level"]
    token_of = single_bytes(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token_of[byte]) for byte in "😀".encode()] == ["", "", "", "😀"]
    assert detokenizer.push(token_of[0xFF]) == "\ufffd"
    # The second half of a surrogate can never come, which is certain with its second byte.
    assert [detokenizer.push(token_of[byte]) for byte in (0xED, 0xA0)] == ["", "\ufffd\ufffd"]
    assert [detokenizer.push(token_of[byte]) for byte in (0xE2, 0x82, 0x41)] == ["", "", "\ufffdA"]
    assert detokenizer.push(token_of[0xE2]) == ""
    assert detokenizer.close() == "\ufffd"
    assert detokenizer.close() == ""


def test_special_token_inside_a_character(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_name["byte-level"]
    token_of = single_bytes(tokenizer)
    eos = tokenizer.backend.token_to_id("</s>")
    ids = [token_of[0xC3], eos, token_of[0xA9]]
    assert streamed(tokenizer, [], ids, True) == ["é"]
    assert streamed(tokenizer, [], ids, False) == ["\ufffd</s>", "\ufffd"]
    assert streamed(tokenizer, ids[:1], ids[1:], True) == ["é"]


def test_prompt_text_is_never_repeated(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_name["llama"]
    token_of = single_bytes(tokenizer)
    smile = [token_of[byte] for byte in "😀".encode()]
    assert streamed(tokenizer, smile, smile, True) == ["😀"]
    assert streamed(tokenizer, smile[:2], smile[2:], True) == ["😀"]
    # The run turns invalid: four of the five U+FFFD are new, the first replaces the prompt's character.
    assert streamed(tokenizer, smile, [token_of[0xFF]], True) == ["\ufffd" * 4]


def test_a_long_run_of_bytes_is_shown_after_the_limit(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_name["llama"]
    token_of = single_bytes(tokenizer)
    ids = [token_of[byte] for byte in ("北" * 100).encode()]
    detokenizer = Detokenizer(tokenizer, hold_bytes=30)
    texts = [detokenizer.push(token_id) for token_id in ids]
    assert not any(texts[:30])
    assert texts[30:33] == ["北" * 10, "", "北"]
    assert "".join(texts) == "北" * 100
    assert detokenizer.push(token_of[0xFF]) == "\ufffd" * 201
    assert detokenizer.push(token_of[0x41]) == "\ufffd"
    assert detokenizer.close() == ""


def test_first_space(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    for name in ("llama", "metaspace-always", "metaspace-first"):
        tokenizer = tokenizers_by_name[name]
        ids = tokenizer.encode("the dog", add_special_tokens=False)
        assert "".join(streamed(tokenizer, [], ids, True)) == "the dog"
        assert "".join(streamed(tokenizer, [tokenizer.backend.token_to_id("<s>")], ids, True)) == "the dog"
        assert "".join(streamed(tokenizer, ids, ids, True)) == " the dog"


@pytest.mark.parametrize("bad", [-1, 10**6, 2**70])
def test_unknown_ids(tokenizer: Tokenizer, bad: int) -> None:
    detokenizer = Detokenizer(tokenizer)
    with pytest.raises(ValueError, match=f"token id {bad} is not in the vocabulary"):
        detokenizer.push(bad)
    with pytest.raises(ValueError, match="not in the vocabulary"):
        Detokenizer(tokenizer, [0, bad])
    with pytest.raises(ValueError, match="not in the vocabulary"):
        tokenizer.decode([bad])
    assert detokenizer.push(1) + detokenizer.close() == tokenizer.decode([1])
    with pytest.raises(ValueError, match="after the detokenizer was closed"):
        detokenizer.push(1)


def test_the_buffered_state_does_not_grow(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    """Only the last token or a run of bytes is buffered, for any length."""
    for tokenizer in tokenizers_by_name.values():
        if tokenizer.pieces.family == "whole":
            continue  # this family needs all tokens
        draw = random.Random(5)
        detokenizer = Detokenizer(tokenizer)
        for token_id in draw.choices(sorted(tokenizer.pieces.tokens), k=10_000):
            detokenizer.push(token_id)
        sizes = [len(value) for value in vars(detokenizer._joiner).values() if isinstance(value, (str, bytes, list))]
        assert sum(sizes) < 200
