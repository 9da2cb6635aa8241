"""Let a chat call Python functions: the model writes the call, your program runs it, and the model gets the result.

A grammar guarantees that the name is one of the tools and that the arguments conform to its signature. nucleate never
runs a function itself. Prints the call, its result and the answer. The embedded model was not trained on tools: expect
valid calls, not sensible ones. Needs the extra structured.
"""

from typing import Literal

import nucleate as nc


def count_animals(animal: Literal["fox", "owl", "bear"], place: Literal["forest", "zoo"] = "forest") -> str:
    """Count the animals of a kind.

    Args:
        animal: The kind of animal.
        place: Where to count.
    """
    return f"{len(animal) + len(place)} animals of the kind {animal} live in the {place}."


tools = {"count_animals": count_animals}
llm = nc.LLM()
messages = [{"role": "user", "content": "How many owls are there?"}]
answer = llm.chat(
    messages, tools=[*tools.values()], tool_choice="required", parallel_tool_calls=False, seed=3, max_tokens=200
)
print("finish reason:", answer.outputs[0].finish_reason)

made, results = [], []
for call in answer.tool_calls:
    result = tools[call.name](**call.arguments)
    print(f"{call.name}({call.arguments}) -> {result}")
    function = {"name": call.name, "arguments": call.arguments_json}
    made.append({"id": call.id, "type": "function", "function": function})
    results.append({"role": "tool", "tool_call_id": call.id, "content": result})

messages += [{"role": "assistant", "content": None, "tool_calls": made}, *results]
answer = llm.chat(messages, tools=[*tools.values()], tool_choice="none", seed=1, max_tokens=40)
print("answer:", answer.text)
