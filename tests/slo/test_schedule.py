"""The schedule is a function of the contract alone: same seed, same slots, however many workers walk it."""

from dataclasses import replace
from itertools import pairwise

import pytest

from loadtests.contract import Lengths
from loadtests.contract_toml import parse_contract
from loadtests.fields import InvalidContract
from loadtests.prompts import Counter, build_prompts, exact_prompt
from loadtests.schedule import SECOND, build_schedule, schedule_sha256, shard_of, windows


def with_arrivals(contract, **changes):
    profile = contract.profiles[0]
    return replace(profile, arrivals=replace(profile.arrivals, **changes))


def test_same_seed_same_schedule(contract, document):
    """Wrong: a verdict could not be reproduced, and records could not be checked against the contract."""
    first, again = build_schedule(contract.profiles[0]), build_schedule(parse_contract(document).profiles[0])
    assert schedule_sha256(first) == schedule_sha256(again)
    assert schedule_sha256(build_schedule(with_arrivals(contract, seed=0))) != schedule_sha256(first)
    assert schedule_sha256(build_schedule(with_arrivals(contract, seed=0))) != schedule_sha256(
        build_schedule(with_arrivals(contract, seed=1))
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_shards_are_the_schedule(contract, workers):
    """Wrong: with several workers a request would be sent twice, or never."""
    slots = build_schedule(contract.profiles[0])
    shards = [shard_of(slots, shard, workers) for shard in range(workers)]
    merged = sorted((slot for shard in shards for slot in shard), key=lambda slot: slot.index)
    assert schedule_sha256(merged) == schedule_sha256(slots)


def test_constant_arrivals_do_not_drift(contract):
    """Wrong: rounding errors would add up, and the rate would not be the contract's."""
    profile = with_arrivals(contract, process="constant")
    window = windows(profile.arrivals)[1]
    times = [slot.at_ns for slot in build_schedule(profile) if slot.phase == "steady"]
    assert times == [window.start_ns + round(k * SECOND / 40) for k in range(100)]


@pytest.mark.parametrize(("process", "shape"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 4.0)])
def test_arrivals_have_the_rate_and_the_spread_of_their_process(contract, process, shape):
    """Wrong: bursts would be milder or harder than the contract says."""
    phases = (replace(contract.profiles[0].arrivals.phases[1], rate=50.0, seconds=200.0),)
    times = [
        slot.at_ns for slot in build_schedule(with_arrivals(contract, process=process, shape=shape, phases=phases))
    ]
    gaps = [(b - a) / SECOND for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert variance / mean**2 == pytest.approx(1 / shape, rel=0.15)


def test_phases_are_independent(contract):
    """Wrong: a longer warm-up would change the measured load."""
    warmup, steady = contract.profiles[0].arrivals.phases
    longer = with_arrivals(contract, phases=(replace(warmup, seconds=2.0), steady))
    before = [s for s in build_schedule(contract.profiles[0]) if s.measured]
    after = [s for s in build_schedule(longer) if s.measured]
    shift = round(1.5 * SECOND)
    key = lambda slot, moved: (slot.at_ns + moved, slot.prompt_tokens, slot.output_tokens)  # noqa: E731
    assert [key(slot, shift) for slot in before] == [key(slot, 0) for slot in after]


def test_lengths_stay_within_their_range(contract):
    """Wrong: a prompt could be longer than the model's context, or its mean not the contract's."""
    lengths = Lengths("lognormal", 16, 128, mean=48, sigma=0.4)
    phases = (replace(contract.profiles[0].arrivals.phases[1], seconds=100.0),)
    profile = replace(with_arrivals(contract, phases=phases), prompt_tokens=lengths)
    drawn = [slot.prompt_tokens for slot in build_schedule(profile)]
    assert min(drawn) >= 16
    assert max(drawn) <= 128
    assert sum(drawn) / len(drawn) == pytest.approx(48, rel=0.05)
    with pytest.raises(InvalidContract, match="hardly falls"):
        build_schedule(replace(profile, prompt_tokens=replace(lengths, mean=5000.0)))


def test_prompts_have_exactly_their_tokens_and_share_no_prefix(contract, tokenizer):
    """Wrong: TTFT would be measured at another length, or the prefix cache would answer."""
    slots, count = build_schedule(contract.profiles[0]), Counter(tokenizer)
    given = {"profile": "p", "seed": 3, "salt": "a", "count": count}
    prompts = build_prompts(slots, **given)
    assert [count(prompt) for prompt in prompts] == [slot.prompt_tokens for slot in slots]
    assert len({prompt.split()[0] for prompt in prompts}) == len(prompts)
    assert build_prompts(slots, **given) == prompts
    for change in ({"salt": "b"}, {"profile": "q"}):  # of another run, and of another profile with the same seed
        other = build_prompts(slots, **given | change)
        assert not {p.split()[0] for p in prompts} & {p.split()[0] for p in other}
    shard = build_prompts(shard_of(slots, 1, 2), **given)
    assert shard == prompts[1::2]


def test_impossible_prompts_are_refused(contract, tokenizer):
    import random

    with pytest.raises(InvalidContract, match="at least 2"):
        exact_prompt(Counter(tokenizer), random.Random(0), "two words", 1)
    with pytest.raises(InvalidContract, match="no text of exactly 5"):
        exact_prompt(lambda text: 2 * len(text.split()), random.Random(0), "x", 5)
    with pytest.raises(InvalidContract, match=r"tokenizer must be a tokenizer\.json"):
        Counter(tokenizer.parent / "none.json")
