"""Sample from your own logits: NumPy arrays in, token ids out, without a model.

Every row has its own parameters and seed. The random numbers depend on the seed, the step and the token id alone, so a
row gets the same token in every batch. Prints the tokens, the distributions they were sampled from, and how often 1,000
seeds pick each token.
"""

import numpy as np

import nucleate as nc

logits_BV = np.log([[0.5, 0.3, 0.15, 0.05], [0.5, 0.3, 0.15, 0.05]])
flat = nc.SamplingParams(temperature=2.0, seed=1)
sharp = nc.SamplingParams(temperature=0.5, top_p=0.9, seed=1)

print("tokens:", nc.sample(logits_BV, [flat, sharp], step=0))
p_BV = nc.probabilities(logits_BV, [flat, sharp])
print("flat:  ", p_BV[0].round(3))
print("sharp: ", p_BV[1].round(3), "(top-p removed two tokens)")

seeds = [flat.replace(seed=seed) for seed in range(1000)]
tokens_B = nc.sample(np.repeat(logits_BV[:1], 1000, axis=0), seeds)
print("flat:  ", np.bincount(tokens_B, minlength=4) / 1000, "of 1,000 seeds")
