"""Tenants: keys, models, request rates, concurrent requests and salts."""

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.router_rig import CHAT, COMPLETIONS, Reply, RouterRig
from tests.support.scripted_spec import FaultKind, ScriptedSpec
from vllm_kvpool.config import read_request_options
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import TenantConfig, load_config, read_tenants
from vllm_kvpool.router.dataplane.data_plane import METHODS
from vllm_kvpool.router.ops.tenants import Denied, Tenants, TenantSalts

KEY = "k-0123456789abcdef"
OTHER = "k-fedcba9876543210"
ASK = {"model": "scripted", "prompt": "hello", "max_tokens": 4, "temperature": 0}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def write_secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


class Bench:
    """The tenant `a`, and a clock that the test sets."""

    def __init__(self, **config: Any) -> None:
        self.now = 100.0
        self.configs = [TenantConfig(name="a", key=KEY, **config)]
        self.tenants = Tenants(lambda: self.configs, lambda: self.now)
        self.tenant = self.tenants.of(f"Bearer {KEY}")

    def enter(self, model: str = "m", num_sequences: int = 1) -> None:
        self.tenants.enter(self.tenant, model, num_sequences)

    def denied(self, model: str = "m", num_sequences: int = 1) -> Denied:
        with pytest.raises(Denied) as caught:
            self.enter(model, num_sequences)
        return caught.value


def test_a_key_names_its_tenant_plain_or_by_its_digest() -> None:
    digest = "sha256:" + hashlib.sha256(OTHER.encode()).hexdigest()
    configs = [TenantConfig(name="a", key=KEY), TenantConfig(name="b", key=digest)]
    tenants = Tenants(lambda: configs)
    assert tenants.of(f"Bearer {KEY}").config.name == "a"
    assert tenants.of(f"bearer  {OTHER} ").config.name == "b"
    basic, digested = f"Basic {KEY}", f"Bearer {digest}"
    for given in (None, "", KEY, "Bearer ", "Bearer x", basic, digested, "\udcff"):
        with pytest.raises(Denied) as caught:
            tenants.of(given)
        assert caught.value.status == 401


def test_models_of_others_are_refused() -> None:
    bench = Bench(models=("m", "lora"))
    bench.enter("lora")
    assert bench.denied("n").status == bench.denied("").status == 403
    assert bench.tenant.num_running == 1


def test_rate_is_a_bucket_that_fills() -> None:
    bench = Bench(requests_per_s=2.0, burst=3.0)
    for _ in range(3):
        bench.enter()
    late = bench.denied()
    assert (late.status, late.retry_after_s) == (429, 0.5)
    bench.now += 0.5
    bench.enter()
    assert bench.denied().status == 429
    bench.now += 1000
    for _ in range(3):
        bench.enter()
    assert bench.denied().status == 429


def test_so_many_at_a_time_also_after_the_file_has_changed() -> None:
    bench = Bench(max_running=2)
    first = bench.tenant
    bench.enter()
    bench.enter()
    assert bench.denied().status == 429
    bench.configs = [TenantConfig(name="a", key=OTHER, max_running=2)]
    bench.tenants.reload()
    with pytest.raises(Denied):
        bench.tenants.of(f"Bearer {KEY}")
    bench.tenant = bench.tenants.of(f"Bearer {OTHER}")
    assert bench.denied().status == 429
    first.leave(1)
    bench.enter()


def test_request_of_many_sequences_counts_as_so_many() -> None:
    bench = Bench(max_running=8, requests_per_s=2.0, burst=3.0)
    never = bench.denied("m", 9)
    assert (never.status, "9 sequences" in str(never)) == (400, True), "it would never be let in"
    bench.enter("m", 6)
    later = bench.denied("m", 3)
    assert (later.status, "6 sequences running" in str(later)) == (429, True)
    late = bench.denied()
    assert (late.status, late.retry_after_s) == (429, 2.0), "it has taken 6 of 3"
    bench.tenant.leave(6)
    bench.now += 2.0
    bench.enter()
    assert bench.tenant.num_running == 1


ENTRY = f'[[tenants]]\nname = "a"\nkey = "{KEY}"\n'
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()
DIGEST_ENTRY = f'[[tenants]]\nname = "b"\nkey = "sha256:{DIGEST.upper()}"\n'


