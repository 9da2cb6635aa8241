"""Transformers models in ``LLM``: greedy text equals Transformers' ``generate``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

import nucleate as nc
from nucleate.models.loader import EMBEDDED

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

from random_models import CONFIGS, LLAMA, greedy  # noqa: E402

CONFIGS = {
    **{name: CONFIGS[name] for name in ("gpt2", "mistral with a window")},
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA),
    "gemma2": lambda: transformers.Gemma2Config(**LLAMA, head_dim=8, sliding_window=8),
}


def folder_of(path: Path, config: object) -> Path:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED / name, path / name)
    return path


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_equals_generate(name: str, tmp_path: Path) -> None:
    llm = nc.LLM(folder_of(tmp_path, CONFIGS[name]()))
    params = nc.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [completion] = llm.generate("Once upon a time", params)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert llm.model.runtime == "torch cpu float32"
    assert list(completion.outputs[0].token_ids) == greedy(stock, [*completion.prompt_token_ids], 30)


@pytest.mark.slow
def test_both_runtimes_generate_the_same_text() -> None:
    params = nc.SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=60)
    stories = [nc.LLM(runtime=runtime).generate("The fox", params)[0].text for runtime in ("numpy", "torch")]
    assert stories[0] == stories[1]


def test_truncated_weights_are_one_error(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(nc.ModelError, match="cannot load the model in"):
        nc.LLM(tmp_path, runtime="torch")


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, CONFIGS["qwen2"]())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(nc.ModelError, match=r"weights are missing, such as model\.layers\.2\."):
        nc.LLM(folder)


def test_remote_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(nc.ModelError, match="contains custom code"):
        nc.LLM(tmp_path)


def test_a_folder_without_a_tokenizer_is_one_error(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(nc.ModelError, match=r"cannot load a tokenizer from .* one of: \(1\)") as caught:
        nc.LLM(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_with_more_logits_than_tokens(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**{**LLAMA, "vocab_size": 4200})
    llm = nc.LLM(folder_of(tmp_path, config))
    wide = nc.SamplingParams(temperature=100.0, seed=0, max_tokens=50, ignore_eos=True)
    output = llm.generate("The", wide)[0].outputs[0]
    assert len(output.token_ids) == 50
    assert max(output.token_ids) >= 4096  # padding ids were sampled, and add no text
    known = [token for token in output.token_ids if token < 4096]
    assert output.text == llm.tokenizer.decode(known)


def test_tokenizers_without_tokenizer_json_are_converted(tmp_path: Path) -> None:
    folder_of(tmp_path, CONFIGS["gpt2"]())
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    llm = nc.LLM(tmp_path)
    text = "Once upon a time, a fox found a drum."
    expected = nc.LLM().tokenizer.encode(text, add_special_tokens=False)
    assert llm.tokenizer.encode(text, add_special_tokens=False) == expected
    assert llm.generate(text, nc.SamplingParams(max_tokens=4, seed=1))[0].outputs[0].finish_reason in ("length", "stop")
    with pytest.raises(nc.ModelError, match="no chat template"):
        llm.chat([{"role": "user", "content": "Hello"}])


def test_a_metaspace_tokenizer_streams_the_decoded_text(tmp_path: Path) -> None:
    folder_of(tmp_path, transformers.LlamaConfig(**{**LLAMA, "vocab_size": 600}))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<s>", "</s>", "<unk>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["the little fox ran to the big red drum and the dog"] * 20, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    llm = nc.LLM(tmp_path)
    params = nc.SamplingParams(temperature=5.0, seed=1, max_tokens=40, ignore_eos=True)
    [completion] = llm.generate("the little fox", params)
    token_ids = [*completion.prompt_token_ids, *completion.outputs[0].token_ids]
    decoded = tokenizer.decode([token for token in token_ids if token < tokenizer.get_vocab_size()])
    assert decoded == tokenizer.decode(completion.prompt_token_ids) + completion.text
