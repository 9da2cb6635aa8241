"""Other programs ask, over OpenAI's API; so far only its JSON."""
