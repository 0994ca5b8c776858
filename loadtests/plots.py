"""The plots of a report: each takes records and returns inline SVG. What they show is said in the page beside them."""

from collections.abc import Callable, Sequence

from loadtests import metrics
from loadtests.binomial import compliance_bounds
from loadtests.contract import Contract, Objective, Profile
from loadtests.facts import fault_ns
from loadtests.metrics import DURATION, METRICS
from loadtests.outcomes import in_scope
from loadtests.records import CANCELLED, OK, ProfileRun, Record
from loadtests.report import worst
from loadtests.report_text import limit_text
from loadtests.schedule import windows
from loadtests.svg import Chart

PARTS: tuple[tuple[str, Callable[[Record], int | None]], ...] = (
    ("client", metrics.client_delay_ns),
    ("queue", metrics.queue_ns),
    ("prefill", metrics.prefill_ns),
    ("emit", metrics.first_emit_ns),
    ("residual", metrics.residual_ttft_ns),
)
"""TTFT from the scheduled time, in the order it passes: they add up to it exactly."""
BINS = ((0, 50), (50, 75), (75, 90), (90, 95), (95, 99), (99, 100))
BAND_POINTS = 48


def duration_objectives(profile: Profile) -> list[Objective]:
    return [objective for objective in profile.objectives if METRICS[objective.metric].kind == DURATION]


