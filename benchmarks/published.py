"""Published runs of real clusters against what autopar predicts for them.

    python benchmarks/published.py RUNS.json [--json OUT] [--only TEXT] [--each] [--wrong] [--plot FILE]

RUNS.json is a list of records with the fields of ``reference/records.py``. Each is planned by the `Manual` of its configuration, with the
shipped profiles of its devices and links and a stack profile of its software (``reference/stacks.json``: a kernel, five numbers and six
facts for each stack, none for a model or a record), and played with its schedule (``reference/predict.py``). ``--plot`` needs
matplotlib: ``pip install -c constraints.txt -e '.[benchmarks]'``.

For each source it prints the error (predicted over measured, less one): median and mean of its absolute value, the bias; Kendall's tau-b
over its runs, over its pairs that differ by more than the noise of measurements, and over the runs of one model on one kind of device; and
of controlled pairs, which differ in one setting, how many are ordered right. What cannot be predicted says why.
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cluster"))
sys.path.insert(0, str(Path(__file__).parent / "reference"))

from predict import predict
from records import Record, RecordError, load_records
from scores import Row, pairs_text, table, wrong_text

from autopar.errors import AutoparError


def predicted_rows(records: Sequence[Record], report: Callable[[str], None]) -> list[Row]:
    """Predict all, those of one model in one process."""
    groups: dict[object, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.dims.family, record.dims.hidden, record.dims.seq].append(record)
    ordered = sorted(groups.values(), key=len, reverse=True)
    rows, started = [], time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(len(ordered), os.cpu_count() or 1)) as pool:
        for done in pool.imap_unordered(_predict_group, ordered):
            rows += done
            report(f"[{time.monotonic() - started:4.0f} s] {len(rows)} of {len(records)} records")
    place = {record.id: i for i, record in enumerate(records)}
    return sorted(rows, key=lambda row: place[row.record.id])


def _predict_group(records: list[Record]) -> list[Row]:
    import torch  # in the worker

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    rows = []
    for record in sorted(records, key=lambda r: (repr(r.dims), r.global_batch)):
        try:
            rows.append(Row(record, predict(record), ""))
        except (RecordError, AutoparError) as error:
            rows.append(Row(record, None, f"{type(error).__name__}: {error}"))
    return rows


def _json_row(row: Row) -> dict[str, object]:
    return {
        "id": row.record.id,
        "predicted_step_time_s": row.predicted.step_time_s if row.predicted else None,
        "measured_step_time_s": row.record.step_time_s,
        "predicted_peak_memory_bytes": row.predicted.peak_memory_bytes if row.predicted else None,
        "measured_peak_memory_bytes": row.record.peak_memory_bytes,
        "note": row.predicted.note if row.predicted else row.why,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS.json")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write a list of what was predicted and measured")
    parser.add_argument("--only", metavar="TEXT", help="records whose id or source has this in it")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted against measured; .png or .svg")
    parser.add_argument("--each", action="store_true", help="print a line for each record")
    parser.add_argument("--wrong", action="store_true", help="print the pairs of a source that are ordered wrong beyond noise")
    args = parser.parse_args()
    try:
        records = [r for r in load_records(args.runs) if args.only is None or args.only in f"{r.id} {r.source}"]
    except RecordError as error:
        parser.error(str(error))
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install -c constraints.txt -e '.[benchmarks]'")
    if not records:
        parser.error(f"no record has {args.only!r} in its id or source")
    rows = predicted_rows(records, lambda text: print(text, file=sys.stderr, flush=True))
    if args.each:
        for row in rows:
            found = f"{row.predicted.step_time_s:9.3f} {row.error:+7.1%}  {row.predicted.note}" if row.predicted else row.why
            print(f"{row.record.id:60.60s} {row.record.step_time_s:9.3f} {found}")
    if args.wrong:
        print(wrong_text(rows))
    print(table(rows))
    print(pairs_text(rows))
    for why, count in _reasons(rows):
        print(f"- not predicted, {count}: {why}")
    if args.plot:
        points = [(row.record.publisher, row.record.step_time_s, row.predicted.step_time_s) for row in rows if row.predicted]
        from plot import draw  # here, since only pictures need matplotlib

        draw(points, f"{len(points)} published runs", args.plot)
    if args.json:
        args.json.write_text(json.dumps([_json_row(row) for row in rows], indent=1) + "\n")
    return 0


def _reasons(rows: Iterable[Row]) -> list[tuple[str, int]]:
    counted: dict[str, int] = defaultdict(int)
    for row in rows:
        if row.why:
            counted[row.why] += 1
    return sorted(counted.items(), key=lambda item: -item[1])


if __name__ == "__main__":
    sys.exit(main())
