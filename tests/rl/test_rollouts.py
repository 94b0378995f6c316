"""Rollouts against environments that count, so that every row can be foretold, and against plain loops."""

import functools
import importlib
import random
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from persample import per_sample_grads
from persample.errors import ArgumentError
from persample.losses import gaussian_policy_gradient_loss
from persample.rl import categorical_policy, collect_episodes, collect_transitions, gaussian_policy, make_envs
from persample.rl.environments import seeds

MODES = pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.value)
COLLECT = pytest.mark.parametrize("collect", [collect_transitions, collect_episodes])


class Counter(gymnasium.Env):
    """Observes (step, episode, index); episode k has lengths[k % len] steps and terminates if k is even."""

    observation_space = spaces.Box(0, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(4)

    def __init__(self, index, lengths):
        self.index, self.lengths, self.step_count, self.episode = index, lengths, 0, -1

    def observe(self):
        return np.array([self.step_count, self.episode, self.index], float)

    def reset(self, *, seed=None, options=None):
        self.step_count, self.episode = 0, 0 if seed is not None else self.episode + 1
        return self.observe(), {}

    def step(self, action):
        self.step_count += 1
        over = self.step_count == self.lengths[self.episode % len(self.lengths)]
        odd = self.episode % 2 == 1
        return self.observe(), 10.0 * self.step_count + action, over and not odd, over and odd, {}


class Seen(Counter):
    """A counter seen through another observation space."""

    def __init__(self, space):
        super().__init__(0, (3,))
        self.observation_space = space

    def observe(self):
        return np.full(self.observation_space.shape, self.step_count, self.observation_space.dtype)


def counters(mode=AutoresetMode.NEXT_STEP, lengths=((1, 3), (2, 5, 1), (4,)), kind=SyncVectorEnv, **kwargs):
    return kind([lambda i=i, own=own: Counter(i, own) for i, own in enumerate(lengths)], autoreset_mode=mode, **kwargs)


def uniform(observations, generator):
    return torch.randint(0, 4, (len(observations),), generator=generator)


def gaussian(observations, generator):
    return torch.randn(len(observations), 1, generator=generator)


def linear(inputs, outputs, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(inputs, outputs)


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@MODES
@pytest.mark.parametrize("copy", [True, False], ids=["copied", "shared-buffer"])
def test_every_transition_is_the_one_that_happened(mode, copy):
    lengths = ((1, 3), (2, 5, 1), (4,))
    batch = collect_transitions(counters(mode, lengths, copy=copy), uniform, 200, discount=0.5, seed=0)
    step, episode, index = batch.obs_tm1.T
    assert torch.equal(batch.obs_t, batch.obs_tm1 + torch.tensor([1.0, 0.0, 0.0]))
    assert torch.equal(batch.r_t, 10 * (step + 1) + batch.a_tm1)
    for i, own in enumerate(lengths):
        mine = index == i
        steps = [(s, k) for k in range(200) for s in range(own[k % len(own)])][: int(mine.sum())]
        assert torch.equal(torch.stack([step, episode], 1)[mine], torch.tensor(steps, dtype=torch.float32))
        terminates = [s + 1 == own[k % len(own)] and k % 2 == 0 for s, k in steps]
        assert torch.equal(batch.discount_t[mine], torch.where(torch.tensor(terminates), 0.0, 0.5))


@MODES
@pytest.mark.parametrize("count", [1, 2, 3, 4, 50])
def test_counts_are_exact(mode, count):
    for collect in (collect_transitions, collect_episodes):
        batch = collect(counters(mode), uniform, count, seed=0)
        assert all(len(field) == count for field in batch)
        firsts = batch[0].reshape(count, -1, 3)[:3, 0]  # rows go round the environments
        assert firsts[:, 2].tolist() == [0, 1, 2][:count]


@MODES
@pytest.mark.parametrize("max_steps", [None, 1, 2, 3])
def test_episodes_are_shared_out_in_advance(mode, max_steps):
    lengths = ((1, 3), (12, 20), (4,))  # taking the first seven to finish would give six of environment 0
    batch = collect_episodes(counters(mode, lengths), uniform, 7, discount=0.5, seed=0, max_steps=max_steps)
    whole = [lengths[e % 3][(e // 3) % len(lengths[e % 3])] for e in range(7)]
    cut = [min(length, max_steps or length) for length in whole]
    steps = torch.arange(max(cut))
    assert torch.equal(batch.mask_t, steps < torch.tensor(cut)[:, None])
    for e, row in enumerate(zip(*batch, strict=True)):
        obs, a, r, discount, mask = row
        expected = torch.tensor([[t, e // 3, e % 3] for t in range(cut[e])], dtype=torch.float32)
        assert torch.equal(obs[mask], expected)
        assert torch.equal(r[mask], 10.0 * (steps[mask] + 1) + a[mask])
        terminated = cut[e] == whole[e] and (e // 3) % 2 == 0
        assert discount[mask].tolist() == [0.5] * (cut[e] - 1) + [0.0 if terminated else 0.5]
        assert not any(field[~mask].any() for field in (obs, a, r, discount))


@MODES
@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Pendulum-v1"])
def test_a_plain_loop_over_one_environment_does_the_same(env_id, mode):
    kwargs = {"max_episode_steps": 60}
    network = {"CartPole-v1": linear(4, 2), "FrozenLake-v1": nn.Embedding(16, 4, _weight=torch.zeros(16, 4))}.get(
        env_id
    )
    policy = gaussian if network is None else categorical_policy(network)
    envs = make_envs(env_id, 1, vector_kwargs={"autoreset_mode": mode}, **kwargs)
    batch = collect_transitions(envs, policy, 150, discount=0.9, seed=5)
    env, (env_seed, policy_seed) = gymnasium.make(env_id, **kwargs), seeds(5)
    generator, rows = torch.Generator().manual_seed(policy_seed), []
    obs, _ = env.reset(seed=env_seed)
    for _ in range(150):
        (action,) = policy(torch.tensor(obs)[None], generator)
        following, reward, terminated, truncated, _ = env.step(action.numpy() if action.ndim else action.item())
        rows.append((obs, action, reward, 0.9 * (1 - terminated), following))
        obs = following
        if terminated or truncated:
            if mode is AutoresetMode.NEXT_STEP:
                policy(torch.tensor(obs)[None], generator)  # the action of the step that only resets
            obs, _ = env.reset()
    for field, column in zip(batch, zip(*rows, strict=True), strict=True):
        assert torch.equal(field, torch.stack([torch.as_tensor(x).to(field.dtype) for x in column]))
    assert batch.obs_t.dtype == (torch.int64 if env_id == "FrozenLake-v1" else torch.float32)
    assert batch.a_tm1.dtype == (torch.float32 if env_id == "Pendulum-v1" else torch.int64)
    assert (batch.discount_t == 0).any() == (env_id != "Pendulum-v1")


def test_episodes_can_be_replayed_from_their_actions():
    batch = collect_episodes(make_envs("CartPole-v1", 4), categorical_policy(linear(4, 2)), 10, discount=1.0, seed=3)
    assert not batch.mask_t.all()
    for i in range(4):
        env = gymnasium.make("CartPole-v1")
        for e in range(i, 10, 4):
            obs, _ = env.reset(seed=seeds(3)[0] + i if e == i else None)
            for t in range(int(batch.mask_t[e].sum())):
                assert torch.equal(batch.obs_t[e, t], torch.from_numpy(obs))
                obs, _, terminated, _, _ = env.step(int(batch.a_t[e, t]))
                assert batch.discount_t[e, t] == 1 - terminated
            assert terminated


@COLLECT
def test_the_seed_decides_everything_and_the_global_generators_nothing(collect):
    envs, policy = make_envs("CartPole-v1", 3), categorical_policy(linear(4, 2))
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first = collect(envs, policy, 20, seed=0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert before[2] == random.getstate()
    torch.rand(1)
    assert equal(first, collect(envs, policy, 20, seed=0))
    other = collect(envs, policy, 20, seed=1)
    # The environments of neighbouring seeds have no start in common, either.
    assert not set(map(tuple, first[0].reshape(-1, 4).tolist())) & set(map(tuple, other[0][other[0].any(-1)].tolist()))


def test_gymnasiums_own_vectorized_environments_work():
    envs = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    batch = collect_episodes(envs, categorical_policy(linear(4, 2)), 6, discount=1.0, seed=0)
    assert (batch.obs_t[:, 0].abs() <= 0.05).all()  # every episode begins at a start state
    assert torch.equal(batch.discount_t.sum(1), batch.mask_t.sum(1) - 1.0)  # and ends where the pole falls
    with pytest.raises(ArgumentError, match=r"expected environments that reset only those in options\['reset_mask'\]"):
        collect_episodes(envs, categorical_policy(linear(4, 2)), 60, seed=0, max_steps=12)


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (spaces.Box(0, 9, (2, 3, 3), np.uint8), torch.uint8),
        (spaces.Box(0, 9, (2,), np.int16), torch.int64),
        (spaces.Box(0, 9, (), np.float64), torch.float32),
        (spaces.Discrete(9), torch.int64),
        (spaces.MultiDiscrete([9, 9]), torch.int64),
    ],
    ids=str,
)
@COLLECT
def test_observations_keep_their_shape_and_take_a_dtype_that_torch_can_use(collect, space, dtype):
    batch = collect(SyncVectorEnv([lambda: Seen(space)] * 2, autoreset_mode="SameStep"), uniform, 12, seed=0)
    assert batch[0].dtype == dtype
    assert batch[0].shape[-len(space.shape) or batch[0].ndim :] == space.shape
    assert batch[0].max() == 2
    if collect is collect_transitions:
        assert batch.obs_t.dtype == dtype
        assert torch.equal(batch.obs_t, batch.obs_tm1 + 1)


@COLLECT
@pytest.mark.parametrize("choose", [uniform, gaussian])
def test_a_policy_may_reuse_its_buffers(collect, choose):
    buffer = choose(torch.zeros(3, 1), torch.Generator())

    def policy(observations, generator):
        buffer.copy_(choose(observations, generator))
        observations.zero_()
        return buffer

    envs = counters() if choose is uniform else make_envs("Pendulum-v1", 3, max_episode_steps=5)
    assert equal(collect(envs, policy, 9, seed=0), collect(envs, choose, 9, seed=0))


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_called_without_grad_in_the_mode_it_is_in(training):
    network, seen = linear(3, 4).train(training), set()
    network.register_forward_hook(lambda module, *_: seen.add((module.training, torch.is_grad_enabled())))
    categorical_policy(network)(torch.zeros(2, 3), torch.Generator())
    collect_transitions(counters(), lambda obs, generator: uniform(network(obs), generator), 9, seed=0)
    assert seen == {(training, False)}
    assert network.training == training


def test_metadata_that_other_environments_overwrote_are_not_believed():
    envs = counters()
    envs.metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # what gymnasium 1.1 does to environments of one class
    assert equal(collect_transitions(envs, uniform, 50, seed=0), collect_transitions(counters(), uniform, 50, seed=0))


def test_the_categorical_policy_samples_the_softmax_and_only_from_its_generator():
    logits = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64).log().expand(20000, 3).requires_grad_()
    policy, state = categorical_policy(nn.Identity()), torch.get_rng_state()
    actions = policy(logits, torch.Generator().manual_seed(0))
    assert (actions.bincount() / 20000).tolist() == pytest.approx([0.1, 0.2, 0.7], abs=0.015)
    assert torch.equal(actions, policy(logits, torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ArgumentError, match=r"network: expected logits of shape \[3, A\], received shape \(3,\)"):
        categorical_policy(nn.Flatten(0))(torch.zeros(3, 1), torch.Generator())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("CartPoel-v1",), "env_id: .*registered environment, received 'CartPoel-v1'.*Did you mean: `CartPole`"),
        (("CartPole-v7",), "env_id: .*versioned environments: .*`v1`"),
        (("not an id",), "env_id: .*Malformed"),
        (("no_such_module:Name-v0",), "env_id: expected an environment whose dependencies are .*no_such_module"),
        (("Needy-v0",), "env_id: expected an environment whose dependencies are installed.*pip install box"),
        (("CartPole-v1", 0), "num_envs: expected a positive int, received 0"),
        (("CartPole-v1", 2.0), "num_envs: expected a positive int, received 2.0"),
    ],
)
def test_make_envs_says_what_is_wrong(arguments, match, monkeypatch):
    def needy():
        raise gymnasium.error.DependencyNotInstalled("pip install box")

    monkeypatch.setitem(gymnasium.registry, "Needy-v0", EnvSpec("Needy-v0", entry_point=needy))
    with pytest.raises(ArgumentError, match=match):
        make_envs(*arguments)


def refused(envs=None, policy=uniform, count=5, *, collect=collect_transitions, **options):
    collect(counters() if envs is None else envs, policy, count, **{"seed": 0, **options})


def without_mode():
    envs = counters()
    del envs.autoreset_mode
    envs.metadata = {}
    return envs


class Forgetful(SyncVectorEnv):
    """Ends episodes without final observations."""

    def step(self, actions):
        return *super().step(actions)[:4], {}


class Unshared(SyncVectorEnv):
    """Looks like an AsyncVectorEnv without shared memory."""

    shared_memory = False


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"count": 0}, "num_transitions: expected a positive int, received 0"),
        ({"count": True, "collect": collect_episodes}, "num_episodes: expected a positive int, received True"),
        ({"max_steps": 0, "collect": collect_episodes}, "max_steps: expected a positive int, received 0"),
        ({"discount": 1.1}, "discount: expected a number from 0 to 1, received 1.1"),
        ({"discount": float("nan")}, "discount: expected a number from 0 to 1, received nan"),
        ({"seed": -1}, "seed: expected a non-negative int, received -1"),
        ({"seed": 0.0}, "seed: expected a non-negative int, received 0.0"),
        ({"envs": Counter(0, (3,))}, "envs: expected a gymnasium VectorEnv, received Counter.*make_envs"),
        ({"envs": without_mode()}, r"envs: expected metadata\['autoreset_mode'\], received None"),
        ({"envs": counters(kind=Unshared)}, "envs: .*received NextStep autoreset with shared_memory=False"),
        ({"envs": counters(AutoresetMode.SAME_STEP, kind=Forgetful)}, r"envs: expected infos\['final_obs'\]"),
        (
            {"envs": SyncVectorEnv([lambda: Seen(spaces.Dict(x=spaces.Discrete(2)))])},
            r"envs: expected a single array as observation .*received Dict.*Flatten",
        ),
        ({"policy": 3}, "policy: expected a function .* or a network .*, received int"),
        ({"policy": lambda obs: obs[0]}, r"network: expected logits of shape \[3, A\], received shape \(3,\)"),
        ({"policy": lambda obs, _: obs.sum(1).tolist()}, r"policy: expected actions of shape \(3,\).*received list"),
        ({"policy": lambda obs, _: obs.long()}, r"policy: .*from Discrete\(4\), received shape \(3, 3\)"),
        (
            {"policy": lambda obs, _: torch.distributions.Categorical(logits=obs)},
            r"policy: .*received Categorical\. .* or a distribution takes observations alone\.",
        ),
        ({"policy": lambda obs, _: obs[:, 0]}, "policy: .*received torch.float32 actions"),
        ({"policy": lambda obs, _: obs[:, 0].long() + 4}, r"policy: .*received torch.int64 actions \[4, 4, 4\]"),
    ],
)
def test_rollouts_say_what_is_wrong(options, match):
    with pytest.raises(ArgumentError, match=match):
        refused(**options)


def test_tuple_actions_are_refused(monkeypatch):
    monkeypatch.setattr(Counter, "action_space", spaces.Tuple([spaces.Discrete(2)]))
    with pytest.raises(ArgumentError, match=r"envs: expected a single array as action .*received Tuple"):
        refused()


def test_a_missing_gymnasium_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "persample.rl")
    with pytest.raises(ImportError, match=r"needs gymnasium\. Install it with: pip install gymnasium"):
        importlib.import_module("persample.rl")


