"""What is counted while training, with a clock and stats of our own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from thinwire.engine.core import Stats
from thinwire.events import Progress, Record
from thinwire.recipes.base import TrainingPlan
from thinwire.recipes.meter import EVERY_S, ProgressMeter
from thinwire.traffic import Traffic


@dataclass
class Fake:
    """A clock and a link that the test moves."""

    now: float = 0.0
    stats: Stats = field(default_factory=lambda: Stats(instruments={"share": 0.5}))

    def pass_by(self, seconds: float, sent_bytes: int, exposed_s: float) -> None:
        self.now += seconds
        traffic = self.stats.traffic + Traffic(sent_bytes=sent_bytes, messages=1)
        self.stats = replace(self.stats, traffic=traffic, exposed_s=self.stats.exposed_s + exposed_s)


def test_evaluation_is_left_out_and_progress_comes_now_and_then() -> None:
    fake, records = Fake(), list[Record]()
    meter = ProgressMeter(
        rank=0,
        plan=TrainingPlan(world_size=2, batch_size=4, num_steps=6),
        num_epochs=2,
        stats=lambda: fake.stats,
        emit=records.append,
        clock=lambda: fake.now,
    )
    for epoch in (1, 2):
        meter.start()
        for step in range(3):
            fake.pass_by(EVERY_S / 2, sent_bytes=100, exposed_s=0.1)
            meter.stepped(float(step), 4, epoch)
        meter.pause()
        fake.pass_by(1000.0, sent_bytes=10**9, exposed_s=900.0)  # an evaluation
    progress = [record for record in records if isinstance(record, Progress)]
    assert [record.step for record in progress] == [2, 4, 6]
    assert progress[0].loss == 0.5
    assert progress[0].instruments == {"share": 0.5}
    assert progress[0].samples_per_s == 8 / EVERY_S
    ended = meter.ended()
    assert ended.sent_bytes == 600
    assert ended.messages == 6
    assert round(ended.exposed_s, 6) == 0.6
    assert ended.train_s == 6 * EVERY_S / 2
    assert ended.samples == 24
