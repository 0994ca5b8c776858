"""The search for capacity: the highest rate at which a contract holds, and the knee of the curve. Pure.

`search` asks for one trial after the other; it knows neither servers nor files, so it is tested with made-up ones.
The idea is MLPerf's Server scenario: the rate is raised as long as the same verdict passes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

PASS, INVALID, INCONCLUSIVE = "PASS", "INVALID", "INCONCLUSIVE"
LONGER = 2.0
"""A trial that decided nothing is repeated once, so many times as long."""
GROW = 2.0
DEEPEST = 2.0**-12
"""A contract that does not hold at this share of the highest rate that was tried holds nowhere."""


@dataclass(frozen=True)
class Trial:
    """One run at one rate. `status` is the verdict; times are milliseconds, over requests that ended ok.

    `purpose` says why it was run; `objectives` are the report's rows of the profile, `floors` those of rates.
    """

    rate: float
    purpose: str
    status: str
    requests: int
    achieved_rps: float
    output_tokens_per_s: float
    in_flight: float
    e2e_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p95_ms: float | None
    reasons: tuple[str, ...] = ()
    objectives: tuple[dict[str, Any], ...] = ()
    folder: str = ""

    @property
    def holds(self) -> bool:
        """Whether the contract was proven to hold. What was not proven does not count."""
        return self.status == PASS


Run = Callable[[float, str, float], Trial]
"""run(rate, purpose, longer) -> the trial."""


@dataclass
class Search:
    """What was found. `capacity` None: the contract held at no rate that was tried, down to `lowest`.

    `upper` is the lowest rate above capacity that did not hold; `confirmed` says that capacity passed twice, the second
    time with other arrivals. `limited_by`: None, "measurement" when the trial above could not be trusted,
    "max_rate" or "max_trials" when the search was ended by them.
    """

    capacity: float | None = None
    upper: float | None = None
    confirmed: bool = False
    limited_by: str | None = None
    lowest: float | None = None
    trials: list[Trial] = field(default_factory=list)


def significant(rate: float) -> float:
    """Three significant digits: a rate that people can repeat."""
    return float(f"{rate:.3g}")


class Searcher:
    """One search. `tolerance` is the relative width at which it ends: 0.1 finds the capacity within 10%.

    It does not look below `floor`: a sweep only wants to know whether a setting beats another.
    """

    def __init__(self, run: Run, *, tolerance: float, max_rate: float, max_trials: int, floor: float = 0.0):
        self._run, self._floor = run, floor
        self._tolerance, self._max_rate, self._max_trials = tolerance, max_rate, max_trials
        self.found = Search()
        self._verdicts: dict[float, Trial] = {}

    def search(self, start: float) -> Search:
        """Expand from `start` to a bracket, bisect it, confirm its lower end with fresh arrivals."""
        rate, purpose = significant(start), "start"
        while len(self.found.trials) < self._max_trials:
            self._try(rate, purpose)
            following = self._next()
            if following is None:
                break
            rate, purpose = following
        else:
            self.found.limited_by = "max_trials"
        self._conclude()
        return self.found

    def _try(self, rate: float, purpose: str) -> None:
        """Run a trial; an undecided or invalid one is run once more, longer, and then counts as it comes out."""
        trial = self._run(rate, purpose, 1.0)
        self.found.trials.append(trial)
        again = trial.status in (INCONCLUSIVE, INVALID)
        if again and len(self.found.trials) < self._max_trials:
            trial = self._run(rate, f"{purpose}, again: {trial.status}", LONGER)
            self.found.trials.append(trial)
        if purpose == "confirm" and trial.holds:
            self.found.confirmed = True
        self._verdicts[rate] = trial

    def _bracket(self) -> tuple[float | None, float | None]:
        """The lowest rate that does not hold, and the highest below it that does."""
        upper = min((rate for rate, trial in self._verdicts.items() if not trial.holds), default=None)
        lower = max(
            (rate for rate, trial in self._verdicts.items() if trial.holds and (upper is None or rate < upper)),
            default=None,
        )
        return lower, upper

    def _next(self) -> tuple[float, str] | None:
        """The next rate to try and why, None when the search is over."""
        lower, upper = self._bracket()
        if lower is None:
            rate = significant(upper / GROW)
            lowest = min(self._verdicts)
            least = max(self._floor, max(self._verdicts) * DEEPEST)
            return (rate, "lower") if least <= rate < lowest else None
        if upper is None:
            rate = significant(min(lower * GROW, self._max_rate))
            if rate > lower:
                return rate, "higher"
            self.found.limited_by = "max_rate"
        elif upper / lower > 1 + self._tolerance:
            rate = significant(math.sqrt(lower * upper))
            if lower < rate < upper:
                return rate, "bisect"
        return None if self.found.confirmed else (lower, "confirm")

    def _conclude(self) -> None:
        found = self.found
        found.capacity, found.upper = self._bracket()
        found.lowest = min(self._verdicts, default=None)
        confirmed = [
            t for t in found.trials if t.purpose.startswith("confirm") and t.holds and t.rate == found.capacity
        ]
        found.confirmed = bool(confirmed)
        if found.upper is not None and self._verdicts[found.upper].status == INVALID:
            found.limited_by = found.limited_by or "measurement"


def search(
    run: Run,
    start: float,
    *,
    tolerance: float = 0.1,
    max_rate: float = 1e5,
    max_trials: int = 14,
    floor: float = 0.0,
) -> Search:
    """The highest rate at which `run` passes, see Search and Searcher. Rates are requests per second."""
    searcher = Searcher(run, tolerance=tolerance, max_rate=max_rate, max_trials=max_trials, floor=floor)
    return searcher.search(start)


@dataclass(frozen=True)
class Knee:
    """The rate with the greatest power, and that power; `peak_tokens_per_s` is the highest throughput of any trial."""

    rate: float
    power: float
    peak_tokens_per_s: float


def power(trial: Trial) -> float | None:
    """Throughput / response time: output tokens per second over the median E2E in seconds. None without answers."""
    return trial.output_tokens_per_s / (trial.e2e_p50_ms / 1000) if trial.e2e_p50_ms else None


def find_knee(trials: Sequence[Trial]) -> Knee | None:
    """Where load stops paying: the tried rate with the greatest power (Kleinrock, "Power and deterministic rules of
    thumb for probabilistic problems in computer communications", ICC 1979).

    Below it throughput grows faster than response time, above it response time grows faster. Several trials of a rate
    count with their mean; trials whose measurement is invalid do not count. None without trials.
    """
    by_rate: dict[float, list[float]] = {}
    for trial in trials:
        found = power(trial)
        if found is not None and trial.status != INVALID:
            by_rate.setdefault(trial.rate, []).append(found)
    if not by_rate:
        return None
    means = {rate: sum(values) / len(values) for rate, values in by_rate.items()}
    best = max(means, key=lambda rate: (means[rate], -rate))
    peak = max(trial.output_tokens_per_s for trial in trials if trial.status != INVALID)
    return Knee(best, round(means[best], 3), peak)
