"""What `tritonforge capacity` does with its options: one search, or a sweep of settings with a search for each."""

import argparse
import signal
from pathlib import Path

from loadtests.capacity import Asked, find_capacity
from loadtests.contract_toml import load_contract
from loadtests.exits import INTERRUPTED, refuse


def run(options: argparse.Namespace) -> int:
    """Search and print. Exit code 0: found; 1: the contract holds at no rate; the others as a campaign's."""
    # A search that is ended, by whomever, ends the server that it started.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return refuse(error)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace) -> int:
    name = load_contract(options.contract).name
    asked = Asked(
        contract=options.contract,
        release=options.release,
        url=options.url,
        out=options.out or Path("artifacts/capacity") / name,
        profile=options.profile,
        start=options.start,
        tolerance=options.tolerance,
        min_seconds=options.min_seconds,
        max_rate=options.max_rate,
        max_trials=options.max_trials,
        seed=options.seed,
    )
    if options.sweep or options.recipe or options.write_recipe:
        from loadtests.sweep import run_sweep

        return run_sweep(asked, options.sweep or [], options.recipe, options.write_recipe)
    found = find_capacity(asked, tell=_tell)
    print(f"{found.summary()}\nreport: {asked.out / 'capacity.html'}", flush=True)
    return found.exit_code


def _tell(line: str) -> None:
    print(line, flush=True)
