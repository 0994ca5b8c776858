"""The checkpoint's own chat template: messages and tools become the text of a prompt.

The tokenizer model renders requests with it, the build renders the chats that quality is measured on; both must spell a
chat as transformers' apply_chat_template would: same variables, same filters, same choice among several templates.
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tritonforge.errors import InvalidCheckpoint, InvalidRequest

TEMPLATE_FILE = "chat_template.jinja"
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
"""Where transformers 5 stores a checkpoint's template, and a second one that it takes for requests with tools."""

OPTIONAL_KEYS = ("tool_calls", "reasoning_content")
"""Keys of an assistant's message that many templates do not write: such a template must not be given them."""

RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""What a template raises for messages that it was not written for (None where it adds strings, say)."""


class ChatTemplate:
    """A compiled chat template. `strftime` gives it the date; a build fixes that, so that digests stay the same."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        strftime: Callable[[str], str] | None = None,
        *,
        tool_source: str | None = None,
    ) -> None:
        """`tool_source` is the template for requests with tools, where a checkpoint has a second one.

        Raises InvalidCheckpoint when a template does not compile.
        """
        self._special_tokens = special_tokens
        self._plain = _Compiled(source, strftime)
        self._with_tools = self._plain if tool_source is None else _Compiled(tool_source, strftime)

    @classmethod
    def read(cls, folder: Path, strftime: Callable[[str], str] | None = None) -> "ChatTemplate | None":
        """The template in `folder` with the special tokens of its tokenizer_config.json; None where there is none."""
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        sources = read_sources(folder, config)
        if "default" not in sources:
            return None
        return cls(sources["default"], _special_tokens(config), strftime, tool_source=sources.get("tool_use"))

    @property
    def tool_source(self) -> str:
        """The source of the template that requests with tools are rendered with."""
        return self._with_tools.source

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool,
    ) -> str:
        """The chat as text. Raises InvalidRequest when the template refuses the messages, or would leave some out."""
        compiled = self._plain if tools is None else self._with_tools
        if tools is not None and not compiled.takes_tools:
            raise InvalidRequest("tools are not available: this model's chat template does not take tools")
        for key in OPTIONAL_KEYS:
            if key not in compiled.source and any(message.get(key) for message in messages):
                raise InvalidRequest(f"messages must have no {key}: this model's chat template does not take them")
        try:
            return compiled.template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except RENDER_ERRORS as error:
            raise InvalidRequest(f"messages do not fit the model's chat template: {str(error)[:200]}") from None


class _Compiled:
    """One template with its source, and whether it uses the variable `tools` at all."""

    def __init__(self, source: str, strftime: Callable[[str], str] | None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = strftime or (lambda form: datetime.now().strftime(form))
        self.source = source
        try:
            self.template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise InvalidCheckpoint(f"{TEMPLATE_FILE} does not compile: {error}") from None


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant said; for a prompt it is just its content.

    It is a call block, so what is set inside it stays inside, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The tojson filter of transformers: it does not escape HTML, and takes these options by name or position."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def read_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template sources by name (`default`, `tool_use`, ...) of a Hugging Face folder with this tokenizer_config.

    Files come before tokenizer_config's `chat_template`: a string or, with several, a list of {name, template}.
    """
    if (folder / TEMPLATE_FILE).is_file():
        files = {"default": folder / TEMPLATE_FILE, "tool_use": folder / TOOL_TEMPLATE_FILE}
        return {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    template = config.get("chat_template")
    if isinstance(template, list):
        return {item["name"]: item["template"] for item in template}
    return {} if template is None else {"default": template}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that templates refer to by name; a token is a string, or an object that holds it as `content`.

    A token that the tokenizer does not have is undefined to the template: it may ask for that.
    """
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= extra
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}
