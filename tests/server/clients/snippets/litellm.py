import litellm

messages = [{"role": "user", "content": "Tell me a story."}]
server = {"api_base": "http://127.0.0.1:8000/v1", "api_key": "any"}
print(litellm.completion(model="openai/nucleate-tiny", messages=messages, **server).choices[0].message.content)
