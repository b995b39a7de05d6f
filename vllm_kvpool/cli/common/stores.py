"""The stores that a command is given, and the namespaces that they can name."""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click
import msgspec

from vllm_kvpool.cli.common.command import hide_native_logs
from vllm_kvpool.config import KVPoolConfig, read_config, read_engine_config, set_where_unset
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.identity.keys import Namespace, is_namespace
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import Listing, Store
from vllm_kvpool.storage.contents.manifest import Manifest, manifest_in
from vllm_kvpool.storage.guarded import GuardedStore
from vllm_kvpool.storage.tiers import TierSpecs, tier_specs
from vllm_kvpool.storage.url import MAX_STORE_BYTES, FileOptions, StoreSpec, environment_for

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamedStore:
    """An open store and its URL, without secrets."""

    url: str
    store: Store

    def go_through(self, method: Callable[[Store], T]) -> T:
        """Run a call that goes through the whole store, for a limited time if it is guarded."""
        store = self.store
        return store.go_through(method) if isinstance(store, GuardedStore) else method(store)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The stores that a command is given, and whether it answers in JSON."""

    kv_transfer_config: str | None
    urls: Sequence[str]
    as_json: bool

    @property
    def are_named(self) -> bool:
        """True if the command line names stores."""
        return bool(self.urls) or self.kv_transfer_config is not None

    def config(self) -> KVPoolConfig:
        """Return the options of an engine that has these stores.

        Raises ConfigError if they cannot be read.
        """
        if self.kv_transfer_config is None:
            return read_config({"store": list(self.urls)} if self.urls else {})
        if self.urls:
            raise ConfigError("give --store or --kv-transfer-config, not both")
        return read_engine_config(self.kv_transfer_config)

    def tiers(self) -> TierSpecs:
        """Return the tiers that are named; ConfigError if they cannot be read."""
        return tier_specs(self.config())

    def stores(self) -> Sequence[StoreSpec]:
        """Return the tiers of `tiers` that can be asked from another process.

        Raises ConfigError without any.
        """
        found = self.tiers().stores
        if not found:
            raise ConfigError(
                "host memory is the only tier: it belongs to its engine, whose metrics "
                "(kvpool_host_bytes, `kvpool inspect --engine`, `kvpool top`) show it; name a store"
            )
        return found

    def print(self, value: Any, text: str) -> None:
        """Print the answer: a value that msgspec turns into JSON's types, or the same as text."""
        click.echo(json.dumps(msgspec.to_builtins(value), indent=2) if self.as_json else text)


def store_options(command: Any) -> Any:
    """Add the options that name stores to a command, which takes them as `stores`."""

    @functools.wraps(command)
    def with_stores(
        kv_transfer_config: str | None, urls: Sequence[str], as_json: bool, **others: Any
    ) -> Any:
        hide_native_logs()
        return command(stores=StoreOptions(kv_transfer_config, urls, as_json), **others)

    for option in (
        click.option(
            "--kv-transfer-config",
            help="What the engine is started with; its stores are meant.",
        ),
        click.option(
            "--store",
            "urls",
            multiple=True,
            help="The URL of a store; may be repeated. Default: that of engines that name none.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ):
        with_stores = option(with_stores)
    return with_stores


def keeping_contents(spec: StoreSpec, *, puts: bool = False) -> StoreSpec:
    """Return the spec of a store that is as large as what a directory has.

    Engines may have the directory with a larger `size=` than a command's URL, which may have none.
    With `puts` the directory has no size: engines may save more before the command's own put,
    which would then evict as much.
    """
    options = spec.options
    if isinstance(options, FileOptions) and os.path.isdir(options.path):
        from vllm_kvpool.storage.file.store import ReadOnlyFileStore

        with contextlib.suppress(ConfigError, StoreError):  # opening the store says what is wrong
            if used_bytes := ReadOnlyFileStore(options.path).used_bytes():
                size_bytes = MAX_STORE_BYTES if puts else max(options.size_bytes, used_bytes)
                return replace(spec, options=replace(options, size_bytes=size_bytes))
    return spec


def open_spec(spec: StoreSpec, writable: bool) -> Store:
    """Open a store without giving memory to it; only a `writable` one may change a disk.

    ConfigError if it can never work, StoreUnreachable if it cannot be reached now.
    """
    if isinstance(spec.options, FileOptions):
        from vllm_kvpool.storage.file.store import ReadOnlyFileStore

        if not os.path.isdir(spec.options.path):
            raise ConfigError(
                f"{spec.url}: there is no directory {spec.options.path}: no engine has saved there "
                "from this machine, or the path is another; name it with --store"
            )
        if not writable:
            return ReadOnlyFileStore(spec.options.path)
    set_where_unset(environment_for(spec))
    return open_store(keeping_contents(spec), segment=False)


@contextlib.contextmanager
def opened(
    specs: Sequence[StoreSpec], *, writable: bool = False, skip: bool = False
) -> Iterator[list[NamedStore]]:
    """Open the stores for reading or writing while the context lasts.

    Raises ConfigError or StoreError if a store cannot be opened; `skip` leaves such a store out.
    """
    with contextlib.ExitStack() as closing:
        stores = []
        for spec in specs:
            try:
                store = open_spec(spec, writable)
            except (ConfigError, StoreError) as error:
                if skip:
                    continue
                if isinstance(error, ConfigError):
                    raise
                raise StoreError(f"{spec.url}: {error}") from None
            closing.callback(store.close)
            stores.append(NamedStore(spec.url, store))
        yield stores


def manifests(
    stores: Sequence[NamedStore], named: Iterable[Namespace] = ()
) -> dict[Namespace, Manifest]:
    """Return the manifests of all namespaces that stores can list.

    Stores that cannot list them are asked for those of `named` alone.
    """

    def manifests_of(store: Store) -> dict[Namespace, Manifest]:
        names = map(Namespace, store.namespaces()) if isinstance(store, Listing) else named
        found = (manifest_in(store, name) for name in names)
        return {each.namespace: each for each in found if each is not None}

    merged: dict[Namespace, Manifest] = {}
    for each in stores:
        merged |= each.go_through(manifests_of)
    return merged


def manifest_named(
    stores: Sequence[NamedStore], name: str, known: Mapping[Namespace, Manifest] | None = None
) -> Manifest:
    """Return the manifest of a namespace, given whole, or by the beginning of its name or digest.

    `known` are the `manifests` of the stores. ConfigError if there is none, or several.
    """
    for each in stores:
        if is_namespace(name):
            manifest = manifest_in(each.store, Namespace(name))
            if manifest is not None:
                return manifest
    known = manifests(stores) if known is None else known
    matching = [
        each for each in known if each.startswith(name) or each.rpartition(":")[2].startswith(name)
    ]
    if len(matching) == 1:
        return known[matching[0]]
    there_are = ", ".join(sorted(matching or known))
    if matching:
        raise ConfigError(f"{name!r} stands for several namespaces: {there_are}")
    if not known:
        raise ConfigError(
            f"no namespace {name!r}: no namespace with a manifest can be listed in these stores. "
            "Nothing was saved there, the engine's store is another, or the store cannot list: "
            "then give the whole name, which the engine logs at its start"
        )
    raise ConfigError(f"no namespace {name!r} with a manifest in these stores; found: {there_are}")
