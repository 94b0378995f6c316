"""Training: it learns, its updates are the naive loop's, and interrupted it goes on as if nothing had happened."""

from __future__ import annotations

import copy
import csv
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from torch import nn
from typer.testing import CliRunner

from persample import ArgumentError, naive
from persample.cli.app import app
from persample.cli.train_command import interruptible
from persample.rl import RandomWalk, exact_values, make_envs, optimal_actions, transition_table
from persample.rl.algorithms import bootstrapped
from persample.rl.rollouts import Episodes
from persample.rl.training import (
    NPG,
    TD0,
    Algorithm,
    Batch,
    Reinforce,
    Trainer,
    evaluate,
    load_checkpoint,
    save_checkpoint,
)

WALK = "persample/RandomWalk-v0"
SMALL = {
    "td0": (TD0(batch=10, hidden=6), "CartPole-v1"),
    "td0 table": (TD0(batch=40, epsilon=0.3), WALK),
    "reinforce": (Reinforce(batch=2, hidden=6), "CartPole-v1"),
    "reinforce, continuous": (Reinforce(batch=2, hidden=6), "Pendulum-v1"),
    "npg": (NPG(batch=1, hidden=6), "CartPole-v1"),
    "npg, continuous": (NPG(batch=1, hidden=6), "Pendulum-v1"),
}
EACH = pytest.mark.parametrize("name", SMALL)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def trainer(name, hyperparameters=(), **settings):
    hyperparameters = dict(hyperparameters)
    algorithm, env = SMALL[name]
    return Trainer(replace(algorithm, **hyperparameters), env, **settings)


@pytest.fixture
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def naive_update(network, optimizer, algorithm, batch, max_norm):
    """One backward pass per sample, clipped by hand."""
    names = [name for name, _ in network.named_parameters()]
    params = {name: param.detach().clone() for name, param in network.named_parameters()}

    def loss(params, *sample):
        with torch.nn.utils.stateless._reparametrize_module(network, params):
            return algorithm.loss(network, *sample)

    rows = [grads for _, grads in naive.loop(loss, params, batch.samples)]
    norms = [math.sqrt(sum(float(g.square().sum()) for g in row.values())) for row in rows]
    scales = [min(1.0, max_norm / norm) if norm else 1.0 for norm in norms]
    for name, param in zip(names, network.parameters(), strict=True):
        param.grad = sum(scale * row[name] for scale, row in zip(scales, rows, strict=True)) / len(rows)
    optimizer.step()
    return norms


@pytest.mark.parametrize(
    ("name", "max_norm"),
    [("td0", 0.5), ("td0 table", math.inf), ("reinforce", math.inf), ("reinforce, continuous", 0.5)],
)
@pytest.mark.usefixtures("doubles")
def test_20_updates_are_those_of_the_naive_loop(name, max_norm):
    mine, other = (trainer(name, {"max_norm": max_norm}, steps=10**6) for _ in range(2))
    algorithm, network = other.algorithm, other.network
    optimizer, steps, clipped = torch.optim.Adam(network.parameters()), 0, []
    for k in range(20):
        seed = int(np.random.SeedSequence([0, k]).generate_state(1, np.uint64)[0] >> 1)
        batch = algorithm.collect(network, other.envs, seed)
        optimizer.param_groups[0]["lr"] = algorithm.learning_rate * (1 - steps / 10**6)
        norms = naive_update(network, optimizer, algorithm, batch, max_norm)
        steps += batch.steps
        row = mine.update()
        assert row["steps"] == steps
        assert row["max_norm"] == pytest.approx(max(norms), rel=1e-9)
        clipped.append(row.get("clipped", 0.0))
        for a, b in zip(mine.network.parameters(), network.parameters(), strict=True):
            assert (a - b).abs().max() < 1e-9
    moved = trainer(name).network.parameters()
    assert any((a - b).abs().max() > 1e-2 for a, b in zip(moved, network.parameters(), strict=True))
    assert (max(clipped) > 0) == (max_norm == 0.5)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.usefixtures("doubles")
