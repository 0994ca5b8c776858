"""What ended requests add to the metrics: how they ended, their tokens, and whose they were.

The emitter's thread records, the reporter's takes what was recorded: a call into Triton costs more than sending one
token, so no stream waits for one. It knows no Triton type.
"""

import json
import os
import threading
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path

from tritonforge.errors import STATUS, NotFound, ReleaseMismatch
from tritonforge.observation.request_record import REASONS, SERVICE_FAILURES, RequestRecord, rejection

VARIABLE = "TRITONFORGE_HISTOGRAM_BUCKETS"
"""Environment variable of tritonserver and its stubs: the file given to `tritonforge serve --histogram-buckets`."""
MOST_TENANTS = 16
"""Tenants with series of their own; those that come later share the one of OTHER_TENANTS."""
OTHER_TENANTS = "other"
NO_TENANT = "none"


class Recorder:
    """Takes down ended requests; bounded, so that a reporter that stands still costs no memory.

    The totals are kept from the start and may be read from any thread. Probes are counted by themselves.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._ended: deque[RequestRecord] = deque(maxlen=limit)
        self.keeps_text = False
        """Whether records should hold the answers' texts; set by the request log."""
        self.finished = Counter(dict.fromkeys(REASONS, 0))
        self.errors = Counter(dict.fromkeys(STATUS, 0))
        self.rejected: Counter[str] = Counter()
        self.tokens = Counter(prompt=0, cached=0, completion=0)
        self.num_probes = 0
        self.tenant_finished: Counter[tuple[str, ...]] = Counter()
        self.tenant_tokens: Counter[tuple[str, str]] = Counter()
        self._tenants: dict[str, str] = {}
        self._lock = threading.Lock()  # the emitter's thread and Triton's own end requests

    def record(self, record: RequestRecord) -> None:
        """A request has ended."""
        with self._lock:
            self._record(record)

    def _record(self, record: RequestRecord) -> None:
        if record.is_probe:
            self.num_probes += 1
            return
        self._ended.append(record)
        if record.error is not None:
            self.errors[record.error.code] += 1
            why = rejection(record)
            if why is not None:
                self.rejected[why] += 1
        if record.error is None or record.code in SERVICE_FAILURES or record.outcome == "cancelled":
            self._finished(record)

    def _finished(self, record: RequestRecord) -> None:
        self.finished[record.outcome] += 1
        tenant = self._tenant(record.tenant)
        self.tenant_finished[tenant, record.outcome] += 1
        if record.statistics is not None:
            for kind in ("prompt", "cached", "completion"):
                self.tokens[kind] += record.statistics[f"{kind}_tokens"]
            for kind in ("prompt", "completion"):
                self.tenant_tokens[tenant, kind] += record.statistics[f"{kind}_tokens"]

    def _tenant(self, name: str) -> str:
        """The label of a tenant: clients choose the names, so only the first few become labels."""
        if name not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS:
                return OTHER_TENANTS
            self._tenants[name] = name or NO_TENANT
        return self._tenants[name]

    def take(self) -> list[RequestRecord]:
        """What was recorded since the last call, in order."""
        taken = []
        while self._ended:
            taken.append(self._ended.popleft())
        return taken


def load_buckets(defaults: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Upper bounds by family: `defaults`, or those of the file that VARIABLE names.

    Raises NotFound or ReleaseMismatch, naming the file, when it is not what `loadtests/export.py` writes.
    """
    if VARIABLE not in os.environ:
        return dict(defaults)
    path = Path(os.environ[VARIABLE])
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFound(f"histogram buckets {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ReleaseMismatch(f"histogram buckets {path} are not JSON: {error}") from None
    for name, bounds in given.items() if isinstance(given, dict) else [("it", given)]:
        valid = (
            isinstance(bounds, list) and bounds and all(type(bound) in (int, float) and bound > 0 for bound in bounds)
        )
        if name not in defaults or not valid or sorted(set(bounds)) != bounds:
            rule = "must map families of the decoder to rising bounds above 0"
            raise ReleaseMismatch(f"histogram buckets {path} {rule}, got {name}: {bounds!r}")
    return dict(defaults) | {name: tuple(bounds) for name, bounds in given.items()}
