"""The numbers of docs/results.md and README.md are those of the runs, as docs/results/*.csv has them."""
import csv
import re
from pathlib import Path

import pytest

import compare
import report

ROOT = Path(__file__).resolve().parents[1]


def numbers(name):
    """-> {(curve, what): {seed: value}} of a study, and {curve: number of its runs}."""
    values, runs = {}, {}
    with open(ROOT / "docs" / "results" / f"{name}.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values.setdefault((row["curve"], row["what"]), {})[row["seed"]] = float(row["value"])
            runs.setdefault(row["curve"], set()).add(row["run"])
    return values, {curve: str(len(found)) for curve, found in runs.items()}


def tables(page):
    """-> [(study, curve that the others are compared to or None, intervals that the note counts or None, [cells of each row])]
    of the tables whose rows are curves."""
    study = base = said = None
    found = []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if link := re.search(r"results/(\w+)\.csv", line):
            study = link[1]
        if title := re.match(r"\*\*(?:Results|Difference to ([^,]*?))(?:,.*)?\.\*\*", line):
            base, said = title[1], re.search(r"Of (\d+) intervals, about ([\d.]+) would", line)
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] in ("curve", "encoding"):
            found.append((study, base, said if cells[0] == "curve" else None, [cells]))
        elif cells and found and "---" not in cells[0]:
            found[-1][3].append(cells)
    return found


@pytest.mark.parametrize("page", ["docs/results.md", "README.md"])
def test_tables_are_recomputed_from_the_runs(page):
    checked = 0
    for study, base, said, (header, *rows) in tables(page):
        values, runs = numbers(study)
        if said:
            count = sum("±" in cell for row in rows for cell in row)
            assert said.groups() == (str(count), f"{count / 20:.1f}"), f"{page}, {study}: {said[0]}"
        for curve, *cells in rows:
            for what, cell in zip(header[1:], cells, strict=True):
                if header[0] == "encoding":  # of each the validation loss, at different rates
                    assert cell == compare.spread(list(values[(f"{curve}-{what}", "validation loss")].values()), 3), curve
                    checked += 1
                    continue
                ours, theirs = values.get((curve, what), {}), values.get((base, what), {})
                pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
                if what == "runs":
                    expected = runs[curve]
                elif what == "parameters":
                    continue
                elif base:
                    expected = report.verdict(pairs) if pairs else "-"
                else:
                    expected = compare.spread(list(ours.values()), 3)
                assert cell == expected, f"{page}, {study}: {curve}, {what}"
                checked += 1
    assert checked > 20
