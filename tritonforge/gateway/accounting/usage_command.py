"""The command `tritonforge usage`: prints tokens and cost by tenant and day."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tritonforge.gateway.accounting.config import state_folder
from tritonforge.gateway.accounting.usage import Usage, read_usage
from tritonforge.gateway.config import GatewayConfig

HEADINGS = ("day", "tenant", "model", "requests", "failed", "prompt", "cached", "completion", "cost")


def usage_file(configured: str | None) -> Path:
    """Where usage is kept."""
    return Path(configured) if configured else state_folder() / "usage.sqlite"


def usage(arguments: argparse.Namespace) -> int:
    """Print a table, or one JSON object a line."""
    table = GatewayConfig.read(arguments.config).records.usage
    found = read_usage(arguments.file or usage_file(table.file), arguments.tenant, arguments.since, arguments.until)
    if arguments.json:
        for one in found:
            print(json.dumps(asdict(one) | {"cost": one.cost, "currency": table.currency}))
        return 0
    print("\n".join(table_of_usage(found, table.currency)))
    return 0


def table_of_usage(found: list[Usage], currency: str) -> list[str]:
    """The lines of the table, numbers to the right, the sum last; a cost that lacks a price has a star."""
    rows = [(*HEADINGS[:-1], f"cost ({currency})")]
    for one in found:
        model = one.model if one.model == one.served_model else f"{one.model} -> {one.served_model}"
        rows.append((one.day, one.tenant, model, *_numbers([one])))
    if found:
        rows.append(("sum", "", "", *_numbers(found)))
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if place < 3 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    unpriced = sum(one.unpriced for one in found)
    if unpriced:
        lines.append(f"* without {unpriced} requests of models that have no [prices]")
    return [line.rstrip() for line in lines]


def _numbers(found: list[Usage]) -> tuple[str, ...]:
    names = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")
    star = "*" if any(one.unpriced for one in found) else ""
    cost = sum(one.cost_nano for one in found) / 1e9
    return (*(str(sum(getattr(one, name) for one in found)) for name in names), f"{cost:.6f}{star}")
