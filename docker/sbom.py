"""Prints what an image holds as a CycloneDX 1.6 bill of materials: Debian packages, Python distributions, licences.

    python docker/sbom.py SITE_PACKAGES >tritonforge.cdx.json

A step of the image's build calls it. Standard library only. The output is the same for the same contents.
"""

import importlib.metadata
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

NAMESPACE = uuid.UUID("6ba7b811-9dad-11d1-80b4-00c04fd430c8")  # RFC 9562, names that are URLs
DPKG_FORMAT = "${Package}\t${Version}\t${Architecture}\t${Maintainer}\n"


def debian_components(status: str, distribution: str) -> Iterator[dict[str, Any]]:
    """One component for each line of dpkg-query's output in DPKG_FORMAT; `distribution` is like debian-12."""
    for line in status.splitlines():
        name, version, architecture, maintainer = line.split("\t")
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}&distro={distribution}"
        supplier = {"name": maintainer.partition(" <")[0]}
        yield {
            "type": "library",
            "bom-ref": purl,
            "supplier": supplier,
            "name": name,
            "version": version,
            "purl": purl,
        }


def python_components(site_packages: Path) -> Iterator[dict[str, Any]]:
    """One component for each distribution that is installed in a folder."""
    for found in importlib.metadata.distributions(path=[str(site_packages)]):
        name, version = found.metadata["Name"], found.version
        purl = f"pkg:pypi/{quote(name.lower().replace('_', '-'))}@{quote(version)}"
        component = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        licence = _licence(found.metadata)
        yield component | ({"licenses": [licence]} if licence else {})


def _licence(metadata: Any) -> dict[str, Any] | None:
    """PEP 639's expression, else the classifier, else the first line of the free text."""
    if metadata.get("License-Expression"):
        return {"expression": metadata["License-Expression"]}
    classifiers = [line for line in metadata.get_all("Classifier") or [] if line.startswith("License ::")]
    names = [line.rpartition(" :: ")[2] for line in classifiers if line.count("::") > 1]
    if names:
        return {"license": {"name": "; ".join(names)}}
    text = (metadata.get("License") or "").strip()
    return {"license": {"name": text.splitlines()[0][:100]}} if text else None


def document(components: list[dict[str, Any]], version: str) -> dict[str, Any]:
    """The bill: sorted, each component once, with a serial number made from its contents."""
    listed = [one for _, one in sorted({one["bom-ref"]: one for one in components}.items())]
    serial = uuid.uuid5(NAMESPACE, json.dumps(listed, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": "image", "name": "tritonforge", "version": version}},
        "components": listed,
    }


def _distribution() -> str:
    """The distribution as purl's qualifier has it, like debian-12."""
    lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    facts = dict(line.replace('"', "").split("=", 1) for line in lines if "=" in line)
    return f"{facts['ID']}-{facts['VERSION_ID']}"


def main(arguments: list[str]) -> int:
    """Print the bill of this file system and of the site-packages folder that is named."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: sbom.py SITE_PACKAGES", file=sys.stderr)
        return 2
    command = ["dpkg-query", "--show", f"--showformat={DPKG_FORMAT}"]
    status = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pythons = list(python_components(Path(arguments[0])))
    version = next((one["version"] for one in pythons if one["name"] == "tritonforge"), "unknown")
    bill = document([*debian_components(status, _distribution()), *pythons], version)
    print(json.dumps(bill, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
