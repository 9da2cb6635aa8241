"""A small model and an MTP module trained for a minute: the mean acceptance length exceeds 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.loader import runner_of
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.speculative.config import Speculation

pytestmark = pytest.mark.usefixtures("one_torch_thread")
torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
pytest.importorskip("transformers", reason="needs the extra 'torch'")

from mtp_models import SIZE, modules_of, stock_of  # noqa: E402
from toy_requests import drive  # noqa: E402

from nucleate.speculative.neural.mtp import Mtp  # noqa: E402

CHANCES = np.array([0.75, 0.15, 0.07, 0.03])


class MarkovText:
    """Random text: one of four tokens follows, depending on the last token and a little on the one before."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.next_4V4 = self.rng.integers(2, SIZE, (4, SIZE, 4))

    def some(self, rows: int, length: int) -> np.ndarray:
        ids_RT = self.rng.integers(2, SIZE, (rows, length))
        for index in range(2, length):
            choice_R = self.rng.choice(4, rows, p=CHANCES)
            ids_RT[:, index] = self.next_4V4[ids_RT[:, index - 2] % 4, ids_RT[:, index - 1], choice_R]
        return ids_RT


def train(model: Any, modules: Any, text: MarkovText, steps: int) -> list[float]:
    """Train the model to predict the next token and its module the one after it. Returns the two final losses."""
    weights = {id(weight): weight for part in (model, modules) for weight in part.parameters()}
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    loss = torch.nn.functional.cross_entropy
    last_losses = []
    for _ in range(steps):
        ids = torch.from_numpy(text.some(32, 48))
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        positions = torch.arange(1, ids.shape[1])[None]
        x = modules.forward_layer(0, out.hidden_states[-1][:, :-1], positions, None, input_ids=ids[:, 1:])
        ahead = modules._project_to_logits(x[:, 1:-1])
        losses = [
            loss(out.logits[:, 1:-1].flatten(0, 1), ids[:, 2:].flatten()),
            loss(ahead.flatten(0, 1), ids[:, 3:].flatten()),
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        schedule.step()
        last_losses = [one.item() for one in losses]
    return last_losses


@pytest.mark.slow
def test_mean_acceptance_length(llm: nc.LLM) -> None:
    stock, text = stock_of("glm4_moe", initializer_range=0.05), MarkovText()
    losses = train(*stock, text, 300)
    modules = modules_of(*stock)
    prompts = text.some(16, 24).tolist()
    for temperature, least in ((0.0, 2.5), (1.0, 1.5)):  # usually 3.9 and 2.0
        requests = [
            Request(ids, nc.SamplingParams(seed=seed, temperature=temperature, max_tokens=60, ignore_eos=True))
            for seed, ids in enumerate(prompts)
        ]
        outputs, acceptance_length = [], []
        for speculation in (None, Speculation(lambda: Mtp(modules), 4, adaptive=False)):
            engine = Engine(runner_of(TransformersModel.of(stock[0])), llm.tokenizer, speculative_config=speculation)
            outputs.append([[event.chunk.token_ids for event in events] for events in drive(engine, requests)])
            acceptance_length.append(engine.stats.speculative.mean_acceptance_length if speculation else 1.0)
        assert outputs[0] == outputs[1]
        assert acceptance_length[1] > least, losses
