"""The rate of copies, in virtual time."""

from __future__ import annotations

import math
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.healing.throttle import (
    BURST_S,
    CAP_START,
    FACTOR_MIN,
    REST_NS,
    SAMPLE_NS,
    ForegroundCap,
    ForegroundGuard,
    TokenBucket,
)
from pybk.metrics import Histogram

SECOND = 10**9
MS = 10**6
MIB = 1 << 20
LEAST = MIB / 2
RATE = 8 << 20


def copied(bucket: TokenBucket, sizes: list[int], seconds: float) -> int:
    """Copy as fast as the bucket admits; return the bytes."""
    now, total, number = 0, 0, 0
    while True:
        now += bucket.wait_ns(now)
        if now > seconds * SECOND:
            return total
        size = sizes[number % len(sizes)]
        bucket.charge(size, now)
        total += size
        number += 1


@given(st.lists(st.integers(1 << 16, 4 << 20), min_size=1, max_size=20), st.floats(1, 20))
def test_a_bucket_admits_its_rate_and_at_most_a_burst_and_one_copy_more(sizes: list[int], seconds: float) -> None:
    total = copied(TokenBucket(RATE, 0), sizes, seconds)
    assert RATE * seconds - max(sizes) <= total <= RATE * (seconds + BURST_S) + max(sizes)


def test_a_bucket_that_rested_for_long_admits_one_burst() -> None:
    bucket = TokenBucket(RATE, 0)
    at = 3600 * SECOND
    admitted = 0
    while bucket.wait_ns(at) == 0:
        bucket.charge(1 << 16, at)
        admitted += 1 << 16
    assert admitted <= RATE * BURST_S + (1 << 16)


def test_a_new_rate_counts_for_what_was_charged_before() -> None:
    bucket = TokenBucket(RATE, 0)
    bucket.charge(int(RATE * BURST_S) + RATE, 0)
    assert bucket.wait_ns(0) == pytest.approx(SECOND, rel=0.01)
    bucket.rate = RATE / 2
    assert bucket.wait_ns(0) == pytest.approx(2 * SECOND, rel=0.01)


def test_a_clock_that_stands_still_or_comes_late_admits_nothing_more() -> None:
    bucket = TokenBucket(RATE, SECOND)
    bucket.charge(RATE, SECOND)
    assert bucket.wait_ns(0) == bucket.wait_ns(SECOND) > 0


def test_scenario_10_copies_keep_to_their_rate_and_longer_ones_are_paid_for_afterwards() -> None:
    bucket, now, total = TokenBucket(RATE, 0), 0, 0
    seconds = 0
    for size in [256 << 10, 1 << 20, 300 << 10, 64 << 10] * 400:  # a worker copies, waits as told, and copies on
        now += bucket.wait_ns(now)
        bucket.charge(size, now)
        total += size
        if now // SECOND > seconds:  # at each second since the beginning, and not in the end alone
            seconds = now // SECOND
            assert total <= 1.1 * RATE * now / SECOND + RATE * BURST_S + (1 << 20)
    assert seconds > 60
    assert total == pytest.approx(RATE * now / SECOND, rel=0.02), "nor is the rate left unused"


def test_scenario_11_the_rate_is_halved_within_20_s_of_slow_appends_and_recovers() -> None:
    guard, bucket, now, copied_bytes = ForegroundGuard(), TokenBucket(RATE, 0), 0, 0

    def appends_take(p99_ns: int) -> float:
        """Copy until the next sample; return the bytes per second of the copies."""
        nonlocal now, copied_bytes
        bucket.rate = RATE * guard.sample(p99_ns)
        began, before = now, copied_bytes
        while now < began + SAMPLE_NS:
            now += max(bucket.wait_ns(now), MS)
            bucket.charge(64 << 10, now)
            copied_bytes += 64 << 10
        return (copied_bytes - before) / ((now - began) / SECOND)

    usual = min(appends_take(20 * MS) for _ in range(6))
    assert usual == pytest.approx(RATE, rel=0.1)
    suffers = now
    while appends_take(80 * MS) > 0.55 * usual:
        assert now < suffers + 20 * SECOND
    assert now <= suffers + 20 * SECOND
    calm = now
    while appends_take(20 * MS) < 0.95 * usual:
        assert now < calm + 300 * SECOND, "the rate does not recover"


