"""An engine that encodes images, one that answers, and a client that is the proxy between them.

    python examples/05_embeddings.py                      # a tiny random model, made on the spot
    python examples/05_embeddings.py MODEL --image FILE   # a real one

Arguments after `--` go to both `vllm serve`.
The client sends the prompt to the encoder, which answers where the embeddings are; that answer goes
with the same prompt to the other engine, whose text is printed as it comes. The window here is far
smaller than an image's embedding, so it comes in many rounds.
"""

import argparse
import base64
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
QUESTION = "What is in this picture?"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TINY = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "67108864")


def main() -> int:
    """Start both sides, ask once, stop both."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        with contextlib.ExitStack() as stack:
            _ask(args, directory, stack)
        events = json.loads((directory / "consumer.ec.worker.0").read_text())
        rows, nbytes, rounds = (
            events[f"kvpool_ec_events{{side=consumer,event={name}}}"]
            for name in ("rows", "bytes", "rounds")
        )
        print(
            f"{rows:g} rows, {nbytes:g} bytes, through a window of {args.arena}: {rounds:g} rounds"
        )
    return 0


def _ask(args: argparse.Namespace, directory: Path, stack: contextlib.ExitStack) -> None:
    """Start both sides, ask once; the stack stops them."""
    model = args.model or _tiny_model(directory)
    more = args.rest if args.model else [*TINY, *_template(directory), *args.rest]
    image = args.image.read_bytes() if args.image else _picture()
    http, control = _free_ports(2), _free_ports(2)
    servers: list[subprocess.Popen[bytes]] = []
    print("starting an encoder and an engine; their logs are in", directory, flush=True)
    for role, port, ec_port in zip(("producer", "consumer"), http, control, strict=True):
        transfer = _transfer(role, ec_port, args, directory)
        servers.append(stack.enter_context(_server(model, port, transfer, more, directory / role)))
    encoder, engine = (f"http://127.0.0.1:{port}" for port in http)
    for name, url, server in zip(("encoder", "engine"), (encoder, engine), servers, strict=True):
        _wait(url, server, directory)
        print(f"{name} is up: {url}", flush=True)
    request = _request(model, image)
    began = time.monotonic()
    answer = _post(encoder, {**request, "max_tokens": 1})
    params = answer.get("ec_transfer_params")
    print(f"encoded after {time.monotonic() - began:.2f} s:", json.dumps(params)[:200])
    for text in _stream(engine, {**request, "ec_transfer_params": params}):
        print(text, end="", flush=True)
    print(f"\nanswered after {time.monotonic() - began:.2f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--image", type=Path)
    parser.add_argument("--transport", default="local", choices=("local", "mooncake"))
    parser.add_argument("--arena", default="4KiB", help="the window; 4KiB is 8 rows of the model")
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:split])
    args.rest = given[split + 1 :]
    return args


def _transfer(role: str, port: int, args: argparse.Namespace, directory: Path) -> str:
    stats_file = str(directory / role)
    extra = {"transport": args.transport, "arena_bytes": args.arena, "stats_file": stats_file}
    return json.dumps(
        {
            "ec_connector": "KVPoolECConnector",
            "ec_role": f"ec_{role}",
            "ec_ip": "127.0.0.1",
            "ec_port": port,
            "ec_connector_extra_config": extra,
        }
    )


@contextlib.contextmanager
def _server(
    model: str, port: int, transfer: str, more: Sequence[str], log: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    # What `vllm serve` runs; it also works where vLLM is installed under another name.
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"),
        *("--enforce-eager", "--ec-transfer-config", transfer, *more),
    ]
    with log.with_suffix(".log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(url: str, server: "subprocess.Popen[bytes]", logs: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline or server.poll() is not None:
                for log in sorted(logs.glob("*.log")):
                    print(f"--- {log.name}\n{log.read_text()[-4000:]}", file=sys.stderr)
                raise SystemExit(f"{url} does not start") from None
            time.sleep(0.5)


def _request(model: str, image: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]
    messages = [{"role": "user", "content": content}]
    return {"model": "model", "messages": messages, "max_tokens": 16, "temperature": 0}


def _open(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        return urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error.code} {error.read().decode()}") from None


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    with _open(url, body) as answer:
        decoded: dict[str, Any] = json.loads(answer.read())
    return decoded


def _stream(url: str, body: Mapping[str, Any]) -> Iterator[str]:
    with _open(url, {**body, "stream": True}) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                for choice in json.loads(data)["choices"]:
                    yield choice["delta"].get("content") or ""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _picture() -> bytes:
    """Return a PNG of 56 x 56 pixels, from red to blue."""
    rows = b"".join(
        b"\0" + b"".join(bytes((255 - 4 * x, 4 * y, 4 * x)) for x in range(56)) for y in range(56)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 56, 56, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _tiny_model(directory: Path) -> str:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # also where the package is installed
    from tests.support.models import LlavaShape, make_model

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return str(make_model(directory, LlavaShape()))


def _template(directory: Path) -> tuple[str, str]:
    path = directory / "template.jinja"
    path.write_text(TEMPLATE)
    return "--chat-template", str(path)


if __name__ == "__main__":
    sys.exit(main())
