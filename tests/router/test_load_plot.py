from pathlib import Path

import pytest
from matplotlib.image import imread

from vllm_kvpool.router.load_plot import LAST_SAMPLE_S, stretches, write_plot
from vllm_kvpool.router.load_stats import (
    LoadResult,
    Outcome,
    ReplicaView,
    RequestResult,
    RouterView,
    StateSample,
)
from vllm_kvpool.router.load_trace import LoadSpec


def sample(at_s: float, *replicas: ReplicaView) -> StateSample:
    return StateSample(at_s, RouterView(replicas=replicas))


def result(requests: int, states: tuple[StateSample, ...] = ()) -> LoadResult:
    return LoadResult(
        spec=LoadSpec(seconds=30.0),
        url="http://127.0.0.1:8000",
        model="m",
        began_at=0.0,
        seconds=31.0,
        requests=tuple(
            RequestResult(
                at_s=number / 4,
                end_s=number / 4 + 0.2,
                outcome=list(Outcome)[number % 4],
                prefix=0,
                ttft_s=0.1 + number / 100 if number % 2 else None,
            )
            for number in range(requests)
        ),
        states=states,
    )


STATES = tuple(
    sample(
        float(second),
        ReplicaView("a", state="prefill", role="prefill", used_blocks=second, total_blocks=30),
        ReplicaView("b", state="decode", role="decode", locked=10 < second < 20),
    )
    for second in range(30)
)


@pytest.mark.parametrize(
    "load", [result(100, STATES), result(100), result(0), result(0, STATES[:1])]
)
def test_every_load_can_be_drawn(tmp_path: Path, load: LoadResult) -> None:
    write_plot(load, tmp_path / "load.png")
    pixels = imread(tmp_path / "load.png")
    assert pixels.shape[1] > 800
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, pixels.shape[2])}) > 4


def test_a_replica_is_drawn_as_long_as_it_looks_the_same() -> None:
    looks = {
        "prefill": ReplicaView("a", state="prefill", role="prefill"),
        "old": ReplicaView("a", state="old_prefill", role="prefill"),
        "loading": ReplicaView("a", state="loading_prefill", role="prefill"),
        "locked": ReplicaView("a", state="decode", role="decode", locked=True),
    }
    order = ["prefill", "prefill", "old", "locked", None, "locked", "loading"]
    states = tuple(
        sample(float(at_s), *([looks[name]] if name else [])) for at_s, name in enumerate(order)
    )
    drawn = [(begin, end, look.state) for begin, end, look in stretches(result(0, states), "a")]
    assert drawn == [
        (0.0, 3.0, "old_prefill"),
        (3.0, 4.0, "decode"),
        (5.0, 6.0, "decode"),
        (6.0, 6.0 + LAST_SAMPLE_S, "loading_prefill"),
    ]
