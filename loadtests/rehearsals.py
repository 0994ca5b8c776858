"""Rehearses faults on the real server and says whether users see what they must.

    python loadtests/rehearsals.py --release artifacts/releases/smollm2-135m-int8
    python loadtests/rehearsals.py --release DIR stub-killed queue-saturated
    python loadtests/rehearsals.py --list

Exit codes: 0 every rehearsal passed, 1 one failed, 2 usage error, 4 one could not be staged on this machine.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this folder: its modules are `loadtests.x`

from loadtests import rehearsals_crowds, rehearsals_serving, rehearsals_start  # noqa: E402
from loadtests.exits import INTERRUPTED, refuse  # noqa: E402
from loadtests.fields import InvalidContract  # noqa: E402
from loadtests.rehearsals_stage import FAIL, NOT_RUN, PASS, NotPossible, Rehearsal, Seen, Stage  # noqa: E402
from tritonforge.release import Release  # noqa: E402

SCHEMA = "tritonforge.rehearsals/1"
REHEARSALS = {
    one.id: one for one in (*rehearsals_start.REHEARSALS, *rehearsals_serving.REHEARSALS, *rehearsals_crowds.REHEARSALS)
}
EXIT_CODES = {PASS: 0, FAIL: 1, NOT_RUN: 4}


@dataclass(frozen=True)
class Outcome:
    """How a rehearsal came out: what was seen of each thing that must be seen, in its order."""

    id: str
    status: str
    seconds: float
    seen: tuple[Seen, ...]
    reason: str = ""


def rehearse(rehearsal: Rehearsal, release: Release) -> Outcome:
    """Run one rehearsal. What it does not get to see, because it failed or hung, is not as it must be."""
    problems: list[BaseException] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix="rehearsal-", dir=_scratch_of(release), ignore_cleanup_errors=True
    ) as folder:
        stage = Stage(release, Path(folder))

        def act() -> None:
            try:
                rehearsal.run(stage)
            except BaseException as error:
                problems.append(error)

        # A thread of its own: a rehearsal that hangs is reported, and not waited for.
        actor = threading.Thread(target=act, daemon=True)
        actor.start()
        actor.join(rehearsal.limit_s)
        hangs = actor.is_alive()
    seconds = round(time.monotonic() - started, 2)
    if problems and isinstance(problems[0], NotPossible):
        return Outcome(rehearsal.id, NOT_RUN, seconds, (), str(problems[0]))
    if problems:
        traceback.print_exception(problems[0])
    reason = f"hangs: it was not over after {rehearsal.limit_s:g} s" if hangs else ""
    reason = f"{type(problems[0]).__name__}: {problems[0]}" if problems else reason
    seen = complete(rehearsal, stage.seen)
    status = PASS if not reason and all(one.ok for one in seen) else FAIL
    return Outcome(rehearsal.id, status, seconds, seen, reason)


def _scratch_of(release: Release) -> Path | None:
    """Beside the release, where hard links to its files are possible; else where temporary files go."""
    try:
        with tempfile.TemporaryFile(dir=release.root.parent):
            return release.root.parent
    except OSError:
        return None


def complete(rehearsal: Rehearsal, seen: list[Seen]) -> tuple[Seen, ...]:
    """One entry for each thing that must be seen; what was not looked at is not as it must be."""
    found = {one.id: one for one in seen}
    foreign = sorted(set(found) - set(rehearsal.must_see))
    if foreign:
        raise ValueError(f"{rehearsal.id} saw {', '.join(foreign)}, which its must_see does not have")
    return tuple(found.get(what, Seen(what, False, "was not seen")) for what in rehearsal.must_see)


def choose(names: list[str]) -> list[Rehearsal]:
    """The named rehearsals, or all. Raises InvalidContract for an unknown name."""
    for name in names:
        if name not in REHEARSALS:
            raise InvalidContract(f"rehearsal must be one of {', '.join(REHEARSALS)}, got {name!r}")
    return [REHEARSALS[name] for name in names] if names else list(REHEARSALS.values())


def table(outcome: Outcome) -> str:
    """An outcome as a terminal shows it."""
    rehearsal = REHEARSALS[outcome.id]
    lines = [f"{outcome.status:<8}{outcome.id}: {rehearsal.fault} ({outcome.seconds:g} s)"]
    lines += [f"        {outcome.reason}"] if outcome.reason else []
    for one in outcome.seen:
        lines.append(f"  {'ok  ' if one.ok else 'WRONG'} {one.id}: {rehearsal.must_see[one.id]}")
        lines.append(f"        seen: {one.text}")
    return "\n".join(lines)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rehearsals to run (default: all)")
    parser.add_argument("--release", type=Path, help="the release to serve and to harm copies of")
    parser.add_argument("--out", type=Path, help="report file (default artifacts/reports/rehearsals.json)")
    parser.add_argument("--list", action="store_true", help="say what each rehearsal does, and stop")
    options = parser.parse_args(arguments)
    if not options.list and options.release is None:
        parser.error("--release is needed")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the rehearsals one after the other and report."""
    options = parse_args(arguments)
    try:
        chosen = choose(options.names)
        if options.list:
            for one in chosen:
                print(f"{one.id}: {one.fault}", *(f"  {what}: {text}" for what, text in one.must_see.items()), sep="\n")
            return 0
        release = Release.open(options.release)
        release.verify()
        return report(chosen, release, options.out or Path("artifacts/reports/rehearsals.json"))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return refuse(error)


def report(chosen: list[Rehearsal], release: Release, out: Path) -> int:
    """Rehearse, print each outcome as it comes, write all of them to `out`, and return the exit code."""
    outcomes = []
    for rehearsal in chosen:
        outcomes.append(rehearse(rehearsal, release))
        print(table(outcomes[-1]), flush=True)
    statuses = [outcome.status for outcome in outcomes]
    status = next(status for status in (FAIL, NOT_RUN, PASS) if status in statuses)
    document = {"schema": SCHEMA, "release": release.name, "digest": release.digest, "status": status}
    document |= {"rehearsals": [dataclasses.asdict(outcome) for outcome in outcomes]}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"rehearsals: {status}, {statuses.count(PASS)} of {len(statuses)} passed; report: {out}", flush=True)
    return EXIT_CODES[status]


if __name__ == "__main__":
    sys.exit(main())
