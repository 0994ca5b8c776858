"""A report as text: the table that a terminal shows, and its cells, which the page and the exports share. Pure."""

from collections.abc import Sequence
from typing import Any

from loadtests.contract import EVERY
from loadtests.metrics import METRICS
from loadtests.outcomes import NOT_RUN


def table(report: dict[str, Any]) -> str:
    """The verdict as a terminal shows it: a row per objective, broken checks, one last line with the outcome."""
    lines = []
    for profile in report["profiles"]:
        if profile["status"] == NOT_RUN:
            continue
        load, counts = profile["load"], profile["counts"]
        issued = counts.get("scheduled", 0) - counts.get("not_issued", 0)
        lines.append(
            f"{profile['id']}: {issued} requests, {load['achieved_rps']:g}/s over {load['measured_s']:g} s measured, "
            f"{counts.get('ok', 0)} ok, {load['output_tokens_per_s']:g} output tokens/s, "
            f"{load['in_flight']['mean']:.1f} in flight"
        )
        rows = [("objective", "limit", "measured", "misses", "compliance", "verdict")]
        rows += [_row(objective) for objective in profile["objectives"]]
        lines += _aligned(rows)
    verdict = report["verdict"]
    lines += [f"  {reason}" for reason in verdict["reasons"]] if verdict["status"] != "PASS" else []
    lines.append(f"verdict: {verdict['status']} (exit code {verdict['exit_code']})")
    return "\n".join(lines)


def _row(objective: dict[str, Any]) -> tuple[str, ...]:
    return (
        objective["id"],
        limit_text(objective),
        value_text(objective),
        f"{sum(objective['misses'].values())}/{objective['n']}" if objective["bounds"] else "-",
        compliance_text(objective),
        objective["status"],
    )


def limit_text(objective: dict[str, Any]) -> str:
    """p95 ttft <= 400 ms, as people write it; "every" instead of p100."""
    name, _, unit = objective["metric"].rpartition("_")
    if unit != "ms":
        name, unit = objective["metric"], ""
    sign, limit = ("<=", objective["le"]) if objective["le"] is not None else (">=", objective["ge"])
    quantile = f"p{objective['quantile'] * 100:g} " if objective["quantile"] else ""
    quantile = "every " if objective["quantile"] == EVERY else quantile
    return f"{quantile}{name} {sign} {limit:g}{' ' + unit if unit else ''}"


def value_text(objective: dict[str, Any]) -> str:
    """The measured value with its unit; "unbounded" when the quantile lies among requests that never ended ok."""
    if objective["value"] is None:
        return "unbounded" if objective["n"] else "-"
    return _number(objective, objective["value"]) + (" ms" if objective["metric"].endswith("_ms") else "")


def interval_text(objective: dict[str, Any]) -> str:
    """The interval of the value, as exact as the value; nothing when a side is open."""
    if None in objective["interval"]:
        return ""
    return " to ".join(_number(objective, bound) for bound in objective["interval"])


def _number(objective: dict[str, Any], value: float) -> str:
    if METRICS[objective["metric"]].scale == 1:  # counts
        return f"{value:g}"
    digits = 4 if objective["metric"].endswith("_ratio") else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def compliance_text(objective: dict[str, Any]) -> str:
    """The side of the compliance bound that the decision rests on."""
    if not objective["bounds"]:
        return "-"
    low, high = objective["bounds"]
    return f"<= {high:.1%}" if objective["status"] == "FAIL" else f">= {low:.1%}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
