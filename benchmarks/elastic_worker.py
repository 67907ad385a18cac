"""A worker of `benchmarks.elastic`: a small elastic training that goes on for some seconds.

python -m benchmarks.elastic_worker STRATEGY SECONDS [SILENCE_S]
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

import thinwire as tw
from thinwire.errors import PeerLost
from thinwire.strategies.registry import from_text

STEP_S = 0.02
BATCH_SIZE = 4
STEPS_PER_EPOCH = 12


def main() -> None:
    strategy, seconds = sys.argv[1], float(sys.argv[2])
    silence_s = float(sys.argv[3]) if len(sys.argv) > 3 else 10.0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    num_samples = int(os.environ["WORLD_SIZE"]) * BATCH_SIZE * STEPS_PER_EPOCH
    data = torch.randn(num_samples, 64)
    with tw.attach(model, optimizer, from_text(strategy), elastic=True, silence_s=silence_s) as link:
        sampler = link.sampler(num_samples, batch_size=BATCH_SIZE)
        began_s = time.monotonic()
        for _ in link.epochs(1_000_000):
            for step in link.each_step(sampler):
                with step as batch:
                    time.sleep(STEP_S)
                    model(data[batch]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if link.all_reduce([float(time.monotonic() - began_s > seconds)])[0] > 0:
                break


if __name__ == "__main__":
    try:
        main()
    except PeerLost as error:
        print(error, flush=True)
        sys.exit(3)
