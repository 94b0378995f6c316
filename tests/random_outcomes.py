"""What random programs do on an engine, each run a process of its own, so that a crash of torch's is a finding, too.

To look at one seed: ``python tests/random_outcomes.py eager 4962``.
"""

import faulthandler
import json
import os
import subprocess
import sys

import torch
from paths import ROOT, TESTS
from random_agreement import Outcome, examine
from random_programs import draw_program


def outcomes(engine, start, stop):
    """Run the programs of some seeds; go on after one that ends the process."""
    while start < stop:
        command = [sys.executable, __file__, engine, str(start), str(stop)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        for line in done.stdout.splitlines():
            outcome = Outcome(**json.loads(line))
            start = outcome.seed + 1
            yield outcome
        if done.returncode:
            yield Outcome(start, "finding", f"the process ended with {done.returncode}: {done.stderr[-2000:]}")
            start += 1


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    name, first, *last = sys.argv[1:]
    for seed in range(int(first), int(last[0]) if last else int(first) + 1):
        outcome = examine(seed, name, small=name == "compiled")
        if last:
            print(json.dumps(vars(outcome)), flush=True)
        else:
            print(draw_program(seed, small=name == "compiled"), outcome.kind, outcome.why, sep="\n")
