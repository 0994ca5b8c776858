"""Renders every kustomization of docker/kubernetes and holds each resource against its schema, without a cluster.

    python scripts/check_manifests.py [--crds FOLDER] [--rendered FOLDER]

Kubernetes' own kinds are checked by the PyPI package kubernetes-validate, strictly: an unknown field is an error.
Kinds of others are checked against the CustomResourceDefinitions in FOLDER (YAML files of their projects), as strictly;
without them they are counted as not checked. Rules in CEL are not evaluated. It needs kubectl, or kustomize.
Exit codes: 0 valid, 1 not, 2 something is missing.
"""

import argparse
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parent.parent
KUBERNETES = ROOT / "docker" / "kubernetes"
VERSION = "1.34"
BUILDERS = (("kustomize", "build"), ("kubectl", "kustomize"))
OWN_GROUPS = ("", "apps", "autoscaling", "batch", "policy")


class Missing(Exception):
    """A program or package that this check needs is not here."""


def kustomizations() -> list[Path]:
    """The folders that are applied: the overlays, and KServe's."""
    return [*sorted(path.parent for path in KUBERNETES.glob("overlays/*/kustomization.yaml")), KUBERNETES / "kserve"]


def render(folder: Path) -> list[dict[str, Any]]:
    """The resources of a kustomization. Raises Missing without a kustomize, CalledProcessError when it fails."""
    found = [command for command in BUILDERS if shutil.which(command[0])]
    if not found:
        raise Missing("neither kustomize nor kubectl is installed")
    done = subprocess.run([*found[0], folder], check=True, capture_output=True, text=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def load_crds(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Schemas by (apiVersion, kind) of all CustomResourceDefinitions in a folder."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            if not document or document.get("kind") != "CustomResourceDefinition":
                continue
            for version in document["spec"]["versions"]:
                api = f"{document['spec']['group']}/{version['name']}"
                schema = version["schema"]["openAPIV3Schema"]
                found[api, document["spec"]["names"]["kind"]] = strict(schema | {"properties": _with_metadata(schema)})
    return found


def _with_metadata(schema: dict[str, Any]) -> dict[str, Any]:
    return schema["properties"] | {"metadata": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}


def strict(schema: Any) -> Any:
    """The same schema, in which an object has no property but those that it names."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(part) for name, part in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    is_object = isinstance(schema.get("properties"), dict) and "type" in schema
    if is_object and "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    return found


def problems(resource: dict[str, Any], crds: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str] | None:
    """What is wrong with a resource; None when there is no schema for its kind."""
    api, kind = resource["apiVersion"], resource["kind"]
    group = api.rpartition("/")[0]
    if group in OWN_GROUPS or (group.endswith(".k8s.io") and not group.startswith("gateway.")):
        return _own_problems(resource)
    if (api, kind) not in crds:
        return None
    validator = jsonschema.Draft202012Validator(crds[api, kind])
    return (
        f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in validator.iter_errors(resource)
    )


def _own_problems(resource: dict[str, Any]) -> Iterator[str]:
    try:
        import kubernetes_validate
    except ImportError:
        raise Missing("the package kubernetes-validate is not installed") from None
    try:
        kubernetes_validate.validate(resource, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message[:300]}"


def check(crds: dict[tuple[str, str], dict[str, Any]], rendered: Path | None) -> Counter[str]:
    """Check all, print each resource and what is wrong with it; how many were valid, INVALID, without a schema."""
    counts: Counter[str] = Counter()
    for folder in kustomizations():
        resources = render(folder)
        if rendered is not None:
            rendered.mkdir(parents=True, exist_ok=True)
            (rendered / f"{folder.name}.yaml").write_text(yaml.safe_dump_all(resources), encoding="utf-8")
        for resource in resources:
            found = problems(resource, crds)
            wrong = [] if found is None else list(found)
            status = "without a schema" if found is None else "INVALID" if wrong else "valid"
            name = f"{resource['apiVersion']} {resource['kind']} {resource['metadata']['name']}"
            print("\n  ".join([f"{status}: {folder.relative_to(KUBERNETES)}: {name}", *wrong]))
            counts[status] += 1
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Check every kustomization."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crds", type=Path, help="folder with CustomResourceDefinitions")
    parser.add_argument("--rendered", type=Path, help="write what is applied to this folder, for other tools")
    options = parser.parse_args(arguments)
    try:
        counts = check(load_crds(options.crds) if options.crds else {}, options.rendered)
    except Missing as error:
        print(f"check_manifests: {error}", file=sys.stderr)
        return 2
    print("check_manifests: " + ", ".join(f"{counts[one]} {one}" for one in ("valid", "INVALID", "without a schema")))
    return 1 if counts["INVALID"] else 0


if __name__ == "__main__":
    sys.exit(main())
