"""An elastic script as users write it, for runs under faults.

python -m tests.chaos.script STRATEGY EPOCHS SILENCE_S [allow-minority]
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import thinwire as tw
from thinwire.strategies.registry import from_text

NUM_SAMPLES = 480


def main() -> None:
    strategy, epochs, silence_s = from_text(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.randn(NUM_SAMPLES, 16, dtype=torch.float64)
    elastic = tw.Elastic(allow_minority="allow-minority" in sys.argv)
    with tw.attach(model, optimizer, strategy, elastic=elastic, silence_s=silence_s) as link:
        sampler = link.sampler(NUM_SAMPLES, batch_size=4)
        for _ in link.epochs(epochs):
            for step in link.each_step(sampler):
                with step as batch:
                    time.sleep(0.02)
                    model(data[batch]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            link.all_reduce([1.0])


if __name__ == "__main__":
    main()
