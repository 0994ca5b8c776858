"""Reads the load of a profile from TOML: lengths, arrivals, tenants, retries, faults. Strict.

contract_toml calls it; the meaning of the values is in workload.
"""

import dataclasses
from typing import Any

from loadtests.fields import Fields, InvalidContract, read_all
from loadtests.workload import (
    Arrivals,
    CancelPlan,
    Client,
    Fault,
    Lengths,
    Phase,
    Retry,
    Slow,
    Tenant,
    TraceLine,
)

PROCESSES = ("poisson", "constant", "gamma", "step", "trace", "batch")


def distinct(names: list[str], where: str, what: str) -> None:
    """Refuse an empty list of names, and one that holds a name twice."""
    if not names:
        raise InvalidContract(f"{where} must hold at least one {what}")
    for name in names:
        if names.count(name) > 1:
            raise InvalidContract(f"{where} must have distinct names, got {name!r} twice")


def read_lengths(fields: Fields) -> Lengths:
    dist = fields.text("dist", choices=["constant", "uniform", "lognormal"])
    if dist == "constant":
        value = fields.integer("value", low=1)
        lengths = Lengths(dist, value, value)
    else:
        low = fields.integer("min", low=1)
        lengths = Lengths(dist, low, fields.integer("max", low=low))
    if dist == "lognormal":
        mean = fields.number("mean", low=1)
        lengths = dataclasses.replace(lengths, mean=mean, sigma=fields.number("sigma", low=0, high=5))
    fields.done()
    return lengths


def _phase(fields: Fields, process: str) -> Phase:
    unloaded = fields.boolean("unloaded", False)
    count = fields.integer("count", low=1, high=100_000) if process == "batch" and not unloaded else 0
    rated = process not in ("trace", "batch") or unloaded
    seconds = fields.number("seconds", low=0, high=1e6, open_low=True)
    return Phase(
        name=fields.text("name"),
        rate=fields.number("rate", low=0, high=1e5, open_low=True) if rated else count / seconds,
        seconds=seconds,
        measured=fields.boolean("measured", not unloaded),
        tenants=tuple(fields.texts("tenants", [])),
        like=fields.text("like", ""),
        count=count,
        unloaded=unloaded,
    )


def _steps(fields: Fields) -> list[Phase]:
    """The phases of a staircase: `count` steps of `seconds`, the first at `start` requests per second."""
    start = fields.number("start", low=0, high=1e5, open_low=True)
    step = fields.number("step", low=0, high=1e5, open_low=True)
    seconds = fields.number("seconds", low=0, high=1e6, open_low=True)
    count = fields.integer("count", low=1, high=1000)
    fields.done()
    return [Phase(f"step-{k + 1}", round(start + k * step, 9), seconds, True) for k in range(count)]


def _trace_line(item: Any, where: str) -> TraceLine:
    numbers = isinstance(item, list) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in item)
    if not numbers or len(item) != 3 or not 0 <= item[0] < 1e6 or any(x < 0 or x != int(x) for x in item[1:]):
        raise InvalidContract(f"{where} must be [seconds, prompt_tokens, output_tokens], none negative, got {item!r}")
    return TraceLine(float(item[0]), int(item[1]), int(item[2]))


def _traced(phases: list[Phase], lines: tuple[TraceLine, ...], where: str) -> list[Phase]:
    """The phases with the rate that the trace has in each. A line after the last phase is refused, not dropped."""
    found, start, left = [], 0.0, 0
    for phase in phases:
        end = start + phase.seconds
        inside = sum(start <= line.at_s < end for line in lines)
        if not inside:
            raise InvalidContract(f"{where} must have a line in phase {phase.name}, seconds {start:g} to {end:g}")
        found.append(dataclasses.replace(phase, rate=inside / phase.seconds))
        start, left = end, left + inside
    if left != len(lines):
        raise InvalidContract(
            f"{where} must end with the last phase at {start:g} s, got {len(lines) - left} lines later"
        )
    return found


