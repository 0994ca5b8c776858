"""Is the measurement to be trusted? Checks of records against schedule, contract limits and the server's own account.

The verdict calls `check_profile`; a broken check makes a profile INVALID, whatever its numbers say. Pure functions.
"""

import itertools
from collections import Counter

from loadtests import metrics
from loadtests.account import counters_agree, one_model_version, statistics_agree
from loadtests.carried_out import profile_was_carried_out
from loadtests.checks import Check, first_sent_ns, issued, limited
from loadtests.contract import Contract, Profile
from loadtests.provenance import started_together
from loadtests.records import CANCELLED, NOT_ISSUED, OK, ProfileRun, Record, ShardReport
from loadtests.schedule import build_schedule, schedule_sha256

EARLY_NS = 1_000_000
SLOT_FIELDS = ("phase", "measured", "prompt_tokens", "output_tokens", "tenant", "item")
IN_FLIGHT_SLACK = 0.5
STILL_MAX = 0.01


def check_profile(contract: Contract, profile: Profile, run: ProfileRun) -> tuple[Check, ...]:
    """All checks of one profile's measurement, in a fixed order."""
    checks = [
        _load_was_issued(run),
        _workers_all_reported(run),
        started_together(run),
        _records_match_schedule(profile, run),
        _records_are_consistent(run),
        _guard_not_reached(profile, run),
    ]
    of_client = (_client_had_cpu, _message_rate, _issued_ratio, _in_flight)
    checks.append(_sent_on_time(contract, profile.arrivals.repeats, run))
    checks += [check(contract, run) for check in (*of_client, counters_agree, one_model_version)]
    return (*checks, *profile_was_carried_out(profile, run), *statistics_agree(contract, profile, run))


def _load_was_issued(run: ProfileRun) -> Check:
    measured = sum(record.measured for record in issued(run))
    return Check(
        "load", measured > 0, f"{measured} measured requests were issued" + ("" if measured else ": empty run")
    )


def _workers_all_reported(run: ProfileRun) -> Check:
    """Each shard has exactly one end line, of a finished walk, and as many records as it says."""
    records = Counter(record.shard for record in run.records)
    expected = max((shard.of for shard in run.shards), default=1)
    seen = Counter(shard.shard for shard in run.shards)
    lost = [shard for shard in range(expected) if seen[shard] != 1]
    foreign = sorted(set(records) - set(seen))
    cut = [shard.shard for shard in run.shards if records[shard.shard] != shard.requests or shard.of != expected]
    stopped = [shard.shard for shard in run.shards if not shard.finished]
    for shards, problem in (
        (lost, "have no end line, or two: a worker was lost"),
        (foreign, "have records but no end line: a worker was lost"),
        (cut, "do not hold the records they say"),
        (stopped, "were stopped before the end of the schedule"),
    ):
        if shards:
            return Check("workers", False, f"shards {shards} of {expected} {problem}")
    return Check("workers", True, f"{expected} of {expected} workers reported to the end")


def _records_match_schedule(profile: Profile, run: ProfileRun) -> Check:
    """Every slot of the schedule has exactly one record, with its time, phase and lengths; nothing else exists."""
    slots = {slot.index: slot for slot in build_schedule(profile)}
    wanted = schedule_sha256(list(slots.values()))
    if any(shard.schedule_sha256 != wanted for shard in run.shards):
        return Check("schedule", False, "a worker walked another schedule than the contract's")
    counts = Counter(record.index for record in run.records)
    twice = [index for index, count in counts.items() if count > 1]
    missing, foreign = sorted(set(slots) - set(counts)), sorted(set(counts) - set(slots))
    for found, problem in ((twice, "recorded twice"), (missing, "without a record"), (foreign, "of no slot")):
        if found:
            return Check("schedule", False, f"{len(found)} requests {problem}, the first is {min(found)}")
    for record in run.records:
        slot = slots[record.index]
        found = (record.scheduled_ns, *(getattr(record, name) for name in SLOT_FIELDS))
        if found != (slot.at_ns, *(getattr(slot, name) for name in SLOT_FIELDS)):
            return Check("schedule", False, f"request {record.index} is not the one its slot describes")
        if record.cancel_ns is not None and not slot.is_cancelled:
            return Check("schedule", False, f"request {record.index} was cancelled, its slot says nothing of it")
        if len(record.attempts) >= (profile.retry.max_attempts if profile.retry else 1):
            return Check("schedule", False, f"request {record.index} was sent more often than the profile retries")
    return Check("schedule", True, f"{len(slots)} slots, one record each, sha256 {wanted[:12]}")


def _contradiction(record: Record) -> str | None:
    """Why a record cannot be true, or None."""
    if record.sent_ns is None:
        return None if record.status == NOT_ISSUED and not record.chunks else "was never sent but has an outcome"
    times = [*(at for sent, end, _ in record.attempts for at in (sent, end)), record.sent_ns]
    times += [at for at, _ in record.chunks]
    if record.end_ns is None or sorted([*times, record.end_ns]) != [*times, record.end_ns]:
        return "has times that run backwards"
    if record.status == CANCELLED and not record.sent_ns <= (record.cancel_ns or 0) <= record.end_ns:
        return "was cancelled without being asked"
    if times[0] < record.scheduled_ns - EARLY_NS:
        return "was sent before it was due"
    if any(count < 1 for _, count in record.chunks):
        return "has a response with tokens that has no token"
    if record.status == OK and not record.item and record.received_tokens != record.output_tokens:
        return f"is ok with {record.received_tokens} of {record.output_tokens} tokens"
    return None


