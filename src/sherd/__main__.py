"""`python -m sherd` is the `sherd` command."""

from __future__ import annotations

from sherd.cli import main

if __name__ == "__main__":
    main()
