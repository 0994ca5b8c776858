"""Repeats of a profile's load, one after the other with seeds of their own: how much do they differ? Pure.

contract_toml makes them; the judges pool their records, and widen what slices or requests of one repeat understate.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import fmean, stdev

from loadtests.records import Record
from loadtests.schedule import windows
from loadtests.workload import Arrivals


def repeated(arrivals: Arrivals, repeats: int) -> Arrivals:
    """The same phases so many times over. The first has the seeds of a load without repeats; a trace is sent again."""
    length = sum(phase.seconds for phase in arrivals.phases)
    phases = [dataclasses.replace(phase, repeat=k) for k in range(repeats) for phase in arrivals.phases]
    trace = [dataclasses.replace(x, at_s=x.at_s + k * length) for k in range(repeats) for x in arrivals.trace]
    return dataclasses.replace(arrivals, phases=tuple(phases), trace=tuple(trace))


def by_repeat(arrivals: Arrivals, records: Sequence[Record]) -> list[list[Record]]:
    """The records of each repeat, by when they were due."""
    ends = {window.phase.repeat: window.end_ns for window in windows(arrivals)}
    parts: list[list[Record]] = [[] for _ in ends]
    for record in records:
        parts[next((k for k, end in ends.items() if record.scheduled_ns < end), len(parts) - 1)].append(record)
    return parts


def between(values: Sequence[float], confidence: float) -> tuple[float, ...]:
    """(low, high) of a mean by Student's t over the repeats, each side at `confidence`; () with fewer than two.

    What all requests of one repeat share, such as a slow moment of the machine, shows only here.
    """
    if len(values) < 2:
        return ()
    reach = student_t(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - reach, fmean(values) + reach


def student_t(share: float, df: int) -> float:
    """The quantile of Student's t below which `share` (at least 0.5) lies, by bisection of its exact distribution."""
    low, high = 0.0, 1e7
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, df) < share else (low, middle)
    return high


def _t_below(t: float, df: int) -> float:
    """P(T <= t) for t >= 0 and whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    cosine, odd = math.cos(angle), df % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(2 + odd, df - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    beyond = math.sin(angle) * total if df > 1 else 0.0
    return (1 + (2 / math.pi * (angle + beyond) if odd else beyond)) / 2
