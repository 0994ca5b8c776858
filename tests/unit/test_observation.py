"""How a service is observed: what the launcher was told is what the decoder reads, or it is refused by name."""

from pathlib import Path

import pytest

from tritonforge.errors import InvalidRequest
from tritonforge.observation.observation import Observation


def test_settings_survive_the_way_through_the_environment(tmp_path):
    given = Observation(
        log_level="debug",
        log_content=True,
        request_log=tmp_path / "requests.log",
        otlp_endpoint="http://127.0.0.1:4318",
        trace_ratio=0.5,
        stall_timeout_s=12.5,
        log_control=tmp_path / "control.json",
    )
    assert Observation.read(given.environment()) == given


def test_nothing_said_means_the_defaults():
    assert Observation.read({}) == Observation() and Observation().otlp_endpoint is None


def test_a_relative_file_is_the_launchers_and_not_the_decoders():
    assert Observation(request_log=Path("x.log")).environment()["TRITONFORGE_REQUEST_LOG"] == str(
        Path("x.log").absolute()
    )


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"log_level": "loud"}, "log level"),
        ({"otlp_endpoint": "127.0.0.1:4318"}, "OTLP endpoint"),
        ({"trace_ratio": 1.5}, "trace ratio"),
        ({"stall_timeout_s": 0}, "stall timeout"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(setting, named):
    with pytest.raises(InvalidRequest, match=named):
        Observation(**setting)


def test_a_variable_that_is_no_number_is_refused_by_its_name():
    with pytest.raises(InvalidRequest, match="TRITONFORGE_TRACE_RATIO"):
        Observation.read({"TRITONFORGE_TRACE_RATIO": "often"})
