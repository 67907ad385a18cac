"""A classifier whose dense layers are split over groups of workers; convolutions stay data-parallel.

To run it: torchrun --standalone --nproc-per-node 4 examples/hybrid.py --groups 2
"""

import argparse

import torch
from torch import Tensor, nn

import thinwire as tw

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--groups", default="auto", help="a divisor of the number of workers, or auto")
parser.add_argument("--sharded", action="store_true", help="split the optimizer's state too")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch", type=int, default=16, help="images per worker")
parser.add_argument("--out", help="where the trained weights are saved")
options = parser.parse_args()


def bars(num_images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy images with one bright row or column, and which of the 32 it is."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(32, (num_images,), generator=random)
    images = 0.5 * torch.randn(num_images, 1, 16, 16, generator=random)
    for image, which in zip(images, label.tolist(), strict=True):
        image[0].select(which // 16, which % 16).add_(1.0)
    return images, label


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(2048, 256),
    nn.ReLU(),
    nn.Linear(256, 32),
)
images, _ = bars(options.batch, seed=0)
groups = options.groups if options.groups == "auto" else int(options.groups)
plan = tw.parallel.hybridize(
    model, groups=groups, layers="auto", example=images
)  # before the optimizer is made
optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
with tw.attach(model, optimizer, tw.AllReduce(), sharded=options.sharded) as link:
    if link.rank == 0:
        print(plan)
    for step in range(options.steps):
        images, labels = bars(options.batch, seed=1 + step * link.world_size + link.rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        link.clip_grad_norm_(1.0)
        optimizer.step()
    images, labels = bars(512, seed=0)  # every worker evaluates: a split layer needs its whole group
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    sent = link.stats.sent_bytes / options.steps

weights = tw.parallel.full_state_dict(model)  # the plain model's, on all workers
if link.rank == 0:
    print(f"accuracy {accuracy:.1%}, {sent / 1e3:.0f} kB of gradients sent per step")
    if options.out:
        torch.save(weights, options.out)
