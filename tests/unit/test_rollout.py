"""Releases come and go on a running server: what is loaded when, and what stays when something fails."""

import json
import threading
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tritonforge.contract import SERVED_MODELS, render_config
from tritonforge.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    ReleaseMismatch,
    SetupError,
)
from tritonforge.release import Release, version_folder, write_manifest
from tritonforge.rollout.commands import CommandTable
from tritonforge.rollout.rollout import Rollout
from tritonforge.rollout.routing import Route
from tritonforge.rollout.state import RolloutState


def make_release(root: Path, *, batch: int = 64, code: str = "version_folder(args)") -> Release:
    """A release with the contract's models and next to nothing in them."""
    for name, model in SERVED_MODELS.items():
        folder = root / "model_repository" / name / "1"
        folder.mkdir(parents=True)
        config = render_config(model).replace("max_batch_size: 64", f"max_batch_size: {batch}")
        (folder.parent / "config.pbtxt").write_text(config)
        (folder / "model.py").write_text(f"NAME = {root.name!r}  # {code}\n")
    (root / "model_repository/decoder/1/decoder.json").write_text("{}")
    return write_manifest(root, name=root.name)


class Fake:
    """A server that notes what it is asked and what the repository said then."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.failing: set[tuple] = set()
        self.repository: Path | None = None

    def load(self, model):
        self._do("load", model, tuple(self.config(model).version_policy.specific.versions))

    def unload(self, model):
        self._do("unload", model)

    def generate(self, model):
        self._do("generate", model)

    def retire(self, number):
        self.failing.clear()  # what failed was the version that goes
        self._do("retire", number)

    def kill(self, number):
        self._do("kill", number)

    def refuse(self, number):
        self._do("refuse", number)

    def _do(self, *call):
        self.calls.append(call)
        if call[:2] in self.failing:
            raise EngineFailure(f"{call} fails")

    def config(self, model):
        """The model's configuration as it is on disk now; None when there is none."""
        path = self.repository / model / "config.pbtxt"
        return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig()) if path.exists() else None

    def route(self) -> Route:
        """What clients read."""
        told = [self.config(model) for model in ("llm", "llm_canary")]
        return Route.of_parameters(
            *({name: value.string_value for name, value in config.parameters.items()} for config in told if config)
        )


@pytest.fixture
def one(tmp_path):
    return make_release(tmp_path / "one")


@pytest.fixture
def two(tmp_path):
    return make_release(tmp_path / "two")


class Served:
    def __init__(self, state, tmp_path, **more):
        self.fake, self._runs, self._tmp_path = Fake(), 0, tmp_path
        self.rollout = Rollout(state, self.fake, grace_s=0.0, **more)
        self.start()

    def start(self):
        """Start a server, as the supervisor does: also the one that takes the place of a dead one."""
        self._runs += 1
        run_dir = self._tmp_path / f"run-{self._runs}"
        run_dir.mkdir(parents=True)
        self.fake.repository = self.rollout.compose(run_dir)

    def roles(self):
        return [(row["role"], row["name"]) for row in self.rollout.describe()["served"]]


@pytest.fixture
def served(one, tmp_path):
    return Served(RolloutState(one), tmp_path)


def test_a_served_version_finds_its_release_and_adds_nothing_to_it(served, one):
    before = sorted(one.root.rglob("*"))
    arguments = {"model_repository": str(served.fake.repository / "decoder"), "model_version": "1000000"}
    assert version_folder(arguments) == one.model_repository / "decoder/1"
    assert sorted(one.root.rglob("*")) == before


def test_a_release_that_is_served_as_it_is_has_its_files_beside_its_code(one):
    """`tritonserver --model-repository <release>/model_repository` goes on to work."""
    decoder = one.model_repository / "decoder"
    assert version_folder({"model_repository": str(decoder), "model_version": "1"}) == decoder / "1"


