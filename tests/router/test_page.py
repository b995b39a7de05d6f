"""The status page in a real Chromium, served by the real admin address."""

import io
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from PIL import Image

from tests.router.browser import Browser, Chromium
from tests.router.scenes import Scene, busy_scene
from vllm_kvpool.router.control.events import Failed, Mode, Remove, SetMode, SetRole
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.ops.admin_api import Admin
from vllm_kvpool.router.ops.metrics import Telemetry

pytestmark = [pytest.mark.slow, pytest.mark.alone]

# With signs that an address may not have as they are, and that "+" is not a space.
TOKEN = "s3+cr/et="
HASH = "#token=s3+cr%2Fet="
SHOWN = "!document.getElementById('main').hidden"
ATTACK = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


Visit = Callable[..., AbstractAsyncContextManager[tuple[str, Admin]]]


@pytest.fixture
def visit(browser: Browser) -> Visit:
    """Serve a scene and open its page; in the end there is nothing wrong in the console."""

    @asynccontextmanager
    async def visit(
        scene: Scene, suffix: str = HASH, *, allowed: str = ""
    ) -> AsyncIterator[tuple[str, Admin]]:
        telemetry = Telemetry(scene.controller, clock=scene.clock)
        admin = Admin(scene.controller, scene.post, telemetry, TOKEN, clock=scene.clock)
        try:
            url = f"http://127.0.0.1:{await admin.start('127.0.0.1', 0)}/"
            await browser.prefer("light")
            await browser.open(f"{url}{suffix}")
            yield url, admin
            said = await browser.console()
            assert [each for each in said if not allowed or allowed not in each] == []
        finally:
            await browser.open("about:blank")
            await browser.console()
            await admin.stop()

    return visit


def row(name: str, selector: str = "") -> str:
    """An expression: an element of a replica's row."""
    return f"[...document.querySelectorAll('#rows tr')].find((e) => e.dataset.id === '{name}')" + (
        f".querySelector('{selector}')" if selector else ""
    )


async def test_every_replica_has_a_row_with_its_state_its_lock_and_its_load(
    browser: Browser, visit: Visit
) -> None:
    async with visit(busy_scene()):
        await browser.until(SHOWN)
        names = "[...document.querySelectorAll('#rows tr')].map((e) => e.dataset.id)"
        assert await browser.read(names) == ["p0", "p1", "d0", "d1", "d2"]
        states = "[...document.querySelectorAll('.state-name')].map((e) => e.textContent)"
        assert await browser.read(states) == [
            *("prefill", "prefill", "decode", "decode", "quarantined")
        ]
        locks = (
            "[...document.querySelectorAll('.badge.lock[title]')].map((e) => e.checkVisibility())"
        )
        assert await browser.read(locks) == [False, False, True, False, False]
        assert "over the watermark" in await browser.read(f"{row('d0')}.innerText")
        assert await browser.text("#flags") == "1 locked"
        for name, kind, share in (
            *(("d0", "used", 0.99), ("d0", "committed", 0.11)),
            *(("d1", "used", 0.3), ("p0", "used", 0.12), ("d1", "committed", 0.0)),
        ):
            width = f"{row(name, f'i.{kind}')}.getBoundingClientRect().width"
            bar = f"{row(name, '.bar')}.getBoundingClientRect().width"
            # It takes a moment: the bars glide.
            await browser.until(f"Math.abs({width} / {bar} - {share}) < 0.01")
        assert await browser.read(f"{row('d0', '.bar')}.getAttribute('aria-valuenow')") == "990"
        assert "tried again in" in await browser.read(f"{row('d2')}.innerText")


async def test_work_and_flow_are_shown_in_units_for_people(browser: Browser, visit: Visit) -> None:
    async with visit(busy_scene()):
        await browser.until(SHOWN)
        d0 = await browser.read(f"{row('d0')}.innerText")
        for said in ("1 answer", "3 running", "1 waiting", "generated", "1.2 MiB/s"):
            assert said in d0
        p1 = await browser.read(f"{row('p1')}.innerText")
        assert "2 prompts" in p1
        assert "3,200 tokens to compute" in p1
        glance = await browser.text("#glance")
        assert "330 ms" in glance
        assert "2.5 MiB/s" in glance
        rates = await browser.text("#rates")
        assert "not measured yet" in rates
        assert "tokens/s" in rates
        counts = (await browser.text("#counts")).replace("\n", " ")
        assert "in flight 4" in counts
        assert "arrived 4" in counts


