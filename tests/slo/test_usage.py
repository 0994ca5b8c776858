"""What a campaign does when it cannot begin, or is told to stop: its exit code, one line, and nothing destroyed."""

import subprocess
import sys

import pytest
from slo_campaigns import arguments, document_with, run_campaign
from slo_stub import Behaviour, Stub
from slo_support import to_toml

from loadtests import campaign
from loadtests.runs import Run

REPORT = '{"an": "earlier report"}'


@pytest.fixture
def given(tmp_path):
    """A contract, and a report folder with an earlier report in it."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text(REPORT)
    contract = tmp_path / "given.toml"
    contract.write_text(to_toml(document_with()))
    return contract, out


def refused(capsys, *options: str) -> str:
    """The one line that a usage error is told with."""
    assert campaign.main([*map(str, options)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("content", [None, "{}", "not JSON"])
def test_a_tokenizer_that_is_none(given, tmp_path, capsys, content):
    """Wrong: a typing error would delete the last report and end as "a promise is broken"."""
    contract, out = given
    typo = tmp_path / "typo.json"
    if content is not None:
        typo.write_text(content)
    with Stub() as stub:
        line = refused(capsys, *arguments(contract, typo, out), "--url", stub.url)
    assert "tokenizer must be a tokenizer.json" in line
    assert (out / "report.json").read_text() == REPORT


def test_prompts_too_short_for_their_nonce(given, tokenizer, capsys):
    """Wrong: found by the load process, after the last report was deleted, as an invalid measurement."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    contract, out = given
    contract.write_text(to_toml(document_with(prompt_tokens={"dist": "constant", "value": 8})))
    letters = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # a token a letter: the nonce alone takes nine
    path = contract.parent / "letters.json"
    letters.save(str(path))
    with Stub() as stub:
        line = refused(capsys, *arguments(contract, path, out), "--url", stub.url)
    assert "prompt_tokens must be at least 9 (the nonce of a prompt), got 8" in line
    assert (out / "report.json").read_text() == REPORT


@pytest.mark.parametrize("out", ["given.toml", "given.toml/below"])
def test_a_report_folder_that_cannot_be_written(given, tokenizer, capsys, tmp_path, out):
    with Stub() as stub:
        line = refused(capsys, *arguments(given[0], tokenizer, tmp_path / out), "--url", stub.url)
    assert "out must be a folder that can be written" in line


def test_a_fault_of_the_verifier_is_no_broken_promise(given, tokenizer, capsys, monkeypatch):
    """Wrong: Python's exit code of a traceback is 1, which means that the service failed."""

    def fault(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(Run, "prepare", fault)
    assert campaign.main(arguments(given[0], tokenizer, given[1])) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_ctrl_c_outside_the_load(given, tokenizer, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "inspect", interrupt)
    assert campaign.main(arguments(given[0], tokenizer, given[1])) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert (given[1] / "report.json").read_text() == REPORT


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('progress: up', flush=True)"


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_when_the_load_process_will_not_end(given, tokenizer, monkeypatch, again):
    """Wrong: a traceback instead of the report, and a load process that goes on."""
    started = []

    class Stubborn(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", f"{STUBBORN}; time.sleep(60)"], **options)
            started.append(self)

        def wait(self, timeout=None):
            if again and timeout is not None:
                raise KeyboardInterrupt
            return super().wait(timeout)

    def interrupt(*words, **_):
        if "up" in str(words):
            raise KeyboardInterrupt

    monkeypatch.setattr(campaign.subprocess, "Popen", Stubborn)
    monkeypatch.setattr(campaign, "STOP_S", 0.3, raising=False)
    monkeypatch.setattr(campaign, "print", interrupt, raising=False)
    try:
        with Stub() as stub:
            assert campaign.main([*arguments(given[0], tokenizer, given[1]), "--url", stub.url]) == 130
        assert started[0].poll() is not None
        assert '"INVALID"' in (given[1] / "report.json").read_text()
    finally:
        started[0].kill()


PARTIAL = Behaviour(lie=lambda statistics: {"prompt_tokens": 9, "queue_us": 5}, every=4)


def test_part_of_the_servers_account_is_none(tmp_path, tokenizer):
    """Wrong: the judge would crash on the missing part. The answers were whole; what they cost is not accounted for."""
    outcome = run_campaign(tmp_path, tokenizer, PARTIAL, document_with())
    assert outcome.exit_code == 3
    assert outcome.broken() == {"statistics"}
