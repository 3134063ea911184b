"""What others do against liars, told the lies of `audit_lies`: SENTINEL-like statistics, and BTARD's check in floats.

A small pipeline of three stages (tanh layers of 16, a regression) in numpy: ten replicas of each stage, of which number
0 of the middle one lies (of the pair: 0 and 1). Each microbatch takes one replica of each stage. All are honest for the
first fifth of the steps, in which the statistics settle; microbatches of liars count from then on.

SENTINEL-like (after arXiv:2603.03592, in our words and with our thresholds): a trusted verifier between stages keeps
moving statistics of what passes: the norm of activations and of gradients, and their cosine with the moving mean of
all. A message is flagged if one of them is more than DEVIATIONS moving deviations off; who is flagged in more than half
of its last WINDOW messages is banned. Nothing is computed again. How sums are made is outside of it.

BTARD-like (after arXiv:2106.11257): inside each stage contributions are aggregated by CenteredClip, of which everybody
checks that clipped differences to the result add up to nothing, as they do at its fixed point; and a random validator
computes a share q of the contributions again. All of it in floats, on machines that round in their own way: a
difference below TOLERANCE is no lie. What passes from stage to stage is outside of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

STAGES, REPLICAS, WIDTH, ROWS = 3, 10, 16, 32
WARM_SHARE = 0.2
"""Of all steps."""

DEVIATIONS, WINDOW, DECAY = 4.0, 20, 0.99
RATE, TOLERANCE, ROUNDING = 0.01, 1e-2, 1e-4
"""Share of contributions that a validator computes again; what it lets pass; how far honest machines are apart."""

CLIP_RADIUS, CLIP_ROUNDS, LEARNING = 1.0, 10, 0.05

Array = NDArray[np.float64]

ATTACKS = ("", "sign-flip", "scaled", "random", "stale", "lazy", "tenth", "adaptive", "pair", "reducer")
"""Lies that can be told to these at all: neither has auditors' findings, or asks accusers."""


@dataclass
class Found:
    """What a baseline made of one lie, as `audit.Row` has it."""

    attack: str
    method: str
    seed: int
    liars: int
    q: float
    f: float
    bound: int
    caught: bool = False
    microbatches_until: int | None = None
    own: int = 0
    false_bans: int = 0
    loss_ratio: float = math.nan
    overhead: float = 0.0