async def test_the_plan_is_shown_with_its_equations_and_steps(
    browser: Browser, visit: Visit
) -> None:
    scene = Scene(mode=Mode.DRY_RUN)
    scene.spare("s0")
    scene.serving("d0", Role.DECODE)
    scene.tick()

    async with visit(scene):
        await browser.until(SHOWN)
        plan = (await browser.text("#plan")).replace("\n", " ")
        for said in (
            *("dry run", "prefill 0 → 1", "decode 1 → 1", "decode memory: (0 blocks used"),
            "wake or start s0 for prefill",
        ):
            assert said in plan
        assert await browser.read("document.getElementById('held').hidden")
        scene.tick(60.0)
        await browser.until("document.getElementById('held').innerText.includes('s old')")


async def test_what_happens_is_shown_within_a_moment_without_a_reload(
    browser: Browser, visit: Visit
) -> None:
    scene = busy_scene()

    async with visit(scene):
        await browser.until(SHOWN)
        await browser.run("window.mark = 1")
        scene.step(SetRole(ReplicaId("p0"), Role.DECODE))
        scene.step(SetMode(Mode.AUTOMATIC))
        scene.now += 0.1  # locks are not looked at for each of many events at once
        scene.measured("d0", 100)
        await browser.until(f"{row('p0')}.innerText.includes('prefill to decode')")
        await browser.until(f"!{row('d0', '.badge.lock')}.checkVisibility()")
        assert await browser.text("#mode") == "automatic"
        first = await browser.read("document.querySelector('#transitions tr').innerText")
        for said in ("p0", "prefill → prefill to decode", "mutate", "asked for by"):
            assert said in first
        scene.step(Remove(ReplicaId("d1")))
        scene.serving("d9", Role.DECODE)
        await browser.until(row("d9"))
        assert await browser.read(f"{row('d1')} === undefined")
        assert await browser.read("window.mark") == 1
        for number in range(60):
            scene.arrived(f"m{number}", 16_000)
        await browser.until(
            "/prompts waiting\\s+[1-9]/.test(document.getElementById('glance').innerText)"
        )


async def test_the_token_of_the_address_is_gone_from_it_and_kept_for_the_tab(
    browser: Browser, visit: Visit
) -> None:
    async with visit(busy_scene()) as (url, _):
        await browser.until(SHOWN)
        assert await browser.read("location.href") == url
        assert await browser.read("Object.values(localStorage)") == []
        assert await browser.read("document.cookie") == ""
        await browser.call("POST", "refresh")
        await browser.until(SHOWN)
        await browser.click("#forget")
        assert await browser.read("Object.values(sessionStorage)") == []
        assert not await browser.read(SHOWN)
        assert await browser.read("document.activeElement.id") == "token"


async def test_a_wrong_token_is_said_and_the_right_one_may_be_entered(
    browser: Browser, visit: Visit
) -> None:
    # Chromium itself logs that an answer was 401.
    async with visit(busy_scene(), "", allowed="401 (Unauthorized)"):
        assert not await browser.read(SHOWN)
        assert not await browser.read("document.getElementById('wrong').checkVisibility()")
        await browser.write("#token", "not it\n")
        await browser.until("document.getElementById('wrong').checkVisibility()")
        assert "something else" in await browser.text("#wrong"), "a blank is in no token"
        await browser.write("#token", "not-it\n")
        await browser.until("document.getElementById('wrong').innerText.includes('is wrong')")
        assert not await browser.read(SHOWN)
        await browser.write("#token", TOKEN)
        await browser.click("#login button")
        await browser.until(SHOWN)
        assert not await browser.read("document.getElementById('login').checkVisibility()")


