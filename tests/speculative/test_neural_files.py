"""Draft weights: size, target and completeness; NumPy inference equals the trained torch modules."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from test_neural import features
from toy_models import Toy

from nucleate.models.loader import EMBEDDED
from nucleate.models.model_files import read_metadata
from nucleate.models.numpy_llama import Llama, read
from nucleate.models.protocol import ModelError
from nucleate.speculative.draft import DraftContext, TargetOutput
from nucleate.speculative.neural import EMBEDDED_METHODS, draft_head, draft_model, draft_sampling, eagle, load
from nucleate.speculative.neural.draft_head import DATA

TRAINING = Path(__file__).parents[2] / "training"


def test_weight_files_are_small() -> None:
    sizes = {path.stem: path.stat().st_size for path in DATA.glob("*.safetensors")}
    assert set(sizes) == set(EMBEDDED_METHODS)
    assert max(sizes.values()) <= 1_500_000
    assert sum(sizes.values()) <= 5_000_000


@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_weight_files_name_their_target(name: str) -> None:
    digest = hashlib.sha256((EMBEDDED / "model.safetensors").read_bytes()).hexdigest()
    assert read_metadata(DATA / f"{name}.safetensors")["target"] == digest


def test_model_card_lists_all_methods() -> None:
    card = (DATA / "README.md").read_text("utf-8")
    assert all(f"`{name}`" in card for name in EMBEDDED_METHODS)


@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_other_models_are_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"the draft weights for '{name}' are for the embedded model .*, not on toy"):
        load(name, Toy(lambda _: np.zeros(9, np.float32), 9))
    for file in EMBEDDED.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    load(name, Llama(tmp_path))  # the same weights
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(
        ModelError, match=f"the draft weights for '{name}' are for the embedded model; the model in .* different"
    ):
        load(name, Llama(tmp_path))


@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_models_in_memory_are_rejected(name: str) -> None:
    """Whether its weights are the same is unknown."""
    settings = json.loads((EMBEDDED / "config.json").read_text("utf-8"))
    with pytest.raises(ModelError, match=f"'{name}' are for the embedded model; the model in memory is a different"):
        load(name, Llama.of(settings, read(EMBEDDED / "model.safetensors")))
    with pytest.raises(ModelError, match="for the embedded model on the numpy runtime, not on object"):
        load(name, object())


@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_missing_weights_name_the_package(name: str, model: Llama, tmp_path: Path, monkeypatch: Any) -> None:
    """Wheels do not have the weights."""
    monkeypatch.setattr(draft_head, "DATA", tmp_path)
    with pytest.raises(ModelError, match=rf"'{name}' are not installed; .*: pip install \./packages/draft-weights"):
        load(name, model)
    with pytest.raises(ModelError, match="for the embedded model on the numpy runtime, not on object"):
        load(name, object())


def test_unknown_methods(model: Llama) -> None:
    with pytest.raises(ModelError, match="unknown trained method 'hydra'; available: draft, medusa, eagle, dflash"):
        load("hydra", model)


@pytest.mark.slow
def test_weights_are_loaded_lazily() -> None:
    code = (
        "import sys, nucleate, nucleate.engine.engine\n"
        "assert not any(name.startswith('nucleate.speculative.neural') for name in sys.modules)\n"
        "import nucleate.speculative.neural\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


IDS = [0, 318, 44, 1007, 25, 903, 2222, 5, 17, 1300, 4, 2, 905, 333, 262, 11, 77, 612, 9, 1021]


@pytest.fixture
def parts() -> Iterator[ModuleType]:
    pytest.importorskip("torch", reason="runs the parts as they are trained")
    pytest.importorskip("transformers", reason="runs the parts as they are trained")
    sys.path.insert(0, str(TRAINING))
    try:
        import parts

        yield parts
    finally:
        sys.path.remove(str(TRAINING))


def trained(parts: ModuleType, name: str) -> Any:
    from safetensors.torch import load_file

    part = parts.PARTS[name]()
    part.load_state_dict({key: value.float() for key, value in load_file(DATA / f"{name}.safetensors").items()})
    return part.eval()


def scores_of(name: str, model: Llama, monkeypatch: pytest.MonkeyPatch, start: int = 0, count: int = 4) -> np.ndarray:
    """The logits from which the ``count`` draft tokens after IDS[:-1] were chosen."""
    seen: list[np.ndarray] = []
    right = draft_sampling.sample_tokens

    def recording(logits_RV: np.ndarray, *rest: Any) -> Any:
        seen.append(logits_RV.copy())
        return right(logits_RV, *rest)

    for module in (eagle, draft_model, draft_sampling):
        monkeypatch.setattr(module, "sample_tokens", recording)
    proposer = load(name, model)
    if proposer.layers:
        hidden_states_TF = features(model, proposer.layers, IDS)[:-1]
        proposer.observe([TargetOutput(0, start, IDS[start:-1], hidden_states_TF[start:])])
    [draft] = proposer.propose([DraftContext(0, IDS, temperature=0.0)], [count])
    scores_NV = np.concatenate(seen)
    assert scores_NV.shape == (count, 4096)
    assert draft.tokens == tuple(scores_NV.argmax(axis=1).tolist())
    return scores_NV


def test_numpy_draft_model_equals_torch(model: Llama, parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    part, ours_NV = trained(parts, "draft"), scores_of("draft", model, monkeypatch)
    table = torch.tensor(model.embedding)
    ids = torch.tensor([[*IDS, *ours_NV.argmax(axis=1)[:-1]]])
    with torch.no_grad():
        theirs = part.unembed(part.model(inputs_embeds=part.embed(table[ids]) * 8.0).last_hidden_state) @ table.T
    np.testing.assert_allclose(ours_NV, theirs[0, -4:].numpy(), atol=2e-3)


LATEST = len(IDS) - 2
"""The last of the tokens that the target has read."""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("start", [0, 7, LATEST])
@pytest.mark.parametrize(("name", "steps"), [("eagle", 5), ("dflash", 4)])
def test_numpy_heads_have_the_training_loss(
    name: str, steps: int, start: int, model: Llama, parts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training loss of a head against the logits of the NumPy proposer is zero if they are equal."""
    import torch

    part, ours_NV = trained(parts, name), scores_of(name, model, monkeypatch, start, steps)
    own = ours_NV.argmax(axis=1).tolist()
    ids, count = torch.tensor([[*IDS, *own, 0, 0]]), len(IDS)
    hidden_TF = np.zeros((ids.shape[1], 576), np.float32)
    hidden_TF[: count - 1] = features(model, (2, 4, 6), IDS)[:-1]
    hidden = {layer: torch.tensor(hidden_TF[None, :, i * 192 : i * 192 + 192]) for i, layer in enumerate((2, 4, 6))}
    logits = torch.zeros((1, ids.shape[1], 4096))
    logits[0, count - 1 : count - 1 + steps] = torch.tensor(ours_NV)
    rows = parts.Rows(ids, hidden, torch.zeros(1), logits)
    anchor = torch.tensor([[count - 2]])  # dflash starts one position later
    monkeypatch.setattr(parts, "anchors", lambda *_: anchor)
    late = 0.99 if start == LATEST else start / 0.8 / ids.shape[1] + 1e-6  # clipped to the last possible position
    draws = iter([torch.tensor([0.0 if start else 1.0]), torch.tensor([late])])
    monkeypatch.setattr(parts.torch, "rand", lambda *_: next(draws))
    with torch.no_grad():
        losses = part(rows, torch.tensor(model.embedding))
    assert losses.shape == (steps,)
    assert losses.numpy() == pytest.approx(np.zeros(steps), abs=1e-5)
    monkeypatch.setattr(parts, "anchors", lambda *_: anchor - 1)  # the comparison detects a difference
    monkeypatch.setattr(parts.torch, "rand", lambda *_: torch.tensor([1.0]))
    with torch.no_grad():
        assert part(rows, torch.tensor(model.embedding))[:4].max() > 0.1


