"""A report in the forms that other tools read: JUnit XML for CI, Markdown for a pull request.

Pure functions of a report; a run writes both beside report.json.
"""

from typing import Any
from xml.etree import ElementTree as ET

from loadtests.outcomes import NOT_RUN
from loadtests.report_text import compliance_text, limit_text, value_text


def junit(report: dict[str, Any]) -> bytes:
    """One test case for each objective, one suite for each profile.

    FAIL is a failure, INVALID an error; INCONCLUSIVE and NOT_RUN are skipped: a CI that wants them red reads the exit
    code. Broken checks of a measurement are a case of their own, an error.
    """
    name = report["contract"]["name"]
    root = ET.Element("testsuites", name=name)
    for profile in report["profiles"]:
        suite = ET.SubElement(root, "testsuite", name=f"{name}.{profile['id']}")
        cases = [_case(suite, profile, objective) for objective in profile["objectives"]]
        cases.append(_measurement(suite, profile))
        for key in ("failure", "error", "skipped"):
            suite.set(f"{key}s" if key != "skipped" else key, str(sum(case == key for case in cases)))
        suite.set("tests", str(len(cases)))
        suite.set("time", f"{profile['load']['measured_s']:g}")
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _case(suite: ET.Element, profile: dict[str, Any], objective: dict[str, Any]) -> str:
    case = ET.SubElement(suite, "testcase", classname=profile["id"], name=objective["id"])
    status = "INVALID" if profile["status"] == "INVALID" else objective["status"]
    kind = {"PASS": "", "FAIL": "failure", "INVALID": "error"}.get(status, "skipped")
    text = f"{status}: {limit_text(objective)}, measured {value_text(objective)} over {objective['n']}"
    if kind:
        ET.SubElement(case, kind, message=text)
    ET.SubElement(case, "system-out").text = f"{text}; compliance {compliance_text(objective)}"
    return kind


def _measurement(suite: ET.Element, profile: dict[str, Any]) -> str:
    case = ET.SubElement(suite, "testcase", classname=profile["id"], name="the measurement can be trusted")
    broken = [f"{check['name']}: {check['text']}" for check in profile["checks"] if check["ok"] is False]
    if broken:
        ET.SubElement(case, "error", message="; ".join(broken))
        return "error"
    if not profile["checks"]:
        ET.SubElement(case, "skipped", message="was not run")
        return "skipped"
    return ""


def markdown(report: dict[str, Any]) -> str:
    """The verdict as a table for each profile, for a pull request or a chat."""
    verdict, contract = report["verdict"], report["contract"]
    lines = [f"## {verdict['status']}: {contract['name']} revision {contract['revision']}", ""]
    lines += [f"- {_cell(reason)}" for reason in verdict["reasons"]] + ([""] if verdict["reasons"] else [])
    for profile in report["profiles"]:
        load = profile["load"]
        lines += [f"### {profile['id']}: {profile['status']}", ""]
        if profile["status"] == NOT_RUN:
            continue
        lines += [
            f"{profile['counts'].get('scheduled', 0)} requests, {load['achieved_rps']:g}/s over "
            f"{load['measured_s']:g} s, {load['output_tokens_per_s']:g} output tokens/s",
            "",
        ]
        lines += ["| objective | limit | measured | misses | compliance | verdict |", "|---|---|---|---|---|---|"]
        for item in profile["objectives"]:
            missed = f"{sum(item['misses'].values())} of {item['n']}" if item["bounds"] else "-"
            cells = (item["id"], limit_text(item), value_text(item), missed, compliance_text(item), item["status"])
            lines.append("| " + " | ".join(map(_cell, cells)) + " |")
        lines.append("")
    records = f", records sha256 `{sha256[:16]}`" if (sha256 := report["run"]["records_sha256"]) else ""
    lines.append(f"contract sha256 `{contract['sha256'][:16]}`{records}, run {report['run']['run_id']}")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
