llm openai endpoint http://127.0.0.1:8000/v1 -m nucleate-tiny "Tell me a story."
