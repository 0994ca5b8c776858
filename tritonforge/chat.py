"""Chats as prompts: the checkpoint's own chat template, and the messages that are put into it.

The tokenizer model renders requests with it, the build renders the chats that quality is measured on; both must spell a
chat alike. Templates may use what transformers offers them: loop controls, the generation tag, tojson, strftime_now.
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tritonforge.errors import InvalidCheckpoint, InvalidRequest
from tritonforge.request import parse_json

ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A compiled chat template. `strftime` gives it the date; a build fixes that, so that digests stay the same."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], strftime: Callable[[str], str] | None = None
    ) -> None:
        """Raises InvalidCheckpoint when the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = strftime or (lambda form: datetime.now().strftime(form))
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidCheckpoint(f"chat_template.jinja does not compile: {error}") from None

    @classmethod
    def read(cls, folder: Path, strftime: Callable[[str], str] | None = None) -> "ChatTemplate | None":
        """The template in `folder` with the special tokens of its tokenizer_config.json; None where there is none."""
        template, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        if not template.is_file():
            return None
        tokens = _special_tokens(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else {}
        return cls(template.read_text(encoding="utf-8"), tokens, strftime)

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """The chat as text. Raises InvalidRequest when the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except TemplateError as error:
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}") from None


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant said; for a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that templates refer to by name; a token is a string, or an object that holds it as `content`."""
    tokens = {name: config.get(name) or "" for name in SPECIAL_TOKENS}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}


def parse_messages(value: str) -> list[dict[str, str]]:
    """The `messages` option: a JSON list of {"role", "content"} objects. Raises InvalidRequest naming what is wrong."""
    messages = parse_json("messages", value)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a JSON list with at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise InvalidRequest(f"messages[{index}] must have exactly the keys role and content")
        if message["role"] not in ROLES:
            raise InvalidRequest(f"messages[{index}].role must be one of {', '.join(ROLES)}, got {message['role']!r}")
        if not isinstance(message["content"], str):
            raise InvalidRequest(f"messages[{index}].content must be a string")
    return messages
