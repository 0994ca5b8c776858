"""`tritonforge release list, canary, promote, rollback`: the command line's end, and what the launcher does with it."""

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from tritonforge.errors import InvalidRequest, SetupError
from tritonforge.launch.control_socket import ask
from tritonforge.launch.ports import LOOPBACK, reachable

TIMEOUT_S = 900.0
"""A large release takes minutes to load."""


class CommandTable:
    """What the control socket answers, by the command's name."""

    def __init__(self, rollout: "Rollout") -> None:  # noqa: F821 - the command line does not need it
        self._commands = {
            "list": lambda: rollout.describe(),
            "canary": lambda release, share, tenants, ignore_memory=False: rollout.canary(
                Path(release), share, tenants, ignore_memory=ignore_memory
            ),
            "promote": rollout.promote,
            "rollback": lambda ignore_memory=False: rollout.rollback(ignore_memory=ignore_memory),
        }

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out {"command": name, argument: value, ...}."""
        name = request.pop("command", None)
        if name not in self._commands:
            raise InvalidRequest(f"command must be one of {', '.join(self._commands)}, got {name!r}")
        try:
            inspect.signature(self._commands[name]).bind(**request)
        except TypeError as error:
            raise InvalidRequest(f"command {name}: {error}") from None
        return self._commands[name](**request)


def add_parser(commands: Any) -> None:
    """Add `release` and its four commands to the command line."""
    release = commands.add_parser("release", help="try a release beside the served one, promote it, take it back")
    actions = release.add_subparsers(required=True, metavar="action")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--port", type=int, default=8001, help="gRPC port of the server (default: %(default)s)")
    common.add_argument(
        "--address", default=LOOPBACK, help="the address that the server is bound to (default: %(default)s)"
    )
    common.add_argument("--json", action="store_true", help="print one JSON object")
    loading = argparse.ArgumentParser(add_help=False, parents=[common])
    loading.add_argument("--ignore-memory", action="store_true", help="load it although memory may run out")
    actions.add_parser("list", parents=[common], help="what is served").set_defaults(run=run, action="list")
    canary = actions.add_parser("canary", parents=[loading], help="load a release beside the stable one")
    canary.add_argument("release", type=Path, help="the release folder")
    canary.add_argument("--share", type=_percent, metavar="PERCENT", help="of the requests, by their ids")
    canary.add_argument("--tenant", action="append", default=[], help="only this tenant's requests; repeatable")
    canary.set_defaults(run=run, action="canary")
    promote = actions.add_parser("promote", parents=[common], help="make the canary the stable release")
    promote.add_argument("--contract", type=Path, help="only if the canary keeps this contract so far")
    promote.add_argument("--metrics-port", type=int, default=8002, help="with --contract (default: %(default)s)")
    promote.add_argument("--profile", help="with --contract: its profile, when it has several")
    promote.set_defaults(run=run, action="promote")
    rollback = actions.add_parser("rollback", parents=[loading], help="take the canary, or the last promotion, back")
    rollback.set_defaults(run=run, action="rollback")


def run(arguments: argparse.Namespace) -> int:
    """Carry out one release command on a running server and say what it serves then."""
    request: dict[str, Any] = {"command": arguments.action}
    if arguments.action == "canary":
        request |= {"release": str(arguments.release.absolute()), "share": arguments.share, "tenants": arguments.tenant}
    if getattr(arguments, "ignore_memory", False):
        request["ignore_memory"] = True
    if arguments.action == "promote" and arguments.contract is not None:
        code = _judge(arguments)
        if code:
            print("not promoted: the canary does not keep the contract", file=sys.stderr)
            return code
    answer = ask(arguments.port, request, TIMEOUT_S, address=arguments.address)
    print(json.dumps(answer) if arguments.json else _table(answer))
    return 0


def _judge(arguments: argparse.Namespace) -> int:
    """The verdict's exit code: 0 kept, 1 broken, 3 not enough requests to say so."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "loadtests" / "canary_judge.py").is_file():
        raise SetupError("--contract needs the load tests, which no package holds; run it from a checkout")
    sys.path.insert(0, str(root))
    from loadtests import canary_judge

    served = ask(arguments.port, {"command": "list"}, TIMEOUT_S, address=arguments.address)["served"]
    canaries = [row for row in served if row["role"] == "canary"]
    if not canaries:
        raise InvalidRequest("there is no canary to judge")
    url = f"{reachable(arguments.address)}:{arguments.metrics_port}"
    return canary_judge.run(arguments.contract, arguments.profile, url, canaries[0]["version"])


def _table(answer: dict[str, Any]) -> str:
    lines = [f"{'role':8} {'version':7} {'model':10} {'share':28} {'digest':16} release"]
    for row in answer["served"]:
        share = "the rest" if "share" not in row else f"{row['share']:.2%}"
        if row.get("tenants"):
            share += f" of {', '.join(row['tenants'])}"
        lines.append(
            f"{row['role']:8} {row['version']:7} {row['model']:10} {share:28} {row['digest'][:16]} {row['name']}"
        )
    if answer["previous"] is not None:
        previous = answer["previous"]
        lines.append(f"{'previous':8} {'-':>7} {'-':10} {'-':28} {previous['digest'][:16]} {previous['name']}")
    return "\n".join(lines)


def _percent(text: str) -> float:
    """A share in percent, as a fraction; the server checks the range."""
    return float(text.removesuffix("%")) / 100