def test_the_ensemble_is_pinned_to_the_version_that_is_served(served):
    assert [step.model_version for step in served.fake.config("llm").ensemble_scheduling.step] == [1000000, 1000000]


def test_the_server_tells_the_digest_that_it_serves(served, one):
    assert served.fake.route().stable.digest == one.digest


def test_nothing_of_a_served_version_changes_when_another_comes(served, two):
    """Wrong: Triton would load the stable version again, and its streams' process would end as if it had died."""

    def times():
        folders = (served.fake.repository / model / "1000000" for model in ("tokenizer", "decoder"))
        return {path: path.stat().st_ctime_ns for folder in folders for path in (folder, *folder.rglob("*"))}

    before = times()
    assert not any(path.is_symlink() for path in before) and any(path.suffix == ".pyc" for path in before)
    served.rollout.canary(two.root, 0.2)
    assert times() == before


def test_a_canary_is_a_lower_version_beside_the_stable_one(served, two):
    """Lower: calls of tokenizer and decoder that name no version stay with the stable release."""
    served.rollout.canary(two.root, 0.2)
    assert served.fake.calls[:3] == [
        ("load", "tokenizer", (1000000, 999999)),
        ("load", "decoder", (1000000, 999999)),
        ("load", "llm_canary", (999999,)),
    ]
    route = served.fake.route()
    assert (route.stable.version, route.canary.version, route.share.fraction) == (1000000, 999999, 0.2)
    assert route.canary.digest == two.digest
    assert [step.model_version for step in served.fake.config("llm_canary").ensemble_scheduling.step] == [
        999999,
        999999,
    ]


def test_a_canary_takes_no_request_before_it_has_generated_a_token(served, two):
    shares = []
    served.fake.generate = lambda model: shares.append(served.fake.route().share.fraction)
    served.rollout.canary(two.root, 0.2)
    assert shares == [0.0]


@pytest.mark.parametrize("failing", [("load", "tokenizer"), ("load", "decoder"), ("generate", "llm_canary")])
def test_a_canary_that_fails_leaves_the_stable_release_alone(served, two, failing):
    served.fake.failing = {failing}
    with pytest.raises(EngineFailure, match=failing[1]):
        served.rollout.canary(two.root, 0.2)
    assert served.roles() == [("stable", "one")] and served.fake.route().canary is None
    assert served.fake.calls[-3:] == [
        ("retire", 999999),
        ("load", "tokenizer", (1000000,)),
        ("load", "decoder", (1000000,)),
    ]
    served.rollout.canary(two.root, 0.2)
    assert served.fake.route().canary.version == 999998, "a number is never used again"


def test_a_promotion_moves_new_requests_before_it_lets_go_of_the_old_version(served, two):
    served.rollout.canary(two.root, 0.2)
    served.fake.calls.clear()
    served.rollout.promote()
    assert served.fake.calls == [
        ("load", "llm", (999999,)),
        ("load", "llm_canary", (999999,)),
        ("unload", "llm_canary"),
        ("retire", 1000000),
        ("load", "tokenizer", (999999,)),
        ("load", "decoder", (999999,)),
    ]
    assert served.roles() == [("stable", "two")] and served.rollout.describe()["previous"]["name"] == "one"


def test_a_canary_that_is_taken_back_gets_nothing_new_before_it_goes(served, two):
    served.rollout.canary(two.root, 0.2)
    shares = []
    served.fake.unload = lambda model: shares.append(served.fake.route().share.fraction)
    served.rollout.rollback()
    assert shares == [0.0] and served.roles() == [("stable", "one")]
    assert served.fake.route().canary is None


def test_a_rollback_after_a_promotion_brings_the_old_release_back_as_a_new_version(served, two):
    served.rollout.canary(two.root, 0.2)
    served.rollout.promote()
    served.rollout.rollback()
    assert served.roles() == [("stable", "one")] and served.fake.route().stable.version == 999998
    with pytest.raises(InvalidRequest, match="neither a canary to take back nor an earlier release"):
        served.rollout.rollback()


