"""The sweep of scheduler limits: the best setting wins, luck and drift do not, and the recipe says what was found."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slo_support import ROOT

from loadtests.capacity import Capacity
from loadtests.capacity_search import PASS, Trial, search
from loadtests.fields import InvalidContract
from loadtests.sweep import combinations, parse_settings, race, summary
from loadtests.sweep_recipe import check_recipe, recommend, with_recipe_limits
from loadtests.sweep_variant import decoder_config, make_variant, with_limits
from tritonforge.errors import InvalidRecipe
from tritonforge.release import Release, write_manifest

OWN = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_waiting": 128, "max_waiting_tokens": 65536}
RECIPE = (ROOT / "build" / "recipes" / "smollm2-135m-int8.toml").read_text()


def trial(rate: float, status: str, purpose: str) -> Trial:
    return Trial(rate, purpose, status, 100, rate, 50 * rate, 1.0, 1000.0, 100.0, 10.0)


class Machine:
    """Settings of known capacity; `drift` multiplies all of them from its n-th search on."""

    def __init__(self, capacities: dict[int, float], drift: tuple[int, float] = (10**9, 1.0)):
        self.capacities, self.drift, self.searches, self.trials = capacities, drift, 0, 0

    def find(self, limits, name, start, floor):
        self.searches += 1
        factor = self.drift[1] if self.searches >= self.drift[0] else 1.0
        capacity = self.capacities[limits["max_num_seqs"]] * factor

        def run(rate, purpose, longer):
            self.trials += 1
            return trial(rate, PASS if rate <= capacity else "FAIL", purpose)

        found = search(run, start or 4.0, tolerance=0.1, max_trials=40, floor=floor)
        return Capacity(contract=None, profile=None, found=found, knee=None)


def settings(capacities) -> list[dict[str, int]]:
    return [{"max_num_seqs": seats} for seats in capacities]


@given(st.lists(st.floats(1, 100), min_size=1, max_size=6))
def test_the_setting_with_the_highest_capacity_is_recommended_within_the_tolerance(values):
    capacities = dict(enumerate(values, 1))
    machine = Machine(capacities)
    found = race(settings(capacities), machine.find, tolerance=0.1)
    best = max(values)
    assert capacities[found.best["max_num_seqs"]] >= best / 1.23, "two steps of 10% at most"
    assert found.capacity <= best


def test_a_setting_that_does_not_beat_the_best_costs_one_trial():
    machine = Machine({32: 20.0, 16: 10.0, 8: 5.0})
    race(settings({32: 0}), machine.find, tolerance=0.1)
    alone = machine.trials
    found = race(settings({32: 0, 16: 0, 8: 0}), machine.find, tolerance=0.1)
    assert machine.trials - alone == alone + 2
    assert [row.lost_at is not None for row in found.rows] == [False, True, True]


def test_a_machine_that_became_faster_is_no_reason_to_change_a_recipe():
    """Wrong: whichever setting is tried last, on the quieter machine, would win."""
    found = race(settings({32: 0, 16: 0}), Machine({32: 20.0, 16: 20.0}, drift=(2, 1.5)).find, tolerance=0.1)
    assert found.best == {"max_num_seqs": 32}
    assert "machine had become faster" in summary(found)


def test_a_contract_that_no_setting_meets_gets_no_recommendation():
    found = race(settings({32: 0, 16: 0}), Machine({32: 0.0, 16: 0.0}).find, tolerance=0.1)
    assert found.capacity is None
    assert "no setting meets the contract" in summary(found)


def test_combinations_keep_the_schedulers_rules_and_begin_with_the_releases_own():
    found, refused = combinations({"max_num_seqs": [16, 64, 32], "max_num_batched_tokens": [32, 512]}, OWN)
    assert found[0] == {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    assert len(found) == 5 and len(refused) == 1
    assert "max_num_batched_tokens must be at least max_num_seqs 64, got 32" in refused[0]


@pytest.fixture
def release(tmp_path) -> Release:
    folder = tmp_path / "release"
    decoder = folder / "model_repository" / "decoder" / "1"
    decoder.mkdir(parents=True)
    (decoder / "decoder.json").write_text(json.dumps({"engine": "simulated", "scheduler": OWN}))
    (decoder / "weights.bin").write_bytes(bytes(1000))
    return write_manifest(folder, name="smollm2-135m-int8", recipe={"limits": OWN})


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["max_seqs=1"], r"scheduler limit \(ageing_ms, max_num_batched_tokens, .*\), got 'max_seqs'"),
        (["max_num_seqs=a"], "max_num_seqs must have integers"),
        (["max_num_seqs=1", "max_num_seqs=2"], "must name max_num_seqs once"),
        ([], "at least one LIMIT=A,B"),
    ],
)
def test_what_cannot_be_swept_is_refused(release, options, rule):
    with pytest.raises(InvalidContract, match=rule):
        parse_settings(options, release)


def test_a_variant_is_a_whole_release_and_leaves_the_original_alone(release, tmp_path):
    before = release.digest
    variant = with_limits(release, tmp_path / "variant", {"max_num_seqs": 8}, name="other")
    variant.verify()
    assert decoder_config(variant)["scheduler"] == {**OWN, "max_num_seqs": 8}
    assert Release.open(variant.root).manifest["recipe"]["limits"]["max_num_seqs"] == 8
    assert variant.digest != before
    release.verify()
    assert Release.open(release.root).digest == before
    name = Path("model_repository/decoder/1/weights.bin")
    assert (variant.root / name).stat().st_ino == (release.root / name).stat().st_ino, "unchanged files are links"


def test_a_variant_with_the_same_files_has_the_same_digest(release, tmp_path):
    assert make_variant(release, tmp_path / "same", {}).digest == release.digest


def test_only_the_limits_of_a_recipe_change(tmp_path):
    source, out = tmp_path / "r.toml", tmp_path / "out.toml"
    source.write_text(RECIPE)
    recommend(source, out, {"max_num_seqs": 48, "max_num_batched_tokens": 256}, "7.5 requests/s of demo.toml")
    text, wanted = out.read_text(), tomllib.loads(RECIPE)
    wanted["limits"] |= {"max_num_seqs": 48, "max_num_batched_tokens": 256}
    assert tomllib.loads(text) == wanted
    assert "7.5 requests/s of demo.toml" in text
    assert next(line for line in RECIPE.splitlines() if line.startswith("#")) in text, "comments stay"


def test_limits_that_make_no_recipe_are_not_written(tmp_path):
    source, out = tmp_path / "r.toml", tmp_path / "out.toml"
    source.write_text(RECIPE)
    with pytest.raises(InvalidRecipe, match="max_num_batched_tokens must be at least max_num_seqs"):
        recommend(source, out, {"max_num_seqs": 1024}, "x")
    assert not out.exists()


def test_a_recipe_of_another_release_or_without_the_limit_is_refused_before_the_sweep(release, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    check_recipe(path, release, {"max_num_seqs": 1})
    with pytest.raises(InvalidContract, match=r"must have limits\.other"):
        check_recipe(path, release, {"other": 1})
    foreign = replace(release, manifest={**release.manifest, "name": "foreign"})
    with pytest.raises(InvalidContract, match="must be that of release foreign, got 'smollm2-135m-int8'"):
        check_recipe(path, foreign, {})
    with pytest.raises(InvalidContract, match=r"must have a \[limits\] table"):
        with_recipe_limits("name = 'x'\n", {}, "")
