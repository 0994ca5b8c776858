"""Draws a capacity search: latency and throughput over the rate, with limits, capacity and knee. Pure."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from loadtests.capacity_search import Knee, Search, Trial
from loadtests.page import STYLE
from loadtests.svg import Chart

LOOK = ".fill.good{fill:var(--good)}.fill.unsure{fill:var(--unsure)}.line.good{stroke:var(--good)}"
LOOK += (
    ".good-text{fill:var(--good)}.line.knee{stroke:var(--unsure);stroke-dasharray:2 3}.knee-text{fill:var(--unsure)}"
)
DOT = {"PASS": "good", "FAIL": "bad", "INVALID": "unsure", "INCONCLUSIVE": "unsure"}
CURVES: tuple[tuple[str, str, str, Callable[[Trial], float | None]], ...] = (
    ("TTFT over the rate", "ttft_ms", "TTFT p95 in ms", lambda trial: trial.ttft_p95_ms),
    ("TPOT over the rate", "tpot_ms", "TPOT p95 in ms", lambda trial: trial.tpot_p95_ms),
)


def _across(chart: Chart, found: Search, knee: Knee | None) -> None:
    if found.capacity is not None:
        chart.vertical(found.capacity, "good", f"capacity {found.capacity:g}/s")
    if knee is not None and knee.rate != found.capacity:
        chart.vertical(knee.rate, "knee", f"knee {knee.rate:g}/s")


def _points(chart: Chart, trials: Sequence[Trial], value: Callable[[Trial], float | None]) -> None:
    chart.line([(t.rate, value(t)) for t in sorted(trials, key=lambda t: t.rate) if value(t) is not None], "measured")
    for trial in trials:
        if (at := value(trial)) is not None:
            title = f"{trial.rate:g}/s: {at:.1f}, {trial.status} ({trial.purpose})"
            chart.dot(trial.rate, at, DOT.get(trial.status, "unsure"), title, 4.5)


def latency_plot(
    found: Search, knee: Knee | None, metric: str, label: str, value: Callable[[Trial], float | None]
) -> str:
    """p95 over the rate, with the p95 limits that the contract has for the metric. SVG."""
    rows = [row for trial in found.trials for row in trial.objectives]
    limits = {row["le"] for row in rows if row["metric"] == metric and row["quantile"] == 0.95}
    values = [value(trial) for trial in found.trials if value(trial) is not None]
    top = max([*values, *(limit * 1.1 for limit in limits), 1.0])
    # An overloaded trial's latency would press all others against the axis.
    top = min(top, 3 * max(limits)) if limits else top
    chart = Chart((0, _right(found)), (0, top * 1.05), x_label="requests per second", y_label=label)
    _points(chart, found.trials, lambda trial: None if value(trial) is None else min(value(trial), top))
    for limit in sorted(limits):
        chart.horizontal(limit, "limit", f"limit {limit:g} ms")
    _across(chart, found, knee)
    return chart.render()


def throughput_plot(found: Search, knee: Knee | None) -> str:
    """Output tokens per second over the rate. Where the curve bends away from a line, requests begin to wait. SVG."""
    top = max([trial.output_tokens_per_s for trial in found.trials] or [1.0])
    chart = Chart((0, _right(found)), (0, top * 1.15), x_label="requests per second", y_label="output tokens/s")
    _points(chart, found.trials, lambda trial: trial.output_tokens_per_s)
    _across(chart, found, knee)
    return chart.render()


def _right(found: Search) -> float:
    return 1.05 * max([trial.rate for trial in found.trials] or [1.0])


def render(title: str, found: Search, knee: Knee | None, summary: str, facts: dict[str, Any]) -> str:
    """The page as text; it opens offline. All text that came from a file or a server is escaped."""
    figures = [
        _figure(name, f"p95 of requests that ended ok; {_LEGEND}.", latency_plot(found, knee, metric, label, value))
        for name, metric, label, value in CURVES
    ]
    figures.append(
        _figure(
            "Throughput over the rate", f"Tokens of requests that ended ok; {_LEGEND}.", throughput_plot(found, knee)
        )
    )
    rows = "".join(_row(number, trial) for number, trial in enumerate(found.trials, 1))
    names = ("", "requests/s", "why", "verdict", "requests", "tok/s", "in flight", "TTFT p95", "TPOT p95", "reasons")
    head = "".join(f"<th>{name}</th>" for name in names)
    known = "".join(f"<tr><td>{escape(k)}</td><td><code>{escape(str(v))}</code></td></tr>" for k, v in facts.items())
    body = (
        f"<h1>{escape(title)}</h1>"
        + "".join(f"<p>{escape(text)}</p>" for text in summary.splitlines())
        + f'<div class="plots">{"".join(figures)}</div><h2>Trials</h2>'
        f'<div class="wide"><table><tr>{head}</tr>{rows}</table></div><h2>Facts</h2><table>{known}</table>'
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}{LOOK}</style></head><body><main>{body}</main></body></html>"
    )


_LEGEND = "green held the contract, red did not, amber could not be judged"


def _figure(title: str, text: str, svg: str) -> str:
    return f"<figure><h3>{escape(title)}</h3><figcaption>{escape(text)}</figcaption>{svg}</figure>"


def _row(number: int, trial: Trial) -> str:
    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    cells = [
        str(number),
        f"{trial.rate:g}",
        escape(trial.purpose),
        f'<b class="{trial.status}-text">{trial.status}</b>',
    ]
    cells += [str(trial.requests), f"{trial.output_tokens_per_s:.1f}", f"{trial.in_flight:.1f}"]
    cells += [
        text(trial.ttft_p95_ms),
        text(trial.tpot_p95_ms),
        escape("" if trial.holds else "; ".join(trial.reasons[:3])),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