def test_copies_are_slowed_down_while_appends_suffer_and_recover_afterwards() -> None:
    guard = ForegroundGuard()
    for _ in range(6):
        assert guard.sample(20 * MS) == 1.0
    assert guard.sample(80 * MS) == 0.5
    assert guard.sample(80 * MS) == 0.25
    for _ in range(20):
        assert guard.sample(80 * MS) >= FACTOR_MIN
    assert guard.factor == FACTOR_MIN  # a disturbance that lasts does not become the normal state
    factors = [guard.sample(20 * MS) for _ in range(60)]
    assert factors == sorted(factors)
    assert factors[-1] == 1.0


@pytest.mark.parametrize(
    "samples",
    [
        [5 * MS] * 10 + [49 * MS],  # much slower than before, but fast enough
        [100 * MS] * 10 + [250 * MS],  # slow as ever
        [200 * MS, 300 * MS],  # nothing to compare with
        [20 * MS] * 10 + [None] * 3,  # nobody appends
    ],
)
def test_nothing_is_slowed_down_without_need(samples: list[int | None]) -> None:
    guard = ForegroundGuard()
    assert [guard.sample(each) for each in samples] == [1.0] * len(samples)


def test_only_the_last_ten_minutes_count_as_normal() -> None:
    guard = ForegroundGuard()
    for latency in [1000 * MS] * 100 + [20 * MS] * 60:
        guard.sample(latency)
    assert guard.sample(100 * MS) < 1.0


class Plant:
    """A bookie whose appends are the slower, the faster copies are made; looks at them as a worker does."""

    def __init__(self, noticed_at: float, appends: int = 400, slow: float = 0.0) -> None:
        self.cap = ForegroundCap(LEAST)
        self.now = 0
        self.noticed_at = noticed_at
        self.appends = appends
        self.slow = slow
        self.random = Random(1)
        self.copied = 0
        self.worst: list[float] = []

    def run(self, seconds: float, *, demand: float = 1e9) -> float:
        """Let time pass, with copies as fast as they may be; return the bytes per second that were copied."""
        until, before = self.now + int(seconds * SECOND), self.copied
        while self.now < until:
            step = self.cap.next_ns(self.now)
            rate = 0.0 if self.cap.rest_ns else min(demand, self.cap.rate)
            latencies = Histogram()
            appends = self.appends * step // SECOND
            slow = sum(self.random.random() < self.slow for _ in range(appends)) if self.slow else 0
            latency = int(4 * MS * (1 + rate / self.noticed_at))
            latencies.record(latency, appends - slow)
            if slow:
                latencies.record(20 * latency, slow)
            self.worst.append(1 + rate / self.noticed_at)
            self.now += step
            self.copied += int(rate * step / SECOND)
            self.cap.look(self.now, latencies.snapshot(), self.copied)
        return (self.copied - before) / seconds


def test_copies_go_as_fast_as_they_can_while_nobody_appends() -> None:
    plant = Plant(MIB, appends=0)
    assert plant.run(60, demand=300 * MIB) == pytest.approx(300 * MIB, rel=0.01)


@pytest.mark.parametrize("noticed_at", [8 * MIB, 64 * MIB])
def test_copies_find_the_rate_at_which_appends_hardly_notice_them(noticed_at: int) -> None:
    plant = Plant(noticed_at)
    plant.run(20, demand=0)
    plant.run(300)
    plant.worst.clear()
    rate = plant.run(600)
    assert max(plant.worst) <= 1.5
    assert rate >= 0.1 * noticed_at, "copies are starved"


