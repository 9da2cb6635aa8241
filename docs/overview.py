"""Makes docs/pictures/overview.svg, the picture of README.md: one step of the embedded model, from logits to text.

Run: python docs/overview.py. All bars are probabilities of a real trace. The picture follows the reader's light or dark
setting.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import nucleate as nc

FILE = Path(__file__).parent / "pictures" / "overview.svg"
PROMPT = "The dog had a ball. The dog lost the ball. Then the dog found a big"
PARAMS = nc.SamplingParams(repetition_penalty=1.3, temperature=0.8, min_p=0.6, seed=7)
TITLES = {
    "logits": ("logits", "from the model"),
    "repetition": ("penalties, masks", "repetition_penalty 1.3"),
    "temperature": ("temperature", "0.8"),
    "min_p": ("truncation", "min_p 0.6"),
    "gumbel": ("selection", "seed 7"),
}
SHOWN, WIDTH, ROW, LEFT, GAP = 9, 118, 19, 82, 20
STYLE = """
.page{fill:#fff;stroke:#d0d7de} text{font:12px system-ui,sans-serif;fill:#1f2328} .title{font-weight:600}
.small{font-size:11px;fill:#57606a} .end{text-anchor:end} .bar{fill:#54aeff} .drawn{fill:#bc4c00}
.drawn.word{font-weight:600} .gone{stroke:#d0d7de} .arrow{stroke:#57606a;fill:none;stroke-width:1.5}
@media(prefers-color-scheme:dark){.page{fill:#0d1117;stroke:#30363d} text{fill:#e6edf3} .small{fill:#9198a1}
.bar{fill:#1f6feb} .drawn{fill:#f0883e} .gone{stroke:#30363d} .arrow{stroke:#9198a1}}
""".strip()


def main() -> None:
    llm = nc.LLM(generation_config="none")
    prompt = llm.encode(PROMPT)
    logits_V = llm.model.begin().forward(prompt)
    trace = nc.trace(logits_V, PARAMS, prompt_ids=prompt)
    steps = [("logits", nc.probabilities(logits_V[None], (nc.stages.Gumbel(0),))[0])]
    steps += [(step.stage.name, step.probabilities) for step in trace.steps if step.stage is not None]
    steps = [(name, p_V) for name, p_V in steps if name in TITLES]
    drawn = int(steps[-1][1].argmax())
    tokens = sorted({*steps[0][1].argsort()[::-1][: SHOWN - 1].tolist(), drawn}, key=lambda t: -steps[0][1][t])
    words = [llm.tokenizer.decode([token]).strip() for token in tokens]
    height = 62 + ROW * len(tokens) + 44
    width = LEFT + len(steps) * (WIDTH + GAP) + 10
    parts = [f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" class="page"/>']
    for row, (token, word) in enumerate(zip(tokens, words, strict=True)):
        kind = "end drawn word" if token == drawn else "end"
        parts.append(text(LEFT - 10, 75 + ROW * row, word, kind))
    for column, (name, p_V) in enumerate(steps):
        x = LEFT + column * (WIDTH + GAP)
        title, detail = TITLES[name]
        parts += [text(x, 24, title, "title"), text(x, 41, detail, "small")]
        if column:
            parts.append(f'<path d="M{x - 15} 20h9m-4 -4l4 4l-4 4" class="arrow"/>')
        for row, token in enumerate(tokens):
            y, share = 64 + ROW * row, float(p_V[token])
            if share == 0:
                parts.append(f'<path d="M{x} {y + 7}h10" class="gone"/>')
                continue
            bar = min(share / 0.35, 1) * (WIDTH - 42)
            kind = "bar drawn" if token == drawn else "bar"
            parts.append(f'<rect x="{x}" y="{y}" width="{bar:.1f}" height="14" rx="2" class="{kind}"/>')
            parts.append(text(x + bar + 5, y + 11, f"{share:.1%}", "small"))
    after = f"detokenization, stop criteria, streaming:  “{PROMPT} {words[tokens.index(drawn)]}”"
    parts.append(text(LEFT, height - 18, after))
    title = "One step: the probabilities of some tokens after each sampling stage, and the text"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    FILE.write_text(
        "\n".join([head, f"<title>{title}</title>", f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n", "utf-8"
    )


def text(x: float, y: float, content: str, kind: str = "") -> str:
    """A line of text whose baseline is at y."""
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(content)}</text>'


if __name__ == "__main__":
    main()
