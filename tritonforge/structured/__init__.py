"""Structured output: JSON schemas, regular expressions, grammars and tool calls, as masks over the next token."""
