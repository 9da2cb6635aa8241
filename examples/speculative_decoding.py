"""Speculative decoding: the same text as normal decoding, seed for seed, in fewer steps.

A draft method proposes tokens, and one forward pass of the model verifies all of them. "ngram" looks for the
continuation in the text itself, which suits repetitive text; "draft" uses a smaller model. Prints the number of engine
steps (forward passes) of each method and whether its text is the same.
"""

import nucleate as nc

PROMPT = "The dog said: I like the red ball. The cat said: I like the red ball. The bird said: I like"
llm = nc.LLM()
texts = {}
for method in (None, "ngram", "draft"):
    config = None if method is None else nc.Speculation(method, num_speculative_tokens=4, adaptive=False)
    engine = llm.new_engine(speculative_config=config)
    engine.add(nc.Request(llm.encode(PROMPT), nc.SamplingParams(temperature=0.4, seed=5, max_tokens=48)))
    texts[method] = ""
    while len(engine):
        for output in engine.step():
            texts[method] += output.chunk.text
    same = "the same text" if texts[method] == texts[None] else "another text"
    line = f"{method or 'none':6} {engine.stats.num_steps:3} steps, {same}"
    if method is not None:
        line += f", mean acceptance length {engine.stats.speculative.mean_acceptance_length:.2f}"
    print(line)
print(texts[None])
