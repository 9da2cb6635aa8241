"""Generate text with the embedded model: one prompt, three outputs.

Output i of a prompt uses seed + i, so the same call prints the same stories on every machine.
Prints three continuations, each with its seed and the reason why it ended, and the number of tokens.
"""

import nucleate as nc

llm = nc.LLM()  # or nc.LLM("path/to/model"), nc.LLM("owner/name")
[completion] = llm.generate("Once upon a time", temperature=0.8, top_p=0.9, n=3, seed=7, max_tokens=40)
for output in completion.outputs:
    print(f"seed {output.seed}, {output.finish_reason}: {completion.prompt}{output.text}\n")
usage = completion.usage
print(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated tokens")
