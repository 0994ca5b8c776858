"""Finds the highest rate at which a contract holds, and the knee, and draws both. `tritonforge capacity` calls it.

OUT/capacity.json, OUT/capacity.html, and a folder per trial with its contract, records and report.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.capacity_contract import choose_profile, left_out, mean_rate
from loadtests.capacity_page import render
from loadtests.capacity_search import INVALID, Knee, Search, find_knee, search
from loadtests.capacity_trials import Trials
from loadtests.contract import Contract, Profile
from loadtests.contract_toml import parse_contract, read_document
from loadtests.fields import InvalidContract
from loadtests.verdict import EXIT_CODES

SCHEMA = "tritonforge.capacity/1"
FLOOR = "output_tokens_per_s"


@dataclass(frozen=True)
class Asked:
    """What to search. `url` None: serve the release here, on free ports, for as long as the search runs."""

    contract: Path
    release: Path | None
    url: str | None
    out: Path
    profile: str | None = None
    tokenizer: Path | None = None
    start: float | None = None
    tolerance: float = 0.1
    min_seconds: float = 30.0
    max_rate: float = 1000.0
    max_trials: int = 14
    seed: int = 1
    floor: float = 0.0

    def check(self) -> None:
        """Raise InvalidContract, naming field, value and rule."""
        for name, low, high in (
            ("tolerance", 0.01, 1.0),
            ("min_seconds", 1, 1e5),
            ("max_rate", 0.001, 1e5),
            ("max_trials", 1, 1000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidContract(f"{name} must be in [{low:g}, {high:g}], got {value:g}")
        if self.start is not None and not 0 < self.start <= self.max_rate:
            raise InvalidContract(f"start must be in (0, max_rate {self.max_rate:g}], got {self.start:g}")
        if self.url is None and self.release is None:
            raise InvalidContract("capacity needs a release to serve, or the url of a server: give --release or --url")


@contextlib.contextmanager
def served(url: str | None, release: Path | None) -> Iterator[str]:
    """The gRPC url to load: the given one, or that of a server of our own on the release."""
    if url is not None:
        yield url
        return
    from tritonforge.server import Server

    with Server(release) as server:
        yield server.grpc_url


@dataclass(frozen=True)
class Capacity:
    """A finished search of one profile of a contract."""

    contract: Contract
    profile: Profile
    found: Search
    knee: Knee | None

    @property
    def exit_code(self) -> int:
        """0 when a rate was found, 3 when nothing could be measured, 1 when the contract held at no rate."""
        if self.found.capacity is not None:
            return 0
        return EXIT_CODES[INVALID] if all(trial.status == INVALID for trial in self.found.trials) else 1

    def floors(self) -> list[dict[str, Any]]:
        """The contract's throughput floors beside the throughput at capacity; the highest of its trials there."""
        rates = [t.output_tokens_per_s for t in self.found.trials if t.holds and t.rate == self.found.capacity]
        highest = max(rates, default=None)
        return [
            {"id": o.id, "ge": o.ge, "measured": highest, "met": highest is not None and highest >= o.ge}
            for o in self.profile.objectives
            if o.metric == FLOOR
        ]

    def summary(self) -> str:
        """What was found, in a few lines."""
        found, name = self.found, f"{self.contract.name}/{self.profile.id}"
        if found.capacity is None:
            tried = "no rate" if found.lowest is None else f"no rate down to {found.lowest:g}/s"
            lines = [f"capacity of {name}: the contract holds at {tried}"]
        else:
            how = "passed twice, with different arrivals" if found.confirmed else "passed once, not confirmed"
            above = f"{found.upper:g}/s does not hold" if found.upper is not None else "nothing higher was tried"
            lines = [f"capacity of {name}: {found.capacity:g} requests/s ({how}; {above})"]
        limits = {
            "measurement": "the trial above could not be trusted: the client may be the limit, not the service",
            "max_rate": "the search was not allowed to go higher",
            "max_trials": "the search ended early: no more trials were allowed",
        }
        if found.limited_by:
            lines.append(limits[found.limited_by])
        if self.knee is not None:
            peak = f"the highest throughput seen was {self.knee.peak_tokens_per_s:g} output tokens/s"
            lines.append(f"knee: {self.knee.rate:g} requests/s, the greatest throughput per response time; {peak}")
        for floor in self.floors():
            state = "met" if floor["met"] else "not met"
            lines.append(f"{floor['id']}: {FLOOR} >= {floor['ge']:g} is {state} at capacity")
        others = ", ".join(o.id for o in left_out(self.profile) if o.metric != FLOOR)
        if others:
            lines.append(f"not judged in trials: {others}")
        return "\n".join(lines)

    def document(self) -> dict[str, Any]:
        """capacity.json."""
        found = dataclasses.asdict(self.found)
        return {
            "schema": SCHEMA,
            "contract": {
                "name": self.contract.name,
                "revision": self.contract.revision,
                "sha256": self.contract.sha256,
            },
            "profile": self.profile.id,
            **found,
            "knee": None if self.knee is None else dataclasses.asdict(self.knee),
            "floors": self.floors(),
        }


def find_capacity(asked: Asked, *, tell: Any = print) -> Capacity:
    """Serve, search, write the report. Raises InvalidContract, Unreachable, or what keeps the release from serving."""
    asked.check()
    document = read_document(asked.contract)
    contract = parse_contract(document)
    profile = choose_profile(contract, asked.profile)
    start = asked.start or min(mean_rate(profile), asked.max_rate)
    asked.out.mkdir(parents=True, exist_ok=True)
    with served(asked.url, asked.release) as url:
        trials = Trials(
            document,
            profile.id,
            contract.target.model,
            url,
            asked.out,
            asked.release,
            asked.tokenizer,
            asked.seed,
            asked.min_seconds,
            tell,
        )
        found = search(
            trials,
            start,
            tolerance=asked.tolerance,
            max_rate=asked.max_rate,
            max_trials=asked.max_trials,
            floor=asked.floor,
        )
    result = Capacity(contract, profile, found, find_knee(found.trials))
    write(result, asked)
    return result


def write(result: Capacity, asked: Asked) -> None:
    """capacity.json and capacity.html in the folder that was asked for."""
    text = json.dumps(result.document(), indent=2) + "\n"
    (asked.out / "capacity.json").write_text(text, encoding="utf-8")
    facts = {"contract": f"{result.contract.name} revision {result.contract.revision} {result.contract.sha256[:16]}"}
    facts |= {"release": asked.release, "url": asked.url or "served for the search", "tolerance": asked.tolerance}
    title = f"Capacity of {result.contract.name}/{result.profile.id}"
    page = render(title, result.found, result.knee, result.summary(), facts)
    (asked.out / "capacity.html").write_text(page, encoding="utf-8")
