"""`kvpool doctor`, `inspect` and `explain`, as one types them, on directories."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tests.support.buffers import make_buffer
from tests.support.commands import all_commands
from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from tests.support.models import add_tokenizer
from vllm_kvpool.cli import main, retention
from vllm_kvpool.cli.common import stores
from vllm_kvpool.cli.common.stores import NamedStore
from vllm_kvpool.cli.main import COMMANDS
from vllm_kvpool.cli.retention import StoreAnswer
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity, tenant_of
from vllm_kvpool.identity.keys import (
    Namespace,
    chunk_id_of_key,
    hash_of_key,
    make_namespace,
    manifest_key,
)
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import ChunkRef, PutOutcome, Store
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.eviction import Shares
from vllm_kvpool.storage.file.space import FORMAT_DIR, object_name
from vllm_kvpool.storage.file.store import FileStore, ReadOnlyFileStore
from vllm_kvpool.storage.url import FileOptions, StoreSpec, parse_store_url

FIRST, SECOND = (make_namespace("model", digit * 12) for digit in "ab")
TOPOLOGY = Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=2)
VALUES = {"chunk_tokens": 256, "kinds": [{"kind": ""}], "weights": "sample:0", "engine": {"x": 1}}
CELL_BYTES = 10_000
TOKENS = list(range(1000))
SALT = "a secret salt"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with two cells of one chunk, and the manifests of two namespaces."""
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    buffers = [make_buffer(CELL_BYTES), make_buffer(CELL_BYTES)]
    chunk = ChunkRef("")
    keys = [f"{FIRST}@dcp0of1@head:{head}@layers:0-4@{7:032x}" for head in range(2)]
    assert store.put(keys, buffers, [chunk, chunk]) == [PutOutcome.STORED] * 2
    for namespace, values in ((FIRST, VALUES), (SECOND, {**VALUES, "engine": {"x": 2}})):
        put_manifest(store, namespace, values)
    store.close()
    return f"file://{tmp_path}/pool?size=100MiB"


def put_manifest(store: FileStore, namespace: Namespace, values: dict[str, object]) -> None:
    cells = described([LayerGroup(TOPOLOGY, 64)])
    content = write_manifest(Manifest(namespace, namespace, "", values, cells))
    buffer = make_buffer(len(content))
    buffer.view[:] = content
    store.put([manifest_key(namespace)], [buffer], [ChunkRef(manifest_key(namespace))])


def test_inspect_shows_namespaces_by_size(url: str) -> None:
    result = invoke("inspect", "--store", url, "--json")
    assert result.exit_code == 0, result.output
    [store] = json.loads(result.output)
    first, second = store["namespaces"]
    assert first["namespace"] == FIRST
    assert (first["model"], first["weights"]) == ("model", "sample:0")
    assert (first["chunks"], first["cells"]) == (1, 2)
    assert first["bytes"] >= 2 * CELL_BYTES
    assert second["namespace"] == SECOND
    assert (second["chunks"], second["cells"], second["tokens"]) == (0, 0, None), "a manifest alone"
    text = invoke("inspect", "--store", url).output
    assert FIRST in text
    assert "KiB" in text


def test_inspect_says_where_to_see_host_memory(url: str) -> None:
    given = ("inspect", "--store", "host://1GiB", "--store", url)
    host, store = json.loads(invoke(*given, "--json").stdout)
    assert (host["store"], host["namespaces"]) == ("host://", None)
    assert "inspect --engine" in host["why"]
    assert host["why"] in invoke(*given).output
    assert len(store["namespaces"]) == 2


def test_explain_names_the_value(url: str) -> None:
    for names in ([FIRST, SECOND], ["aaa", "bbb"], [FIRST], []):
        result = invoke("explain", *names, "--store", url, "--json")
        assert result.exit_code == 0, result.output
        [found] = json.loads(result.output)
        assert (found["first"], found["second"]) == (FIRST, SECOND)
        [difference] = found["differences"]
        assert (difference["name"], difference["first"], difference["second"]) == ("engine.x", 1, 2)
    assert "start both engines with the same value" in invoke("explain", "--store", url).output


def test_a_name_that_fits_no_namespace_is_said_with_those_there_are(url: str) -> None:
    for name, word in (("ccc", "no namespace 'ccc'"), ("model", "several namespaces")):
        result = invoke("explain", name, "--store", url)
        assert result.exit_code == 1
        assert word in result.output
        assert FIRST in result.output


