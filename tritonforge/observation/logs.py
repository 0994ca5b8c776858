"""The decoder's log: JSON lines on the standard error, which tritonserver's log takes in, and one line a request.

Its level, and whether prompts and answers are told, can be changed while it serves: by the file that `tritonforge log`
writes. No content is logged unless it was asked for, also not in the text of errors.
"""

import json
import logging
import logging.handlers
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tritonforge.observation.log_control import changed_ns, read_control
from tritonforge.observation.observation import Observation
from tritonforge.observation.recorder import Recorder
from tritonforge.observation.request_record import RequestRecord
from tritonforge.text import Decode

ROOT = logging.getLogger("tritonforge")
requests = logging.getLogger("tritonforge.requests")
log = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """A record as one JSON object: time (UTC), level, logger, message, and the fields that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, ASCII: no message can end it or forge another."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class RequestLog:
    """Writes a line for each request, and looks whether the logging was changed."""

    def __init__(self, settings: Observation, recorder: Recorder, decode: Decode, labels: Mapping[str, str]) -> None:
        self._settings, self._recorder, self._decode, self._labels = settings, recorder, decode, labels
        self._control_ns: int | None = None
        _set_up(settings)
        self._apply(settings)

    def write(self, record: RequestRecord) -> None:
        """The line of a request that has ended."""
        if requests.isEnabledFor(logging.INFO):
            fields = request_fields(record, content=self._settings.log_content) | self._labels
            if self._settings.log_content and record.asked is not None:
                fields |= {"prompt": self._decode(record.asked.prompt_ids), "text": record.text}
            requests.info("request", extra={"fields": fields})

    def look(self) -> None:
        """Apply what was changed since the last look; what has no meaning is logged and changes nothing."""
        path = self._settings.log_control
        written_ns = None if path is None else changed_ns(path)
        if written_ns is not None and written_ns != self._control_ns:
            self._control_ns = written_ns
            try:
                wanted = read_control(path)
                self._apply(replace(self._settings, **{f"log_{name}": value for name, value in wanted.items()}))
            except (OSError, ValueError) as error:
                log.error("%s changes nothing: %s", path, error)

    def _apply(self, settings: Observation) -> None:
        if settings.log_level != self._settings.log_level or settings.log_content != self._settings.log_content:
            log.warning("logging at %s, content %s", settings.log_level, "on" if settings.log_content else "off")
        self._settings = settings
        ROOT.setLevel(settings.log_level.upper())
        self._recorder.keeps_text = settings.log_content


def request_fields(record: RequestRecord, *, content: bool) -> dict[str, Any]:
    """What is told of a request: ids, tenant, sizes, milliseconds, outcome; what it never had is absent."""
    fields: dict[str, Any] = {"event": "request", "request_id": record.request_id, "outcome": record.outcome}
    if record.error is not None:
        fields |= {"code": record.code, "error": _error_text(record, content=content)}
    if record.asked is not None:
        asked = record.asked
        fields |= {"tenant": asked.tenant, "priority_class": asked.priority, "stream": asked.stream, "n": asked.n}
        fields |= {"max_tokens": asked.max_tokens, "prompt_tokens": len(asked.prompt_ids)}
        fields |= {"traceparent": asked.traceparent} if asked.traceparent else {}
    if record.timeline is not None:
        fields |= _milliseconds(record.timeline.phases_us(record.ended_ns))
        fields["e2e_ms"] = round((record.ended_ns - record.timeline.arrived_ns) / 1e6, 3)
    if record.statistics is not None:
        fields |= {name: value for name, value in record.statistics.items() if not name.endswith("_us")}
    if record.longest_gap_us is not None:
        fields["longest_gap_ms"] = round(record.longest_gap_us / 1000, 3)
    return fields


def _milliseconds(phases_us: Mapping[str, int]) -> dict[str, float]:
    return {f"{name.removesuffix('_us')}_ms": us / 1000 for name, us in phases_us.items()}


def _error_text(record: RequestRecord, *, content: bool) -> str:
    """What the client was told; an option's value, which errors of rules end with, is content."""
    text = str(record.error)
    return text if content or record.code != "INVALID_ARGUMENT" else text.partition(", got ")[0]


def _set_up(settings: Observation) -> None:
    """Send the project's log to the standard error, and requests to a file of their own where one was named."""
    for logger, handler in (
        (ROOT, logging.StreamHandler()),
        (requests, None if settings.request_log is None else _file_handler(settings.request_log)),
    ):
        for old in list(logger.handlers):
            logger.removeHandler(old)
        if handler is not None:
            handler.setFormatter(JsonLines())
            logger.addHandler(handler)
            logger.propagate = False


def _file_handler(path: Path) -> logging.Handler:
    """Appends; opens the file anew when it was rotated."""
    return logging.handlers.WatchedFileHandler(path, encoding="utf-8")
