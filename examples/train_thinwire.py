"""Tell three spirals apart: the same training, on as many workers as torchrun starts."""

import torch
from torch import Tensor, nn

import thinwire as tw


def spirals(num_points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on three noisy spiral arms, and the arm each one lies on."""
    random = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (num_points,), generator=random)
    radius = torch.rand(num_points, generator=random)
    angle = 5 * radius + 2 * torch.pi / 3 * arm + 0.2 * torch.randn(num_points, generator=random)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm


torch.manual_seed(0)
inputs, labels = spirals(num_points=3000, seed=1)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()
link = tw.attach(model, optimizer, tw.AllReduce())

for _epoch in range(20):
    order = torch.randperm(len(inputs))
    for batch in order.split(60):
        batch = batch[link.rank :: link.world_size]
        optimizer.zero_grad()
        loss_fn(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
link.detach()

inputs, labels = spirals(num_points=3000, seed=2)
with torch.no_grad():
    accuracy = (model(inputs).argmax(dim=1) == labels).float().mean().item()
print(f"test accuracy {accuracy:.1%}")
