"""What the metrics port is told: exactly what the decoder did, once, and only when it has changed."""

from types import SimpleNamespace

import pytest

from tests.unit.test_recorder import ended
from tritonforge.errors import Overloaded
from tritonforge.observation.metric_family import Bins
from tritonforge.observation.metrics import DEFAULT_BUCKETS, FAMILIES
from tritonforge.observation.metrics_engine import waiting_by_reason
from tritonforge.observation.recorder import Recorder
from tritonforge.observation.reporter import BINS_EVERY, Reporter
from tritonforge.observation.step_meter import StepMeter

LABELS = {"model": "decoder", "version": "1"}


class Port:
    """Stands for Triton's metrics port: series by name and labels, and how often each was told."""

    def __init__(self):
        self.values, self.observed, self.calls = {}, {}, []

    def register(self, name, help, kind):
        return SimpleNamespace(metric=lambda labels, buckets=None: Series(self, name, labels))

    def value(self, name, **labels):
        return self.values[f"tritonforge_{name}", *sorted((LABELS | labels).items())]


class Series:
    def __init__(self, port, name, labels):
        self.port, self.key = port, (name, *sorted(labels.items()))
        port.values[self.key] = 0.0

    def increment(self, value):
        assert value > 0, self.key
        self.port.calls.append(self.key)
        self.port.values[self.key] += value

    def set(self, value):
        self.port.calls.append(self.key)
        self.port.values[self.key] = value

    def observe(self, value):
        self.port.observed.setdefault(self.key[0], []).append(value)


def scheduler(**changes):
    values = {
        "num_running": 2,
        "num_waiting": 3,
        "blocks": SimpleNamespace(num_free=5, num_blocks=8),
        "waiting": SimpleNamespace(usage=0.25, num_preempted=1),
        "config": SimpleNamespace(max_num_seqs=2),
        "budget_was_spent": False,
        "num_refused": dict.fromkeys(("never fits", "queue full", "pushed out"), 0),
        "kv_cache_usage": 0.375,
    }
    counters = ("num_generated_tokens", "num_preemptions", "num_prefix_queries", "num_prefix_hits")
    drafts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    return SimpleNamespace(**values | dict.fromkeys((*counters, *drafts), 0) | changes)


class Refused(dict):
    def __missing__(self, key):
        return 0


@pytest.fixture
def told():
    """A reporter whose thread does not run: a port, a recorder and a loop to do things with."""
    port, recorder = Port(), Recorder()
    loop = SimpleNamespace(scheduler=scheduler(num_refused=Refused()), meter=StepMeter())
    health = SimpleNamespace(reasons={}, seen_s=0, last_token_s=0, started_s=5.0)
    reporter = Reporter(loop, LABELS, recorder, port.register, health)
    return SimpleNamespace(
        port=port, recorder=recorder, loop=loop, health=health, reporter=reporter, report=reporter.report
    )


def test_every_family_has_one_source_and_a_name_that_prometheus_takes():
    for family in FAMILIES:
        assert sum(map(bool, (family.read, family.observe, family.bins))) == 1, family.name
        assert (family.kind == "histogram") == (family.read is None), family.name
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert all(len(values) == len(family.labels) for values in family.values)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_bounded_series_exists_before_anything_happened(told):
    """Wrong: an alert on a rate would miss the first error, and a panel would be empty."""
    for family in FAMILIES:
        for values in family.values if family.read else ():
            labels = dict(zip(family.labels, values, strict=True))
            assert told.port.value(family.name.removeprefix("tritonforge_"), **labels) == 0


def test_gauges_and_counters_are_what_the_loop_says(told):
    told.loop.scheduler.num_generated_tokens = 7
    told.report()
    assert told.port.value("num_requests_running") == 2 and told.port.value("kv_blocks_free") == 5
    assert told.port.value("generation_tokens_total") == 7
    told.loop.scheduler.num_generated_tokens = 9
    told.report()
    assert told.port.value("generation_tokens_total") == 9


def test_what_has_not_changed_is_not_told_again(told):
    """Wrong: each call holds the interpreter's lock, which the steps need."""
    told.report()
    told.port.calls.clear()
    for _ in range(3 * BINS_EVERY):
        told.report()
    assert told.port.calls == []


