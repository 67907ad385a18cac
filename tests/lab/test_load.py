"""The processor watch."""

from __future__ import annotations

from thinwire.lab.load import WINDOW_S, CpuLoad, read_cpu


class Machine:
    """Two cores whose load is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy = 0.0

    def spend(self, share: float, windows: int, watch: CpuLoad) -> None:
        for _ in range(windows):
            self.now_s += WINDOW_S
            self.busy += share * 2 * WINDOW_S
            watch.sample()

    def watch(self) -> CpuLoad:
        return CpuLoad(read=lambda: (self.busy, 2 * self.now_s), clock=lambda: self.now_s)


def test_full_processors_are_warned_about() -> None:
    machine = Machine()
    watch = machine.watch()
    machine.spend(0.5, 6, watch)
    assert watch.warning() is None
    machine.spend(1.0, 4, watch)
    assert watch.busy_share == 0.7
    assert "full 40% of the time" in str(watch.warning())


def test_what_was_before_training_is_forgotten() -> None:
    machine = Machine()
    watch = machine.watch()
    machine.spend(1.0, 10, watch)
    watch.restart()
    machine.spend(0.9, 10, watch)
    assert watch.warning() is None
    assert abs(watch.busy_share - 0.9) < 1e-9


def test_no_time_no_warning() -> None:
    watch = Machine().watch()
    assert watch.warning() is None
    assert watch.busy_share == 0.0


def test_the_kernel_is_read() -> None:
    busy, total = read_cpu()
    assert 0 < busy < total
