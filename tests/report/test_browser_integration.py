"""The page in a real browser: it is drawn, and nothing is complained about."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="plots need the extra [report]")
from matplotlib.image import imread

from tests.report.made import make_bench
from thinwire.report.page import write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
HEIGHT = 3000


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (420, True)])
def test_a_browser_draws_the_page_without_complaint(width: int, dark: bool, tmp_path: Path) -> None:
    page = write_report(make_bench(tmp_path / "bench", workers=(2, 4), rates=(200e6,), turns=2)).page
    picture = tmp_path / "page.png"
    ran = subprocess.run(
        [
            str(BROWSER),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            "--virtual-time-budget=1000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},{HEIGHT}",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert picture.exists(), ran.stderr
    assert [line for line in ran.stderr.splitlines() if "CONSOLE" in line] == []
    pixels = (imread(picture)[..., :3] * 255).astype(int)
    assert pixels.shape[:2] == (HEIGHT, width)
    paper = pixels[0, 0]
    assert (paper.mean() < 60) == dark
    inked = np.abs(pixels - paper).sum(axis=2) > 60
    assert inked.mean() > 0.02  # there is something on the paper,
    assert inked[HEIGHT // 2 :].any()  # and not only at the top
    saturated = (pixels.max(axis=2) - pixels.min(axis=2)) > 90
    assert saturated.sum() > 2000  # the bars and lines of ours
