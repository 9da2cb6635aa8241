"""Generate JSON that always conforms to a Pydantic model, and parse it.

In every step, a mask allows only the tokens with which the text can still become a valid object. The structure is
guaranteed, the meaning is up to the model. Prints three parsed objects.
Needs the extra structured, and pydantic.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

import nucleate as nc


class Hero(BaseModel):
    """The hero of a story."""

    model_config = ConfigDict(extra="forbid")  # "additionalProperties": false, or the model may write other properties
    name: Annotated[str, Field(max_length=12, pattern="^[A-Z][a-z]+$")]
    animal: Literal["fox", "owl", "bear"]
    age: Annotated[int, Field(ge=1, le=99)]
    friends: Annotated[list[Literal["Tom", "Lily", "Ben"]], Field(max_length=2)]


llm = nc.LLM()
constraint = {"json_schema": Hero.model_json_schema(), "whitespace": "none"}
params = nc.SamplingParams(structured_outputs=constraint, temperature=0.9, n=3, seed=1, max_tokens=120)
[completion] = llm.generate("Once upon a time there was a fox. Describe it as JSON:", params)
for output in completion.outputs:
    print(output.finish_reason, repr(Hero.model_validate_json(output.text)))
