"""A seed gives the same text in every batch: alone, beside other requests, and in another order.

The noise of a token is a function of the seed, its position and its id. It does not depend on the other requests, on
how many tokens they have sampled, or on the row of the batch. Prints one text, and whether the batches agree on it.
"""

import random

import nucleate as nc

llm = nc.LLM()
prompt, params = "Once upon a time", nc.SamplingParams(temperature=1.0, top_p=0.95, seed=42, max_tokens=30)
[alone] = llm.generate(prompt, params)
print(alone.text)

rng = random.Random(0)
for size in (2, 5, 9):
    batch = [(prompt, params)]
    for seed in range(size - 1):
        other = nc.SamplingParams(temperature=rng.uniform(0.2, 1.5), seed=seed, max_tokens=rng.randint(5, 40))
        batch.append((rng.choice(["The dog", "A cat", "One day"]), other))
    rng.shuffle(batch)
    row = batch.index((prompt, params))
    text = llm.generate([one for one, _ in batch], [one for _, one in batch])[row].text
    print(f"batch of {size}, row {row}:", "the same text" if text == alone.text else f"another text: {text}")
