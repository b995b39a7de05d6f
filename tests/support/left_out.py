"""Test files that a folder does not collect under some releases of vLLM."""

from pathlib import Path


def left_out(conftest: str, *names: str) -> list[str]:
    """Return names for `collect_ignore` of `conftest`'s folder. Each must be a file there."""
    missing = [name for name in names if not (Path(conftest).parent / name).is_file()]
    assert not missing, f"{conftest} leaves out {missing}, which are not there"
    return list(names)
