"""Arguments of ``LLM``: tokenizers of every kind, engine options, revisions, and errors that name their field."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tokenizers
from huggingface_hub import constants
from toy_models import Toy

import nucleate as nc
from nucleate.jit.native_library import warn_once
from nucleate.models.loader import EMBEDDED, OPENVINO_FILES, resolve

pytestmark = pytest.mark.usefixtures("one_torch_thread")
torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

from random_models import LLAMA  # noqa: E402
from random_models import random_model as made  # noqa: E402
from test_model_object import GREEDY, SAMPLED, tokens  # noqa: E402


def transformers_tokenizer() -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(EMBEDDED / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|endoftext|>",
        chat_template="{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>",
    )  # fmt: skip


@pytest.mark.slow
def test_tokenizers_of_every_kind(llm: nc.LLM) -> None:
    truncating = tokenizers.Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    truncating.enable_truncation(2)
    truncating.enable_padding(length=9)
    model, text = made(), "Once upon a time, a fox found a drum."
    expected = llm.tokenizer.encode(text)
    kinds = [transformers_tokenizer(), truncating, str(EMBEDDED), EMBEDDED, llm.tokenizer]
    found = [nc.LLM(model, kind) for kind in kinds]
    assert [one.encode(text) for one in found] == [expected] * len(kinds)
    assert len({one.generate(text, SAMPLED)[0].text for one in found}) == 1
    assert all(one.tokenizer.eos_token_ids >= {0} for one in found)
    assert truncating.truncation is not None
    assert truncating.padding is not None
    assert found[0].chat([{"role": "user", "content": "Hi"}], GREEDY).prompt.startswith("<|user|>Hi<|end|>")


def test_a_tokenizer_in_python_is_converted(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es"]))
    slow = transformers.BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    assert nc.LLM(made(), slow).encode("the foxes") == slow("the foxes").input_ids
    (tmp_path / "vocab.json").write_text('{"<unk>": 0, "a</w>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    alone = transformers.CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    with pytest.raises(nc.ModelError, match=r"the tokenizer CTRLTokenizer has no fast version \(tokenizer.json\)"):
        nc.LLM(made(), alone)


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ((5, EMBEDDED), "model", "model must be a folder, a Hugging Face id, None, a model of Transformers, .* got 5"),
        ((object(),), "tokenizer", r"a model in memory needs a tokenizer: LLM\(model, tokenizer\)"),
        ((Toy(lambda ids: np.zeros(9), 9), 5), "tokenizer", "tokenizer must be a folder, .*, got 5"),
    ],
)
def test_wrong_arguments_name_their_field(arguments: tuple[Any, ...], field: str, message: str) -> None:
    with pytest.raises(nc.ParameterError, match=message) as caught:
        nc.LLM(*arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "options", [{"device": "cpu"}, {"dtype": "float32"}, {"runtime": "torch"}, {"revision": "main"}]
)
def test_options_of_loading_are_rejected(options: dict[str, str]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(nc.ParameterError, match=f"{name} cannot be set for a model in memory, got '{value}'"):
        nc.LLM(made(), EMBEDDED, **options)


def test_a_tokenizer_of_another_model() -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "vocab_size": 1000})
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(
        nc.ModelError,
        match=r"not fit the model: it has 40\d\d tokens, but the model has 1000 logits",
    ):
        nc.LLM(model, EMBEDDED)


def test_added_tokens_without_logits_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = transformers_tokenizer()
    tokenizer.add_tokens(["<new>"])
    warn_once.cache_clear()
    with caplog.at_level("WARNING", "nucleate"):
        llm = nc.LLM(made(), tokenizer)
    assert "the tokenizer has 1 added tokens that the model does not have, such as 4096" in caplog.text
    with pytest.raises(nc.ParameterError, match=r"outside the vocabulary \(0..4095\)"):
        llm.generate("a <new> b", GREEDY)


def test_any_object_with_the_methods_of_a_model_runs(llm: nc.LLM) -> None:
    ids = llm.encode("Once upon")
    toy = Toy.script([5, 6, 7, 0], 4096, len(ids))
    own = nc.LLM(toy, llm.tokenizer)
    assert tokens(own.generate([ids], temperature=0)) == [[5, 6, 7, 0]]


def test_engine_options() -> None:
    llm = nc.LLM(made(), EMBEDDED, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=10, kv_cache_memory=1 << 20)
    engine = llm.new_engine(max_num_seqs=3)
    assert (engine.max_num_seqs, engine.context_length) == (3, 10)
    assert engine.runner.blocks * engine.runner.block_bytes <= 1 << 20
    [completion] = llm.generate("Once", GREEDY)
    assert len(completion.prompt_token_ids) + len(completion.outputs[0].token_ids) == 10
    with pytest.raises(nc.ParameterError, match="max_num_seqs must be an integer >= 1, got 0"):
        nc.LLM(max_num_seqs=0)


def test_a_revision_needs_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        nc.ParameterError, match="revision needs a Hugging Face id, but model is the embedded one; got 'x'"
    ):
        nc.LLM(revision="x")
    with pytest.raises(nc.ParameterError, match="revision needs a Hugging Face id, but model is the embedded one"):
        nc.LLM(EMBEDDED, revision="x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(nc.ModelError, match="download from the hub at revision 'v1' failed"):
        nc.LLM("owner/name", revision="v1")
    seen: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: seen.append((a, k)) or str(EMBEDDED))
    assert nc.LLM("owner/name", revision="v1").folder == EMBEDDED
    assert seen == [(("owner/name",), {"revision": "v1", "allow_patterns": seen[0][1]["allow_patterns"]})]


SAFETENSORS = ("model.safetensors",)


@pytest.mark.parametrize(
    ("published", "runtime", "fetched"),
    [
        ([*SAFETENSORS, *OPENVINO_FILES], "auto", SAFETENSORS),
        ([*SAFETENSORS, *OPENVINO_FILES], "openvino", OPENVINO_FILES),
        (OPENVINO_FILES, "auto", OPENVINO_FILES),
        (OPENVINO_FILES, "torch", ()),
    ],
)
def test_only_one_format_is_downloaded(
    published: Sequence[str], runtime: str, fetched: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(_name: str, *, allow_patterns: list[str], **_: Any) -> str:
        for name in ["config.json", *published]:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("owner/name", runtime=runtime) == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["config.json", *fetched])
