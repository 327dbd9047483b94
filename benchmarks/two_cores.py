"""How fast is a core while the other is busy? A machine lent by a host may answer otherwise from one minute to the next.

python benchmarks/two_cores.py [SECONDS]: on the first and the last core that this process may use, the same work (reading 256 MiB of bf16
weights, by the engine's own kernel) alone and beside a twin; a line every few seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median
from time import monotonic

import torch

from ssd.devices import available_cores, pin
from ssd.engine.linear import FastLinear

WIDTH, ROWS = 4096, 32768


def work(seconds: float) -> float:
    """Return the median seconds of one pass over the weights, repeated for so long."""
    layer = FastLinear(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16))
    x = torch.ones(3, WIDTH)
    layer(x)
    took, end = [], monotonic() + seconds
    while monotonic() < end:
        begin = monotonic()
        layer(x)
        took.append(monotonic() - begin)
    return median(took)


def main() -> None:
    """Alternate: this core alone, then beside a twin on the other."""
    if sys.argv[1:2] == ["--twin"]:
        pin((sys.argv[2],))
        work(float(sys.argv[3]))
        return
    first, last = (f"cpu:{core}" for core in (available_cores()[0], available_cores()[-1]))
    begin, limit = monotonic(), float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    pin((first,))
    while monotonic() - begin < limit:
        alone = work(2.0)
        twin = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--twin", last, "8"])
        work(4.0)
        beside = work(2.0)
        twin.wait()
        size = 2 * ROWS * WIDTH / 2**30
        rates = f"{size / alone:5.1f} GiB/s alone, {size / beside:5.1f} beside a busy core: {alone / beside:.2f}"
        print(f"{monotonic() - begin:6.0f} s: {rates}", flush=True)


if __name__ == "__main__":
    main()
