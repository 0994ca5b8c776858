"""From logits to drawn tokens, and what a request's options do to them on the way."""
