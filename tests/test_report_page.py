"""The page that a study ends with, in a real browser: what is drawn, switched, read and copied, and that nothing is fetched."""
import copy
import json
import re
import shutil
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api")

TEMPLATE = Path(__file__).resolve().parents[1] / "report.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome to open the page with")

EVIL = "<script>alert(1)</script>"
COMMAND = 'python train.py configs/rope.toml --seed 1 --prompt "a  <b> & \'c\'"'
CONFIG = 'position = "rope"\n\nseed = 1\n'
DATA = {
    "name": f"positions {EVIL}", "command": "python study.py studies/positions.toml", "created": "2026-11-30T12:00:00Z",
    "commit": "abc123", "versions": "torch 2.13.0, python 3.11.7", "trained": 256,
    "panels": [
        {"id": "context", "title": "loss by context", "x": "context (tokens)", "y": "loss (nats per token)", "log": True,
         "trained": [256], "chance": None, "curves": [
             {"group": "rope", "label": "rope", "xs": [64, 256, 1024, 4096], "mean": [3.5, 3.4541, 6.25, 9.0],
              "spread": [0.01, 0.0123, 0.5, 1.0]},
             {"group": "learned", "label": "learned", "xs": [64, 256, 1024, 4096], "mean": [3.6, 3.5, None, None],
              "spread": [0.01, 0.02, None, None]},
             {"group": EVIL, "label": EVIL, "xs": [64, 256, 1024, 4096], "mean": [3.55, None, 3.52, 3.51],
              "spread": None}]},
        {"id": "copy", "title": "accuracy of copying", "x": "length", "y": "accuracy", "log": True, "trained": [32],
         "chance": [[8, 0.5], [128, 0.5]], "curves": [
             {"group": "rope", "label": "rope", "xs": [8, 32, 128], "mean": [1.0, 0.99, 0.6], "spread": None},
             {"group": "learned", "label": "learned", "xs": [8, 32, 128], "mean": [None, None, None],
              "spread": [None, None, None]}]},
        {"id": "steps", "title": "loss by step", "x": "step", "y": "loss (nats per token)", "log": False, "trained": [],
         "chance": None, "curves": [
             {"group": "rope", "label": "rope", "xs": [0, 100, 200], "mean": [9.0, 4.0, 3.5], "spread": None},
             {"group": "learned", "label": "learned", "xs": [0, 100, 200], "mean": [5.0, 4.5, 4.0],
              "spread": None}]},
        {"id": "empty", "title": "nothing measured", "x": "step", "y": "loss", "log": True, "trained": [], "chance": None,
         "curves": []},
    ],
    "groups": [{"id": "rope", "colour": "#0072B2"}, {"id": "learned", "colour": "#D55E00"},
               {"id": EVIL, "colour": "#000000"}],
    "tables": [{"title": "losses", "note": f"Means. {EVIL}", "columns": ["encoding", *(f"at {2**n}" for n in range(6, 16))],
                "rows": [["rope", *["3.454±0.010"] * 10], [EVIL, *["-"] * 10]]}],
    "runs": [{"name": "rope-1", "group": "rope", "state": "finished", "command": COMMAND, "config": CONFIG,
              "summary": [["final_val_loss", "3.4541"]]},
             {"name": EVIL, "group": "lost", "state": "failed: out of memory", "command": "x" * 300, "config": "y" * 300,
              "summary": []}],
}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser, tmp_path):
    """-> a function that opens the page of some data; nothing but files may be asked for, and nothing may go wrong."""
    asked, wrong, contexts = [], [], []

    def opened(data=DATA, fragment="", **options):
        path = tmp_path / "report.html"
        template = TEMPLATE.read_text(encoding="utf-8")
        assert template.count("/*DATA*/null") == 1
        path.write_text(template.replace("/*DATA*/null", json.dumps(data).replace("<", "\\u003c")), encoding="utf-8")
        context = browser.new_context(**{"offline": True, "viewport": {"width": 1280, "height": 900}} | options)
        contexts.append(context)
        context.route(re.compile("^(?!file:)"), lambda route: route.abort())
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri() + fragment)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert asked and [url for url in asked if not url.startswith("file:")] == []
    assert wrong == []


