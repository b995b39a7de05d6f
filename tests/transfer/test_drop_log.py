"""Log lines about unsaved cells: which cells, why, how often."""

import logging
from collections import Counter

import pytest

from vllm_kvpool.transfer.drop_log import QUIET_S, DropLog
from vllm_kvpool.transfer.ops import HOST, STORED, CellOutcome

FULL, UNREACHABLE = CellOutcome.FULL, CellOutcome.UNREACHABLE


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_the_first_drop_is_logged_at_once_and_later_ones_as_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, drops = DropLog(["file"]), Counter({(0, FULL): 44})
    with caplog.at_level(logging.WARNING):
        log.tell(drops, 10.0)
        [line] = lines(caplog)
        for words in ("44 cells were not saved to tier file (full)", "raise its size"):
            assert words in line
        drops[0, FULL] += 3
        log.tell(drops, 10.0 + QUIET_S / 2)
        drops[0, FULL] += 4
        assert lines(caplog) == []
        log.tell(drops, 10.0 + QUIET_S)
        [line] = lines(caplog)
        assert line.startswith("kvpool: 7 cells were not saved")
        log.tell(drops, 10.0 + 3 * QUIET_S)
        assert lines(caplog) == []


def test_kinds_of_drops_do_not_silence_each_other(caplog: pytest.LogCaptureFixture) -> None:
    log = DropLog(["file", "s3"])
    with caplog.at_level(logging.WARNING):
        log.tell(Counter({(0, FULL): 1, (1, UNREACHABLE): 2, (HOST, FULL): 3}), 0.0)
    told = lines(caplog)
    assert len(told) == 3
    assert "tier s3 (unreachable)" in told[1]
    assert "raise staging_bytes" in told[2]


@pytest.mark.parametrize("outcome", [each for each in CellOutcome if each not in STORED])
@pytest.mark.parametrize("tier", [HOST, 0])
def test_every_outcome_has_words(
    tier: int, outcome: CellOutcome, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        DropLog(["file"]).tell(Counter({(tier, outcome): 1}), 0.0)
    assert len(lines(caplog)) == 1
