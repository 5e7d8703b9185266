# SPDX-License-Identifier: Apache-2.0
"""The bench runs, writes what it says, and its README documents each figure. No time is looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench import ROOT
from bench.__main__ import main
from bench.figure import Book, Figure, Measured, quantile
from bench.register import BENCHES, Bench
from bench.world import World


def test_a_quick_run_prints_a_table_writes_json_and_leaves_nothing(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--only", "floor,list", "--json", str(report)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary), "OPEN_SANDBOX_DOMAIN": "127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(report.read_text())
    assert document["schema"] == 1
    assert document["failed"] == []
    assert document["options"] == {"only": ["floor", "list"], "rounds": None, "quick": True}
    assert document["machine"]["cores"] == os.cpu_count()
    assert {"kernel", "load", "cpu", "memoryBytes", "python", "user"} <= document["machine"].keys()
    wanted = [figure for bench in BENCHES if bench.name in ("floor", "list") for figure in bench.figures]
    assert [line["name"] for line in document["figures"]] == [figure.name for figure in wanted]
    for line, figure in zip(document["figures"], wanted, strict=True):
        assert line["value"] >= 0
        assert line["p95"] >= line["value"]
        assert (line["unit"], line["target"]) == (figure.unit, figure.target)
        assert line["verdict"] in (("ok", "above") if figure.target else ("",))
        assert figure.name in done.stdout
    assert [*temporary.glob("osb-bench-*")] == []


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_the_readme_documents_each_figure(bench: Bench) -> None:
    page = (ROOT / "bench" / "README.md").read_text()
    section = page.partition(f"\n## `{bench.name}`\n")[2].partition("\n## ")[0]
    assert [figure.name for figure in bench.figures if f"`{figure.name}`" not in section] == []


def test_names_are_given_once() -> None:
    names = [figure.name for bench in BENCHES for figure in bench.figures]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("figure", "value", "floor", "verdict"),
    [
        (Figure("a", "", most=10), 10, None, "ok"),
        (Figure("a", "", most=10), 10.1, None, "above"),
        (Figure("a", "", least=60), 60, None, "ok"),
        (Figure("a", "", least=60), 59, None, "below"),
        (Figure("a", "", most_floors=3), 6, 2, "ok"),
        (Figure("a", "", most_floors=3), 6.1, 2, "above"),
        (Figure("a", ""), 6, 2, ""),
        (Figure("a", "", most=10), None, None, "not there"),
    ],
)
def test_verdict(figure: Figure, value: float | None, floor: float | None, verdict: str) -> None:
    assert Measured(figure, "a", value, floor=floor).verdict == verdict


def test_quantile() -> None:
    values = [*range(100, 0, -1)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile([7], 0.95)) == (50, 95, 7)


def test_what_fails_or_is_missed_decides_the_exit_code(tmp_path: Path) -> None:
    def slow(_: World, book: Book) -> None:
        book.value("slow", 2)

    def broken(_: World, book: Book) -> None:
        book.missing("absent", "for a reason")
        raise RuntimeError("it broke")

    report = ["--json", str(tmp_path / "bench.json")]
    missed = Bench("missed", (Figure("slow", "", most=1), Figure("forgotten", "")), slow)
    failing = Bench("failing", (Figure("absent", "", most=1),), broken)
    assert main(report, [missed]) == 0
    assert main([*report, "--check"], [missed]) == 1
    # Whatever becomes of one, the others are measured.
    assert main(report, [failing, missed]) == 1
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["failed"] == [{"bench": "failing", "error": "RuntimeError: it broke"}]
    told = [(line["name"], line["verdict"], line["note"]) for line in document["figures"]]
    assert told == [
        ("absent", "not there", "for a reason"),
        ("slow", "above", ""),
        ("forgotten", "not there", "not measured"),
    ]


def test_a_name_that_is_none_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "nonsense"])
    assert ended.value.code == 2
    assert "there are: floor, life" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # before anything was written
    try:
        listing = [sys.executable, "-m", "bench", "--list"]
        done = subprocess.run(listing, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 141
