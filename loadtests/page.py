"""The report as one HTML file that needs nothing else: no script, no font, no network."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from loadtests.contract import Contract
from loadtests.outcomes import NOT_RUN
from loadtests.plots import all_plots, waterfalls
from loadtests.records import CampaignRun, ProfileRun
from loadtests.report_text import compliance_text, interval_text, limit_text, value_text

STYLE = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
LEGEND = (
    ("client", "client delay"),
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("emit", "first emit"),
    ("residual", "residual: network, front end, client"),
    ("decode", "decode"),
)


def write_page(path: Path, report: dict[str, Any], contract: Contract, run: CampaignRun) -> None:
    """Write the page of a report."""
    path.write_text(render_page(report, contract, run), encoding="utf-8")


def render_page(report: dict[str, Any], contract: Contract, run: CampaignRun) -> str:
    """The page as text. All text that came from a file or a server is escaped."""
    runs = {part.profile: part for part in run.profiles}
    body = [_head(report)]
    for row in report["profiles"]:
        body.append(_profile(row, contract, runs.get(row["id"], ProfileRun(row["id"], (), ()))))
    body.append(_facts(report))
    title = escape(f"{report['verdict']['status']}: {contract.name}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    content = f"<head>{head}<style>{STYLE}</style></head><body><main>{''.join(body)}</main></body>"
    return f'<!doctype html><html lang="en">{content}</html>'


def _head(report: dict[str, Any]) -> str:
    verdict, contract = report["verdict"], report["contract"]
    status = verdict["status"]
    return (
        f'<h1><span class="verdict {status}">{status}</span>{escape(contract["name"])}</h1>'
        f'<p class="soft">contract revision {contract["revision"]}, <code>{contract["sha256"][:16]}</code>; '
        f"run {escape(str(report['run']['run_id']))} of {escape(str(report['run']['started']))}; "
        f"{_records(report)}exit code {verdict['exit_code']}</p>" + _reasons(verdict["reasons"])
    )


def _records(report: dict[str, Any]) -> str:
    """What a reader compares with the records that were given to them."""
    sha256 = report["run"]["records_sha256"]
    return f"records <code>{sha256[:16]}</code>; " if sha256 else ""


def _reasons(reasons: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in reasons) + "</ul>" if reasons else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already. A column without any text is left out."""
    rows = list(rows)
    kept = [k for k in range(len(head)) if not rows or any(row[k] for row in rows)]
    top = "".join(f"<th>{escape(head[k])}</th>" for k in kept)
    lines = "".join("<tr>" + "".join(f"<td>{row[k]}</td>" for k in kept) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _profile(row: dict[str, Any], contract: Contract, run: ProfileRun) -> str:
    if row["status"] == NOT_RUN:
        return f'<h2><span class="verdict NOT_RUN">NOT_RUN</span>{escape(row["id"])}</h2>'
    profile = contract.profile(row["id"])
    load, counts = row["load"], row["counts"]
    outcomes = (
        ", ".join(f"{count} {status}" for status, count in counts.items() if status != "scheduled") or "no requests"
    )
    lead = (
        f"{counts.get('scheduled', 0)} requests scheduled ({outcomes}); {load['achieved_rps']:g} requests/s and "
        f"{load['output_tokens_per_s']:g} output tokens/s over {load['measured_s']:g} s; "
        f"{load['in_flight']['mean']:.1f} open on average."
    )
    key = "".join(f'<span class="key" style="background:var(--{name})"></span>{text}' for name, text in LEGEND)
    figures = "".join(_figure(*plot) for plot in all_plots(contract, profile, run))
    return (
        f'<h2><span class="verdict {row["status"]}">{row["status"]}</span>{escape(row["id"])}</h2><p>{escape(lead)}</p>'
        + _reasons(row["reasons"])
        + _objectives(row["objectives"])
        + f'<p class="soft">Phases:{key}</p><div class="plots">{figures}</div>'
        + _figure("The ten worst requests", "From when they were due, failed ones first.", waterfalls(run.records))
        + _special(row["special"])
        + _details(row)
    )


def _special(parts: dict[str, Any]) -> str:
    """Tables of tenants and of a quality set, where the profile has them."""
    text = ""
    for name, head in (("tenants", "tenant"), ("quality", "prompt")):
        rows = parts.get(name)
        if rows:
            columns = list(next(iter(rows.values())))
            cells = ((escape(key), *(escape(_plain(row[c])) for c in columns)) for key, row in rows.items())
            text += _table((head, *(column.replace("_", " ") for column in columns)), cells)
    return text


def _plain(value: Any) -> str:
    """A cell's text: counts as a list, no value as nothing."""
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _figure(title: str, text: str, svg: str) -> str:
    return f"<figure><h3>{escape(title)}</h3><figcaption>{escape(text)}</figcaption>{svg}</figure>"


def _objectives(objectives: Sequence[dict[str, Any]]) -> str:
    rows = []
    for item in objectives:
        missed = ", ".join(f"{count} {cause}" for cause, count in sorted(item["misses"].items())) or "none"
        rows.append(
            (
                f'<b class="{item["status"]}-text">{item["status"]}</b>',
                escape(item["id"]),
                escape(limit_text(item)),
                escape(value_text(item)),
                escape(interval_text(item)),
                f"{escape(missed)} of {item['n']}" if item["bounds"] else "",
                escape(compliance_text(item)),
                " ".join("-" if one is None else f"{one:g}" for one in item["repeats"]),
                escape((item["dominant_phase"] or "").replace("_", " ")),
            )
        )
    head = (
        "verdict",
        "objective",
        "limit",
        "measured",
        "interval",
        "misses",
        "compliance",
        "each repeat",
        "late because of",
    )
    return f'<div class="objectives">{_table(head, rows)}</div>'


def _details(row: dict[str, Any]) -> str:
    marks = {True: "ok", False: '<b class="INVALID-text">broken</b>', None: "not available"}
    checks = _table(
        ("check", "", "found"), ((escape(c["name"]), marks[c["ok"]], escape(c["text"])) for c in row["checks"])
    )
    columns = ("n", "p50", "p90", "p95", "p99", "max")
    spread = _table(
        ("of requests that ended ok", *columns),
        (
            (escape(name), *("" if values[column] is None else f"{values[column]:g}" for column in columns))
            for name, values in row["distributions"].items()
        ),
    )
    is_open = " open" if any(check["ok"] is False for check in row["checks"]) else ""
    return (
        f"<details{is_open}><summary>Is the measurement to be trusted?</summary>{checks}</details>"
        f"<details><summary>Distributions</summary>{spread}</details>"
    )


def _facts(report: dict[str, Any]) -> str:
    facts = {**report["identity"], **report["environment"]}
    facts.pop("checks", None)
    packages = facts.pop("packages", {})
    rows = [(name.replace("_", " "), value) for name, value in facts.items() if value is not None]
    rows.append(("packages", ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))))
    rows.append(("salt", report["run"]["salt"]))
    shown = ((escape(name), f"<code>{escape(str(value))}</code>") for name, value in rows)
    meaning = ((escape(name), escape(text)) for name, text in report["definitions"].items())
    return (
        f"<h2>Identity</h2>{_table(('fact', 'value'), shown)}"
        f"<details><summary>Definitions</summary>{_table(('metric', 'meaning'), meaning)}</details>"
    )
