"""The one thread that tells metrics port, request log and traces what the decoder did. No stream waits for it.

Only what changed is told: a call into Triton goes to the server and back, 12 microseconds with the interpreter's lock
held. Triton's histograms take one value a call, so those of steps and tokens are told as counters, by the bucket and
once a second: their cost does not grow with the speed of the engine. It knows no Triton type: triton.py gives it one.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from tritonforge.loop import EngineLoop
from tritonforge.observation.health import Health
from tritonforge.observation.metric_family import Bins, Kind, LabelValues, MetricFamily, View
from tritonforge.observation.metrics import DEFAULT_BUCKETS, FAMILIES
from tritonforge.observation.recorder import Recorder, load_buckets
from tritonforge.observation.request_record import RequestRecord
from tritonforge.streams import JOIN_S

REPORT_S = 0.1
"""Pause between two reports."""
BINS_EVERY = 10
"""Reports from one telling of step histograms to the next."""

log = logging.getLogger(__name__)

Labels = Mapping[str, str]
Consume = Callable[[RequestRecord], None]


class Metric(Protocol):
    """One series on the metrics port."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


class Registered(Protocol):
    """A family on the metrics port; when it is let go of, it disappears."""

    def metric(self, labels: Labels, buckets: Sequence[float] | None = None) -> Metric: ...


Register = Callable[[str, str, Kind], Registered]


class Values:
    """A gauge or counter, told when it has changed; a series appears with its first value, or at once at 0."""

    def __init__(self, family: MetricFamily, labels: Labels, register: Register) -> None:
        self._family, self._labels = family, labels
        self._registered = register(family.name, family.help, family.kind)
        self._metrics: dict[LabelValues, Metric] = {}
        self._told: dict[LabelValues, float] = {}
        for values in family.values or (() if family.labels else ((),)):
            self._series(values)

    def tell(self, view: View) -> None:
        """Read the family and tell what has changed."""
        read = self._family.read(view)
        for values, value in (read if self._family.labels else {(): read}).items():
            if value != self._told.get(values):
                metric = self._series(values)
                if self._family.kind == "gauge":
                    metric.set(value)
                else:
                    metric.increment(value - self._told[values])
                self._told[values] = value

    def _series(self, values: LabelValues) -> Metric:
        if values not in self._metrics:
            labels = {**self._labels, **dict(zip(self._family.labels, values, strict=True))}
            self._metrics[values] = self._registered.metric(labels)
            self._told[values] = 0.0
        return self._metrics[values]


class Buckets:
    """A histogram of steps, told as the counters that a histogram is made of."""

    def __init__(self, family: MetricFamily, bins: Bins, labels: Labels, register: Register) -> None:
        self._bins = bins
        self._families = [register(f"{family.name}_{part}", family.help, "counter") for part in BUCKET_PARTS]
        bounds = [*(f"{bound:.16g}" for bound in bins.bounds), "+Inf"]
        buckets, total, count = self._families
        self._metrics = [buckets.metric({**labels, "le": bound}) for bound in bounds]
        self._metrics += [total.metric(labels), count.metric(labels)]
        self._told = [0.0] * len(self._metrics)

    def tell(self) -> None:
        """Tell what has been added."""
        total, counts = self._bins.sum, self._bins.counts.copy()
        cumulated = list(accumulate(counts))
        values = [*cumulated, total, cumulated[-1]]
        for index, (metric, value) in enumerate(zip(self._metrics, values, strict=True)):
            if value != self._told[index]:
                metric.increment(value - self._told[index])
                self._told[index] = value


BUCKET_PARTS = ("bucket", "sum", "count")


class Reporter:
    """See the module's docstring. In its thread `consumers` are handed each ended request, and `look` is called.

    Raises NotFound or ReleaseMismatch when the histograms' buckets are wrong.
    """

    def __init__(
        self,
        loop: EngineLoop,
        labels: Labels,
        recorder: Recorder,
        register: Register,
        health: Health,
        consumers: Sequence[Consume] = (),
        look: Callable[[], None] = lambda: None,
    ) -> None:
        bounds = load_buckets(DEFAULT_BUCKETS)
        self._view, self._consumers, self._look = View(loop, recorder, health), consumers, look
        self._values = [Values(family, labels, register) for family in FAMILIES if family.read]
        self._buckets: list[Buckets] = []
        self._observed: list[tuple[Callable[[RequestRecord], float | None], Metric]] = []
        self._held: list[Registered] = []
        for family in FAMILIES:
            if family.bins:
                loop.meter.use_buckets(family.bins, bounds[family.name])
                self._buckets.append(Buckets(family, getattr(loop.meter, family.bins), labels, register))
            elif family.observe:
                self._held.append(register(family.name, family.help, family.kind))
                self._observed.append((family.observe, self._held[-1].metric(labels, bounds[family.name])))
        self._reports = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-reporter", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def stop(self) -> None:
        """Report once more and end the thread; it is not waited for longer than JOIN_S."""
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while not self._stop.wait(REPORT_S):
            self._report_safely()
        self._reports = 0
        self._report_safely()

    def _report_safely(self) -> None:
        try:
            self.report()
        except Exception:
            log.exception("a report failed")

    def report(self) -> None:
        """Tell all that has happened since the last report."""
        for record in self._view.recorder.take():
            for consume in (self._observe, *self._consumers):
                _safely(consume, record)
        for family in self._values:
            _safely(family.tell, self._view)
        if self._reports % BINS_EVERY == 0:
            _safely(self._look)
            for buckets in self._buckets:
                _safely(buckets.tell)
        self._reports += 1

    def _observe(self, record: RequestRecord) -> None:
        for observe, metric in self._observed:
            value = observe(record)
            if value is not None:
                metric.observe(value)


def _safely(tell: Callable[..., None], *what: object) -> None:
    """What cannot be told costs neither the rest of a report nor requests; a full disk is not even worth a line."""
    try:
        tell(*what)
    except OSError:
        pass
    except Exception:
        log.exception("a part of a report failed: %s", getattr(tell, "__qualname__", tell))