def test_npg_makes_the_steps_of_dense_matrices(env):
    algorithm = NPG(batch=1, hidden=4, max_kl=0.03, damping=0.2, value_damping=0.3)
    training = Trainer(algorithm, env, steps=10**6)
    network = copy.deepcopy(training.network)
    for k in range(3):
        seed = int(np.random.SeedSequence([0, k]).generate_state(1, np.uint64)[0] >> 1)
        batch = algorithm.collect(network, training.envs, seed)
        obs, _, adv, returns = batch.samples
        before = [(x, x.detach().clone()) for x in network.parameters()]
        fraction = 1 - training.steps / 10**6
        scores = [_gradient(network.policy, algorithm.loss(network, *row)) for row in zip(*batch.samples, strict=True)]
        values = [_gradient(network.critic, network.value(s)) for s in obs]
        errors = network.value(obs).detach() - returns
        for part, rows, targets, damping in (
            (network.policy, torch.stack(scores), adv, 0.2),
            (network.critic, torch.stack(values), errors, 0.3),
        ):
            fisher = rows.T @ rows / len(rows)
            step = torch.linalg.solve(fisher + damping * torch.eye(len(fisher)), rows.T @ targets / len(rows))
            if part is network.policy:
                step = step * (2 * 0.03 / (step @ fisher @ step)).sqrt()
            for param, x in zip(part.parameters(), _like(part, step), strict=True):
                param.data -= fraction * x
        training.update()
        assert all((x != old).any() for x, old in before)
        for mine, other in zip(training.network.parameters(), network.parameters(), strict=True):
            assert (mine - other).abs().max() < 1e-8  # the condition numbers are below 1e4