def test_the_share_of_a_canary_changes_without_loading_it_again(served, two):
    served.rollout.canary(two.root, 0.2)
    served.fake.calls.clear()
    served.rollout.canary(two.root, None, ["acme"])
    assert served.fake.calls == [("load", "llm_canary", (999999,))]
    assert served.fake.route().share.tenants == ("acme",)


def test_a_server_that_died_during_a_canary_comes_back_without_it(served, two):
    served.rollout.canary(two.root, 0.2)
    served.start()
    assert served.roles() == [("stable", "one")] and served.fake.route().canary is None
    assert served.rollout.releases() == (served.rollout.release,)
    assert served.fake.route().stable.version == 1000000, "its metrics go on under the labels they had"
    served.rollout.canary(two.root, 0.2)
    assert served.fake.route().canary.version == 999998


def test_a_release_that_was_built_again_is_told_as_it_is(served, one):
    """Wrong: a campaign would record the digest of a release that is no longer there."""
    (one.root / "more").touch()
    again = write_manifest(one.root, name="one")
    served.start()
    assert served.fake.route().stable.digest == served.rollout.release.digest == again.digest
    assert served.fake.route().stable.version == 999999
    (one.root / "manifest.json").unlink()
    served.start()
    assert served.rollout.release.digest == again.digest, "the load tells that it is gone"


def test_a_death_ends_the_command_that_waits_for_the_routes(one, two, tmp_path):
    """Wrong: the dead server would not be replaced before the command is done."""
    served = Served(RolloutState(one), tmp_path)
    served.rollout._grace_s = 60.0
    served.rollout.canary(two.root, 0.2)
    failed, waiting = [], threading.Event()
    await_routes = served.rollout._await_routes
    served.rollout._steps._await_routes = lambda: (waiting.set(), await_routes())

    def take_back():
        try:
            served.rollout.rollback()
        except EngineFailure as error:
            failed.append(error)

    thread = threading.Thread(target=take_back)
    thread.start()
    assert waiting.wait(10)
    served.start()
    thread.join(10)
    assert failed and "comes back with its stable release" in str(failed[0])


def test_a_second_command_at_the_same_time_is_refused(served, two):
    started, end = threading.Event(), threading.Event()
    served.fake.generate = lambda model: (started.set(), end.wait(10))
    thread = threading.Thread(target=served.rollout.canary, args=(two.root, 0.2))
    thread.start()
    assert started.wait(10)
    with pytest.raises(Overloaded, match="another release command is under way"):
        served.rollout.promote()
    end.set()
    thread.join(10)
    assert served.roles() == [("stable", "one"), ("canary", "two")]


def test_what_cannot_be_done_is_refused_with_the_reason(served, one, two, tmp_path):
    with pytest.raises(InvalidRequest, match="no canary to promote"):
        served.rollout.promote()
    with pytest.raises(InvalidRequest, match="is the one that is served"):
        served.rollout.canary(one.root, 0.2)
    served.rollout.canary(two.root, 0.2)
    with pytest.raises(InvalidRequest, match="two is the canary; promote it or take it back first"):
        served.rollout.canary(make_release(tmp_path / "three").root, 0.2)


def test_a_release_with_another_configuration_is_no_version_of_the_same_model(served, tmp_path):
    """One configuration holds for all versions: Triton would load the stable release again with the other's."""
    with pytest.raises(ReleaseMismatch, match=r"config\.pbtxt of tokenizer is not the one"):
        served.rollout.canary(make_release(tmp_path / "other", batch=8).root, 0.2)
    assert served.fake.calls == [] and served.roles() == [("stable", "one")]


