"""The API edge: OpenAI's HTTP API in front of the served models, with keys, tenants and limits.

`command.py` starts it, `app.py` puts it together. It calls `tokenizer` and `decoder` over gRPC and knows no engine.
"""