def plot(page, panel):
    return page.locator(f"[data-panel={panel}] svg.plot")


def ticks(page, panel, axis):
    return plot(page, panel).locator(f".{axis}-tick").all_text_contents()


def toggle(page, group):
    return page.locator("nav button:has(svg)").filter(has_text=group)


def drawn(page, group):
    """-> the panels in which the group has a curve."""
    return page.evaluate("""group => [...document.querySelectorAll("[data-panel]")]
        .filter(panel => [...panel.querySelectorAll(".plot g")].some(curve => curve.dataset.group === group))
        .map(panel => panel.dataset.panel)""", group)


def path(page, panel, group, kind="curve"):
    return plot(page, panel).locator(f"g[data-group='{group}'] path.{kind}").get_attribute("d")


def box(page, panel):
    """-> what the box under the pointer says: its head, and its rows from top to bottom; none where it is hidden."""
    found = page.locator(f"[data-panel={panel}] .box")
    if not found.is_visible():
        return None
    return found.locator("div").text_content(), [tuple(cell.strip() for cell in row.locator("td").all_text_contents())
                                                 for row in found.locator("tr").all()]


def point(page, panel, fraction):
    """Move the pointer over a chart, to a fraction of its width."""
    plot(page, panel).scroll_into_view_if_needed()
    area = plot(page, panel).bounding_box()
    page.mouse.move(area["x"] + area["width"] * fraction, area["y"] + area["height"] / 2)


def pixel(page, selector, key):
    """-> the red, green and blue of a computed colour, however the browser writes it."""
    return page.evaluate("""([selector, key]) => {
        const brush = document.createElement("canvas").getContext("2d");
        brush.fillStyle = getComputedStyle(document.querySelector(selector))[key];
        brush.fillRect(0, 0, 1, 1);
        return [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }""", [selector, key])


def test_a_switched_off_group_leaves_every_panel_and_the_y_axes_follow(visit):
    page = visit()
    before = {panel: ticks(page, panel, "y") for panel in ("context", "copy", "steps")}
    assert drawn(page, "rope") == ["context", "copy", "steps"] and float(before["context"][-1]) > 9
    toggle(page, "rope").click()
    assert toggle(page, "rope").get_attribute("aria-pressed") == "false"
    assert drawn(page, "rope") == [] and drawn(page, "learned") == ["context", "steps"]
    assert float(ticks(page, "context", "y")[-1]) < 3.7 and float(ticks(page, "steps", "y")[-1]) <= 5.1
    assert plot(page, "copy").text_content() == "no values to show"
    toggle(page, "rope").click()
    assert {panel: ticks(page, panel, "y") for panel in before} == before


def test_all_and_none_by_keyboard(visit):
    page = visit()
    page.get_by_role("button", name="hide all").press("Enter")
    assert page.locator(".plot .curve").count() == 0
    assert toggle(page, "learned").get_attribute("aria-pressed") == "false"
    toggle(page, "learned").press("Space")
    assert drawn(page, "learned") == ["context", "steps"] and drawn(page, "rope") == []
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.get_by_role("button", name="show all").press("Enter")
    assert drawn(page, "rope") == ["context", "copy", "steps"]


def test_multiples_of_the_training_length(visit):
    page = visit()
    assert ticks(page, "context", "x") == ["64", "128", "256", "512", "1,024", "2,048", "4,096"]
    steps = ticks(page, "steps", "x")
    page.get_by_role("button", name="multiples").click()
    assert ticks(page, "context", "x") == ["0.25×", "0.5×", "1×", "2×", "4×", "8×", "16×"]
    assert ticks(page, "copy", "x") == ["0.25×", "0.5×", "1×", "2×", "4×"]
    assert ticks(page, "steps", "x") == steps
    assert page.locator("[data-panel=context] .label.x").text_content() == "context (multiples of the training length)"
    page.get_by_role("button", name="absolute").click()
    assert ticks(page, "context", "x")[0] == "64"