@pytest.mark.parametrize(("name", "anchor"), [("draft", len(IDS) - 1), ("medusa", len(IDS) - 2)])
def test_other_methods_have_the_training_loss(
    name: str, anchor: int, model: Llama, parts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    part, ours_NV = trained(parts, name), scores_of(name, model, monkeypatch)
    ids, count = torch.tensor([[*IDS, *ours_NV.argmax(axis=1)]]), len(IDS)
    last = np.zeros((1, ids.shape[1], 192), np.float32)
    last[0, : count - 1] = model.normalise(features(model, (6,), IDS)[:-1], model.norm)
    logits = torch.zeros((1, ids.shape[1], 4096))
    logits[0, count - 1 : count + 3] = torch.tensor(ours_NV)
    rows = parts.Rows(ids, {}, torch.tensor(last), logits)
    monkeypatch.setattr(parts, "anchors", lambda *_: torch.tensor([[anchor]]))
    with torch.no_grad():
        losses = part(rows, torch.tensor(model.embedding))
        assert losses.numpy() == pytest.approx(np.zeros(4 if name == "medusa" else 1), abs=1e-5)
        monkeypatch.setattr(
            parts, "anchors", lambda *_: torch.tensor([[anchor - 1]])
        )  # the comparison detects a difference
        assert part(rows, torch.tensor(model.embedding)).max() > 0.1


def test_the_loss_is_the_kl_divergence_from_the_target(parts: ModuleType) -> None:
    """KL(target || draft), not KL(draft || target)."""
    import torch

    target, draft = np.array([[0.5, 0.4, 0.1], [0.2, 0.2, 0.6]]), np.array([[0.2, 0.2, 0.6], [0.2, 0.2, 0.6]])
    found = parts.divergence(torch.tensor(np.log(draft)) + 3, torch.tensor(np.log(target)) - 2)
    assert found.numpy() == pytest.approx((target * np.log(target / draft)).sum(axis=1), abs=1e-6)
    assert parts.weights(3).tolist() == pytest.approx(np.array([1, 0.8, 0.64]) / 2.44)


def test_training_positions_differ_between_rows(parts: ModuleType) -> None:
    indices = parts.anchors(50, 30, 12).numpy()
    assert indices.shape == (50, 12)
    assert (np.diff(indices, axis=1) > 0).all()
    assert indices.min() == 0
    assert indices.max() == 29
    assert len({tuple(row) for row in indices.tolist()}) > 40
