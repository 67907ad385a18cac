"""Training that goes on while workers die, come back and join.

Three workers by hand, each in a terminal of its own (or on a host of its own):

    thinwire keys new run.key
    export THINWIRE_KEY_FILE=run.key MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=3
    RANK=0 python examples/elastic.py     # and RANK=1, RANK=2; then kill any of them

One more, with the address that any of them has printed:

    THINWIRE_KEY_FILE=run.key THINWIRE_JOIN=127.0.0.1:40123 python examples/elastic.py
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw


def main() -> None:
    digits = tw.data.load_digits().train
    images = torch.from_numpy(digits.inputs).flatten(1) / 16
    data = TensorDataset(images, torch.from_numpy(digits.targets))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tw.attach(model, optimizer, tw.AllReduce(), elastic=True) as link:
        print(f"worker {link.rank} of {link.world_size} listens on {link.address}")
        loader = DataLoader(data, batch_sampler=link.sampler(len(data), batch_size=16))
        for epoch in link.epochs(20):
            for step in link.each_step(loader):
                with step as (images, labels):
                    cross_entropy(model(images), labels).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if link.rank == 0:
                print(f"epoch {epoch}: {link.world_size} workers, generation {link.generation}")


if __name__ == "__main__":
    main()
