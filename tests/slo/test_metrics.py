"""Pinned formulas, on the example whose value differs from tool to tool, and on records without a value."""

from dataclasses import replace

import pytest
from slo_support import MS, SECOND, good_record

from loadtests import metrics
from loadtests.records import CANCELLED
from loadtests.schedule import Slot

SLOT = Slot(index=0, at_ns=SECOND, phase="p", measured=True, prompt_tokens=8, output_tokens=11)


@pytest.fixture
def record():
    """Due at 1 s, sent 1 s late, first token 0.5 s after that, 11 tokens, the last one 1.5 s after sending."""
    times = tuple((2 * SECOND + 500 * MS + k * 100 * MS, 1) for k in range(11))
    return replace(good_record(SLOT), sent_ns=2 * SECOND, chunks=times, end_ns=times[-1][0] + 100 * MS)


def test_latency_counts_from_the_schedule(record):
    """Wrong: a client that falls behind would make the service look fast."""
    assert metrics.ttft_ns(record) == 1500 * MS
    assert metrics.e2e_ns(record) == 2500 * MS
    assert metrics.tpot_ns(record) == 100 * MS
    assert metrics.client_delay_ns(record) == 1000 * MS


def test_tokens_are_counted_not_responses(record):
    """Wrong: TPOT would double where a response carries two tokens."""
    pairs = tuple((at, 2) for at, _ in record.chunks)
    assert metrics.tpot_ns(replace(record, chunks=pairs)) == 1000 * MS // 21


def test_one_stall_shows_where_a_mean_hides_it(record):
    moved = tuple((at + (2 * SECOND if k > 5 else 0), 1) for k, (at, _) in enumerate(record.chunks))
    stalled = replace(record, chunks=moved)
    assert metrics.max_stall_ns(stalled) == 2100 * MS
    assert metrics.max_stall_ns(record) == 100 * MS


def test_no_value_is_not_zero(record):
    empty = replace(record, chunks=(), statistics=None)
    for metric in metrics.METRICS.values():
        if metric.kind in (metrics.DURATION, metrics.COMPARISON):
            assert metric.value(empty) is None
    single = replace(record, chunks=record.chunks[:1])
    assert metrics.ttft_ns(single) is not None
    assert metrics.tpot_ns(single) is None
    assert metrics.max_stall_ns(single) is None
    assert metrics.tpot_ns(replace(record, chunks=((record.end_ns, 11),))) is None
    assert metrics.percentile_ns([], 0.5) is None
    assert metrics.ms(None) is None


def test_residuals_are_what_the_server_does_not_account_for(record):
    statistics = {**record.statistics, "queue_us": 100_000, "prefill_us": 300_000, "first_emit_us": 50_000}
    joined = replace(record, statistics={**statistics, "decode_us": 1_000_000})
    assert metrics.residual_ttft_ns(joined) == 50 * MS
    assert metrics.residual_e2e_ns(joined) == 100 * MS
    cancelled = replace(joined, status=CANCELLED)
    assert metrics.residual_e2e_ns(cancelled) == 200 * MS, "it decodes until its last response, which has no token"
    assert metrics.decode_step_ns(joined) == 100 * MS
    without_steps = replace(joined, statistics={**joined.statistics, "decode_steps": 0})
    assert metrics.decode_step_ns(without_steps) is None


def test_percentiles_are_values_that_occurred():
    values = [k * MS for k in range(1, 101)]
    assert metrics.percentile_ns(values, 0.95) == 95 * MS
    assert metrics.percentile_ns(values, 0.99) == 99 * MS
    assert metrics.percentile_ns(values[:1], 0.5) == MS


def test_tokens_after_the_window_do_not_count(record):
    """Wrong: a service that falls behind would keep its rate on paper."""
    assert metrics.tokens_in_slices([record], 2 * SECOND, 4 * SECOND, 2) == [5, 6]
    assert metrics.tokens_in_slices([record], 0, 3 * SECOND, 3) == [0, 0, 5]
    assert metrics.tokens_in_slices([replace(record, status="error")], 0, 9 * SECOND, 1) == [0]