def test_a_namespace_is_not_compared_with_itself(url: str) -> None:
    same = invoke("explain", FIRST, FIRST, "--store", url)
    assert (same.exit_code, f"both names are of {FIRST}" in same.output) == (1, True), same.output


def test_nothing_is_created(tmp_path: Path) -> None:
    for command in ("inspect", "explain"):
        result = invoke(command, "--store", f"file://{tmp_path}/absent")
        assert result.exit_code == 1
        assert "no directory" in result.output
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("command", ["inspect", "explain", "doctor"])
def test_stores_of_a_start_line(url: str, command: str) -> None:
    extra = {"kv_connector_extra_config": {"store": url}}
    given = json.dumps({"kv_connector": "KVPoolConnector", "kv_role": "kv_both", **extra})
    assert invoke(command, "--kv-transfer-config", given).exit_code == 0
    both = invoke(command, "--kv-transfer-config", given, "--store", url)
    assert "not both" in both.output
    assert "no KVPoolConnector" in invoke(command, "--kv-transfer-config", "{}").output
    assert "--kv-transfer-config:" in invoke(command, "--kv-transfer-config", "{").output
    assert "unknown store scheme" in invoke(command, "--store", "fil:///x").output


def test_doctor_says_what_works(url: str) -> None:
    result = invoke("doctor", "--store", "host://1MiB", "--store", url, "--json")
    assert result.exit_code == 0, result.output
    found = {(each["check"], each["status"]) for each in json.loads(result.output)}
    assert ("memory", "ok") in found
    assert (url, "ok") in found
    assert "1 MiB put in" in invoke("doctor", "--store", url).output
    assert invoke("inspect", "--store", url, "--json").output.count('namespace"') == 2


@pytest.mark.parametrize(
    ("store", "word"),
    [
        ("file:///proc/kvpool", "cannot be used"),
        ("mooncake://127.0.0.1:1", "mooncake"),
        ("host://900TiB", "are available"),
    ],
)
def test_doctor_fails_with_the_reason(store: str, word: str) -> None:
    result = invoke("doctor", "--store", store)
    assert result.exit_code == 1
    assert "failed" in result.output
    assert word in result.output


def explain_tokens(tmp_path: Path, url: str, *options: str) -> Result:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return invoke("explain", FIRST, "--tokens", str(path), "--store", url, *options)


def put_chunks(tmp_path: Path, chunks: range, cells: slice, salt: str = "") -> None:
    """Cells of the prompt's chunks, of the namespace that was given."""
    chain = ChunkChain(256, RequestIdentity(cache_salt=salt))
    chain.extend(TOKENS)
    names = CellNames(FIRST, [LayerGroup(TOPOLOGY, 64)])
    keys = [key for i in chunks for key in names.of_chunk(chain.hashes[i])[cells]]
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    store.put(keys, [make_buffer(100)] * len(keys), [ChunkRef("")] * len(keys))
    store.close()


def test_explain_shows_what_is_stored_of_a_prompt(tmp_path: Path, url: str) -> None:
    put_chunks(tmp_path, range(2), slice(None))
    put_chunks(tmp_path, range(2, 3), slice(1, None))
    [found] = json.loads(explain_tokens(tmp_path, url, "--json").output)
    assert (found["tokens"], found["usable_tokens"]) == (1000, 512)
    assert found["cells_by_store"] == {url: 11}
    assert [len(each["missing"]) for each in found["chunks"]] == [0, 0, 1]
    text = explain_tokens(tmp_path, url).output
    assert "an engine can load the first 512 tokens" in text
    assert "chunk 2: 1 of 4 cells are missing: dcp0of1@head:0@layers:0-2" in text
    put_chunks(tmp_path, range(2, 3), slice(1))
    assert "all whole chunks are there" in explain_tokens(tmp_path, url).output
    salted = explain_tokens(tmp_path, url, "--cache-salt", "x").output
    assert "first 0 tokens" in salted
    assert "chunks 0 to 2: nothing is stored" in salted
    assert "without --cache-salt the first 768 are stored" in salted


