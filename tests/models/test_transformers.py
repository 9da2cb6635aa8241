"""Models that torch runs go through the same front door: greedy text equals Transformers' own generate."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import nucleate as nc
from nucleate.models.load import EMBEDDED

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

SMALL = dict(vocab_size=4096, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
LLAMA_LIKE = dict(SMALL, intermediate_size=64, num_key_value_heads=2, bos_token_id=0, eos_token_id=0)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=4096, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA_LIKE),
    "mistral with a window": lambda: transformers.MistralConfig(**LLAMA_LIKE, sliding_window=8),
    "gemma2": lambda: transformers.Gemma2Config(**LLAMA_LIKE, head_dim=8, sliding_window=8),
}


def folder_of(path: Path, config: object) -> Path:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED / name, path / name)
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_equals_generate(name: str, tmp_path: Path) -> None:
    llm = nc.LLM(folder_of(tmp_path, CONFIGS[name]()))
    params = nc.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    [completion] = llm.generate("Once upon a time", params)
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = torch.tensor([completion.prompt_token_ids])
    out = twin.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    assert llm.model.runtime == "torch cpu float32"
    assert list(completion.outputs[0].token_ids) == out[0, prompt.shape[1] :].tolist()


def test_both_runtimes_tell_the_same_story() -> None:
    params = nc.SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=60)
    stories = [nc.LLM(runtime=runtime).generate("The fox", params)[0].text for runtime in ("numpy", "torch")]
    assert stories[0] == stories[1]


def test_a_folder_with_torn_weights_is_one_clear_error(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(nc.ModelError, match="cannot load the model in"):
        nc.LLM(tmp_path, runtime="torch")


def test_a_model_whose_logits_are_longer_than_the_tokenizer(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(**{**LLAMA_LIKE, "vocab_size": 4200})
    llm = nc.LLM(folder_of(tmp_path, config))
    wide = nc.SamplingParams(temperature=100.0, seed=0, max_tokens=50, ignore_eos=True)
    output = llm.generate("The", wide)[0].outputs[0]
    assert len(output.token_ids) == 50
    assert max(output.token_ids) >= 4096  # the padding was drawn, and adds no text
    known = [token for token in output.token_ids if token < 4096]
    assert output.text == llm.tokenizer.decode(known)
