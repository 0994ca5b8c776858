"""The command `tritonforge batch`: answers a file of requests, at a gateway that runs or at one of its own."""

import argparse
import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

import uvicorn

from tritonforge.errors import InvalidRequest, SetupError
from tritonforge.gateway.batch.files import set_errors_aside
from tritonforge.gateway.batch.run import BatchOptions, Progress, run_batch
from tritonforge.gateway.command import http_server, listen, make_edge, model_info, quiet_http_client, served
from tritonforge.gateway.config import GatewayConfig
from tritonforge.gateway.routing.alias_router import AliasRouter, Models
from tritonforge.gateway.tables import secret_of

LINE_S, LINE_S_TERMINAL = 10.0, 0.5
START_S = 60.0


def batch(arguments: argparse.Namespace) -> int:
    """Answer the batch; 0 when all requests have answers, 1 when some are errors."""
    errors = arguments.errors or arguments.out.with_name(f"{arguments.out.stem}.errors{arguments.out.suffix}")
    if len({path.resolve() for path in (arguments.input, arguments.out, errors)}) < 3:
        raise InvalidRequest("the files of requests, answers and errors must be three")
    local = arguments.release is not None or arguments.triton is not None
    if local and arguments.url is not None:
        raise InvalidRequest("give --url of a gateway, or --release or --triton, and not both")
    if arguments.url is not None and not arguments.url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url must begin with http:// or https://, got {arguments.url!r}")
    key = secret_of("the gateway's key must be", arguments.key_env) if os.environ.get(arguments.key_env) else None
    quiet_http_client()
    if arguments.retry_errors:
        set_errors_aside(errors)
    with contextlib.ExitStack() as stack:
        url = arguments.url or "http://127.0.0.1:8080"
        if local:
            url = stack.enter_context(_gateway(arguments, stack))
        options = BatchOptions(
            arguments.input,
            arguments.out,
            errors,
            url.rstrip("/").removesuffix("/v1"),
            key,
            arguments.concurrency,
            arguments.ordered,
            arguments.tries,
            arguments.timeout,
        )
        progress = asyncio.run(run_batch(options, Reporter(sys.stderr.isatty())))
    print(f"{progress.line()}\nanswers: {options.out}", file=sys.stderr)
    if errors.stat().st_size:
        print(f"errors: {errors}; --retry-errors asks them again", file=sys.stderr)
        return 1
    errors.unlink()
    return 0


class Reporter:
    """Prints the progress: a line that is overwritten on a terminal, else one now and then."""

    def __init__(self, terminal: bool) -> None:
        self._terminal, self._told = terminal, time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Called after each line that was written."""
        now = time.monotonic()
        if now - self._told < (LINE_S_TERMINAL if self._terminal else LINE_S):
            return
        self._told = now
        end = "\r" if self._terminal else "\n"
        print(progress.line().ljust(79) if self._terminal else progress.line(), end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _gateway(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[str]:
    """A gateway of our own, on this machine, for as long as the batch runs."""
    urls = arguments.triton or [stack.enter_context(served(arguments.release))]
    info = model_info(arguments.release, arguments.model)
    listener = listen("127.0.0.1", 0)
    made: list[uvicorn.Server] = []
    ready = threading.Event()

    async def serve() -> None:
        models: Models = {info.name: (info, urls)}
        config = GatewayConfig()
        made.append(http_server(make_edge(config, None, AliasRouter(config.routing, models))))
        ready.set()
        await made[0].serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    if not ready.wait(START_S):
        raise SetupError("the gateway of the batch did not start; its log says why")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        made[0].should_exit = True
        thread.join()
