"""20,000 draws follow the exact distribution of each option alone and of each pair of options: chi-square at 0.1%.

The exact distribution is computed in float64, token by token, from the options' definitions. Seeds are fixed, so a
result never changes by chance: a failure means that something else is drawn.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from math import exp

import numpy as np
import pytest

from tritonforge.generate_request import SamplingParams
from tritonforge.sampling.logits import History, needs_history
from tritonforge.sampling.sampling import Draw, sample

DRAWS = 20_000
VOCAB = 37
LONG = 4133
PROMPT = (1, 2, 3, 3, 20, 21)
OUTPUT = (4, 5, 4, 6, 4, 2, 8, 9)
FORBIDDEN = (0, 7)
ALLOWED = tuple(token_id for token_id in range(VOCAB) if token_id % 4)

OPTIONS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.6},
    "logit_bias": {"logit_bias": ((3, 1.5), (10, -2.0), (11, 2.0))},
    "bad_words": {"bad_words": ((12,), (8, 9, 13), (9, 8, 14), (21, 15))},
    "mask": {"mask": ALLOWED},
    "forbidden": {"forbidden": FORBIDDEN},
}


@dataclass(frozen=True)
class Case:
    """Options of a draw, and the tokens before it."""

    params: SamplingParams
    forbidden: tuple[int, ...] = ()
    mask: tuple[int, ...] | None = None

    @classmethod
    def of(cls, *names: str) -> "Case":
        options = {key: value for name in names for key, value in OPTIONS[name].items()}
        around = {key: options.pop(key) for key in ("forbidden", "mask") if key in options}
        return cls(SamplingParams(**{"temperature": 1.0} | options), **around)


def adjusted(row: np.ndarray, case: Case) -> list[float]:
    """The logits that the options make of `row`, -inf for what they forbid."""
    params, counts = case.params, Counter(OUTPUT)
    banned = set(case.forbidden)
    for word in params.bad_words:
        before = word[:-1]
        if OUTPUT[len(OUTPUT) - len(before) :] == before:
            banned.add(word[-1])
    values = []
    for token_id, value in enumerate(row.tolist()):
        value += dict(params.logit_bias).get(token_id, 0.0)
        if token_id in PROMPT or token_id in OUTPUT:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token_id] + params.presence_penalty * (token_id in counts)
        if token_id in banned or (case.mask is not None and token_id not in case.mask):
            value = -np.inf
        values.append(value)
    return values


def distribution(row: np.ndarray, case: Case) -> np.ndarray:
    """The exact probability of each token [len(row)], in float64."""
    values, params = adjusted(row, case), case.params
    largest = max(values)
    weights = [exp((value - largest) / params.temperature) for value in values]
    order = sorted(range(len(values)), key=lambda token_id: -values[token_id])  # stable: among equal ones the first
    kept = [token_id for token_id in order if weights[token_id] >= params.min_p and weights[token_id] > 0.0]
    kept = kept[: params.top_k or None]
    total, mass, nucleus = sum(weights[token_id] for token_id in kept), 0.0, []
    for token_id in kept:
        if mass >= params.top_p * total:
            break
        nucleus.append(token_id)
        mass += weights[token_id]
    expected = np.zeros(len(values))
    expected[nucleus] = [weights[token_id] / mass for token_id in nucleus]
    return expected


def drawn_counts(row: np.ndarray, case: Case) -> np.ndarray:
    """How often each token is drawn by one request's tokens 0 to DRAWS - 1, in batches."""
    params = replace(case.params, seed=11)
    history = History(params, PROMPT) if needs_history(params) else None
    for token_id in OUTPUT if history is not None else ():
        history.append(token_id)
    mask = None
    if case.mask is not None:
        bits = np.zeros(-(-len(row) // 32) * 32, bool)
        bits[list(case.mask)] = True
        mask = np.packbits(bits, bitorder="little").view(np.int32)
    counts = np.zeros(len(row), np.int64)
    size = 500
    for start in range(0, DRAWS, size):
        draws = [Draw(params, index, history, case.forbidden, mask) for index in range(start, start + size)]
        for drawn in sample(np.tile(row, (size, 1)), draws):
            counts[drawn.token_id] += 1
    return counts


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom; tokens expected fewer than 5 times are taken together."""
    often = expected >= 5.0
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0.0], wanted[wanted > 0.0]
    return float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1


def limit(freedom: int) -> float:
    """The 99.9% quantile of chi-square (Wilson and Hilferty 1931): 2.3% too high for 2 degrees, less for more."""
    part = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - part + 3.0902 * part**0.5) ** 3


def check(row: np.ndarray, case: Case) -> None:
    exact = distribution(row, case)
    counts = drawn_counts(row, case)
    assert counts[exact == 0.0].sum() == 0, "a token was drawn that the options leave out"
    statistic, freedom = chi_square(counts, DRAWS * exact)
    assert freedom >= 2, "the case tells nothing"
    assert statistic < limit(freedom), f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


def small_row() -> np.ndarray:
    return np.random.default_rng(5).normal(0.5, 1.5, VOCAB).astype(np.float32)


CASES = [*((name,) for name in OPTIONS), *combinations(OPTIONS, 2)]


@pytest.mark.parametrize("names", CASES, ids=" and ".join)
def test_draws_follow_the_exact_distribution(names):
    check(small_row(), Case.of(*names))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        SamplingParams(0.6, top_k=9),
        SamplingParams(1.0, top_k=600),
        SamplingParams(1.0, top_p=0.95),
        SamplingParams(1.0, top_p=0.3),
        SamplingParams(1.2, min_p=0.2),
        SamplingParams(1.2, min_p=0.001),
        SamplingParams(1.2, min_p=0.001, top_p=0.7),
        SamplingParams(1.0, top_k=2000, top_p=0.5, repetition_penalty=1.3),
    ],
    ids=str,
)
def test_draws_from_a_long_flat_row_follow_the_exact_distribution(params):
    check(np.random.default_rng(6).normal(0.0, 1.6, LONG).astype(np.float32), Case(params))


def test_a_wrong_distribution_is_rejected():
    """The test has the power to see one option in a pair ignored."""
    row, case = small_row(), Case.of("temperature", "presence_penalty")
    counts = drawn_counts(row, replace(case, params=replace(case.params, presence_penalty=0.7)))
    statistic, freedom = chi_square(counts, DRAWS * distribution(row, case))
    assert statistic > limit(freedom)


def test_the_limit_is_the_quantile_of_the_tables():
    for freedom, quantile in ((2, 13.816), (10, 29.588), (30, 59.703), (100, 149.449)):
        assert limit(freedom) == pytest.approx(quantile, rel=0.025)
