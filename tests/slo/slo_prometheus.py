"""A real Prometheus beside a test's server: it scrapes every second, evaluates rules, and answers PromQL.

The binary is Debian's package `prometheus`, found on PATH or by the variable PROMETHEUS; tests skip without one.
"""

import json
import math
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

BINARY = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
NEEDED = pytest.mark.skipif(BINARY is None, reason="prometheus is not installed (Debian: package prometheus)")
POLL_S = 0.2
START_S = 30.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

Sample = tuple[dict[str, str], float]


class Prometheus:
    """A context manager: inside, Prometheus scrapes `target` (host:port) as `job` once a second."""

    def __init__(
        self, folder: Path, target: str, port: int, rules: Path | None = None, job: str = "tritonforge"
    ) -> None:
        self.address = f"127.0.0.1:{port}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": job, "static_configs": [{"targets": [target]}]}],
            "rule_files": [str(rules)] if rules else [],
        }
        (folder / "prometheus.json").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        self._command = [
            BINARY,
            f"--config.file={folder / 'prometheus.json'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.address}",
            "--log.level=error",
        ]
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Prometheus":
        self._process = subprocess.Popen(self._command)
        self.wait(lambda: self.query("up == 1"), START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def query(self, expression: str) -> list[Sample]:
        """The samples of an instant query that are numbers; none while Prometheus does not answer yet."""
        url = f"http://{self.address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with _DIRECT.open(url, timeout=10) as answer:
                found = json.load(answer)["data"]
        except ConnectionRefusedError:
            return []
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except urllib.error.URLError:
            return []
        samples = [(one["metric"], float(one["value"][1])) for one in found["result"]]
        return [(labels, value) for labels, value in samples if not math.isnan(value)]

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {labels["alertname"] for labels, _ in self.query('ALERTS{alertstate="firing"}')}

    def wait(self, condition: Callable[[], object], timeout_s: float) -> bool:
        """Wait until `condition` holds; False when it did not within the time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True
