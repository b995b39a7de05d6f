"""Properties of file systems: used by one host only, and disk space reserved for mapped pages."""

from pathlib import Path

import pytest

from vllm_kvpool.storage.file.file_system import FileSystem, file_system_of


@pytest.mark.parametrize(
    ("kind", "block_bytes", "is_local", "keeps_mapped_pages"),
    [
        ("ext4", 4096, True, True),
        ("ext4", 1024, True, False),
        ("xfs", 4096, True, True),
        ("xfs", 512, True, False),
        ("tmpfs", 4096, True, True),
        ("btrfs", 4096, True, False),
        ("f2fs", 4096, True, False),
        ("", 4096, False, False),  # NFS, FUSE, overlay, ZFS and all that are not known
    ],
)
def test_file_system_of_each_kind_is_known(
    kind: str, block_bytes: int, is_local: bool, keeps_mapped_pages: bool
) -> None:
    file_system = FileSystem(kind, block_bytes)
    assert (file_system.is_local, file_system.keeps_mapped_pages) == (is_local, keeps_mapped_pages)


def test_file_system_of_paths_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert file_system_of("/dev/shm") == FileSystem("tmpfs", 4096)
    assert file_system_of("/proc").kind == ""
    with pytest.raises(FileNotFoundError, match="absent"):
        file_system_of(str(tmp_path / "absent"))
