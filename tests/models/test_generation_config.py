"""generation_config.json: every parameter is mapped to a field of SamplingParams, or reported."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import nucleate as nc
from nucleate.jit.native_library import warn_once
from nucleate.models.loader import EMBEDDED
from nucleate.models.model_files import ALWAYS, GENERATION_CONFIG, SAMPLING, UNSUPPORTED, recommended
from nucleate.models.protocol import ModelError
from nucleate.sampling_params import FIELDS

MAPPED: dict[str, tuple[Any, dict[str, Any]]] = {  # with do_sample: the value in the file, and the fields it sets
    "temperature": (0.6, {"temperature": 0.6}),
    "top_k": (20, {"top_k": 20}),
    "top_p": (0.9, {"top_p": 0.9}),
    "min_p": (0.05, {"min_p": 0.05}),
    "top_h": (0.4, {"top_h": 0.4}),
    "typical_p": (0.95, {"typical_p": 0.95}),
    "epsilon_cutoff": (3e-4, {"epsilon_cutoff": 3e-4}),
    "eta_cutoff": (2e-3, {"eta_cutoff": 2e-3}),
    "guidance_scale": (1.5, {"guidance_scale": 1.5}),
    "repetition_penalty": (1.1, {"repetition_penalty": 1.1}),
    "no_repeat_ngram_size": (3, {"no_repeat_ngram_size": 3}),
    "bad_words_ids": ([[5], [6, 7]], {"bad_words": ((5,), (6, 7))}),
    "suppress_tokens": ([8, 9], {"suppress_token_ids": (8, 9)}),
    "min_new_tokens": (4, {"min_tokens": 4}),
    "max_new_tokens": (256, {"max_tokens": 256}),
    "stop_strings": (["###"], {"stop": ("###",)}),
    "sequence_bias": ([[[5], -2.0], [[6], 1.0]], {"logit_bias": {5: -2.0, 6: 1.0}}),
}
NO_EFFECT = {  # on the text of one sequence of a decoder, or read elsewhere (EOS)
    *("do_sample", "renormalize_logits", "low_memory", "prefill_chunk_size"),
    *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups"),  # of beams, which num_beams reports
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "speculation_type"),
    *("assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("continuous_batching_config", "transformers_version"),
}


def read(folder: Path, **values: Any) -> dict[str, Any]:
    """The recommendation of a file with these values."""
    (folder / "generation_config.json").write_text(json.dumps(values))
    return recommended(folder)


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Any:
    """The reports so far, which are logged once per process."""
    warn_once.cache_clear()
    with caplog.at_level("WARNING", "nucleate"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_every_parameter_of_transformers_is_mapped_reported_or_without_effect() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
    known = {*ALWAYS, *SAMPLING, *UNSUPPORTED, *NO_EFFECT}
    attributes = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert attributes <= known
    assert {*ALWAYS, *SAMPLING} == {*MAPPED}
    assert {*ALWAYS.values(), *SAMPLING} <= FIELDS.keys()


@pytest.mark.parametrize("name", MAPPED)
@pytest.mark.parametrize("do_sample", [True, False, None])
def test_a_parameter_sets_its_field(name: str, do_sample: bool | None, tmp_path: Path, reports: Any) -> None:
    value, fields = MAPPED[name]
    values = {name: value} if do_sample is None else {name: value, "do_sample": do_sample}
    made = nc.SamplingParams(**read(tmp_path, **values))
    if name in SAMPLING and not do_sample:  # Transformers does not apply it
        fields = {}
        reason = "they apply only with do_sample: true"
        assert reports() == [
            f"{tmp_path / GENERATION_CONFIG}: these parameters are not applied, because {reason}: {name}={value}"
        ]
    else:
        assert not reports()
    assert made == nc.SamplingParams(**fields, **({"temperature": 0} if do_sample is False else {}))


@pytest.mark.parametrize("name", [*UNSUPPORTED, "sequence_bias"])
def test_a_parameter_without_a_counterpart_is_reported_once(name: str, tmp_path: Path, reports: Any) -> None:
    value = [[[5, 6], 1.0]] if name == "sequence_bias" else 7
    for _ in range(2):
        assert read(tmp_path, do_sample=True, top_p=0.9, **{name: value}) == {"top_p": 0.9}
    reason = "they have no counterpart"
    assert reports() == [
        f"{tmp_path / GENERATION_CONFIG}: these parameters are not applied, because {reason}: {name}={value}"
    ]


def test_values_without_effect_are_not_reported(tmp_path: Path, reports: Any) -> None:
    for name, values in UNSUPPORTED.items():
        for value in (None, *values):
            assert read(tmp_path, **{name: value}) == {}
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    assert read(tmp_path, max_length=4096, eos_token_id=2, _from_model_config=True) == {}
    assert not reports()
    assert read(tmp_path, max_length=4095) == {}
    assert "max_length=4095" in reports()[0]


def test_the_embedded_model_and_a_folder_without_the_file(tmp_path: Path) -> None:
    assert recommended(EMBEDDED) == {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
    assert recommended(tmp_path) == {}


def test_do_sample_must_be_a_boolean(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="do_sample must be true or false, got 'false'"):
        read(tmp_path, do_sample="false", temperature=0.5)


@pytest.mark.exhaustive
def test_penalties_and_bans_equal_those_of_transformers(tmp_path: Path) -> None:
    """A greedy model with a generation_config.json generates what ``model.generate`` does."""
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
    transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
    stock = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    for path in EMBEDDED.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    settings = ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[263], [291, 402]]})
    texts = set()
    for one, other in itertools.combinations(settings, 2):
        values = {"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 10, "suppress_tokens": [11]}
        values |= {**one, **other}
        (tmp_path / "generation_config.json").write_text(json.dumps({**values, "eos_token_id": [0, 3]}))
        llm = nc.LLM(tmp_path)
        ids = torch.tensor([llm.encode("Once upon a time")])
        config = transformers.GenerationConfig(**values, eos_token_id=[0, 3], pad_token_id=0)
        expected = stock.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, ids.shape[1] :]
        found = llm.generate("Once upon a time")[0].outputs[0].token_ids
        assert list(found) == expected.tolist()[: len(found)]
        assert len(found) in (len(expected), len(expected) - 1)  # with or without the EOS token
        texts.add(found)
    assert len(texts) > 3
