"""The throughput prediction model: samples/s of a rank as a function of its number of loaders.

With w loaders, loading alone gives L(w) samples/s, training alone could take G, and the rank trains at T(w):

    L(w) = r·w / (1 + σ·(w − 1))          T(w) = (L^-4 + G^-4)^(-1/4)          T(0) = 1 / (1/r + 1/G)

    r   samples/s that one loader gives
    σ   contention: how much longer each further loader makes the work of all of them; L is at most r / σ
    G   samples/s that training could take

Without loaders, the training process loads each batch itself between two steps: in series, at the rate of one loader.

Everything is estimated in seconds per sample, where the model is linear:

    w / L(w) = α + β·(w − 1)    α = 1/r    β = σ/r    γ = 1/G

γ is the median of the recent `use`. α and β are a weighted least-squares fit over the numbers of loaders that were
tried, with the median of the latest measurements at each. A measurement at w says two things. Its pace (wait + use)
gives L = (pace^4 − use^4)^(-1/4), exact if training waits and worthless if it does not. The seconds that loaders worked
on a sample give w / L for the loaders that were busy at a time, pace permitting; they are used as far as the pace says
nothing. Hence one allocation gives r and G. One row of the fit is the prior of σ, which decides until a second number
of loaders has been tried.

Until there are enough batches for that, the first ones give an estimate. How long training uses a batch and how long
loaders work on it hardly depend on the number of loaders, so their means since the start are γ and α, also while the
job is being resized. What the pace says is missing, hence the greater error.

Forgetting: the weight of a measurement halves every `HALF_LIFE` seconds, and a job's own γ is never older than
`RECENT` measurements. G falls when a neighbour shares the device and rises when it leaves; nothing announces that, so
the median follows after half of `RECENT`. α and β do not use old values of γ: each measurement has its own.

Robustness: medians ignore single windows, and a number of loaders that the line misses by far gets less weight (Huber).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from torchloom.protocol.data_loading import Loading

HALF_LIFE = 600.0
RECENT = 12
"""Measurements whose median is γ, and measurements kept for each number of loaders."""
NUMBERS = 16
"""Numbers of loaders that are remembered."""
POOLED = 8
"""Batches that make a measurement: fewer are added up. Also at least two for each loader, which deliver in bursts."""
NOISE = 0.05
"""Relative noise of a measurement until the measurements show theirs."""
MISFIT = 0.02
"""Relative error of the formula itself, which measurements at one number of loaders do not average out."""
LOAD_ERROR = 0.1
"""Relative error of the seconds that loaders worked, as a measure of L."""
EARLY_ERROR = 0.15
"""Relative error of what the first batches say."""
REQUESTED_SHARE = 0.95
"""T/G that a job is taken to reach with the number of loaders that its script asks for, until it has measured."""
SIGMA, SIGMA_ERROR = 0.03, 0.06
"""The prior of σ."""
HUBER = 1.5
FIT_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the loader of one rank did while the number of its loaders did not change. Times are seconds for one batch.

    Of ranks that wait for each other, take the one with the longest `wait`: the `use` of the others contains it.
    """

    loaders: int
    batches: int
    samples: float
    """In one batch."""
    wait: float
    """That training waited."""
    use: float
    """That training used a batch."""
    load: float
    """That loaders worked on a batch; 0 if not known."""

    @classmethod
    def from_beat(cls, loading: Loading, batch_size: float) -> Self:
        load = loading.read + loading.decode + loading.collate + loading.transfer
        return cls(loading.loaders, loading.batches, batch_size, loading.wait, loading.use, load)

    @property
    def is_usable(self) -> bool:
        times = (self.wait, self.use, self.load)
        return (
            self.batches > 0
            and self.loaders >= 0
            and all(0 <= time < math.inf for time in times)
            and 0 < self.samples < math.inf
            and self.wait + self.use > 0
        )


