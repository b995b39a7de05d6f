from pathlib import Path

from tests.soak.plot import draw, minutes, panels


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
