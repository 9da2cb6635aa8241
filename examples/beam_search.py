"""Beam search: the highest-scoring texts instead of random ones; beam groups make them differ.

Prints the four best beams, then one beam from each of four groups, which are penalised for choosing the same tokens.
"""

import nucleate as nc

llm = nc.LLM()
[found] = llm.beam_search("Lily saw", num_beams=4, max_tokens=12)
print("beams, by logprob per token")
for beam in found.outputs:
    print(f"{beam.score:7.3f}  {beam.text!r}")

[diverse] = llm.beam_search("Lily saw", num_beams=4, num_beam_groups=4, diversity_penalty=3.0, max_tokens=12)
print("diverse beams")
for beam in diverse.outputs:
    print(f"{beam.score:7.3f}  {beam.text!r}")