@pytest.mark.parametrize("text", ["[1, -1]", "[1, ", '"x"', "[1.5]"])
def test_tokens_that_are_none_are_refused(tmp_path: Path, url: str, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    result = invoke("explain", FIRST, "--tokens", str(path), "--store", url)
    assert result.exit_code == 1
    assert "expected a JSON list of token ids" in result.output
    assert invoke("explain", "--tokens", str(path), "--store", url).exit_code == 2


def test_explain_takes_a_prompt_as_text(tmp_path: Path, url: str) -> None:
    model = add_tokenizer(tmp_path)
    path = tmp_path / "prompt.txt"
    path.write_text("Which river flows through the town? " * 100)
    options = ("explain", FIRST, "--text", str(path), "--store", url)
    [found] = json.loads(invoke(*options, "--tokenizer", str(model), "--json").output)
    assert found["tokens"] > 256
    assert found["usable_tokens"] == 0
    assert "need --tokenizer" in invoke(*options).output
    both = invoke(*options, "--messages", str(path), "--tokenizer", str(model))
    assert "one of --tokens, --text and --messages" in both.output


def test_purge_removes_what_it_is_told_and_asks_before(url: str) -> None:
    asked = CliRunner().invoke(main, ["purge", FIRST, "--store", url], input="n\n")
    assert asked.exit_code == 1
    assert f"remove {FIRST} from {url}?" in asked.output
    assert FIRST in invoke("inspect", "--store", url).output
    result = invoke("purge", FIRST, "--store", url, "--yes")
    assert result.output == f"{url}: 3 objects removed\n"
    left = invoke("inspect", "--store", url).output
    assert FIRST not in left
    assert SECOND in left
    again = invoke("purge", FIRST, "--store", url, "--yes", "--json")
    assert json.loads(again.output) == [{"store": url, "count": 0, "text": "0 objects removed"}]
    assert "is no namespace" in invoke("purge", "model", "--store", url, "--yes").output


@pytest.fixture
def prompt(url: str, tmp_path: Path) -> str:
    """A file with `TOKENS`, whose first two chunks are stored; one more for another salt."""
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    keys = prompt_keys()[:8] + prompt_keys("salt")[:4]
    buffers = [make_buffer(CELL_BYTES)] * len(keys)
    store.put(keys, buffers, [ChunkRef("")] * len(keys))
    store.close()
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    return str(file)


def prompt_keys(salt: str = "") -> list[str]:
    chain = ChunkChain(256, RequestIdentity(cache_salt=salt))
    chain.extend(TOKENS)
    names = CellNames(FIRST, [LayerGroup(TOPOLOGY, 64)])
    return [key for chunk in chain.hashes for key in names.of_chunk(chunk)]


def held(tmp_path: Path, keys: list[str]) -> int:
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    try:
        return sum(store.exists(keys))
    finally:
        store.close()


def test_purge_removes_one_prompt_of_one_salt(url: str, prompt: str, tmp_path: Path) -> None:
    arguments = ("purge", FIRST, "--yes", "--store", url, "--tokens", prompt)
    assert "4 objects removed" in invoke(*arguments, "--cache-salt", "salt").output
    assert held(tmp_path, prompt_keys()) == 8
    assert "8 objects removed" in invoke(*arguments).output
    assert held(tmp_path, prompt_keys() + prompt_keys("salt")) == 0
    assert FIRST in invoke("inspect", "--store", url).output


def test_purge_of_a_prompt_removes_its_end_and_its_aliases(
    url: str, prompt: str, tmp_path: Path
) -> None:
    """An alias has the token ids of its chunk."""
    chain = ChunkChain(256, RequestIdentity())
    chain.extend(TOKENS)
    end = chain.end(TOKENS)
    assert end is not None
    keys = [*CellNames(FIRST, [LayerGroup(TOPOLOGY, 64)]).of_chunk(end)]
    for index, stop in ((0, 64), (1, 192), (3, 33)):
        part = chain.hash_of_part(index, TOKENS[index * 256 :][:stop])
        keys.append(f"{FIRST}@kind:alias@{part.hex()}")
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    store.put(keys, [make_buffer(100)] * len(keys), [ChunkRef("")] * len(keys))
    store.close()
    result = invoke("purge", FIRST, "--yes", "--store", url, "--tokens", prompt)
    assert f"{8 + len(keys)} objects removed" in result.output
    assert held(tmp_path, keys) == 0


def test_purge_of_a_prompt_in_a_directory_removes_drafts_and_other_layer_spans(
    url: str, prompt: str, tmp_path: Path
) -> None:
    """The manifest names neither. Cells of other prompts stay."""

    def cells(salt: str) -> tuple[list[str], list[ChunkRef]]:
        keys = []
        for key in prompt_keys(salt)[:8:4]:
            found = hash_of_key(key)
            keys += [
                f"{FIRST}@head:{head}@layers:0-1@kind:draft-full-2x64-ab@{found}" for head in (0, 1)
            ]
            keys.append(f"{FIRST}@head:0@layers:0-7@{found}")
        return keys, [ChunkRef(chunk_id_of_key(key)) for key in keys]

    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    for salt in ("", "salt"):
        keys, refs = cells(salt)
        store.put(keys, [make_buffer(100)] * len(keys), refs)
    store.close()
    result = invoke("purge", FIRST, "--yes", "--store", url, "--tokens", prompt)
    assert f"{8 + len(cells('')[0])} objects removed" in result.output
    assert held(tmp_path, cells("")[0]) == 0
    assert held(tmp_path, cells("salt")[0]) == 6


@pytest.mark.parametrize(
    "remove",
    [
        lambda stores: retention.remove_prompt(stores, FIRST, prompt_keys()),
        lambda stores: retention.remove_older(stores, [FIRST], 0.0),
        lambda stores: retention.remove_tenant(stores, [FIRST], "-"),
        lambda stores: retention.remove_namespaces(stores, [FIRST]),
    ],
)
def test_purge_of_a_directory_that_may_not_be_written_is_no_success(
    remove: Callable[[list[NamedStore]], list[StoreAnswer]], url: str, prompt: str, tmp_path: Path
) -> None:
    [answer] = remove([NamedStore(url, ReadOnlyFileStore(str(tmp_path / "pool")))])
    assert answer.num is None
    assert answer.text == "may not be written by this user; nothing removed"


def test_purge_of_two_stores_of_which_one_may_not_be_written_is_no_success(
    url: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(spec: StoreSpec, writable: bool) -> Store:
        assert isinstance(spec.options, FileOptions)
        is_other = spec.options.path.endswith("other")
        return ReadOnlyFileStore(spec.options.path) if is_other else open_spec(spec, writable)

    open_spec = stores.open_spec
    monkeypatch.setattr(stores, "open_spec", opened)
    other = url.partition("?")[0] + "-other"
    open_store(parse_store_url(other), segment=False).close()
    result = invoke("purge", FIRST, "--yes", "--store", url, "--store", other)
    assert "may not be written by this user" in result.output
    assert result.exit_code == 1


def test_purge_of_two_stores_of_which_one_fails_removes_from_the_other_and_is_no_success(
    url: str, prompt: str, tmp_path: Path
) -> None:
    failing = FaultyStore(MemoryStore("", 1 << 20))
    failing.inject(Fault.UNREACHABLE, "remove")
    each = [NamedStore("far", failing), NamedStore(url, FileStore(str(tmp_path / "pool"), 1 << 30))]
    far, near = retention.remove_prompt(each, FIRST, prompt_keys())
    each[1].store.close()
    assert (far.num, far.text) == (None, "injected; not all is removed")
    assert near.num == 8


def test_purge_of_two_stores_of_which_one_cannot_do_it_is_no_success(url: str, prompt: str) -> None:
    result = invoke(
        *("purge", FIRST, "--yes", "--store", "memory://x", "--store", url, "--older-than", "7d")
    )
    assert "0 objects removed" in result.output
    assert "cannot say when cells were written" in result.output
    assert result.exit_code == 1


def test_purge_removes_what_is_older(url: str, prompt: str, tmp_path: Path) -> None:
    old, new = prompt_keys()[:4], prompt_keys()[4:8]
    for key in old:
        path = tmp_path / "pool" / FORMAT_DIR / "objects" / object_name(key)
        os.utime(path, (0, 0))
    result = invoke("purge", FIRST, "--yes", "--store", url, "--older-than", "7d")
    assert result.output == f"{url}: 4 objects removed\n"
    assert (held(tmp_path, old), held(tmp_path, new)) == (0, 4)
    result = invoke("purge", FIRST, "--yes", "--store", "memory://x", "--older-than", "1h")
    assert result.exit_code == 1
    assert "cannot say when cells were written" in result.output


def test_pin_says_what_each_store_can_do(url: str, prompt: str) -> None:
    arguments = ("pin", FIRST, "--tokens", prompt, "--store", "memory://x", "--store", url)
    result = invoke(*arguments, "--for", "7d")
    assert result.exit_code == 0, result.output
    assert result.output == f"memory://x: cannot pin\n{url}: 2 chunks pinned\n"
    found = json.loads(invoke(*arguments, "--end", "--json").output)
    assert [each["count"] for each in found] == [None, 2]


def test_pin_beyond_half_of_the_size_names_the_limit(tmp_path: Path, prompt: str) -> None:
    """The limit is half of the URL's size, or half of the cells already stored if that is more.

    Engines with a larger size may have stored more than the URL's size.
    """
    url = f"file://{tmp_path}/small?size=1MiB"
    store = FileStore(str(tmp_path / "small"), 100 << 20)
    keys = prompt_keys()[:4]
    store.put(keys, [make_buffer(150_000)] * 4, [ChunkRef(chunk_id_of_key(key)) for key in keys])
    put_manifest(store, FIRST, VALUES)
    arguments = ("pin", FIRST, "--tokens", prompt, "--for", "7d", "--store", url)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "1 that are stored were not: pins take at most half of size=" in result.output
    store.put(["other"], [make_buffer(2 << 20)], [ChunkRef("other")])
    store.close()
    assert invoke(*arguments).output == f"{url}: 1 chunks pinned\n"


def test_doctor_of_a_url_with_a_smaller_size_than_the_engines_evicts_nothing(
    url: str, tmp_path: Path
) -> None:
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    keys = [f"{SECOND}@dcp0of1@head:0@layers:0-4@{number:040x}" for number in range(3)]
    for key in keys:
        store.put([key], [make_buffer(1 << 20)], [ChunkRef(chunk_id_of_key(key))])
    store.close()
    result = invoke("doctor", "--store", f"file://{tmp_path}/pool?size=2MiB")
    assert result.exit_code == 0, result.output
    assert held(tmp_path, keys) == len(keys)
    assert "an engine with this size= evicts the rest" in result.output


def test_put_of_doctor_evicts_nothing_that_engines_have_saved_meanwhile(
    url: str, tmp_path: Path
) -> None:
    directory = str(tmp_path / "pool")
    keys = [f"{SECOND}@dcp0of1@head:0@layers:0-4@{number:040x}" for number in range(8)]
    engine = FileStore(directory, 100 << 20)

    def save(some: list[str]) -> None:
        for key in some:
            engine.put([key], [make_buffer(1 << 20)], [ChunkRef(chunk_id_of_key(key))])

    save(keys[:4])
    spec = stores.keeping_contents(parse_store_url(f"file://{directory}?size=2MiB"), puts=True)
    save(keys[4:])
    engine.close()
    command = open_store(spec, segment=False)
    command.put(["doctor"], [make_buffer(1 << 20)], [ChunkRef("doctor")])
    command.close()
    assert held(tmp_path, keys) == len(keys)


def test_pin_of_a_prompt_that_is_not_stored_is_an_error(url: str, tmp_path: Path) -> None:
    """A prompt without a whole chunk is an error, too. To end pins that do not exist is none."""
    for tokens in (list(range(1, 1000)), [1]):
        (tmp_path / "other.json").write_text(json.dumps(tokens))
        arguments = ("pin", FIRST, "--tokens", str(tmp_path / "other.json"), "--store", url)
        result = invoke(*arguments, "--for", "7d")
        assert result.exit_code == 1
        assert f"{url}: 0 chunks pinned\n" in result.output
        assert f"nothing was pinned of these {len(tokens)} tokens" in result.output
        assert invoke(*arguments, "--end").exit_code == 0


@pytest.mark.parametrize(
    ("tenant", "option"),
    [(tenant_of(SALT), ("--cache-salt", SALT)), ("search", ("--tenant", "search"))],
)
def test_whose_cells_they_are_is_shown_and_a_tenants_are_purged(
    tenant: str, option: tuple[str, str], url: str, tmp_path: Path
) -> None:
    shared = f"{url}&shares=tenant"
    store = FileStore(str(tmp_path / "pool"), 100 << 20, shares=Shares.TENANT)
    for salt, owner in ((SALT, tenant), ("", "")):
        keys = prompt_keys(salt)
        refs = [ChunkRef(chunk_id_of_key(key), tenant=owner) for key in keys]
        store.put(keys, [make_buffer(CELL_BYTES)] * len(keys), refs)
    store.close()
    [found] = json.loads(invoke("inspect", "--store", url, "--json").output)
    assert [(each["owner"], each["cells"]) for each in found["shares"]] == [("-", 12), (tenant, 12)]
    text = invoke("inspect", "--store", url).output
    assert f"share of {tenant}: 12 cells" in text
    files = [path for path in (tmp_path / "pool").rglob("*") if path.is_file()]
    assert not any(SALT.encode() in path.read_bytes() for path in files)
    arguments = ("purge", FIRST, *option, "--yes", "--store")
    assert "12 objects removed" in invoke(*arguments, shared).output
    assert held(tmp_path, prompt_keys(SALT)) == 0
    assert held(tmp_path, prompt_keys()) == 12
    unknown = invoke(*arguments, "memory://x")
    assert unknown.exit_code == 1
    assert "does not know whose cells" in unknown.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["pin", FIRST, "--for", "7d"], "give a prompt"),
        (["pin", FIRST, "--tokens", "FILE"], "give --for or --end"),
        (["pin", FIRST, "--tokens", "FILE", "--for", "7d", "--end"], "give --for or --end"),
        (["pin", FIRST, "--tokens", "FILE", "--for", "week"], "'week' is no duration"),
        (["pin", FIRST, "--tokens", "FILE", "--for", "99999d"], "the limit is 36500d"),
        (["purge", FIRST, "--older-than", f"{'9' * 400}w"], "the limit is 36500d"),
        (["purge", FIRST, "--older-than", "0d"], "'0d' is no duration"),
        (["purge", FIRST, "--tokens", "FILE", "--older-than", "7d"], "no --older-than"),
        (["purge", FIRST, "--cache-salt", "x", "--older-than", "7d"], "and --older-than"),
        (["purge", FIRST, "--tenant", "x", "--older-than", "7d"], "and --older-than"),
        (["purge", FIRST, "--tenant", "x", "--cache-salt", "x"], "give one of"),
        (["purge", FIRST, "--tenant", "x", "--tokens", "FILE"], "a prompt or --tenant"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    url: str, prompt: str, arguments: list[str], word: str
) -> None:
    given = [prompt if each == "FILE" else each for each in arguments]
    result = invoke(*given, "--store", url)
    assert result.exit_code
    assert word in result.output


@pytest.mark.parametrize("options", [(), ("--details",), ("--json",)])
def test_a_directory_that_no_engine_has_used_is_empty(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    result = invoke("inspect", "--store", f"file://{tmp_path}", *options)
    assert result.exit_code == 0, result.output
    assert ("empty" in result.output) is not ("--json" in options)
    named = invoke("explain", "model", "--store", f"file://{tmp_path}")
    assert "Nothing was saved there, the engine's store is another" in named.output


def test_a_directory_whose_index_is_gone_says_who_replaces_it(tmp_path: Path, url: str) -> None:
    (tmp_path / "pool" / FORMAT_DIR / "index").unlink()
    result = invoke("inspect", "--store", url)
    assert result.exit_code == 1
    assert "an engine that opens the store makes one" in result.output


@pytest.mark.parametrize(
    "command", [("inspect",), ("explain",), ("purge", FIRST, "--yes"), ("serve",)]
)
def test_host_memory_cannot_be_asked_from_another_process(command: tuple[str, ...]) -> None:
    result = invoke(*command, "--store", "host://1GiB")
    assert result.exit_code == 1
    assert "host memory is the only tier" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("doctor", "127.0.0.1:8000"), "is neither http://HOST:PORT nor a start line"),
        (("top", "127.0.0.1:8000", "--every", "0.1", "--count", "1"), "http://HOST:PORT"),
        (("serve", "--port", "99999"), "not in the range 0<=x<=65535"),
    ],
)
def test_addresses_that_are_none_are_named(arguments: tuple[str, ...], words: str) -> None:
    assert words in invoke(*arguments).output


