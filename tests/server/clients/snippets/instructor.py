from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Hero(BaseModel):
    name: Literal["Tom", "Lily"]


client = instructor.from_openai(OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="any"), model="nucleate-tiny")
print(client.chat.completions.create(response_model=Hero, messages=[{"role": "user", "content": "Who?"}]))