def _gradient(module, value):
    grads = torch.autograd.grad(value, list(module.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


def _like(module, step):
    sizes = [p.numel() for p in module.parameters()]
    return [x.view(p.shape) for x, p in zip(step.split(sizes), module.parameters(), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "env", "steps", "least"),
    [(NPG(), "CartPole-v1", 100_000, 475), (NPG(0.95, 32, 8, max_kl=0.05), "Pendulum-v1", 200_000, -250)],
)
def test_npg_learns(algorithm, env, steps, least):
    training = Trainer(algorithm, env, steps=steps)
    while not training.finished:
        row = training.update()
    assert row["average_return"] >= least
    returns = evaluate(training.network, env, seed=0)
    assert sum(returns) / len(returns) >= least


@EACH
def test_the_loop_engine_trains_alike(name):
    eager, loop = trainer(name), trainer(name, engine="loop")
    for _ in range(2):
        assert eager.update() == pytest.approx(loop.update(), rel=1e-3)


class Noisy(TD0):
    """Draws from torch's global stream, too."""

    def collect(self, network, envs, seed):
        batch = super().collect(network, envs, seed)
        return batch._replace(samples=(batch.samples[0], torch.randn(self.batch), *batch.samples[2:]))


@pytest.mark.parametrize("name", [*SMALL, "noisy"])
def test_a_resumed_training_goes_on_bit_for_bit(name, tmp_path, monkeypatch):
    monkeypatch.setitem(SMALL, "noisy", (Noisy(batch=20), "CartPole-v1"))
    straight = trainer(name)
    torch.manual_seed(5)
    for k in range(8):
        straight.update()
        if k == 3:
            save_checkpoint(straight, tmp_path / "checkpoint.pt")
    torch.manual_seed(6)
    resumed = trainer(name)
    load_checkpoint(resumed, tmp_path / "checkpoint.pt")
    assert len(resumed.history) == 4
    for _ in range(4):
        resumed.update()
    assert resumed.history == straight.history
    assert resumed.returns == straight.returns
    for a, b in zip(resumed.network.parameters(), straight.network.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"seed": 1}, "seed: expected 0, as in the checkpoint, received 1"),
        ({"hyperparameters": {"max_norm": 3.0}}, r"algorithm: expected 'TD0\(.*, as in the checkpoint"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(settings, match, tmp_path):
    save_checkpoint(trainer("td0"), tmp_path / "checkpoint.pt")
    with pytest.raises(ArgumentError, match=match):
        load_checkpoint(trainer("td0", **settings), tmp_path / "checkpoint.pt")
    with pytest.raises(ArgumentError, match=r"algorithm: expected 'TD0\(.*, as in the checkpoint, received 'NPG"):
        load_checkpoint(trainer("npg"), tmp_path / "checkpoint.pt")
    load_checkpoint(trainer("td0", steps=7, engine="loop", target=1.0), tmp_path / "checkpoint.pt")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    for content in (b"", b"no checkpoint", None):
        path = tmp_path / "checkpoint.pt"
        path.unlink(missing_ok=True) if content is None else path.write_bytes(content)
        with pytest.raises(ArgumentError, match="resume: expected a checkpoint, received"):
            load_checkpoint(trainer("td0"), path)
    torch.save({"network": {}}, path)
    with pytest.raises(ArgumentError, match="resume: expected a checkpoint, received"):
        load_checkpoint(trainer("td0"), path)


def launch(*arguments):
    code = "from persample.cli import main; main()"
    command = [sys.executable, "-c", code, "train", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows(directory):
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_ctrl_c_stops_with_a_checkpoint_and_the_rest_is_exact(tmp_path):
    settings = ["reinforce", "--steps", 2000, "--batch", 1, "--hidden", 16, "--output"]
    process = launch(*settings, tmp_path / "cut")
    metrics, deadline = tmp_path / "cut" / "metrics.csv", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "persample: interrupted; --resume goes on from here"
    saved = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)
    assert 3 <= len(saved["history"]) == len(rows(tmp_path / "cut"))
    assert f"{len(saved['history'])} updates, {saved['steps']} steps" in output
    assert saved["steps"] < 2000
    assert (tmp_path / "cut" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")

    assert run("train", *settings, tmp_path / "cut").exit_code == 2  # the checkpoint is in the way
    assert run("train", *settings, tmp_path / "cut", "--resume").exit_code == 0
    assert run("train", *settings, tmp_path / "straight").exit_code == 0
    assert rows(tmp_path / "cut") == rows(tmp_path / "straight")
    ends = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("cut", "straight")]
    assert ends[0]["network"].keys() == ends[1]["network"].keys()
    assert all(torch.equal(ends[0]["network"][key], ends[1]["network"][key]) for key in ends[0]["network"])


def test_rows_after_the_last_checkpoint_are_dropped(tmp_path):
    settings = ["td0", "--env", WALK, "--batch", 20, "--output", tmp_path]
    assert run("train", *settings, "--steps", 60).exit_code == 0
    before = (tmp_path / "metrics.csv").read_text()
    (tmp_path / "metrics.csv").write_text(before + "torn row")
    assert run("train", *settings, "--steps", 60, "--resume").exit_code == 0
    assert (tmp_path / "metrics.csv").read_text() == before
    assert run("train", *settings, "--steps", 80, "--resume").exit_code == 0
    assert [int(row["steps"]) for row in rows(tmp_path)] == [20, 40, 60, 80]


def test_the_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as stop_asked:
        assert not stop_asked()
        signal.raise_signal(signal.SIGINT)
        assert stop_asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class TestCommand:
    def test_shows_and_writes_what_happens(self, tmp_path):
        result = run(
            "train", "reinforce", "--steps", 300, "--batch", 4, "--hidden", 8, "--max-norm", 100, "--output", tmp_path
        )
        assert result.exit_code == 0, result.output
        for heading in ("average return", "median norm", "clipped"):
            assert heading in result.stderr
        assert "300/300" in result.stderr
        assert f"Files: {tmp_path}" in result.stdout
        assert "of 100 more after training" in result.stdout
        written = rows(tmp_path)
        assert list(written[0]) == [
            "update",
            "steps",
            "loss",
            "return",
            "average_return",
            "median_norm",
            "max_norm",
            "clipped",
        ]
        assert [int(row["update"]) for row in written] == list(range(1, len(written) + 1))
        assert int(written[-2]["steps"]) < 300 <= int(written[-1]["steps"])

    def test_the_directory_is_named_after_the_training(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert run("train", "td0", "--env", WALK, "--steps", 20, "--batch", 20, "--seed", 3).exit_code == 0
        assert {path.name for path in (tmp_path / "runs" / "td0-persample-RandomWalk-v0-3").iterdir()} == {
            "checkpoint.pt",
            "metrics.csv",
            "learning_curve.png",
        }

    def test_gradients_that_are_all_zero_can_be_drawn(self, tmp_path):
        """Nothing is learned where nothing is rewarded; no warning of logarithms either."""
        unrewarded = gymnasium.wrappers.TransformReward
        gymnasium.register("Zero-v0", entry_point=lambda: unrewarded(RandomWalk(), lambda _: 0.0))
        try:
            arguments = ("td0", "--env", "Zero-v0", "--steps", 40, "--batch", 20, "--output", tmp_path)
            assert run("train", *arguments).exit_code == 0
        finally:
            del gymnasium.registry["Zero-v0"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["ppo"], "No such command 'ppo'"),
            (["td0", "--env", "Nope-v1"], "--env: expected the id of a registered environment, received 'Nope-v1'"),
            (["td0", "--env", "Pendulum-v1"], r"--env: needs a Discrete action space, .*\(continuous actions\)"),
            (["reinforce", "--env", "Blackjack-v1"], "--env: needs a flat Box or a Discrete observation space"),
            (["reinforce", "--epsilon", "0.1"], "No such option: --epsilon"),
            (["td0", "--epsilon", "0.5"], "--epsilon: expected 1 in environments without a table of transitions"),
            (["npg", "--max-norm", "1"], "No such option: --max-norm"),
            (["npg", "--max-kl", "-1"], "--max-kl: expected a number from 0"),
            (["reinforce", "--damping", "1"], "No such option: --damping"),
            (["td0", "--lambda", "0.5"], "No such option: --lambda"),
            (["npg", "--lambda", "1.5"], "--lambda: expected a number from 0 to 1, received 1.5"),
            (["reinforce", "--steps", "0"], "--steps: expected an int from 1"),
            (["reinforce", "--seed", "-1"], "--seed: expected an int from 0"),
            (["reinforce", "--hidden", "0"], "--hidden: expected an int from 1"),
            (["td0", "--learning-rate", "nan"], "--learning-rate: expected a number from 0"),
            (["td0", "--target", "nan"], "--target: expected a number from -inf to inf, received nan"),
            (["td0", "--max-norm", "-1"], "--max-norm: expected a number from 0 to inf, received -1"),
            (["td0", "--engine", "fast"], "Invalid value for '--engine': .*'fast' is not one of 'eager', 'traced'"),
            (["td0", "--resume"], "--resume: expected a checkpoint, received"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, list) else "",
    )
    def test_refuses_in_one_line(self, arguments, message, tmp_path):
        result = run("train", *arguments, "--output", tmp_path / "none")
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1
        assert re.search(message, result.stderr)
        assert not (tmp_path / "none").exists()


class TestLearning:
    @pytest.mark.parametrize(
        ("arguments", "limit"),
        [
            (["--env", WALK, "--discount", 1, "--steps", 100_000], 0.02),
            pytest.param(
                ["--env", "FrozenLake-v1", "--epsilon", 0.1, "--steps", 100_000], 0.03, marks=pytest.mark.slow
            ),
        ],
        ids=["random walk", "FrozenLake"],
    )
    def test_td0_finds_the_exact_values(self, arguments, limit, tmp_path):
        result = run("train", "td0", *arguments, "--output", tmp_path)
        assert result.exit_code == 0
        assert 0 < float(rows(tmp_path)[-1]["value_error"]) < limit < float(rows(tmp_path)[0]["value_error"])
        assert "% of the largest value" in result.stdout

    @pytest.mark.slow
    def test_td0_of_more_seeds(self):
        """A fluke of one seed is no result."""
        for seed in range(3):
            training = Trainer(TD0(epsilon=0.1, learning_rate=0.01), "FrozenLake-v1", seed=seed, steps=1_000_000)
            while not training.finished:
                row = training.update()
            print("TD0", seed, row["value_error"])
            assert row["value_error"] < 0.02

    @pytest.mark.slow
    def test_reinforce_reaches_475(self):
        training = Trainer(Reinforce(), seed=3, target=475)
        while not training.finished:
            row = training.update()
        assert training.solved
        assert len(training.returns) == 100
        assert row["average_return"] >= 475

    @pytest.mark.slow
    @pytest.mark.parametrize("max_norm", [math.inf, 100.0])
    def test_five_seeds_to_the_end(self, max_norm):
        averages, after, start = [], [], time.monotonic()
        for seed in range(5):
            training = Trainer(Reinforce(max_norm=max_norm), seed=seed)
            while not training.finished:
                row = training.update()
            averages.append(row["average_return"])
            returns = evaluate(training.network, "CartPole-v1", seed=seed)
            after.append(sum(returns) / len(returns))
        minutes = (time.monotonic() - start) / 60
        print("REINFORCE", max_norm, averages, after, f"{minutes:.1f} minutes")
        assert sum(average >= 475 for average in averages) >= 4
        assert sum(average >= 475 for average in after) >= 4


class TestTables:
    def test_the_random_walk_is_an_environment(self):
        check_env(RandomWalk(3), skip_render_check=True)
        with pytest.raises(ArgumentError, match="states: expected a positive int, received 0"):
            RandomWalk(0)

    def test_its_values_are_known(self):
        table = transition_table(make_envs(WALK, 1, states=19))
        values = exact_values(table, torch.full((21, 2), 0.5), 1.0)
        torch.testing.assert_close(values[1:-1], torch.arange(1, 20, dtype=torch.float64) / 20)

    @pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
    def test_values_satisfy_the_bellman_equation(self, discount):
        """Summed entry by entry, the way it is written down."""
        table = transition_table(make_envs("FrozenLake-v1", 1))
        pi = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)).softmax(1).double()
        v = exact_values(table, pi, discount)
        for s in range(16):
            expected = sum(
                float(pi[s, a]) * p * (r_t + (0 if terminated else discount * float(v[s_t])))
                for a in range(4)
                for p, s_t, r_t, terminated in table[s][a]
            )
            assert float(v[s]) == pytest.approx(expected, abs=1e-12)

    def test_no_policy_is_better_than_the_optimal_one(self):
        table = transition_table(make_envs("FrozenLake-v1", 1))
        best = exact_values(table, nn.functional.one_hot(optimal_actions(table, 0.95), 4), 0.95)
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            other = nn.functional.one_hot(torch.randint(4, (16,), generator=generator), 4)
            assert (exact_values(table, other, 0.95) <= best + 1e-9).all()
        assert best[0] > 0.1

    def test_values_that_do_not_exist_are_refused(self):
        forever = {0: {0: [(1.0, 0, 1.0, False)]}}
        with pytest.raises(ArgumentError, match="discount: expected values that exist, received 1"):
            exact_values(forever, torch.ones(1, 1), 1.0)
        assert exact_values(forever, torch.ones(1, 1), 0.5).tolist() == [2.0]

    def test_other_environments_have_no_table(self):
        assert transition_table(make_envs("CartPole-v1", 1)) is None
        vector = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
        assert transition_table(vector) is None


