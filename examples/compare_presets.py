"""Equal parameters give different distributions in other engines, because the order of the stages differs.

vLLM and Transformers apply the temperature before the truncations, llama.cpp after them: a high temperature flattens
the distribution, so that top-p and min-p keep more tokens. vLLM applies min-p before top-p, Transformers after it.
Prints the distribution over eight tokens and the order of the stages.
"""

import numpy as np

import nucleate as nc

logits_V = np.log([0.42, 0.22, 0.14, 0.09, 0.06, 0.04, 0.02, 0.01])
fields = {"temperature": 1.8, "top_k": 6, "top_p": 0.85, "min_p": 0.3}

print("model     ", nc.probabilities([logits_V], ())[0].round(3))
for order in ("vllm", "hf", "llama.cpp"):
    params = nc.SamplingParams(order=order, **fields)
    p_V = nc.probabilities([logits_V], params)[0]
    stages = " ".join(stage.name for stage in params.build_pipeline())
    print(f"{order:10} {p_V.round(3)} {np.count_nonzero(p_V)} tokens: {stages}")
