from pathlib import Path

from tests.soak.plot import draw, minutes, panels
from tests.soak.results import growth, rows


def sample(scene: str, number: int, seconds: float, kills: int) -> dict[str, object]:
    vitals = {"rss_bytes": 300 << 20, "threads": 20, "files": 40, "half_closed": 0, "slots": 3}
    engines = {"old-writer": vitals, "old-reader": vitals}
    directories = [{"files": 100 + kills}] if scene == "file" else []
    return {
        "scene": scene,
        "round": number,
        "seconds": seconds,
        "kills": kills,
        "engines": engines,
        "directories": directories,
    }


SAMPLES = [
    sample("file", 1, 60, 10),
    sample("file", 2, 120, 30),
    sample("mooncake", 1, 60, 5),
    sample("mooncake", 2, 180, 7),
]


def test_scenes_follow_each_other_along_the_axis() -> None:
    assert [minute for minute, _ in minutes(SAMPLES)] == [1, 2, 3, 5]
    found = panels(minutes(SAMPLES))
    assert found["kills"] == {"file": [(1, 10), (2, 30)], "mooncake": [(3, 5), (5, 7)]}
    assert found["files of the stores"] == {"file 0": [(1, 110), (2, 130)]}
    assert found["memory, MiB"]["mooncake old-reader"] == [(3, 300), (5, 300)]


def test_the_same_figures_give_the_same_picture(tmp_path: Path) -> None:
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        draw(SAMPLES, path)
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(b"<?xml")
    assert first == second


def test_scenes_that_began_anew_are_one_row_of_the_results() -> None:
    vitals = {"rss_bytes": 300 << 20, "threads": 20, "files": 40, "slots": 3}

    def summary(scene: str, trouble: str) -> dict[str, object]:
        counted = {"rounds": 2, "kills": 60, "requests": 90, "hits": 30, "wrong": 0}
        return counted | {
            "scene": scene,
            "seconds": 90.0,
            "cpu_s": 10.0,
            "totals": {"half-written files": 5},
            "trouble": trouble,
            "vitals": {"old-writer": {"first": vitals, "last": vitals | {"threads": 22}}},
        }

    summaries = [summary("file", ""), summary("mooncake", "late"), summary("mooncake", "")]
    found = rows(summaries)
    assert [row["scene"] for row in found] == ["file", "mooncake", "all"]
    assert [row["kills"] for row in found] == [60, 120, 180]
    assert [row["minutes"] for row in found] == [1.5, 3.0, 4.5]
    assert [row["kills / CPU s"] for row in found] == [6.0, 6.0, 6.0]
    assert [row["troubles"] for row in found] == [0, 1, 1]
    assert "threads 20 and 22" in growth(summaries)[0]