async def test_texts_of_others_stay_texts(browser: Browser, visit: Visit) -> None:
    scene = busy_scene()
    scene.serving(ATTACK, Role.DECODE)
    scene.step(Failed(ReplicaId("p0"), ATTACK))

    async with visit(scene, allowed="TrustedHTML"):
        await browser.until(SHOWN)
        whys = (
            "[...document.querySelectorAll('#transitions td:last-child')].map((e) => e.textContent)"
        )
        assert ATTACK in await browser.read(whys)
        names = "[...document.querySelectorAll('.id span')].map((e) => e.textContent)"
        assert ATTACK in await browser.read(names)
        assert await browser.read("document.querySelectorAll('main img, main script').length") == 0
        assert await browser.read("document.title") == "kvpool router"
        # Were the page to forget itself one day, the browser would still refuse.
        script = "try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name }"
        assert await browser.run(script) == "TypeError"


async def test_a_router_that_cannot_be_reached_is_said_and_what_was_is_kept(
    browser: Browser, visit: Visit
) -> None:
    scene = busy_scene()
    async with visit(scene, allowed="net::ERR_") as (url, admin):
        await browser.until(SHOWN)
        assert await browser.text("#link") == "live"
        await admin.stop()
        await browser.until("document.getElementById('alarm').checkVisibility()")
        alarm = await browser.text("#alarm")
        assert "The router cannot be reached: no connection." in alarm
        assert "Below is what it said" in alarm
        assert await browser.text("#link") == "cannot be reached"
        assert await browser.read(row("d0")), "the last state is still there"
        telemetry = Telemetry(scene.controller, clock=scene.clock)
        again = Admin(scene.controller, scene.post, telemetry, TOKEN, clock=scene.clock)
        await again.start("127.0.0.1", int(url.rpartition(":")[2].strip("/")))
        await browser.until("!document.getElementById('alarm').checkVisibility()")
        assert await browser.text("#link") == "live"
        await again.stop()


async def test_many_replicas_are_shown_without_a_page_that_scrolls_sideways(
    browser: Browser, visit: Visit
) -> None:
    scene = busy_scene()
    for number in range(59):
        scene.serving(f"gpu-{number:02}", list(Role)[number % 2])

    async with visit(scene):
        await browser.until(SHOWN)
        assert await browser.read("document.querySelectorAll('#rows tr').length") == 64
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert await browser.read(wide)


CONTRAST = """
const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const channels = (text) => text.match(/[0-9.]+/g).map(Number);
const behind = (element) => {
  for (let e = element; e; e = e.parentElement) {
    const [r, g, b, a = 1] = channels(getComputedStyle(e).backgroundColor);
    if (a > 0.99) return [r, g, b];
  }
  return [255, 255, 255];
};
const ownText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
const poor = [];
for (const e of document.body.querySelectorAll("*")) {
  if (!e.checkVisibility() || !ownText(e)) continue;
  const [one, two] = [luminance(channels(getComputedStyle(e).color)), luminance(behind(e))];
  const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
  if (ratio < 4.5) poor.push([e.className || e.tagName, e.textContent.trim(), ratio]);
}
return poor;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_can_be_read_and_used_by_everybody(
    browser: Browser, visit: Visit, scheme: str, tmp_path: Path
) -> None:
    scene = busy_scene()
    scene.step(Failed(ReplicaId("p0"), "gone"))
    scene.serving("stale", Role.PREFILL)
    scene.tick(20.0)
    for name in ("p1", "d0", "d1"):
        scene.measured(name, 990)

    async with visit(scene):
        await browser.prefer(scheme)
        await browser.until(SHOWN)
        assert await browser.run(CONTRAST) == []
        for missing in (
            "th:not([scope])",
            "button:not([type])",
            ".bar:not([aria-label])",
            ".scroll:not([tabindex])",
            "section:not([aria-labelledby]):not([aria-label])",
            "input:not([id])",
        ):
            found = f"document.querySelectorAll('{missing}').length"
            assert await browser.read(found) == 0, missing
        assert await browser.read("document.documentElement.lang") == "en"
        picture = await browser.screenshot()
        (tmp_path / "page.png").write_bytes(picture)
        colours = Image.open(io.BytesIO(picture)).convert("RGB").getcolors(1 << 24)
        assert colours is not None
        assert len(colours) > 200, "more than a background"
        _, common = max(colours)
        assert (sum(common) > 3 * 200) == (scheme == "light")
