"""What ``explain`` draws: ``--html`` in a browser, and ``--trace``."""

import contextlib
import io
import itertools
import json
import re
import shutil

import pytest
import torch
import torch.distributed as dist
from sharded_models import Lean
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.commands.page import plan_of, write_page
from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.reports.planner import KeepReport

HERE = f"{__name__}"
TITLE = "</script><script>document.title = 'foreign'</script> & <b>"


def two_blocks():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(Lean(64, 64), mesh), torch.zeros(2, 3, dtype=torch.long)


class Broken(Lean):
    """Has a graph break between its blocks."""

    def forward(self, tokens):
        x = self.layers[0](self.embedding(tokens))
        torch._dynamo.graph_break()
        return self.head(self.layers[1](x))


def broken():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(Broken(), mesh), torch.zeros(2, 3, dtype=torch.long)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Run the command once, with all pictures; return what it planned, what it said and a folder."""
    folder, made = tmp_path_factory.mktemp("written"), []
    words = ["--goal", "speed", "--world-size", "4", "--brief", "--memory-gib", "1"]
    words += ["--host-gib", "2", "--trace", f"{folder}/trace"]

    def kept(*args, **options):
        made.append(explain(*args, **options))
        return made[0]

    torch._dynamo.reset()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_ext_bucketing.explain.explain", kept)
        assert main(["explain", f"{HERE}:two_blocks", *words, "--html", f"{folder}/html"]) == 0
    return made[0], said.getvalue(), folder


@pytest.fixture(scope="module")
def plans(written):
    torch._dynamo.reset()
    parts = explain(f"{HERE}:broken", goal="parity", world_size=4, draw=True)
    torch._dynamo.reset()
    return [(TITLE, written[0]), ("graph break", parts)]


@pytest.fixture(scope="module")
def file(plans, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_page([plan_of(title, explained) for title, explained in plans], path)
    return path


def data_of(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def test_the_page_has_what_the_timelines_have(file, plans):
    data = data_of(file)
    assert [p["title"] for p in data["plans"]] == [title for title, _ in plans]
    for plan, (_, explained) in zip(data["plans"], plans, strict=True):
        for version, shown in plan["versions"].items():
            drawn = [d for d in explained.drawn if d.version == version]
            assert [g["stage"] for g in shown["graphs"]] == [d.stage for d in drawn]
            assert shown["step_ms"] == pytest.approx(sum(d.timeline.step_ms for d in drawn))
            state = shown["live"][1][0]
            assert sum(shown["peak"]) == state + max(d.timeline.peak_bytes for d in drawn)
            kernels = sum(ms > 0 for d in drawn for ms in d.model.ms)
            assert kernels == sum(len(r["b"]) for r in shown["rows"] if r["name"] != "host")
            for row in shown["rows"]:
                assert row["b"] == sorted(row["b"])
    tables = {t["title"]: t for t in data["plans"][0]["tables"]}
    buckets = plans[0][1].report.buckets
    shown = [
        dict(zip(tables["Buckets"]["head"], r, strict=True)) for r in tables["Buckets"]["rows"]
    ]
    assert [row["node"] for row in shown] == [b.node for b in buckets]
    assert [len(row["payload:list"]) for row in shown] == [len(b.members) for b in buckets]
    stages = [g["stage"] for g in data["plans"][1]["versions"]["after"]["graphs"]]
    assert stages == ["forward", "forward", "backward", "backward"]


def test_the_page_loads_nothing_and_names_end_no_element(file):
    text = file.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert text.count("</script>") == 2
    assert not re.search(r"https?:|//\w+\.\w+/|\bimport\b\s*\(|@import|\bsrc=|\bhref=", text)


def test_the_command_writes_a_page(written, file):
    (plan,) = data_of(written[2] / "html")["plans"]
    assert plan["title"] == f"{HERE}:two_blocks, ranks=4"
    parts = data_of(file)["plans"][1]["tables"][0]
    assert parts["rows"] == []
    assert "gives a bound" in parts["empty"]


def test_a_trace_of_before_and_after(written):
    """Every row has one kernel at a time, and the trace has all collectives of the report."""
    events = json.loads((written[2] / "trace").read_text())["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert [names[pid, None] for pid in (1, 2)] == ["before", "after"]
    assert [names[1, tid] for tid in (1, 2)] == ["compute", "group 0"]
    rows = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["dur"], e["name"]))
    for spans in rows.values():
        spans.sort()
        for (begin, duration, _), (following, _, _) in itertools.pairwise(spans):
            assert begin + duration <= following + 1e-6
    assert len(rows[2, 2]) == sum(written[0].report.collectives_after.values()) < len(rows[1, 2])
    assert any("parameters)" in name for _, _, name in rows[2, 2])
    assert all(e["args"]["GiB"] > 0 for e in events if e["ph"] == "C")


def test_a_bound_is_reported_and_other_bounds_are_shown(written):
    _, said, folder = written
    call = "ReshardAfterForward(reshard_after_forward='auto', memory=PeakMemory(gib=1.0, host"
    assert call in said
    assert "in host memory: 0 activations, 0 B, of 2.0 GiB allowed" in said
    assert re.search(r"activations of +on the device +on the host +computed again\n", said)
    assert re.search(r"kept from forward to backward: \d of \d units and [1-9] of [1-9]", said)
    assert "longest compute run" in said
    (plan,) = data_of(folder / "html")["plans"]
    (curve,) = (t["rows"] for t in plan["tables"] if t["title"].startswith("Other bounds"))
    keep = next(r for r in written[0].report.rewrites if isinstance(r, KeepReport))
    assert curve == [list(point) for point in sorted(keep.curve)]
    assert len(curve) > 1


@pytest.fixture(scope="module")
def browser():
    reason = "the page is tested in a browser: pip install playwright, and chromium"
    api = pytest.importorskip("playwright.sync_api", reason=reason)
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip(reason)
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", *quiet]
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=options)
        yield started
        started.close()


@pytest.fixture
def opened(browser, file):
    """Open the page; at the end, nothing was requested but the file, and no script failed."""
    page = browser.new_page(viewport={"width": 1100, "height": 900})
    asked, errors = [], []
    page.route("**/*", lambda route: (asked.append(route.request.url), route.continue_()))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    yield page
    page.close()
    assert asked == [file.as_uri()]
    assert errors == []


def place(page, row, bar):
    """Return the middle of a bar of the lower timeline while the whole step is shown."""
    canvas = page.locator("canvas.chart").nth(1)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    versions = page.evaluate("data.plans[0].versions")
    mine = versions["after"]["rows"][row]
    middle = mine["b"][bar] + mine["d"][bar] / 2
    longest = max(v["step_ms"] for v in versions.values())
    return box["x"] + middle / longest * box["width"], box["y"] + 16 + 37 * row + 24, mine


def test_a_pointer_shows_names_bytes_and_times_and_zooms(opened, plans):
    page, tip = opened, opened.locator("#tip")
    assert page.title() == TITLE
    assert page.locator("h1").inner_text() == TITLE
    x, y, row = place(page, 2, 0)
    assert row["name"].startswith("group 0, 4 ranks")
    page.mouse.move(x, y)
    said = tip.inner_text().splitlines()
    bucket = plans[0][1].report.buckets[0]
    assert said[0].startswith("AG embedding.weight, layers")
    assert said[1] == bucket.node
    assert re.fullmatch(r"all-gather: begins at \S+ .s, takes \S+ .s", said[2])
    assert said[3] == f"whole buffer {4 * bucket.nbytes / 1024:.1f} KiB"

    def span():
        """Return the milliseconds between two places of the chart of memory."""
        times = []
        for dx in (0, 8):
            page.mouse.move(x + dx, y + 5 * 37)
            number, unit = re.search(r"live at (\S+) (.s)", tip.inner_text()).groups()
            times.append(float(number) / (1 if unit == "ms" else 1e3))
        return times[1] - times[0]

    whole = span()
    page.mouse.move(x, y)
    page.mouse.dblclick(x, y)
    assert span() == pytest.approx(whole / 4, rel=0.2)
    page.mouse.move(x, y)  # what was under the pointer still is
    assert bucket.node in tip.inner_text()
    page.keyboard.press("Home")
    assert span() == pytest.approx(whole, rel=0.1)
    page.get_by_role("button", name="zoom in").click()
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 60, y)
    assert tip.is_hidden()  # dragging moves
    page.mouse.up()


def test_tables_sort_by_click_and_by_key(opened):
    box = opened.get_by_role("region", name="Buckets")
    head = box.get_by_role("button", name="bytes")
    kept = opened.evaluate(
        "data.plans[0].tables.find(t => t.title == 'Buckets').rows.map(r => r[5])"
    )
    shown = [["KiB" in t, t] for t in box.locator("tbody tr td:nth-child(6)").all_inner_texts()]
    assert len(shown) == len(kept) > 1

    def order():
        texts = box.locator("tbody tr td:nth-child(6)").all_inner_texts()
        sizes = {"B": 1, "KiB": 1024, "MiB": 2**20}
        return [float(n) * sizes[unit] for n, unit in map(str.split, texts)]

    head.click()
    assert box.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert order() == sorted(order())
    head.focus()
    opened.keyboard.press("Enter")
    assert box.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    assert order() == sorted(order(), reverse=True)
    assert order() == pytest.approx(sorted(kept, reverse=True), rel=0.01)
    members = box.locator("details").first
    members.locator("summary").click()
    assert "float32" in members.locator("div").inner_text()


def test_a_narrow_screen_and_another_plan(opened):
    opened.set_viewport_size({"width": 360, "height": 700})
    for title in ("graph break", TITLE):
        opened.get_by_role("button", name=title).click()
        assert opened.locator("h1").inner_text() == title
        assert opened.evaluate("document.documentElement.scrollWidth") <= 360
        assert opened.evaluate("document.body.scrollWidth") <= 360
        for chart in opened.locator("canvas.chart").all():
            assert 200 < chart.bounding_box()["width"] <= 360
    wide = opened.get_by_role("region", name="Buckets")
    assert wide.evaluate("box => box.scrollWidth > box.clientWidth")
