"""Constrain the output to a regular expression, a list of choices, or a context-free grammar.

Everything else about sampling stays: temperature, truncation, seeds, logprobs. Prints one output for each constraint.
Needs the extra structured.
"""

import re

import nucleate as nc

DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])"
SUM = """
start: term ("+" term)+
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]?/
"""
constraints = {"regex": DATE, "choice": ["happy", "sad", "very tired"], "grammar": SUM}

llm = nc.LLM()
for kind, value in constraints.items():
    params = nc.SamplingParams(structured_outputs={kind: value}, temperature=0.8, seed=4, max_tokens=40)
    output = llm.generate("The little fox was", params)[0].outputs[0]
    print(f"{kind:8} {output.text}  ({output.finish_reason})")
    assert kind != "regex" or re.fullmatch(DATE, output.text)
