"""A contract's promises as indicators on the served decoder's own metrics: what Prometheus and OpenSLO exports share.

Pure. A promise that production metrics cannot carry is not dropped: it is returned with the reason why.
"""

from dataclasses import dataclass

from loadtests.contract import EVERY, Contract, Objective, Profile
from loadtests.metrics import DURATION, METRICS
from tritonforge.observation.metrics import DEFAULT_BUCKETS

PREFIX = "tritonforge"
HISTOGRAMS = {
    "ttft_ms": "ttft_seconds",
    "tpot_ms": "tpot_seconds",
    "max_stall_ms": "max_stall_seconds",
    "e2e_ms": "e2e_seconds",
    "queue_ms": "queue_seconds",
    "prefill_ms": "prefill_seconds",
    "first_emit_ms": "first_emit_seconds",
    "decode_step_ms": "decode_step_seconds",
}
"""The decoder's histogram of each duration. They observe requests that ended well, as the decoder sees them: the
tokenizer before it, the network and the client are not in them."""
FINISHED = f"{PREFIX}_num_requests_finished_total"
REFUSED = f"{PREFIX}_num_requests_refused_total"
NO_METRIC = {
    "compliance_ratio": "one request's promises are in separate histograms, so which requests kept all is not known",
    "output_tokens_per_s": "a rate under the contract's load says nothing about the load of the day",
}


@dataclass(frozen=True)
class Indicator:
    """One promise as counters of good and of all requests.

    `good` and `total` are PromQL with {window} where a range selector belongs; `target` is the promised share of good
    ones. `every` says that not one request may be bad: there is no budget to burn.
    """

    slo: str
    objective: Objective
    title: str
    target: float
    good: str
    total: str

    @property
    def every(self) -> bool:
        return self.objective.quantile == EVERY

    @property
    def budget(self) -> float:
        """The share of requests that may be bad."""
        return round(1 - self.target, 12)


@dataclass(frozen=True)
class Left:
    """A promise that is not exported."""

    objective: str
    reason: str


@dataclass(frozen=True)
class Indicators:
    """All promises of a profile: those with metrics, and those left out."""

    contract: Contract
    profile: Profile
    found: tuple[Indicator, ...]
    left: tuple[Left, ...]
    selector: str


def indicators_of(contract: Contract, profile: Profile, *, job: str | None = None) -> Indicators:
    """Every promise of a profile. `job` narrows the metrics to a Prometheus job.

    Production knows no profiles: the export is right where its traffic resembles this one.
    """
    selector = f'job="{_escaped(job)}"' if job else ""
    found, left = [], []
    for objective in profile.objectives:
        reason = why_not(profile, objective)
        if reason is None:
            found.append(_indicator(contract, profile, objective, selector))
        else:
            left.append(Left(objective.id, reason))
    return Indicators(contract, profile, tuple(found), tuple(left), selector)


def why_not(profile: Profile, objective: Objective) -> str | None:
    """Why production metrics cannot carry a promise, None when they can."""
    measured = [phase.name for phase in profile.arrivals.phases if phase.measured]
    if getattr(objective, "tenant", None) is not None:
        return f"the decoder's metrics do not tell tenant {objective.tenant!r} from others"
    if objective.phase is not None and measured != [objective.phase]:
        return f"it speaks of the phase {objective.phase!r} only, and production has no phases"
    if objective.metric in NO_METRIC:
        return NO_METRIC[objective.metric]
    if objective.metric != "error_ratio" and objective.metric not in HISTOGRAMS:
        return f"the decoder publishes no metric for {objective.metric}"
    return None


def _indicator(contract: Contract, profile: Profile, objective: Objective, selector: str) -> Indicator:
    slo = f"{contract.name}/{profile.id}/{objective.id}"
    refused, failed = _rate(REFUSED, selector), _rate(FINISHED, _join(selector, 'finish_reason="error"'))
    if METRICS[objective.metric].kind != DURATION:
        ended_well = _rate(FINISHED, _join(selector, 'finish_reason=~"stop|length"'))
        title = f"at most {objective.le:g} of all requests fail or are refused"
        total = f"{ended_well} + {failed} + {refused}"
        return Indicator(slo, objective, title, round(1 - objective.le, 12), ended_well, total)
    name = f"{PREFIX}_{HISTOGRAMS[objective.metric]}"
    good = _rate(f"{name}_bucket", _join(selector, _matcher(objective)))
    total = f"{_rate(f'{name}_count', selector)} + {failed} + {refused}"
    share = (
        "every request" if objective.quantile == EVERY else f"{objective.quantile:.4%}".rstrip("0%").rstrip(".") + "%"
    )
    title = f"{share} within {objective.metric.removesuffix('_ms').replace('_', ' ')} {objective.le:g} ms"
    return Indicator(slo, objective, title, objective.quantile, good, total)


def boundary(objective: Objective) -> str:
    """The limit in seconds as a bucket's `le` label: 16 digits, as Triton writes it (0.0875: 0.08749999999999999)."""
    return f"{objective.le / 1000:.16g}"


def _matcher(objective: Objective) -> str:
    """Selects the bucket that ends at the limit. Prometheus 3 stores a whole number with a decimal: 3 as 3.0."""
    label = boundary(objective)
    return f'le="{label}"' if "." in label else f'le=~"{label}([.]0)?"'


def _rate(name: str, selector: str) -> str:
    """Per-second rate over all servers. A counter that has not moved yet may not exist: that is no request."""
    return f"(sum(rate({name}{{{selector}}}[{{window}}])) or vector(0))"


def _join(*selectors: str) -> str:
    return ",".join(selector for selector in selectors if selector)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def histogram_buckets(contract: Contract) -> dict[str, list[float]]:
    """{family: upper bounds in seconds} of the histograms, so that every limit of the contract is a boundary.

    Without one a share is interpolated between two buckets, and an alert on it is a guess.
    """
    limits: dict[str, set[float]] = {name: set() for name in HISTOGRAMS}
    for profile in contract.profiles:
        for objective in profile.objectives:
            if objective.metric in limits:
                limits[objective.metric].add(objective.le / 1000)
    names = {metric: f"{PREFIX}_{HISTOGRAMS[metric]}" for metric in limits}
    return {names[metric]: sorted({*DEFAULT_BUCKETS[names[metric]], *found}) for metric, found in limits.items()}
