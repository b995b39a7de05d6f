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
    controller_of,
    load_config,
    read_config,
)
from vllm_kvpool.router.control.events import Mode
from vllm_kvpool.router.control.states import MAX_REPLICAS

ROOT = Path(__file__).parents[2]
ENGINE = '[[replicas]]\nurl = "http://a:1"\nrole = "decode"\n'

# A file, and what its error names: the place, and what to do.
MISTAKES: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty": ("", ("[[replicas]]", "[discovery]")),
    "no TOML": ("[front", ("not TOML",)),
    "not UTF-8": ("\udcff", ("not TOML",)),
    "unknown section": (f"[frunt]\n{ENGINE}", ("'frunt'", "did you mean 'front'")),
    "unknown name": (f"[front]\nlistn = 'a:1'\n{ENGINE}", ("[front]", "did you mean 'listen'")),
    "unknown name of a replica": (
        ENGINE + "prot = 1\n",
        ("[[replicas]] number 1", "'prot'", "did you mean"),
    ),
    "wrong type": (
        f"[front]\nmax_body_bytes = '5'\n{ENGINE}",
        ("[front] max_body_bytes", "Expected `int`", "`str`"),
    ),
    "wrong type in a list": (
        '[[replicas]]\nurl = 5\nrole = "decode"\n',
        ("[[replicas]] number 1 url", "Expected `str`"),
    ),
    "truth for a number": (f"[front]\nmax_wait_s = true\n{ENGINE}", ("[front] max_wait_s",)),
    "unknown role": (
        '[[replicas]]\nurl = "http://a:1"\nrole = "decoder"\n',
        ("[[replicas]] number 1 role", "choose one of prefill, decode, both"),
    ),
    "unknown mode": (
        f"[planner]\nmode = 'auto'\n{ENGINE}",
        ("[planner] mode", "manual, dry_run, automatic"),
    ),
    "no url": ('[[replicas]]\nrole = "decode"\n', ("[[replicas]] number 1", "`url`")),
    "one bracket": ('[replicas]\nurl = "http://a:1"\nrole = "decode"\n', ("write [[replicas]]",)),
    "two brackets": (f"[[front]]\nlisten = 'a:1'\n{ENGINE}", ("write [front]",)),
    "no section": (f"front = 5\n{ENGINE}", ("write [front]",)),
    "url without scheme": (
        '[[replicas]]\nurl = "a:1"\nrole = "decode"\n',
        ("number 1", "http://host:port"),
    ),
    "url with port 0": (
        '[[replicas]]\nurl = "http://a:0"\nrole = "decode"\n',
        ("http://host:port",),
    ),
    "url of the API below the engine": (
        '[[replicas]]\nurl = "http://a:1/v1/"\nrole = "decode"\n',
        ("number 1", "without /v1"),
    ),
    "url with a large port": (
        '[[replicas]]\nurl = "http://a:70000"\nrole = "decode"\n',
        ("http://host:port",),
    ),
    "url with a query": (
        '[[replicas]]\nurl = "http://a:1/?x=1"\nrole = "decode"\n',
        ("http://host:port",),
    ),
    "one engine twice": (
        ENGINE + '[[replicas]]\nurl = "http://A:1/"\nrole = "prefill"\n',
        ("number 2", "twice", "take one out"),
    ),
    "one id twice": (
        '[[replicas]]\nid = "x"\nurl = "http://a:1"\nrole = "decode"\n'
        '[[replicas]]\nid = "x"\nurl = "http://a:2"\nrole = "decode"\n',
        ("number 2", "'x'", "twice"),
    ),
    "an id of two words": (
        '[[replicas]]\nid = "my engine"\nurl = "http://a:1"\nrole = "decode"\n',
        ("'my engine'", "letters"),
    ),
    "no port to listen at": (f"[front]\nlisten = 'localhost'\n{ENGINE}", ("[front]", "host:port")),
    "a large port": (f"[admin]\nlisten = 'localhost:99999'\n{ENGINE}", ("[admin]", "host:port")),
    "one address for both": (
        f"[front]\nlisten = '127.0.0.1:8001'\n{ENGINE}",
        ("[front] and [admin]", "another"),
    ),
    "no time": (f"[front]\nread_timeout_s = 0\n{ENGINE}", ("[front] read_timeout_s", "choose")),
    "negative": (f"[flow]\nmax_attempts = -1\n{ENGINE}", ("[flow] max_attempts", "choose 1 or")),
    "years": (f"[health]\ntimeout_s = 1e9\n{ENGINE}", ("[health] timeout_s", "at most 86400")),
    "endless": (f"[front]\nmax_wait_s = inf\n{ENGINE}", ("[front] max_wait_s", "at most")),
    "no number": (f"[front]\nmax_wait_s = nan\n{ENGINE}", ("[front] max_wait_s", "choose")),
    "a share above one": (
        f"[flow]\nheadroom = 95.0\n{ENGINE}",
        ("[flow] headroom", "less than 0.98"),
    ),
    "bodies and a body": (
        f"[front]\nmax_bodies_bytes = 1000\n{ENGINE}",
        ("max_bodies_bytes is below 2 times max_body_bytes",),
    ),
    "more than can be": (
        f"[planner]\nmin_prefill = 1000\nmin_decode = 1000\n{ENGINE}",
        ("[planner] min_prefill plus min_decode is above 1024",),
    ),
    "prefill replicas alone": (
        '[[replicas]]\nurl = "http://a:1"\nrole = "prefill"\n',
        ("no engine decodes", '"decode" or "both"'),
    ),
    "a command that starts and none that stops": (
        ENGINE + 'start = ["systemctl", "start", "vllm"]\n',
        ("[[replicas]] number 1", "start without stop"),
    ),
    "a command that stops and none that starts": (
        ENGINE + 'stop = ["systemctl", "stop", "vllm"]\n',
        ("[[replicas]] number 1", "stop without start"),
    ),
    "a spare that cannot be started": (
        '[[replicas]]\nurl = "http://a:1"\nrole = "spare"\n',
        ("[[replicas]] number 1", "'spare'", "start"),
    ),
    "a command in one text": (
        ENGINE + 'start = "systemctl start vllm"\nstop = ["true"]\n',
        ("[[replicas]] number 1", "start"),
    ),
    "two tokens": (f"[admin]\ntoken = 'a'\ntoken_file = 'b'\n{ENGINE}", ("[admin]", "choose one")),
    "no variable": (f'api_key = "${{NO_SUCH}}"\n{ENGINE}', ("api_key", "NO_SUCH", "set it")),
    "no variable deep inside": (
        '[[replicas]]\nurl = "http://${NO_SUCH}:1"\nrole = "decode"\n',
        ("replicas", "NO_SUCH"),
    ),
    "a longer wait than engines take": (
        f"[front]\nexpect_timeout_ms = 600_001\n{ENGINE}",
        ("[front] expect_timeout_ms is 600001", "at most 600000"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, words = MISTAKES[mistake]
    monkeypatch.delenv("NO_SUCH", raising=False)
    path = tmp_path / "router.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    for word in words:
        assert word in said, said
    assert "$." not in said, "the words of the file, not of a parser"


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "router.toml"
    path.write_text(
        "frunt = 1\n[front]\nlisten = 5\nmax_wait = 3\n[health]\ntimeout_s = 'soon'\n"
        '[[replicas]]\nurl = "http://a:1"\n[[replicas]]\nrole = "decoder"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    places = ("'frunt'", "[front] listen", "'max_wait'", "[health] timeout_s", "`role` is missing")
    for place in (*places, "number 2 role", "`url` is missing"):
        assert sum(place in line for line in lines) == 1, (place, lines)
    path.write_text(
        "[front]\nlisten = 'x'\n[flow]\nheadroom = 9.0\n"
        '[[replicas]]\nurl = "a"\nrole = "prefill"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(str(caught.value).splitlines()) == 4
    path.write_text(
        "[front]\nlisten = 'x'\nmax_wait = 3\n[flow]\nheadroom = 9.0\nhands_over = 'no'\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = str(caught.value).splitlines()
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
def test_what_cannot_be_read_is_no_second_mistake(tmp_path: Path, text: str) -> None:
    path = tmp_path / "router.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(str(caught.value).splitlines()) == 1, str(caught.value)


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
    monkeypatch.setenv("KEY", "${HOST_OF}")
    config = read_config(
        {
            "api_key": "a-${KEY}-b",
            "replicas": [
                {
                    **{"url": "http://${HOST_OF}-0:1", "role": "both"},
                    **{"start": ["go", "$HOST_OF ${HOST_OF}"], "stop": ["halt"]},
                }
            ],
        }
    )
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


MADE: dict[str, Any] = {"replicas": [{"url": "http://a:1", "role": "both"}]}


def test_the_controller_has_the_files_numbers() -> None:
    given: dict[str, dict[str, Any]] = {
        "flow": {"prefill_tokens": 11, "headroom": 0.5, "hands_over": False},
        "planner": {"live_takeover": False, "mode": "dry_run", "down_hold_s": 5.0},
        "overload": {"ttft_target_s": 7.0},
        "health": {"max_failures": 9},
    }
    controller = controller_of(read_config({**MADE, **given}))
    settings = controller.state.settings
    assert (settings.prefill_tokens, settings.headroom, settings.hands_over) == (11, 0.5, False)
    assert controller.scaling.mode is Mode.DRY_RUN
    assert controller.scaling._config.down_hold_s == 5.0
    assert not controller.lifecycle._takes_over
    assert controller.state.fleet._health.max_failures == 9
    assert controller.admission.overdue_s == 14.0
