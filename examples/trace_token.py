"""Show what every stage did to the next token of a model, with the reason.

Prints a table with one line per stage: the number of tokens left, the entropy, the best token, and why tokens were
removed. Then prints the tokens that top-p removed, although they are among the ten most likely ones.
"""

import nucleate as nc

llm = nc.LLM()
prompt_ids = llm.encode("The little dog found a")
logits_V = llm.model.begin().forward(prompt_ids)  # the logits after the prompt, float32 [V]

params = nc.SamplingParams(temperature=0.8, top_k=10, top_p=0.9, repetition_penalty=1.2, seed=5)
trace = nc.trace(logits_V, params, prompt_ids=prompt_ids)
print(trace.table(lambda token: repr(llm.tokenizer.decode([token]))))
print(f"sampled: {llm.tokenizer.decode([trace.token_id])!r}")

top_p = next(step for step in trace.steps if step.name == "top_p")
print("removed by top_p:", [llm.tokenizer.decode([token]) for token in top_p.removed])
print(f"their probability: {top_p.removed_probability:.3f}")