def test_a_release_of_an_older_version_is_refused_with_the_remedy(served, tmp_path):
    """Wrong: it would fail to load with a path that nobody knows."""
    old = make_release(tmp_path / "old", code="")
    with pytest.raises(ReleaseMismatch, match=r"older version .* assemble it again with build/release\.py"):
        served.rollout.canary(old.root, 0.2)
    with pytest.raises(ReleaseMismatch, match="older version"):
        Served(RolloutState(old), tmp_path / "run")


def test_a_promotion_outlives_the_launcher(one, two, tmp_path):
    state = tmp_path / "state"
    served = Served(RolloutState(one, state), tmp_path)
    served.rollout.canary(two.root, 0.2)
    served.rollout.promote()
    again = RolloutState(one, state)
    assert (again.stable.digest, again.previous.digest) == (two.digest, one.digest)


def test_a_promotion_that_cannot_be_remembered_is_undone(one, two, tmp_path):
    """Wrong: it would serve the new release, tell the old one, and have forgotten what to roll back to."""
    folder = tmp_path / "state"
    state = RolloutState(one, folder)
    served = Served(state, tmp_path)
    served.rollout.canary(two.root, 0.2)
    folder.rmdir()
    with pytest.raises(EngineFailure, match=r"rollout\.json.*cannot be written"):
        served.rollout.promote()
    assert served.fake.route().stable.digest == one.digest and state.stable.digest == one.digest
    assert served.fake.calls[-1] == ("load", "llm", (1000000,)) and state.previous is None
    folder.mkdir()
    served.rollout.promote()
    assert served.fake.route().stable.digest == two.digest and state.previous.digest == one.digest


def test_an_earlier_release_that_was_deleted_does_not_keep_the_service_down(one, two, tmp_path):
    """Wrong: whoever tidies up old releases would learn of it at the next restart."""
    folder = tmp_path / "state"
    three, state = make_release(tmp_path / "three"), RolloutState(one, folder)
    state.promote(two)
    state.promote(three)
    (two.root / "manifest.json").unlink()
    state = RolloutState(one, folder)
    assert state.stable.digest == three.digest and state.previous is None


def test_another_given_release_starts_over(one, two, tmp_path):
    """Whoever changes what is given wants that served, not what was promoted before."""
    state = tmp_path / "state"
    RolloutState(one, state).promote(two)
    three = make_release(tmp_path / "three")
    assert RolloutState(three, state).stable.digest == three.digest


def test_a_state_that_cannot_be_read_is_refused(one, tmp_path):
    (tmp_path / "rollout.json").write_text("{")
    with pytest.raises(ReleaseMismatch, match="remove it to start over"):
        RolloutState(one, tmp_path)


def test_a_promoted_release_that_was_replaced_is_refused(one, two, tmp_path):
    state = tmp_path / "state"
    RolloutState(one, state).promote(two)
    (two.root / "more").touch()
    write_manifest(two.root, name="two")
    with pytest.raises(ReleaseMismatch, match="another release than when it was promoted"):
        RolloutState(one, state)


def test_commands_reach_the_rollout_and_what_is_none_is_refused(served, two):
    table = CommandTable(served.rollout)
    assert table({"command": "list"})["served"][0]["name"] == "one"
    table({"command": "canary", "release": str(two.root), "share": 0.5, "tenants": []})
    assert served.fake.route().share.fraction == 0.5
    assert json.dumps(table({"command": "promote"}))
    with pytest.raises(InvalidRequest, match="command must be one of list, canary, promote, rollback, got 'x'"):
        table({"command": "x"})
    with pytest.raises(InvalidRequest, match=r"command promote: .*force"):
        table({"command": "promote", "force": True})


