import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_kvpool.cli import main
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.load_command import read_spec

SMALL = ("--set", "seconds=0.5", "--set", "rate=20", "--set", "prompt_words_max=8")


class OpenAI(BaseHTTPRequestHandler):
    """Answers every completion with two tokens, and has a router's state."""

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""

    def do_GET(self) -> None:
        if self.path == "/state" and self.headers["Authorization"] != "Bearer secret":
            self.send_error(401)
        elif self.path == "/state":
            self._answer(b'{"replicas":[{"id":"r1","role":"decode"}]}')
        else:
            self._answer(b'{"data":[{"id":"tiny"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        chunk = b'data: {"choices":[{"text":"a"}]}\n\n'
        self._answer(chunk * 2 + b"data: [DONE]\n\n")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OpenAI) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


def test_a_load_is_shown_and_kept(url: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "trace.toml").write_text("rate = 1\nmodel = 'tiny'\nprefix_words = 3\n")
    out = tmp_path / "new" / "load"
    done = CliRunner().invoke(
        main,
        [
            *("load", url, "--trace", str(tmp_path / "trace.toml"), *SMALL),
            *("--admin", url, "--token-file", str(tmp_path / "token"), "--out", str(out)),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "replicas D queue 0" in done.output
    written = json.loads(out.with_name("load.json").read_bytes())
    assert written["summary"]["outcomes"]["completed"] == len(written["load"]["requests"]) > 2
    spec = written["load"]["spec"]
    assert (spec["rate"], spec["prefix_words"], spec["model"]) == (20.0, 3, "tiny")
    assert written["load"]["states"][0]["router"]["replicas"][0]["id"] == "r1"
    assert out.with_name("load.png").read_bytes().startswith(b"\x89PNG")
    assert f"{written['summary']['requests']} requests" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "rates=3"], "did you mean 'rate'"),
        (["--set", "rate"], "NAME=VALUE is wanted"),
        (["--trace", "no-such-file"], "No such file"),
        (["--token-file", "no-such-file"], "No such file"),
        (["--set", "seconds=1"], "names no model"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    arguments: list[str], said: str, tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path / "load"))
    done = CliRunner().invoke(main, ["load", "http://127.0.0.1:9", *arguments, *out])
    assert done.exit_code == 1
    assert said in done.output.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace.toml").write_text("rate : 3")
    with pytest.raises(ConfigError, match=r"trace\.toml"):
        read_spec(tmp_path / "trace.toml", ())