def test_the_last_state_of_a_cut_episode_bootstraps():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    discount = torch.tensor([[0.9, 0.9, 0.9], [0.9, 0.0, 0.0], [0.9, 0.0, 0.0]])
    episodes = Episodes(mask, mask, mask, discount, mask)
    assert bootstrapped(episodes).int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TD0(batch=0), "batch: expected an int from 1 to 1.67772e.07, received 0"),
        (lambda: TD0(batch=2.0), "batch: expected an int .*received 2.0"),
        (lambda: Reinforce(hidden=True), "hidden: expected an int .*received True"),
        (lambda: Reinforce(value_weight=-1.0), "value_weight: expected a number from 0"),
        (lambda: NPG(damping=-1.0), "damping: expected a number from 0"),
        (lambda: NPG(max_kl=math.nan), "max_kl: expected a number .*received nan"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()


def test_an_algorithm_of_ones_own():
    class Bandit(Algorithm):
        """One parameter per arm, pulled towards its reward."""

        def network(self, envs):
            return nn.Linear(2, 1, bias=False)

        def collect(self, network, envs, seed):
            return Batch((torch.eye(2).repeat(2, 1), torch.tensor([1.0, -1.0, 1.0, -1.0])), 4)

        def loss(self, network, arm, reward):
            return (network(arm).squeeze() - reward) ** 2

        def metrics(self, network):
            return {"best": float(network.weight.argmax())}

    training = Trainer(Bandit(batch=4, learning_rate=0.1), steps=400)
    while not training.finished:
        row = training.update()
    assert row["best"] == 0
    torch.testing.assert_close(training.network.weight.detach(), torch.tensor([[1.0, -1.0]]), atol=0.05, rtol=0)
