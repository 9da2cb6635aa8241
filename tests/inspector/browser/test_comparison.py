"""Compare two settings, branch, and draw many times."""

from __future__ import annotations

import re
from typing import Any

import pytest
from inspector_page import InspectorPage, agrees, visible

import nucleate as nc
from nucleate.tokenization.tokenizer import token_text

pytestmark = pytest.mark.slow

PROMPT = "Once upon a time"
GIVEN = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 40}


def token_ids(llm: nc.LLM, **values: Any) -> tuple[int, ...]:
    [completion] = llm.generate(PROMPT, **GIVEN | values)
    return tuple(completion.outputs[0].token_ids)


def test_two_settings_side_by_side(inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.go(4)
    inspector.tab("Compare")
    inspector.root.get_by_role("button", name="Compare with second settings").click()
    inspector.slider("temperature").fill("1.6")
    inspector.root.get_by_text("Total variation distance").wait_for()
    inspector.page.wait_for_function("() => !document.body.textContent.includes('shown tokens: 0%')")
    inspector.root.get_by_role("button", name="Generate both texts").click()
    note = inspector.root.get_by_text("The texts part at step")
    note.wait_for()
    a, b = token_ids(llm), token_ids(llm, temperature=1.6)
    part = next(step for step, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    texts = [visible(token_text(llm.tokenizer, ids[part])) for ids in (a, b)]
    assert note.inner_text() == f"The texts part at step {part}: A has “{texts[0]}”, B has “{texts[1]}”."
    inspector.root.get_by_role("button", name="Show the text of B").click()
    inspector.page.wait_for_function(
        "text => document.querySelector('.nci-summary').textContent.includes(text)", arg="end"
    )
    assert inspector.tokens()[: part + 1] == [visible(token_text(llm.tokenizer, token)) for token in b[: part + 1]]
    inspector.root.get_by_role("button", name="End the comparison").click()
    inspector.root.get_by_role("button", name="Compare with second settings").wait_for()


def test_a_branch_with_another_token(inspector: InspectorPage, llm: nc.LLM) -> None:
    before = inspector.tokens()
    inspector.go(5)
    chosen = token_ids(llm)[5]
    other = next(token for token in inspector.columns() if token != chosen)
    inspector.root.locator(f"[data-key=token-{other}]").click()
    inspector.root.get_by_role("button", name=re.compile("^Branch: go on with")).click()
    text = visible(token_text(llm.tokenizer, other))
    inspector.page.wait_for_function(
        "text => document.querySelector(\"[data-step='5']\")?.textContent.replaceAll('\\u00a0', ' ') === text", arg=text
    )
    inspector.settle()
    after = inspector.tokens()
    assert after[:6] == [*before[:5], text]
    assert after[6:] != before[6:]
    assert inspector.root.locator("[data-step].nci-origin-given").count() == 6
    inspector.tab("Branches")
    outputs = inspector.root.get_by_role("list", name="Outputs and branches").get_by_role("button")
    assert outputs.count() == 2
    outputs.first.click()
    inspector.page.wait_for_function("() => !document.querySelector('.nci-origin-given[data-step]')")
    assert inspector.tokens() == before


def test_a_branch_with_edited_text(inspector: InspectorPage) -> None:
    before = inspector.tokens()
    inspector.go(6)
    inspector.tab("Branches")
    inspector.root.get_by_label("Text from step 6 on").fill(" had a red balloon")
    inspector.root.get_by_role("button", name="Branch: go on with this text").click()
    inspector.root.locator("[data-step].nci-origin-given").first.wait_for()
    inspector.settle()
    after = inspector.tokens()
    assert after[:6] == before[:6]
    assert "".join(after[6:]).startswith(" had a red balloon")
    assert len(after) > 12


def test_a_thousand_draws_beside_the_exact_distribution(inspector: InspectorPage, llm: nc.LLM) -> None:
    inspector.go(4)
    inspector.tab("Many draws")
    inspector.root.get_by_role("button", name="Draw", exact=True).click()
    inspector.root.get_by_text("degree").wait_for()
    rows = inspector.root.get_by_role("region", name="Counts").locator("tbody tr")
    numbers = [row.locator("th, td").all_text_contents() for row in rows.all()]
    assert sum(int(row[3].replace(",", "")) for row in numbers) == 1000
    prompt_ids, output_ids = llm.encode(PROMPT), token_ids(llm)[:4]
    params = nc.SamplingParams(**GIVEN).with_defaults(llm.default_params)
    logits = llm.model.begin().forward([*prompt_ids, *output_ids])
    p = nc.probabilities(logits[None], params, prompt_ids=[prompt_ids], output_ids=[output_ids])[0]
    likeliest = sorted(p, reverse=True)
    for row, exact in zip(numbers[:10], likeliest, strict=False):
        assert agrees(row[1], exact)
        assert agrees(row[2], 1000 * exact)
    inspector.root.get_by_text("Seeds 7 to 1006.").wait_for()
    inspector.slider("temperature").fill("1.5")
    inspector.root.get_by_text("Seeds 7 to 1006.").wait_for(state="detached")
