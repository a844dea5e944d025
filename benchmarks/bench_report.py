"""How large a report is and how fast it opens: a transformer's step of some 5,000 ops, in a real browser.

    python -m benchmarks.bench_report [--layers 57] [--times 7]

Chromium opens the file each time in a process of its own; the page says itself when its first chart and when all of
them were drawn. Needs Chromium; see `make browser`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.runs import save_results

from remat.core import Fingerprint, Plan, plain_schedule, simulate
from remat.report import write_report
from remat.solvers import solve
from remat.zoo import synthetic

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
WAIT_SECONDS = 8.0
"""The page is left alone until it is surely drawn: a debugger that looks on would slow it down."""


def make_plan(layers: int) -> Plan:
    problem = synthetic.transformer(layers)
    peak = simulate(problem, plain_schedule(problem.graph)).peak_bytes
    problem = problem.with_budget(peak * 6 // 10)
    return Plan(
        problem=problem,
        solution=solve(problem, "selective"),
        fingerprint=Fingerprint((), "", "none", ()),
        plain_peak_bytes=peak,
        breakdown_bytes=(("parameters", problem.resident_bytes),),
    )


def open_once(browser: str, path: Path) -> tuple[int, int]:
    """Milliseconds until the first chart and until all charts are drawn."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, sync_playwright() as driver:
        command = [browser, *ARGUMENTS, f"--user-data-dir={profile}", path.resolve().as_uri()]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            time.sleep(WAIT_SECONDS)
            port = (Path(profile) / "DevToolsActivePort").read_text().split()[0]
            page = driver.chromium.connect_over_cdp(f"http://127.0.0.1:{port}").contexts[0].pages[0]
            page.wait_for_selector("html[data-complete]")
            first, every = page.evaluate(
                "[document.documentElement.dataset.drawn, document.documentElement.dataset.complete]"
            )
        finally:
            process.terminate()
            process.wait()
    return int(first), int(every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=57)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    browser = next((found for name in names if name and (found := shutil.which(name))), None)
    if browser is None:
        print("No chromium here; `make browser` installs one on Debian.")
        return
    plan = make_plan(options.layers)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        path = write_report(Path(folder) / "report.html", plan, name="transformer")
        seconds, size = time.perf_counter() - start, path.stat().st_size
        opened = [open_once(browser, path) for _ in range(options.times)]
    first, every = zip(*opened, strict=True)
    assert plan.schedule is not None
    print(f"{len(plan.problem.graph.ops):,} ops, {len(plan.schedule.steps):,} with recomputations")
    print(f"written in     {seconds:6.2f} s, {size / 1e6:.2f} MB")
    print(f"first chart    {statistics.median(first) / 1e3:6.2f} s (fastest {min(first) / 1e3:.2f})")
    print(f"all charts     {statistics.median(every) / 1e3:6.2f} s (fastest {min(every) / 1e3:.2f})")
    facts = {"ops": len(plan.problem.graph.ops), "bytes": size, "first_ms": first, "all_ms": every, "write_s": seconds}
    save_results(options.output / "report.json", facts)


if __name__ == "__main__":
    main()
