"""A Report for people and for machines: in the terminal, as JSON, as JUnit XML, as one HTML page that opens offline.

`document.py` turns a Report into plain values, which is what the JSON holds and what the page is made of.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from parity.report.document import to_json
from parity.report.files import write_json, write_whole
from parity.report.terminal import show

if TYPE_CHECKING:
    from parity.ladder import Report

__all__ = ["show", "to_json", "write_folder", "write_json"]


def write_folder(report: "Report", folder: Path) -> tuple[Path, ...]:
    """Writes report.json, junit.xml and index.html, each renamed into place when it is whole. Returns the paths."""
    from parity.report.junit import to_junit
    from parity.report.page import to_html

    document = to_json(report)
    paths = (folder / "report.json", folder / "junit.xml", folder / "index.html")
    write_json(document, paths[0])
    write_whole(paths[1], to_junit(document))
    write_whole(paths[2], to_html(document))
    return paths