def test_a_canary_whose_files_were_changed_is_taken_back_alone(served, two):
    """Wrong: the stable release's streams would end because of what happened to another's files."""
    served.rollout.canary(two.root, 0.2)
    served.fake.calls.clear()
    assert served.rollout.give_up(two, "model.bin was changed")
    served.rollout._giving_up[999999].join(10)
    assert served.fake.calls[0] == ("refuse", 999999), "nobody gets more of it"
    assert served.roles() == [("stable", "one")] and served.fake.route().canary is None
    assert (served.fake.repository.parent / "taken_back").read_text() == "1"
    assert served.rollout.give_up(two, "model.bin was changed"), "the watch may say it once more"
    served.start()
    assert (served.fake.repository.parent / "taken_back").read_text() == "1", "it goes on counting over the servers"


def test_a_changed_stable_release_is_not_given_up(served, one, two):
    assert not served.rollout.give_up(one, "model.bin was changed")
    served.rollout.canary(two.root, 0.2)
    served.rollout.promote()
    assert not served.rollout.give_up(two, "model.bin was changed") and served.rollout.give_up(one, "it is gone")


def test_a_changed_canary_that_cannot_be_taken_back_leaves_it_to_another_server(served, two):
    """Wrong: the watch would wait for ever for a canary to go that does not."""
    served.rollout.canary(two.root, 0.2)
    served.fake.failing = {("load", "llm_canary")}
    assert served.rollout.give_up(two, "changed")
    served.rollout._giving_up[999999].join(10)
    assert not served.rollout.give_up(two, "changed")


class Hanging:
    """A load that hangs until the version's processes are killed."""

    def __init__(self, fake, model):
        self.started, self._end, self._model, self._load = threading.Event(), threading.Event(), model, fake.load
        fake.load, fake.kill = self.load, self.kill
        self.fake = fake

    def load(self, model):
        if model == self._model and not self._end.is_set():
            self.started.set()
            assert self._end.wait(10)
            raise EngineFailure("the stub is not healthy")
        self._load(model)

    def kill(self, number):
        self.fake.calls.append(("kill", number))
        self._end.set()


@pytest.mark.parametrize("model", ["tokenizer", "decoder"])
def test_a_rollback_gives_up_a_canary_that_hangs_while_it_loads(served, two, model):
    """Wrong: nothing could be done with the server's releases until it is restarted."""
    hanging, raised = Hanging(served.fake, model), []

    def canary():
        try:
            served.rollout.canary(two.root, 0.2)
        except Cancelled as error:
            raised.append(error)

    thread = threading.Thread(target=canary)
    thread.start()
    assert hanging.started.wait(10)
    assert served.roles() == [("stable", "one"), ("loading", "two")]
    with pytest.raises(Overloaded, match="another release command"):
        served.rollout.promote()
    served.rollout.rollback()
    thread.join(10)
    assert "given up: a rollback was asked for" in str(raised[0])
    assert ("kill", 999999) in served.fake.calls and served.roles() == [("stable", "one")]
    served.rollout.canary(two.root, 0.2)
    assert served.roles() == [("stable", "one"), ("canary", "two")]


def test_a_load_that_takes_too_long_is_ended(served, two):
    load = served.fake.load

    def late(model):
        load(model)
        if model == "decoder" and ("kill", 999999) not in served.fake.calls:
            raise DeadlineExceeded("model decoder: took longer than 1 s")

    served.fake.load = late
    with pytest.raises(DeadlineExceeded):
        served.rollout.canary(two.root, 0.2)
    assert served.fake.calls.index(("kill", 999999)) < served.fake.calls.index(("retire", 999999))
    assert served.roles() == [("stable", "one")]


def test_too_little_memory_is_told_before_anything_is_loaded(one, two, tmp_path):
    def check_room(release):
        raise Overloaded(f"release {release.name} needs 9 MiB")

    served = Served(RolloutState(one), tmp_path, check_room=check_room)
    with pytest.raises(Overloaded, match="two needs 9 MiB"):
        served.rollout.canary(two.root, 0.2)
    assert not served.fake.calls and served.roles() == [("stable", "one")]
    served.rollout.canary(two.root, 0.2, ignore_memory=True)
    served.rollout.promote()
    with pytest.raises(Overloaded, match="one needs 9 MiB"):
        served.rollout.rollback()
    CommandTable(served.rollout)({"command": "rollback", "ignore_memory": True})
    assert served.roles() == [("stable", "one")]


