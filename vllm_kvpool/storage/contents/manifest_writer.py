"""The thread that keeps a namespace's manifest in every store.

Rank 0 of an engine has it. A manifest is written to each store that lacks it or has a damaged one.
The last one is looked for every `CHECK_EVERY_S`, as stores evict manifests, too, and in a store
that comes back. That also shows a store that it is in use. No lookup, load or save of an engine
depends on a manifest.
"""

import logging
import threading
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue

from vllm_kvpool.errors import StoreError
from vllm_kvpool.identity.keys import Namespace, chunk_id_of_key, manifest_key
from vllm_kvpool.storage.base import Buffer, ChunkRef, GetOutcome, PutOutcome, namespaces_of
from vllm_kvpool.storage.contents.manifest import (
    MANIFEST_BYTES,
    Manifest,
    explain,
    nearest,
    read_manifest,
    short,
)
from vllm_kvpool.storage.guarded import GuardedStore

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 60.0
MOST_COMPARED = 16  # other namespaces of the model, with a new one
MOST_SHOWN = 3  # differences

_Message = tuple[Namespace, bytes] | int | None  # a manifest; a tier that is available; the end


class ManifestWriter:
    """Writes manifests through `buffer`, its own, which is registered with every store."""

    def __init__(
        self, stores: Sequence[GuardedStore], buffer: Buffer, check_every_s: float = CHECK_EVERY_S
    ) -> None:
        assert buffer.nbytes == MANIFEST_BYTES, buffer.nbytes
        self._stores = stores
        self._buffer = buffer
        self._check_every_s = check_every_s
        self._last: tuple[Namespace, bytes] | None = None
        self._known: list[Namespace | None] = [None for _ in stores]  # which each had last
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvpool-manifest", daemon=True)
        self._thread.start()
        for tier, store in enumerate(stores):
            store.listen(partial(self._changed, tier))

    def write(self, namespace: Namespace, content: bytes) -> None:
        """Write a manifest to every store; never blocks."""
        self._inbox.put((namespace, content))

    def close(self, timeout_s: float) -> bool:
        """End the thread; True if it has ended, so the stores may be closed."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _changed(self, tier: int, is_up: bool, is_writable: bool) -> None:
        if is_up and is_writable:
            self._inbox.put(tier)

    # The thread

    def _run(self) -> None:
        try:
            while (message := self._next_message()) is not None:
                if isinstance(message, tuple):
                    self._last = message
                if self._last is not None:
                    tiers = range(len(self._stores)) if isinstance(message, tuple) else [message]
                    for tier in tiers:
                        self._keep(tier, *self._last)
        except Exception:
            logger.exception(
                "kvpool: writing manifests failed; they are not written until vLLM restarts"
            )

    def _next_message(self) -> _Message:
        """Return the next message, or, when there is none for a time, the last manifest again."""
        while True:
            try:
                return self._inbox.get(timeout=self._check_every_s)
            except Empty:
                if self._last is not None:
                    return self._last

    def _keep(self, tier: int, namespace: Namespace, content: bytes) -> None:
        """Write a manifest to a store unless it is there."""
        store = self._stores[tier]
        try:
            outcome = self._write(store, namespace, content)
            is_first, self._known[tier] = self._known[tier] != namespace, namespace
            if is_first and outcome is PutOutcome.STORED:
                self._compare(store, namespace)
            elif is_first and outcome is PutOutcome.EXISTED:
                self._compare_cells(store, namespace, content)
        except StoreError as error:  # it is tried again
            logger.debug("kvpool: manifest of %s not written: %s", namespace, error)

    def _compare(self, store: GuardedStore, namespace: Namespace) -> None:
        """Log in what a namespace that is new in a store differs from the others of its model."""
        own = read_manifest(self._buffer.view, namespace)
        if own is None or own.weights_version:  # it may be new with each change of the weights
            return
        model = namespace.partition("@")[0]
        others: list[Manifest] = []
        for name in store.go_through(namespaces_of):
            if (
                name.partition("@")[0] == model
                and name != namespace
                and len(others) < MOST_COMPARED
            ):
                other = Namespace(name)
                [got] = store.get([manifest_key(other)], [self._buffer])
                manifest = read_manifest(self._buffer.view, other)
                if got is GetOutcome.OK and manifest is not None and not manifest.weights_version:
                    others.append(manifest)
        found = nearest(own, others)
        if found is not None:
            differences = [
                f"{each.name} ({short(each.first)} here, {short(each.second)} there)"
                for each in found.differences
            ]
            more = ["..."] if len(differences) > MOST_SHOWN else []
            logger.info(
                "kvpool: store %s: namespace %s of this engine is new, so nothing is found for it "
                "yet; namespaces of this model that are there: %d. The nearest, %s, differs in %s. "
                "Make these values equal to share its cells; `kvpool explain` shows all",
                *(store.capabilities.name, namespace, len(others), found.second),
                ", ".join(differences[:MOST_SHOWN] + more) or "nothing known",
            )

    def _compare_cells(self, store: GuardedStore, namespace: Namespace, content: bytes) -> None:
        """Warn if the engine that has written the namespace's manifest names cells otherwise."""
        own = read_manifest(content, namespace)
        stored = read_manifest(self._buffer.view, namespace)
        if own is None or stored is None:
            return
        for name, here, there in explain(own, stored).differences:
            logger.warning(
                "kvpool: store %s: %s is %s here and %s in the engine that has written the "
                "manifest of namespace %s, so neither finds what the other saves; make it the same",
                *(store.capabilities.name, name, short(here), short(there), namespace),
            )

    def _write(self, store: GuardedStore, namespace: Namespace, content: bytes) -> PutOutcome:
        key = manifest_key(namespace)
        [got] = store.get([key], [self._buffer])
        if got is GetOutcome.OK and read_manifest(self._buffer.view, namespace) is not None:
            return PutOutcome.EXISTED
        if not store.writable:
            return PutOutcome.FAILED
        if got is not GetOutcome.MISSING:  # damaged, or of another release
            store.remove([key])
        self._buffer.view[:] = content
        [outcome] = store.put([key], [self._buffer], [ChunkRef(chunk_id_of_key(key))])
        return outcome
