"""Files of tests that a folder does not collect under some release."""

from pathlib import Path


def left_out(conftest: str, *names: str) -> list[str]:
    """Names for `collect_ignore` of the folder of `conftest`; AssertionError for one that moved."""
    missing = [name for name in names if not (Path(conftest).parent / name).is_file()]
    assert not missing, f"{conftest} leaves out {missing}, which are not there"
    return list(names)
