"""`python -m tests.release TAG`: check that the tag can be released, and print its notes, which are of CHANGELOG.md.

Only the standard library is needed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TOP = Path(__file__).parent.parent


def notes(tag: str, top: Path = TOP) -> str:
    """What the changelog says of a release; `ValueError` says what has to be done first."""
    (version,) = re.findall(r'^version = "(.*)"$', (top / "pyproject.toml").read_text(), re.MULTILINE)
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and pyproject.toml has the version {version}: the tag must be v{version}")
    (site,) = re.findall(r"^site_url: (\S+)$", (top / "mkdocs.yml").read_text(), re.MULTILINE)
    if re.match(r"https://[^/]*\.example/", site):
        raise ValueError(f"site_url of mkdocs.yml is {site}, which does not exist: alerts link to it")
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", (top / "CHANGELOG.md").read_text(), re.MULTILINE))
    if version not in sections:
        raise ValueError(f'CHANGELOG.md has no heading "## {version}", but {", ".join(sections)}')
    return f"{sections[version].strip()}\n"


def main(arguments: list[str]) -> int:
    try:
        print(notes(*arguments), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