@dataclass(frozen=True, slots=True)
class Variances:
    """Of the estimates of a curve, in (seconds per sample)²."""

    alpha: float = 0.0
    beta: float = 0.0
    alpha_beta: float = 0.0
    gamma: float = 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """The throughput of one rank, with what is known about its error."""

    rate: float
    """r"""
    ceiling: float
    """G"""
    contention: float = 0.0
    """σ"""
    variances: Variances = Variances()

    def loading(self, loaders: int) -> float:
        """Seconds per sample in which this number of loaders delivers: 1/L."""
        return (1 + self.contention * (loaders - 1)) / (self.rate * loaders) if loaders else 1 / self.rate

    def throughput(self, loaders: int) -> float:
        """Samples/s."""
        if not loaders:
            return 1 / (1 / self.rate + 1 / self.ceiling)
        return float((self.loading(loaders) ** 4 + self.ceiling**-4) ** -0.25)

    def share(self, loaders: int) -> float:
        """T/G: how fast training is, compared with never waiting."""
        return self.throughput(loaders) / self.ceiling

    def throughput_error(self, loaders: int) -> float:
        """The standard error of the prediction, in samples/s."""
        to_loading, to_gamma = self._gradient(loaders)
        return self._error(*self._by_parameter(loaders, to_loading), to_gamma)

    def share_error(self, loaders: int, other: int | None = None) -> float:
        """The standard error of T/G, or of its difference between two numbers of loaders."""
        alpha, beta, gamma = self._share_gradient(loaders)
        if other is not None:
            less = self._share_gradient(other)
            alpha, beta, gamma = alpha - less[0], beta - less[1], gamma - less[2]
        return self._error(alpha, beta, gamma)

    def shared(self, sharing: int) -> Curve:
        """With the device shared equally by this number of ranks."""
        old = self.variances
        variances = Variances(old.alpha, old.beta, old.alpha_beta, old.gamma * sharing**2)
        return Curve(self.rate, self.ceiling / sharing, self.contention, variances)

    def _gradient(self, loaders: int) -> tuple[float, float]:
        """Of T, by the seconds per sample of loading and of training."""
        throughput = self.throughput(loaders)
        if not loaders:
            return -(throughput**2), -(throughput**2)
        return -(self.loading(loaders) ** 3) * throughput**5, -(self.ceiling**-3) * throughput**5

    def _share_gradient(self, loaders: int) -> tuple[float, float, float]:
        to_loading, to_gamma = self._gradient(loaders)
        by_gamma = self.throughput(loaders) + to_gamma / self.ceiling
        return *self._by_parameter(loaders, to_loading / self.ceiling), by_gamma

    def _by_parameter(self, loaders: int, to_loading: float) -> tuple[float, float]:
        return to_loading / max(loaders, 1), to_loading * (loaders - 1) / loaders if loaders else 0.0

    def _error(self, alpha: float, beta: float, gamma: float) -> float:
        by = self.variances
        square = alpha**2 * by.alpha + beta**2 * by.beta + 2 * alpha * beta * by.alpha_beta + gamma**2 * by.gamma
        return math.sqrt(max(square, 0.0))


PRIOR = Curve(1.0, 4.0, SIGMA, Variances(alpha=0.25, beta=SIGMA_ERROR**2, gamma=0.25 / 16))
"""Before the first measurement: four loaders feed a rank, give or take half. Only r / G has a meaning."""


def prior_curve(requested: int) -> Curve:
    """Before the first measurement of a job whose script asks for this number of loaders."""
    loaders = max(requested, 1)
    need = (REQUESTED_SHARE**-4 - 1) ** 0.25 * loaders / (1 + SIGMA * (loaders - 1))
    return Curve(1.0, need, SIGMA, Variances(alpha=0.25, beta=SIGMA_ERROR**2, gamma=0.25 / need**2))


@dataclass(frozen=True, slots=True)
class _Point:
    """A measurement in seconds per sample."""

    time: float
    pace: float
    use: float
    load: float


@dataclass(frozen=True, slots=True)
class _Row:
    """Of the fit: α + β·further = seconds, with a relative error."""

    further: float
    """Loaders at work besides the first."""
    seconds: float
    error: float


class ThroughputModel:
    """Learns the curve of the ranks of one job from their measurements."""

    def __init__(self, prior: Curve = PRIOR) -> None:
        """`prior`: what to predict before the first measurement, for example the curve of an earlier run."""
        self._prior = prior
        self._points: dict[int, deque[_Point]] = {}
        """By number of loaders, the one that was measured last at the end."""
        self._uses: deque[float] = deque(maxlen=RECENT)
        self._pending: list[Measurement] = []
        self._early: list[Measurement] = []
        """Since the start, until there is a point."""
        self._loaders: int | None = None

    @property
    def is_estimated(self) -> bool:
        """By the first batches, or better."""
        return bool(self._points or self._early)

    @property
    def is_measured(self) -> bool:
        return bool(self._points)

    def add(self, measurement: Measurement, now: float) -> None:
        """The first window is dropped: the first batch has no use before it, and waits until loaders have started.

        So is the one after a resize, which consumes what was loaded before.
        """
        if not measurement.is_usable:
            return
        has_started = self._loaders is not None
        if has_started and not self._points and measurement.use > 0 and measurement.load > 0:
            self._early.append(measurement)
        if measurement.loaders != self._loaders:
            self._loaders, self._pending = measurement.loaders, []
            return
        self._pending.append(measurement)
        if sum(each.batches for each in self._pending) < max(POOLED, 2 * measurement.loaders):
            return
        point = _pooled(self._pending, now)
        self._pending, self._early = [], []
        points = self._points.pop(measurement.loaders, None) or deque(maxlen=RECENT)
        points.append(point)
        self._points[measurement.loaders] = points
        if len(self._points) > NUMBERS:
            del self._points[next(iter(self._points))]
        self._uses.append(point.use)

    def paces(self) -> dict[int, float]:
        """Samples/s, the median of the latest measurements at each number of loaders that was tried."""
        return {loaders: 1 / median(point.pace for point in points) for loaders, points in self._points.items()}

    def curve(self, now: float) -> Curve:
        if self._early:
            return _estimate(_pooled(self._early, now))
        if not self._points:
            return self._prior
        gamma = median(self._uses)
        gamma_error = max(_spread(self._uses, gamma) or NOISE, MISFIT) * gamma / math.sqrt(len(self._uses))
        gamma = max(gamma, 1e-12)
        rows = [row for loaders, points in self._points.items() for row in _rows(loaders, points, now)]
        if not rows:  # the loaders are never waited for and do not say what they need: at least what training takes
            rows = [_Row(max(loaders, 1) - 1, max(loaders, 1) * gamma, 1.0) for loaders in self._points]
        alpha, beta, variances = _fit(rows)
        by = Variances(variances[0], variances[1], variances[2], gamma_error**2)
        return Curve(1 / alpha, 1 / gamma, beta / alpha, by)


