"""A process that serves notices: prints its endpoint, then tells what each line of its input says
(`topic in hexadecimal, stored, ended or -`)."""

import sys

from vllm_kvpool.handover.producer import NoticePlace, NoticeServer
from vllm_kvpool.metrics import MetricsRegistry
from vllm_kvpool.network.allowed_peers import AllowedPeers


def main() -> None:
    place = NoticePlace("tcp://127.0.0.1:*", "127.0.0.1", is_required=True)
    server = NoticeServer(place, AllowedPeers(), MetricsRegistry())
    print(server.endpoint, flush=True)
    for line in sys.stdin:
        topic, stored, ended = line.split()
        server.tell(bytes.fromhex(topic), int(stored), None if ended == "-" else int(ended))
    server.close()


if __name__ == "__main__":
    main()
