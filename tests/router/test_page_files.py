"""The files of the status page, without a browser."""

import re
from pathlib import Path

from aiohttp import ClientSession
from hatchling.builders.wheel import WheelBuilder

from tests.router.scenes import Scene
from vllm_kvpool.router.control.states import State
from vllm_kvpool.router.ops.admin_api import PAGE, Admin
from vllm_kvpool.router.ops.metrics import Telemetry

ROOT = Path(__file__).parents[2]
FILES = ROOT / "vllm_kvpool" / "router" / "ops" / "page"


async def test_the_files_of_the_page_are_served_with_their_types() -> None:
    async def use(client: ClientSession) -> None:
        for path, (name, content_type) in PAGE.items():
            async with client.get(path) as response:
                assert response.content_type == content_type
                assert await response.read() == (FILES / name).read_bytes()

    scene = Scene()
    telemetry = Telemetry(scene.controller, clock=scene.clock)
    admin = Admin(scene.controller, scene.post, telemetry, "token", clock=scene.clock)

    port = await admin.start("127.0.0.1", 0)
    async with ClientSession(f"http://127.0.0.1:{port}") as client:
        await use(client)
    await admin.stop()


def test_every_file_of_the_page_is_served() -> None:
    assert {each.name for each in FILES.iterdir()} == {name for name, _ in PAGE.values()}


def test_the_page_asks_for_nothing_that_is_not_served() -> None:
    wanted = set()
    for each in FILES.glob("*.[hj]*"):
        text = each.read_text()
        wanted |= set(re.findall(r'(?:src|href)="([^"]+)"', text))
        wanted |= {path.removeprefix(".") for path in re.findall(r'from "([^"]+)"', text)}
    assert wanted
    assert wanted <= PAGE.keys()


def test_the_files_of_the_page_are_in_the_wheel() -> None:
    packed = {each.distribution_path for each in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"vllm_kvpool/router/ops/page/{name}" for name, _ in PAGE.values()} <= packed


def test_page_every_state_has_its_colour_and_tooltip() -> None:
    shown = (FILES / "shown.js").read_text()
    table = re.search(r"const STATES = \{(.*?)\n\};", shown, re.DOTALL)
    assert re.findall(r"^  (\w+): \[", table[1], re.MULTILINE) == [each.value for each in State]


def test_docs_name_every_state_as_code_and_people_do() -> None:
    text = (ROOT / "docs" / "router.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted((each.value, each.name) for each in State)
