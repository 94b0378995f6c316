"""The command line: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import gymnasium
import pytest
import torch
from typer.testing import CliRunner

from persample.cli.app import app
from persample.cli.compare_command import LOOP, METHODS, make_cases, methods, relative_difference
from persample.rl.policies import Features
from persample.utils.measure import peak_memory, time_rounds

SMALL = ["compare", "--episodes", "4", "--hidden", "8", "--rounds", "1"]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def environment():
    """Return a function that registers an environment with given rewards, and returns its name."""

    class Rewarding(gymnasium.Env):
        observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)

        def __init__(self, reward):
            self.reward = reward

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed, options=options)
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), self.reward(), False, False, {}

    def registered(reward):
        gymnasium.register("Rewarding-v0", functools.partial(Rewarding, reward), max_episode_steps=5)
        return "Rewarding-v0"

    yield registered
    gymnasium.registry.pop("Rewarding-v0", None)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deep") / "report"
    result = run(*SMALL, "--output", directory)
    assert result.exit_code == 0, result.output
    return result, directory


class TestCompare:
    def test_prints_a_row_for_each_loss_and_method(self, report):
        result, _ = report
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in result.output.splitlines()]
        rows = [row for row in rows if len(row) == 6]
        assert [row[:2] for row in rows] == [[loss, method] for loss in ("TD(0)", "REINFORCE") for method in METHODS]
        for row in rows:
            assert re.fullmatch(r"\d+\.\d\d ms", row[2])
            assert re.fullmatch(r"\d+\.\d\d MiB", row[3])
            assert re.fullmatch(r"\d+\.\d ×", row[4])
            assert float(row[5]) < 1e-5

    def test_says_what_the_batches_are(self, report):
        sizes = "TD(0): 32 transitions, 121 parameters, REINFORCE: 4 episodes, 130 parameters"
        assert sizes in report[0].output.splitlines()
        assert "every gradient is zero" not in report[0].output

    def test_says_where_there_is_nothing_to_compare(self):
        """On FrozenLake, whose observations are discrete, one episode gets no reward."""
        result = run("compare", "--episodes", "1", "--hidden", "4", "--rounds", "1", "--env", "FrozenLake-v1")
        assert result.exit_code == 0, result.output
        assert "REINFORCE: every gradient is zero" in result.output

    def test_rewards_that_are_all_equal_can_be_compared(self, environment):
        result = run(*SMALL, "--env", environment(lambda: -1.0))
        assert "every gradient is zero" not in result.output

    @pytest.mark.filterwarnings("ignore:.*NaN value:UserWarning")
    def test_a_wrong_update_is_an_error(self, environment):
        """Everything is printed, and the exit code says that the methods do not agree."""
        result = run(*SMALL, "--env", environment(lambda: float("nan")))
        assert result.exit_code == 1
        assert result.output.count("nan > 1e-05") == 2 * len(METHODS)

    def test_draws_a_picture(self, report):
        picture = (report[1] / "compare.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        width, height = (int.from_bytes(picture[i : i + 4], "big") for i in (16, 20))
        assert width > 1000
        assert height > 600

    def test_writes_nothing_unasked(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = run(*SMALL, "--engine", "loop")
        assert result.exit_code == 0, result.output
        assert "REINFORCE" in result.output
        assert not list(tmp_path.iterdir())

    def test_the_methods_are_not_one_and_the_same(self):
        """The four ways agree, but each is computed by itself: break one and its difference shows."""
        for case in make_cases("CartPole-v1", 3, 4, 0):
            updates = {name: call() for name, call in methods(case, "eager").items()}
            assert tuple(updates) == METHODS
            for name in METHODS[1:]:
                assert relative_difference(updates[name], updates[LOOP]) < 1e-5
                wrong = {key: value * 1.001 for key, value in updates[name].items()}
                assert relative_difference(wrong, updates[LOOP]) > 1e-4


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--env", "Nope-v1"], r"--env: .*'Nope-v1'.*doesn't exist"),
            (["--env", "Pendulum-v1"], r"--env: needs a Discrete action space, received Box \(continuous actions\)"),
            (["--env", "Blackjack-v1"], r"--env: needs a flat Box or a Discrete observation space, received Tuple"),
            (["--episodes", "0"], r"Invalid value for '--episodes'"),
            (["--hidden", "-3"], r"Invalid value for '--hidden'"),
            (["--rounds", "0"], r"Invalid value for '--rounds'"),
            (["--seed", "-1"], r"Invalid value for '--seed'"),
            (["--engine", "fast"], r"Invalid value for '--engine': .*'fast' is not one of 'eager', 'traced'"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, list) else "",
    )
    def test_one_clear_line_and_exit_code_2(self, arguments, message):
        result = run(*SMALL, *arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert len(result.stderr.strip().splitlines()) == 1
        assert re.search(message, result.stderr)

    def test_a_directory_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("in the way")
        result = run(*SMALL, "--output", tmp_path / "file" / "report")
        assert result.exit_code == 2
        assert re.search(r"--output: expected a directory that can be written to, received .*file", result.stderr)
        assert len(result.stderr.strip().splitlines()) == 1

    def test_a_directory_in_the_place_of_a_file(self, tmp_path):
        name = "compare.png"
        (tmp_path / name).mkdir()
        result = run(*SMALL, "--output", tmp_path)
        assert result.exit_code == 2
        assert f"({name} is a directory)" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert [path.name for path in tmp_path.iterdir()] == [name]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["compare", "--episodes", "many"], "--episodes"),
            (["compare", "--hidden"], "--hidden"),
            (["compare", "--nope"], "No such option: --nope"),
            (["compare", "more"], "unexpected extra argument"),
            (["nope"], "No such command 'nope'"),
        ],
        ids="-".join,
    )
    def test_arguments_that_cannot_be_parsed(self, arguments, message):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert re.fullmatch(rf"persample: .*{message}.* See --help\.\n", result.stderr)

    def test_an_interrupt(self, environment):
        def interrupted():
            raise KeyboardInterrupt

        result = run(*SMALL, "--env", environment(interrupted))
        assert result.exit_code == 130
        assert result.stdout == ""
        assert result.stderr.splitlines()[-1] == "persample: interrupted"
        assert "Traceback" not in result.stderr


def test_version_and_help():
    assert re.fullmatch(r"persample \d+\.\d+\.\d+\n", run("--version").output)
    assert "compare" in run("--help").output
    assert "--episodes" in run("compare", "--help").output
    bare = run()
    assert (bare.exit_code, bare.output) == (0, run("--help").output)


WITHOUT = """
import sys
import persample
from persample.cli import main
before = dict(sys.modules)
for extra in ("typer", "rich", "matplotlib", "PIL", "gymnasium"):
    sys.modules[extra] = None
    try:
        main()
    except SystemExit as error:
        sys.stderr.write(f"{extra} {error.code}\\n")
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
"""


def test_a_missing_extra_is_named():
    """``import persample`` goes through without any of them."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    line = "persample's command line needs the extra: pip install '.[cli]' in a checkout\n"
    extras = ["typer", "rich", "matplotlib", "PIL", "gymnasium"]
    assert done.stderr == "".join(f"{line}{extra} 2\n" for extra in extras)


