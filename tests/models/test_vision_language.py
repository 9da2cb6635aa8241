"""Folders of vision-language models: their language model continues texts, as ``generate`` does without an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_driver import Driver

import nucleate as nc
from nucleate.models.loader import EMBEDDED, load, runner_of
from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK
from nucleate.models.transformers.transformers_model import TransformersModel

pytestmark = pytest.mark.usefixtures("one_torch_thread")
torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

from random_models import greedy  # noqa: E402
from toy_requests import run_tokens  # noqa: E402

TEXT: dict[str, Any] = dict(
    vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
)  # fmt: skip
VISION: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=14, image_size=28
)
THREE_PARTS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", dict(sliding_window=11), VISION),
    "llama4": (
        "Llama4",
        dict(num_local_experts=2, intermediate_size_mlp=96, attention_chunk_size=64, pad_token_id=0),
        {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "mistral3": ("Mistral3", dict(model_type="mistral"), dict(VISION, model_type="pixtral", head_dim=16)),
    "qwen2_5_vl": ("Qwen2_5_VL", THREE_PARTS, dict(depth=1, hidden_size=32, out_hidden_size=64, num_heads=2)),
    "qwen3_vl": (
        "Qwen3VL",
        THREE_PARTS,
        dict(
            depth=1, hidden_size=32, intermediate_size=48, out_hidden_size=64, num_heads=2, deepstack_visual_indexes=[0]
        ),
    ),
}


def save(name: str, folder: Path) -> Any:
    prefix, text, vision = FOLDERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(text_config={**TEXT, **text}, vision_config=vision)
    model = randomized(getattr(transformers, f"{prefix}ForConditionalGeneration")(config))
    model.save_pretrained(folder)
    return model


def randomized(model: Any) -> Any:
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.02 if "embed" in parameter else 0.2)
    return model.eval()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", FOLDERS)
def test_texts_equal_generate(name: str, tmp_path: Path) -> None:
    stock = save(name, tmp_path)
    runner = runner_of(load(tmp_path, device="cpu"), 8 << 20)
    assert runner.paged == (name != "llama4"), runner.unbatched_reason
    driver, random = Driver(runner, seed=1), np.random.default_rng(1)
    for length in (1, 9, 30):
        driver.add(random.integers(3, 199, length).tolist())
    driver.run(8)
    for one in driver.sequences:
        assert one.ids[one.prompt :] == greedy(stock, one.ids[: one.prompt], len(one.ids) - one.prompt)


def test_a_model_that_needs_an_image_is_an_error_at_load(tmp_path: Path) -> None:
    sizes = dict(vocab_size=99, hidden_size=32, num_layers=1, num_heads=2, d_kv=16, d_ff=48)
    config = transformers.Pix2StructConfig(text_config=sizes, vision_config=dict(sizes, patch_embed_hidden_size=48))
    transformers.Pix2StructForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"Pix2StructForConditionalGeneration cannot continue a text: ValueError: .*patch"
    ):
        load(tmp_path, device="cpu")


def test_a_folder_without_a_language_model_is_an_error(tmp_path: Path) -> None:
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Transformers has no language model for the architecture 'vit'"):
        load(tmp_path, device="cpu")


@pytest.mark.slow
def test_a_bidirectional_prompt_is_recomputed_without_its_output() -> None:
    """The tokens of a PaliGemma prompt attend to all of it, those of the output only to what is before them."""
    torch.manual_seed(0)
    config = transformers.PaliGemmaConfig(text_config={**TEXT, "vocab_size": 4096}, vision_config=VISION)
    model = randomized(transformers.PaliGemmaForConditionalGeneration(config))
    llm = nc.LLM(model, EMBEDDED, kv_cache_memory=6 * BLOCK * TransformersModel.of(model).token_bytes)
    engine, random = llm.new_engine(), np.random.default_rng(1)
    prompts = [random.integers(3, 199, length).tolist() for length in (9, 20, 14)]
    params = nc.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = run_tokens(engine, [nc.Request(prompt, params) for prompt in prompts])
    assert engine.stats.num_preemptions > 0
    assert outputs == [greedy(model, prompt, 24) for prompt in prompts]
