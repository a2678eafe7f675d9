"""Print the lines of every Python file, longest first, and fail where one is longer than a reader should have to hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMIT = 400
FOLDERS = ("src", "tests", "scripts")


def lines_per_file(root: Path) -> dict[str, int]:
    """Lines of each Python file that git tracks or would take, by path from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS], cwd=root, capture_output=True, text=True, check=True
    )
    files = [root / name for name in listed.stdout.splitlines()]
    return {str(file.relative_to(root)): len(file.read_bytes().splitlines()) for file in files if file.suffix == ".py" and file.is_file()}


def main() -> int:
    counts = sorted(lines_per_file(Path(__file__).resolve().parent.parent).items(), key=lambda item: (-item[1], item[0]))
    for name, lines in counts:
        print(f"{lines:5}  {name}{f'   over {LIMIT}' if lines > LIMIT else ''}")
    print(f"{sum(lines for _, lines in counts):5}  in {len(counts)} files")
    return int(any(lines > LIMIT for _, lines in counts))


if __name__ == "__main__":
    sys.exit(main())
