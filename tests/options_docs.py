"""Reads the tables of docs/options.md, for the tests that keep them true."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "options.md"


def tables(first_column: str) -> dict[str, list[dict[str, str]]]:
    """Rows of each table whose first column has that name, by the heading above it; a row by the names of columns."""
    found: dict[str, list[dict[str, str]]] = {}
    heading, columns = "", None
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if not cells:
            columns = None
        elif columns is None:
            columns = cells
        elif columns[0] == first_column and not set(line) <= set("|- "):
            assert len(cells) == len(columns), f"a row of {heading} has {len(cells)} cells: {line}"
            found.setdefault(heading, []).append(dict(zip(columns, cells, strict=True)))
    return found


def code(cell: str) -> str:
    """The text between the backticks of a cell that holds nothing else; other cells as they are."""
    return cell[1:-1] if cell.startswith("`") and cell.endswith("`") else cell