def test_help_lists_each_command_with_the_first_sentence_of_its_help() -> None:
    """The list is a table, so that it needs no command's module."""
    listed = invoke("--help").output.partition("Commands:")[2].strip().splitlines()
    known = {name: each.get_short_help_str(100) for name, each in all_commands().items()}
    assert dict(line.strip().split(maxsplit=1) for line in listed) == known


@pytest.mark.parametrize("name", sorted(all_commands()))
def test_help_has_a_short_option(name: str) -> None:
    assert invoke(name, "-h").output == invoke(name, "--help").output != ""
    assert invoke("-h").exit_code == 0


NO_ENGINE = "http://127.0.0.1:1"
WRONG_INPUTS: dict[str, tuple[tuple[str, ...], str]] = {
    "scheme": (("inspect", "--store", "flie:///x"), "did you mean 'file'"),
    "relative": (("inspect", "--store", "file://x"), "three slashes"),
    "no directory": (("inspect", "--store", "file:///no/where"), "name it with --store"),
    "empty store": (("inspect", "--store", ""), "it is empty"),
    "bucket": (("inspect", "--store", "s3://b?region=r"), "2 to 255"),
    "port": (("inspect", "--store", "mooncake://h:99999"), "is not a port"),
    "no master": (("inspect", "--store", "mooncake://127.0.0.1:1"), "no Mooncake master"),
    "host alone": (("inspect", "--store", "host://1GiB"), "inspect --engine"),
    "pool's file": (("inspect", "--kv-transfer-config", "pool.json"), '"$(cat FILE)"'),
    "no connector": (("inspect", "--kv-transfer-config", "{}"), '"kv_connector"'),
    "broken JSON": (("inspect", "--kv-transfer-config", "{bad"), "malformed"),
    "engine": (("inspect", "--engine", "engine:8000"), "http://HOST:PORT"),
    "engine away": (("inspect", "--engine", NO_ENGINE), "refused"),
    "doctor's engine": (("doctor", "--store", "memory://x", "htp://e"), "htp://e: write the URL"),
    "doctor's word": (("doctor", "engine"), "is neither"),
    "no start line": (("doctor", "--", "python", "server.py"), "is no start line"),
    "mistyped option": (
        ("doctor", "--", "vllm", "serve", "m", "--kv-transfer-confg", "{}"),
        "the start line has no --kv-transfer-config",
    ),
    "line's JSON": (
        ("doctor", "--", "vllm", "serve", "m", "--kv-transfer-config", "{bad"),
        "--kv-transfer-config: no configuration of a connector",
    ),
    "no namespace": (("explain", "no", "--store", "memory://x"), "no namespace 'no'"),
    "no text": (("explain", "n", "--text", "BINARY", "--tokenizer", NO_ENGINE), "no text in UTF-8"),
    "no tokens": (("explain", "n", "--tokens", "BINARY"), "no text in UTF-8"),
    "no messages": (
        ("explain", "n", "--messages", "BINARY", "--tokenizer", NO_ENGINE),
        "no text in UTF-8",
    ),
    "deep messages": (
        ("explain", "n", "--messages", "DEEP", "--tokenizer", NO_ENGINE),
        "expected a JSON list of messages",
    ),
    "deep tokens": (("explain", "n", "--tokens", "DEEP"), "expected a JSON list of token ids"),
    "deep router": (("router", "--check", "--config", "DEEP"), "is not TOML"),
    "log beside a namespace": (("explain", "n", "--request", "r", "--log", "TEXT"), "--log alone"),
    "log beside a store": (
        ("explain", "--request", "r", "--log", "TEXT", "--store", "memory://x"),
        "--log alone",
    ),
    "salt of no prompt": (("explain", "n", "--cache-salt", "s"), "--cache-salt is for a prompt"),
    "tokenizer of no text": (
        ("purge", FIRST, "--yes", "--tokenizer", NO_ENGINE),
        "--tokenizer is for --text and --messages",
    ),
    "host with a port": (("serve", "--allowed-host", "h:1"), "without scheme and port"),
    "no log": (("explain", "--request", "r", "--log", "BINARY"), "has nothing of a request"),
    "no tokenizer": (
        ("explain", "n", "--text", "TEXT", "--tokenizer", "/no/model"),
        "there is no directory /no/model",
    ),
    "tokenizer away": (
        ("explain", "n", "--text", "TEXT", "--tokenizer", NO_ENGINE),
        "/tokenize: [Errno 111]",
    ),
    "purge": (("purge", "model", "--yes", "--store", "memory://x"), "is no namespace"),
    "prefetch": (
        (
            *("prefetch", "--kv-transfer-config", "pool.json"),
            *("--namespace", "n", "--tokens", "TOKENS"),
        ),
        '"$(cat FILE)"',
    ),
    "serve": (("serve", "--store", "file:///no/where", "--port", "0"), "there is no directory"),
}
"""Wrong inputs: a command, and a part of its error. Words in capitals stand for files."""


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_a_wrong_input_is_named_without_a_traceback(case: str, tmp_path: Path) -> None:
    arguments, says = WRONG_INPUTS[case]
    files = {name: tmp_path / name for name in ("BINARY", "TEXT", "DEEP", "TOKENS")}
    files["DEEP"].write_text("x = " * ("router" in arguments) + "[" * 100_000)
    files["BINARY"].write_bytes(b"\xfb\xff\x00")
    files["TEXT"].write_text("hello")
    files["TOKENS"].write_text("[1]")
    result = invoke(*(str(files.get(word, word)) for word in arguments))
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert says in result.output


