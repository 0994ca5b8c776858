"""The Kubernetes manifests against the program: arguments that it takes, times that fit, series that it has.

Their schemas are held by scripts/check_manifests.py, which needs packages that this environment does not have.
"""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from tritonforge.cli import _parser
from tritonforge.gateway.config import GatewayConfig
from tritonforge.launch.supervisor import EXIT_S, UNLOAD_S
from tritonforge.observation.metrics import FAMILIES

ROOT = Path(__file__).resolve().parent.parent.parent
SPEC = importlib.util.spec_from_file_location("check_manifests", ROOT / "scripts" / "check_manifests.py")
manifests = sys.modules["check_manifests"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(manifests)
NAMES = [str(folder.relative_to(manifests.KUBERNETES)) for folder in manifests.kustomizations()]

needs_kustomize = pytest.mark.skipif(
    not any(shutil.which(command[0]) for command in manifests.BUILDERS),
    reason="neither kustomize nor kubectl is installed",
)


@pytest.fixture(scope="module")
def rendered():
    return {name: manifests.render(manifests.KUBERNETES / name) for name in NAMES}


def kind(resources, wanted):
    return [one for one in resources if one["kind"] == wanted]


def pods(resources):
    """The pod templates of Deployments, and KServe's runtime, which has the same fields."""
    return [one["spec"]["template"]["spec"] for one in kind(resources, "Deployment")] + [
        one["spec"] for one in kind(resources, "ServingRuntime")
    ]


def containers(resources):
    return [one for pod in pods(resources) for one in (*pod.get("initContainers", ()), *pod["containers"])]


@needs_kustomize
@pytest.mark.parametrize("name", NAMES)
def test_containers_start_with_arguments_that_the_command_line_takes(rendered, name):
    """Wrong if it failed: pods that end with a usage error, or a probe that always says no."""
    ours = [one for one in containers(rendered[name]) if "tritonforge" in one["image"]]
    assert ours
    for one in ours:
        _parser().parse_args(one["args"])
        for probe in ("startup", "liveness", "readiness"):
            command = one.get(f"{probe}Probe", {}).get("exec", {}).get("command")
            if command is not None:
                parsed = _parser().parse_args(command[1:])
                assert command[0] == "tritonforge" and parsed.question == probe
                assert parsed.timeout < one[f"{probe}Probe"]["timeoutSeconds"]


@needs_kustomize
@pytest.mark.parametrize("name", NAMES)
def test_nobody_runs_as_root_or_can_write_or_gain_rights(rendered, name):
    for one in containers(rendered[name]):
        context = one["securityContext"]
        assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]} and context["seccompProfile"]["type"] == "RuntimeDefault"
        assert one["resources"]["limits"]["memory"] == one["resources"]["requests"]["memory"]
        writable = {mount["name"] for mount in one["volumeMounts"] if not mount.get("readOnly")}
        own = {"fetch": {"release", "tmp"}, "gateway": {"records", "tmp"}}
        assert writable <= own.get(one["name"], {"tmp", "shm"})


@needs_kustomize
@pytest.mark.parametrize("name", [name for name in NAMES if name != "kserve"])
def test_a_pod_that_goes_has_time_for_its_longest_stream(rendered, name):
    for pod in pods(rendered[name]):
        for one in pod["containers"]:
            drain = getattr(_parser().parse_args(one["args"]), "drain_timeout", 30)
            pause = int(one["lifecycle"]["preStop"]["exec"]["command"][1])
            assert pod["terminationGracePeriodSeconds"] > pause + drain + UNLOAD_S + EXIT_S


@needs_kustomize
@pytest.mark.parametrize("name", NAMES)
def test_what_is_mounted_and_referred_to_exists(rendered, name):
    resources = rendered[name]
    have = {(one["kind"], one["metadata"]["name"]) for one in resources}
    for pod in pods(resources):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        used = {
            mount["name"]
            for one in (*pod.get("initContainers", ()), *pod["containers"])
            for mount in one["volumeMounts"]
        }
        assert used == set(volumes)
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        ]
        maps = [volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume]
        assert {("PersistentVolumeClaim", claim) for claim in claims} | {("ConfigMap", one) for one in maps} <= have


@needs_kustomize
@pytest.mark.parametrize("name", [name for name in NAMES if name != "kserve"])
def test_services_budgets_and_policies_select_pods_that_there_are(rendered, name):
    templates = [one["spec"]["template"]["metadata"]["labels"] for one in kind(rendered[name], "Deployment")]
    selectors = [one["spec"]["selector"] for one in kind(rendered[name], "Service")]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in kind(rendered[name], "PodDisruptionBudget")]
    selectors += [one["spec"]["podSelector"].get("matchLabels", {}) for one in kind(rendered[name], "NetworkPolicy")]
    for selector in selectors:
        assert any(selector.items() <= labels.items() for labels in templates), selector
    for one in kind(rendered[name], "Deployment"):
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        for spread in one["spec"]["template"]["spec"]["topologySpreadConstraints"]:
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    assert any(
        one["spec"]["podSelector"] == {} and "ingress" not in one["spec"]
        for one in kind(rendered[name], "NetworkPolicy")
    )