def test_version_numbers_that_are_used_up_are_told_and_begin_anew_with_a_server(one, two, tmp_path):
    """Wrong: version 0 or -1, which Triton does not load, after a thousand canaries."""
    served = Served(RolloutState(one), tmp_path)
    served.rollout._numbers._next = 1
    served.rollout.canary(two.root, 0.2)
    assert served.fake.route().canary.version == 1
    served.rollout.rollback()
    with pytest.raises(Overloaded, match="version numbers are used"):
        served.rollout.canary(two.root, 0.2)
    served.start()
    assert served.fake.route().stable.version == 1000000
    served.rollout.canary(two.root, 0.2)
    assert served.fake.route().canary.version == 999999


@pytest.mark.parametrize("failing", [("unload", "llm_canary"), ("load", "llm_canary")])
def test_a_promotion_whose_tail_fails_is_told_as_done_and_harms_no_later_command(served, two, failing, tmp_path):
    """Wrong: a rollback would retire the stable version, whose death nobody would notice then; or the end of the old
    one, unloaded by the next command, would count as a death."""
    served.rollout.canary(two.root, 0.2)
    load, unload = served.fake.load, served.fake.unload
    broken = {"on": True}

    def wrap(real, name):
        def call(model):
            if broken["on"] and (name, model) == failing:
                raise EngineFailure("no luck")
            real(model)

        return call

    served.fake.load, served.fake.unload = wrap(load, "load"), wrap(unload, "unload")
    with pytest.raises(EngineFailure, match=r"two is stable now, but one may still be loaded: .*no luck"):
        served.rollout.promote()
    assert served.roles() == [("stable", "two")] and ("retire", 1000000) in served.fake.calls
    broken["on"] = False
    served.rollout.rollback()
    assert served.roles() == [("stable", "one")] and ("retire", 999999) in served.fake.calls


def test_a_rollback_that_cannot_be_remembered_leaves_no_canary_behind(one, two, tmp_path):
    """Wrong: the next rollback would take that canary back, and not the promotion."""
    folder = tmp_path / "state"
    served = Served(RolloutState(one, folder), tmp_path)
    served.rollout.canary(two.root, 0.2)
    served.rollout.promote()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(EngineFailure, match="cannot be written"):
        served.rollout.rollback()
    assert served.roles() == [("stable", "two")] and served.rollout.describe()["previous"]["name"] == "one"
    folder.mkdir()
    served.rollout.rollback()
    assert served.roles() == [("stable", "one")]


def test_a_clean_up_that_fails_does_not_hide_why_the_canary_failed(served, two):
    def fail(*given):
        raise EngineFailure("the clean-up")

    served.fake.generate, served.fake.unload = lambda model: served.fake._do("x") or fail_with("the cause"), fail
    with pytest.raises(EngineFailure, match="the cause"):
        served.rollout.canary(two.root, 0.2)


def fail_with(text):
    raise EngineFailure(text)


@pytest.mark.parametrize(
    "text",
    [b"\xff", b'{"given": 1, "stable": "x", "previous": null}', b'{"given": 1, "stable": {"path": 7}, "previous": []}'],
)
def test_a_state_without_meaning_is_refused_and_not_a_traceback(one, tmp_path, text):
    (tmp_path / "rollout.json").write_bytes(text.replace(b"1,", json.dumps(one.digest).encode() + b","))
    with pytest.raises(ReleaseMismatch, match="remove it to start over"):
        RolloutState(one, tmp_path)


def test_a_state_folder_that_cannot_be_made_is_named(one, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"--state .*file/state"):
        RolloutState(one, tmp_path / "file" / "state")
