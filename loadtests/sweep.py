"""Sweeps scheduler limits: which setting meets the contract at the highest rate? It can be written into the recipe.

`tritonforge capacity --sweep` calls it. OUT/sweep.json, and a capacity folder per setting.

The release's own setting is searched first. Every other one must then hold at a rate above the best so far; most take
one trial to lose. The machine may have become faster meanwhile: so in the end the first setting is tried again at the
winner's rate, and keeps its place when it holds there too.
"""

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.capacity import Asked, Capacity, find_capacity
from loadtests.fields import InvalidContract
from loadtests.sweep_recipe import check_recipe, recommend
from loadtests.sweep_variant import decoder_config, with_limits
from tritonforge.errors import InvalidRequest
from tritonforge.release import Release
from tritonforge.scheduling.scheduler_config import SchedulerConfig

SCHEMA = "tritonforge.sweep/1"
Limits = dict[str, int]
Find = Callable[[Limits, str, float | None, float], Capacity]
"""find(limits, folder name, start, floor) -> what a search of that setting found."""


def own_limits(release: Release) -> Limits:
    """All scheduler limits of a release, with the defaults of those that it does not name."""
    return dataclasses.asdict(SchedulerConfig(**decoder_config(release)["scheduler"]))


def parse_settings(options: Sequence[str], release: Release) -> dict[str, list[int]]:
    """LIMIT=A,B options by limit. Raises InvalidContract for what is no scheduler limit of the release."""
    known = {name for name, value in own_limits(release).items() if type(value) is int}
    found: dict[str, list[int]] = {}
    for option in options:
        name, _, values = option.partition("=")
        if name not in known:
            raise InvalidContract(f"sweep must be of a scheduler limit ({', '.join(sorted(known))}), got {name!r}")
        if name in found:
            raise InvalidContract(f"sweep must name {name} once, with all its values")
        try:
            found[name] = [int(value) for value in values.split(",")]
        except ValueError:
            raise InvalidContract(f"sweep {name} must have integers, as in {name}=16,32, got {values!r}") from None
    if not found:
        raise InvalidContract("sweep must have at least one LIMIT=A,B")
    return found


def combinations(settings: Mapping[str, Sequence[int]], own: Limits) -> tuple[list[Limits], list[str]]:
    """All combinations that a scheduler accepts, the release's own first; and why the others are none."""
    names = list(settings)
    first = {name: own[name] for name in names}
    found, refused = [first], []
    for values in itertools.product(*settings.values()):
        limits = dict(zip(names, values, strict=True))
        try:
            SchedulerConfig(**{**own, **limits})
        except InvalidRequest as error:
            refused.append(f"{text(limits)}: {Exception.__str__(error)}")
            continue
        if limits not in found:
            found.append(limits)
    return found, refused


def text(limits: Limits) -> str:
    """A setting in words."""
    return ", ".join(f"{name} {value}" for name, value in limits.items())


@dataclass(frozen=True)
class Row:
    """One setting: its capacity, or, when it lost, the rate at which it did not hold."""

    limits: Limits
    capacity: float | None
    lost_at: float | None
    note: str = ""


@dataclass(frozen=True)
class Sweep:
    """A finished sweep. `best` is the recommended setting, the release's own unless another was shown to be better."""

    rows: tuple[Row, ...]
    best: Limits
    capacity: float | None
    refused: tuple[str, ...] = ()

    @property
    def own(self) -> Limits:
        return self.rows[0].limits


def race(settings: Sequence[Limits], find: Find, *, tolerance: float) -> Sweep:
    """Find the setting with the highest capacity. The first one is the release's own."""
    first = find(settings[0], "1", None, 0.0).found
    rows, best, capacity = [Row(settings[0], first.capacity, None)], settings[0], first.capacity
    for number, limits in enumerate(settings[1:], 2):
        # Without any capacity so far, whatever holds anywhere is better.
        start = None if capacity is None else round(capacity * (1 + tolerance), 4)
        found = find(limits, str(number), start, start or 0.0).found
        won = found.capacity is not None
        rows.append(Row(limits, found.capacity, None if won else found.lowest))
        if won:
            best, capacity = limits, found.capacity
    if best is settings[0] or first.capacity is None:
        return Sweep(tuple(rows), best, capacity)
    again = find(settings[0], "1-again", capacity, capacity).found
    if again.capacity is None:
        return Sweep(tuple(rows), best, capacity)
    rows[0] = Row(settings[0], again.capacity, None, "tried again after the others: the machine had become faster")
    return Sweep(tuple(rows), settings[0], again.capacity)


def run_sweep(asked: Asked, options: Sequence[str], recipe: Path | None, write_recipe: Path | None) -> int:
    """Sweep, report, and write the recipe if asked. Exit code 0: a setting holds; 1: none does."""
    if asked.release is None or asked.url is not None:
        raise InvalidContract("a sweep serves variants of a release itself: give --release, and no --url")
    if (recipe is None) != (write_recipe is None):
        raise InvalidContract("recipe and write-recipe must be given together")
    release = Release.open(asked.release)
    release.verify()
    own = own_limits(release)
    settings, refused = combinations(parse_settings(options, release), own)
    if recipe is not None:
        check_recipe(recipe, release, settings[0])
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".variants-", dir=asked.out) as folder:
        found = race(settings, _finder(asked, release, Path(folder)), tolerance=asked.tolerance)
    found = dataclasses.replace(found, refused=tuple(refused))
    (asked.out / "sweep.json").write_text(json.dumps(_document(found, release), indent=2) + "\n", encoding="utf-8")
    print(summary(found), flush=True)
    if recipe is not None and found.capacity is not None:
        recommend(recipe, write_recipe, found.best, f"{found.capacity:g} requests/s of {asked.contract.name}")
        print(f"recipe with these limits: {write_recipe}", flush=True)
    return 0 if found.capacity is not None else 1


def _finder(asked: Asked, release: Release, folder: Path) -> Find:
    def find(limits: Limits, name: str, start: float | None, floor: float) -> Capacity:
        print(f"setting {name}: {text(limits)}", flush=True)
        variant = with_limits(release, folder / name, limits, name=f"{release.name}-{name}")
        one = dataclasses.replace(
            asked, release=variant.root, out=asked.out / name, start=start or asked.start, floor=floor
        )
        return find_capacity(one, tell=lambda line: print(f"  {line}", flush=True))

    return find


def summary(found: Sweep) -> str:
    """What was found, a line per setting."""
    lines = []
    for row in found.rows:
        result = "holds nowhere" if row.lost_at is None else f"does not hold at {row.lost_at:g}/s"
        result = result if row.capacity is None else f"holds at {row.capacity:g}/s"
        mark = "*" if row.limits == found.best and found.capacity is not None else " "
        lines.append(f"{mark} {text(row.limits)}: {result}" + (f" ({row.note})" if row.note else ""))
    lines += [f"  not possible: {reason}" for reason in found.refused]
    if found.capacity is None:
        return "\n".join([*lines, "no setting meets the contract at any rate that was tried"])
    kept = "the release's own setting stays" if found.best == found.own else "recommended"
    return "\n".join([*lines, f"{kept}: {text(found.best)}, {found.capacity:g} requests/s"])


def _document(found: Sweep, release: Release) -> dict[str, Any]:
    return {"schema": SCHEMA, "release": release.name, "digest": release.digest, **dataclasses.asdict(found)}
