"""What a metric of the decoder is, and where its value comes from. The families themselves are listed in metrics.py."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # the sources import this module
    from tritonforge.loop import EngineLoop
    from tritonforge.observation.health import Health
    from tritonforge.observation.recorder import Recorder
    from tritonforge.observation.request_record import RequestRecord

Kind = Literal["gauge", "counter", "histogram"]
Area = Literal["requests", "latency", "tokens", "kv cache", "speculation", "engine", "health"]
LabelValues = tuple[str, ...]


class View(NamedTuple):
    """All that gauges and counters are read from; each may be read from any thread."""

    loop: "EngineLoop"
    recorder: "Recorder"
    health: "Health"


class Bins:
    """How many values fell into each bucket, for values too many to be told one by one. One thread adds, any reads."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count `value`; a bound belongs to the bucket below it, as in Prometheus."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


Read = Callable[[View], "float | Mapping[LabelValues, float]"]


@dataclass(frozen=True)
class MetricFamily:
    """A Prometheus family, beside the labels that all have: model and version.

    It has one source. `read` gives a gauge's value or a counter's total so far; with `labels`, by their values.
    `observe` gives what a finished request adds to a histogram, None for nothing. `bins` names the StepMeter's
    attribute that holds a histogram of steps. `values` are the label values that exist from the start, at 0; a family
    with labels and without them gets new values while it runs, and they are bounded where they are made. `vllm` is the
    metric of vLLM that says the same, "" for none.
    """

    name: str
    kind: Kind
    help: str
    unit: str
    area: Area
    vllm: str = ""
    labels: tuple[str, ...] = ()
    values: tuple[LabelValues, ...] = field(default=(), repr=False)
    read: Read | None = None
    observe: "Callable[[RequestRecord], float | None] | None" = None
    bins: str | None = None


def one_label(*values: str) -> tuple[LabelValues, ...]:
    """The `values` of a family with one label."""
    return tuple((value,) for value in values)