@needs_kustomize
@pytest.mark.parametrize("name", [name for name in NAMES if name != "kserve"])
def test_a_release_is_verified_before_it_is_served(rendered, name):
    for one in kind(rendered[name], "Deployment"):
        pod = one["spec"]["template"]["spec"]
        if pod["containers"][0]["args"][0] == "serve":
            assert pod["initContainers"][-1]["args"] == ["verify", "/release"]
            assert "--release=/release" in pod["containers"][0]["args"]


@needs_kustomize
def test_a_canary_shares_no_pod_with_the_stable_release_and_the_weights_are_a_share(rendered):
    """Wrong if it failed: the stable Service sends clients to the canary, whatever the route says."""
    resources = rendered["overlays/canary"]
    services = {one["metadata"]["name"]: one["spec"]["selector"] for one in kind(resources, "Service")}
    deployments = {
        one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in kind(resources, "Deployment")
    }
    for service, selector in services.items():
        assert [name for name, labels in deployments.items() if selector.items() <= labels.items()] == [service]
    for route in kind(resources, "HTTPRoute") + kind(resources, "GRPCRoute"):
        backends = route["spec"]["rules"][0]["backendRefs"]
        assert {one["name"] for one in backends} == set(services) and sum(one["weight"] for one in backends) == 100
    claims = {
        one["spec"]["template"]["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
        for one in kind(resources, "Deployment")
    }
    assert len(claims) == 2


@needs_kustomize
def test_autoscalers_ask_for_gauges_of_the_table_and_leave_the_replicas_to_themselves(rendered):
    gauges = {one.name for one in FAMILIES if one.kind == "gauge"}
    hpa = kind(rendered["overlays/gpu"], "HorizontalPodAutoscaler")[0]["spec"]["metrics"]
    keda = kind(rendered["overlays/keda"], "ScaledObject")[0]["spec"]["triggers"]
    asked = {one["pods"]["metric"]["name"] for one in hpa}
    assert asked == {name for one in keda for name in re.findall(r"tritonforge_\w+(?=\{)", one["metadata"]["query"])}
    assert asked <= gauges
    adapter = (manifests.KUBERNETES / "components/hpa/prometheus-adapter-values.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"seriesQuery: '(\w+)", adapter)) == asked
    for name in ("overlays/gpu", "overlays/keda"):
        server = next(one for one in kind(rendered[name], "Deployment") if one["metadata"]["name"] == "tritonforge")
        assert "replicas" not in server["spec"]


@needs_kustomize
def test_a_gpu_is_asked_for_as_the_scheduler_wants_it(rendered):
    """Extended resources: a whole number, in the limits, equal to the request."""
    server = next(one for one in containers(rendered["overlays/gpu"]) if one["name"] == "server")
    limit = server["resources"]["limits"]["nvidia.com/gpu"]
    assert limit == server["resources"]["requests"]["nvidia.com/gpu"] and int(limit) == 1
    assert not any("nvidia.com/gpu" in str(one["resources"]) for one in containers(rendered["overlays/cpu"]))


def test_the_gateways_settings_are_read_and_write_where_the_pod_can():
    config = GatewayConfig.read(manifests.KUBERNETES / "components" / "gateway" / "gateway.toml")
    text = (manifests.KUBERNETES / "components" / "gateway" / "gateway.yaml").read_text(encoding="utf-8")
    assert config.records.metrics.token_env in text
    for path in (config.records.audit.folder, config.records.usage.file):
        assert path.startswith("/var/lib/tritonforge/") and "mountPath: /var/lib/tritonforge }" in text


def test_a_strict_schema_refuses_a_property_that_it_does_not_name():
    """Wrong if it failed: a misspelt field of a custom resource is called valid."""
    inner = {"type": "object", "properties": {"b": {"type": "string"}}}
    schema = {"type": "object", "properties": {"a": inner, "free": {"type": "object"}}}
    api = {("x.io/v1", "Thing"): manifests.strict(schema | {"x-kubernetes-preserve-unknown-fields": True})}
    thing = {"apiVersion": "x.io/v1", "kind": "Thing", "a": {"b": "1"}, "free": {"anything": 1}}
    assert list(manifests.problems(thing, api)) == []
    assert len(list(manifests.problems(thing | {"a": {"bb": "1"}}, api))) == 1
    assert manifests.problems(thing | {"kind": "Other"}, api) is None
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True, "type": "integer"}
    assert "type" not in manifests.strict(either)
