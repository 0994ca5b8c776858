"""What ended requests add to the metrics: the right durations, only of answers that ended well, in given buckets."""

import json

import pytest

from tritonforge.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    NotFound,
    Overloaded,
    ReleaseMismatch,
)
from tritonforge.generate_request import GenerateRequest
from tritonforge.launch.probe import PROBE_TENANT
from tritonforge.observation.metrics import DEFAULT_BUCKETS, FAMILIES
from tritonforge.observation.recorder import MOST_TENANTS, OTHER_TENANTS, VARIABLE, Recorder, load_buckets
from tritonforge.observation.request_record import RequestRecord, rejection
from tritonforge.timeline import Timeline

STATISTICS = {
    "prompt_tokens": 7,
    "completion_tokens": 10,
    "cached_tokens": 3,
    "queue_us": 1000,
    "prefill_us": 20_000,
    "first_emit_us": 500,
    "decode_us": 90_000,
    "decode_steps": 9,
}


def ended(outcome="length", *, tenant="", gap=12_000.0, error=None, begun=True, **statistics):
    asked = GenerateRequest((1, 2), 10, tenant=tenant)
    timeline = Timeline(0, scheduled_ns=1 if begun else None)
    told = None if error is not None else STATISTICS | statistics
    return RequestRecord(outcome, 9, "r-1", error, asked, timeline, told, gap)


def observed(record):
    """What a record adds to the histograms of requests."""
    values = {family.name: family.observe(record) for family in FAMILIES if family.observe}
    return {name: value for name, value in values.items() if value is not None}


def test_durations_are_seconds_of_the_phases_they_are_named_after():
    assert observed(ended()) == pytest.approx(
        {
            "tritonforge_ttft_seconds": 0.0215,
            "tritonforge_tpot_seconds": 0.010,
            "tritonforge_e2e_seconds": 0.111,
            "tritonforge_max_stall_seconds": 0.012,
            "tritonforge_queue_seconds": 0.001,
            "tritonforge_prefill_seconds": 0.020,
            "tritonforge_first_emit_seconds": 0.0005,
            "tritonforge_decode_seconds": 0.090,
            "tritonforge_decode_step_seconds": 0.010,
            "tritonforge_request_prompt_tokens": 7,
            "tritonforge_request_generation_tokens": 10,
        }
    )


def test_one_token_has_no_tpot_and_no_stall():
    names = observed(ended("stop", gap=None, completion_tokens=1, decode_steps=0, decode_us=0))
    assert len(names) == 8
    assert not names.keys() & {
        "tritonforge_tpot_seconds",
        "tritonforge_max_stall_seconds",
        "tritonforge_decode_step_seconds",
    }


def test_what_did_not_end_well_is_counted_and_not_timed():
    """Wrong: fast failures would make latencies look good; a client's own mistake would burn the error budget."""
    recorder = Recorder()
    recorder.record(cancelled := ended("cancelled"))
    for kind in (EngineFailure, DeadlineExceeded, Overloaded, InvalidRequest):
        recorder.record(ended("error", error=kind("why")))
    recorder.record(ended("cancelled", error=Cancelled("why")))
    assert observed(cancelled) == {} and observed(ended("error", error=EngineFailure("x"))) == {}
    assert recorder.finished == {"stop": 0, "length": 0, "cancelled": 2, "error": 2}
    assert recorder.errors["UNAVAILABLE"] == recorder.errors["INVALID_ARGUMENT"] == recorder.errors["INTERNAL"] == 1


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (RequestRecord("error", 9, error=InvalidRequest("top_k must be ...")), "invalid"),
        (ended("error", error=Overloaded("not started within queue_timeout_ms 5"), begun=False), "queue_timeout"),
        (RequestRecord("error", 9, error=Overloaded("the server is draining and takes no new requests")), "draining"),
        (ended("error", error=InvalidRequest("prompt must fit 3 KV blocks"), begun=False), None),
        (ended("error", error=Overloaded("the queue is full"), begun=False), None),
        (ended("error", error=InvalidRequest("no token could come next")), None),
        (RequestRecord("error", 9, error=NotFound("cancel: no unfinished request")), None),
        (ended(), None),
    ],
)
def test_a_rejection_has_one_reason_and_those_of_the_scheduler_are_not_counted_twice(record, reason):
    assert rejection(record) == reason


def test_tokens_are_those_that_clients_were_told_by_tenant_and_altogether():
    recorder = Recorder()
    for tenant in ("a", "a", ""):
        recorder.record(ended("stop", tenant=tenant))
    assert recorder.tokens == {"prompt": 21, "cached": 9, "completion": 30}
    assert recorder.tenant_tokens["a", "completion"] == 20 and recorder.tenant_tokens["none", "prompt"] == 7
    assert recorder.tenant_finished == {("a", "stop"): 2, ("none", "stop"): 1}


def test_tenants_have_a_bounded_number_of_series_however_many_names_clients_make_up():
    recorder = Recorder()
    for number in range(10 * MOST_TENANTS):
        recorder.record(ended(tenant=f"tenant-{number}"))
    assert len(recorder.tenant_finished) == MOST_TENANTS + 1
    assert recorder.tenant_finished[OTHER_TENANTS, "length"] == 9 * MOST_TENANTS
    assert recorder.finished["length"] == 10 * MOST_TENANTS


def test_a_probe_is_no_request():
    """Wrong: a service nobody uses would show traffic, and a campaign's counts would not be the server's."""
    recorder = Recorder()
    recorder.record(ended(tenant=PROBE_TENANT))
    assert recorder.num_probes == 1 and not recorder.take() and not any(recorder.finished.values())


def test_given_buckets_replace_the_default_ones_of_their_family(tmp_path, monkeypatch):
    path = tmp_path / "buckets.json"
    path.write_text(json.dumps({"tritonforge_ttft_seconds": [0.4, 1.5]}))
    monkeypatch.setenv(VARIABLE, str(path))
    buckets = load_buckets(DEFAULT_BUCKETS)
    assert buckets["tritonforge_ttft_seconds"] == (0.4, 1.5)
    assert set(buckets) == set(DEFAULT_BUCKETS) and len(buckets["tritonforge_tpot_seconds"]) > 10


@pytest.mark.parametrize("content", ['{"tritonforge_ttft": [1]}', '{"tritonforge_ttft_seconds": [2, 1]}', "[1]", "{"])
def test_wrong_buckets_are_refused_by_file(tmp_path, monkeypatch, content):
    path = tmp_path / "buckets.json"
    path.write_text(content)
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(ReleaseMismatch, match=r"buckets\.json"):
        load_buckets(DEFAULT_BUCKETS)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(NotFound, match=r"none\.json cannot be read"):
        load_buckets(DEFAULT_BUCKETS)
