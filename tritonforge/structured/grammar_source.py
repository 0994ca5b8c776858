"""From the structure options to the grammar text that the library compiles; structured.py calls it.

`regex` is what Rust's regex crate calls one, without look-around, and is matched by the whole answer; its \\d, \\w and
\\s are ASCII, as in JSON schemas.
`grammar` is Lark as llguidance reads it (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md): a rule
`start`, rules in lower case, terminals in upper case, `%json {...}` for a JSON schema inside. Text that holds `::=` is
read as GBNF, the EBNF of llama.cpp, with a rule `root`.
"""

import json
import re
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from tritonforge.structured.json_schema import read_schema

MAX_LENGTH = 65_536
"""Characters of a schema, regex, grammar, or of all choices together."""

WHITESPACE = r" |\n[ \t]{0,20}"
"""Between the tokens of JSON: one space, or a line break with its indentation. Unbounded, a model may never stop it."""

WITHOUT_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""The end of every grammar of a user. Bytes that must follow are otherwise written at once, without any limit: after
`/b+/ /b+/`, where the first terminal takes every b and the second none, that is for ever.
"""

_IGNORED_ATTRIBUTE = re.compile(r"^\s*[?!]?\w+\s*\[[^\]\n]*\b(temperature)\b", re.MULTILINE)


def grammar_source(kind: str, value: Any) -> str:
    """The library's text of one of options.STRUCTURES. Raises ValueError saying what is wrong with the value."""
    length = sum(map(len, value)) if kind == "choice" else len(value) if isinstance(value, str) else 0
    if length > MAX_LENGTH:
        raise ValueError(f"it must have at most {MAX_LENGTH} characters, got {length}")
    return _SOURCES[kind](value)


def _json(schema: dict[str, Any]) -> str:
    options = {"whitespace_pattern": WHITESPACE}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _regex(text: str) -> str:
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("it ends in a lone backslash")  # the library would drop it
    return f"start: /{regex_to_lark(text, 'dws')}/"


def _grammar(text: str) -> str:
    if text.lstrip().startswith("{"):
        raise ValueError("it must be Lark or GBNF, not JSON")
    if "::=" in text:
        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # it raises Exception itself for an unknown rule
            raise ValueError(f"it is no valid GBNF: {str(error)[:160] or type(error).__name__}") from None
    attribute = _IGNORED_ATTRIBUTE.search(text)
    if attribute:
        raise ValueError(f"the attribute {attribute[1]} of a rule is not supported")
    if "%json" in text and ("multipleOf" in text or "x-guidance" in text or "\\u" in text):
        raise ValueError("a JSON schema inside a grammar must hold no multipleOf, x-guidance or \\u: use json_schema")
    return text + WITHOUT_FORCING


_SOURCES = {
    "json_object": lambda _: _json({"type": "object"}),
    "json_schema": lambda text: _json(read_schema(text)),
    "regex": _regex,
    "grammar": _grammar,
    "choice": lambda choices: "start: " + " | ".join(map(json.dumps, choices)),
}
