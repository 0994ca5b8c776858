"""The contract's load as a Locust test: headless, in the web UI, or with a master and workers.

    locust -f loadtests/locustfile.py --host 127.0.0.1:8001 --contract loadtests/contracts/demo.toml --release DIR

The contract's schedule says when requests are sent, so users, spawn rate and run time are not asked for. Charts show
E2E, TTFT, TPOT and tokens per second of each phase; the verdict comes from the raw records, never from Locust's own
percentiles.
"""

# ruff: noqa: E402
import grpc.experimental.gevent as grpc_gevent

grpc_gevent.init_gevent()  # before any channel: without it, gRPC blocks the whole process

import sys
import time
from pathlib import Path
from typing import ClassVar

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

import gevent
import locust.stats
from locust import LoadTestShape, User, constant, events, task
from locust.runners import STATE_MISSING, MasterRunner, WorkerRunner

from loadtests.exits import refuse
from loadtests.session import BARRIER_S, Judge, Walker, run_of

SHARD, DONE = "tritonforge_shard", "tritonforge_done"


def three_digits(response_time: float) -> int:
    """Buckets of Locust's charts: whole milliseconds up to 1,000, three digits beyond, so they are within 1%."""
    return round(response_time) if response_time < 1000 else int(float(f"{response_time:.3g}"))


locust.stats.bucket_response_time = three_digits


class Test:
    """The test this process is in; `over` ends it. `given` is a worker's share, as its master sent it.

    `waiting_for` holds the workers (by id) whose shards a master still waits for, until `deadline`.
    """

    walker: Walker | None = None
    judge: Judge | None = None
    given: ClassVar[dict] = {}
    waiting_for: ClassVar[dict[str, int]] = {}
    deadline = float("inf")
    over = False


@events.init_command_line_parser.add_listener
def add_arguments(parser) -> None:
    parser.add_argument("--contract", default=f"{ROOT}/loadtests/contracts/demo.toml", help="contract file (TOML)")
    parser.add_argument("--contract-profile", default="", help="profile of the contract, when it has several")
    parser.add_argument(
        "--release", default="", help="folder of the release that is served: named in the report, its tokenizer used"
    )
    parser.add_argument("--tokenizer", default="", help="tokenizer.json, when there is no release folder")
    parser.add_argument("--http-url", default="", help="HTTP endpoint, for a profile over http-sse")
    parser.add_argument("--metrics-url", default="", help="metrics endpoint: KV blocks and tokens are compared with it")
    parser.add_argument(
        "--server-pid", type=int, default=0, include_in_web_ui=False, help="process that serves: its memory, faults"
    )
    parser.add_argument("--out", default="", help="report folder; default: artifacts/reports/locust-<time>")
    parser.add_argument("--salt", default="", help="repeat the prompts of an earlier run: its salt")
    parser.add_argument("--run-id", default="", include_in_web_ui=False, help="prefix of the request ids")
    parser.add_argument("--raw-only", action="store_true", include_in_web_ui=False, help="write records, no verdict")


@events.init.add_listener
def on_init(environment, runner, **_) -> None:
    if isinstance(runner, MasterRunner):
        runner.register_message(DONE, on_done)
        return
    if isinstance(runner, WorkerRunner):
        runner.register_message(SHARD, on_shard)
        return
    if environment.web_ui is None:
        try:
            run_of(environment.parsed_options, environment.host)
        except Exception as error:
            sys.exit(refuse(error))


@events.test_start.add_listener
def on_test_start(environment, **_) -> None:
    Test.over, Test.walker, Test.judge, environment.process_exit_code = False, None, None, None
    try:
        begin(environment)
    except Exception as error:  # whatever it is: without this the test would wait for a walker that never comes
        environment.process_exit_code = refuse(error)
        Test.over, Test.judge = True, None
        if isinstance(environment.runner, WorkerRunner):
            environment.runner.send_message(DONE, {})


def begin(environment) -> None:
    """Local: judge and walk. Master: judge, and give each worker a shard. Worker: walk the shard it was given."""
    runner, options = environment.runner, environment.parsed_options
    if isinstance(runner, WorkerRunner):
        share = Test.given
        run = run_of(options, environment.host, **{key: share[key] for key in ("out", "salt", "run_id")})
        where = {key: share[key] for key in ("shard", "of", "start_ns")}
        Test.walker = Walker(environment, run, **where)
        return
    run = run_of(options, environment.host)
    Test.judge = Judge(run, raw_only=options.raw_only)
    Test.judge.start()
    if not isinstance(runner, MasterRunner):
        Test.walker = Walker(environment, run)
        return
    workers = [client.id for client in runner.clients.ready]
    Test.waiting_for = {client_id: shard for shard, client_id in enumerate(workers)}
    Test.deadline = time.monotonic() + Test.judge.deadline_s()
    common = {"out": str(run.out), "salt": run.salt, "run_id": run.run_id, "of": len(workers)}
    for client_id, shard in Test.waiting_for.items():
        share = {**common, "shard": shard, "start_in_s": BARRIER_S}
        runner.send_message(SHARD, share, client_id)


def on_shard(environment, msg, **_) -> None:
    """Only durations cross machines: the start is so long after the message came, on this worker's own clock."""
    Test.given = {**msg.data, "start_ns": time.perf_counter_ns() + round(msg.data["start_in_s"] * 1e9)}


def on_done(environment, msg, **_) -> None:
    Test.waiting_for.pop(msg.node_id, None)
    Test.over = not Test.waiting_for


def some_worker_is_left(runner: MasterRunner) -> bool:
    """False when every worker that still owes its shard is gone: nothing more will come."""
    states = {client.id: client.state for client in runner.clients.all}
    return any(states.get(client_id, STATE_MISSING) != STATE_MISSING for client_id in Test.waiting_for)


class Arrivals(User):
    """Walks the schedule; one per process does. It waits for no answer: each request is a greenlet of its own."""

    wait_time = constant(1)

    @task
    def walk(self) -> None:
        walker, Test.walker = Test.walker, None
        if walker is None:
            gevent.sleep(0.2)
            return
        try:
            walker.run()
        finally:  # a walk whose records cannot be written ends the test, too: the missing end line tells of it
            if isinstance(self.environment.runner, WorkerRunner):
                self.environment.runner.send_message(DONE, {"shard": Test.given["shard"]})
            else:
                Test.over = True


class Schedule(LoadTestShape):
    """Ends the test when the schedule is over. One user a worker; the arrivals' rate is the contract's."""

    count = 1

    def tick(self) -> tuple[int, float] | None:
        if Test.over or time.monotonic() > Test.deadline:
            return None
        runner = self.runner
        if isinstance(runner, MasterRunner):
            if Test.judge is None:
                self.count = max(1, len(runner.clients.ready))
            elif not some_worker_is_left(runner):
                return None
        return self.count, float(self.count)


@events.test_stop.add_listener
def on_test_stop(environment, **_) -> None:
    if isinstance(environment.runner, WorkerRunner):
        return
    judge, Test.judge, Test.over, Test.deadline = Test.judge, None, False, float("inf")
    if judge is None:
        return
    try:
        environment.process_exit_code = judge.finish()
    except Exception as error:  # Locust would log it and end as if nothing had been wrong with the service
        environment.process_exit_code = refuse(error)
