"""Raw files: what is written is read back, cut-short ones are seen, reports are the same bytes again."""

import json
import re
from dataclasses import asdict, replace

import pytest
from slo_support import make_run, to_toml

from loadtests.contract_toml import load_contract
from loadtests.raw_files import ShardWriter, merge, read_run, shard_path
from loadtests.records import InvalidRecords, encode_record
from loadtests.runs import recompute
from loadtests.schedule import build_schedule, schedule_sha256
from loadtests.verdict import judge
from tritonforge.contract import STATISTICS


def write_shards(folder, contract, run, *, of=1, cut=None):
    """Write the run's records as `of` workers would; worker `cut` is killed in the middle of a line."""
    part, digest = run.profiles[0], schedule_sha256(build_schedule(contract.profiles[0]))
    for shard in range(of):
        path = shard_path(folder, "small", shard)
        writer = ShardWriter(path, "small", shard, of, schedule_sha256=digest, prompts_sha256="p")
        own = [replace(record, shard=shard) for record in part.records if record.index % of == shard]
        for record in reversed(own):
            writer.request(record)
        health = {key: asdict(part.shards[0])[key] for key in ("wall_ns", "cpu_ns", "lag_ns")}
        writer.finish(finished=True, in_flight=[], **health)
        if shard == cut:
            path.write_text(path.read_text()[:-900])
    return merge(folder, run.header, ["small"], {"small": part.server})


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_records_survive_the_disk(contract, tmp_path, workers):
    """Wrong: the verdict of a file would differ from that of the run, or depend on who wrote it."""
    run = make_run(contract)
    read = read_run(write_shards(tmp_path, contract, run, of=workers))
    plain = tuple(replace(record, shard=0) for record in read.profiles[0].records)
    assert plain == run.profiles[0].records
    verdict = judge(contract, read)
    assert verdict.exit_code == 0, verdict.reasons


def test_a_killed_worker_is_an_invalid_measurement(contract, tmp_path):
    """Wrong: half of the load would be judged as if it were all of it."""
    verdict = judge(contract, read_run(write_shards(tmp_path, contract, make_run(contract), of=2, cut=1)))
    assert verdict.exit_code == 3
    assert "a worker was lost" in verdict.reasons[0]
    (tmp_path / "raw" / "small.1.jsonl").unlink()
    merge(tmp_path, {"contract_sha256": contract.sha256, "profiles": ["small"]}, ["small"], {})
    assert judge(contract, read_run(tmp_path / "raw.jsonl")).exit_code == 3


def test_recompute_gives_the_same_bytes(contract, document, tmp_path):
    (tmp_path / "contract.toml").write_text(to_toml(document))
    raw = write_shards(tmp_path, contract, make_run(contract))
    first = recompute(raw, load_contract(tmp_path / "contract.toml"))
    files = [tmp_path / "report.json", tmp_path / "report.html"]
    before = [file.read_bytes() for file in files]
    assert recompute(raw, load_contract(tmp_path / "contract.toml")) == first
    assert [file.read_bytes() for file in files] == before
    assert json.loads(before[0])["verdict"]["status"] == "PASS"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "must start with a campaign line"),
        ('{"kind":"campaign","format":9}\n', "of format 1, got 9"),
        ("{nonsense\n", "line 1 is not JSON"),
        ('{"kind":"campaign","format":1}\n{"kind":"request","profile":"p"}\n', "line 2 is not a line of this format"),
        ('{"kind":"campaign","format":1}\n{"kind":"gossip","profile":"p"}\n', "unknown kind 'gossip'"),
    ],
)
def test_files_that_are_no_records(tmp_path, text, rule):
    path = tmp_path / "raw.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRecords, match=rule):
        read_run(path)
    with pytest.raises(InvalidRecords, match="cannot be read"):
        read_run(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"statistics": {"queue_us": 1}}, "statistics must be null or hold an integer for each of prompt_tokens"),
        (
            {"statistics": {**dict.fromkeys((t.name for t in STATISTICS), 1), "queue_us": "1"}},
            "statistics must be null",
        ),
        ({"status": "fine"}, "status must be one of ok"),
        ({"sent_ns": "0"}, "must be integers"),
        ({"chunks": [[1]]}, "not a line of this format"),
    ],
)
def test_records_that_are_none(contract, tmp_path, changes, rule):
    """Wrong: the judge would crash in the middle, with the exit code of a broken promise."""
    line = json.loads(encode_record("small", make_run(contract).profiles[0].records[0])) | changes
    path = tmp_path / "raw.jsonl"
    path.write_text('{"kind":"campaign","format":1}\n' + json.dumps(line) + "\n")
    with pytest.raises(InvalidRecords, match=rule):
        read_run(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRecords, match="not a line of this format"):
        read_run(path)


HOSTILE = '<script>alert("x")</script>'


def page_of(contract, tmp_path, change=lambda record: record, **part):
    run = make_run(contract, change)
    run = replace(run, profiles=(replace(run.profiles[0], **part),))
    recompute(write_shards(tmp_path, contract, run), contract)
    return (tmp_path / "report.html").read_text()


def test_the_page_needs_nothing_else_and_trusts_nobody(contract, tmp_path):
    """Wrong: a report would not open offline, or a server's error text would run as script in the reader's browser."""

    def fail(record):
        if record.index % 5:
            return record
        changes = {"code": HOSTILE, "detail": HOSTILE, "request_id": HOSTILE}
        return replace(record, status="error", chunks=(), statistics=None, **changes)

    page = page_of(contract, tmp_path, fail)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"""(src|href)=|url\(|@import|https?://""", page)
    assert page.count("<svg") == 8  # an ECDF for each of four durations, TTFT split, open requests, lag, waterfalls


def test_a_page_of_nothing_can_be_read(contract, tmp_path):
    page = page_of(contract, tmp_path, records=())
    assert "INVALID" in page
    assert "nan" not in page
