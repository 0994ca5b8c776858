"""The container image and its neighbours: they start what the command line takes, as nobody, on a read-only root."""

import importlib.util
import json
import re
import sys
from email.message import Message
from pathlib import Path

import pytest
import yaml

from tritonforge.cli import _parser

ROOT = Path(__file__).resolve().parent.parent.parent
DOCKER = ROOT / "docker"


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dockerfile = load(ROOT / "scripts" / "dockerfile.py")
sbom = load(DOCKER / "sbom.py")
DIGESTS = {"DEBIAN_DIGEST": "sha256:" + "a" * 64, "TRITON_DIGEST": "sha256:" + "b" * 64}
TEXT = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
STAGES = dockerfile.parse(TEXT, DIGESTS)


def last(stage, name):
    return [one for one in STAGES[stage].instructions if one.name == name][-1]


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_an_image_serves_as_nobody_and_says_by_a_probe_whether_it_is_healthy(target):
    """Wrong if it failed: an image that runs as root, or starts with arguments that the command line refuses."""
    uid, gid = last(target, "USER").text.split(":")
    assert int(uid) >= 10000 and int(gid) >= 10000
    assert Path(last(target, "ENTRYPOINT").arguments()[0]).name == "tritonforge"
    arguments = _parser().parse_args(last(target, "CMD").arguments())
    assert arguments.run.__name__ == "serve" and str(arguments.release) == "/release"
    check = json.loads(last(target, "HEALTHCHECK").text.removeprefix("CMD").strip())
    assert _parser().parse_args(check[1:]).question == "readiness"


def test_bases_are_named_by_digests_that_have_no_default():
    """Wrong if it failed: an image that stands on whatever a tag means today."""
    bases = {name: stage.base for name, stage in STAGES.items() if stage.base not in STAGES}
    assert set(bases) == {"debian", "gpu"}
    assert bases["debian"].endswith("@" + DIGESTS["DEBIAN_DIGEST"])
    assert bases["gpu"].endswith("@" + DIGESTS["TRITON_DIGEST"])
    assert all(stage.base.endswith("@") for stage in dockerfile.parse(TEXT, {}).values() if "/" in stage.base)


def test_every_run_is_a_step_of_the_script_and_every_file_is_there_and_let_through():
    steps = set(
        re.findall(r"^(?:([a-z-]+)\)|([a-z]+)\(\) \{)", (DOCKER / "steps.sh").read_text(encoding="utf-8"), re.M)
    )
    known = {name for pair in steps for name in pair if name}
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    for stage in STAGES.values():
        for one in stage.instructions:
            if one.name == "RUN":
                found = re.search(r"sh /mnt/steps\.sh ([a-z-]+)", one.text)
                assert found and found[1] in known, one.text
            mounts = [
                dict(part.split("=") for part in value.split(",")) for flag, value in one.flags if flag == "mount"
            ]
            sources = [mount["source"] for mount in mounts]
            sources += one.arguments()[:-1] if one.name == "COPY" and not one.flag("from") else []
            for source in sources:
                assert (ROOT / source).exists() and f"!{source}" in ignored, source


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("FROM a\nADD x y", "ADD"),
        ("RUN x\nFROM a", "RUN"),
        ("FROM a AS b c", "a AS b c"),
        ("FROM a\nRUN <<EOF\nEOF", "here-documents"),
    ],
)
def test_what_the_reader_of_dockerfiles_does_not_know_is_refused_by_name(text, named):
    with pytest.raises(dockerfile.InvalidDockerfile, match=named):
        dockerfile.parse(text, {})


def test_a_dockerfile_is_read_as_docker_reads_it():
    text = (
        "ARG TAG=1\nFROM a:${TAG} AS b\n# comment\nRUN --mount=type=bind,source=x,target=y one \\\n    two\n"
        'ENV A=1 B="2 3"\nCMD ["x", "y z"]'
    )
    stage = dockerfile.parse(text, {"TAG": "2"})["b"]
    run, env, command = stage.instructions
    assert (
        stage.base == "a:2"
        and run.text.split() == ["one", "two"]
        and run.flag("mount") == "type=bind,source=x,target=y"
    )
    assert env.pairs() == {"A": "1", "B": "2 3"} and command.arguments() == ["x", "y z"]
    assert dockerfile.substitute("$A/${B}${NONE}", {"A": "1", "B": "2"}) == "1/2"


def test_a_bill_of_materials_is_the_same_for_the_same_contents():
    status = "zlib1g\t1:1.2.13+x\tamd64\tMaria Muster <m@example.org>\nadduser\t3.134\tall\tDebian <d@example.org>\n"
    parts = list(sbom.debian_components(status, "debian-12"))
    bill, other = sbom.document(parts, "1"), sbom.document(parts[::-1] + parts[:1], "1")
    assert bill == other and [one["name"] for one in bill["components"]] == ["adduser", "zlib1g"]
    assert bill["components"][1]["purl"] == "pkg:deb/debian/zlib1g@1%3A1.2.13%2Bx?arch=amd64&distro=debian-12"
    assert bill["components"][1]["supplier"] == {"name": "Maria Muster"}
    assert bill["serialNumber"] != sbom.document(parts[:1], "1")["serialNumber"]


@pytest.mark.parametrize(
    ("headers", "licence"),
    [
        ([("License-Expression", "MIT OR Apache-2.0"), ("License", "x")], {"expression": "MIT OR Apache-2.0"}),
        ([("Classifier", "License :: OSI Approved :: MIT License")], {"license": {"name": "MIT License"}}),
        ([("Classifier", "License :: OSI Approved"), ("License", "Apache 2\nlong")], {"license": {"name": "Apache 2"}}),
        ([("Classifier", "Topic :: x")], None),
    ],
)
def test_a_licence_is_taken_from_where_the_package_states_it(headers, licence):
    metadata = Message()
    for name, value in headers:
        metadata[name] = value
    assert sbom._licence(metadata) == licence


def test_compose_starts_the_server_hardened_on_loopback_with_arguments_that_it_takes():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert set(services) == {"server", "gateway", "prometheus", "grafana"}
    for one in services.values():
        assert one["read_only"] and one["cap_drop"] == ["ALL"] and "no-new-privileges:true" in one["security_opt"]
        assert all(port.startswith("127.0.0.1:") for port in one["ports"])
        for volume in one["volumes"]:
            source, _, target = volume.partition(":")
            assert not source.startswith("./") or ((DOCKER / source).exists() and target.endswith(":ro")), volume
    for name in ("server", "gateway"):
        arguments = _parser().parse_args(services[name]["command"])
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > arguments.drain_timeout + 10


def test_prometheus_scrapes_under_the_job_that_the_rules_ask_for():
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    rules = (DOCKER / "generated" / "rules.yml").read_text(encoding="utf-8")
    assert [one["job_name"] for one in config["scrape_configs"]] == ["tritonforge", "tritonforge-gateway"]
    assert set(re.findall(r'job=\\?"([\w-]+)', rules)) == {"tritonforge", "tritonforge-gateway"}
    gateway = _parser().parse_args(
        yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]["gateway"]["command"]
    )
    assert config["scrape_configs"][1]["dns_sd_configs"][0]["port"] == gateway.metrics_port
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text(encoding="utf-8"))
    assert source["datasources"][0]["type"] == "prometheus"
