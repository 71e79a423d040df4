"""The HTTP service over an `AsyncEngine`: a page, and the APIs of OpenAI, Anthropic and Ollama."""
