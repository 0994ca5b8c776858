"""A run on disk: from options to a folder, from a folder to a verdict. Shared by the campaign and the Locust file.

OUT/contract.toml   the contract, verbatim         OUT/raw.jsonl     the merged records
OUT/raw/P.N.jsonl   profile P, worker N            OUT/report.json, OUT/report.html
"""

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.capacity_toml import to_toml
from loadtests.contract import Contract, Profile
from loadtests.contract_toml import load_contract
from loadtests.documents import read_document
from loadtests.environment import environment
from loadtests.exports_text import junit, markdown
from loadtests.faults import fault_of
from loadtests.fields import InvalidContract
from loadtests.lint import check_access, lint, shortest
from loadtests.page import write_page
from loadtests.prompts import Counter, build_prompts, shared_prefixes
from loadtests.raw_files import merge, read_run
from loadtests.report import build_report, write_report
from loadtests.schedule import build_schedule
from loadtests.verdict import Verdict, judge
from tritonforge.errors import InvalidRequest
from tritonforge.release import Release, file_digest

__all__ = ["Run", "lint", "recompute", "report_of", "shortest"]


@dataclass
class Run:
    """What a run needs before it starts. `prompts` are those of each profile, by slot index.

    `server` collects the target's counters by profile.
    """

    contract_path: Path
    contract: Contract
    out: Path
    url: str
    tokenizer: Path
    tokenizer_sha256: str
    release: Release | None
    salt: str
    run_id: str
    prompts: dict[str, list[str]]
    http_url: str = "127.0.0.1:8000"
    metrics_url: str | None = None
    server_pid: int | None = None
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    server: dict[str, Any] = field(default_factory=dict)
    _folder: int | None = None

    @classmethod
    def prepare(
        cls,
        *,
        contract: str | Path,
        out: str | Path,
        url: str,
        release: str | Path | None = None,
        tokenizer: str | Path | None = None,
        profile: str | None = None,
        salt: str | None = None,
        run_id: str | None = None,
        http_url: str | None = None,
        metrics_url: str | None = None,
        server_pid: int | None = None,
    ) -> "Run":
        """Read, check and compute everything a run depends on, before any load and before any file is touched.

        Raises InvalidContract for a contract that breaks a rule or can decide nothing, for a tokenizer that is none and
        for prompts that cannot be made; NotFound and ReleaseMismatch for a release that is not what its manifest says;
        OSError for files that cannot be read.
        """
        parsed = load_contract(contract)
        selected = [parsed.profile(profile)] if profile else list(parsed.profiles)
        for chosen in selected:
            lint(parsed, chosen)
            check_access(chosen, metrics_url=metrics_url, server_pid=server_pid)
            fault_of(chosen, server_pid)
        opened = Release.open(release) if release else None
        if opened is not None:
            opened.verify()
        if tokenizer is None and opened is not None:
            tokenizer = opened.model_repository / "tokenizer" / "1" / "tokenizer.json"
        if tokenizer is None:
            raise InvalidContract("prompts need the tokenizer of what is served: give --release or --tokenizer")
        count, salt = Counter(Path(tokenizer)), salt if salt is not None else secrets.token_hex(4)
        return cls(
            contract_path=Path(contract),
            contract=parsed,
            out=Path(out),
            url=url,
            tokenizer=Path(tokenizer),
            tokenizer_sha256=file_digest(Path(tokenizer)),
            release=opened,
            salt=salt,
            run_id=run_id or secrets.token_hex(6),
            prompts={chosen.id: prompts_of(chosen, salt, count) for chosen in selected},
            http_url=http_url or "127.0.0.1:8000",
            metrics_url=metrics_url,
            server_pid=server_pid,
        )

    @property
    def profiles(self) -> tuple[str, ...]:
        """The ids of the profiles to run, in the contract's order."""
        return tuple(self.prompts)

    def create_folder(self) -> None:
        """An empty run folder with a copy of the contract. An earlier run's records in it are removed, nothing else.

        Raises InvalidRequest, with the earlier run still whole, when the folder cannot be written, or when another
        campaign writes into it. It is this run's until `conclude`, or until the process ends.
        """
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.out):
                pass
        except OSError as error:
            raise InvalidRequest(
                f"out must be a folder that can be written, got {self.out}: {error.strerror}"
            ) from None
        self._take_folder()
        shutil.rmtree(self.out / "raw", ignore_errors=True)
        (self.out / "raw").mkdir(exist_ok=True)
        for name in ("raw.jsonl", "report.json", "report.html", "report.md", "junit.xml", "locust.log"):
            (self.out / name).unlink(missing_ok=True)
        self._copy_contract()

    def _take_folder(self) -> None:
        self._folder = os.open(self.out, os.O_RDONLY)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._leave_folder()
            raise InvalidRequest(f"out must be a folder that no other campaign writes into, got {self.out}") from None

    def _leave_folder(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _copy_contract(self) -> None:
        """The contract as OUT/contract.toml: verbatim, or with all that it refers to written into it."""
        copy = self.out / "contract.toml"
        if self.contract_path.resolve() == copy.resolve():
            return
        try:
            document = tomllib.loads(self.contract_path.read_text(encoding="utf-8"))
            resolved = read_document(self.contract_path)
        except OSError as error:
            raise InvalidContract(f"contract {self.contract_path} cannot be read: {error.strerror}") from error
        if document == resolved:
            shutil.copyfile(self.contract_path, copy)
        else:
            copy.write_text(to_toml(resolved), encoding="utf-8")

    def note_server(self, profile: str, before: dict[str, Any] | None, after: dict[str, Any] | None) -> None:
        """Keep what the server said of itself before and after a profile; nothing when it did not say it twice."""
        if before is None or after is None:
            return
        sides = {"before": before, "after": after}
        self.server[profile] = {name: side["counters"] for name, side in sides.items()}
        for fact in ("gauges", "release"):
            if any(side[fact] for side in sides.values()):
                self.server[profile][fact] = {name: side[fact] for name, side in sides.items()}

    def header(self, target: dict[str, Any]) -> dict[str, Any]:
        """The campaign line of raw.jsonl: what was measured, with what, and where.

        The given_ facts are those of the release folder that was given; `target` is what the server said of itself.
        """
        manifest = self.release.manifest if self.release else {}
        return {
            "run_id": self.run_id,
            "started": self.started,
            "contract_sha256": self.contract.sha256,
            "profiles": list(self.profiles),
            "salt": self.salt,
            "identity": {
                **target,
                "url": self.url,
                "given_release": manifest.get("name"),
                "given_release_digest": manifest.get("digest"),
                "tokenizer_sha256": self.tokenizer_sha256,
            },
            "environment": environment(self.url),
        }

    def conclude(self, target: dict[str, Any]) -> Verdict:
        """Merge the shards of this run, judge them and write the reports."""
        try:
            merge(self.out, self.header(target), self.profiles, self.server)
            return recompute(self.out / "raw.jsonl", self.contract)
        finally:
            self._leave_folder()


def prompts_of(profile: Profile, salt: str, count: Counter) -> list[str]:
    """The prompts of a whole profile by slot index. Raises InvalidContract when one of them cannot be made."""
    slots = build_schedule(profile)
    if profile.data.source == "quality":
        texts = {item.id: item.prompt for item in profile.quality}
        return [texts[slot.item] for slot in slots]
    prefixes = shared_prefixes(profile.data, profile=profile.id, salt=salt, count=count)
    given = {"profile": profile.id, "seed": profile.data_seed, "salt": salt, "count": count}
    return build_prompts(slots, **given, prefixes=prefixes)


def recompute(raw: Path, contract: Contract) -> Verdict:
    """The verdict of a raw file, with all forms of the report written beside it. The same file, the same bytes."""
    run = read_run(raw)
    verdict = judge(contract, run)
    report = build_report(contract, run, verdict)
    write_report(raw.parent / "report.json", report)
    write_page(raw.parent / "report.html", report, contract, run)
    (raw.parent / "junit.xml").write_bytes(junit(report))
    (raw.parent / "report.md").write_text(markdown(report), encoding="utf-8")
    return verdict


def report_of(folder: Path) -> dict[str, Any]:
    """The report that was written into a run folder."""
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))
