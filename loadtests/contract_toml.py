"""Reads a contract from TOML. Strict: unknown keys, and values this verifier does not implement, are refused by name.

Campaign and Locust file call `load_contract`; the meaning of the values is in contract.
"""

from pathlib import Path
from typing import Any

from loadtests.contract import (
    DEFINITIONS,
    EVERY,
    SCHEMA,
    Contract,
    Cost,
    Expect,
    Measurement,
    Objective,
    Profile,
    Statistics,
    Target,
)
from loadtests.documents import read_document
from loadtests.fields import Fields, InvalidContract, read_all
from loadtests.metrics import METRICS, Metric
from loadtests.profile_rules import check_profile, refuse_lengths
from loadtests.prompts_toml import read_data, read_options, read_quality
from loadtests.repeats import repeated
from loadtests.workload import Lengths, Tenant
from loadtests.workload_toml import (
    distinct,
    read_arrivals,
    read_client,
    read_fault,
    read_lengths,
    read_retry,
    read_tenants,
)

__all__ = ["load_contract", "parse_contract", "read_document"]
PROTOCOLS = ("grpc-stream", "http-sse")
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
    "residual_ttft_p95_ms": (1e6, 0, 1e6),
    "batch_ratio_min": (0.0, 0, 1),
}
"""Default and allowed range of each limit on the measurement itself."""
MOST_REPEATS = 20
HIGHEST_QUANTILE = 0.99999
UNKNOWN_LENGTH = Lengths("constant", 0, 0)
"""Prompts and answers of a quality set are as long as they are."""


def load_contract(path: str | Path) -> Contract:
    """Read a contract file. Raises InvalidContract, naming the file and the key that breaks a rule."""
    return parse_contract(read_document(path))


def parse_contract(document: dict[str, Any]) -> Contract:
    """The contract a TOML document means. Raises InvalidContract."""
    top = Fields(document, "")
    top.text("schema", choices=[SCHEMA])
    definitions = top.table("definitions", {})
    for key, meaning in DEFINITIONS.items():
        definitions.text(key, meaning, choices=[meaning])
    definitions.done()
    target, statistics = _target(top.table("target")), top.table("statistics", {})
    repeats = statistics.integer("repeats", 1, low=1, high=MOST_REPEATS)
    contract = Contract(
        name=top.name("name"),
        revision=top.integer("revision", low=1),
        target=target,
        statistics=_statistics(statistics),
        measurement=(measurement := _measurement(top.table("measurement", {}))),
        cost=_cost(top.table("cost")) if top.has("cost") else None,
        profiles=read_all(top.tables("profiles"), lambda item: _profile(item, target.protocol, measurement, repeats)),
    )
    top.done()
    distinct([profile.id for profile in contract.profiles], "profiles", "profile")
    return contract


def _target(fields: Fields) -> Target:
    expect = fields.table("expect", {})
    target = Target(
        model=fields.text("model", "llm"),
        protocol=fields.text("protocol", "grpc-stream", choices=PROTOCOLS),
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


def _measurement(fields: Fields, given: Measurement | None = None) -> Measurement:
    """The limits on a measurement; those that are not given are `given`'s, or the defaults."""
    defaults = {key: default if given is None else getattr(given, key) for key, (default, *_) in MEASUREMENT.items()}
    limits = {key: fields.number(key, defaults[key], low=low, high=high) for key, (_, low, high) in MEASUREMENT.items()}
    fields.done()
    return Measurement(**limits)


def _cost(fields: Fields) -> Cost:
    cost = Cost(fields.number("per_hour", low=0, open_low=True), fields.text("currency"))
    fields.done()
    return cost


def _quantile(fields: Fields) -> float:
    quantile = fields.number("quantile", low=0.5, high=EVERY)
    if HIGHEST_QUANTILE < quantile < EVERY:
        rule = f"must be at most {HIGHEST_QUANTILE}, or {EVERY} (no request may exceed the limit)"
        raise InvalidContract(f"{fields.path('quantile')} {rule}, got {quantile}")
    return quantile


def _limit(fields: Fields, metric: Metric) -> float:
    if metric.is_share:
        limit = fields.number(metric.bound, low=0, high=1)
        if limit in (0.0, 1.0):
            rule = f"must be in (0, 1): no number of samples proves {limit:g}"
            raise InvalidContract(f"{fields.path(metric.bound)} {rule}")
        return limit
    return fields.number(metric.bound, low=0, high=1e12, open_low=metric.bound == "ge")


def _objective(fields: Fields) -> Objective:
    name = fields.text("metric", choices=METRICS)
    metric = METRICS[name]
    limit = _limit(fields, metric)
    sliced = metric.needs == "slices"
    return Objective(
        id=fields.text("id"),
        metric=name,
        quantile=_quantile(fields) if metric.has_quantile else None,
        le=limit if metric.bound == "le" else None,
        ge=limit if metric.bound == "ge" else None,
        phase=fields.text("phase", None),
        tenant=fields.text("tenant", None),
        against=fields.text("against") if metric.needs == "against" else None,
        slice_s=fields.number("slice_s", 10.0, low=0, open_low=True) if sliced else None,
        slice_min_good=fields.number("slice_min_good", 0.95, low=0, high=1, open_low=True) if sliced else None,
        max_true_rate=fields.number("max_true_rate", 0.05, low=1e-6, high=0.5) if metric.needs == "rate" else None,
    )


def _profile(fields: Fields, protocol: str, measurement: Measurement, repeats: int) -> Profile:
    data = read_data(fields.table("data"))
    named = fields.has("tenants")
    synthetic = data.source == "synthetic"
    lengths = {
        name: read_lengths(fields.table(name)) if fields.has(name) or (synthetic and not named) else None
        for name in ("prompt_tokens", "output_tokens")
    }
    tenants: tuple[Tenant, ...] = ()
    if named:
        tenants = read_tenants(fields.tables("tenants"), *lengths.values(), fields.path("tenants"))
    quality = read_all(fields.tables("quality"), read_quality) if not synthetic else ()
    if not synthetic:
        refuse_lengths(fields, lengths, tenants)
    profile = Profile(
        id=fields.name("id"),
        required=fields.boolean("required", True),
        prompt_tokens=lengths["prompt_tokens"] or (tenants[0].prompt_tokens if tenants else UNKNOWN_LENGTH),
        output_tokens=lengths["output_tokens"] or (tenants[0].output_tokens if tenants else UNKNOWN_LENGTH),
        data_seed=data.seed,
        data=data,
        arrivals=repeated(
            read_arrivals(fields.table("arrivals"), tenants),
            fields.integer("repeats", repeats, low=1, high=MOST_REPEATS),
        ),
        client=read_client(fields.table("client", {})),
        objectives=read_all(fields.tables("objectives"), _objective),
        protocol=fields.text("protocol", protocol, choices=PROTOCOLS),
        tenants=tenants,
        retry=read_retry(fields.table("retry")) if fields.has("retry") else None,
        fault=read_fault(fields.table("fault")) if fields.has("fault") else None,
        options=read_options(fields.table("options", {})),
        measurement=_measurement(fields.table("measurement"), measurement) if fields.has("measurement") else None,
        quality=quality,
    )
    check_profile(profile, fields)
    return profile
