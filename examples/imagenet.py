"""Train a ResNet as on ImageNet: mixup, label smoothing, a moving average of the weights, checkpoints.

The images are the 8 x 8 digits that come with thinwire; put an ImageFolder in their place. To run it:
torchrun --standalone --nproc-per-node 2 examples/imagenet.py --strategy gtopk:density=0.05
"""

import argparse
import math
import os
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import thinwire as tw
from thinwire.strategies.registry import from_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--strategy", default="all-reduce", help="NAME or NAME:KEY=VALUE:KEY=VALUE")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch", type=int, default=32, help="images per step and worker")
parser.add_argument("--mixup", type=float, default=0.2, help="alpha of its Beta distribution")
parser.add_argument("--loaders", type=int, default=0, help="processes that load data, per worker")
parser.add_argument("--checkpoints", help="a folder to save to after every epoch, and to go on from")
parser.add_argument("--out", help="where the averaged weights are saved")
options = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which halve the size of an image and double its channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        first = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        second = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, bias=False)
        norms = nn.BatchNorm2d(2 * channels), nn.BatchNorm2d(2 * channels)
        self.layers = nn.Sequential(nn.ReLU(), first, norms[0], nn.ReLU(), second, norms[1])
        self.shortcut = nn.Conv2d(channels, 2 * channels, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shortcut(x) + self.layers(x)
        return y


def images_of(part: tw.data.Arrays) -> TensorDataset:
    images, labels = torch.from_numpy(part.inputs), torch.from_numpy(part.targets)
    return TensorDataset(images.float().div(16).unsqueeze(1), labels)


def mixup(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Every image blended with its neighbour in the batch, and its label too."""
    targets = one_hot(labels, 10).float()
    weight = torch.distributions.Beta(options.mixup, options.mixup).sample().item()
    return images.lerp(images.roll(1, 0), weight), targets.lerp(targets.roll(1, 0), weight)


def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], link: tw.Link) -> float:
    """Accuracy over the parts of all workers."""
    model.eval()
    with torch.no_grad():
        right = [(model(x.to(device)).argmax(dim=1).cpu() == y).float() for x, y in loader]
    correct, total = link.all_reduce([torch.cat(right).sum().item(), len(torch.cat(right))])
    return correct / total


torch.manual_seed(0)
data = tw.data.load_digits()
train, test = images_of(data.train), images_of(data.test)
model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), Residual(16), Residual(32)),
    nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda epoch: 0.5 + 0.5 * math.cos(math.pi * epoch / options.epochs)
)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)

with ExitStack() as stack:
    link = stack.enter_context(tw.attach(model, optimizer, from_text(options.strategy)))
    torch.manual_seed(link.rank)  # every worker mixes images in its own way
    sampler: DistributedSampler[Tensor] = DistributedSampler(train, link.world_size, link.rank, seed=0)
    loader = DataLoader(train, options.batch, sampler=sampler, drop_last=True, num_workers=options.loaders)
    test_loader = DataLoader(Subset(test, range(link.rank, len(test), link.world_size)), batch_size=256)
    first_epoch, checkpoint = 1, None
    if options.checkpoints:
        folder = options.checkpoints
        checkpoint = stack.enter_context(
            tw.Checkpoint(folder, link=link, model=model, optimizer=optimizer, schedule=schedule, ema=ema)
        )
        saved = checkpoint.load()
        first_epoch = saved.step + 1 if saved else 1

    for epoch in range(first_epoch, options.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        for step, (images, labels) in enumerate(loader):
            images, targets = mixup(images.to(device), labels.to(device))
            optimizer.zero_grad()
            loss_fn(model(images), targets).backward()
            optimizer.step()
            if step % 4 == 3:
                link.synchronize()  # some strategies are still busy with the parameters beside training
                ema.update_parameters(model)
        schedule.step()
        accuracy = evaluate(ema, test_loader, link)
        if link.rank == 0:
            print(f"epoch {epoch}, accuracy {accuracy:.3f}", flush=True)
        if checkpoint is not None:
            checkpoint.save(epoch)

    model.load_state_dict(ema.module.state_dict())
    link.average_()  # what is kept is the mean, should the strategy let workers differ
if options.out and link.rank == 0:
    torch.save(model.state_dict(), options.out)