def read_arrivals(fields: Fields, tenants: tuple[Tenant, ...]) -> Arrivals:
    process = fields.text("process", choices=PROCESSES)
    tables = fields.tables("phases", [] if process == "step" else ...)
    phases = list(read_all(tables, lambda item: _phase(item, process)))
    if process == "step":
        phases += _steps(fields.table("steps"))
    lines: tuple[TraceLine, ...] = ()
    if process == "trace":
        where = fields.path("trace")
        lines = tuple(_trace_line(item, f"{where}[{k}]") for k, item in enumerate(fields.items("trace")))
        phases = _traced(phases, lines, where)
    arrivals = Arrivals(
        process=process,
        seed=fields.integer("seed", low=0),
        shape=fields.number("shape", low=0, high=1000, open_low=True) if process == "gamma" else 1.0,
        phases=tuple(phases),
        trace=lines,
    )
    fields.done()
    _check_phases(arrivals, tenants, fields.path("phases"))
    return arrivals


def _check_phases(arrivals: Arrivals, tenants: tuple[Tenant, ...], where: str) -> None:
    distinct([phase.name for phase in arrivals.phases], where, "phase")
    if not any(phase.measured for phase in arrivals.phases):
        raise InvalidContract(f"{where} must hold at least one measured phase")
    known, earlier = [tenant.id for tenant in tenants], []
    for phase in arrivals.phases:
        for tenant in phase.tenants:
            if tenant not in known:
                raise InvalidContract(f"{where} {phase.name}: tenants must be of the profile's, got {tenant!r}")
        if phase.like and phase.like not in earlier:
            raise InvalidContract(f"{where} {phase.name}: like must be an earlier phase, got {phase.like!r}")
        earlier.append(phase.name)


def read_client(fields: Fields) -> Client:
    client = Client(
        drain_s=fields.number("drain_s", 30.0, low=0),
        idle_gap_s=fields.number("idle_gap_s", 10.0, low=0, open_low=True),
        deadline_s=fields.number("deadline_s", 60.0, low=0, open_low=True),
        max_in_flight=fields.integer("max_in_flight", 64, low=1),
    )
    fields.done()
    return client


def _slow(fields: Fields) -> Slow:
    slow = Slow(fields.integer("after_tokens", low=1), fields.number("pause_s", low=0, high=3600, open_low=True))
    fields.done()
    return slow


def _cancel(fields: Fields) -> CancelPlan:
    plan = CancelPlan(
        share=fields.number("share", 1.0, low=0, high=1, open_low=True),
        after_ms=tuple(fields.integers("after_ms", [], low=0, high=3_600_000)),
        after_tokens=tuple(fields.integers("after_tokens", [], low=1, high=1_000_000)),
    )
    fields.done()
    if not plan.after_ms and not plan.after_tokens:
        raise InvalidContract(f"{fields.where} must say after_ms, after_tokens or both")
    return plan


def read_tenants(
    fields: list[Fields], prompt: Lengths | None, output: Lengths | None, where: str
) -> tuple[Tenant, ...]:
    """The tenants of a profile; without lengths of its own, a tenant has the profile's."""

    def one(item: Fields) -> Tenant:
        own = {name: read_lengths(item.table(name)) if item.has(name) else other for name, other in lengths.items()}
        for name, value in own.items():
            if value is None:
                raise InvalidContract(f"{item.path(name)} is missing, and the profile has none either")
        return Tenant(
            id=item.name("id"),
            share=item.number("share", 1.0, low=0, high=1, open_low=True),
            priority_class=item.integer("priority_class", None, low=0, high=9),
            slow=_slow(item.table("slow")) if item.has("slow") else None,
            cancel=_cancel(item.table("cancel")) if item.has("cancel") else None,
            **own,
        )

    lengths = {"prompt_tokens": prompt, "output_tokens": output}
    tenants = read_all(fields, one)
    distinct([tenant.id for tenant in tenants], where, "tenant")
    total = sum(tenant.share for tenant in tenants)
    if abs(total - 1) > 1e-9:
        raise InvalidContract(f"{where} must have shares that add up to 1, got {total:g}")
    return tenants


def read_retry(fields: Fields) -> Retry:
    retry = Retry(
        max_attempts=fields.integer("max_attempts", low=2, high=20),
        base_ms=fields.number("base_ms", 100.0, low=0, high=60_000, open_low=True),
        factor=fields.number("factor", 2.0, low=1, high=10),
    )
    fields.done()
    return retry


def read_fault(fields: Fields) -> Fault:
    fault = Fault(fields.text("action", choices=["kill_worker"]), fields.number("at_s", low=0, high=1e6))
    fields.done()
    return fault
