"""Tests read the metrics of servers through `tests/support/metrics_page.py`, which waits."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
READER = "metrics_page.py"
READS = re.compile(r"""(?:\bget|\bask|urlopen|open_directly)\(.*/metrics["']""", re.IGNORECASE)
OF_THE_PAGE_ITSELF = {
    "test_admin_api.py": "the page is the subject, and is made for the first time",
    "test_handovers.py": "waits for the counts themselves, and the page is made for the first time",
    "test_server.py": "the page is the subject, and is made for the first time",
}
"""Files that read a page of a router within the test's process."""


def test_no_other_file_reads_a_page_of_metrics() -> None:
    found = {path.name for path in TESTS.rglob("*.py") if READS.search(path.read_text())}
    assert found == {READER, *OF_THE_PAGE_ITSELF}