def _records_are_consistent(run: ProfileRun) -> Check:
    for record in run.records:
        problem = _contradiction(record)
        if problem:
            return Check("records", False, f"request {record.index} {problem}")
    return Check("records", True, f"{len(run.records)} records agree with themselves")


def _guard_not_reached(profile: Profile, run: ProfileRun) -> Check:
    dropped = sum(record.status == NOT_ISSUED for record in run.records)
    rule = f": {profile.client.max_in_flight} requests (max_in_flight) were open" if dropped else ""
    return Check("max_in_flight", not dropped, f"{dropped} requests were not issued{rule}")


def _sent_on_time(contract: Contract, repeats: int, run: ProfileRun) -> Check:
    """Of a hundred requests one may be sent later than the limit; of fewer, one. (Its lateness counts as latency.)

    Timers are many, so their p99 is judged as it is. And a client that stood still for a while has few timers to tell
    of it, but saw each answer late meanwhile: such times must not add up to more than STILL_MAX of the run, nor, were
    they all in one of its `repeats`, of that.
    """
    limit_ms = contract.measurement.schedule_lag_p99_ms
    delays = [metrics.client_delay_ns(record) for record in issued(run) if record.measured]
    late = sum(delay > limit_ms * 1e6 for delay in delays)
    timers = (metrics.percentile_ns([lag for shard in run.shards for lag in shard.lag_ns], 0.99) or 0) / 1e6
    still = repeats * max((_share_still(shard, limit_ms) for shard in run.shards), default=0.0)
    good = late <= max(1, len(delays) // 100) and timers <= limit_ms and still <= STILL_MAX
    text = (
        f"{late} of {len(delays)} requests were sent over {limit_ms:g} ms late; timers woke up late by {timers:.3g} ms "
        f"at p99; the client stood still for over {limit_ms:g} ms in {still:.2%} of the time"
    )
    rule = f" (one request of a hundred, {limit_ms:g} ms at p99 and {STILL_MAX:.0%} of the time may)"
    return Check("lag", good, text + ("" if good else rule))


def _share_still(shard: ShardReport, limit_ms: float) -> float:
    """The share of a worker's run in which its timers were late by more than the limit, all at a time."""
    still = sum(lag for lag in shard.lag_ns if lag > limit_ms * 1e6)
    return still / shard.wall_ns if shard.wall_ns > 0 else 0.0


def _client_had_cpu(contract: Contract, run: ProfileRun) -> Check:
    share = max((shard.cpu_ns / shard.wall_ns for shard in run.shards if shard.wall_ns), default=0.0)
    limit = contract.measurement.client_cpu_max
    return limited("client_cpu", "share of one core the busiest worker used:", share, limit)


def _message_rate(contract: Contract, run: ProfileRun) -> Check:
    per_second = Counter((r.shard, at // 1_000_000_000) for r in run.records for at, _ in r.chunks)
    limit = contract.measurement.messages_per_s_max
    return limited("messages", "responses in a worker's busiest second:", max(per_second.values(), default=0), limit)


def _issued_ratio(contract: Contract, run: ProfileRun) -> Check:
    measured = [record for record in run.records if record.measured]
    sent = sum(record.sent_ns is not None for record in measured)
    ratio = sent / len(measured) if measured else 0.0
    return limited("issued", "issued over scheduled:", ratio, contract.measurement.issued_ratio_min, at_least=True)


def mean_in_flight(shard: ShardReport) -> float | None:
    """Time-weighted mean of the live counter's samples; None with fewer than two."""
    if len(shard.in_flight) < 2 or shard.in_flight[-1][0] <= shard.in_flight[0][0]:
        return None
    pairs = list(itertools.pairwise(shard.in_flight))
    area = sum((later[0] - earlier[0]) * earlier[1] for earlier, later in pairs)
    return area / (shard.in_flight[-1][0] - shard.in_flight[0][0])


def _in_flight(contract: Contract, run: ProfileRun) -> Check:
    """Little's law: what a live counter saw open must be what the records say was open."""
    worst, limit = 0.0, contract.measurement.in_flight_mismatch_max
    for shard in run.shards:
        seen = mean_in_flight(shard)
        if seen is None or not shard.wall_ns:
            continue
        own = [r for r in run.records if r.shard == shard.shard and r.sent_ns is not None and r.end_ns is not None]
        recorded = sum(r.end_ns - first_sent_ns(r) for r in own) / shard.wall_ns
        worst = max(worst, (abs(seen - recorded) - IN_FLIGHT_SLACK) / max(seen, recorded, 1e-9))
    return limited(
        "in_flight", "relative difference of open requests, counted live and recorded:", max(worst, 0), limit
    )
