"""The state of a directory after a power loss, when its files were never synced."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

PAGE_BYTES = 4096


class PowerLoss:
    """Versions of a directory's files. A power loss leaves some pages and some names of them.

    `record` keeps a version. The first version is on the disk for good. Of later versions, each
    name, each length and each page may or may not reach the disk, in any order. Without a sync, no
    file system promises more. Pages belong to inodes, so a renamed file keeps its pages.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._names: list[dict[Path, int]] = []  # a version's paths and their inodes
        self._contents: list[dict[int, bytes]] = []  # the same version's inodes and their bytes
        self.record()

    def record(self) -> None:
        """Keep a version of all files. The files must not be written meanwhile."""
        paths = [path for path in self._root.rglob("*") if path.is_file()]
        self._names.append({path: path.stat().st_ino for path in paths})
        self._contents.append({path.stat().st_ino: path.read_bytes() for path in paths})

    def leave(self, target: Path, chance: random.Random) -> None:
        """Create a directory with the files that remain if power is lost after the last version."""
        synced = chance.randrange(len(self._names))
        late = chance.choice((0.0, 0.03, 0.3, 0.8))  # share that is not on the disk
        names, contents = self._names[synced:], self._contents[synced:]

        def draw() -> int:
            return chance.randrange(len(names)) if chance.random() < late else -1

        target.mkdir(mode=0o700)
        for path in sorted({path for version in names for path in version}):
            inode = names[draw()].get(path)
            if inode is not None:
                kept = target / path.relative_to(self._root)
                kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                kept.write_bytes(_torn([each.get(inode, b"") for each in contents], draw))


def _torn(versions: Sequence[bytes], draw: Callable[[], int]) -> bytes:
    """Return a file whose pages come from random versions; zeros where a version has no page."""
    nbytes = len(versions[draw()])
    pages = (versions[draw()][at : at + PAGE_BYTES] for at in range(0, nbytes, PAGE_BYTES))
    return b"".join(page.ljust(PAGE_BYTES, b"\0") for page in pages)[:nbytes]