@pytest.mark.parametrize(
    ("text", "mode", "word"),
    [
        (ENTRY, 0o644, "chmod 600"),
        ('[[tenants]]\nname = "a"\nkey = "short"\n', 0o600, "fewer than 16"),
        ('[[tenants]]\nname = "a"\nkey = "sha256:12"\n', 0o600, "64 hexadecimal digits"),
        ('[[tenants]]\nname = "a"\n', 0o600, "`key` is missing"),
        (ENTRY.replace('"a"', '"a team"'), 0o600, "not 'a team'"),
        (ENTRY.replace('"a"', '""'), 0o600, "not ''"),
        (ENTRY.replace('"a"', '"-"'), 0o600, "not '-'"),
        (ENTRY * 2, 0o600, "one name"),
        (ENTRY + DIGEST_ENTRY, 0o600, "one key"),
        (f"{ENTRY}requests_per_s = nan\n", 0o600, "limits are 0"),
        (f"{ENTRY}burst = nan\n", 0o600, "burst 1 or more"),
        ('[tenants]\nname = "a"\n', 0o600, "two brackets"),
        ("[[tenant]]\n", 0o600, "did you mean 'tenants'"),
    ],
)
def test_a_file_of_keys_that_is_wrong(text: str, mode: int, word: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        read_tenants(path)
    assert word in str(caught.value)
    assert KEY not in str(caught.value)
    router = tmp_path / "router.toml"
    engine = '[[replicas]]\nurl = "http://a:1"\nrole = "both"\n'
    router.write_text(f'[front]\nkeys_file = "keys.toml"\n{engine}')
    with pytest.raises(ConfigError):
        load_config(router)


@pytest.mark.parametrize("name", ["a", "0", "Team_1.of-us", "x" * 64])
def test_a_name_of_a_tenant_is_one_that_engines_take(name: str, tmp_path: Path) -> None:
    path = write_secret(tmp_path / "keys.toml", ENTRY.replace('"a"', f'"{name}"'))
    (tenant,) = read_tenants(Path(path))
    assert read_request_options({"kvpool": {"tenant": tenant.name}}).tenant == name


async def test_clients_are_answered_as_their_keys_allow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="vllm_kvpool.router.access")
    first = f'{ENTRY}models = ["scripted"]\nmax_running = 1\n'
    second = f'[[tenants]]\nname = "b"\nkey = "{OTHER}"\nmodels = ["other"]\n'
    path = write_secret(tmp_path / "keys.toml", first + second)
    spec = ScriptedSpec(step_base_s=0.001, put_s=0.005, api_key="of-engines")
    front = {"keys_file": path, "access_log": True}
    async with RouterRig(1, 1, spec=spec, front=front, api_key="of-engines") as rig:

        async def ask(key: str, body: Mapping[str, Any] = ASK, path: str = COMPLETIONS) -> Reply:
            return await rig.ask("POST", path, body, bearer(key))

        assert (await ask(KEY)).status == 200
        for key in ("", "wrong", "of-engines"):
            refused = await ask(key)
            assert (refused.status, refused.json["error"]["code"]) == (401, 401)
        refused = await ask(OTHER)
        assert refused.status == 403
        assert "only other" in refused.json["error"]["message"]
        long = asyncio.ensure_future(ask(KEY, {**ASK, "max_tokens": 500}))
        await rig.until(rig.holders, "an engine has it")
        assert (await ask(KEY)).status == 429
        assert (await long).status == 200
        assert (await ask(KEY)).status == 200
        for key, names in ((KEY, ["scripted"]), (OTHER, [])):
            listed = await rig.ask("GET", "/v1/models", headers=bearer(key))
            assert [each["id"] for each in listed.json["data"]] == names
        text = {"model": "scripted", "prompt": "hello"}
        for key, wanted in (("", 401), (OTHER, 403), (KEY, 200)):
            assert (await ask(key, text, "/tokenize")).status == wanted
        # Scripted engines know no such path: their 404 says that the request was let through.
        for texts, wanted in ((["a"], 404), (["a", "b"], 400)):
            body = {"model": "scripted", "input": texts}
            assert (await ask(KEY, body, "/v1/embeddings")).status == wanted
        for open_path in ("/health", "/metrics"):
            assert (await rig.ask("GET", open_path)).status == 200
    said = [each.message for each in caplog.records if each.name == "vllm_kvpool.router.access"]
    for status, count in ((401, 4), (403, 2), (429, 1), (200, 3)):
        assert sum(f" status={status} " in line for line in said) == count, said
    assert KEY not in "".join(said)
    assert any(each.startswith("refused requests: 1 with 403") for each in caplog.messages)


async def test_clients_wait_as_the_rate_in_the_file_of_keys_says(tmp_path: Path) -> None:
    entry = f"{ENTRY}requests_per_s = 0.001\nburst = 2.0\n"
    front = {"keys_file": write_secret(tmp_path / "keys.toml", entry)}
    async with RouterRig(0, 1, front=front) as rig:
        replies = [await rig.ask("POST", COMPLETIONS, ASK, bearer(KEY)) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 429]


SECRET = b"s" * 44


def test_salts_of_tenants_are_apart_and_stable() -> None:
    """Two tenants, or two values of one tenant, never share a salt, whatever a client sends."""
    salts = TenantSalts(SECRET)
    names = ("a", "b", 'a","', "a\\", "ab", "")
    odd = ['","x', '"]', "\ud800", "a" * 300, "A", "é", "e\u0301"]
    given = ["", "x", "b", *odd, salts.of("a", "")]
    made = {salts.of(name, each) for name in names for each in given}
    assert len(made) == len(names) * len(given)
    assert all(re.fullmatch("[0-9a-f]{64}", each) for each in made), "vLLM refuses some characters"
    assert salts.of("a", "x") == TenantSalts(SECRET).of("a", "x")
    assert salts.of("a", "x") != TenantSalts(b"t" * 44).of("a", "x")


