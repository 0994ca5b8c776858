"""Carries out docker/Dockerfile without a container engine: each stage is a folder, each RUN happens in a chroot.

    debootstrap --variant=minbase bookworm /var/tmp/debian
    python scripts/image_in_chroot.py --root /var/tmp/debian --work /var/tmp/image --target cpu

`--root` stands in for the base image and is only copied. The result is WORK/<target>, with WORK/<target>.json for what
the image is started with; scripts/run_in_chroot.py starts it. It needs root, mount namespaces, Debian's packages, PyPI.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from dockerfile import Instruction, InvalidDockerfile, Stage, parse, substitute  # noqa: E402

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LENT = ("/etc/resolv.conf", "/etc/hosts")
"""Files that a container engine lends to the build, too; they are no part of the image."""


@dataclass
class Image:
    """A stage's result: its folder and its settings."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)

    def based(self, root: Path) -> "Image":
        """The image that begins as this one, in another folder."""
        lists = {"volumes": self.volumes.copy(), "environment": self.environment.copy()}
        return dataclasses.replace(self, root=root, **lists)

    def document(self) -> dict:
        """What the image is started with, as JSON."""
        return dataclasses.asdict(self) | {"root": str(self.root)}


@dataclass
class Builder:
    """Builds stages into `work`. `lend` maps files of this machine to where RUN sees them; `extra` is RUN's alone."""

    stages: dict[str, Stage]
    context: Path
    base: Path
    work: Path
    arguments: dict[str, str]
    lend: dict[str, str]
    extra: dict[str, str]
    built: dict[str, Image] = field(default_factory=dict)

    def build(self, name: str) -> Image:
        """The image of a stage; what it stands on and copies from is built first."""
        if name in self.built:
            return self.built[name]
        stage = self.stages[name]
        start = self.build(stage.base) if stage.base in self.stages else Image(self.base)
        for one in stage.instructions:
            if one.flag("from"):
                self.build(one.flag("from"))
        image = start.based(self.work / name)
        shutil.rmtree(image.root, ignore_errors=True)
        subprocess.run(["cp", "-a", "--reflink=auto", start.root, image.root], check=True)
        given: dict[str, str] = {}
        for one in stage.instructions:
            began = time.monotonic()
            self._carry_out(one, image, given)
            print(f"{name}: {one.name} {one.text[:80]} ({time.monotonic() - began:.1f} s)", flush=True)
        self.built[name] = image
        return image

    def _carry_out(self, one: Instruction, image: Image, given: dict[str, str]) -> None:
        variables = image.environment | given
        if one.name == "ARG":
            name, _, default = one.text.partition("=")
            given[name] = self.arguments.get(name, substitute(default, variables))
        elif one.name == "ENV":
            image.environment |= {name: substitute(value, variables) for name, value in one.pairs().items()}
        elif one.name == "RUN":
            self._run(one, image, given)
        elif one.name == "COPY":
            self._copy(one, image)
        elif one.name == "USER":
            image.user = one.text
        elif one.name == "ENTRYPOINT":
            image.entrypoint = one.arguments()
        elif one.name == "CMD":
            image.command = one.arguments()
        elif one.name == "HEALTHCHECK":
            image.health = json.loads(one.text.removeprefix("CMD").strip())
        elif one.name == "VOLUME":
            image.volumes += one.arguments()
        elif one.name != "EXPOSE":
            raise InvalidDockerfile(f"{one.name} is not carried out here")

    def _copy(self, one: Instruction, image: Image) -> None:
        source = self.built[one.flag("from")].root if one.flag("from") else self.context
        *names, target = one.arguments()
        place = image.root / target.lstrip("/")
        (place if target.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        for name in names:
            origin = source / name.lstrip("/")
            folder = origin.is_dir()  # of a folder Docker copies the contents
            place.mkdir(exist_ok=True) if folder else None
            subprocess.run(["cp", "-a", f"{origin}/." if folder else origin, place], check=True)
            subprocess.run(["chown", "-R", "0:0", place], check=True)

    def _run(self, one: Instruction, image: Image, given: dict[str, str]) -> None:
        """One RUN, in a mount and a process namespace of its own; raises CalledProcessError when it fails."""
        lent = dict(self.lend)
        for mount in (
            dict(part.split("=") for part in value.split(",")) for name, value in one.flags if name == "mount"
        ):
            if mount["type"] != "bind":
                raise InvalidDockerfile(f"--mount must be of type bind, got {mount['type']}")
            lent[str(self.context / mount["source"])] = mount["target"]
        made, lines = [], ["set -e", f"mount -t proc proc {image.root}/proc"]
        for source, target in lent.items():
            place = image.root / target.lstrip("/")
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
                made.append(place)
            lines.append(f"mount --bind -o ro {source} {place}")
        lines.append('exec chroot "$@"')
        environment = image.environment | given | self.extra
        words = [f"{name}={value}" for name, value in environment.items()]
        command = [image.root, "env", "-i", *words, "/bin/sh", "-c", one.text]
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(lines), "sh"]
        subprocess.run([*namespaces, *command], check=True)
        for place in made:
            place.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Build one target; the exit code is that of a step that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder that stands in for the base image")
    parser.add_argument("--work", type=Path, required=True, help="where stages are made")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--lend", action="append", default=[], metavar="FILE:PLACE", help="a file that RUN sees")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable that RUN sees")
    options = parser.parse_args(arguments)
    given = dict(pair.split("=", 1) for pair in options.build_arg)
    lend = {name: name for name in LENT} | dict(pair.split(":", 1) for pair in options.lend)
    stages = parse((ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8"), given)
    extra = dict(pair.split("=", 1) for pair in options.env)
    options.work.mkdir(parents=True, exist_ok=True)
    builder = Builder(stages, ROOT, options.root.absolute(), options.work.absolute(), given, lend, extra)
    try:
        image = builder.build(options.target)
    except subprocess.CalledProcessError as error:
        print(f"image_in_chroot: a step ended with code {error.returncode}", file=sys.stderr)
        return error.returncode if error.returncode > 0 else 1
    (options.work / f"{options.target}.json").write_text(
        json.dumps(image.document(), indent=2) + "\n", encoding="utf-8"
    )
    size = subprocess.run(["du", "-sxB1", image.root], check=True, capture_output=True, text=True).stdout.split()[0]
    print(f"{options.target}: {int(size) / 1e6:.0f} MB in {image.root}", flush=True)
    return 0


if __name__ == "__main__":
    if os.getuid() != 0:
        sys.exit("image_in_chroot: chroot and mounts need root")
    sys.exit(main())
