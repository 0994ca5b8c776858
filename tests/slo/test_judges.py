"""Each kind of objective: what passes it, what fails it, what leaves it open; and what makes a run no measurement."""

from dataclasses import replace

import pytest
from slo_support import MS, SECOND, broken, change_part, failing, make_run, statuses

from loadtests import metrics
from loadtests.contract_toml import parse_contract
from loadtests.fields import InvalidContract
from loadtests.records import CANCELLED, OK, SHED, TIMEOUT
from loadtests.verdict import judge


def judged(document, objective, change=lambda r: r, *, server=None, fault_at=None, **profile):
    """The result of one objective over an honest run whose records passed through `change`."""
    document["profiles"][0] |= {"objectives": [{"id": "o", **objective}], **profile}
    contract = parse_contract(document)
    run = make_run(contract, change)
    if server is not None:
        run = change_part(run, server={**run.profiles[0].server, "gauges": server})
    if fault_at is not None:
        run = change_part(run, shards=tuple(replace(s, fault_ns=fault_at) for s in run.profiles[0].shards))
    return judge(contract, run).profiles[0]


def status(*given, **changes) -> str:
    return judged(*given, **changes).results[0].status


def every(k: int, change):
    return lambda record: change(record) if record.index % k == 0 else record


def test_a_count_of_zero_needs_a_sample_and_one_more_is_a_failure(document):
    """Wrong: "nobody hung" would pass a run of three requests, or forgive one that hung."""
    none = {"metric": "hung_requests", "le": 0}
    assert status(document, none) == "PASS"
    assert status(document, none, lambda r: failing(r, TIMEOUT) if r.index == 50 else r) == "FAIL"
    assert status(document, none | {"max_true_rate": 0.001}) == "INCONCLUSIVE"
    some = {"metric": "failed_requests", "le": 3}
    assert status(document, some, lambda r: failing(r) if r.index in (30, 40, 50) else r) == "PASS"
    assert status(document, some, every(4, failing)) == "FAIL"


def test_truncated_streams_count_as_not_said(document):
    cut = lambda r: replace(failing(r), code="TRUNCATED") if r.index == 50 else r  # noqa: E731
    assert status(document, {"metric": "truncated_without_error", "le": 0}, cut) == "FAIL"
    assert status(document, {"metric": "truncated_without_error", "le": 0}, every(3, failing)) == "PASS"


def test_availability_counts_bad_slices_not_bad_requests(document):
    """Wrong: an outage of a second among a thousand good requests would vanish in their ratio."""
    promise = {"metric": "availability", "ge": 0.9, "slice_s": 0.05, "slice_min_good": 0.5}
    assert status(document, promise) == "PASS"
    outage = lambda r: failing(r) if 1.0 <= r.scheduled_ns / SECOND < 2.0 else r  # noqa: E731
    assert status(document, promise, outage) == "FAIL"


def test_a_comparison_is_with_the_other_phase(document):
    """Wrong: the limit would be met by a slow baseline, or by requests that never ended."""
    arrivals = {"process": "poisson", "seed": 5, "phases": [
        {"name": "alone", "rate": 20.0, "seconds": 3, "measured": False},
        {"name": "steady", "rate": 40.0, "seconds": 2.5},
    ]}  # fmt: skip
    promise = {"metric": "ttft_against_phase", "quantile": 0.5, "le": 2.0, "phase": "steady", "against": "alone"}

    def slower(factor):
        def change(record):
            if record.phase != "steady":
                return record
            chunks = tuple((at + round((factor - 1) * 31 * MS), n) for at, n in record.chunks)
            return replace(record, chunks=chunks, end_ns=chunks[-1][0] + MS)

        return change

    assert status(document, promise, slower(1.0), arrivals=arrivals) == "PASS"
    assert status(document, promise, slower(1.9), arrivals=arrivals) == "PASS"
    assert status(document, promise, slower(2.2), arrivals=arrivals) == "FAIL"
    dead = judged(document, promise, lambda r: failing(r) if r.phase == "steady" else r, arrivals=arrivals)
    assert (dead.results[0].status, dead.results[0].value) == ("FAIL", None)


def test_tenants_are_judged_apart(document):
    """Wrong: a good majority would hide a bad minority."""
    document["profiles"][0]["tenants"] = [{"id": "gold", "share": 0.5}, {"id": "bulk", "share": 0.5}]
    document["profiles"][0]["arrivals"]["phases"][1]["seconds"] = 5
    bad = lambda r: failing(r) if r.tenant == "bulk" else r  # noqa: E731
    promise = {"metric": "ttft_ms", "quantile": 0.95, "le": 300}
    assert status(document, promise | {"tenant": "gold"}, bad) == "PASS"
    assert status(document, promise | {"tenant": "bulk"}, bad) == "FAIL"


