"""A plan as a page: whole, self-contained, quiet and readable in a real browser."""

import re
import shutil
import subprocess

import pytest

import ssd
from ssd.page import page
from ssd.specs import Placement, Plan
from tests.profiles import PAIR, cores, synthetic, texts

pytestmark = pytest.mark.usefixtures("_few_simulations")
TWO = cores(2)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=5000"),
)
# Tells, once all is drawn, how wide the page is and how many charts it shows.
TELL = """<script>addEventListener("load", () => setTimeout(() => {
  const charts = document.querySelectorAll(".main-svg").length, root = document.documentElement;
  const boxes = [...document.querySelectorAll(".card, .figure, td, h1")];
  const cut = boxes.filter(box => box.clientWidth && box.scrollWidth > box.clientWidth + 1).length;
  console.log(`told width=${innerWidth} overflow=${root.scrollWidth - innerWidth} charts=${charts} cut=${cut}`);
}, 800))</script>"""


def made(**options) -> Plan:
    return ssd.plan(TWO, PAIR, profile=synthetic(TWO, traces=texts(0.8)), **options)


@pytest.fixture(scope="module")
def whole() -> Plan:
    models = ssd.Models(target="Qwen/Qwen3-32B", draft="Qwen/Qwen3-0.6B")
    with pytest.MonkeyPatch.context() as few:
        few.setattr("ssd.planner.SCREENED", 4)
        few.setattr("ssd.planner.SIMULATED", 2)
        return ssd.plan(ssd.Hardware.named("5xH100-SXM"), models, drafts=("Qwen/Qwen3-1.7B",))


def test_it_needs_nothing_but_itself(whole):
    text = page(whole)
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text)
    assert not [tag for tag in tags if "http" in tag]
    assert text.count("Plotly.newPlot(") >= 6
    assert len(text) < 8e6


def test_it_shows_the_plans_numbers_rivals_drafts_thresholds_and_sources(whole):
    text = page(whole)
    for part in (
        f"{whole.predicted.tokens_per_second:.1f}",
        "Rounds in time",
        "Where the time of a token goes",
        "Speed against lookahead K",
        "Speed against cached outcomes B",
        "Speed of one request against batch size",
        "What it costs",
        "Qwen/Qwen3-1.7B",
        "What would change the choice",
        "data sheet",
        "NVIDIA H100 Tensor Core GPU datasheet",
    ):
        assert part in text


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_every_mode_has_its_page_and_only_ssd_a_budget(mode):
    text = page(made(mode=mode))
    assert ("cached outcomes B" in text) == (mode == "ssd")


def test_a_target_alone_and_a_batch_have_their_pages():
    alone = ssd.Models(target="target")
    assert "SD" not in page(ssd.plan(TWO, alone, profile=synthetic(TWO, alone))).split("Plotly.newPlot(")[-1]
    assert "requests together" in page(made(workload=ssd.Workload(batch_size=4)))


def test_outcomes_chosen_anew_are_shown_as_lists_of_as_many():
    plan = made(mode="ssd")
    adaptive = plan.model_copy(update={"budget": sum(plan.fan_out_hit), "fan_out_hit": (), "fan_out_miss": ()})
    assert "chosen anew" in page(adaptive)


def test_names_are_text_not_markup():
    models = ssd.Models(target="<b>x</b>", draft="draft")
    assert "<b>x</b>" not in page(ssd.plan(TWO, models, profile=synthetic(TWO, models)))


def test_a_plan_typed_by_hand_has_no_page():
    plan = Plan(mode="ar", placement=Placement(target=("cpu:0",)), hardware=TWO, models=ssd.Models(target="target"))
    with pytest.raises(ValueError, match="typed by hand, so there is nothing to report"):
        page(plan)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_a_complaint_or_a_sideways_scroll(whole, tmp_path, width):
    (tmp_path / "plan.html").write_text(page(whole).replace("</body>", TELL + "</body>"), encoding="utf-8")
    # A window is never narrower than 500; a frame is.
    (tmp_path / "frame.html").write_text(f'<body style="margin:0"><iframe src="plan.html" width={width} height=9000 style="border:0">')
    shot = tmp_path / "plan.png"
    done = subprocess.run(
        [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={tmp_path / 'user'}",
            "--window-size=1280,9000",
            f"--screenshot={shot}",
            tmp_path / "frame.html",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    (told,) = [line for line in said if "told width" in line]
    assert said == [told]
    # A frame's scroll bar takes some of it.
    assert f"width={width} " in told
    assert int(re.search(r"overflow=(-?\d+)", told)[1]) <= 0
    assert int(re.search(r"charts=(\d+)", told)[1]) >= 6
    assert "cut=0" in told
    assert shot.stat().st_size > 20_000
