"""A picture of a command in a terminal: `python docs/images/record.py train.svg 70 .venv/bin/sherd train gpt`.

The command runs in a terminal of tmux; after so many seconds the screen is drawn as SVG. 0: when it has ended.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 100, 34
SESSION = "sherd-record"


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", "-L", SESSION, *arguments], check=True, capture_output=True, text=True).stdout


def has_ended() -> bool:
    return tmux("list-panes", "-t", SESSION, "-F", "#{pane_dead}").strip() == "1"


def screen_of(command: list[str], seconds: float) -> str:
    """What the terminal shows, with its colours."""
    words = shlex.join(command)
    tmux("new-session", "-d", "-s", SESSION, "-x", str(COLUMNS), "-y", str(LINES), f"TERM=xterm-256color {words}")
    try:
        tmux("set-option", "-t", SESSION, "remain-on-exit", "on")
        end = time.monotonic() + (seconds or float("inf"))
        while time.monotonic() < end and not has_ended():
            time.sleep(0.2)
        return tmux("capture-pane", "-p", "-e", "-t", SESSION)
    finally:
        tmux("kill-session", "-t", SESSION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", help="its name, beside this file")
    parser.add_argument("seconds", type=float)
    parser.add_argument("--title", default="make train")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    screen = Text.from_ansi(screen_of(arguments.command, arguments.seconds).rstrip("\n"))
    console = Console(width=COLUMNS, record=True, force_terminal=True, file=io.StringIO())
    console.print(screen)
    picture = console.export_svg(title=arguments.title)
    # rich names fonts on a server of others: a picture in the docs asks nobody.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    Path(__file__).with_name(arguments.picture).write_text(picture)


if __name__ == "__main__":
    main()