def test_each_multiple_stands_where_its_length_stood(visit):
    page = visit()
    places = "panel => [...document.querySelectorAll(`[data-panel=${panel}] .x-tick`)].map(tick => tick.getAttribute('x'))"
    before = page.evaluate(places, "context")
    page.get_by_role("button", name="multiples").click()
    assert page.evaluate(places, "context") == before
    assert plot(page, "context").locator(".trained").get_attribute("x1") == before[2]


def test_no_choice_of_axis_where_nothing_has_a_training_length(visit):
    data = copy.deepcopy(DATA)
    data["panels"] = data["panels"][2:]
    assert visit(data).get_by_role("button", name="multiples").count() == 0


def test_of_several_training_lengths_each_has_its_line_and_multiples_are_of_the_first(visit):
    data = copy.deepcopy(DATA)
    data["panels"][0]["trained"] = [256, 1024]
    page = visit(data)
    page.get_by_role("button", name="multiples").click()
    assert "trained at 256, 1,024" in plot(page, "context").locator("text").all_text_contents()
    lines, places = ([node.get_attribute(key) for node in plot(page, "context").locator(f".{name}").all()]
                     for name, key in (("trained", "x1"), ("x-tick", "x")))
    places = dict(zip(ticks(page, "context", "x"), places))
    assert lines == [places["1×"], places["4×"]]


def test_curves_are_switched_where_the_page_has_no_address_of_its_own(visit):
    page = visit()
    page.evaluate("void (history.replaceState = () => { throw new DOMException('', 'SecurityError'); })")  # as in a frame
    toggle(page, "rope").click()
    assert drawn(page, "rope") == []


def test_keys_of_the_browser_are_left_to_it(visit):
    page = visit()
    left_alone = """([key, altKey]) => document.querySelector(".plot").dispatchEvent(
        new KeyboardEvent("keydown", {key, altKey, cancelable: true}))"""
    assert page.evaluate(left_alone, ["ArrowLeft", True]) and page.evaluate(left_alone, ["Escape", False])
    assert not page.evaluate(left_alone, ["ArrowLeft", False]) and not page.evaluate(left_alone, ["Escape", False])


def test_the_pointer_reads_the_nearest_values(visit):
    page = visit()
    assert box(page, "context") is None
    point(page, "context", 0.38)
    assert box(page, "context") == ("context (tokens): 256 · 1×", [
        ("learned", "3.5000 ± 0.0200"), ("rope", "3.4541 ± 0.0123"), (EVIL, "–")])
    guide, trained = (plot(page, "context").locator(f".{name}").get_attribute("x1") for name in ("guide", "trained"))
    assert guide == trained
    point(page, "context", 0.97)
    assert box(page, "context") == ("context (tokens): 4,096 · 16×", [
        ("rope", "9.0000 ± 1.0000"), (EVIL, "3.5100"), ("learned", "–")])
    page.mouse.move(2, 2)
    assert box(page, "context") is None and plot(page, "context").locator(".guide").count() == 0


def test_the_box_follows_what_is_switched(visit):
    page = visit()
    plot(page, "steps").focus()
    page.keyboard.press("End")
    assert box(page, "steps")[1] == [("learned", "4.0000"), ("rope", "3.5000")]
    page.evaluate("document.querySelector('nav button').dispatchEvent(new MouseEvent('click'))")
    assert box(page, "steps") == ("step: 200", [("learned", "4.0000")])


def test_arrow_keys(visit):
    page = visit()
    plot(page, "steps").focus()
    heads = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "Home", "ArrowLeft"):
        page.keyboard.press(key)
        heads.append(box(page, "steps")[0].removeprefix("step: "))
    assert heads == ["0", "100", "200", "200", "100", "0", "0"]
    page.keyboard.press("Escape")
    assert box(page, "steps") is None
    page.keyboard.press("ArrowLeft")
    assert box(page, "steps")[0] == "step: 200"
    page.keyboard.press("Tab")
    assert box(page, "steps") is None


