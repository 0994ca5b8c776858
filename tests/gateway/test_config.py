"""gateway.toml. Wrong if a limit that somebody wrote were not the one that holds."""

import pytest

from tritonforge.errors import InvalidRequest
from tritonforge.gateway.config import GatewayConfig


def test_a_tenants_own_values_come_before_the_defaults_and_those_before_none():
    config = GatewayConfig.of_tables(
        {
            "defaults": {"requests_per_minute": 60, "priority_class": 7},
            "tenants": {"acme": {"requests_per_minute": 100, "models": ["m"]}},
        }
    )
    acme, other = config.tenant("acme"), config.tenant("other")
    assert (acme.name, acme.requests_per_minute, acme.priority_class, acme.models) == ("acme", 100, 7, ("m",))
    assert (other.name, other.requests_per_minute, other.models, other.tokens_per_day) == ("other", 60, None, None)


def test_without_a_file_there_are_no_limits():
    tenant = GatewayConfig.read(None).tenant("anybody")
    assert (tenant.requests_per_minute, tenant.tokens_per_minute, tenant.concurrent_requests) == (None, None, None)


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"tenant": {}}, "'tenant'"),
        ({"defaults": {"request_per_minute": 1}}, "'request_per_minute'"),
        ({"tenants": {"acme": {"requests_per_minute": 0}}}, "requests_per_minute of tenant 'acme'"),
        ({"tenants": {"acme": {"tokens_per_day": True}}}, "tokens_per_day"),
        ({"tenants": {"acme": {"priority_class": 10}}}, "priority_class"),
        ({"tenants": {"acme": {"models": [1]}}}, "models"),
        ({"tenants": {"acme": 1}}, "acme"),
        ({"edge": {"slow_client_s": 0}}, "slow_client_s"),
        ({"edge": {"storage": "mysql://x"}}, "storage"),
        ({"edge": {"max_body_bytes": "1"}}, "max_body_bytes"),
    ],
)
def test_what_breaks_a_rule_is_refused_by_table_and_key(tables, named):
    with pytest.raises(InvalidRequest, match=named):
        GatewayConfig.of_tables(tables)


def test_a_file_is_read_and_a_broken_one_named(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text('[tenants.acme]\ntokens_per_day = 5\n[edge]\nstorage = "memory"\n', encoding="utf-8")
    assert GatewayConfig.read(file).tenant("acme").tokens_per_day == 5
    file.write_text("[", encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"gateway\.toml"):
        GatewayConfig.read(file)
