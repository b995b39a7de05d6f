"""Configuration: what is taken, and what each mistake is answered."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from vllm_kvpool.cli import main
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.router.config import (
    FrontConfig,
    RouterConfig,
    load_config,
    read_config,
)
from vllm_kvpool.router.control.states import MAX_REPLICAS

ROOT = Path(__file__).parents[2]
ENGINE = '[[replicas]]\nurl = "http://a:1"\nrole = "decode"\n'

# A name, a file, and what its error names. `@ url role` is an engine, `@` alone one that decodes.
MISTAKES = """
empty =>  => [[replicas]]; [discovery]
no TOML => [front => not TOML
not UTF-8 => \udcff => not TOML
unknown section => [frunt] | @ => 'frunt'; did you mean 'front'
unknown name => [front] | listn = 'a:1' | @ => [front]; did you mean 'listen'
unknown name of a replica => @ | prot = 1 => [[replicas]] number 1; 'prot'; did you mean
wrong type => [front] | max_body_bytes = '5' | @
    => [front] max_body_bytes; Expected `int`; `str`
wrong type in a list => [[replicas]] | url = 5 | role = "decode"
    => [[replicas]] number 1 url; Expected `str`
truth for a number => [front] | max_wait_s = true | @ => [front] max_wait_s
unknown role => @ http://a:1 decoder
    => [[replicas]] number 1 role; choose one of prefill, decode, both
unknown mode => [planner] | mode = 'auto' | @ => [planner] mode; manual, dry_run, automatic
no url => [[replicas]] | role = "decode" => [[replicas]] number 1; `url`
one bracket => [replicas] | url = "http://a:1" | role = "decode" => write [[replicas]]
two brackets => [[front]] | listen = 'a:1' | @ => write [front]
no section => front = 5 | @ => write [front]
no section of a list => replicas = [5] => [[replicas]] number 1; write names and values
url without scheme => @ a:1 decode => number 1; http://host:port
url with port 0 => @ http://a:0 decode => http://host:port
url of the API below the engine => @ http://a:1/v1/ decode => number 1; without /v1
url with a large port => @ http://a:70000 decode => http://host:port
url with a user => [[replicas]] | url = "http://me\\u0040a:1" | role = "both" => http://host:port
url with a query => @ http://a:1/?x=1 decode => http://host:port
one engine twice => @ | @ http://A:1/ prefill => number 2; twice; take one out
one id twice => @ | id = "x" | @ http://a:2 decode | id = "x" => number 2; 'x'; twice
an id of two words => @ | id = "my engine" => 'my engine'; letters
no port to listen at => [front] | listen = 'localhost' | @ => [front]; host:port
a large port => [admin] | listen = 'localhost:99999' | @ => [admin]; host:port
one address for both => [front] | listen = '127.0.0.1:8001' | @ => [front] and [admin]; another
a key that no header can have => api_key = "a\\nb" | @ => api_key; blanks
a token that no header can have => [admin] | token = "tök" | @ => [admin] token; beyond ASCII
a name with a port => [front] | hosts = ["router:8000"] | @ => [front] hosts; 'router:8000'
a URL for a name => [admin] | hosts = ["http://router"] | @ => [admin] hosts; without scheme
a collector without a host => [front] | otlp_traces_endpoint = "http://" | @
    => [front] otlp_traces_endpoint; http://collector
a name with a large port => [discovery] | prefill_dns = "a:99999" | @
    => [discovery] prefill_dns; host:port
no time => [front] | read_timeout_s = 0 | @ => [front] read_timeout_s; choose
negative => [flow] | max_attempts = -1 | @ => [flow] max_attempts; choose 1 or
years => [health] | timeout_s = 1e9 | @ => [health] timeout_s; at most 86400
endless => [front] | max_wait_s = inf | @ => [front] max_wait_s; at most
no number => [front] | max_wait_s = nan | @ => [front] max_wait_s; choose
a share above one => [flow] | headroom = 95.0 | @ => [flow] headroom; less than 0.98
bodies and a body => [front] | max_bodies_bytes = 1000 | @
    => max_bodies_bytes is below 2 times max_body_bytes
more than can be => [planner] | min_prefill = 1000 | min_decode = 1000 | @
    => [planner] min_prefill plus min_decode is above 1024
prefill replicas alone => @ http://a:1 prefill => no engine decodes; "decode" or "both"
a command that starts and none that stops => @ | start = ["systemctl", "start", "vllm"]
    => [[replicas]] number 1; start without stop
a command that stops and none that starts => @ | stop = ["systemctl", "stop", "vllm"]
    => [[replicas]] number 1; stop without start
a spare that cannot be started => @ http://a:1 spare => [[replicas]] number 1; 'spare'; start
a command in one text => @ | start = "systemctl start vllm" | stop = ["true"]
    => [[replicas]] number 1; start
two tokens => [admin] | token = 'a' | token_file = 'b' | @ => [admin]; choose one
no variable => api_key = "${NO_SUCH}" | @ => api_key; NO_SUCH; set it
no variable deep inside => @ http://${NO_SUCH}:1 decode => replicas; NO_SUCH
a longer wait than engines take => [front] | expect_timeout_ms = 600_001 | @
    => [front] expect_timeout_ms is 600001; at most 600000
"""


def cases() -> list[Any]:
    found = []
    for line in re.sub(r"\n {4}", " ", MISTAKES.strip()).splitlines():
        name, text, words = (each.strip() for each in line.split("=>"))
        text = re.sub(r"@ (h?\S*:\S+) (\w+)", r'[[replicas]] | url = "\1" | role = "\2"', text)
        text = text.replace("@", ENGINE.strip()).replace(" | ", "\n")
        found.append(pytest.param(text, words.split("; "), id=name))
    return found


@pytest.mark.parametrize(("text", "words"), cases())
def test_mistake_is_named(
    text: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    said = "\n".join(mistakes_of(tmp_path, text))
    for word in words:
        assert word in said, said
    assert "$." not in said, "the words of the file, not of a parser"


def mistakes_of(folder: Path, text: str) -> list[str]:
    """The lines of the error about a file with this text; each begins with its path."""
    path = folder / "router.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert all(each.startswith(f"{path}: ") for each in lines)
    return [each.removeprefix(f"{path}: ") for each in lines]


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    lines = mistakes_of(
        tmp_path,
        "frunt = 1\n[front]\nlisten = 5\nmax_wait = 3\n[health]\ntimeout_s = 'soon'\n"
        '[[replicas]]\nurl = "http://a:1"\n[[replicas]]\nrole = "decoder"\n',
    )
    places = ("'frunt'", "[front] listen", "'max_wait'", "[health] timeout_s", "`role` is missing")
    for place in (*places, "number 2 role", "`url` is missing"):
        assert sum(place in line for line in lines) == 1, (place, lines)
    replica = '[[replicas]]\nurl = "a"\nrole = "prefill"\n'
    text = f"[front]\nlisten = 'x'\n[flow]\nheadroom = 9.0\n{replica}"
    assert len(mistakes_of(tmp_path, text)) == 4
    text = "[front]\nlisten = 'x'\nmax_wait = 3\n[flow]\nheadroom = 9.0\nhands_over = 'no'\n"
    lines = mistakes_of(tmp_path, text)
    for place in ("listen is 'x'", "'max_wait'", "headroom is 9.0", "hands_over"):
        assert sum(place in line for line in lines) == 1, (place, lines)
    assert len(lines) == 4


@pytest.mark.parametrize(
    "text",
    [
        '[front]\nlisten = 8000\n[admin]\nlisten = "0.0.0.0:8000"\n',
        "[front]\nmax_bodies_byte = 1\nmax_body_bytes = 999_999_999_999\n",
        '[front]\nsalt_file = "a"\nkeys_file = 3\n',
        "[health]\nfailures = 'x'\nmax_failures = 1\n",
        "[discovery]\nfil = 'x'\n",
        '[[replicas]]\nurl = "${NOT_SET_ANYWHERE}"\nrole = "both"\n',
    ],
)
def test_value_that_cannot_be_read_is_no_second_mistake(tmp_path: Path, text: str) -> None:
    assert len(mistakes_of(tmp_path, text)) == 1


def test_paths_are_below_the_files_directory_and_not_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "etc/router.toml"
    path.parent.mkdir()
    path.write_text(f"{ENGINE}[admin]\ntoken_file = 'token'\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("etc/router.toml"))
    assert config.admin.token_file == str(tmp_path / "etc/token")
    path.write_text(f"{ENGINE}[admin]\ntoken_file = '/token'\n")
    assert load_config(path).admin.token_file == "/token"


@pytest.mark.parametrize("path", [*ROOT.glob("configs/*.toml"), *ROOT.glob("examples/*/*.toml")])
def test_configurations_that_are_shipped_are_valid(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(re.findall(r"\$\{(\w+)\}", path.read_text())):
        monkeypatch.setenv(name, str(9000 + number) if name.endswith("PORT") else f"x{number}")
    monkeypatch.setenv("KV_TRANSFER_CONFIG", "{}")
    answer = CliRunner().invoke(main, ["router", "--check", "--config", str(path)])
    assert (answer.exit_code, answer.output) == (0, f"{path} is valid\n")


def test_the_command_says_all_mistakes_and_its_version(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text("[front]\nlisten = 5\n[admin]\nlisten = 5\n")
    answer = CliRunner().invoke(main, ["router", "--check", "--config", str(path)])
    assert answer.exit_code == 1
    assert answer.output.count("listen") == 2
    for command in (["--version"], ["router", "--version"]):
        answer = CliRunner().invoke(main, command)
        assert (answer.exit_code, answer.output.split()[0]) == (0, "kvpool,")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_defaults_will_do(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(ENGINE)
    config = load_config(path)
    assert config.front == FrontConfig()
    assert [each.id for each in config.replicas] == [""]


def test_every_default_passes_its_own_checks() -> None:
    def whole(section: Any) -> dict[str, Any]:
        return {name: getattr(section, name) for name in section.__struct_fields__}

    given = RouterConfig()
    sections = ("front", "admin", "planner", "overload", "flow", "health")
    raw = {name: whole(getattr(given, name)) for name in sections}
    for name, section in raw.items():
        raw[name] = {key: list(v) if isinstance(v, tuple) else v for key, v in section.items()}
    raw["replicas"] = [{"url": "https://a.example:443/engine", "role": "both"}]  # type: ignore[assignment]
    config = read_config(raw)
    for name in sections:
        assert getattr(config, name) == getattr(given, name)


def test_variables_stand_in_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_OF", "engine")
    monkeypatch.setenv("KEY", "${HOST_OF}\n")  # of a file, as secrets are
    engine: dict[str, Any] = {"url": "http://${HOST_OF}-0:1", "role": "both", "stop": ["halt"]}
    engine["start"] = ["go", "$HOST_OF ${HOST_OF}"]
    config = read_config({"api_key": "a-${KEY}-b", "replicas": [engine]})
    assert config.api_key == "a-${HOST_OF}-b", "what is put in is not looked at again"
    assert config.replicas[0].url == "http://engine-0:1"
    assert config.replicas[0].start == ("go", "$HOST_OF engine")


@pytest.mark.parametrize(
    "url",
    ["http://a:1", "https://a", "http://[::1]:80", "http://a:1/base/", "http://10.0.0.1:8000"],
)
def test_urls(url: str) -> None:
    assert read_config({"replicas": [{"url": url, "role": "decode"}]}).replicas[0].url == url


@pytest.mark.parametrize("listen", ["0.0.0.0:8000", ":8000", "[::]:8000", "localhost:0"])
def test_addresses(listen: str) -> None:
    raw = {"front": {"listen": listen}, "replicas": [{"url": "http://a:1", "role": "decode"}]}
    assert read_config(raw).front.listen == listen


def test_fleets_are_bounded() -> None:
    many = [{"url": f"http://a:{port}", "role": "decode"} for port in range(1, MAX_REPLICAS + 2)]
    assert len(read_config({"replicas": many[:-1]}).replicas) == MAX_REPLICAS
    with pytest.raises(ConfigError, match="more than 1024"):
        read_config({"replicas": many})
