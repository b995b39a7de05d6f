"""A scheduler's connections, against a port where somebody else listens."""

import time

from vllm_kvpool.embeds.links import WorkerLinks
from vllm_kvpool.embeds.protocol import Envelope, Heartbeat, encode
from vllm_kvpool.embeds.sockets import Link, Sockets

PATIENCE_S = 10.0


def test_what_is_no_frame_is_ignored() -> None:
    stranger = Sockets("tcp://127.0.0.1:*")
    links = WorkerLinks((stranger.endpoint,), "engine")
    try:
        greeted: list[Link] = []
        deadline = time.monotonic() + PATIENCE_S
        while not greeted and time.monotonic() < deadline:
            links.poll()
            greeted = [frame.link for frame in stranger.poll(0.01)]
        for data in (b"", b"garbage", b"\x94" * 9, encode(Envelope("s", "", 1, Heartbeat()))[:-1]):
            assert stranger.send(greeted[0], data)
        last = encode(Envelope("s", "", 2, Heartbeat()))
        assert stranger.send(greeted[0], last)
        heard = []
        while not heard and time.monotonic() < deadline:
            heard = links.poll(0.01)
        assert [said.body for said in heard] == [Heartbeat()]
        assert not links.are_up
    finally:
        links.close()
        stranger.close()
