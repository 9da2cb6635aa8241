"""Loading folders, special ids, and the table of pieces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nucleate.tokenization.tokenizer import Tokenizer


def write(folder: Path, tokenizer: Tokenizer, **files: object) -> Path:
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


@pytest.fixture
def plain(tokenizers_by_name: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_name["byte-level"]


def test_folder(tmp_path: Path, plain: Tokenizer) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}"}
    loaded = Tokenizer(write(tmp_path, plain, tokenizer_config=config, generation_config={"eos_token_id": [1, 2]}))
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert loaded.bos_token_id == 0
    assert loaded.eos_token_ids == {1, 2}
    assert loaded.chat_template == "{{ bos_token }}"
    assert loaded.decode(loaded.encode("Grüße 😀")) == "Grüße 😀"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert Tokenizer(str(tmp_path)).chat_template == "own file"
    assert Tokenizer(tmp_path, eos_token_ids=[7], bos_token_id=3, chat_template="x").eos_token_ids == {7}


def test_older_folders(tmp_path: Path, plain: Tokenizer) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    files = {"tokenizer_config": {"chat_template": templates}, "special_tokens_map": {"bos_token": "<s>"}}
    loaded = Tokenizer(write(tmp_path, plain, **files, config={"eos_token_id": 2}))
    assert (loaded.bos_token_id, loaded.eos_token_ids, loaded.chat_template) == (0, {2}, "yes")


def test_truncation_and_padding_settings_are_ignored(tmp_path: Path, plain: Tokenizer) -> None:
    data = json.loads(plain.backend.to_str())
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert len(Tokenizer(tmp_path).encode("many more than two tokens")) > 2


def test_folder_errors_name_the_path(tmp_path: Path, plain: Tokenizer) -> None:
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"

    def check(error: type[Exception], message: str, folder: Path = tmp_path) -> None:
        with pytest.raises(error, match=message) as caught:
            Tokenizer(folder)
        assert "\n" not in str(caught.value)

    check(FileNotFoundError, "nowhere: no such folder", tmp_path / "nowhere")
    check(FileNotFoundError, r"no tokenizer\.json in this folder")
    for content in ["", "{", "[]", '{"model": 3}']:
        path.write_text(content)
        check(ValueError, r"tokenizer\.json: not a tokenizer file")
    check(FileNotFoundError, "not a folder", path)
    write(tmp_path, plain)
    for content, message in {
        b"{": "not valid JSON",
        b"[]": "expected a JSON object",
        b"[" * 99999: "not valid JSON",
        b"\xff{}": "not UTF-8",
        b'{"chat_template": 5}': "chat_template must be a string",
    }.items():
        config.write_bytes(content)
        check(ValueError, message)
    write(tmp_path, plain, tokenizer_config={}, generation_config={"eos_token_id": ["a"]})
    check(ValueError, "eos_token_id must be a token id")


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == max(tokenizer.pieces.tokens) + 1
    assert tokenizer.special_ids
    for token_id in tokenizer.special_ids:
        assert tokenizer.decode([token_id]) == ""
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None


def test_tokenizer_families(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    found = {name: tokenizer.pieces.family for name, tokenizer in tokenizers_by_name.items()}
    assert found["byte-level"] == "utf8"
    assert found["suffix"] == "suffix"
    whole = {name for name, family in found.items() if family == "whole"}
    assert whole == {"whole", "whole-replace", "fallback-unfused"}


def test_pieces_are_the_bytes_of_a_text(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    text = "Grüße, the dog 😀 你"
    for name in ("byte-level", "llama", "gemma"):
        tokenizer = tokenizers_by_name[name]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.pieces.as_bytes, ids)).decode().lstrip() == text


def test_encode_rejects_values_that_are_not_text(plain: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode: surrogates not allowed at character 1"):
        plain.encode("a\ud800")
    with pytest.raises(TypeError, match="text must be a str, not int"):
        plain.encode(5)


def test_spellings_are_with_and_without_a_leading_space(tokenizers_by_name: dict[str, Tokenizer]) -> None:
    for name in ("byte-level", "llama", "gemma", "metaspace-always", "metaspace-first", "metaspace-never"):
        tokenizer = tokenizers_by_name[name]
        for word in ("dog", "lazy dog", "Grüße", "😀", "x.y", "!"):
            spelled = tokenizer.spellings(word)
            assert 1 <= len(spelled) <= 2
            assert len(set(spelled)) == len(spelled)
            # the tokenizer has tokens for this word
            if tokenizer.decode(tokenizer.encode(word, add_special_tokens=False)).strip() == word:
                assert {tokenizer.decode(ids).strip() for ids in spelled} == {word}
            encodings = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, f" {word}")}
            assert set(spelled) <= encodings
            for ids in encodings:  # a sequence that is left out ends with a token that is listed, which bans it too
                assert any(ids[-len(end) :] == end for end in spelled)


def test_containing_is_every_token_whose_text_contains_the_string(tokenizer: Tokenizer) -> None:
    for text in (".", "a", "og", "\n", '"', "😀", "</s>", "no token has this"):
        slow = [i for i in sorted(tokenizer.pieces.tokens) if text in tokenizer.decode([i], skip_special_tokens=False)]
        found = tokenizer.containing(text)
        assert found == slow
        found.append(-1)  # the caller may modify the result
        assert tokenizer.containing(text) == slow


def test_containing_accepts_any_string(plain: Tokenizer) -> None:
    expected = plain.containing("dog")
    assert [plain.containing(f"{number}") for number in range(200)][5] == plain.containing("5")
    assert plain.containing("dog") == expected != []


def test_import_is_light() -> None:
    """Packages that are slow to import are imported where they are used."""
    code = (
        "import sys, nucleate.tokenization.tokenizer, nucleate.tokenization.detokenizer\n"
        "import nucleate.stopping.stop_matcher, nucleate.tokenization.chat_template\n"
        "print([name for name in ('tokenizers', 'transformers', 'jinja2', 'regex', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
