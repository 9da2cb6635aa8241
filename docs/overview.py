"""Makes docs/pictures/overview.svg, the picture of README.md: one step of the embedded model, from logits to text.

Run: python docs/overview.py. All bars are probabilities of a real trace. The picture follows the reader's light or dark
setting.
"""

from __future__ import annotations

from pathlib import Path

from svg import box, document, line, text

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
    parts = []
    for row, (token, word) in enumerate(zip(tokens, words, strict=True)):
        parts.append(text(LEFT - 10, 75 + ROW * row, word, "end title more" if token == drawn else "end"))
    for column, (name, p_V) in enumerate(steps):
        x = LEFT + column * (WIDTH + GAP)
        title, detail = TITLES[name]
        parts += [text(x, 24, title, "title"), text(x, 41, detail, "small")]
        if column:
            parts.append(line([(x - 12, 15), (x - 7, 20), (x - 12, 25)], "axis"))
        for row, token in enumerate(tokens):
            y, share = 64 + ROW * row, float(p_V[token])
            kind = "gone" if share == 0 else "more" if token == drawn else "kept"
            bar = max(min(share / 0.35, 1) * (WIDTH - 42), 2)
            parts.append(box(x, y, bar, 14, kind))
            if share:
                parts.append(text(x + bar + 5, y + 11, f"{share:.1%}", "small"))
    height, width = 62 + ROW * len(tokens) + 44, LEFT + len(steps) * (WIDTH + GAP) + 20
    after = f"detokenization, stop criteria, streaming:  “{PROMPT} {words[tokens.index(drawn)]}”"
    parts.append(text(LEFT, height - 18, after))
    title = "One step: the probabilities of some tokens after each sampling stage, and the text"
    FILE.write_text(document(width, height, title, parts), "utf-8")


if __name__ == "__main__":
    main()
