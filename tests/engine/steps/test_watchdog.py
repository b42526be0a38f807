from __future__ import annotations

from infd.engine.steps.watchdog import PATIENCE_S, PATIENCE_STEPS, Watchdog


class Device:
    count = 0

    def pulse(self) -> int:
        return self.count


def test_a_device_without_progress_is_stuck_after_the_patience():
    watchdog = Watchdog(Device().pulse)

    assert [watchdog.check(now, busy=True) for now in (0, 1, PATIENCE_S, PATIENCE_S + 1)] == [False, False, False, True]


def test_a_long_step_that_moves_layer_by_layer_is_not_stuck():
    device = Device()
    watchdog = Watchdog(device.pulse)
    for now in range(0, 500, 10):
        device.count += 1
        assert not watchdog.check(now, busy=True)


def test_an_idle_device_is_never_stuck_and_the_clock_starts_with_the_next_step():
    watchdog = Watchdog(Device().pulse)

    assert not watchdog.check(0, busy=False)
    assert not watchdog.check(1000, busy=False)
    assert not watchdog.check(1000 + PATIENCE_S, busy=True)


def test_a_machine_whose_steps_are_long_gets_more_patience():
    watchdog = Watchdog(Device().pulse)
    watchdog.record_duration(10.0)
    watchdog.check(0, busy=True)

    assert not watchdog.check(10.0 * PATIENCE_STEPS, busy=True)
    assert watchdog.check(10.0 * PATIENCE_STEPS + 1, busy=True)


def test_a_device_that_moves_again_is_no_longer_stuck():
    device = Device()
    watchdog = Watchdog(device.pulse)
    watchdog.check(0, busy=True)
    assert watchdog.check(PATIENCE_S + 1, busy=True)
    device.count += 1

    assert not watchdog.check(PATIENCE_S + 2, busy=True)
