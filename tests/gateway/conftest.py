"""Fixtures of the gateway's tests: one gateway for all that need no limits, and a way to start others."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.gateway.serving import Gateway, serve_gateway  # noqa: E402


@pytest.fixture(scope="session")
def gateway(server, release_dir: Path, tmp_path_factory) -> Iterator[Gateway]:
    """A gateway whose one tenant has no limits."""
    with serve_gateway(server.grpc_url, release_dir, tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture
def gateway_of(server, release_dir: Path, tmp_path: Path) -> Callable:
    """gateway_of(tables, tenants): a context manager for a gateway with this content of gateway.toml."""

    def start(tables, tenants=("open",)):
        return serve_gateway(server.grpc_url, release_dir, tmp_path, tables, tenants)

    return start


@pytest.fixture(scope="session")
def sdk(gateway: Gateway) -> Iterator[openai.OpenAI]:
    """OpenAI's own client; nothing is tried twice."""
    with openai.OpenAI(base_url=gateway.base_url, api_key=gateway.keys["open"], max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(gateway: Gateway) -> Iterator[httpx2.Client]:
    """A plain HTTP client that sends the key."""
    with httpx2.Client(base_url=gateway.url, headers=gateway.bearer(), timeout=60, trust_env=False) as client:
        yield client
