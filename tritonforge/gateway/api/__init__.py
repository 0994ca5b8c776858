"""OpenAI's HTTP API: request bodies in, chunks, objects and errors out."""
