"""Text in and out: the tokenizer, the chat template, incremental detokenization and stop strings.

The tokenizer model encodes with it, the engine loop turns new token ids into text deltas with it. It knows nothing of
scheduling or Triton. Detokenization is a pure function of the last ids, so no state can leak between requests.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from tritonforge.errors import InvalidRequest, NotFound

WINDOW = 16
"""Token ids of context that a delta is computed with; from 6 on, no difference to decoding the whole text was seen."""

ROLES = ("system", "user", "assistant")

Decode = Callable[[Sequence[int]], str]


class Tokenizer:
    """A Hugging Face fast tokenizer with its chat template, read from the folder of a release."""

    def __init__(self, folder: Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise NotFound(f"tokenizer file {path} does not exist")
        self._tokenizer = FastTokenizer.from_file(str(path))
        template = path.with_name("chat_template.jinja")
        self._template = _compile_template(template.read_text(encoding="utf-8")) if template.is_file() else None
        config = path.with_name("tokenizer_config.json")
        self._special = _special_tokens(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else {}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that this tokenizer puts around a plain prompt, if any."""
        return self._tokenizer.encode(text).ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of the prompt for the assistant's next message; the template writes all special tokens itself."""
        return self._tokenizer.encode(self.render_chat(messages), add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens; bytes that are no UTF-8 (yet) become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt for the assistant's next message, by the checkpoint's own template."""
        if self._template is None:
            raise InvalidRequest("chat is not available: this model has no chat template")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}") from None


def _compile_template(source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_template_error
    return environment.from_string(source)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that templates refer to by name; a token is a string, or an object that holds it as `content`."""
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in tokens.items()
        if token is not None
    }


def parse_messages(value: str) -> list[dict[str, str]]:
    """The `messages` option: a JSON list of {"role", "content"} objects. Raises InvalidRequest naming what is wrong."""
    try:
        messages = json.loads(value)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"messages must be JSON: {error}") from None
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


def text_delta(decode: Decode, window: Sequence[int], new: Sequence[int], *, final: bool) -> str:
    """Text that `new` adds after `window`; an unfinished UTF-8 tail waits for its last token, unless `final`."""
    before = decode(window).rstrip("\ufffd") if window else ""
    after = decode([*window, *new])
    if not final:
        after = after.rstrip("\ufffd")
    return after[len(before) :]


def find_stop(text: str, stops: Iterable[str]) -> int | None:
    """Index at which the earliest stop string starts in `text`, or None."""
    found = [index for index in (text.find(stop) for stop in stops) if index >= 0]
    return min(found, default=None)


def held_back(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` that could still become a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


@dataclass
class TextStream:
    """The text of one answer as its tokens arrive. `push` returns what may be shown; a stop string never is."""

    decode: Decode
    stops: tuple[str, ...] = ()
    stopped: bool = False
    _window: list[int] = field(default_factory=list)
    _held: str = ""

    def push(self, token_id: int | None, *, final: bool) -> str:
        """Text that is safe to show after `token_id` (None: the answer ends without another token).

        Sets `stopped` when a stop string is complete: the text before it is returned and the rest is dropped.
        """
        new = [] if token_id is None else [token_id]
        text = self._held + text_delta(self.decode, self._window, new, final=final)
        self._window = [*self._window, *new][-WINDOW:]
        end = find_stop(text, self.stops) if self.stops else None
        if end is not None:
            self.stopped = True
            return text[:end]
        keep = 0 if final or not self.stops else held_back(text, self.stops)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown
