"""The tables [filters.NAME] of gateway.toml, and the built-in patterns."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tritonforge.errors import InvalidRequest
from tritonforge.gateway.filtering.scanner import Pattern
from tritonforge.gateway.tables import check_names, check_number, read_into, table_of

STAGES = ("prompt", "answer")
ACTIONS = ("record", "redact", "block")
_CREDENTIALS = (
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[A-Za-z0-9+/=\s]{0,3900}(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\bsk-[A-Za-z0-9_-]{20,200}",
    r"\bgh[pousr]_[A-Za-z0-9]{36,255}",
    r"\bxox[abprs]-[A-Za-z0-9-]{10,200}",
    r"\bAIza[0-9A-Za-z_-]{35}",
)
_CARDS = r"(?<!\d)(?:\d[ -]?){12,18}\d(?!\d)"


def luhn(text: str) -> bool:
    """Whether the digits of `text` have the check digit of payment cards (ISO/IEC 7812-1)."""
    digits = [int(one) for one in text if one in "0123456789"]
    doubled = [sum(divmod(2 * one, 10)) for one in digits[-2::-2]]
    return bool(any(digits)) and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


BUILTIN: Mapping[str, tuple[Pattern, ...]] = {
    "credentials": tuple(Pattern(text) for text in _CREDENTIALS),
    "cards": (Pattern(_CARDS, luhn),),
}
"""Private keys and API keys by their well-known forms (those of this gateway too), and numbers of payment cards."""


class Classifier(Protocol):
    """Judges texts by something else than patterns."""

    async def score(self, text: str) -> float:
        """How much `text` is what it looks for, from 0 to 1: a prompt, or a stretch of an answer with what was before.

        What computes long must do that in a thread of its own.
        """


@dataclass(frozen=True)
class Filter:
    """[filters.NAME]: what is looked for (one of `patterns`, `builtin` and `classifier`), where, and what follows.

    record: it is noted in the request's record; redact: the match is replaced as well; block: the prompt is refused, an
    answer ends before it. A classifier is `module:factory`; it matches from `threshold` on and sees an answer by
    sentences, at most `window` characters at a time.
    """

    name: str
    patterns: tuple[str, ...] = ()
    builtin: str | None = None
    classifier: str | None = None
    threshold: float = 0.5
    window: int = 200
    on: tuple[str, ...] = STAGES
    action: str = "block"
    replacement: str = "[removed]"
    tenants: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    compiled: tuple[Pattern, ...] = field(init=False, default=(), compare=False, repr=False)
    judge: Classifier | None = field(init=False, default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        where = f"[filters.{self.name}]"
        if ":" in self.name:
            raise InvalidRequest(f"the name of {where} must have no colon")
        check_names(where, "patterns", self.patterns)
        for name in ("tenants", "models"):
            if getattr(self, name) is not None:
                check_names(where, name, getattr(self, name))
        if sum((bool(self.patterns), self.builtin is not None, self.classifier is not None)) != 1:
            raise InvalidRequest(f"{where} must have one of patterns, builtin and classifier")
        if self.builtin is not None and self.builtin not in BUILTIN:
            raise InvalidRequest(f"builtin of {where} must be one of {', '.join(BUILTIN)}, got {self.builtin!r}")
        if self.action not in ACTIONS:
            raise InvalidRequest(f"action of {where} must be one of {', '.join(ACTIONS)}, got {self.action!r}")
        if not isinstance(self.on, tuple) or not self.on or not set(self.on) <= set(STAGES):
            raise InvalidRequest(f"on of {where} must be of {', '.join(STAGES)}, got {self.on!r}")
        if not isinstance(self.replacement, str):
            raise InvalidRequest(f"replacement of {where} must be a text, got {self.replacement!r}")
        check_number(where, "threshold", self.threshold)
        if type(self.window) is not int or self.window < 1:
            raise InvalidRequest(f"window of {where} must be an integer of 1 or more, got {self.window!r}")
        compiled = BUILTIN[self.builtin] if self.builtin else tuple(Pattern(text) for text in self.patterns)
        object.__setattr__(self, "compiled", compiled)
        if self.classifier is not None:
            object.__setattr__(self, "judge", load(where, self.classifier)())

    def applies(self, stage: str, tenant: str, model: str) -> bool:
        """Whether it looks at this stage of this request."""
        return (
            stage in self.on
            and (self.tenants is None or tenant in self.tenants)
            and (self.models is None or model in self.models)
        )

    def note(self, stage: str) -> str:
        """What the record says of a match."""
        return f"{stage}:{self.name}:{self.action}"


def load(where: str, path: str) -> Any:
    """The object at `module:name`. Raises InvalidRequest naming the table that asks for it."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidRequest(f"{where} names {path!r}, which cannot be loaded: {error}") from None


DEFAULT = ("credentials", "cards")
"""What is looked for, and only recorded, where no [filters] are configured."""


def read_filters(content: Mapping[str, Any]) -> tuple[Filter, ...]:
    """The filters of the parsed TOML, in their order; an empty [filters] is none at all."""
    if "filters" not in content:
        return tuple(Filter(name, builtin=name, action="record") for name in DEFAULT)
    table = table_of(content, "filters")
    given = {"compiled", "judge"}
    for name in table:
        if given & table_of(table, name, "filters.").keys():
            raise InvalidRequest(f"[filters.{name}] has an unknown key")
    return tuple(read_into(Filter, f"[filters.{name}]", table[name], name=name) for name in table)
