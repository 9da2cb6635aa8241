"""Write a truncation of your own, try it on a distribution, and register it as a sampling parameter.

The rule is one expression. nucleate runs it on NumPy arrays, on torch tensors and in compiled kernels, in batches, with
speculative decoding and over HTTP. Prints a distribution before and after it, and a text that was sampled with it.
"""

import numpy as np

import nucleate as nc
from nucleate.sampling.maths import log
from nucleate.sampling.stage import Floor, param


class AboveAverage(Floor):
    """Keep the tokens with at least a times the average probability."""

    rank = 67.5  # its place in the default order: after min-p, before top-p
    a: float = param("Factor of the average probability; 0 keeps all tokens", neutral=0.0, low=0.0)

    def floor(self, row):
        return row.top + log(self.a) + log(row.mass) - log(row.n)


logits_V = np.log([0.5, 0.3, 0.15, 0.05])  # the average probability is 0.25
print("before:", nc.probabilities([logits_V], ())[0].round(3))
print("after: ", nc.probabilities([logits_V], (AboveAverage(0.8),))[0].round(3))

nc.register_stage(AboveAverage)  # now it is a field of SamplingParams, and a name in orders and pipelines
llm = nc.LLM()
[completion] = llm.generate("The fox saw a drum", temperature=1.2, above_average=20.0, seed=3, max_tokens=40)
print("text:  ", completion.text)
