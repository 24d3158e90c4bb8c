"""Published runs of real clusters against what autopar predicts for them.

    python benchmarks/published.py RUNS.json [--json OUT] [--only TEXT] [--each] [--wrong] [--plot FILE]

RUNS.json is a list of records with the fields of ``reference/records.py``; one without a measured time is predicted and not scored
(``reference/more_runs.json`` has 234 more of the pages that the first 267 came from). Each is planned by the `Manual` of its configuration,
with the shipped profiles of its devices and links and a stack profile of its software (``reference/stacks.json``: a kernel, six numbers
and seventeen facts for each stack, none for a model or a record), and played with its schedule (``reference/predict.py``). ``--plot`` needs
matplotlib: ``pip install -c constraints.txt -e '.[benchmarks]'``.

For each source it prints the error (predicted over measured, less one): median and mean of its absolute value, the bias; Kendall's tau-b
over its runs, over its pairs that differ by more than the noise of measurements, and over the runs of one model on one kind of device; and
of controlled pairs, which differ in one setting, how many are ordered right. What cannot be read or predicted says why, and is not in the
way of others; the status is 1 where nothing is predicted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
sys.path.insert(0, str(Path(__file__).parent / "reference"))

from fields import RecordError
from predict import predict
from records import Record, Unread, load_records
from scores import Row, pairs_text, scored, table, wrong_text

from autopar.errors import AutoparError

FIELDS = (
    "id", "predicted_step_time_s", "measured_step_time_s", "predicted_peak_memory_bytes", "measured_peak_memory_bytes", "note",
)
PICTURES = (".png", ".svg")
NAMED = 5
"""Records that a line names of those it speaks of."""


def predicted_rows(records: Sequence[Record], report: Callable[[str], None]) -> list[Row]:
    """Predict all, those of one model in one process."""
    groups: dict[object, list[tuple[int, Record]]] = defaultdict(list)
    for place, record in enumerate(records):
        groups[record.dims.family, record.dims.hidden, record.dims.seq].append((place, record))
    ordered = sorted(groups.values(), key=len, reverse=True)
    rows, started = dict[int, Row](), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(max(1, min(len(ordered), os.cpu_count() or 1))) as pool:
        for done in pool.imap_unordered(_predict_group, ordered):
            rows |= done
            report(f"[{time.monotonic() - started:4.0f} s] {len(rows)} of {len(records)} records")
    return [rows[place] for place in range(len(records))]


def _predict_group(records: list[tuple[int, Record]]) -> dict[int, Row]:
    import torch  # in the worker

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    return {place: _predicted(record) for place, record in sorted(records, key=lambda r: (repr(r[1].dims), r[1].global_batch))}


def _predicted(record: Record) -> Row:
    try:
        return Row(record, predict(record), "")
    except (RecordError, AutoparError) as error:
        return Row(record, None, " ".join(str(error).split()))
    except Exception as error:  # is told, and is not that of the other records
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
        return Row(record, None, f"nobody foresaw a record like this ({what}); report it with the record")


def _json_rows(rows: Iterable[Row], unread: Iterable[Unread]) -> list[dict[str, object]]:
    found = [
        (r.id, p and p.step_time_s, r.step_time_s, p and p.peak_memory_bytes, r.peak_memory_bytes, p.note if p else why)
        for r, p, why in rows
    ]
    found += [(r.id, None, r.step_time_s, None, r.peak_memory_bytes, r.why) for r in unread]
    return [dict(zip(FIELDS, row, strict=True)) for row in found]


def _line(row: Row) -> str:
    measured = "-" if row.record.step_time_s is None else f"{row.record.step_time_s:.3f}"
    error = f"{row.error:+7.1%}" if scored([row]) else "      -"
    found = f"{row.predicted.step_time_s:9.3f} {error}  {row.predicted.note}" if row.predicted else row.why
    return f"{_plain(row.record.id):60.60s} {measured:>9} {found}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS.json")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write a list of what was predicted and measured")
    parser.add_argument("--only", metavar="TEXT", help="records whose id or source has this in it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted against measured; .png or .svg")
    parser.add_argument("--each", action="store_true", help="print a line for each record")
    parser.add_argument("--wrong", action="store_true", help="print the pairs of a source that are ordered wrong beyond noise")
    args = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        records, unread = load_records(args.runs)
    except RecordError as error:
        parser.error(str(error))
    if args.only is not None:
        records, unread = ([r for r in found if args.only in f"{r.id} {r.source}"] for found in (records, unread))
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install -c constraints.txt -e '.[benchmarks]'")
    if args.plot and args.plot.suffix not in PICTURES:
        parser.error(f"--plot {args.plot}: pictures are {' or '.join(PICTURES)}, by the end of the name")
    for out in filter(None, (args.json, args.plot)):
        if out.is_dir():
            parser.error(f"{out} is a folder; give a file in it to write to")
        if not out.absolute().parent.is_dir():
            parser.error(f"no folder {out.parent} to write {out.name} to")
    if not records and not unread:
        parser.error(f"{args.runs} holds no record" + (f" that has {args.only!r} in its id or source" if args.only else ""))
    rows = predicted_rows(records, lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        args.json.write_text(json.dumps(_json_rows(rows, unread), indent=1, allow_nan=False) + "\n")
    if args.each:
        for row in rows:
            print(_line(row))
    if args.wrong:
        print(wrong_text(rows))
    print(table(rows))
    print(pairs_text(rows))
    if unmeasured := sum(row.record.step_time_s is None for row in rows):
        print(f"- not measured, and so not scored: {unmeasured}")
    if large := [row.record.id for row in rows if row.predicted and not row.predicted.fits]:
        print(f"- predicted not to fit, {_counted(large)}")
    for why, ids in _reasons(rows, unread):
        print(f"- not predicted, {_counted(ids)}: {_plain(why)}")
    if args.plot:
        points = [(row.record.publisher, *row.times_s) for row in scored(rows)]
        if not points:
            parser.error(f"nothing to draw in {args.plot}: no record was both measured and predicted")
        from plot import draw  # here, since only pictures need matplotlib

        draw(points, f"{len(points)} published runs", args.plot)
    return 0 if any(row.predicted for row in rows) else 1


def _reasons(rows: Iterable[Row], unread: Iterable[Unread]) -> list[tuple[str, list[str]]]:
    """Why records are not predicted, and which, the most frequent reason first."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, why in (*((row.record.id, row.why) for row in rows if row.why), *((record.id, record.why) for record in unread)):
        found[why].append(name)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def _counted(ids: Sequence[str]) -> str:
    """How many, and the first of them by name."""
    more = [f"{len(ids) - NAMED} more"] if len(ids) > NAMED else []
    return f"{len(ids)} ({', '.join((*map(_plain, ids[:NAMED]), *more))})"


def _plain(text: str) -> str:
    """On one line, whatever a file calls its records."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


if __name__ == "__main__":
    sys.exit(main())