def _pooled(measurements: Sequence[Measurement], now: float) -> _Point:
    samples = sum(each.batches * each.samples for each in measurements)

    wait = sum(each.batches * each.wait for each in measurements) / samples
    use = sum(each.batches * each.use for each in measurements) / samples
    load = sum(each.batches * each.load for each in measurements) / samples
    return _Point(now, wait + use, use, load)


def _estimate(point: _Point) -> Curve:
    """What the first batches say."""
    alpha, beta, variances = _fit([_Row(0.0, point.load, EARLY_ERROR)])
    gamma_variance = (EARLY_ERROR * point.use) ** 2
    return Curve(1 / alpha, 1 / point.use, beta / alpha, Variances(*variances, gamma_variance))


def _rows(loaders: int, points: Iterable[_Point], now: float) -> list[_Row]:
    """What the measurements at one number of loaders say."""
    points = list(points)
    count = sum(0.5 ** (max(now - point.time, 0.0) / HALF_LIFE) for point in points)
    pace, use = median(point.pace for point in points), median(point.use for point in points)
    load = median(point.load for point in points)
    waiting = 1 - min(use / pace, 1.0) ** 4
    """The relative change of the pace if L changes: 1 if training only waits, 0 if it never does."""
    if not loaders:
        seconds = pace - use
        waiting = min(seconds / pace, 1.0)
    else:
        seconds = loaders * median(max(point.pace**4 - point.use**4, 0.0) ** 0.25 for point in points)
    noise = _spread([point.pace for point in points], pace) or NOISE
    rows = []
    if waiting > 0.05 and seconds > 0:
        error = math.hypot(max(noise, 0.005) / waiting, MISFIT) / math.sqrt(count)
        rows.append(_Row(max(loaders - 1, 0), seconds, max(error, MISFIT / math.sqrt(min(count, 1.0)))))
    if waiting < 0.95 and load > 0:
        busy = min(float(loaders), load / pace) if loaders else 1.0
        error = LOAD_ERROR / (1 - waiting) / math.sqrt(min(count, 1.0))
        rows.append(_Row(max(busy - 1, 0.0), load, error))
    return rows


def _fit(rows: Sequence[_Row]) -> tuple[float, float, tuple[float, float, float]]:
    """α, β, and the variances of α, of β, and of both."""
    scale = median(row.seconds / (1 + SIGMA * row.further) for row in rows)
    alpha, beta = scale, SIGMA * scale
    variances = (0.0, 0.0, 0.0)
    for _ in range(FIT_ROUNDS):
        weight = 1 / (SIGMA_ERROR * alpha) ** 2
        aa, ab, bb = weight * SIGMA**2, -weight * SIGMA, weight
        at, bt = 0.0, 0.0
        for row in rows:
            predicted = max(alpha + beta * row.further, 1e-12)
            error = row.error * predicted
            away = abs(row.seconds - predicted) / error
            weight = min(1.0, HUBER / away if away else 1.0) / error**2
            aa += weight
            ab += weight * row.further
            bb += weight * row.further**2
            at += weight * row.seconds
            bt += weight * row.seconds * row.further
        determinant = aa * bb - ab * ab
        alpha, beta = (bb * at - ab * bt) / determinant, (aa * bt - ab * at) / determinant
        if beta < 0 or alpha < scale / 100:
            beta = max(0.0, beta)
            alpha = max(scale / 100, (at - ab * beta) / aa) if beta == 0.0 else scale / 100
        variances = (bb / determinant, aa / determinant, -ab / determinant)
    return alpha, beta, variances


def _spread(values: Sequence[float] | deque[float], middle: float) -> float | None:
    """The relative spread, from the median deviation; None of too few."""
    if len(values) < 4 or middle <= 0:
        return None
    return 1.4826 * median(abs(value - middle) for value in values) / middle