@pytest.mark.parametrize(
    ("output", "status", "says"),
    [(">&-", 0, ""), (">/dev/full", 1, "Error: [Errno 28] No space left on device\n")],
)
def test_output_that_cannot_be_written_is_no_traceback(
    url: str, output: str, status: int, says: str
) -> None:
    command = f'"$0" -m vllm_kvpool inspect --store "$1" {output}'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, url], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (status, says)


def test_purge_without_stdin_says_what_to_give(url: str) -> None:
    command = '"$0" -m vllm_kvpool purge "$2" --store "$1" <&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, url, FIRST],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "there is no stdin to ask; give --yes" in done.stderr


def test_a_line_with_an_empty_value_is_completed() -> None:
    """By the shell's TAB, before the value is there."""
    line = {"COMP_WORDS": 'kvpool inspect --store "" --', "COMP_CWORD": "4"}
    result = CliRunner().invoke(
        main, prog_name="kvpool", env={"_KVPOOL_COMPLETE": "bash_complete", **line}
    )
    assert "plain,--json" in result.output, result.exception


OPTIONS = [
    (name, option)
    for name, command in all_commands().items()
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag and not option.hidden
]
REQUIRED = {
    "pin": ("model",),
    "prefetch": ("--kv-transfer-config", "{}", "--namespace", "n"),
    "purge": (FIRST, "--yes"),
    "router": ("--config", "x.toml"),
    "top": (NO_ENGINE,),
    "try": ("model",),
}