def test_touch(visit):
    page = visit(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    plot(page, "copy").scroll_into_view_if_needed()
    area = plot(page, "copy").bounding_box()
    page.touchscreen.tap(area["x"] + area["width"] * 0.95, area["y"] + 100)
    assert box(page, "copy") == ("length: 128 · 4×", [("rope", "0.6000"), ("learned", "–")])
    shown = page.locator("[data-panel=copy] .box").bounding_box()
    assert shown["x"] >= 0 and shown["x"] + shown["width"] <= 390


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "fallback"])
def test_copy(visit, clipboard):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    if not clipboard:
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('not permitted')); }")
    run = page.locator("details").first
    run.locator("summary").click()
    for button, text in zip(run.get_by_role("button", name="copy").all(), (COMMAND, CONFIG), strict=True):
        element = button.element_handle()
        element.click()
        page.wait_for_function("button => button.textContent === 'copied'", arg=element)
        assert page.evaluate("navigator.clipboard.readText()") == text
    assert page.locator("textarea").count() == 0


def test_dark_and_light(visit):
    curve = ".plot g:last-of-type .curve"  # of the black group, in the first panel
    page = visit(color_scheme="dark")
    assert max(pixel(page, "body", "backgroundColor")) < 60 and min(pixel(page, curve, "stroke")) > 180
    button = page.get_by_role("button", name="theme")
    button.click()
    assert button.text_content() == "theme: light"
    assert min(pixel(page, "body", "backgroundColor")) > 230 and max(pixel(page, curve, "stroke")) < 40
    page.emulate_media(color_scheme="light")
    button.click()
    assert button.text_content() == "theme: dark" and max(pixel(page, "body", "backgroundColor")) < 60
    button.click()
    assert button.text_content() == "theme: auto" and min(pixel(page, "body", "backgroundColor")) > 230


def test_a_link_reproduces_the_view(visit):
    page = visit()
    toggle(page, "alert").click()
    toggle(page, "learned").click()
    page.get_by_role("button", name="multiples").click()
    fragment = page.evaluate("location.hash")
    for again in (page, visit(fragment=fragment)):
        again.reload()
        assert [drawn(again, group) for group in (EVIL, "learned")] == [[], []] and len(drawn(again, "rope")) == 3
        assert ticks(again, "context", "x")[-1] == "16×"
        assert [toggle(again, group).get_attribute("aria-pressed") for group in ("alert", "rope")] == ["false", "true"]
    page.evaluate("location.hash = 'hide=rope&hide=unknown'")
    page.wait_for_function("document.querySelector('nav button').getAttribute('aria-pressed') === 'false'")
    assert drawn(page, "rope") == [] and drawn(page, "learned") and ticks(page, "context", "x")[-1] == "4,096"


