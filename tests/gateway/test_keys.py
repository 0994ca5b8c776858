"""API keys. Wrong if a key could be read from disk or logs, guessed by timing, or used after it was revoked."""

import hmac
import json
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from tritonforge import cli
from tritonforge.errors import InvalidRequest, NotFound
from tritonforge.gateway.limits import keys as keys_module
from tritonforge.gateway.limits.keys import KeyStore, create_key, read_keys, revoke_key
from tritonforge.launch.probe import PROBE_TENANT


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.json"


def test_a_key_is_found_by_its_text_and_by_no_other(file):
    key, text = create_key(file, "acme", "for tests")
    other, _ = create_key(file, "beta")
    store = KeyStore(file)
    assert store.find(text) == key
    for wrong in (text[:-1], text + "x", text.replace(key.id, other.id), "", "sk-tf-", text.upper(), "é" * 40):
        assert store.find(wrong) is None


def test_the_file_holds_no_key_and_only_its_owner_reads_it(file):
    _, text = create_key(file, "acme")
    assert text.rpartition("-")[2] not in file.read_text(encoding="utf-8") and text not in file.read_text("utf-8")
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600


def test_a_revoked_key_is_refused_by_a_store_that_is_open(file):
    key, text = create_key(file, "acme")
    store = KeyStore(file)
    assert store.find(text) and store.is_valid(key.id)
    revoke_key(file, key.id)
    assert store.find(text) is None and not store.is_valid(key.id)


def test_a_new_key_works_at_once(file):
    create_key(file, "acme")
    store = KeyStore(file)
    assert store.find(create_key(file, "beta")[1]).tenant == "beta"


def test_a_broken_file_changes_nothing_and_is_told_once(file, caplog):
    _, text = create_key(file, "acme")
    store = KeyStore(file)
    file.write_text("{", encoding="utf-8")
    with caplog.at_level(logging.ERROR):
        assert store.find(text) and store.find(text)
    assert len(caplog.records) == 1 and text not in caplog.text
    file.unlink()
    assert store.find(text)


def test_digests_are_compared_in_constant_time_also_of_an_unknown_key(file, monkeypatch):
    _, text = create_key(file, "acme")
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(
        keys_module.hmac, "compare_digest", lambda a, b: compared.append(len(a) == len(b)) or real(a, b)
    )
    store = KeyStore(file)
    store.find(text)
    store.find("sk-tf-000000000000-" + "a" * 43)
    store.find("nonsense")
    assert compared == [True, True, True]


def test_commands_at_the_same_time_lose_no_key(file):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda index: create_key(file, f"tenant-{index}")[0].id, range(24)))
    assert sorted(read_keys(file)) == sorted(made)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 2, "keys": []}', '{"format": 1, "keys": [{"id": "x"}]}'])
def test_what_is_no_file_of_keys_is_refused_with_its_name(file, content):
    file.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"keys\.json"):
        KeyStore(file)


def test_the_command_creates_lists_and_revokes(file, capsys):
    assert cli.main(["keys", "create", "--keys", str(file), "--tenant", "acme", "--note", "phone"]) == 0
    text = capsys.readouterr().out.strip()
    (key,) = read_keys(file).values()
    assert KeyStore(file).find(text) == key
    assert cli.main(["keys", "list", "--keys", str(file)]) == 0
    listed = capsys.readouterr().out
    assert key.id in listed and "acme" in listed and "phone" in listed and text not in listed
    assert cli.main(["keys", "revoke", "--keys", str(file), key.id]) == 0
    assert KeyStore(file).find(text) is None
    assert cli.main(["keys", "revoke", "--keys", str(file), "unknown"]) == 1


def test_a_tenants_name_must_be_one(file):
    with pytest.raises(InvalidRequest, match="tenant"):
        create_key(file, "a b")
    with pytest.raises(NotFound):
        create_key(file, "a")
        revoke_key(file, "b")


def test_a_key_keeps_when_it_was_revoked(file):
    key, _ = create_key(file, "acme")
    first = revoke_key(file, key.id).revoked
    assert revoke_key(file, key.id).revoked == first
    assert json.loads(file.read_text(encoding="utf-8"))["keys"][0]["revoked"] == first


def test_the_tenant_of_probes_is_nobodys(file):
    """Its requests are not counted, so a key of it would use the service unseen."""
    with pytest.raises(InvalidRequest, match="tenant must not be 'tritonforge-probe'"):
        create_key(file, PROBE_TENANT)
    key, _ = create_key(file, "acme")
    file.write_text(file.read_text("utf-8").replace('"acme"', f'"{PROBE_TENANT}"'), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=key.id):
        KeyStore(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write another user's file")
def test_a_file_that_root_writes_stays_the_gateways(file):
    """Wrong: a gateway of another user could no longer read it, and a key that root revokes would go on to work."""
    key, _ = create_key(file, "acme")
    os.chown(file, 12345, 12345)
    revoke_key(file, key.id)
    assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (12345, 0o600)