def cancelled(record, *, after_ms=40, more_tokens=1):
    """The same request, cancelled on purpose 10 ms before its last response."""
    asked = record.sent_ns + 40 * MS
    chunks = tuple((at, n) for at, n in record.chunks if at <= asked)
    counted = {"completion_tokens": sum(n for _, n in chunks) + more_tokens}
    end = asked + after_ms * MS
    return replace(
        record, status=CANCELLED, cancel_ns=asked, chunks=chunks, end_ns=end, statistics=record.statistics | counted
    )


CANCELS = [{"id": "t", "cancel": {"share": 0.5, "after_ms": [40]}}]


def test_requests_cancelled_on_purpose_count_for_cancelling_and_for_nothing_else(document):
    """Wrong: a client that changes its mind would be a failure of the service, or improve its latency."""
    document["profiles"][0] |= {"tenants": CANCELS}
    document["profiles"][0]["arrivals"]["phases"][1]["seconds"] = 5
    half = every(2, cancelled)
    assert status(document, {"metric": "error_ratio", "le": 0.05}, half) == "PASS"
    assert status(document, {"metric": "cancel_to_end_ms", "quantile": 0.9, "le": 50}, half) == "PASS"
    assert status(document, {"metric": "cancel_to_end_ms", "quantile": 0.9, "le": 30}, half) == "FAIL"
    wasted = {"metric": "tokens_after_cancel", "quantile": 0.9, "le": 2}
    assert status(document, wasted, half) == "PASS"
    assert status(document, wasted, every(2, lambda r: cancelled(r, more_tokens=9))) == "FAIL"
    result = judged(document, wasted, half).results[0]
    assert 59 <= result.n <= 120


def test_a_cancel_that_the_client_never_asked_for_is_no_measurement(document):
    document["profiles"][0] |= {"tenants": CANCELS}
    profile = judged(document, {"metric": "error_ratio", "le": 0.5}, every(2, lambda r: replace(r, status=CANCELLED)))
    assert profile.status == "INVALID"
    assert any("was cancelled without being asked" in reason for reason in profile.reasons)


def tried(record, times=1):
    attempts = tuple((record.sent_ns + k * MS, record.sent_ns + k * MS + 10, SHED) for k in range(times))
    sent = attempts[-1][1]
    late = sent - record.sent_ns
    return replace(record, attempts=attempts, sent_ns=sent, chunks=tuple((at + late, n) for at, n in record.chunks),
                   end_ns=record.end_ns + late)  # fmt: skip


def test_retries_are_counted_and_their_time_belongs_to_the_request(document):
    """Wrong: a request that was refused twice and then served would look as fast as one that was served at once."""
    document["profiles"][0] |= {"retry": {"max_attempts": 4}}
    promise = {"metric": "attempts_per_request", "le": 1.5}
    assert status(document, promise, every(3, tried)) == "PASS"
    assert status(document, promise, every(1, tried)) == "FAIL"
    record = tried(make_run(parse_contract(document)).profiles[0].records[20], times=3)
    assert metrics.ttft_ns(record) == record.chunks[0][0] - record.scheduled_ns
    assert metrics.client_delay_ns(record) == MS, "the client was not late: the server refused it"


def test_price_and_rate_are_two_sides_of_one_measurement(document):
    document["cost"] = {"per_hour": 3.6, "currency": "USD"}
    rate = judged(document, {"metric": "output_tokens_per_s", "ge": 1}).results[0]
    price = judged(document, {"metric": "cost_per_million_output_tokens", "le": 1e6}).results[0]
    assert price.value == pytest.approx(3.6 / 3600 / rate.value * 1e6, rel=1e-3)
    assert price.interval[0] < price.value < price.interval[1]
    tenth = 3.6 / 3600 / rate.value * 1e5
    assert status(document, {"metric": "cost_per_million_output_tokens", "le": tenth}) == "FAIL"
    inputs = judged(document, {"metric": "input_tokens_per_s", "ge": 100}).results[0]
    assert (inputs.status, inputs.value > rate.value) == ("PASS", True), "prompts are twice as long as answers here"


GAUGES = {"before": {"kv_blocks_held": 3.0, "rss_bytes": 1 << 30, "tokens": 100.0}}


