"""Make a source tree's entry points visible without installing it (no registry, no build tools).

    python benchmarks/gpu/register.py TREE SITE

Writes ``SITE/adaspec-VERSION.dist-info`` from TREE's pyproject.toml;
SITE and TREE must both be on PYTHONPATH.
"""

import sys
import tomllib
from pathlib import Path


def main(tree: Path, site: Path) -> None:
    """Write METADATA and entry_points.txt."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
