"""The page in headless Chromium: plots are drawn, nothing is asked of other machines, and keys and print work."""

import base64

import pytest
from browser import CHROMIUM, Browser
from recorded_runs import make_run

from perfladder.report import build_report, render_html

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page's script is not run"),
]
HOSTILE = "<img src=x onerror=\"document.title='run'\">" + "n" * 1000
WIDEST = "Math.max(...Array.from(document.querySelectorAll('main > section'), (part) => part.scrollWidth))"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with device data, a region tree, and a kernel and regions with hostile names."""

    def rename(data):
        data["kernels"][0]["kernel"] = data["by_kernel"][0]["name"] = HOSTILE

    def grow(data):
        leaf = {"calls": 30, "cpu_time_us": 9000.0, "self_cpu_time_us": 9000.0, "device_time_us": 40000.0}
        leaf |= {"self_device_time_us": 40000.0, "children": []}
        root = leaf | {"region_id": "untuned_module:unet", "self_cpu_time_us": 3000.0, "cpu_time_us": 12000.0}
        root["children"] = [leaf | {"region_id": f"untuned_module:unet.{HOSTILE}"}]
        data["region_tree"] = [root]
        span = {"region_id": "untuned_module:unet", "start_us": 10.0, "duration_us": 5000.0}
        lanes = {"run_index": 0, "wall_us": 17000.0, "resolution_us": 8.5, "host": [span], "other_threads": [span]}
        data["lanes"] = lanes | {"device": [span | {"region_id": None}]}

    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder, changes={"kernels": rename, "regions": grow})
    path = folder / "page.html"
    path.write_text(render_html(build_report(run), run, beside=path))
    return path


@pytest.fixture(scope="module")
def browser(page):
    """One wide tab with the page, for the tests that leave it as it is."""
    with Browser() as tab:
        tab.open(page)
        yield tab


def test_all_plots_are_drawn_without_an_error_and_without_a_request(browser):
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.dataset.plotsFailed") is None
    num_plots = browser.evaluate("document.querySelectorAll('[data-plot]').length")
    assert num_plots >= 10
    assert browser.evaluate("document.querySelectorAll('.plot > .plot-container').length") == num_plots
    assert browser.evaluate("document.querySelectorAll('.iciclelayer .slice').length") == 4
    assert browser.evaluate("document.title") != "run"
    assert {request.partition(":")[0] for request in browser.requests} <= {"file", "data", "blob"}


def test_each_view_of_a_plot_can_be_chosen(browser):
    num_views = browser.evaluate("document.querySelectorAll('.views button').length")
    assert num_views >= 12
    for place in range(num_views):
        button = f"document.querySelectorAll('.views button')[{place}]"
        browser.evaluate(f"{button}.click()")
        browser.wait_for(f"{button}.closest('figure').dataset.view === {button}.dataset.view")
        assert browser.evaluate(f"{button}.getAttribute('aria-pressed')") == "true"
        assert browser.evaluate(f"{button}.closest('figure').querySelectorAll('[aria-pressed=true]').length") == 1
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.dataset.plotsFailed") is None


def test_tables_are_sorted_and_searched_by_keyboard(browser):
    table = "document.querySelector('#kernels [data-search] table')"
    browser.evaluate(f"{table}.tHead.rows[0].cells[3].querySelector('button').focus()")
    for expected in ("descending", "ascending"):
        browser.press("Enter")
        assert browser.evaluate(f"{table}.tHead.rows[0].cells[3].getAttribute('aria-sort')") == expected
        values = browser.evaluate(f"Array.from({table}.tBodies[0].rows, (row) => Number(row.cells[3].dataset.value))")
        assert values == sorted(values, reverse=expected == "descending")
    assert "ascending" in browser.evaluate("document.getElementById('told').textContent")
    search = "document.querySelector('#kernels input')"
    browser.evaluate(f"{search}.value = 'onerror'; {search}.dispatchEvent(new Event('input'))")
    shown = f"Array.from({table}.tBodies[0].rows).filter((row) => row.offsetHeight).length"
    assert browser.evaluate(shown) == 1
    browser.evaluate(f"{search}.value = ''; {search}.dispatchEvent(new Event('input'))")
    assert browser.evaluate(shown) == 10


def test_printed_page_shows_every_plot_in_the_width_of_the_paper(browser):
    browser.look(width=700, is_print=True)
    widths = browser.evaluate("Array.from(document.querySelectorAll('.plot .main-svg'), (svg) => svg.clientWidth)")
    assert max(widths) <= 700
    assert browser.evaluate(WIDEST) <= 700
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    printed = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert printed.startswith(b"%PDF")
    browser.look()


def test_narrow_page_is_no_wider_than_its_window_and_its_plots_follow_light_and_dark(browser, page):
    browser.look(width=375)
    browser.open(page)
    colours = """
        [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('.xtick text')).fill]
    """
    for is_dark in (False, True):
        browser.look(width=375, is_dark=is_dark)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 375
        assert browser.evaluate(WIDEST) <= 375
        paper, ink = (sum(map(int, colour[4:-1].split(", "))) for colour in browser.evaluate(colours))
        assert (paper < ink) == is_dark, "text of plots stands out from the paper"
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.errors == []


def test_plots_are_drawn_in_a_sandbox_without_an_origin_as_artifact_viewers_show_them(browser, tmp_path):
    run = make_run(tmp_path, rungs=("stages",))
    page = render_html(build_report(run), run)
    tell = "setInterval(() => parent.postMessage(document.documentElement.dataset.plotsDrawn, '*'), 50)"
    packed = base64.b64encode(f"{page}<script>{tell}</script>".encode()).decode()
    wrapper = tmp_path / "viewer.html"
    wrapper.write_text(f"""<!DOCTYPE html><iframe sandbox="allow-scripts" width="1000" height="800"></iframe><script>
        onmessage = (message) => {{ document.documentElement.dataset.inside = message.data || 0; }};
        const bytes = Uint8Array.from(atob("{packed}"), (sign) => sign.charCodeAt(0));
        const page = new Blob([bytes], {{ type: "text/html" }});
        document.querySelector("iframe").src = URL.createObjectURL(page);
    </script>""")
    num_plots = page.count("data-plot>")
    browser.look()
    browser.open(wrapper)
    browser.wait_for(f"Number(document.documentElement.dataset.inside) === {num_plots}")
    assert browser.errors == []
