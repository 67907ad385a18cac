"""Two models attached at once: a generator learns to draw a circle, and a critic to tell drawn from real."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import thinwire as tw


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    """Two hidden layers."""
    hidden = nn.Sequential(nn.Linear(num_inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
    return nn.Sequential(hidden, nn.Linear(64, num_outputs))


def circle(num_points: int) -> Tensor:
    """Points on the unit circle: what the generator has to learn."""
    angle = 2 * torch.pi * torch.rand(num_points)
    return torch.stack((angle.cos(), angle.sin()), dim=1)


def loss(logits: Tensor, *, real: bool) -> Tensor:
    """How far the critic is from calling these points real, or drawn."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


torch.manual_seed(0)
generator, critic = network(8, 2), network(2, 1)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

with (
    tw.attach(generator, generator_optimizer, tw.AllReduce()) as link,
    tw.attach(critic, critic_optimizer, tw.AllReduce()) as critic_link,
):
    torch.manual_seed(link.rank)  # every worker draws points of its own
    for _step in range(1000):
        drawn = generator(torch.randn(64, 8))

        critic_optimizer.zero_grad()
        (loss(critic(circle(64)), real=True) + loss(critic(drawn.detach()), real=False)).backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        with critic_link.no_sync():  # the critic only passes gradients on here, so its own stay at home
            loss(critic(drawn), real=True).backward()
        generator_optimizer.step()

with torch.no_grad():
    radius = generator(torch.randn(1000, 8)).norm(dim=1)
print(f"radius of the drawn circle {radius.mean():.2f} +- {radius.std():.2f}")
