"""OpenAI's wire format: parsing of request bodies, and building of response bodies and stream chunks."""
