"""Which addresses are this machine's own: a proxy in the environment must not come between."""

import pytest

from tritonforge.launch.ports import is_loopback


@pytest.mark.parametrize(
    ("url", "own"),
    [
        ("127.0.0.1:8001", True),
        ("localhost:8001", True),
        ("[::1]:8001", True),
        ("10.0.0.1:8001", False),
        ("localhost.example.org:8001", False),
        ("[fe80::1]:8001", False),
    ],
)
def test_only_the_loopback_is_reached_without_a_proxy(url, own):
    assert is_loopback(url) is own


def test_load_tests_reach_this_machine_whatever_proxy_is_configured(monkeypatch):
    """Wrong: a campaign on a machine behind a proxy measures that its proxy refuses."""
    import grpc

    from loadtests.streams import open_channel

    seen = []
    monkeypatch.setattr(grpc, "insecure_channel", lambda target, options: seen.append((target, dict(options))))
    open_channel("grpc://127.0.0.1:8001")
    open_channel("10.0.0.1:8001")
    assert [(target, options.get("grpc.enable_http_proxy")) for target, options in seen] == [
        ("127.0.0.1:8001", 0),
        ("10.0.0.1:8001", None),
    ]
    assert {options["grpc.enable_retries"] for _, options in seen} == {0}, "gRPC's own retries would hide failures"
