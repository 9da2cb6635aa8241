"""Score given texts: the logprob of each token and the perplexity.

prompt_logprobs=0 returns the logprob and the rank of each token of the prompt, and of no others. The first token has
none, as nothing comes before it. Prints the perplexity of three texts, and the most surprising token of each.
"""

import math

import nucleate as nc

TEXTS = (
    "Once upon a time, there was a little girl named Lily.",
    "Once upon a time, there was a little tax return.",
    "time a upon Once, named girl little a was there Lily.",
)
llm = nc.LLM()
for text in TEXTS:
    [completion] = llm.generate(text, prompt_logprobs=0, max_tokens=1)
    scored = [step.chosen for step in completion.prompt_logprobs if step is not None]
    perplexity = math.exp(-math.fsum(token.logprob for token in scored) / len(scored))
    worst = min(scored, key=lambda token: token.logprob)
    word = llm.tokenizer.decode([worst.token_id])
    print(text)
    print(f"  perplexity {perplexity:.1f}; most surprising: {word!r}, logprob {worst.logprob:.1f}, rank {worst.rank}")
