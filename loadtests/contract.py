"""The acceptance contract: what a service promises for each workload profile. Values only; contract_toml reads them.

The hash of a contract is taken over its meaning (all values, defaults included), not over its spelling.
"""

import dataclasses
from dataclasses import dataclass

from loadtests.fields import InvalidContract
from loadtests.workload import Arrivals, Client, Data, Fault, Lengths, Phase, QualityItem, Retry, Tenant
from tritonforge.release import digest_of

__all__ = ["Arrivals", "Client", "Contract", "Lengths", "Objective", "Phase", "Profile", "Tenant"]

SCHEMA = "tritonforge.contract/1"

DEFINITIONS = {
    "clock": "monotonic",
    "latency_origin": "scheduled",
    "ttft": "first_token",
    "tpot": "(last_token - first_token) / (tokens - 1)",
    "e2e": "last_token",
    "max_stall": "longest_gap_between_token_responses",
    "denominator": "issued",
    "censored": "miss",
    "shed": "miss",
    "single_token": "not_applicable",
    "intentional_cancel": "excluded",
    "quality": "checked_answer_of_issued",
}
"""What this verifier means by its words. A contract may repeat them, to be readable alone; other values are refused."""

EVERY, EVERY_PROVES = 1.0, 0.95
"""A quantile of EVERY: no request may exceed the limit, one that does fails the objective. No sample can prove that of
all requests, so a run without one passes when it proves, at the contract's confidence, a share of EVERY_PROVES."""


@dataclass(frozen=True)
class Expect:
    """Identity of what must have been measured; None is not compared.

    `release_digest` is compared with what the server tells, or else with the release folder given to the campaign.
    """

    release_digest: str | None
    model_version: str | None
    server_version: str | None


@dataclass(frozen=True)
class Target:
    """The served model and how it is called. The address is no part of a contract."""

    model: str
    protocol: str
    expect: Expect


@dataclass(frozen=True)
class Statistics:
    """`confidence` of each PASS and each FAIL; `slices` and `resamples` of the block bootstrap of rates."""

    confidence: float
    slices: int
    resamples: int


@dataclass(frozen=True)
class Measurement:
    """Limits on the measurement itself: a broken one makes the profile INVALID, whatever the service did."""

    schedule_lag_p99_ms: float
    client_cpu_max: float
    issued_ratio_min: float
    messages_per_s_max: float
    prompt_token_mismatch_max: float
    output_token_mismatch_max: float
    prefix_cached_max: float
    statistics_matched_min: float
    residual_min_ms: float
    residual_violations_max: float
    residual_ttft_p95_ms: float
    in_flight_mismatch_max: float
    counter_mismatch_max: float
    single_token_max: float
    batch_ratio_min: float


@dataclass(frozen=True)
class Cost:
    """Price of the machine that serves, per hour; `currency` is only a word."""

    per_hour: float
    currency: str


@dataclass(frozen=True)
class Objective:
    """One promise. Durations: `quantile` of the issued requests have `metric` <= `le`. All others: `le` or `ge`.

    A quantile of 1.0 has a meaning of its own, see EVERY. `phase` and `tenant` narrow it to the requests scheduled in
    that phase, of that tenant; None means all measured ones. Comparisons are with the phase `against`. Availability
    counts time slices of `slice_s` seconds in which at least `slice_min_good` of the requests ended ok. A count of 0
    is proven for a true rate of at most `max_true_rate`.
    """

    id: str
    metric: str
    quantile: float | None
    le: float | None
    ge: float | None
    phase: str | None
    tenant: str | None = None
    against: str | None = None
    slice_s: float | None = None
    slice_min_good: float | None = None
    max_true_rate: float | None = None


SYNTHETIC = Data("synthetic", 0)


@dataclass(frozen=True)
class Profile:
    """One workload with its promises. `measurement` replaces the contract's limits where the workload needs others.

    `options` are further generation options of all its requests.
    """

    id: str
    required: bool
    prompt_tokens: Lengths
    output_tokens: Lengths
    data_seed: int
    arrivals: Arrivals
    client: Client
    objectives: tuple[Objective, ...]
    protocol: str = "grpc-stream"
    data: Data = SYNTHETIC
    tenants: tuple[Tenant, ...] = ()
    retry: Retry | None = None
    fault: Fault | None = None
    options: tuple[tuple[str, bool | int | float | str], ...] = ()
    measurement: Measurement | None = None
    quality: tuple[QualityItem, ...] = ()

    def everyone(self) -> tuple[Tenant, ...]:
        """The tenants; a profile that names none has one without a name."""
        return self.tenants or (Tenant("", 1.0, None, self.prompt_tokens, self.output_tokens),)


@dataclass(frozen=True)
class Contract:
    """A parsed contract. `sha256` identifies its meaning."""

    name: str
    revision: int
    target: Target
    statistics: Statistics
    measurement: Measurement
    profiles: tuple[Profile, ...]
    cost: Cost | None = None

    @property
    def sha256(self) -> str:
        meaning = dataclasses.asdict(self)
        for phase in (phase for profile in meaning["profiles"] for phase in profile["arrivals"]["phases"]):
            if not phase["repeat"]:
                del phase["repeat"]  # the hash of a contract without repeats is what it was before there were any
        return digest_of({"schema": SCHEMA, "definitions": DEFINITIONS, **meaning})

    def within(self, profile: Profile) -> "Contract":
        """This contract with the profile's own limits on the measurement, where it has any."""
        if profile.measurement is None:
            return self
        return dataclasses.replace(self, measurement=profile.measurement)

    def profile(self, profile_id: str) -> Profile:
        """The profile with this id; InvalidContract when there is none."""
        for profile in self.profiles:
            if profile.id == profile_id:
                return profile
        known = ", ".join(profile.id for profile in self.profiles)
        raise InvalidContract(f"profile must be one of {known}, got {profile_id!r}")
