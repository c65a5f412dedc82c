"""Draw the pictures of the studio's views in docs/media, from runs of documented commands.

python benchmarks/studio_pictures.py [--runs FOLDER] [--out FOLDER] [--only NAME]

The runs of the pictures are made if they are not there, small ones: pictures, not results. Needs
`pip install 'foresight[studio,web]'` and a Chromium.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn
from playwright import sync_api as playwright

from foresight.studio import app, serve
from foresight.studio.runs import identity

# Name of the run, and the command that makes it in the folder {runs}.
COUNTDOWN = "--task countdown --env-options traces=steps --verifier exact --max-new-tokens 16"
COMMANDS = {
    "ppo-0": "train ppo --preset CartPole-v1 --steps 60000 --seed 0",
    "ppo-1": "train ppo --preset CartPole-v1 --steps 60000 --seed 1",
    "ppo-2": "train ppo --preset CartPole-v1 --steps 60000 --seed 2 --learning-rate 0.001",
    "countdown": "train pretrain --preset countdown-steps --steps 800 --evaluate-every 200 --evaluation-episodes 50",
    "countdown-grpo": "train grpo --preset countdown-steps --model {runs}/countdown/export --steps 60 "
    "--evaluate-every 20 --evaluation-episodes 50",
    "think": "think self_consistency best_of_n tree_of_thoughts puct --model {runs}/countdown "
    f"{COUNTDOWN} --budget 512 --questions 40",
    "calculator.jsonl": "data demonstrations --task calculator --prompts 240",
    "calculator": "train sft --preset smollm2-calculator --data {runs}/calculator.jsonl --steps 6 --evaluate-every 3 "
    "--evaluation-episodes 8",
    "delegation": "train pretrain --preset delegation --steps 600 --evaluate-every 200 --evaluation-episodes 50",
    "delegation-grpo": "train grpo --preset delegation --model {runs}/delegation/export --steps 20 --evaluate-every 5 "
    "--evaluation-episodes 50",
    "storm": "train storm --preset CartPole-v1 --steps 4000 --evaluation-episodes 5",
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
CHROMIUM = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
# Picture, address, what must be there first, and what is then clicked.
VIEWS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("runs", "runs?run={ppo-0}&run={ppo-1}&run={ppo-2}&metric=return", ".chart canvas", ()),
    ("completions", "runs?run={countdown-grpo}", ".sample", ("button:has-text('Before and after')",)),
    ("grid", "grid?step=12", "[data-cell='62']", ("[data-cell='62']",)),
    ("search", "search", "svg[aria-label='Search tree'] g", ()),
    ("imagination", "imagination?run={storm}", ".dream p", ()),
    ("attention", "attention", "svg[aria-label^=Attention]", ("[aria-label^='layer 20, head 3']",)),
    ("thoughts", "thoughts?question=1", "svg[aria-label='Tree of thoughts'] g", ()),
    ("agents", "agents?run={calculator}", ".turn", ()),
    ("team", "agents?run={delegation-grpo}", ".turn", ("tr:has-text('sub-agents') a",)),
)


def needed(only: str) -> set[str]:
    """The runs of the pictures whose name holds `only`, and what these are made from."""
    texts = [address for name, address, *_ in VIEWS if only in name] + (["{think}"] if only in "thoughts" else [])
    found: set[str] = set()
    while texts:
        text = texts.pop()
        for name in COMMANDS:
            used = rf"\{{{re.escape(name)}\}}|\{{runs\}}/{re.escape(name)}(?![\w.-])"
            if name not in found and re.search(used, text):
                found.add(name)
                texts.append(COMMANDS[name])
    return found


def make(runs: Path, only: str) -> None:
    """Make the runs that are not there, those of the pictures whose name holds `only`."""
    runs.mkdir(parents=True, exist_ok=True)
    for name, command in COMMANDS.items():
        if name not in needed(only):
            continue
        target = runs / name
        if (target / "summary.json").exists() or (target / "think.json").exists() or target.is_file():
            continue
        shutil.rmtree(target, ignore_errors=True)
        words = [*command.format(runs=runs).split(), "--out", str(target)]
        print("foresight", *words, flush=True)
        subprocess.run([sys.executable, "-m", "foresight", *words], check=True, stdout=subprocess.DEVNULL)


def draw(runs: Path, out: Path, only: str) -> None:
    """Open each view and write its picture; the first one also dark and on a phone."""
    taken = serve.listen("127.0.0.1", 8865)
    server = uvicorn.Server(uvicorn.Config(app.create([runs]), log_level="error", lifespan="off"))
    threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True).start()
    base = serve.address("127.0.0.1", taken.getsockname()[1], None)
    ids = {name: identity((runs / name).resolve()) for name in COMMANDS}
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, address, ready, clicks in VIEWS:
            if only in name:
                wide = browser.new_page(viewport={"width": 1280, "height": 800})
                shoot(wide, base, address.format(**ids), ready, clicks, out / f"studio-{name}.png")
        if only in "phone":
            options: Any = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
            shoot(browser.new_page(**options), base, "grid?step=12", "[data-cell='62']", (), out / "studio-phone.png")
        browser.close()
    server.should_exit = True


def shoot(page: Any, base: str, address: str, ready: str, clicks: tuple[str, ...], file: Path) -> None:
    page.set_default_timeout(120_000)
    page.goto(f"{base}#/{address}")
    page.wait_for_selector(ready)
    for what in clicks:
        page.click(what)
    page.wait_for_timeout(2_500)
    height = min(1_100, page.evaluate("document.documentElement.scrollHeight"))
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    page.wait_for_timeout(300)
    page.screenshot(path=file)
    shrink(file)
    print(file, flush=True)
    page.close()


def shrink(file: Path) -> None:
    """Write the picture again with 256 colors, a third of its size; a color that few pixels have is kept."""
    from PIL import Image

    image = Image.open(file).convert("RGB")
    image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="runs/studio", type=Path)
    parser.add_argument("--out", default="docs/media", type=Path)
    parser.add_argument("--only", default="", help="draw only the pictures whose name holds this text")
    parser.add_argument("--make", action="store_true", help="only make the runs")
    arguments = parser.parse_args()
    make(arguments.runs, arguments.only)
    if not arguments.make:
        draw(arguments.runs, arguments.out, arguments.only)


if __name__ == "__main__":
    main()
