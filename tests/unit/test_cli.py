"""The command line without a server: errors in one line, options passed on as given, a chat of many turns."""

import json
import subprocess
import sys

import pytest

from tritonforge import cli, terminal
from tritonforge.client import Chunk
from tritonforge.errors import InvalidRequest
from tritonforge.release import write_manifest


@pytest.fixture
def sent(monkeypatch):
    """Requests that reach the client; each is answered by the next list of chunks (or exceptions) in `answers`."""
    requests, answers = [], []

    def stream(channel, request, timeout=None):
        requests.append(request)
        for item in answers.pop(0):
            if isinstance(item, BaseException):
                raise item
            yield item

    monkeypatch.setattr(terminal, "stream", stream)
    return requests, answers


def options_of(request) -> dict:
    return {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in request.parameters.items()}


def test_generate_streams_text_to_stdout_and_a_summary_to_stderr(sent, capsys):
    requests, answers = sent
    answers.append([Chunk("Par", (1,)), Chunk("is", (2, 3), "length", {"completion_tokens": 3})])
    code = cli.main(["generate", "The capital", "--max-tokens", "3", "--stop", "a", "--stop", "b", "--chat"])
    out, err = capsys.readouterr()
    assert (code, out) == (0, "Paris")
    assert "[3 tokens, TTFT " in err and ", length]" in err
    assert options_of(requests[0]) == {"stream": True, "chat": True, "max_tokens": 3, "stop": '["a", "b"]'}


def test_absent_options_are_not_sent(sent):
    requests, answers = sent
    answers.append([Chunk("", (), "stop")])
    cli.main(["generate", "x"])
    assert options_of(requests[0]) == {"stream": True}


def test_a_refused_request_is_one_line_and_a_code(sent, capsys):
    sent[1].append([InvalidRequest("max_tokens must be in [1, 8], got 9")])
    assert cli.main(["generate", "x", "--max-tokens", "9"]) == 1
    assert capsys.readouterr().err == "tritonforge: INVALID_ARGUMENT: max_tokens must be in [1, 8], got 9\n"


def test_an_interrupted_answer_keeps_its_text_and_says_cancelled(sent, capsys):
    sent[1].append([Chunk("Par", (1,)), KeyboardInterrupt()])
    assert cli.main(["generate", "x"]) == 130
    out, err = capsys.readouterr()
    assert out == "Par" and "cancelled]" in err


def test_a_chat_sends_all_turns_and_survives_an_error_and_an_interrupt(sent, capsys):
    requests, answers = sent
    answers += [
        [Chunk("Hello.", (1,), "stop")],
        [InvalidRequest("too long")],
        [Chunk("So", (1,)), KeyboardInterrupt()],
        [Chunk("Bye.", (1,), "stop")],
    ]
    said = iter(["hi", "", "x" * 9, "and?", "bye"])

    def read(prompt):
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    terminal.chat("127.0.0.1:1", system="Be brief.", timeout=None, read=read)
    turns = [[m["content"] for m in json.loads(options_of(request)["messages"])] for request in requests]
    assert turns == [
        ["Be brief.", "hi"],
        ["Be brief.", "hi", "Hello.", "x" * 9],
        ["Be brief.", "hi", "Hello.", "and?"],
        ["Be brief.", "hi", "Hello.", "and?", "So", "bye"],
    ]
    assert "INVALID_ARGUMENT: too long" in capsys.readouterr().err


def test_verify_names_the_changed_file(tmp_path, capsys):
    (tmp_path / "model_repository").mkdir()
    file = tmp_path / "model_repository" / "a.txt"
    file.write_text("a")
    write_manifest(tmp_path, name="x")
    assert cli.main(["verify", str(tmp_path)]) == 0
    assert "x: 1 files as built" in capsys.readouterr().out
    file.write_text("b")
    assert cli.main(["verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "model_repository/a.txt" in err and len(err.splitlines()) == 1 and not out


def test_serving_what_is_no_release_is_one_line(tmp_path, capsys):
    assert cli.main(["serve", "--release", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("tritonforge: NOT_FOUND: no release at ")


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A release with memory figures: 128 KV blocks of 32 tokens and 437,760 bytes; the rest of the process 484 MiB."""
    from tritonforge.memory import probe as memory_probe

    memory = dict.fromkeys(("weight_bytes", "runtime_bytes", "step_bytes"), 128 << 20) | {"load_peak_bytes": 0}
    kv_cache = {"bytes_per_block": 437_760, "num_blocks": 128, "spare_blocks": 1}
    write_manifest(
        tmp_path,
        name="x",
        sizes={"memory": memory, "kv_cache": kv_cache},
        recipe={"limits": {"max_model_len": 2048, "max_num_seqs": 4}, "kv_cache": {"block_size": 32}},
        checkpoint={"model": {"vocab_size": 0}},
    )
    monkeypatch.setattr(memory_probe, "measure_base_bytes", lambda folder: 100 << 20)
    return tmp_path


def test_plan_shows_what_fits(planned, capsys):
    assert cli.main(["plan", "--release", str(planned)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-4].split() == ["256", "16", "4"]
    assert "4096 tokens in 128 blocks of 32, 13680 bytes a token" in out
    cli.main(["plan", "--release", str(planned), "--sequences", "5"])
    assert capsys.readouterr().out.endswith("5 sequences fit with a context of up to 800 tokens each\n")
    cli.main(["plan", "--release", str(planned), "--sequences", "9", "--context", "500"])
    assert "9 sequences of 500 tokens do not fit; the process takes 545 MiB" in capsys.readouterr().out
    cli.main(["plan", "--release", str(planned), "--memory", "1000"])
    assert "39488 tokens in 1234 blocks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--context", "2049"], "context must be in [1, 2048] (max_model_len), got 2049"),
        (["--sequences", "0"], "sequences must be at least 1, got 0"),
        (["--memory", "500"], "memory must be at least 512 MiB for one sequence of max_model_len 2048, got 500"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_one_line(planned, capsys, options, complaint):
    assert cli.main(["plan", "--release", str(planned), *options]) == 1
    out, err = capsys.readouterr()
    assert complaint in err and len(err.splitlines()) == 1
    assert not out


@pytest.mark.parametrize("arguments", [["generate"], ["serve"], ["fly"], ["generate", "x", "--timeout", "-1"]])
def test_a_wrong_command_line_ends_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: tritonforge" in capsys.readouterr().err


def test_the_module_runs_as_a_program_without_gevent_or_torch():
    code = (
        "import sys, tritonforge.cli, tritonforge.server, tritonforge.terminal\n"
        "print(sorted({'gevent', 'locust', 'torch', 'openvino'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    done = subprocess.run(
        [sys.executable, "-m", "tritonforge", "--version"], capture_output=True, timeout=60, check=True
    )
    assert done.stdout.startswith(b"tritonforge ")
