"""Quality figures on distributions whose distance is known by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build"))

import quality

from tritonforge.engines.base import EngineSpec
from tritonforge.errors import EngineFailure

VOCABULARY = 8


class TableEngine:
    """An engine whose logits are a function of the token alone: row `token` of a table."""

    def __init__(self, table, max_model_len=64):
        self.spec = EngineSpec(VOCABULARY, max_model_len, 4, 16)
        self.table = table
        self.steps = []

    def step(self, sequences):
        (sequence,) = sequences
        self.steps.append((sequence.num_computed_tokens, len(sequence.token_ids), sequence.num_logits))
        assert len(sequence.block_table) * 4 >= sequence.num_computed_tokens + len(sequence.token_ids)
        return self.table[list(sequence.token_ids)]


def store_reference(path, table, texts, top):
    """What `table` says of `texts`, in the form the export stage stores."""
    logp = quality.log_softmax(table)
    rows = np.concatenate([logp[text[:-1]] for text in texts.values()])
    truth = np.concatenate([text[1:] for text in texts.values()])
    top_ids = np.argsort(-rows, axis=-1, kind="stable")[:, :top].astype(np.int32)
    np.savez(
        path,
        names=np.array(list(texts)),
        tokens=np.concatenate([np.asarray(text, np.int32) for text in texts.values()]),
        begins=np.cumsum([0] + [len(text) for text in texts.values()]),
        next_logp=rows[np.arange(len(truth)), truth],
        top_ids=top_ids,
        top_logp=np.take_along_axis(rows, top_ids, axis=-1),
    )
    return rows, truth


@pytest.fixture
def table():
    """Float32 logits [token, next token]."""
    return np.random.default_rng(3).normal(0, 2, (VOCABULARY, VOCABULARY)).astype(np.float32)


TEXTS = {"first": [0, 5, 2, 7, 7, 1, 3], "second": [4, 6, 1, 0, 2]}


def test_the_reference_compared_with_itself_is_perfect(table, tmp_path):
    store_reference(tmp_path / "r.npz", table, TEXTS, 3)
    report = quality.measure(TableEngine(table), tmp_path / "r.npz", 4)
    assert report["perplexity_ratio"] == 1.0 and report["mean_kl"] == 0.0 and report["top1_agreement"] == 1.0
    assert report["tokens"] == 10 and report["by_text"]["second"]["tokens"] == 4


def test_figures_equal_their_formulas(table, tmp_path):
    """With all outcomes stored, mean KL is the plain sum of p (log p - log q)."""
    rows, truth = store_reference(tmp_path / "r.npz", table, TEXTS, VOCABULARY)
    other = table + np.random.default_rng(4).normal(0, 0.5, table.shape).astype(np.float32)
    report = quality.measure(TableEngine(other), tmp_path / "r.npz", 100)
    mine = np.concatenate([quality.log_softmax(other)[text[:-1]] for text in TEXTS.values()])
    index = np.arange(len(truth))
    assert report["mean_kl"] == pytest.approx((np.exp(rows) * (rows - mine)).sum(-1).mean(), abs=1e-5)
    assert report["perplexity"] == pytest.approx(np.exp(-mine[index, truth].mean()), rel=1e-4)
    assert report["perplexity_ratio"] == pytest.approx(np.exp((rows - mine)[index, truth].mean()), rel=1e-4)
    assert report["top1_agreement"] == pytest.approx((rows.argmax(-1) == mine.argmax(-1)).mean(), abs=1e-4)


def test_lumping_the_unlikely_tokens_never_raises_the_divergence(table, tmp_path):
    other = table + np.random.default_rng(5).normal(0, 0.5, table.shape).astype(np.float32)
    found = []
    for top in (1, 2, 4, VOCABULARY):
        store_reference(tmp_path / "r.npz", table, TEXTS, top)
        found.append(quality.measure(TableEngine(other), tmp_path / "r.npz", 100)["mean_kl"])
    assert found == sorted(found) and 0 < found[0] < found[-1]


def test_a_text_goes_through_the_cache_in_chunks_without_its_last_token(table, tmp_path):
    store_reference(tmp_path / "r.npz", table, {"only": TEXTS["first"]}, 3)
    engine = TableEngine(table)
    quality.measure(engine, tmp_path / "r.npz", 4)
    assert engine.steps == [(0, 4, 4), (4, 2, 2)]


def test_what_does_not_fit_the_context_is_cut(table, tmp_path):
    store_reference(tmp_path / "r.npz", table, TEXTS, 3)
    report = quality.measure(TableEngine(table, max_model_len=5), tmp_path / "r.npz", 100)
    assert report["by_text"]["first"]["tokens"] == 5 and report["perplexity_ratio"] == 1.0


def test_logits_that_are_not_finite_fail_the_build(table, tmp_path):
    store_reference(tmp_path / "r.npz", table, TEXTS, 3)
    table[7] = np.nan
    with pytest.raises(EngineFailure, match="not finite"):
        quality.measure(TableEngine(table), tmp_path / "r.npz", 100)
