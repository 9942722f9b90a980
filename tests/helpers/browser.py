"""Pages in a real browser: headless Chromium opens a file, and a probe inside the page tells what is there."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
WITHOUT = "no Chromium on this machine (Debian: apt-get install chromium)"
SECONDS = 120

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1280,1000",
)

# Before all else: whatever goes wrong while the page is built is kept. A refused request counts as wrong.
LISTEN = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push("error: " + event.message), true);
addEventListener("unhandledrejection", (event) => problems.push("rejected: " + event.reason));
addEventListener("securitypolicyviolation", (event) => problems.push("refused: " + event.blockedURI));
for (const name of ["error", "warn"]) console[name] = (...words) => problems.push(name + ": " + words.join(" "));
</script>"""

PROBE = """<pre id="probe"></pre><script>
(async () => {
  for (let tries = 0; tries < 200 && !document.documentElement.dataset.drawn; tries++) {
    await new Promise((done) => setTimeout(done, 50));
  }
  const visible = (element) => element.getBoundingClientRect().height > 50;
  const plots = () => [...document.querySelectorAll(".js-plotly-plot")].map((plot) => ({
    title: plot.closest("figure").querySelector("h3").textContent,
    visible: visible(plot) && plot.querySelector(".main-svg") !== null,
    scale: plot._fullLayout.yaxis.type,
    words: plot._fullLayout.xaxis.title.text,
    traces: plot.data.map((trace) => ({
      type: trace.type, name: trace.name, x: Array.from(trace.x), points: trace.x.length, y: Array.from(trace.y),
      drawn: trace.type === "heatmap" ? 1 : plot.querySelectorAll(".trace, .scatter, .bars, .point").length,
    })),
  }));
  const found = { plots: plots(), theme: document.documentElement.dataset.theme };
  found.paper = getComputedStyle(document.body).backgroundColor;
  document.querySelectorAll(".log").forEach((button) => button.click());
  document.querySelector('[data-axis="time"]').click();
  document.getElementById("theme").click();
  document.querySelectorAll(".legend button").forEach((button) => button.click());
  await new Promise((done) => setTimeout(done, 500));
  found.after = plots();
  found.themeAfter = document.documentElement.dataset.theme;
  found.paperAfter = getComputedStyle(document.body).backgroundColor;
  found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  found.width = document.documentElement.scrollWidth;
  found.problems = problems;
  document.getElementById("probe").textContent = JSON.stringify(found);
})();
</script>"""


def opened(page: Path, *flags: str) -> dict[str, Any]:
    """What the probe found in the page, after it was drawn and after every button was pressed."""
    assert BROWSER, WITHOUT
    text = page.read_text(encoding="utf-8")
    assert text.count("<head>") == 1
    probed = page.with_name(f"probed-{page.name}")
    before, end = text.rsplit("</body>", 1)
    probed.write_text(f"{before.replace('<head>', '<head>' + LISTEN, 1)}{PROBE}</body>{end}", encoding="utf-8")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={profile}", "--virtual-time-budget=30000", "--dump-dom"]
        ended = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=SECONDS, check=True)
    told = re.search(r'<pre id="probe">(.*?)</pre>', ended.stdout, re.DOTALL)
    assert told and told.group(1), f"the page did not get as far as its probe: {ended.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(html.unescape(told.group(1)))
    return found
