"""Write the pages that the browser opens: ``python -m tests.show.write_pages FOLDER`` (`make test-browser`)."""

from __future__ import annotations

import runpy
import sys
from contextlib import closing
from pathlib import Path

import autopar
from autopar import Manual
from tests.models import gpt2
from tests.pool import RankPool
from tests.show.record_steps import train

EXAMPLES = Path(__file__).parents[2] / "examples"


def write_pages(folder: Path) -> None:
    """GPT-2 on 4 ranks by four plans and with prices, a small one with measured steps, and GPT-3 175B on 1,024 by its example."""
    folder.mkdir(parents=True, exist_ok=True)
    with closing(RankPool(4)) as pool:
        pool.run(train, str(folder / "measured_4.html"))
    model, batch = gpt2(layers=12, hidden=768, heads=12, vocab=50304, sequence=1024, batch=32, device="meta")
    configs = {"dp2-tp2": Manual(dp=2, tp=2), "dp4-zero3": Manual(dp=4, zero=3), "pp2-tp2": Manual(pp=2, tp=2, microbatches=8)}
    rows = autopar.compare(model, autopar.Cluster(1, 4, "a100-80gb"), batch, configs, outputs="loss")
    autopar.draw(rows, folder / "gpt2_4.html")
    autopar.plan(model, autopar.Cluster(1, 4, "a100-80gb"), batch, outputs="loss").to_html(folder / "gpt2_auto.html")
    autopar.draw(runpy.run_path(str(EXAMPLES / "gpt3_175b_1024.py"))["rows"], folder / "gpt3_1024.html")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
