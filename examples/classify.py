"""Use a language model as a classifier: the probability of each label as the next token.

allowed_token_ids bans all other tokens, and logprobs_mode "processed" reports the distribution that is left, so the
probabilities of the labels add up to 1. Prints the distribution over the labels for each text.
"""

import math

import nucleate as nc

LABELS = (" happy", " sad", " scared")
TEXTS = (
    "Lily lost her favourite toy. Lily felt very",
    "Tim got a new ball. Tim felt very",
    "It was dark. Ben felt very",
)
llm = nc.LLM(generation_config="none")  # without the model's recommended top_p, which would remove labels
ids = [llm.tokenizer.encode(label, add_special_tokens=False) for label in LABELS]
assert all(len(one) == 1 for one in ids), "each label must be one token"
params = nc.SamplingParams(
    allowed_token_ids=[one[0] for one in ids],
    logprobs=len(LABELS),
    logprobs_mode="processed",
    max_tokens=1,
)
for text, completion in zip(TEXTS, llm.generate([*TEXTS], params), strict=True):
    [step] = completion.outputs[0].logprobs
    found = {llm.tokenizer.decode([token.token_id]).strip(): math.exp(token.logprob) for token in step.top}
    print(text, "->", ", ".join(f"{label} {p:.3f}" for label, p in found.items()))
