"""Each command of the documents, as a shell reads it, is run or at least understood.

A shell runs each block with stand-ins for `PROGRAMS`, which note what they are started with. Then
each command is judged by its program's check. A command of `kvpool` that needs no engine is run in
a directory with a small pool; for others every option must exist, and `NOT_RUN` says which test
runs them. A program that has no check fails the test.
"""

import argparse
import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner

from tests.support.buffers import make_buffer
from tests.support.commands import all_commands
from tests.support.models import add_tokenizer
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.command import HELP_OPTIONS
from vllm_kvpool.cli.common.start_line import option_of
from vllm_kvpool.config import KVRole, read_config, read_embeds_config
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity, tenant_of
from vllm_kvpool.identity.keys import make_namespace, manifest_key
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.router.config import TenantConfig
from vllm_kvpool.router.config import read_config as read_router_config
from vllm_kvpool.router.dataplane import data_plane
from vllm_kvpool.router.ops.admin_api import ROUTES
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.eviction import Shares
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.storage.tiers import tier_specs

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/*/*.md", "configs/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
LANGUAGES = {"bash", "ini", "json", "promql", "python", "sql", "text", "toml", "yaml"}
LIMIT_S = 60.0

NAMESPACE, OTHER = (make_namespace("model", letter * 12) for letter in "ab")
GROUP = LayerGroup(Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=2), 64)
TOKENS = list(range(600))
LOG = "INFO kvpool: request chatcmpl-7f3a-0: prompt=1000 to_load=512 absent=256 short=232\n"
# Traces of an engine that has ended, and of one that still runs.
TRACES = (
    '[{"name": "put", "ts": 1}\n,{"name": "get", "ts": 2}\n]\n',
    '[{"name": "put", "ts": 3}\n',
)


class Block(NamedTuple):
    """Commands of a document, and where they are."""

    place: str
    text: str


def fences(path: Path) -> Iterator[tuple[str, Block]]:
    """The language and text of each fenced block."""
    text = path.read_text()
    for found in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, found.start()) + 1
        place = f"{path.relative_to(ROOT)}:{line}"
        yield found[2], Block(place, textwrap.dedent(found[3]))


def blocks() -> Iterator[Block]:
    for path in DOCUMENTS:
        yield from (block for language, block in fences(path) if language == "bash")
    for path in sorted((ROOT / "examples").glob("*.py")):
        header = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        lines = [line.strip() for line in header.splitlines() if line.startswith("    ")]
        if lines:
            yield Block(str(path.relative_to(ROOT)), "\n".join(lines) + "\n")


def by_language(language: str) -> list[Block]:
    return [block for path in DOCUMENTS for name, block in fences(path) if name == language]


ALL = list(blocks())


# Checks: what a command is started with, and the directory where it is.

Check = Callable[[Sequence[str], Path], None]


def of_kvpool(words: Sequence[str], directory: Path) -> None:
    name, *arguments = words[1:]
    with all_commands()[name].make_context(name, list(arguments), **HELP_OPTIONS):
        pass
    if name == "doctor" and "--" in arguments:
        check(arguments[arguments.index("--") + 1 :], directory)
    elif name == "doctor" and ELSEWHERE.search(" ".join(arguments)):
        pass
    elif name in RUN or "--check" in arguments:
        done = CliRunner().invoke(main, words[1:], input="y\n")
        assert done.exit_code == 0, done.output
    else:
        assert f"kvpool {name}" in NOT_RUN, name


ELSEWHERE = re.compile(r"http://engine|10\.0\.0\.\d+:")  # what no test's machine has
RUN = frozenset({"doctor", "explain", "inspect", "pin", "purge"})
NOT_RUN = {
    "kvpool prefetch": "needs S3 or Mooncake: tests/prefetch/test_command.py",
    "kvpool router": "needs engines: tests/deploy/test_two_each.py",
    "kvpool serve": "runs until it is ended: below, and tests/cli/test_serve.py",
    "kvpool top": "needs engines: tests/cli/test_top.py",
    "kvpool try": "starts engines: tests/cli/test_try_model.py, tests/deploy/test_try.py",
    "docker": "needs an image of vLLM: tests/test_kubernetes.py reads the Dockerfile",
    "install": "writes to /etc: tests/test_systemd.py reads the units",
    "helm": "needs a cluster: tests/deploy/test_chart.py renders the chart",
    "kubectl": "needs a cluster: tests/test_kubernetes.py validates the manifests",
    "systemctl": "needs systemd: tests/test_systemd.py reads the units",
}


@cache
def vllm_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parsers of `vllm serve` and `vllm bench serve`, without warnings at import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.benchmarks.serve import add_cli_args
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        bench = FlexibleArgumentParser()
        add_cli_args(bench)
        return make_arg_parser(FlexibleArgumentParser()), bench


def of_vllm(words: Sequence[str], directory: Path) -> None:
    if words[1] == "serve":
        vllm_parsers()[0].parse_args(list(words[2:]))
        of_engine(words)
    else:
        assert words[1:3] == ["bench", "serve"], words
        vllm_parsers()[1].parse_args(list(words[3:]))


def of_engine(words: Sequence[str]) -> None:
    """Check that the pool's options on a start line can be read."""
    for option, connector in (
        ("--kv-transfer-config", "KVPoolConnector"),
        ("--ec-transfer-config", "KVPoolECConnector"),
    ):
        if (given := option_of(words, option)) is not None:
            assert connector_of(json.loads(given)) == connector


def connector_of(transfer: Mapping[str, Any]) -> str:
    """The connector of a transfer configuration, whose options are valid."""
    if transfer.get("kv_connector") == "MultiConnector":
        for child in transfer["kv_connector_extra_config"]["connectors"]:
            connector_of(child)
    options = transfer.get("kv_connector_extra_config", {})
    if "ec_connector" in transfer:
        read_embeds_config(transfer.get("ec_connector_extra_config", {}), env={})
        return str(transfer["ec_connector"])
    assert transfer["kv_role"] in [role.value for role in KVRole]
    if transfer["kv_connector"] == "KVPoolConnector":
        tier_specs(read_config(options, env={}))
    return str(transfer["kv_connector"])


def of_curl(words: Sequence[str], directory: Path) -> None:
    [url] = [urlsplit(word) for word in words if word.startswith("http")]
    method = option_of(words, "-X") or ("POST" if "-d" in words else "GET")
    if url.port == 8001:
        routes = [path for known, path in ROUTES if known == method]
        assert any(re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", each), url.path) for each in routes)
    else:
        assert method in data_plane.METHODS[url.path]
        json.loads(option_of(words, "-d") or "{}")


def of_pip(words: Sequence[str], directory: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if words[1] == "uninstall":
        needed = [each for extra in project["optional-dependencies"].values() for each in extra]
        assert any(re.match(rf"{words[2]}\b", each) for each in needed), words[2]
        return
    name, extras = re.fullmatch(r"(\.|[\w-]+)\[([\w,-]+)\]", words[2]).groups()  # type: ignore[union-attr]
    assert (words[1], name in (".", project["name"])) == ("install", True)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def of_make(words: Sequence[str], directory: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words[1:] if "=" not in word} <= targets


def of_python(words: Sequence[str], directory: Path) -> None:
    """A script has the options that it is given; a test that is named is there."""
    if words[1:3] == ["-m", "pytest"]:
        source = (ROOT / words[3]).read_text()
        chosen = option_of(words, "-k")
        assert chosen is None or chosen in source
    elif words[1] == "-m":
        package, *parts = words[2].split(".")
        found = importlib.util.find_spec(package)
        assert found is not None
        assert any(
            Path(each, *parts).with_suffix(".py").exists()
            for each in found.submodule_search_locations or ()
        )
    else:
        source = (ROOT / words[1]).read_text()
        for option in (word for word in words[2:] if word.startswith("--")):
            assert f'"{option}"' in source, option


def of_mooncake_master(words: Sequence[str], directory: Path) -> None:
    program = Path(sys.executable).parent / words[0]
    done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=LIMIT_S)
    for option in (word.split("=")[0] for word in words[1:] if word.startswith("-")):
        assert re.search(rf"^ +-{option.lstrip('-')} ", done.stdout, re.MULTILINE), option


def of_files(words: Sequence[str], directory: Path) -> None:
    """A command that is not run; the files of ours that it names are there."""
    assert words[0] in NOT_RUN
    for word in words[1:]:
        assert not word.startswith("configs/") or (ROOT / word).exists(), word


def of_helm(words: Sequence[str], directory: Path) -> None:
    """A value that is set is one of the chart's."""
    of_files(words, directory)
    chart = next(word for word in words if word.startswith("configs/helm/"))
    for option, setting in pairwise(words):
        if option == "--set":
            values = yaml.safe_load((ROOT / chart / "values.yaml").read_text())
            for part in setting.partition("=")[0].split("."):
                if values == {}:  # keys are the user's own
                    break
                values = values[part]


PROGRAMS: Mapping[str, Check] = {
    "curl": of_curl,
    "docker": of_files,
    "helm": of_helm,
    "install": of_files,
    "kubectl": of_files,
    "kvpool": of_kvpool,
    "make": of_make,
    "mooncake_master": of_mooncake_master,
    "pip": of_pip,
    "python": of_python,
    "systemctl": of_files,
    "vllm": of_vllm,
}


def check(words: Sequence[str], directory: Path) -> None:
    PROGRAMS[words[0]](words, directory)


# The shell


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the stand-ins, our files, and what commands read."""
    recorder = tmp_path / "recorder"
    recorder.write_text(
        f"#!{sys.executable} -IS\nimport json, os, sys\n"
        "words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]\n"
        "with open(os.environ['RECORD'], 'a') as record:\n"
        "    record.write(json.dumps(words) + '\\n')\n"
    )
    recorder.chmod(0o755)
    for programs in (tmp_path / "bin", tmp_path / ".venv" / "bin"):
        programs.mkdir(parents=True)
        for name in PROGRAMS:
            (programs / name).symlink_to(recorder)
    for name in ("configs", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "etc").mkdir()
    for number, trace in enumerate(TRACES):
        (tmp_path / f"trace.{number}.json").write_text(trace)
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": "a story"}]))
    (tmp_path / "prompt.txt").write_text("tell me a story " * 100)
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    (tmp_path / "engine.log").write_text(LOG)
    (tmp_path / "router.toml").write_text(TUTORIAL_TOML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVPOOL_STORE", raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    return tmp_path


[TUTORIAL_TOML] = [
    block.text
    for block in by_language("toml")
    if block.place.startswith("docs/router.md:") and "# router.toml" in block.text
]


def fill_pools(directory: Path) -> None:
    """Two pools with a prompt of the first of two namespaces; commands that name no store look into
    the first pool."""
    for name in ("vllm-kvpool", "other"):
        fill(FileStore(str(directory / name), 64 << 20, shares=Shares.TENANT))


def fill(store: FileStore) -> None:
    chain = ChunkChain(256, RequestIdentity())
    chain.extend(TOKENS)
    names = CellNames(NAMESPACE, (GROUP,))
    keys = [key for chunk in chain.hashes for key in names.of_chunk(chunk, 0)]
    chunk = ChunkRef("", tenant=tenant_of("S"))
    store.put(keys, [make_buffer(100)] * len(keys), [chunk] * len(keys))
    for number, namespace in enumerate((NAMESPACE, OTHER)):
        values = {"chunk_tokens": 256, "kinds": [{"kind": ""}], "weights": f"sample:{number}"}
        content = write_manifest(Manifest(namespace, namespace, "", values, described([GROUP])))
        buffer = make_buffer(len(content))
        buffer.view[:] = content
        key = manifest_key(namespace)
        store.put([key], [buffer], [ChunkRef(key)])
    store.close()


def on_this_machine(text: str, directory: Path) -> str:
    """Commands with what this machine has, in place of names that stand for something."""
    pool, other = f"file://{directory}/vllm-kvpool", f"file://{directory}/other"
    for name, own in {
        "OTHER_NAMESPACE": OTHER,
        "NAMESPACE": NAMESPACE,
        "file:///nvme/kvpool": pool,
        "--store mooncake://10.0.0.1:50051": f"--store {other}",
        "/etc/kvpool/cell.keys": str(directory / "etc" / "cell.keys"),
        "--tokenizer http://engine:8000": f"--tokenizer {directory}",
        "--tokenizer http://router:8000": f"--tokenizer {directory}",
        "--tokenizer /models/llama": f"--tokenizer {directory}",
    }.items():
        text = text.replace(name, own)
    return text


def commands(block: Block, directory: Path) -> list[list[str]]:
    """Run the block in a shell and return the commands that it starts."""
    record = directory / "record"
    store = f"file://{directory}/vllm-kvpool?size=64MiB"
    config = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both"}
    config |= {"kv_connector_extra_config": {"store": store}}
    environment = {
        "PATH": f"{directory}/bin:{os.environ['PATH']}",
        "HOME": str(directory),
        "RECORD": str(record),
        "config": json.dumps(config),
        "HF_TOKEN": "token",
        "TOKEN": "token",
    }
    script = f"set -euo pipefail\n{on_this_machine(block.text, directory)}\nwait\n"
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in found]


@pytest.mark.parametrize("block", ALL, ids=[block.place for block in ALL])
def test_a_command_is_run_or_understood(block: Block, directory: Path) -> None:
    found = commands(block, directory)
    assert found or block.place.startswith(("docs/tracing.md", "docs/configuration.md"))
    add_tokenizer(directory)
    for words in found:
        fill_pools(directory)
        check(words, directory)
    if (joined := directory / "joined.json").exists():
        assert len(json.loads(joined.read_text())) == 3


def test_a_command_without_a_check_is_found(directory: Path) -> None:
    with pytest.raises(AssertionError, match="127"):
        commands(Block("", "unheard-of --option\n"), directory)
    with pytest.raises(click.NoSuchOption):
        check(["kvpool", "inspect", "--unheard-of"], directory)


def test_every_block_says_its_language() -> None:
    unknown = {
        (block.place, language)
        for path in DOCUMENTS
        for language, block in fences(path)
        if language not in LANGUAGES
    }
    assert not unknown


def test_commands_within_sentences_have_the_options_they_name() -> None:
    spans = [
        (path.name, shlex.split(span))
        for path in DOCUMENTS
        for span in re.findall(r"`(kvpool [^`]+)`", path.read_text())
    ]
    assert len(spans) > 30
    for place, words in spans:
        known = {option for each in main.params for option in each.opts} | {"--help"}
        if not words[1].startswith("-"):
            command = all_commands()[words[1]]
            known = {option for each in command.params for option in each.opts}
        used = {word.partition("=")[0] for word in words[1:] if word.startswith("--")} - {"--"}
        assert used <= known, (place, words)


WITHIN_SENTENCES = ("make", "pip", "python")


def test_commands_within_sentences_pass_the_checks_of_their_programs(tmp_path: Path) -> None:
    spans = {
        (path.name, span)
        for path in DOCUMENTS
        for span in re.findall(r"`((?:\w+) [^`\n]+)`", path.read_text())
        if span.split()[0] in WITHIN_SENTENCES
    }
    assert {span.split()[0] for _, span in spans} == set(WITHIN_SENTENCES)
    for _, span in sorted(spans):
        check(shlex.split(span), tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["helm", "upgrade", "configs/helm/kvpool", "--set", "router.unheard=1"],
        ["make", "unheard-of"],
        ["pip", "uninstall", "unheard-of"],
        ["python", "-m", "vllm.unheard_of"],
    ],
)
def test_a_command_with_a_name_that_is_not_there_is_found(words: list[str], tmp_path: Path) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check(words, tmp_path)


def test_each_command_that_is_not_run_names_a_test_that_is_there() -> None:
    for reason in NOT_RUN.values():
        for test in re.findall(r"tests/[\w/]+\.py", reason):
            assert (ROOT / test).exists(), test


@pytest.mark.parametrize("block", by_language("json"), ids=lambda block: block.place)
def test_configurations_in_json_are_valid(block: Block) -> None:
    text = re.sub(r",?\s*…?\s*$", "", block.text).replace(",…", "")
    value = json.loads(text if text.startswith("{") else f"{{{text}}}")
    if "kv_connector" in value or "ec_connector" in value:
        connector_of(value)
    elif set(value) == {"store"}:
        assert tier_specs(read_config(value, env={})).stores


ROUTER_BLOCKS = [block for block in by_language("toml") if block.place.startswith("docs/router")]


@pytest.mark.parametrize("block", ROUTER_BLOCKS, ids=lambda block: block.place)
def test_configurations_of_the_router_are_valid(block: Block) -> None:
    values = tomllib.loads(block.text)
    if "tenants" in values:
        msgspec.convert(values["tenants"], list[TenantConfig])
    else:
        engines = {"replicas": [{"url": "http://10.0.0.1:8000", "role": "decode"}]}
        is_whole = not {"replicas", "discovery", "hosts"}.isdisjoint(values)
        read_router_config(values if is_whole else values | engines)


def test_the_lookup_service_answers_as_documented(directory: Path) -> None:
    """`docs/lookup.md`: its command at another port, its request, and its lines of Python."""
    fill_pools(directory)
    add_tokenizer(directory)
    path = ROOT / "docs" / "lookup.md"
    code = dict(fences(path))
    [[_, *line]] = [each for each in commands(code["bash"], directory) if each[0] == "kvpool"]
    command = [sys.executable, "-m", "vllm_kvpool", *line, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            snippet = code["python"].text.replace("http://127.0.0.1:8200", url)
            snippet = re.sub(r'namespace="[^"]+"', f'namespace="{NAMESPACE}"', snippet)
            snippet = snippet.replace("[1, 2, 3]", str(TOKENS))
            done = subprocess.run(
                [sys.executable, "-c", snippet], capture_output=True, text=True, timeout=LIMIT_S
            )
            assert done.stdout.startswith("512 "), done.stderr
        finally:
            process.terminate()
            process.wait(LIMIT_S)
