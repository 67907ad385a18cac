"""The trainings of the catalog, and the optimizers, schedules, losses and scores they are built from."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from thinwire.data import load_cifar, load_digits, load_higgs, load_mnist, load_tokens
from thinwire.recipes import networks, samples
from thinwire.recipes.base import Training, TrainingPlan


def adamw(model: nn.Module, plan: TrainingPlan, *, rate_at_64: float) -> Optimizer:
    """AdamW whose learning rate grows with the square root of the global batch size."""
    rate = rate_at_64 * (plan.global_batch_size / 64) ** 0.5
    return AdamW(model.parameters(), lr=rate, weight_decay=0.01)


def adamw_with_decay(model: nn.Module, plan: TrainingPlan, *, rate_at_32: float) -> Optimizer:
    """AdamW with strong decay of matrices only; the rate grows with the root of the global batch size."""
    rate = rate_at_32 * (plan.global_batch_size / 32) ** 0.5
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=rate, betas=(0.9, 0.98))


def nesterov_sgd(model: nn.Module, plan: TrainingPlan, *, rate_at_128: float) -> Optimizer:
    """SGD with Nesterov momentum whose learning rate grows with the global batch size."""
    rate = rate_at_128 * plan.global_batch_size / 128
    return SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)


def plain_sgd(model: nn.Module, plan: TrainingPlan, *, rate_at_20: float) -> Optimizer:
    """Plain SGD for clipped gradients: the rate grows with the square root of the global batch size."""
    return SGD(model.parameters(), lr=rate_at_20 * (plan.global_batch_size / 20) ** 0.5)


def one_cycle(optimizer: Optimizer, plan: TrainingPlan) -> LRScheduler:
    """Raise the rate for a fifth of the run, one step at least, then lower it to nothing."""
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    steps = plan.num_steps + 1  # the schedule is also stepped after the last step
    up = max(0.2, 2 / steps)
    return OneCycleLR(optimizer, peaks, total_steps=steps, pct_start=up, cycle_momentum=False)


def flat_then_halved(optimizer: Optimizer, plan: TrainingPlan) -> LRScheduler:
    """Keep the full rate for a third of the run, then halve it, smoothly, every thirteenth of the run."""
    return LambdaLR(optimizer, lambda step: math.exp2(min(0.0, 13 / 3 - 13 * step / plan.num_steps)))


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy over all tokens of the batch."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def summed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum the losses of the batch's samples."""
    return token_loss(outputs, targets) * len(targets)


def perplexity(loss: float) -> float:
    """Compute exp of the mean loss per token; lower is better."""
    return math.exp(min(loss, 700.0))  # past that a float overflows, and the run has failed anyway


classifier = partial(
    Training,
    schedule=one_cycle,
    loss=nn.functional.cross_entropy,
    score=lambda outputs, targets: (outputs.argmax(dim=1) == targets).sum(),
)
"""Training parts of a classifier; the metric is accuracy."""
language_model = partial(Training, schedule=one_cycle, loss=token_loss, score=summed_loss, metric=perplexity)
"""Training parts of a language model; the metric is perplexity."""


def digits(*, num_hidden: int = 64) -> Training:
    return classifier(
        data=lambda folder: samples.grey_images(load_digits(), highest=16),
        model=lambda: networks.small_cnn(side=8, num_pools=1, num_hidden=num_hidden),
        optimizer=partial(adamw, rate_at_64=0.01),
    )


def mnist() -> Training:
    return classifier(
        data=lambda folder: samples.grey_images(load_mnist(folder), highest=255),
        model=lambda: networks.small_cnn(side=28, num_pools=2, num_hidden=64),
        optimizer=partial(adamw, rate_at_64=0.003),
    )


def cifar(*, network: Literal["resnet20", "vgg16"], rate_at_128: float) -> Training:
    return classifier(
        data=lambda folder: samples.colour_images(load_cifar(folder)),
        model=networks.resnet20 if network == "resnet20" else networks.vgg16,
        optimizer=partial(nesterov_sgd, rate_at_128=rate_at_128),
    )


def higgs() -> Training:
    return classifier(
        data=lambda folder: samples.as_tensors(load_higgs(folder)),
        model=networks.mlp,
        optimizer=partial(adamw, rate_at_64=0.002),
    )


def lstm(*, num_hidden: int, dropout: float, scale: float) -> Training:
    return language_model(
        data=lambda folder: samples.text_pieces(load_tokens(folder), length=35, order="streams"),
        model=lambda: networks.WordLstm(num_hidden=num_hidden, dropout=dropout, scale=scale),
        optimizer=partial(plain_sgd, rate_at_20=20.0),
        schedule=flat_then_halved,
        forward=networks.lstm_forward,
        clip_norm=0.25,
    )


def transformer() -> Training:
    return language_model(
        data=lambda folder: samples.text_pieces(load_tokens(folder), length=64, order="shuffled"),
        model=lambda: networks.Transformer(length=64, width=256, num_blocks=4, num_heads=4, dropout=0.3),
        optimizer=partial(adamw_with_decay, rate_at_32=0.001),
        clip_norm=1.0,
    )