def test_copies_begin_slowly_if_there_were_appends_and_at_once_if_there_were_none() -> None:
    busy, idle = Plant(8 * MIB), Plant(8 * MIB, appends=0)
    for each in (busy, idle):
        each.run(30, demand=0)
    assert busy.cap.rate == CAP_START
    assert idle.cap.rate == math.inf
    idle.appends = 400  # and somebody begins to append in the middle of a repair
    idle.run(2)
    assert idle.cap.rate <= CAP_START


def test_copies_have_no_limit_soon_after_the_last_append() -> None:
    plant = Plant(8 * MIB)
    plant.run(32)
    assert plant.cap.rate < math.inf
    plant.appends = 0
    plant.run(3)
    assert plant.cap.rate < math.inf, "somebody may append now and then"
    plant.run(4)
    assert plant.cap.rate == math.inf


def test_copies_that_nobody_notices_for_days_are_not_slowed_down() -> None:
    plant = Plant(1e15)
    plant.run(20, demand=0)
    plant.run(20)
    plant.cap.rate = 1e308  # as after some hours, if nothing ended its growth
    plant.run(30)
    assert CAP_START < plant.cap.rate < math.inf


@pytest.mark.parametrize("appends", [100, 400])
def test_chance_does_not_slow_down_copies_that_nobody_notices(appends: int) -> None:
    """One append of a hundred takes long, whatever is copied."""
    plant = Plant(1e15, appends, slow=0.01)
    plant.run(20, demand=0)
    rates = [plant.run(10) for _ in range(180)]
    assert statistics.median(rates[60:]) > 16 * MIB


def test_looks_that_come_too_early_are_none() -> None:
    """A worker looks after each batch, and a batch of small ledgers takes some milliseconds."""
    plant = Plant(8 * MIB)
    plant.run(20, demand=0)
    plant.run(12.2)
    rate = plant.cap.rate
    for _ in range(20):
        plant.now += 20 * MS
        plant.copied += 1 << 10
        plant.cap.look(plant.now, Histogram().snapshot(), plant.copied)
    assert plant.cap.rate == rate, "nobody appended for 0.4 s"
    assert plant.cap.rest_ns == 0


def test_what_was_copied_is_halved_and_not_a_limit_that_nothing_reached() -> None:
    plant = Plant(1e15)
    plant.run(20, demand=0)
    plant.run(20, demand=4 * MIB)
    plant.cap.rate = 64 * MIB  # as after a while in which nobody noticed copies
    plant.noticed_at = 2 * MIB
    plant.run(10, demand=4 * MIB)
    assert plant.cap.rate <= 2 * MIB
    plant.run(20, demand=0)
    assert plant.cap.rate == CAP_START, "and begins anew once there were no copies"


def test_copies_keep_a_least_rate_and_few_appends_prove_nothing() -> None:
    starved = Plant(1)
    starved.run(20, demand=0)
    starved.run(200)
    assert starved.cap.rate == LEAST
    starved.cap.least = 4 * CAP_START
    starved.run(10)
    assert starved.cap.rate == 4 * CAP_START, "a change of the setting counts from the next period on"
    few = Plant(1, appends=4)
    few.run(20, demand=0)
    few.run(40)
    assert few.cap.rate >= CAP_START


def test_copies_rest_at_the_beginning_of_each_period_of_the_day() -> None:
    plant = Plant(8 * MIB)
    plant.run(20, demand=0)
    plant.run(5)
    assert plant.cap.rest_ns == 0
    plant.run(5)  # the next period has just begun
    assert plant.cap.rest_ns >= REST_NS
    bucket = TokenBucket(RATE, 0)
    bucket.rests_until_ns = plant.cap.rest_ns
    assert bucket.wait_ns(0) == plant.cap.rest_ns
    assert bucket.wait_ns(plant.cap.rest_ns) == 0


def test_a_capped_bucket_keeps_to_its_cap_and_copies_in_smaller_pieces() -> None:
    bucket = TokenBucket(RATE, 0)
    pieces = bucket.piece_bytes
    bucket.cap = RATE / 4
    assert bucket.piece_bytes == pieces // 4
    assert copied(bucket, [bucket.piece_bytes], 10) == pytest.approx(RATE / 4 * 10, rel=0.1)