def test_discrete_observations_are_one_hot():
    from gymnasium import spaces

    features = Features(spaces.Discrete(3, start=1))
    assert features(torch.tensor([1, 3])).tolist() == [[1, 0, 0], [0, 0, 1]]


class TestMeasure:
    def test_peak_memory_of_a_known_pattern(self):
        def call():
            first = torch.ones(1000)  # 4000 bytes, then 12000, then 8000 + 4000
            second = torch.ones(2000)
            del first
            return second, torch.ones(1000)

        assert peak_memory(call) == 12_000
        assert peak_memory(lambda: [torch.ones(1000) for _ in range(3)]) == 12_000
        assert 4_000 < peak_memory(lambda: [torch.ones(1000).sum() for _ in range(3)]) < 5_000  # freed one by one

    def test_time_rounds_warms_up_and_takes_turns(self):
        order = []
        calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
        seconds = time_rounds(calls, 2)
        assert order == ["a", "b"] + ["a", "b"] * 2
        assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}

    def test_relative_difference(self):
        one, zero = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
        assert relative_difference(one, one) == 0
        assert relative_difference(zero, zero) == 0
        assert relative_difference(one, zero) == float("inf")
        assert relative_difference(one, {"w": torch.tensor([1.0, 2.0])}) == 0.5
