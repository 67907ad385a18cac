"""A character GPT: gradient accumulation, bfloat16 autocast, clipping, a cosine schedule, torch.compile.

To run it: torchrun --standalone --nproc-per-node 2 examples/char_gpt.py --text FILE --strategy gossip-grad
"""

import argparse
import contextlib
import math
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import thinwire as tw
from thinwire.strategies.registry import from_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--text", default=__file__, help="the file to learn; this script, if left out")
parser.add_argument("--strategy", default="all-reduce", help="NAME or NAME:KEY=VALUE:KEY=VALUE")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--accumulate", type=int, default=2, help="backward passes in every step")
parser.add_argument("--batch", type=int, default=16, help="sequences per backward pass and worker")
parser.add_argument(
    "--compile",
    nargs="?",
    const="inductor",
    metavar="BACKEND",
    help="needs a C++ compiler, unless BACKEND is eager",
)
parser.add_argument("--out", help="where the trained weights are saved")
options = parser.parse_args()
if options.compile == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
    parser.error("--compile: torch.compile needs a C++ compiler; install g++, or leave --compile out")

WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 2, 64
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)


class Block(nn.Module):
    """Attention to what came before, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.attention(self.norms[0](x)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        y: Tensor = x + self.think(self.norms[1](x))
        return y


class GPT(nn.Module):
    """Scores for the next character, at every place of a text."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(num_characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_characters, bias=False))

    def forward(self, text: Tensor) -> Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        scores: Tensor = self.head(self.blocks(self.characters(text) + self.places(places)))
        return scores


def rate(step: int) -> float:
    """The learning rate relative to its peak: warm-up, then half a cosine down to a tenth."""
    warmup = max(1, options.steps // 10)
    progress = (step - warmup) / max(1, options.steps - warmup)
    return (step + 1) / warmup if step < warmup else 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))


text = Path(options.text).read_text(encoding="utf-8")
number = {character: i for i, character in enumerate(sorted(set(text)))}
data = torch.tensor([number[character] for character in text])

torch.manual_seed(0)
model = GPT(len(number)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
if options.compile:
    for block in model.blocks:  # block by block: that also works with all-reduce:overlap=forward
        block.compile(backend=options.compile)

with tw.attach(model, optimizer, from_text(options.strategy)) as link:
    random = torch.Generator().manual_seed(link.rank)  # every worker reads at places of its own
    for step in range(options.steps):
        total = 0.0
        for part in range(options.accumulate):
            starts = torch.randint(len(data) - CONTEXT, (options.batch, 1), generator=random)
            batch = data[starts + torch.arange(CONTEXT + 1)].to(device)
            last = part == options.accumulate - 1
            with contextlib.nullcontext() if last else link.no_sync():  # sent with the last backward
                with torch.autocast(device.type, torch.bfloat16):
                    scores = model(batch[:, :-1])
                    loss = cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten()) / options.accumulate
                loss.backward()
            total += loss.item()
        link.clip_grad_norm_(1.0)  # torch's own clips too, but for overlap=forward
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == options.steps - 1:
            mean = link.all_reduce([total])[0] / link.world_size
            if link.rank == 0:
                print(f"step {step}, loss {mean:.4f}", flush=True)
    link.average_()  # what is kept is the mean, should the strategy let workers differ
if options.out and link.rank == 0:
    torch.save(model.state_dict(), options.out)
