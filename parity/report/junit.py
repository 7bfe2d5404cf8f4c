"""JUnit XML: one test case for every section of a rung, one for a rung without any, and one for the verdict.

The verdict is a case of its own because a check in which everything was skipped would be green without it.
"""

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from typing import Any

from parity.report.verdict import Verdict

Document = Mapping[str, Any]
LISTED = 20
"""Failed comparisons in the text of a failure."""
EQUAL: Verdict = "equal"


def to_junit(document: Document) -> str:
    """The XML, declaration included. `document` is what document.to_json returns."""
    cases = [case for rung in document["rungs"] for case in _cases(rung)]
    cases.append(_verdict(document))
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
        "time": f"{document['seconds']:.3f}",
    }
    root = ET.Element("testsuites", {"name": "parity", **{k: v for k, v in counts.items()}})
    timestamp = document["environment"]["date"].partition("+")[0]
    suite = ET.SubElement(root, "testsuite", {"name": _text(document["name"]), **counts, "timestamp": timestamp})
    properties = ET.SubElement(suite, "properties")
    for name, version in document["environment"]["versions"].items():
        ET.SubElement(properties, "property", {"name": name, "value": version})
    suite.extend(cases)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _cases(rung: Mapping[str, Any]) -> Iterator[ET.Element]:
    classname = f"parity.{rung['number']:02d}_{rung['name']}"
    if rung["status"] in ("skipped", "not reached") or not rung["sections"]:
        case = _case(classname, rung["title"], rung["seconds"])
        if rung["status"] == "failed":
            ET.SubElement(case, "failure", {"message": "nothing was compared", "type": "empty"})
        else:
            message = rung["skipped"] or "not reached: a rung before it is broken"
            ET.SubElement(case, "skipped", {"message": _text(message)})
        yield case
        return
    seconds = rung["seconds"] / len(rung["sections"])
    for section in rung["sections"]:
        case = _case(classname, f"{section['precision']}: {section['title']}", seconds)
        failed = [c for c in section["comparisons"] if not c["passed"]]
        if not section["passed"]:
            message = f"{len(failed)} of {len(section['comparisons'])} beyond their bound ({section['rule']})"
            failure = ET.SubElement(case, "failure", {"message": _text(message), "type": section["precision"]})
            failure.text = _text("\n".join(_lines(failed)))
        yield case


def _lines(failed: list[Mapping[str, Any]]) -> Iterator[str]:
    for c in failed[:LISTED]:
        yield f"{c['tensor']}: error {c['error']}, bound {c['bound']}" + (f" ({c['detail']})" if c["detail"] else "")
    if len(failed) > LISTED:
        yield f"and {len(failed) - LISTED} more"


def _verdict(document: Document) -> ET.Element:
    case = _case("parity", "verdict", 0.0)
    if document["verdict"] != EQUAL:
        failure = ET.SubElement(case, "failure", {"message": document["verdict"], "type": "verdict"})
        first, diagnosis = document["first_difference"], document["diagnosis"]
        lines = [document["coverage"]]
        lines += [first["sentence"]] if first else []
        lines += [diagnosis["sentence"]] if diagnosis else []
        failure.text = _text("\n".join(lines))
    return case


def _case(classname: str, name: str, seconds: float) -> ET.Element:
    return ET.Element("testcase", {"classname": classname, "name": _text(name), "time": f"{seconds:.3f}"})


def _text(text: str) -> str:
    """Without the control characters that XML cannot hold, whatever a tensor is called."""
    return "".join(c if c in "\t\n" or ord(c) >= 32 else "?" for c in text)
