"""What is known of a request once it is over: the one record that audit, metrics and usage are made from.

The service makes one for every request that named a valid key, whatever became of it, and hands it to its observers.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Content:
    """What was asked and told, after filters: only of tenants that want it kept (audit_content)."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One request, without any of its content unless its tenant wants that kept.

    `outcome` is ok, refused (4xx), failed (5xx, also after the first token), disconnected, slow_client or revoked.
    Token counts are the decoder's own, those of an answer that was broken off too. `first_token_ms` is None without a
    token. Durations count from the arrival of the whole request; `started` is in seconds since 1970.

    `served_model`, `replica` and `version` say who answered, `fallback` why it was not the first choice (Served).
    `sampled`: the request is traced, by its client's wish or by chance. `filtered` names the rules of filters that
    matched, each once, as `stage:rule:action`.
    """

    request_id: str
    client_request_id: str
    endpoint: str
    tenant: str
    key_id: str
    model: str
    user: str
    stream: bool
    status: int
    outcome: str
    error_code: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reasons: tuple[str, ...]
    started: float
    first_token_ms: float | None
    duration_ms: float
    served_model: str = ""
    replica: str = ""
    version: str = ""
    fallback: str = ""
    tries: int = 1
    trace_id: str = ""
    span_id: str = ""
    parent_id: str = ""
    sampled: bool = False
    filtered: tuple[str, ...] = ()
    content: Content | None = None


Observer = Callable[[Record], None]
"""Called in the event loop after each request; it must not block."""


def tell(observers: Iterable[Observer], record: Record) -> None:
    """Hand `record` to every observer; one that fails is logged and disturbs nobody."""
    for observer in observers:
        try:
            observer(record)
        except Exception:
            log.exception("an observer of requests failed")
