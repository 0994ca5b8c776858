"""The arguments of `tritonforge gateway` and `tritonforge keys`, read without loading the edge."""

import argparse
from datetime import date
from pathlib import Path
from typing import Any

from tritonforge.observation.command import add_trace_arguments


def add_parsers(commands: Any) -> None:
    """Add both commands to the command line."""
    command = commands.add_parser("gateway", help="serve OpenAI's API, with keys, tenants and limits")
    command.add_argument("--release", type=Path, help="the release folder; served as well, unless --triton is given")
    command.add_argument(
        "--triton",
        metavar="URL",
        action="append",
        help="gRPC endpoint, host:port, of a Triton that serves the release; repeat it for replicas",
    )
    command.add_argument("--model", help="the model's name in the API (default: the release's, or llm)")
    command.add_argument("--keys", type=Path, help="the file of API keys")
    command.add_argument("--no-keys", action="store_true", help="ask for no key; on loopback addresses only")
    command.add_argument("--config", type=Path, help="gateway.toml: tenants and limits")
    command.add_argument("--address", default="127.0.0.1", help="the address to bind to (default: %(default)s)")
    command.add_argument("--port", type=int, default=8080, help="0: a free one (default: %(default)s)")
    drain = "seconds that open streams have to end after a signal (default: %(default)g)"
    command.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help=drain)
    metrics = "a port for metrics alone, for everybody who reaches it (0: a free one; default: none)"
    command.add_argument("--metrics-port", type=int, metavar="PORT", help=metrics)
    command.add_argument("--metrics-address", default="127.0.0.1", help="of that port (default: %(default)s)")
    add_trace_arguments(command)
    command.set_defaults(run=_gateway)
    command = commands.add_parser("keys", help="create, revoke or list API keys of the gateway")
    actions = command.add_subparsers(required=True, metavar="action", dest="action")
    create = actions.add_parser("create", help="make a key; it is printed once")
    create.add_argument("--tenant", required=True)
    create.add_argument("--note", default="", help="what it is for")
    revoke = actions.add_parser("revoke", help="end a key")
    revoke.add_argument("id")
    for action in (create, revoke, actions.add_parser("list", help="all keys, without their secrets")):
        action.add_argument("--keys", type=Path, required=True, help="the file of API keys")
        action.set_defaults(run=_keys)

    _add_usage(commands)
    _add_batch(commands)


def _add_batch(commands: Any) -> None:
    command = commands.add_parser("batch", help="answer a file of requests, in OpenAI's batch form; resumes by itself")
    command.add_argument("input", type=Path, help="the requests, one JSON object a line")
    command.add_argument("out", type=Path, help="the answers; those that are there already are not asked again")
    command.add_argument("--errors", type=Path, help="the requests that failed (default: OUT.errors.jsonl)")
    command.add_argument("--retry-errors", action="store_true", help="ask those again; the old file is set aside")
    command.add_argument("--ordered", action="store_true", help="answers in the order of the requests")
    command.add_argument("--concurrency", type=_count, default=16, metavar="N", help="at once (default: %(default)s)")
    command.add_argument("--tries", type=_count, default=8, metavar="N", help="of each request (default: %(default)s)")
    command.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of each try (default: %(default)g)")
    command.add_argument("--url", help="the gateway (default: http://127.0.0.1:8080, unless one of the next is given)")
    command.add_argument(
        "--key-env", default="TRITONFORGE_API_KEY", metavar="NAME", help="variable with the key (default: %(default)s)"
    )
    command.add_argument("--release", type=Path, help="serve this release for the batch, unless --triton is given")
    command.add_argument("--triton", metavar="URL", action="append", help="gRPC endpoint of a Triton that serves it")
    command.add_argument("--model", help="with these: the model's name (default: the release's, or llm)")
    command.set_defaults(run=_batch)


def _batch(arguments: argparse.Namespace) -> int:
    from tritonforge.gateway.batch.command import batch

    return batch(arguments)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of 1 or more, got {text}")
    return value


def _add_usage(commands: Any) -> None:
    command = commands.add_parser("usage", help="tokens and cost by tenant and day, as the gateway counted them")
    command.add_argument("--config", type=Path, help="the gateway's configuration: where the usage is, its currency")
    command.add_argument("--file", type=Path, help="the SQLite file (default: that of the configuration)")
    command.add_argument("--tenant", help="only this tenant's")
    command.add_argument("--since", type=date.fromisoformat, metavar="DAY", help="from this day of UTC, 2026-11-30")
    command.add_argument("--until", type=date.fromisoformat, metavar="DAY", help="to this day, included")
    command.add_argument("--json", action="store_true", help="one JSON object a line")
    command.set_defaults(run=_usage)


def _usage(arguments: argparse.Namespace) -> int:
    from tritonforge.gateway.accounting.usage_command import usage

    return usage(arguments)


def _gateway(arguments: argparse.Namespace) -> int:
    from tritonforge.gateway.command import gateway

    return gateway(arguments)


def _keys(arguments: argparse.Namespace) -> int:
    from tritonforge.gateway.limits.key_command import keys

    return keys(arguments)
