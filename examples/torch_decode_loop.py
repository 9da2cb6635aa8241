"""Use the Sampler in your own decode loop, here with a small random model of Transformers and its KV cache.

The Sampler keeps what a batch needs between steps: the history for penalties, the seed and the step of each row. Rows
can have different parameters, and can be removed while the others continue. Prints the tokens of two requests.
Needs the extra torch.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import nucleate as nc

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, use_cache=True
)
model = LlamaForCausalLM(config).eval()

prompts = torch.tensor([[1, 5, 9], [1, 7, 3]])  # [B, T], without padding
params = [
    nc.SamplingParams(temperature=0.9, repetition_penalty=1.3, seed=1),
    nc.SamplingParams(temperature=0, logprobs=0),  # greedy, with the logprob of each token
]
sampler = nc.Sampler(vocab_size=config.vocab_size)
rows = [sampler.add(one, prompt_ids=ids.tolist()) for one, ids in zip(params, prompts, strict=True)]

inputs, cache = prompts, None
with torch.inference_mode():
    for _ in range(8):
        result = model(inputs, past_key_values=cache)
        step = sampler(result.logits[:, -1])  # samples one token per row, and appends it to its history
        inputs, cache = step.token_ids[:, None], result.past_key_values
        print(f"tokens {step.token_ids.tolist()}, logprob of the greedy one {step.logprobs[1].chosen.logprob:.3f}")
for row in rows:
    print(f"row {row}: {sampler.output_ids(row)}")