def test_a_phone_scrolls_no_page_sideways(visit):
    data, long = copy.deepcopy(DATA), "z" * 200
    data |= {"name": long, "command": long, "versions": long, "groups": [*DATA["groups"], {**DATA["groups"][0], "id": long}]}
    data["runs"][1] |= {"name": long, "state": f"failed: {long}", "summary": [[long, long]]}
    data["panels"][0] |= {"title": long, "x": long, "y": long}
    data["tables"][0] |= {"title": long, "note": long}
    page = visit(data, viewport={"width": 390, "height": 844})
    for details in page.locator("details").all():
        details.locator("summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("(area => area.scrollWidth > area.clientWidth)(document.querySelector('.scroll'))")
    tops = page.evaluate("[...document.querySelectorAll('figure')].map(figure => figure.offsetTop)")
    assert len(set(tops)) == 4
    page.set_viewport_size({"width": 1280, "height": 900})
    page.wait_for_function("document.querySelector('.plot').viewBox.baseVal.width > 500")
    tops = page.evaluate("[...document.querySelectorAll('figure')].map(figure => figure.offsetTop)")
    assert tops[0] == tops[1] < tops[2] == tops[3]


def test_a_missing_value_is_a_gap(visit):
    page = visit()
    for fragment in ("#", "#hide=rope&x=multiples"):
        page.goto(page.url.partition("#")[0] + fragment)
        attributes = page.evaluate("""[...document.querySelectorAll("svg, svg *")].flatMap(node =>
            [...node.attributes].map(attribute => attribute.value))""")
        assert len(attributes) > 300 and not [text for text in attributes if re.search("NaN|Infinity|undefined|null", text)]
    page.goto(page.url.partition("#")[0])
    assert len(re.findall("[ML]", path(page, "context", "learned"))) == 2
    assert path(page, "context", "learned", "band").count("L") == 3
    assert re.sub("[^ML]", "", path(page, "context", EVIL)) == "MML"
    assert path(page, "context", EVIL, "band") == "" and path(page, "copy", "learned") == ""
    assert len(re.findall("M", path(page, "context", EVIL, "marker"))) == 3  # the point between two gaps can be seen


def test_the_band_is_one_spread_to_each_side(visit):
    page = visit()
    heights = [float(y) for y in re.findall(",([0-9.]+)", path(page, "context", "rope", "band"))]
    middle = [float(y) for y in re.findall(",([0-9.]+)", path(page, "context", "rope"))]
    upper, lower = heights[:4], heights[:3:-1]
    per_nat = (middle[1] - middle[3]) / (9.0 - 3.4541)
    for mean, above, below, spread in zip(middle, upper, lower, (0.01, 0.0123, 0.5, 1.0), strict=True):
        assert mean - above == pytest.approx(spread * per_nat, abs=0.2) and below - mean == pytest.approx(mean - above, abs=0.2)


def test_reference_lines(visit):
    page = visit()
    words = plot(page, "copy").locator("text").all_text_contents()
    assert "trained at 32" in words and "chance" in words
    assert plot(page, "copy").locator(".chance").count() == 1 and plot(page, "context").locator(".chance").count() == 0
    assert plot(page, "steps").locator(".trained").count() == 0
    assert plot(page, "empty").text_content() == "no values to show"


def test_everything_of_the_data_is_text(visit):
    page = visit()
    assert page.title() == page.locator("h1").text_content() == DATA["name"]
    assert page.locator("script").count() == 2
    assert page.locator("tbody tr").nth(1).locator("th").text_content() == EVIL
    assert page.locator("summary").nth(1).locator("span").all_text_contents() == [EVIL, "failed: out of memory"]
    shown = [[cell.text_content() for cell in row.locator("th, td").all()] for row in page.locator(".scroll tr").all()]
    assert shown == [DATA["tables"][0]["columns"], *DATA["tables"][0]["rows"]]


@pytest.mark.parametrize("data", [None, {**DATA, "panels": [], "groups": [], "tables": [], "runs": [], "trained": None}],
                         ids=["template", "empty"])
def test_nothing_to_show(visit, data):
    page = visit(data)
    assert page.locator("figure").count() == 0
    assert page.locator("body").inner_text().strip()


def test_long_axes_keep_apart_labels(visit):
    data = copy.deepcopy(DATA)
    xs = [2**n for n in range(17)]
    data["panels"][0]["curves"] = [{"group": "rope", "label": "rope", "xs": xs, "mean": [2.0 + 1e-4 * x for x in xs],
                                    "spread": None}]
    page = visit(data, viewport={"width": 390, "height": 844})
    for choice in ("absolute", "multiples"):
        page.get_by_role("button", name=choice).click()
        for axis, side, size in (("x", "x", "width"), ("y", "y", "height")):
            boxes = sorted((tick.bounding_box() for tick in plot(page, "context").locator(f".{axis}-tick").all()),
                           key=lambda area: area[side])
            assert len(boxes) > 2 and all(a[side] + a[size] <= b[side] for a, b in zip(boxes, boxes[1:]))
            assert min(area["x"] for area in boxes) >= 0 and max(area["x"] + area["width"] for area in boxes) <= 390
    assert ticks(page, "context", "x") == ["1/64×", "0.125×", "1×", "8×", "64×"]
