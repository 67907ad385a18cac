"""A network that shrinks while it trains, on one worker or, under torchrun, on several."""

import torch
from torch import nn

import thinwire as tw
from thinwire.data import load_digits

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.train.inputs).float().flatten(1) / 16, torch.tensor(digits.train.targets)
test_images, test_labels = (
    torch.tensor(digits.test.inputs).float().flatten(1) / 16,
    torch.tensor(digits.test.targets),
)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
apoptosis = tw.Apoptosis(mode="adaptive", every=40)

with tw.attach(model, optimizer, tw.AllReduce(), apoptosis=apoptosis) as link:
    for epoch in range(20):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(order) // 64 * 64].split(64):
            batch = batch[link.rank :: link.world_size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            link.observe(loss)  # what adaptive apoptosis decides by
            optimizer.step()
        if link.rank == 0 and epoch % 5 == 4:
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
            widths = [layer.out_features for layer in model if isinstance(layer, nn.Linear)]
            print(f"epoch {epoch + 1}: accuracy {accuracy:.1%}, layers {widths}, {link.stats.instruments}")
