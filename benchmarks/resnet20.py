"""A script to plan for: ResNet-20 on images of noise, as its user would have written it for thinwire.

torchrun --standalone --nproc-per-node 2 benchmarks/resnet20.py --strategy all-reduce
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

import thinwire as tw
from thinwire.recipes.networks import resnet20
from thinwire.strategies.registry import from_text

parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
parser.add_argument("--strategy", default="all-reduce")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch", type=int, default=32)
options = parser.parse_args()

torch.manual_seed(0)
model = resnet20()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
with tw.attach(model, optimizer, from_text(options.strategy)) as link:
    random = torch.Generator().manual_seed(link.rank)
    for _ in range(options.steps):
        images = torch.randn(options.batch, 3, 32, 32, generator=random)
        labels = torch.randint(10, (options.batch,), generator=random)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
