"""Observation: how a service lets itself be observed. It travels to the decoder as environment variables.

The launcher and the decoder's process both read it; it knows neither. Standard library only.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonforge.errors import InvalidRequest

LEVELS = ("debug", "info", "warning", "error")
PREFIX = "TRITONFORGE_"


@dataclass(frozen=True)
class Observation:
    """Settings of logs, traces and the watchdog.

    `log_level` is one of LEVELS; requests are logged at info. `log_content` adds prompts and answers to their lines.
    `request_log` is a file for these lines (None: the log of tritonserver). `otlp_endpoint` is the base URL of an OTLP
    collector over HTTP (None: no traces), `trace_ratio` the share of requests without a traceparent that are traced.
    `metrics` False turns metrics, logs and traces off, and the probe blind: to measure what they cost.
    A step that takes `stall_timeout_s` is hung, and has the server replaced. `log_control` is the file that changes the
    logging at run time.
    """

    log_level: str = "info"
    log_content: bool = False
    request_log: Path | None = None
    otlp_endpoint: str | None = None
    trace_ratio: float = 0.01
    stall_timeout_s: float = 30.0
    metrics: bool = True
    log_control: Path | None = None

    def __post_init__(self) -> None:
        if self.log_level not in LEVELS:
            raise InvalidRequest(f"log level must be one of {', '.join(LEVELS)}, got {self.log_level!r}")
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise InvalidRequest(f"OTLP endpoint must be an http:// or https:// URL, got {self.otlp_endpoint!r}")
        if not 0 <= self.trace_ratio <= 1:
            raise InvalidRequest(f"trace ratio must be in [0, 1], got {self.trace_ratio}")
        if not self.stall_timeout_s > 0:
            raise InvalidRequest(f"stall timeout must be above 0 seconds, got {self.stall_timeout_s}")

    def environment(self) -> dict[str, str]:
        """The variables of these settings; without those that are None."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values |= {name: value.absolute() for name, value in values.items() if isinstance(value, Path)}
        return {_variable(name): str(value) for name, value in values.items() if value is not None}

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Observation":
        """The settings that the variables say. Raises InvalidRequest naming one that says no such thing."""
        kinds = {"log_content": _bool, "metrics": _bool, "trace_ratio": float, "stall_timeout_s": float}
        kinds |= dict.fromkeys(("request_log", "log_control"), Path)
        given = {}
        for name in cls.__dataclass_fields__:
            text = environment.get(_variable(name))
            if text:
                try:
                    given[name] = kinds.get(name, str)(text)
                except ValueError:
                    raise InvalidRequest(f"{_variable(name)} has no meaning: {text!r}") from None
        return cls(**given)


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise ValueError
    return text.lower() in ("true", "1")
