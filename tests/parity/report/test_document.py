"""The report as JSON and as JUnit XML."""

import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from parity import tolerances
from parity.compare import Comparison
from parity.report import to_json, write_folder, write_json
from parity.report.files import write_whole
from parity.report.junit import to_junit

# The shape that Jenkins, GitLab and others read.
SCHEMA = """<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema">
<xs:complexType name="problem" mixed="true">
  <xs:attribute name="message" type="xs:string"/><xs:attribute name="type" type="xs:string"/>
</xs:complexType>
<xs:attributeGroup name="counts">
  <xs:attribute name="name" type="xs:string" use="required"/>
  <xs:attribute name="tests" type="xs:nonNegativeInteger" use="required"/>
  <xs:attribute name="failures" type="xs:nonNegativeInteger" use="required"/>
  <xs:attribute name="errors" type="xs:nonNegativeInteger"/>
  <xs:attribute name="skipped" type="xs:nonNegativeInteger"/>
  <xs:attribute name="time" type="xs:decimal"/>
</xs:attributeGroup>
<xs:element name="testsuites"><xs:complexType><xs:sequence>
  <xs:element name="testsuite" maxOccurs="unbounded"><xs:complexType><xs:sequence>
    <xs:element name="properties" minOccurs="0"><xs:complexType><xs:sequence>
      <xs:element name="property" maxOccurs="unbounded"><xs:complexType>
        <xs:attribute name="name" type="xs:string" use="required"/>
        <xs:attribute name="value" type="xs:string" use="required"/>
      </xs:complexType></xs:element>
    </xs:sequence></xs:complexType></xs:element>
    <xs:element name="testcase" maxOccurs="unbounded"><xs:complexType><xs:choice minOccurs="0">
      <xs:element name="failure" type="problem"/><xs:element name="skipped" type="problem"/>
    </xs:choice>
      <xs:attribute name="name" type="xs:string" use="required"/>
      <xs:attribute name="classname" type="xs:string" use="required"/>
      <xs:attribute name="time" type="xs:decimal"/>
    </xs:complexType></xs:element>
  </xs:sequence>
    <xs:attributeGroup ref="counts"/><xs:attribute name="timestamp" type="xs:dateTime"/>
  </xs:complexType></xs:element>
</xs:sequence><xs:attributeGroup ref="counts"/></xs:complexType></xs:element>
</xs:schema>"""


def cases(report: Any) -> dict[tuple[str, str], ET.Element]:
    text = to_junit(to_json(report))
    etree.XMLSchema(etree.fromstring(SCHEMA)).assertValid(etree.fromstring(text.encode()))
    found = {
        (case.get("classname") or "", case.get("name") or ""): case for case in ET.fromstring(text).iter("testcase")
    }
    root = ET.fromstring(text)
    assert int(root.get("tests") or 0) == len(found), "each case has a name of its own"
    assert int(root.get("failures") or 0) == sum(case.find("failure") is not None for case in found.values())
    return found


def test_json_holds_every_comparison_with_its_rule(equal: Any) -> None:
    document = to_json(equal)
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [rung["number"] for rung in document["rungs"]] == list(range(1, 18))
    for rung, entry in zip(equal.rungs, document["rungs"], strict=True):
        assert entry["status"] == rung.status
        assert sum(len(section["comparisons"]) for section in entry["sections"]) == rung.compared
    section = document["rungs"][5]["sections"][1]
    assert section["rule"] == "the float32 rule"
    assert section["comparisons"][0]["reference"] == 1.9e-7
    assert {"versions", "platform", "jax_devices", "date"} <= document["environment"].keys()


def test_every_bound_of_tolerances_is_there_with_its_reason(equal: Any) -> None:
    bounds = {bound["name"]: bound for bound in to_json(equal)["bounds"]}
    assert bounds["FLOAT64_RELATIVE"]["value"] == f"{tolerances.FLOAT64_RELATIVE:.2g}"
    assert "real porting bug" in bounds["FLOAT64_RELATIVE"]["reason"]
    constants = {name for name, value in vars(tolerances).items() if name.isupper() and isinstance(value, (int, float))}
    assert constants <= bounds.keys(), "a bound without a reason"


def test_what_is_not_finite_is_a_word(unequal: Any) -> None:
    endless = Comparison(tensor="x", error=float("inf"), bound=1e-12)
    unknown = Comparison(tensor="y", error=float("nan"), bound=1e-12)
    first = unequal.rungs[0]
    section = dataclasses.replace(first.outcome.sections[0], comparisons=(endless, unknown))
    rung = dataclasses.replace(first, outcome=dataclasses.replace(first.outcome, sections=(section,)))
    document = to_json(dataclasses.replace(unequal, rungs=(rung, *unequal.rungs[1:])))
    found = document["rungs"][0]["sections"][0]["comparisons"]
    assert [c["error"] for c in found] == ["inf", "nan"]
    assert not any(c["passed"] for c in found)


def test_junit_has_a_case_for_every_section_and_the_verdict(equal: Any) -> None:
    found = cases(equal)
    assert ("parity.06_forward", "float64: modules and results") in found
    assert ("parity.06_forward", "float32: modules and results") in found
    skipped = found["parity.15_decoding", "decoding"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == equal.rung("decoding").skipped
    assert found["parity", "verdict"].find("failure") is None


def test_junit_says_what_failed_and_what_was_not_reached(unequal: Any) -> None:
    found = cases(unequal)
    failure = found["parity.06_forward", "float64: modules and results"].find("failure")
    assert failure is not None
    assert "layers.1.norm: error 3e-07, bound 1e-12" in (failure.text or "")
    assert found["parity.09_gradients", "every parameter's gradient"].find("skipped") is not None
    verdict = found["parity", "verdict"].find("failure")
    assert verdict is not None
    assert "First module that differs: layers.1.norm" in (verdict.text or "")
    assert "eps is 1e-6" in (verdict.text or "")


def test_a_check_in_which_all_was_skipped_is_not_green(equal: Any) -> None:
    rungs = tuple(dataclasses.replace(rung, skipped="no port") for rung in equal.rungs)
    assert cases(dataclasses.replace(equal, rungs=rungs))["parity", "verdict"].find("failure") is not None


def test_a_folder_holds_three_whole_files(equal: Any, tmp_path: Path) -> None:
    written = write_folder(equal, tmp_path / "deep" / "report")
    assert sorted(path.name for path in (tmp_path / "deep" / "report").iterdir()) == sorted(p.name for p in written)
    assert {path.name for path in written} == {"report.json", "junit.xml", "index.html"}


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("precious")
    with pytest.raises(ValueError, match="Out of range float"):
        write_json({"error": float("nan")}, path)
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]
