"""The ladder shows the numbers of `nc.trace`, and follows sliders, added stages and their order at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from chromium import PageErrors
from inspector_page import InspectorPage, agrees, visible
from server_process import Server

import nucleate as nc
from nucleate.tokenization.tokenizer import token_text

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

PROMPT, SEED = "Once upon a time", 7
GIVEN = {"temperature": 0.9, "top_p": 0.95, "seed": SEED, "max_tokens": 40}
STAGES = {
    "default": {},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "truncation": {"min_p": 0.05, "typical_p": 0.9, "top_k": 30},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    "order": {"min_p": 0.1, "order": "llama.cpp"},
    "greedy": {"draw": "greedy"},
    "categorical": {"draw": "categorical"},
}


def trace_of(llm: nc.LLM, step: int, given: dict[str, Any], changed: dict[str, Any] | None = None) -> nc.Trace:
    """The trace of a step of the output under ``given``, with some values changed."""
    params = nc.SamplingParams(**given).with_defaults(llm.default_params)
    [completion] = llm.generate(PROMPT, params)
    prompt_ids, output_ids = llm.encode(PROMPT), completion.outputs[0].token_ids[:step]
    logits = llm.model.begin().forward([*prompt_ids, *output_ids])
    if changed is not None:
        params = nc.SamplingParams(**given | changed).with_defaults(llm.default_params)
    return nc.trace(logits, params, prompt_ids=prompt_ids, output_ids=output_ids, step=step)


def check(inspector: InspectorPage, trace: nc.Trace, llm: nc.LLM) -> None:
    """Compare all numbers of the ladder with a trace, to the digits shown."""
    ids, rows = inspector.columns(), inspector.ladder()
    assert [row.name for row in rows] == [step.name for step in trace.steps]
    assert trace.token_id in ids
    assert inspector.picked() == visible(token_text(llm.tokenizer, trace.token_id)).replace(" ", "·")
    for row, step in zip(rows[:-1], trace.steps[:-1], strict=True):
        assert row.kept == f"{step.left:,}"
        assert agrees(row.entropy, step.entropy), (row, step.entropy)
        if step.stage is not None:
            assert agrees(row.removed, step.removed_probability), (row, step.removed_probability)
            assert agrees(row.kl, step.kl), (row, step.kl)
        for token, cell in zip(ids, row.cells, strict=True):
            p = float(step.probabilities[token])
            gone = step.scores[token] == -np.inf
            assert (cell in (None, "✕")) if gone else agrees(cell or "", p), (row.name, token, cell, p)
        assert agrees(row.others, 1 - sum(step.probabilities[ids])), (row.name, row.others)
    won = [token for token, cell in zip(ids, rows[-1].cells, strict=False) if cell == "picked"]
    assert won == [trace.token_id]


@pytest.mark.parametrize("name", STAGES)
def test_the_ladder_is_the_trace(name: str, page: Page, server: Server, llm: nc.LLM) -> None:
    inspector, params = InspectorPage(page), GIVEN | STAGES[name]
    inspector.open(server.url, {"prompt": PROMPT, "params": params})
    for step in (0, 13, 39):
        inspector.go(step)
        check(inspector, trace_of(llm, step, params), llm)


def test_a_slider_changes_the_ladder_on_the_same_noise(inspector: InspectorPage, llm: nc.LLM) -> None:
    before = inspector.tokens()
    inspector.go(4)
    inspector.slider("temperature").fill("1.8")
    inspector.settle()
    check(inspector, trace_of(llm, 4, GIVEN, {"temperature": 1.8}), llm)
    slider = inspector.slider("top_p")
    slider.focus()
    for _ in range(5):
        slider.press("ArrowLeft")
    value = float(inspector.field("top_p").input_value())
    assert value < 0.95
    inspector.settle()
    check(inspector, trace_of(llm, 4, GIVEN, {"temperature": 1.8, "top_p": value}), llm)
    assert inspector.tokens() == before
    inspector.root.get_by_text("generated with other settings").wait_for()


def test_a_stage_is_added_and_removed(inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.go(4)
    inspector.add_stage("min_p")
    inspector.field("min_p").fill("0.2")
    inspector.settle()
    check(inspector, trace_of(llm, 4, GIVEN, {"min_p": 0.2}), llm)
    assert "min_p" in inspector.stages()
    inspector.root.get_by_role("button", name="Remove min_p").click()
    inspector.settle()
    assert "min_p" not in inspector.stages()
    check(inspector, trace_of(llm, 4, GIVEN), llm)


@pytest.mark.parametrize("way", ["drag", "button"])
def test_stages_are_reordered(way: str, inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.go(4)
    before = inspector.stages()
    assert before.index("temperature") < before.index("top_p")
    if way == "drag":
        grips = {name: inspector.root.locator(f"[data-stage={name}]") for name in ("top_p", "temperature")}
        grips["top_p"].locator(".nci-grip").drag_to(grips["temperature"].locator(".nci-stage-head"))
    else:
        while inspector.stages().index("top_p") > inspector.stages().index("temperature"):
            inspector.root.get_by_role("button", name="Move top_p up").click()
    order = inspector.stages()
    assert order.index("top_p") < order.index("temperature")
    inspector.settle()
    check(inspector, trace_of(llm, 4, GIVEN, {"order": order}), llm)


def test_a_named_order(inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.go(4)
    inspector.root.get_by_label("Order", exact=True).select_option("akunu")
    inspector.settle()
    check(inspector, trace_of(llm, 4, GIVEN, {"order": "akunu"}), llm)


def test_what_the_server_rejects_is_explained_at_the_field(inspector: InspectorPage, errors: PageErrors) -> None:
    errors.allow("status of 400")
    before = inspector.ladder()
    inspector.add_stage("logit_bias")
    inspector.field("logit_bias").fill('{"5000": 1}')
    inspector.field("logit_bias").blur()
    inspector.root.locator(".nci-field-error", has_text="5000").wait_for()
    assert inspector.ladder() == before
    inspector.root.get_by_role("button", name="Remove logit_bias").click()
    inspector.settle()
    assert inspector.root.get_by_role("alert").is_hidden()


def test_the_race_shows_the_noise_that_decided(inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.go(4)
    trace = trace_of(llm, 4, GIVEN)
    race = inspector.root.locator(".nci-winner-row").last
    name, score, noise, total = race.locator("th, td").all_text_contents()[:4]
    assert name == visible(token_text(llm.tokenizer, trace.token_id)).replace(" ", "·")
    signed = [float(text.replace("−", "-")) for text in (score, noise, total)]
    assert signed[0] + signed[1] == pytest.approx(signed[2], abs=0.0011)
    rows = inspector.root.locator("tr:has(> td.nci-picture) td:nth-of-type(3)").all_text_contents()
    assert total in rows