def ecdf(contract: Contract, objective: Objective, records: Sequence[Record]) -> str:
    """Share of issued requests within a duration, with the confidence band; the limit and the required share crossed.

    Requests that did not end ok never get there: the curve then stays below 1.
    """
    scope = in_scope(objective, records)
    metric = METRICS[objective.metric].value
    scale, ended_well = METRICS[objective.metric].scale, (CANCELLED if METRICS[objective.metric].part else OK)
    values = sorted(v / scale for r in scope if r.status == ended_well and (v := metric(r)) is not None)
    n = len(values) + sum(record.status != ended_well for record in scope)
    right = max([objective.le * 1.15, *values[-1:]]) * 1.02
    chart = Chart((0, right), (0, 1), x_label=axis_name(objective.metric), y_label="share")
    if n:
        step = max(1, len(values) // BAND_POINTS)
        ranks = sorted({0, *range(step, len(values) + 1, step), len(values)})
        at = [(0.0 if rank == 0 else values[rank - 1], rank) for rank in ranks] + [(right, len(values))]
        bounds = [(x, *compliance_bounds(n, n - rank, contract.statistics.confidence)) for x, rank in at]
        chart.band([(x, low) for x, low, _ in bounds], [(x, high) for x, _, high in bounds], "measured")
        chart.steps(
            [(0.0, 0.0), *((v, (k + 1) / n) for k, v in enumerate(values)), (right, len(values) / n)], "measured"
        )
    chart.vertical(objective.le, "limit", f"limit {objective.le:g}")
    chart.horizontal(objective.quantile, "limit", f"required {objective.quantile:g}")
    return chart.render()


def axis_name(metric: str) -> str:
    """ttft in ms, or tokens after cancel."""
    return f"{metric.removesuffix('_ms')} in ms" if metric.endswith("_ms") else metric.replace("_", " ")


def ttft_split(records: Sequence[Record]) -> str:
    """Mean TTFT of each percentile bin, split into what the client, the server's phases and the rest took."""
    told = [r for r in records if r.measured and r.status == OK and r.statistics is not None and r.chunks]
    told.sort(key=metrics.ttft_ns)
    bins = []
    for low, high in BINS:
        members = told[len(told) * low // 100 : len(told) * high // 100]
        if members:
            means = [(name, sum(part(r) for r in members) / len(members) / 1e6) for name, part in PARTS]
            bins.append((f"p{low} to p{high}", len(members), means))
    top = max((sum(max(value, 0) for _, value in means) for _, _, means in bins), default=1.0)
    chart = Chart((0, len(bins) or 1), (0, top * 1.12), x_label="requests by TTFT percentile", y_label="ms")
    for column, (label, count, means) in enumerate(bins):
        bottom = 0.0
        for name, value in means:
            height = max(value, 0.0)
            title = f"{label}: {name} {value:.1f} ms (mean of {count})"
            chart.bar((column + 0.18, column + 0.82), (bottom, bottom + height), name, title)
            bottom += height
        chart.label(column + 0.5, bottom + top * 0.04, f"{bottom:.0f}", "middle")
    svg = chart.render(x_ticks=[])
    names = "".join(
        f'<text class="tick" x="{chart.px(column + 0.5)}" y="{chart.height - 24}" text-anchor="middle">{label}</text>'
        for column, (label, _, _) in enumerate(bins)
    )
    return svg.replace("</svg>", names + "</svg>")


def in_flight(profile: Profile, records: Sequence[Record], fault: int | None = None) -> str:
    """Open requests over time; unmeasured phases are shaded, requests that did not end ok are marked where due.

    A `fault` (in nanoseconds) is marked, too, and requests that were cancelled on purpose, when they were.
    """
    issued = [record for record in records if record.sent_ns is not None and record.end_ns is not None]
    events = sorted([(r.sent_ns, 1) for r in issued] + [(r.end_ns, -1) for r in issued])
    points, count = [(0.0, 0.0)], 0
    for at, change in events:
        count += change
        points.append((at / 1e9, count))
    right = max([points[-1][0], windows(profile.arrivals)[-1].end_ns / 1e9])
    top = max(y for _, y in points)
    chart = Chart((0, right), (0, max(top * 1.15, 1)), x_label="seconds since the start", y_label="open requests")
    for window in windows(profile.arrivals):
        if not window.phase.measured:
            chart.bar((window.start_ns / 1e9, window.end_ns / 1e9), (0, chart.y1), "shade", window.phase.name)
            chart.label(window.start_ns / 1e9, chart.y1 * 0.96, f" {window.phase.name}")
    chart.steps(points, "measured")
    if fault is not None:
        chart.vertical(fault / 1e9, "limit", "fault")
    for record in issued:
        if record.status == CANCELLED:
            chart.dot(record.cancel_ns / 1e9, 0, "queue", f"{record.request_id}: cancelled on purpose", 3.5)
        elif record.status != OK:
            chart.dot(record.scheduled_ns / 1e9, 0, "bad", f"{record.request_id}: {record.status} {record.code}", 3.5)
    return chart.render()


def client_lag(contract: Contract, profile: Profile, records: Sequence[Record]) -> str:
    """How late each request was sent, over the time it was due, with the limit beyond which nothing is believed."""
    limit = contract.measurement.schedule_lag_p99_ms
    lags = [(r.scheduled_ns / 1e9, metrics.client_delay_ns(r) / 1e6, r) for r in records if r.sent_ns is not None]
    right = windows(profile.arrivals)[-1].end_ns / 1e9
    top = max([limit * 1.15, *(lag for _, lag, _ in lags)]) * 1.02
    chart = Chart((0, right), (0, top), x_label="due, seconds since the start", y_label="sent late by, ms")
    for at, lag, record in lags:
        chart.dot(at, max(lag, 0), "measured", f"{record.request_id}: {lag:.2f} ms late")
    chart.horizontal(limit, "limit", f"limit of p99: {limit:g} ms")
    return chart.render()


def waterfalls(records: Sequence[Record]) -> str:
    """The worst requests from their due time to their end, split as the server accounts for them."""
    rows = worst([record for record in records if record.measured])
    right = max([(r.end_ns - r.scheduled_ns) / 1e6 for r in rows], default=1.0)
    height = 54 + 24 * max(len(rows), 1)
    size = {"width": 1140, "height": height, "left": 150}
    chart = Chart((0, right * 1.02), (0, max(len(rows), 1)), x_label="ms since it was due", y_label="", **size)
    for position, record in enumerate(rows):
        y = len(rows) - 1 - position
        for name, start, end in _spans(record):
            chart.bar((start / 1e6, end / 1e6), (y + 0.2, y + 0.8), name, f"{name} {(end - start) / 1e6:.1f} ms")
        status = record.status if record.status == OK else f"{record.status} {record.code}"
        chart.name_row(y + 0.5, f"#{record.index} {status}")
    return chart.render(y_ticks=[])


def _spans(record: Record) -> list[tuple[str, int, int]]:
    """(part, start, end) in nanoseconds since the request was due. Without the server's account: waiting and tokens."""
    at, spans = 0, []
    end = record.end_ns - record.scheduled_ns
    if record.statistics is None or not record.chunks:
        first = metrics.ttft_ns(record)
        delay = metrics.client_delay_ns(record)
        spans = [("client", 0, delay), ("residual", delay, first if first is not None else end)]
        return [*spans, ("decode", first, end)] if first is not None else spans
    for name, part in PARTS:
        length = max(part(record), 0)
        spans.append((name, at, at + length))
        at += length
    return [*spans, ("decode", at, metrics.e2e_ns(record))]


def all_plots(contract: Contract, profile: Profile, run: ProfileRun) -> list[tuple[str, str, str]]:
    """(title, what it shows, SVG) of each plot of a profile."""
    records, found = run.records, []
    for objective in duration_objectives(profile):
        scope = " of ".join(name for name in (objective.tenant, objective.phase) if name)
        band = f"with its {contract.statistics.confidence:.0%} band"
        text = f"Share of issued requests{f' ({scope})' if scope else ''} within it, {band}."
        title = f"{objective.id}: {limit_text(vars(objective))}"
        found.append((title, text, ecdf(contract, objective, records)))
    found.append(("Where TTFT goes", "Mean of each percentile bin, by phase.", ttft_split(records)))
    found.append(
        (
            "Open requests",
            "Shaded: not measured. Red: did not end ok. Yellow: cancelled on purpose.",
            in_flight(profile, records, fault_ns(run)),
        )
    )
    found.append(("Client lag", "How late each request was sent.", client_lag(contract, profile, records)))
    return found
