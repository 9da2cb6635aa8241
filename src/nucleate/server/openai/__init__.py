"""OpenAI's JSON and our values, each as the other. Knows no HTTP, no files and no models."""