def test_a_request_is_observed_once_and_counted_by_how_it_ended(told):
    told.recorder.record(ended("stop", tenant="a"))
    told.recorder.record(ended("error", tenant="a", error=Overloaded("the queue is full"), begun=False))
    for _ in range(2):
        told.report()
    assert told.port.value("num_requests_finished_total", finish_reason="stop") == 1
    assert told.port.value("num_requests_finished_total", finish_reason="error") == 0
    assert told.port.value("request_errors_total", code="UNAVAILABLE") == 1
    assert told.port.value("tenant_requests_finished_total", tenant="a", finish_reason="stop") == 1
    assert told.port.observed["tritonforge_ttft_seconds"] == [pytest.approx(0.0215)]


def test_refusals_of_the_scheduler_are_rejections_under_their_reasons(told):
    told.loop.scheduler.num_refused = Refused({"queue full": 3, "pushed out": 1})
    told.report()
    assert told.port.value("requests_rejected_total", reason="queue_full") == 3
    assert told.port.value("requests_rejected_total", reason="pushed_out") == 1
    assert told.port.value("num_requests_refused_total") == 4


def test_a_step_histogram_is_cumulative_and_its_count_is_that_of_the_last_bucket(told):
    for gap_ms in (4, 4, 40, 20_000):
        told.loop.meter.token(gap_ms * 1_000_000)
    told.report()
    name = "inter_token_latency_seconds"
    bounds = [*(f"{bound:.16g}" for bound in DEFAULT_BUCKETS[f"tritonforge_{name}"]), "+Inf"]
    buckets = [told.port.value(f"{name}_bucket", le=bound) for bound in bounds]
    assert buckets == sorted(buckets) and buckets[-1] == 4 == told.port.value(f"{name}_count")
    assert told.port.value(f"{name}_bucket", le="0.005") == 2 and told.port.value(f"{name}_bucket", le="0.05") == 3
    assert told.port.value(f"{name}_sum") == pytest.approx(20.048)


def test_a_bound_belongs_to_the_bucket_below_it():
    """As in Prometheus, where a bucket is `le`: a limit that is just met is met."""
    bins = Bins((1, 2))
    for value in (1, 1.5, 2, 3):
        bins.add(value)
    assert bins.counts == [1, 2, 1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_running": 2}, {"seats": 2, "preempted": 1}),
        ({"num_running": 1, "budget_was_spent": True}, {"token_budget": 2, "preempted": 1}),
        ({"num_running": 1}, {"kv_blocks": 2, "preempted": 1}),
        ({"num_waiting": 0}, {}),
    ],
)
def test_everybody_who_waits_waits_for_one_reason(changes, expected):
    counts = waiting_by_reason(scheduler(**changes))
    assert {reason: count for reason, count in counts.items() if count} == expected


def test_reasons_for_not_being_ready_come_and_go(told):
    told.health.reasons = {"stalled": "a step has taken 4.0 s"}
    told.report()
    assert told.port.value("ready") == 0 and told.port.value("not_ready", reason="stalled") == 1
    told.health.reasons = {}
    told.report()
    assert told.port.value("ready") == 1 and told.port.value("not_ready", reason="stalled") == 0


def test_a_request_that_cannot_be_logged_costs_no_other_its_metrics(told):
    """Wrong: one request that the log or a trace cannot take would make counts and histograms differ for good."""

    def consume(record):
        raise ValueError("it cannot be encoded")

    told.reporter._consumers = [consume]
    for _ in range(2):
        told.recorder.record(ended("stop"))
    told.loop.scheduler.num_generated_tokens = 7
    told.report()
    assert len(told.port.observed["tritonforge_ttft_seconds"]) == 2
    assert told.port.value("generation_tokens_total") == 7


def test_one_family_that_cannot_be_told_hides_no_other(told):
    """Wrong: a gauge that cannot be read freezes all that are listed after it, and nobody sees it."""

    def tell(view):
        raise ValueError("it cannot be read")

    told.reporter._values[0].tell = tell
    told.health.reasons = {"stalled": "a step has taken 4 s"}
    told.report()
    assert told.port.value("not_ready", reason="stalled") == 1
