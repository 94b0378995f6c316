"""Going back in the random streams: the CPU's, those of devices (stood in for), NumPy's and Python's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from persample.utils import rng


class Device:
    """The only one of its kind, as torch.mps."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(3)]

    def get_rng_state(self):
        return self.generators[0].get_state()

    def set_rng_state(self, state):
        self.generators[0].set_state(state)

    def draw(self):
        return [torch.rand(2, generator=generator) for generator in self.generators]


class Devices(Device):
    """Two devices of a kind that numbers them, as torch.cuda and torch.xpu do."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    def is_initialized(self):
        return True

    def get_rng_state_all(self):
        return [generator.get_state() for generator in self.generators]

    def set_rng_state(self, state, device):
        self.generators[device].set_state(state)


def draw(devices=None):
    numbers = [torch.rand(2), torch.tensor(random.random()), torch.tensor(np.random.rand())]  # noqa: NPY002
    return numbers + (devices.draw() if devices else [])


def equal(a, b):
    return all(map(torch.equal, a, b))


def test_every_stream_goes_back():
    streams = rng.Streams.now()
    first, second = draw(), draw()
    streams.go_back()
    assert equal(draw(), first)
    assert equal(draw(), second)
    assert not equal(first, second)


@pytest.mark.parametrize("kind", [Device, Devices])
def test_streams_of_devices_go_back(kind, monkeypatch):
    devices = kind()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    streams = rng.Streams.now()
    assert not rng.moved_since(streams.torch)
    first = draw(devices)
    assert rng.moved_since(streams.torch)
    streams.go_back()
    assert equal(draw(devices), first)


def test_a_device_that_was_not_used_is_left_alone(monkeypatch):
    devices = Devices()
    devices.is_initialized = lambda: False
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    assert len(rng.snapshot()) == 1
