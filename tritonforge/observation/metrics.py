"""All metric families of the decoder, in one place; docs/metrics.md is written from this list and compared with it.

Dashboards, alerts, the probe and the reporter read it. It knows no Triton type.
"""

from tritonforge.observation.metric_family import MetricFamily
from tritonforge.observation.metrics_engine import ENGINE_FAMILIES
from tritonforge.observation.metrics_health import HEALTH_FAMILIES
from tritonforge.observation.metrics_requests import REQUEST_FAMILIES
from tritonforge.observation.step_meter import COUNTS, SECONDS, SHARES

FAMILIES: tuple[MetricFamily, ...] = (*REQUEST_FAMILIES, *ENGINE_FAMILIES, *HEALTH_FAMILIES)

REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LENGTHS = (*COUNTS, 16384, 32768)
STEP_BUCKETS = {"seconds": SECONDS, "ratio": SHARES}
REQUEST_BUCKETS = {"seconds": REQUEST_SECONDS}

DEFAULT_BUCKETS: dict[str, tuple[float, ...]] = {
    family.name: STEP_BUCKETS.get(family.unit, COUNTS) if family.bins else REQUEST_BUCKETS.get(family.unit, LENGTHS)
    for family in FAMILIES
    if family.kind == "histogram"
}
"""Upper bounds of each histogram, where a contract gives no others."""

AREAS = ("requests", "latency", "tokens", "kv cache", "speculation", "engine", "health")


def table() -> str:
    """All families as Markdown tables, one an area."""
    return "\n\n".join(f"## {area.capitalize()}\n\n{_rows(area)}" for area in AREAS)


def _rows(area: str) -> str:
    lines = ["| family | kind | unit | labels | meaning | vLLM |", "|---|---|---|---|---|---|"]
    lines += [
        f"| `{family.name}` | {family.kind}{'*' if family.bins else ''} | {family.unit} | {_labels(family)} "
        f"| {family.help} | {f'`{family.vllm}`' if family.vllm else '-'} |"
        for family in FAMILIES
        if family.area == area
    ]
    return "\n".join(lines)


def _labels(family: MetricFamily) -> str:
    if not family.labels:
        return "-"
    if len(family.labels) > 1 or not family.values:
        return ", ".join(f"`{label}`" for label in family.labels)
    return f"`{family.labels[0]}`: {', '.join(value for (value,) in family.values)}"


if __name__ == "__main__":
    print(table())
