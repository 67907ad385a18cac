"""Fine-tuning: a new head on a frozen body first, then all of it, the body with a smaller learning rate.

The body has learned to tell the digits 0 to 4 apart; a few samples of 5 to 9 are what it is fine-tuned with.

    torchrun --standalone --nproc-per-node 2 examples/finetune.py --strategy topk:density=0.05
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import thinwire as tw
from thinwire.strategies.registry import from_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--strategy", default="all-reduce", help="NAME or NAME:KEY=VALUE:KEY=VALUE")
parser.add_argument("--epochs", type=int, default=3, help="of each of the two stages")
parser.add_argument("--samples", type=int, default=300, help="how many there are to fine-tune with")
parser.add_argument("--batch", type=int, default=8, help="samples per step and worker")
parser.add_argument("--weights", help="of a body saved before; trained here, if left out")
parser.add_argument("--out", help="where the fine-tuned weights are saved")
options = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)


def digits(part: tw.data.Arrays, first: int) -> TensorDataset:
    """Images of five digits, labelled 0 to 4."""
    images, labels = (
        torch.from_numpy(part.inputs).float().div(16).unsqueeze(1),
        torch.from_numpy(part.targets),
    )
    chosen = (labels >= first) & (labels < first + 5)
    return TensorDataset(images[chosen], labels[chosen] - first)


def pretrain(model: nn.Module, dataset: TensorDataset) -> None:
    """Stands for the download of weights: an ordinary training, without any other worker."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _epoch in range(2):
        for images, labels in DataLoader(dataset, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()


def tune(model: nn.Module, groups: list[dict[str, object]], dataset: TensorDataset) -> tw.Link:
    """One stage: attached is what requires a gradient now, and nothing else is sent."""
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    with tw.attach(model, optimizer, from_text(options.strategy)) as link:
        sampler: DistributedSampler[Tensor] = DistributedSampler(dataset, link.world_size, link.rank, seed=0)
        loader = DataLoader(dataset, options.batch, sampler=sampler, drop_last=True)
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                cross_entropy(model(images.to(device)), labels.to(device)).backward()
                link.clip_grad_norm_(1.0)
                optimizer.step()
        link.average_()  # what is kept is the mean, should the strategy let workers differ
    return link


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    predicted: Tensor = model(images.to(device)).argmax(dim=1)
    return (predicted == labels.to(device)).float().mean().item()


torch.manual_seed(0)
data = tw.data.load_digits()
body = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1, stride=2),
    nn.ReLU(),
    nn.Flatten(),
)
model = nn.Sequential(body, nn.Linear(512, 5)).to(device)
if options.weights:
    body.load_state_dict(torch.load(options.weights, map_location=device))
else:
    pretrain(model, digits(data.train, 0))

model[1] = head = nn.Linear(512, 5).to(device)
small = digits(data.train, 5)
small = TensorDataset(*(tensor[: options.samples] for tensor in small.tensors))
test = digits(data.test, 5)

body.requires_grad_(False)
link = tune(model, [{"params": head.parameters(), "lr": 3e-3}], small)
if link.rank == 0:
    print(
        f"head alone: accuracy {accuracy(model, test):.3f}, sent {link.stats.sent_bytes:,} bytes", flush=True
    )

body.requires_grad_(
    True
)  # parameters are sent if they require a gradient when the link is made: so a new one
groups = [{"params": head.parameters(), "lr": 1e-3}, {"params": body.parameters(), "lr": 3e-4}]
link = tune(model, groups, small)
if link.rank == 0:
    print(
        f"all of it: accuracy {accuracy(model, test):.3f}, sent {link.stats.sent_bytes:,} bytes", flush=True
    )
    if options.out:
        torch.save(model.state_dict(), options.out)
