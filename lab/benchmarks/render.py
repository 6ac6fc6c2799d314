"""Any benchmark's report as Markdown, on the terminal.

    python -m benchmarks.render ttft
    python -m benchmarks.render answers --table scores --where model=qwen05 half=2

Named values become sentences, lists of alike objects tables; what is nested in a row becomes
columns of its own.  Single samples and `raw` are left out.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.common import RAW, RESULTS, read, result_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rendered(report: Mapping[str, Any], depth: int = 2) -> str:
    """A report, or a part of one."""
    plain = {name: value for name, value in report.items() if _is_plain(value)}
    parts = ["; ".join(f"{_name(name)} {cell(value)}" for name, value in plain.items()) + "."]
    parts = parts if plain else []
    for name, value in report.items():
        if name == RAW or not value or name in plain:
            continue
        head = f"{'#' * min(depth, 6)} {_name(name)}\n\n"
        if isinstance(value, dict) and _are_alike([*value.values()]):
            parts.append(head + table([{"name": one, **row} for one, row in value.items()]))
        elif isinstance(value, dict):
            parts.append(head + rendered(value, depth + 1))
        elif isinstance(value, list) and isinstance(value[0], dict):
            parts.append(head + table(value))
    return "\n\n".join(parts)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of alike objects, a column for each value that any of them has."""
    flat = [_flat(row) for row in rows]
    header = list(dict.fromkeys(name for row in flat for name in row))
    cells = [[cell(row.get(name)).replace("|", "\\|") for name in header] for row in flat]
    return markdown([_name(name) for name in header], cells)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if _is_plain(value):
            found[name] = value
        elif isinstance(value, dict):
            found |= {f"{name}: {inner}": one for inner, one in _flat(value).items()}
    return found


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether they can be rows of a table, in which no list would be lost."""
    if len(values) < 2 or not all(isinstance(one, dict) for one in values):
        return False
    return not any(isinstance(inner, list) for one in values for inner in one.values())


def _name(name: str) -> str:
    return name.replace("_", " ")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float)) or _is_interval(value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, dict) and {"value", "low", "high"} <= set(value)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if _is_interval(value):
        low, high = cell(value["low"]), cell(value["high"])
        return cell(value["value"]) + (f" ({low} to {high})" if low != high else "")
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else f"{value}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report, or rows of one of its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=sorted(path.stem for path in RESULTS.glob("*.json")))
    parser.add_argument("--table", help="one table alone")
    parser.add_argument("--where", nargs="+", default=[], metavar="COLUMN=VALUE", help="its rows")
    parsed = parser.parse_args(arguments)
    report = read(result_file(parsed.name))
    if parsed.table is None:
        print(f"# {parsed.name}\n\n{rendered(report)}")
        return 0
    tables = [name for name, value in report.items() if isinstance(value, list)]
    if parsed.table not in tables:
        parser.error(f"--table knows {', '.join(tables)}")
    wanted = dict(word.split("=", 1) for word in parsed.where)
    rows = [
        row
        for row in report[parsed.table]
        if all(cell(row.get(name)) == value for name, value in wanted.items())
    ]
    print(table(rows) if rows else "no such row")
    return 0


if __name__ == "__main__":
    sys.exit(main())
