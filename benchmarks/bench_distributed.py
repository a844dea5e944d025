"""Many devices: bits, peaks and plans of steps that several ranks train together.

    python -m benchmarks.bench_distributed sweep [--worlds 2,4] [--models gpt,resnet] [--steps 10]
    python -m benchmarks.bench_distributed agree [--runs 20]
    python -m benchmarks.bench_distributed growth [--worlds 8,64,256,1024]
    python -m benchmarks.bench_distributed pretend
    python -m benchmarks.bench_distributed failures
    python -m benchmarks.bench_distributed pipelines [--worlds 2,4] [--micros 4,8] [--kinds "gpipe,zero bubble"]
    python -m benchmarks.bench_distributed bubbles
    python -m benchmarks.bench_distributed gathers [--ranks 8] [--points 6]
    python -m benchmarks.bench_distributed reshard
    python -m benchmarks.bench_distributed compiled
    python -m benchmarks.bench_distributed device      on one CUDA device, as rank 0 of 8

`sweep` trains plainly and under budgets with DDP, FSDP2 and ZeRO-1 over gloo: losses of every step and parameters at
the end must have equal bits, no step may need more than its budget, and the prediction is compared with what is
measured. `agree` starts ranks with cold caches of their own and compares their plans. `growth` simulates the meeting of
many ranks by threads over one TCP store. `pretend` compares one process that pretends to be rank 0 with real ranks.
`failures` kills and stops ranks. `pipelines` trains stages over gloo under several schedules, plainly and under
budgets, and `bubbles` times steps of one plan that compute again while they wait for a slow rank against those that do
not. `gathers` compares plans that may gather parameters again with those that always or never do, and trains with one
of them; `reshard` does so for FSDP2. `compiled` trains with torch.compile's kernels under DDP and FSDP2. `device`
trains 1.3 billion parameters as rank 0 of 8 pretended ranks.
"""

from __future__ import annotations

import argparse

from benchmarks.ranks import agreement, device, failures, gathered, pretend, stages, sweep

PARTS = (sweep, agreement, pretend, failures, stages, gathered, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for part in PARTS:
        part.add_to(modes)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