@pytest.mark.parametrize(
    ("command", "option"), [(name, option.opts[0]) for name, option in OPTIONS]
)
def test_an_unset_variable_of_a_shell_is_no_value(command: str, option: str) -> None:
    """`purge --tenant "$TENANT"` without that variable must not remove every tenant's cells."""
    for given in ([option, ""], [f"{option}="]):
        result = invoke(command, *REQUIRED.get(command, ()), *given)
        assert result.exit_code == 2, result.output
        assert f"Invalid value for '{option}'" in result.output


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (name, each.opts[0])
        for name, each in OPTIONS
        if isinstance(each.type, click.types.FloatParamType)
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e300", "soon"])
def test_what_is_no_time_to_wait_is_refused(command: str, option: str, value: str) -> None:
    result = invoke(command, *REQUIRED.get(command, ()), option, value)
    assert result.exit_code == 2, result.output
    assert f"Invalid value for '{option}'" in result.output


@pytest.mark.parametrize("line", [["--help"], ["--version"], ["no-such-command"]])
def test_help_imports_no_command_and_no_library_but_click(line: list[str]) -> None:
    """`kvpool --help` ends within 0.3 s: a tenth of a second of that is Python's own start."""
    code = (
        "import sys; from click.testing import CliRunner; from vllm_kvpool.cli import main\n"
        "CliRunner().invoke(main, sys.argv[1:])\n"
        "slow = {'numpy', 'msgspec', 'numba', 'asyncio', 'vllm_kvpool.config'} & set(sys.modules)\n"
        "assert not slow, slow\n"
        "assert not [each for each in sys.modules if each.startswith('vllm_kvpool.cli.commands')]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *line], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "vllm_kvpool", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: kvpool [OPTIONS] COMMAND")


def test_help_and_wrong_inputs_do_not_wait_for_vllm_or_torch() -> None:
    """Their import takes seconds."""
    every = [[name, "--help"] for name in COMMANDS]
    every += [list(arguments) for arguments, _ in WRONG_INPUTS.values()]
    code = (
        "import json, sys; from click.testing import CliRunner; from vllm_kvpool.cli import main\n"
        "for each in json.loads(sys.argv[1]):\n"
        "    CliRunner().invoke(main, each)\n"
        "    slow = {'torch', 'vllm', 'transformers'} & set(sys.modules)\n"
        "    assert not slow, (each, slow)\n"
    )
    command = [sys.executable, "-c", code, json.dumps(every)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_doctor_says_that_it_has_made_a_directory(tmp_path: Path) -> None:
    for is_new in (True, False):
        result = invoke("doctor", "--store", f"file://{tmp_path}/pool?size=1GiB")
        assert result.exit_code == 0, result.output
        assert ("was made now" in result.output) is is_new