class Model:
    """Three tanh layers and a linear head that learn what three others with other weights give, and noise."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        draw = lambda: [rng.normal(0, 1 / math.sqrt(WIDTH), (WIDTH, WIDTH)) for _ in range(STAGES)]  # noqa: E731
        self.weights, self._true = draw(), draw()
        # As activations of large models have: without it no direction would tell anything.
        self._middle = rng.normal(size=WIDTH)
        self._rng = rng
        self.held_out = self.batch(1000)

    def batch(self, rows: int = ROWS) -> tuple[Array, Array]:
        """Inputs and targets [rows, WIDTH]."""
        x = y = self._rng.normal(size=(rows, WIDTH)) + self._middle
        for weight in self._true:
            y = np.tanh(y @ weight)
        return x, y + 0.1 * self._rng.normal(size=y.shape)

    def loss(self) -> float:
        """Mean squared error on what is held out."""
        x, y = self.held_out
        for weight in self.weights:
            x = np.tanh(x @ weight)
        return float(((x - y) ** 2).mean())


class Liar:
    """What it sends instead of an honest tensor. `false` says of each microbatch whether it is."""

    def __init__(self, attack: str, seed: int) -> None:
        self.attack, self._rng = attack, np.random.default_rng((seed, 7))
        self._kept: dict[str, tuple[int, Array]] = {}
        self.quiet_until = -1

    def false(self, step: int) -> bool:
        """Is the next one?"""
        if self.attack == "adaptive":
            return step >= self.quiet_until
        return self.attack != "reducer" and (self.attack != "tenth" or self._rng.random() < 0.1)

    def sends(self, what: str, step: int, honest: Array) -> Array:
        """An activation ("output"), or a gradient ("answer", "delta")."""
        match self.attack:
            case "random":
                noise = self._rng.normal(size=honest.shape)
                return noise * (np.linalg.norm(honest) / np.linalg.norm(noise))
            case "stale" | "lazy":
                since, value = self._kept.get(what, (-99, honest))
                if since < step - (10 if self.attack == "stale" else 0):
                    self._kept[what] = step, honest
                return value
            case "scaled" if what != "output":
                return 10.0 * honest
            case "sign-flip" | "tenth" | "adaptive" | "pair" if what != "output":
                return -honest
        return honest


class Statistics:
    """Moving mean and deviation of one number."""

    def __init__(self) -> None:
        self.mean, self.square, self.count = 0.0, 0.0, 0

    def off(self, value: float) -> bool:
        """Is it far from what came before? Takes it in, of what is far off no more than is usual."""
        usual = math.sqrt(max(self.square - self.mean**2, 1e-12))
        far = self.count > 50 and abs(value - self.mean) > DEVIATIONS * usual
        if far:
            value = self.mean + math.copysign(usual, value - self.mean)
        decay = min(DECAY, self.count / (self.count + 1))
        self.mean = decay * self.mean + (1 - decay) * value
        self.square = decay * self.square + (1 - decay) * value**2
        self.count += 1
        return far


class Verifier:
    """SENTINEL-like: between two stages, trusted, and without compute."""

    def __init__(self) -> None:
        self._norms = {what: Statistics() for what in ("output", "answer")}
        self._cosines = {what: Statistics() for what in ("output", "answer")}
        self._directions: dict[str, Array] = {}

    def flags(self, what: str, value: Array) -> bool:
        """Is this message out of the ordinary?"""
        flat = value.mean(axis=0)
        norm = float(np.linalg.norm(flat))
        direction = self._directions.get(what)
        cosine = 1.0
        if direction is not None:
            cosine = float(flat @ direction / max(norm * float(np.linalg.norm(direction)), 1e-12))
        self._directions[what] = flat if direction is None else DECAY * direction + (1 - DECAY) * flat
        return self._norms[what].off(float(np.linalg.norm(value))) | self._cosines[what].off(cosine)


def settles(contributions: Array, center: Array) -> bool:
    """Is that what CenteredClip comes to, within the tolerance of machines that round differently?"""
    return float(np.linalg.norm(centered_clip(contributions) - center)) <= TOLERANCE * float(np.linalg.norm(center))


def centered_clip(contributions: Array) -> Array:
    """A few steps towards everybody, each of bounded length (arXiv:2012.10333)."""
    center = np.median(contributions, axis=0)
    radius = CLIP_RADIUS * float(np.median(np.linalg.norm(contributions - center, axis=1)) + 1e-12)
    for _ in range(CLIP_ROUNDS):
        away = contributions - center
        lengths = np.maximum(np.linalg.norm(away, axis=1, keepdims=True), 1e-12)
        center = center + (away * np.minimum(1.0, radius / lengths)).mean(axis=0)
    return np.asarray(center)


class Run:
    """One training with a liar in the middle stage. method: "sentinel", "btard" or "" for plain means."""

    def __init__(self, attack: str, method: str, seed: int, microbatches: int, steps: int) -> None:
        self.model, self.method, self.attack = Model(seed), method, attack
        self._rng = np.random.default_rng((seed, 3))
        number = 0 if not attack else 2 if attack == "pair" else 1
        self.liars = {(1, place): Liar(attack, seed + place) for place in range(number)}
        self.microbatches, self.steps, self.warm = microbatches, steps, int(WARM_SHARE * steps)
        self.banned: set[tuple[int, int]] = set()
        self.own, self.named = dict.fromkeys(self.liars, 0), dict[tuple[int, int], int]()
        self._verifiers = [Verifier() for _ in range(STAGES)]
        self._flags = {
            (stage, place): deque[bool](maxlen=WINDOW) for stage in range(STAGES) for place in range(REPLICAS)
        }

    def run(self) -> float:
        """The held-out loss at the end."""
        for step in range(self.steps):
            sums = [np.zeros((REPLICAS, WIDTH * WIDTH)) for _ in range(STAGES)]
            honest = [np.zeros((REPLICAS, WIDTH * WIDTH)) for _ in range(STAGES)]
            counts = np.zeros((STAGES, REPLICAS))
            for _ in range(self.microbatches):
                self._microbatch(step, sums, honest, counts)
            for stage in range(STAGES):
                self._reduce(step, stage, sums[stage], honest[stage], counts[stage])
        return self.model.loss()

    def _microbatch(self, step: int, sums: list[Array], honest: list[Array], counts: Array) -> None:
        route = [self._someone(stage) for stage in range(STAGES)]
        lies = {
            at: step >= self.warm and (stage, at) in self.liars and self.liars[stage, at].false(step)
            for stage, at in enumerate(route)
            if (stage, at) in self.liars
        }
        x, y = self.model.batch()
        inputs, outputs = [], []
        for stage, at in enumerate(route):
            inputs.append(x)
            x = np.tanh(x @ self.model.weights[stage])
            outputs.append(x)
            x = self._said("output", step, stage, at, x, lies)
        back = 2 * (x - y) / ROWS
        for stage in reversed(range(STAGES)):
            at = route[stage]
            through = back * (1 - outputs[stage] ** 2)
            delta = (inputs[stage].T @ through).ravel()
            honest[stage][at] += delta
            liar = self.liars.get((stage, at))
            sums[stage][at] += liar.sends("delta", step, delta) if liar and lies.get(at) else delta
            counts[stage, at] += 1
            if liar and step >= self.warm:
                self.own[stage, at] += 1
            if stage:
                back = self._said("answer", step, stage, at, through @ self.model.weights[stage].T, lies)

    def _said(self, what: str, step: int, stage: int, at: int, value: Array, lies: dict[int, bool]) -> Array:
        liar = self.liars.get((stage, at))
        if liar is not None and lies.get(at):
            value = liar.sends(what, step, value)
        if self.method == "sentinel":
            flags = self._flags[stage, at]
            flags.append(self._verifiers[stage].flags(what, value))
            if step >= self.warm and len(flags) == WINDOW and sum(flags) > WINDOW / 2:
                self._ban(stage, at)
        return value

    def _reduce(self, step: int, stage: int, sums: Array, honest: Array, counts: Array) -> None:
        there = [at for at in range(REPLICAS) if counts[at] and (stage, at) not in self.banned]
        if self.method == "btard":
            for at in there:
                if self._rng.random() < RATE:
                    self._validate(step, stage, at, sums[at], honest[at])
        there = [at for at in there if (stage, at) not in self.banned]
        means = sums[there] / counts[there, None]
        btard = self.method == "btard"
        total = centered_clip(means) if btard else sums[there].sum(axis=0) / counts[there].sum()
        liar = (1, 0)
        if self.attack == "reducer" and step >= self.warm and stage == 1 and liar not in self.banned:
            false = total.copy()
            part = slice(0, total.size // REPLICAS)
            false[part] = -total[part]
            # Everybody sees that clipped differences to it do not add up to nothing; others make it again.
            if btard and not settles(means, false):
                self._ban(*liar)
            else:
                total = false
        norm = float(np.linalg.norm(total))
        self.model.weights[stage] -= LEARNING * min(1.0, 5.0 / max(norm, 1e-12)) * total.reshape(WIDTH, WIDTH)

    def _validate(self, step: int, stage: int, at: int, said: Array, honest: Array) -> None:
        """Another machine, which rounds otherwise, computes this contribution again."""
        again = honest * (1 + ROUNDING * self._rng.normal(size=honest.shape))
        if (liar := self.liars.get((stage, at))) is not None:
            liar.quiet_until = step + 4
        if np.linalg.norm(said - again) > TOLERANCE * np.linalg.norm(again):
            self._ban(stage, at)

    def _someone(self, stage: int) -> int:
        there = [at for at in range(REPLICAS) if (stage, at) not in self.banned]
        return int(self._rng.choice(there))

    def _ban(self, stage: int, at: int) -> None:
        # Somebody has to be left.
        if (stage, at) in self.banned or sum(of == stage for of, _ in self.banned) >= REPLICAS - 1:
            return
        self.banned.add((stage, at))
        if (stage, at) in self.own:
            self.named[stage, at] = self.own[stage, at]


@cache
def _honest_loss(seed: int, microbatches: int, steps: int) -> float:
    return Run("", "", seed, microbatches, steps).run()


def _found(attack: str, method: str, seed: int, microbatches: int, steps: int) -> Found:
    run = Run(attack, method, seed, microbatches, steps)
    loss = run.run()
    q, f = RATE, 0.1 if attack == "tenth" else 1.0
    found = Found(attack or "honest", method, seed, len(run.liars), q, f, math.ceil(math.log(100) / (q * f)))
    last = max(run.own, key=lambda liar: run.named.get(liar, math.inf), default=None)
    if last is not None:
        found.own, found.microbatches_until = run.own[last], run.named.get(last)
        found.caught = found.microbatches_until is not None and found.microbatches_until <= found.bound
    found.false_bans = len(run.banned - run.liars.keys())
    found.loss_ratio = loss / _honest_loss(seed, microbatches, steps)
    found.overhead = RATE if method == "btard" else 0.0
    return found


def sentinel(attack: str, *, seed: int, microbatches: int, steps: int) -> Found:
    """Statistics between stages."""
    return _found(attack, "sentinel", seed, microbatches, steps)


def btard(attack: str, *, seed: int, microbatches: int, steps: int) -> Found:
    """CenteredClip, and validators within a tolerance."""
    return _found(attack, "btard", seed, microbatches, steps)


DETECTORS: dict[str, Callable[..., Found]] = {"sentinel": sentinel, "btard": btard}
