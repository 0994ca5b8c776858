"""Reads a Dockerfile into instructions: the part of the language that docker/Dockerfile uses; it refuses the rest.

Pure; `image_in_chroot.py` carries the instructions out, tests compare them with the manifests. Standard library only.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KNOWN = ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER", "VOLUME", "WORKDIR")
_FLAG = re.compile(r"--(?P<name>[a-z-]+)(=(?P<value>\S+))?\s+")
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


class InvalidDockerfile(ValueError):
    """A line that this reader does not understand; the text names it."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name in capitals, its flags in order, and what follows them as one line."""

    name: str
    flags: tuple[tuple[str, str], ...]
    text: str

    def flag(self, name: str) -> str | None:
        """The value of the first flag of this name."""
        return next((value for flag, value in self.flags if flag == name), None)

    def arguments(self) -> list[str]:
        """The arguments: a JSON list (the exec form) or words."""
        return json.loads(self.text) if self.text.startswith("[") else self.text.split()

    def pairs(self) -> dict[str, str]:
        """NAME=value pairs of ENV."""
        return {name: value[1:-1] if value.startswith('"') else value for name, value in _PAIR.findall(self.text)}


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it. `base` is an image reference or the name of an earlier stage."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


def substitute(text: str, variables: Mapping[str, str]) -> str:
    """Replace $NAME and ${NAME}; an unknown one becomes nothing, as Docker has it."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def parse(text: str, arguments: Mapping[str, str]) -> dict[str, Stage]:
    """The stages of a Dockerfile by name, with `arguments` given for its ARGs.

    Raises InvalidDockerfile for an instruction that is not in KNOWN, or one that comes before the first FROM.
    """
    stages: dict[str, Stage] = {}
    outer: dict[str, str] = {}
    for one in _instructions(text):
        if one.name == "FROM":
            base, name = _from(substitute(one.text, outer), len(stages))
            stages[name] = Stage(name, base, ())
        elif stages:
            last = stages[next(reversed(stages))]
            stages[last.name] = Stage(last.name, last.base, (*last.instructions, one))
        elif one.name == "ARG":
            name, _, default = one.text.partition("=")
            outer[name] = arguments.get(name, default)
        else:
            raise InvalidDockerfile(f"{one.name} comes before the first FROM")
    return stages


def _from(text: str, position: int) -> tuple[str, str]:
    words = text.split()
    if len(words) == 3 and words[1].upper() == "AS":
        return words[0], words[2]
    if len(words) == 1:
        return words[0], str(position)
    raise InvalidDockerfile(f"FROM must be `image [AS name]`, got {text!r}")


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name.upper() not in KNOWN:
            raise InvalidDockerfile(f"instruction must be one of {', '.join(KNOWN)}, got {name!r}")
        flags, rest = [], rest.strip()
        while found := _FLAG.match(rest):
            flags.append((found["name"], found["value"] or ""))
            rest = rest[found.end() :]
        if "<<" in rest:
            raise InvalidDockerfile(f"here-documents are not supported: {line}")
        yield Instruction(name.upper(), tuple(flags), rest)