class Pair(nn.Module):
    """Returns whatever it is given."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, observations):
        return self.output


def test_the_gaussian_policy_samples_its_normal_and_only_from_its_generator():
    mu, sigma = torch.tensor([1.0, -2.0]).expand(20_000, 2), torch.tensor([0.5, 3.0])
    state = torch.get_rng_state()
    for given in (sigma, sigma.expand(20_000, 2)):
        drawn = gaussian_policy(Pair((mu, given)))(torch.zeros(20_000, 3), torch.Generator().manual_seed(0))
        torch.testing.assert_close(drawn.mean(0), mu[0], rtol=0, atol=0.06)
        torch.testing.assert_close(drawn.std(0), sigma, rtol=0.03, atol=0)
        again = gaussian_policy(Pair((mu, given)))(torch.zeros(20_000, 3), torch.Generator().manual_seed(0))
        assert torch.equal(drawn, again)
    assert torch.equal(torch.get_rng_state(), state)


WEIGHT = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
CATEGORICAL = {
    "module": lambda: with_weight(nn.Linear(3, 4, bias=False)),
    "function": lambda: lambda obs: obs @ WEIGHT,
    "partial": lambda: functools.partial(lambda weight, obs: obs @ weight, WEIGHT),
    "distribution": lambda: lambda obs: torch.distributions.Categorical(logits=obs @ WEIGHT),
    "with values": lambda: lambda obs: (obs @ WEIGHT, obs.sum(1)),
    "with values as a column": lambda: lambda obs: (obs @ WEIGHT, obs[:, :1]),
    "distribution with values": lambda: lambda obs: (torch.distributions.Categorical(logits=obs @ WEIGHT), obs.sum(1)),
    "with an option": lambda: lambda obs, scale=1.0: scale * obs @ WEIGHT,
    "optional generator": lambda: lambda obs, generator=None: categorical_policy(lambda s: s @ WEIGHT)(obs, generator),
}


def with_weight(layer):
    layer.weight.data.copy_(WEIGHT.T)
    return layer


@COLLECT
@pytest.mark.parametrize("name", CATEGORICAL)
def test_any_callable_is_a_policy(name, collect):
    expected = collect(counters(), categorical_policy(with_weight(nn.Linear(3, 4, bias=False))), 9, seed=0)
    assert equal(collect(counters(), CATEGORICAL[name](), 9, seed=0), expected)


GAUSSIAN = {
    "pair": lambda obs: (obs[:, :1], torch.tensor(0.5)),
    "normal": lambda obs: torch.distributions.Normal(obs[:, :1], 0.5),
    "independent": lambda obs: torch.distributions.Independent(torch.distributions.Normal(obs[:, :1], 0.5), 1),
    "normal with values": lambda obs: (torch.distributions.Normal(obs[:, :1], 0.5), obs.sum(1)),
    "pair with values": lambda obs: ((obs[:, :1], torch.tensor([0.5])), obs.sum(1)),
}


@pytest.mark.parametrize("name", GAUSSIAN)
def test_any_callable_is_a_gaussian_policy(name):
    rows = [
        collect_transitions(make_envs("Pendulum-v1", 2), policy, 6, seed=0)
        for policy in (gaussian_policy(GAUSSIAN["pair"]), GAUSSIAN[name])
    ]
    assert equal(*rows)


@pytest.mark.parametrize(
    ("output", "received"),
    [
        (torch.zeros(3, 1), "received Tensor"),
        (torch.distributions.Categorical(torch.ones(3, 2)), "received Categorical"),
        ((torch.zeros(3), torch.ones(3)), r"received shapes \[3\] and \[3\]\. "),
        ((torch.zeros(2, 1), torch.tensor(1.0)), r"received shapes \[2, 1\] and \[\]\. "),
        ((torch.zeros(3, 2), torch.ones(3)), r"received shapes \[3, 2\] and \[3\]\. "),
        ((torch.zeros(3, 1), torch.tensor([-1.0])), r"received shapes \[3, 1\] and \[1\], not all positive"),
    ],
    ids=["no-pair", "categorical", "vectors", "rows", "sigma", "negative"],
)
def test_what_a_gaussian_network_must_return(output, received):
    with pytest.raises(ArgumentError, match=rf"network: expected means of shape \[3, D\] and positive .*{received}"):
        gaussian_policy(Pair(output))(torch.zeros(3, 4), torch.Generator())


def test_continuous_episodes_and_their_gradient():
    """Pendulum: rollouts of a Gaussian policy, and REINFORCE's per-episode gradients against autograd."""
    mean = linear(3, 1)

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.log_sigma = mean, nn.Parameter(torch.zeros(1))

        def forward(self, observations):
            return self.mean(observations), self.log_sigma.exp()

    policy = Policy()
    batch = collect_episodes(make_envs("Pendulum-v1", 2), gaussian_policy(policy), 4, seed=0, max_steps=25)
    assert batch.a_t.shape == (4, 25, 1)

    def loss(policy, obs_t, a_t, r_t, mask_t):
        return gaussian_policy_gradient_loss(*policy(obs_t), a_t, r_t, mask_t=mask_t)

    rows = per_sample_grads(loss, policy, (batch.obs_t, batch.a_t, batch.r_t, batch.mask_t))
    names, parameters = zip(*policy.named_parameters(), strict=True)
    for i in range(4):
        normal = torch.distributions.Normal(*policy(batch.obs_t[i]))
        by_hand = -(normal.log_prob(batch.a_t[i]).sum(-1) * batch.r_t[i]).sum()
        for name, grad in zip(names, torch.autograd.grad(by_hand, parameters), strict=True):
            torch.testing.assert_close(rows[name][i], grad, rtol=1e-4, atol=1e-4)
