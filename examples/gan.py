"""A GAN: two models attached at once, a generator that learns to draw a circle and a critic of its points.

To run it: torchrun --standalone --nproc-per-node 2 examples/gan.py --strategy gossip-grad
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import thinwire as tw
from thinwire.strategies.registry import from_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--strategy", default="all-reduce", help="NAME or NAME:KEY=VALUE:KEY=VALUE")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--out", help="where the generator's weights are saved")
options = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    """Two hidden layers."""
    hidden = nn.Sequential(nn.Linear(num_inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
    return nn.Sequential(hidden, nn.Linear(64, num_outputs)).to(device)


def circle(num_points: int) -> Tensor:
    """Points on the unit circle: what the generator has to learn."""
    angle = 2 * torch.pi * torch.rand(num_points, device=device)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def loss(logits: Tensor, *, real: bool) -> Tensor:
    """How far the critic is from calling these points real, or drawn."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


@torch.no_grad()
def report(generator: nn.Module, link: tw.Link, step: int) -> None:
    """How round it is by now; called by all workers, printed by one."""
    radius = generator(torch.randn(1000, 8, device=device)).norm(dim=1)
    if link.rank == 0:
        print(f"step {step}, radius {radius.mean():.2f} +- {radius.std():.2f}", flush=True)


torch.manual_seed(0)
generator, critic = network(8, 2), network(2, 1)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
strategy = from_text(options.strategy)

with (
    tw.attach(generator, generator_optimizer, strategy) as link,
    tw.attach(critic, critic_optimizer, strategy) as critic_link,
):
    torch.manual_seed(link.rank)  # every worker draws points of its own
    report(generator, link, step=0)
    for step in range(1, options.steps + 1):
        drawn = generator(torch.randn(64, 8, device=device))

        critic_optimizer.zero_grad()
        (loss(critic(circle(64)), real=True) + loss(critic(drawn.detach()), real=False)).backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        with critic_link.no_sync():  # the critic only passes gradients on here, so its own stay at home
            loss(critic(drawn), real=True).backward()
        generator_optimizer.step()
        if step % 250 == 0 and step < options.steps:
            report(generator, link, step)
    link.average_()  # what is kept is the mean, should the strategy let workers differ
    report(generator, link, options.steps)

if options.out and link.rank == 0:
    torch.save(generator.state_dict(), options.out)
