"""Reads a contract from TOML. Strict: unknown keys, and values this verifier does not implement, are refused by name.

Campaign and Locust file call `load_contract`; the meaning of the values is in contract.
"""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from loadtests.contract import (
    DEFINITIONS,
    EVERY,
    SCHEMA,
    Arrivals,
    Client,
    Contract,
    Expect,
    Lengths,
    Measurement,
    Objective,
    Phase,
    Profile,
    Statistics,
    Target,
)
from loadtests.fields import Fields, InvalidContract, read_all
from loadtests.metrics import METRICS, RATE, RATIO

MEASUREMENT = {
    "schedule_lag_p99_ms": (10.0, 0, 1e6),
    "client_cpu_max": (0.6, 0, 1),
    "issued_ratio_min": (0.98, 0, 1),
    "messages_per_s_max": (4000.0, 1, 1e9),
    "prompt_token_mismatch_max": (0.01, 0, 1),
    "output_token_mismatch_max": (0.0, 0, 1),
    "prefix_cached_max": (0.02, 0, 1),
    "statistics_matched_min": (0.99, 0, 1),
    "residual_min_ms": (-2.0, -1e6, 0),
    "residual_violations_max": (0.01, 0, 1),
    "in_flight_mismatch_max": (0.10, 0, 1),
    "counter_mismatch_max": (0.01, 0, 1),
    "single_token_max": (0.05, 0, 1),
}
"""Default and allowed range of each limit on the measurement itself."""
HIGHEST_QUANTILE = 0.99999


def load_contract(path: str | Path) -> Contract:
    """Read a contract file. Raises InvalidContract, naming the file and the key that breaks a rule."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidContract(f"contract {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidContract(f"contract {path} is not TOML: {error}") from error
    return parse_contract(document)


def parse_contract(document: dict[str, Any]) -> Contract:
    """The contract a TOML document means. Raises InvalidContract."""
    top = Fields(document, "")
    top.text("schema", choices=[SCHEMA])
    definitions = top.table("definitions", {})
    for key, meaning in DEFINITIONS.items():
        definitions.text(key, meaning, choices=[meaning])
    definitions.done()
    contract = Contract(
        name=top.name("name"),
        revision=top.integer("revision", low=1),
        target=_target(top.table("target")),
        statistics=_statistics(top.table("statistics", {})),
        measurement=_measurement(top.table("measurement", {})),
        profiles=read_all(top.tables("profiles"), _profile),
    )
    top.done()
    _distinct([profile.id for profile in contract.profiles], "profiles", "profile")
    return contract


def _distinct(names: list[str], where: str, what: str) -> None:
    if not names:
        raise InvalidContract(f"{where} must hold at least one {what}")
    for name in names:
        if names.count(name) > 1:
            raise InvalidContract(f"{where} must have distinct names, got {name!r} twice")


def _target(fields: Fields) -> Target:
    expect = fields.table("expect", {})
    target = Target(
        model=fields.text("model", "llm"),
        protocol=fields.text("protocol", "grpc-stream", choices=["grpc-stream"]),
        expect=Expect(
            release_digest=expect.text("release_digest", None),
            model_version=expect.text("model_version", None),
            server_version=expect.text("server_version", None),
        ),
    )
    expect.done()
    fields.done()
    return target


def _statistics(fields: Fields) -> Statistics:
    fields.text("method", "exact-binomial", choices=["exact-binomial"])
    statistics = Statistics(
        confidence=fields.number("confidence", 0.95, low=0.5, high=0.9999),
        slices=fields.integer("slices", 10, low=2, high=1000),
        resamples=fields.integer("resamples", 2000, low=100, high=100_000),
    )
    fields.done()
    return statistics


def _measurement(fields: Fields) -> Measurement:
    limits = {key: fields.number(key, value, low=low, high=high) for key, (value, low, high) in MEASUREMENT.items()}
    fields.done()
    return Measurement(**limits)


def _lengths(fields: Fields) -> Lengths:
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


def _phase(fields: Fields) -> Phase:
    return Phase(
        name=fields.text("name"),
        rate=fields.number("rate", low=0, high=1e5, open_low=True),
        seconds=fields.number("seconds", low=0, high=1e6, open_low=True),
        measured=fields.boolean("measured", True),
    )


def _arrivals(fields: Fields) -> Arrivals:
    process = fields.text("process", choices=["poisson", "constant", "gamma"])
    arrivals = Arrivals(
        process=process,
        seed=fields.integer("seed", low=0),
        shape=fields.number("shape", low=0, high=1000, open_low=True) if process == "gamma" else 1.0,
        phases=read_all(fields.tables("phases"), _phase),
    )
    fields.done()
    _distinct([phase.name for phase in arrivals.phases], fields.path("phases"), "phase")
    if not any(phase.measured for phase in arrivals.phases):
        raise InvalidContract(f"{fields.path('phases')} must hold at least one measured phase")
    return arrivals


def _client(fields: Fields) -> Client:
    client = Client(
        drain_s=fields.number("drain_s", 30.0, low=0),
        idle_gap_s=fields.number("idle_gap_s", 10.0, low=0, open_low=True),
        deadline_s=fields.number("deadline_s", 60.0, low=0, open_low=True),
        max_in_flight=fields.integer("max_in_flight", 64, low=1),
    )
    fields.done()
    return client


def _quantile(fields: Fields) -> float:
    quantile = fields.number("quantile", low=0.5, high=EVERY)
    if HIGHEST_QUANTILE < quantile < EVERY:
        rule = f"must be at most {HIGHEST_QUANTILE}, or {EVERY} (no request may exceed the limit)"
        raise InvalidContract(f"{fields.path('quantile')} {rule}, got {quantile}")
    return quantile


def _objective(fields: Fields) -> Objective:
    metric = fields.text("metric", choices=METRICS)
    kind, bound = METRICS[metric].kind, METRICS[metric].bound
    quantile = None if kind in (RATIO, RATE) else _quantile(fields)
    high = 1.0 if kind == RATIO else 1e12
    limit = fields.number(bound, low=0, high=high, open_low=kind == RATE)
    if kind == RATIO and limit in (0.0, 1.0):
        raise InvalidContract(f"{fields.path(bound)} must be in (0, 1): no number of samples proves {limit:g}")
    return Objective(
        id=fields.text("id"),
        metric=metric,
        quantile=quantile,
        le=limit if bound == "le" else None,
        ge=limit if bound == "ge" else None,
        phase=fields.text("phase", None),
    )


def _profile(fields: Fields) -> Profile:
    data = fields.table("data")
    data.text("source", "synthetic", choices=["synthetic"])
    profile = Profile(
        id=fields.name("id"),
        required=fields.boolean("required", True),
        prompt_tokens=_lengths(fields.table("prompt_tokens")),
        output_tokens=_lengths(fields.table("output_tokens")),
        data_seed=data.integer("seed", low=0),
        arrivals=_arrivals(fields.table("arrivals")),
        client=_client(fields.table("client", {})),
        objectives=read_all(fields.tables("objectives"), _objective),
    )
    data.done()
    _distinct([objective.id for objective in profile.objectives], fields.path("objectives"), "objective")
    measured = [phase.name for phase in profile.arrivals.phases if phase.measured]
    for objective in profile.objectives:
        if objective.phase is not None and objective.phase not in measured:
            rule = f"must be a measured phase ({', '.join(measured)})"
            raise InvalidContract(f"{fields.where}.objectives {objective.id}: phase {rule}, got {objective.phase!r}")
    return profile