@pytest.mark.parametrize(
    ("text", "front", "word"),
    [
        ("short", 'keys_file = "keys.toml"\n', "fewer than 32"),
        ("s" * 44, "", "salt_file needs keys_file"),
    ],
)
def test_salt_file_that_is_wrong_is_named(text: str, front: str, word: str, tmp_path: Path) -> None:
    write_secret(tmp_path / "keys.toml", ENTRY)
    write_secret(tmp_path / "salt", text)
    engine = '[[replicas]]\nurl = "http://a:1"\nrole = "both"\n'
    router = tmp_path / "router.toml"
    router.write_text(f'[front]\nsalt_file = "salt"\n{front}{engine}')
    with pytest.raises(ConfigError, match=word):
        load_config(router)


LONG = "hello world " * 150  # worth a prefill of its own
TALK = [{"role": "user", "content": LONG}]
OTHERS = {"kvpool": {"tenant": "another", "save": False}}
ENDPOINTS: dict[str, Any] = {
    COMPLETIONS: {"prompt": LONG, "max_tokens": 60},
    CHAT: {"messages": TALK, "max_tokens": 60},
    "/v1/responses": {"input": TALK, "max_output_tokens": 60},
    "/v1/messages": {"messages": TALK, "max_tokens": 60},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_engines_are_told_whose_request_it_is(
    path: str, stream: bool, tmp_path: Path
) -> None:
    keys = write_secret(tmp_path / "keys.toml", ENTRY)
    is_read = path in (COMPLETIONS, CHAT)
    front = {"keys_file": keys}
    async with RouterRig(1, 2, front=front) as rig:
        body = {**ENDPOINTS[path], "stream": stream, "kv_transfer_params": OTHERS}
        if is_read:  # others break off with their engine
            rig.fail((1, 2), FaultKind.CUT, after_tokens=20, times=1)
        assert (await rig.complete(body, path, bearer(KEY))).status == 200
        asked = [each.counts.asked for each in rig.engines if each.counts.received[path]]
        assert len(asked) == (3 if is_read else 1)
        for each in asked:
            params = each["kv_transfer_params"]
            assert params["kvpool"]["tenant"] == "a"
            assert "save" not in params["kvpool"]
            assert KEY not in str(each)
        if is_read:
            assert rig.counts["resumed"] >= 1
            assert asked[1]["stream"] is True, "its answer is read as it comes"


NOT_CACHED = {"/ping", "/tokenize", "/detokenize", "/v1/messages/count_tokens"}
"""Routes that compute no KV."""


@pytest.mark.parametrize("path", sorted(path for path in METHODS if "POST" in METHODS[path]))
async def test_routes_that_compute_kv_get_a_salt_and_all_need_a_key(
    path: str, tmp_path: Path
) -> None:
    front = {
        "keys_file": write_secret(tmp_path / "keys.toml", ENTRY),
        "salt_file": write_secret(tmp_path / "salt", SECRET.decode()),
    }
    body = {"prompt": "a", "input": "a", "messages": TALK, "tokens": [5]}
    async with RouterRig(0, 1, front=front) as rig:
        counts, is_open = rig.engines[0].counts, path == "/ping"
        before = counts.received[path]
        assert (await rig.complete(body, path)).status == (200 if is_open else 401)
        assert counts.received[path] == before
        await rig.complete(body, path, {"Authorization": f"Bearer {KEY}"})
        assert counts.received[path] == before + (not is_open)
        told = json.loads(counts.body_of.get(path, b"{}")).get("cache_salt")
        assert told == (None if path in NOT_CACHED else TenantSalts(SECRET).of("a", ""))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_tenants_are_kept_apart_by_salts_that_they_cannot_name(
    path: str, stream: bool, tmp_path: Path
) -> None:
    """Every engine that gets a request gets the same salt with it, after a failure as well."""
    both = f'{ENTRY}[[tenants]]\nname = "b"\nkey = "{OTHER}"\n'
    keys = write_secret(tmp_path / "keys.toml", both)
    salt = write_secret(tmp_path / "salt", SECRET.decode())
    salts, is_read = TenantSalts(SECRET), path in (COMPLETIONS, CHAT)
    front = {"keys_file": keys, "salt_file": salt, "trust_clients": True}
    async with RouterRig(1, 2, front=front) as rig:
        for tenant, key in (("a", KEY), ("b", OTHER)):
            for given in (None, "own", salts.of("a", "")):
                for each in rig.engines:
                    each.counts.received.clear()
                if is_read and given == "own":  # others break off with their engine
                    rig.fail((1, 2), FaultKind.CUT, after_tokens=20, times=1)
                body = {**ENDPOINTS[path], "stream": stream, "cache_salt": given}
                assert (await rig.complete(body, path, bearer(key))).status == 200
                asked = [each.counts.asked for each in rig.engines if each.counts.received[path]]
                assert asked
                assert {each["cache_salt"] for each in asked} == {salts.of(tenant, given or "")}
        for wrong in ("", 5):
            body = {**ENDPOINTS[path], "cache_salt": wrong}
            reply = await rig.complete(body, path, bearer(KEY))
            assert reply.status == 400
            assert b"cache_salt" in reply.body
