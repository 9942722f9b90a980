"""`python -m tests.what_works` writes docs/what-works.md."""

from __future__ import annotations

from tests.what_works.page import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(PAGE.parents[1])}")