def test_facts_come_from_the_servers_gauges_and_are_demanded(document):
    """Wrong: a leak would pass because nobody looked."""
    leak, rss = {"metric": "kv_blocks_leaked", "le": 0}, {"metric": "server_rss_growth_mib", "le": 64}
    after = {"after": {"kv_blocks_held": 3.0, "rss_bytes": (1 << 30) + (65 << 20), "tokens": 100.0 + 6 * 123}}
    run = parse_contract(document)
    tokens = sum(r.output_tokens for r in make_run(run).profiles[0].records)
    after["after"]["tokens"] = 100.0 + tokens
    assert status(document, leak, server=GAUGES | after) == "PASS"
    assert status(document, rss, server=GAUGES | after) == "FAIL"
    after["after"]["kv_blocks_held"] = 4.0
    assert status(document, leak, server=GAUGES | after) == "FAIL"
    unseen = judged(document, leak)
    assert unseen.status == "INVALID"
    assert any("did not tell kv_blocks_held" in reason for reason in unseen.reasons)


def test_tokens_that_the_engine_counts_otherwise_are_no_measurement(document):
    """Wrong: another client's load on the same server would be taken for ours."""
    after = {"after": {"kv_blocks_held": 3.0, "tokens": 100_000.0}}
    profile = judged(document, {"metric": "error_ratio", "le": 0.05}, server=GAUGES | after)
    assert profile.status == "INVALID"
    assert any(reason.startswith("engine_tokens: ") for reason in profile.reasons)


FAULT = {"action": "kill_worker", "at_s": 1.0}


def fault_run(record):
    """Requests due from 1.0 to 1.6 s fail, 50 ms after they were sent; the others are served."""
    if SECOND <= record.scheduled_ns < 1.6 * SECOND:
        return replace(failing(record), end_ns=record.sent_ns + 50 * MS)
    return record


def test_recovery_is_when_requests_are_good_again_and_stay_good(document):
    document["profiles"][0]["arrivals"]["phases"][1]["seconds"] = 6
    given = {"fault": FAULT, "fault_at": SECOND}
    result = judged(document, {"metric": "recovery_s", "le": 1.0}, fault_run, **given).results[0]
    assert result.status == "PASS"
    assert result.value == pytest.approx(0.6, abs=0.1)
    assert status(document, {"metric": "recovery_s", "le": 0.2}, fault_run, **given) == "FAIL"
    never = judged(document, {"metric": "recovery_s", "le": 2}, every(2, failing), **given).results[0]
    assert (never.status, never.value) == ("FAIL", None)
    with pytest.raises(InvalidContract, match=r"le must leave the schedule 3 s to see it recovered, 5\.5 s follow"):
        judged(document, {"metric": "recovery_s", "le": 3}, **given)
    first = judged(document, {"metric": "fault_to_answer_ms", "le": 100}, fault_run, **given).results[0]
    assert first.status == "PASS"
    assert first.value < 100


def test_a_fault_that_was_not_done_proves_nothing(document):
    """Wrong: a service would pass for surviving what never happened."""
    profile = judged(document, {"metric": "hung_requests", "le": 0}, fault=FAULT)
    assert profile.status == "INVALID"
    assert any("kill_worker was not done" in reason for reason in profile.reasons)


def test_a_baseline_under_load_is_none(document):
    phases = [
        {"name": "unloaded", "rate": 40.0, "seconds": 1, "unloaded": True},
        {"name": "steady", "rate": 40.0, "seconds": 2.5},
    ]
    promise = {"metric": "error_ratio", "le": 0.05}
    arrivals = {"process": "poisson", "seed": 5, "phases": phases}
    assert judged(document, promise, arrivals=arrivals).status == "INVALID"  # 25 ms apart, each takes 56
    phases[0]["rate"] = 10.0
    assert judged(document, promise, arrivals=arrivals).status == "PASS"


def test_one_profiles_limits_do_not_change_anothers(document):
    """Wrong: a profile that may come late would excuse the client of all the others."""
    second = {**document["profiles"][0], "id": "second", "measurement": {"schedule_lag_p99_ms": 5}}
    document["profiles"].append(second)
    contract = parse_contract(document)
    verdict = judge(contract, make_run(contract, lambda r: replace(r, sent_ns=r.sent_ns + 10 * MS)))
    assert [profile.status for profile in verdict.profiles] == ["PASS", "INVALID"]


def test_more_between_server_and_client_than_allowed_is_no_measurement(document):
    """Wrong: a slow network or client would be charged to the service."""
    document["measurement"] |= {"residual_ttft_p95_ms": 1.0}
    contract = parse_contract(document)
    assert broken(judge(contract, make_run(contract))) == ["residual"]
    document["measurement"] |= {"residual_ttft_p95_ms": 50.0, "batch_ratio_min": 0.8}
    contract = parse_contract(document)
    run = make_run(contract)
    assert statuses(judge(contract, run))["ttft"] == "PASS"
    pairs = lambda r: replace(r, chunks=tuple((at, 2) for at, _ in r.chunks[::2])) if r.status == OK else r  # noqa: E731
    assert broken(judge(contract, make_run(contract, pairs))) == ["batch_ratio"]
