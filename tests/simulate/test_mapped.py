"""The LSTM that can be mapped over replicas is torch's LSTM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from thinwire.simulate.mapped import Carried, Model, OwnLSTM
from thinwire.simulate.replicas import Replicas

REPLICAS = 3


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_mapped_it_is_torchs(batch_first: bool, bias: bool) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 4, num_layers=2, bias=bias, batch_first=batch_first).double()
    own = OwnLSTM(lstm)
    stacked = {n: torch.randn(REPLICAS, *p.shape, dtype=p.dtype) for n, p in lstm.named_parameters()}
    inputs = torch.randn(REPLICAS, 5, 7, 6, dtype=torch.float64)
    state = torch.randn(2, REPLICAS, 2, 5 if batch_first else 7, 4, dtype=torch.float64)
    learnt = [p.requires_grad_() for p in stacked.values()]

    def call(
        module: nn.Module, parameters: dict[str, Tensor], x: Tensor, h: Tensor, c: Tensor
    ) -> list[Tensor]:
        outputs, after = torch.func.functional_call(module, parameters, (x, (h, c)))
        return [outputs, *after]

    mapped = torch.func.vmap(lambda p, x, h, c: call(own, p, x, h, c))(stacked, inputs, *state)
    each = [
        call(lstm, {n: p[i] for n, p in stacked.items()}, inputs[i], *state[:, i]) for i in range(REPLICAS)
    ]
    alone = [torch.stack(parts) for parts in zip(*each, strict=True)]
    for a, b in zip(alone, mapped, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)
    gradients = [
        torch.autograd.grad(sum((o.square().sum() for o in found), torch.tensor(0.0)), learnt)
        for found in (alone, mapped)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-13)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_recurrent_model_is_batched_and_carries_on() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 6)
            self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)
            self.output = nn.Linear(5, 9)

        def forward(self, words: Tensor, carried: Carried) -> tuple[Tensor, tuple[Tensor, ...]]:
            outputs, state = self.lstm(self.embedding(words), carried)
            return self.output(outputs), tuple(part.detach() for part in state)

    def loss(model: Model, words: Tensor, targets: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        scores, carried = model(words, carried)
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()), carried

    torch.manual_seed(0)
    model = Words().double().cuda()
    alone, together = (Replicas(model, loss, range(REPLICAS), batched=b) for b in (False, True))
    for _ in range(5):
        words = torch.randint(0, 9, (REPLICAS, 4, 8)).cuda()
        for replicas in (alone, together):
            for index in range(REPLICAS):
                replicas.ask(index, words[index, :, :-1], words[index, :, 1:])
            replicas.learn(0)
            for index in range(REPLICAS):
                for parameter in replicas.model(index).parameters():
                    assert parameter.grad is not None
                    parameter.data -= 0.5 * parameter.grad
    assert together.batched
    for index in range(REPLICAS):
        assert together.loss(index) == pytest.approx(alone.loss(index), rel=1e-9)
        for a, b in zip(alone.model(index).parameters(), together.model(index).parameters(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-10)
