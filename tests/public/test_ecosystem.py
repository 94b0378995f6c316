"""What other libraries collect goes in as it comes: TensorDicts, collectors, policies, environments, data sets."""

from __future__ import annotations

import copy

import gymnasium
import minari
import numpy as np
import pytest
import torch
import torchdiffeq
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from minari.data_collector import EpisodeBuffer
from oracle import assert_trees_close, oracle
from stable_baselines3 import A2C
from stable_baselines3.common.policies import ActorCriticPolicy
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictParams
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree
from torchrl.collectors import Collector
from torchrl.data import Bounded, OneHot
from torchrl.envs import GymEnv, SerialEnv
from torchrl.modules import (
    GRUModule,
    LSTMModule,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss, ReinforceLoss, SACLoss

from persample import ClippedMean, FallbackWarning, LossError, Norm, per_sample_grads
from persample.losses import discounted_returns, policy_gradient_loss, reinforce_loss, td_loss
from persample.rl import collect_episodes

ENGINES = pytest.mark.parametrize("engine", ["eager", "loop"])


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def assert_is_the_loop(loss, model, batch, engine, plain_loss, plain_batch):
    """The gradients, their clipped mean and norms are those of a loop over plain tensors."""
    plain_model = copy.deepcopy(model)
    wanted = {"rows": None, "update": ClippedMean(0.5), "norms": Norm()}
    result = per_sample_grads(loss, model, batch, wanted, engine=engine)
    rows = oracle(plain_loss, plain_model, plain_batch)
    norms = torch.stack([g.flatten(1).square().sum(1) for g in rows.grads]).sum(0).sqrt()
    scales = (0.5 / norms).clamp(max=1.0)
    assert norms.max() > 0.5
    assert_trees_close(result["rows"], rows.tree(rows.grads), 1e-4)
    torch.testing.assert_close(result["norms"].double(), norms, rtol=1e-4, atol=1e-6)
    clipped = [torch.einsum("b,b...->...", scales, g) / len(g) for g in rows.grads]
    assert_trees_close(result["update"], rows.tree(clipped), 1e-4)


def transition_loss(value, transition):
    """One row of a TensorDict, with torchrl's keys."""
    v_tm1, v_t = value(transition["observation"]), value(transition["next", "observation"])
    discount_t = 0.99 * ~transition["next", "terminated"]
    return td_loss(v_tm1, transition["next", "reward"], discount_t, v_t).squeeze()


def plain_transition_loss(value, s_tm1, r_t, terminated, s_t):
    return (r_t + 0.99 * (1 - terminated) * value(s_t).detach() - value(s_tm1)).square().squeeze()


def plain(data):
    followed = data["next"]
    columns = (data["observation"], followed["reward"], followed["terminated"].double(), followed["observation"])
    return tuple(column.flatten(0, data.ndim - 1) for column in columns)


@pytest.fixture
def collected():
    """What a torchrl collector gives for three environments: [3, 20]."""
    torch.manual_seed(0)  # of the random actions
    envs = SerialEnv(3, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    envs.set_seed(0)
    collector = Collector(envs, None, frames_per_batch=60, total_frames=60)
    (data,) = collector
    collector.shutdown()
    assert isinstance(data, TensorDict)
    assert data.batch_size == (3, 20)
    assert data["next", "terminated"].any()
    return data


class TestTorchRL:
    @ENGINES
    def test_transitions_of_a_collector(self, collected, engine):
        data = collected.reshape(-1)
        assert_is_the_loop(transition_loss, network(), data, engine, plain_transition_loss, plain(collected))

    @ENGINES
    def test_trajectories_of_a_collector(self, collected, engine):
        """A sample is one environment's row: a TensorDict of batch size [20]."""

        def loss(value, row):
            assert row.batch_size == (20,)
            v_tm1, v_t = value(row["observation"]), value(row["next", "observation"])
            return td_loss(v_tm1, row["next", "reward"], 0.99 * ~row["next", "terminated"], v_t).sum()

        columns = tuple(column.unflatten(0, (3, 20)) for column in plain(collected))

        def plain_loss(value, s_tm1, r_t, terminated, s_t):
            return (r_t + 0.99 * (1 - terminated) * value(s_t).detach() - value(s_tm1)).square().sum()

        assert_is_the_loop(loss, network(), collected, engine, plain_loss, columns)

    @ENGINES
    def test_rows_that_were_stacked_lazily(self, collected, engine):
        """Made contiguous: tensordict itself cannot say what is in a lazy stack."""
        rows = [row.exclude("collector") for row in collected.reshape(-1).unbind(0)]
        data = TensorDict.lazy_stack(rows[:12]).contiguous()
        columns = tuple(column[:12] for column in plain(collected))
        assert_is_the_loop(transition_loss, network(), data, engine, plain_transition_loss, columns)


def torchrl_losses():
    """Loss modules, each with transitions; they hold their parameters in TensorDictParams."""
    torch.manual_seed(0)
    size, s_tm1, s_t = 6, torch.randn(6, 4), torch.randn(6, 4)

    def data(action, **more):
        ends = torch.zeros(size, 1, dtype=torch.bool)
        following = {"observation": s_t, "reward": torch.randn(size, 1), "done": ends, "terminated": ends}
        found = {"observation": s_tm1, "action": action, "next": TensorDict(following, [size]), **more}
        return TensorDict(found, [size])

    logits = TensorDictModule(network(3), ["observation"], ["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=torch.distributions.Categorical)
    critic = ValueOperator(network(), in_keys=["observation"])
    known = {name: torch.randn(size, 1) for name in ("advantage", "value_target", "state_value")}
    steps = data(torch.randint(3, (size,)), action_log_prob=-torch.rand(size), **known)
    values = QValueActor(network(3), in_keys=["observation"], spec=OneHot(3))
    moments = nn.Sequential(network(4), NormalParamExtractor())
    gaussian = TensorDictModule(moments, ["observation"], ["loc", "scale"])
    bounds = {"distribution_class": TanhNormal, "spec": Bounded(-1, 1, (2,))}

    class Q(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 1)

        def forward(self, s, a):
            return self.net(torch.cat([s, a], -1))

    sac = SACLoss(
        ProbabilisticActor(gaussian, ["loc", "scale"], **bounds), ValueOperator(Q(), ["observation", "action"])
    )
    return {
        "PPO": (ClipPPOLoss(actor, critic), steps),
        "REINFORCE": (ReinforceLoss(actor, critic), steps),
        "DQN": (DQNLoss(values, action_space="one-hot", delay_value=True), data(torch.eye(3)[torch.arange(6) % 3])),
        "SAC": (sac, data(torch.rand(size, 2) - 0.5)),
    }


def of_torchrl(module, data):
    return sum(term for name, term in module(data).items() if name.startswith("loss"))


@pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")
class TestTorchRLLosses:
    @pytest.mark.parametrize("engine", ["eager", "loop"])
    @pytest.mark.parametrize("name", ["PPO", "REINFORCE", "DQN"])
    def test_gradients_of_each_transition(self, name, engine):
        module, data = torchrl_losses()[name]
        params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for _ in range(2):  # a second call with the same module
            found = per_sample_grads(of_torchrl, module, data, keep_batch_dim=True, engine=engine)
            for i in range(len(data)):
                alone = torch.autograd.grad(of_torchrl(module, data[i : i + 1]), list(params.values()))
                assert_trees_close(
                    {name: g[i] for name, g in found.items()}, dict(zip(params, alone, strict=True)), 1e-5
                )
        assert dict(module.named_parameters()).keys() >= params.keys()
        assert all(module.get_parameter(name) is p for name, p in params.items())

    def test_sac_draws_its_actions_in_place(self):
        module, data = torchrl_losses()["SAC"]
        with pytest.raises(LossError, match=r"draws random numbers, which randomness='error' refuses"):
            per_sample_grads(of_torchrl, module, data, Norm(), keep_batch_dim=True)
        for engine in ("eager", "loop"):
            torch.manual_seed(0)
            options = {"keep_batch_dim": True, "randomness": "same", "engine": engine}
            found = per_sample_grads(of_torchrl, module, data, **options)
            params = {name: module.get_parameter(name) for name in found}
            for i in range(len(data)):
                torch.manual_seed(0)
                alone = torch.autograd.grad(of_torchrl(module, data[i : i + 1]), list(params.values()))
                assert_trees_close(
                    {name: g[i] for name, g in found.items()}, dict(zip(params, alone, strict=True)), 1e-4
                )

    @pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
    def test_recurrent_modules_split_rows_at_resets(self, kind):
        """Their lengths depend on values: the loop takes them, and "auto" says so. Rows of one trajectory are taken."""
        states = ["h"] if kind is GRUModule else ["h", "c"]
        keys = {"in_keys": ["obs", *states], "out_keys": ["feat", *(("next", state) for state in states)]}
        module = kind(input_size=3, hidden_size=5, **keys)
        starts = torch.zeros(4, 6, 1, dtype=torch.bool)
        starts[:, 0] = True
        zeros = {state: torch.zeros(4, 6, 1, 5) for state in states}
        data = TensorDict({"obs": torch.randn(4, 6, 3), "is_init": starts, **zeros}, [4, 6])

        def loss(module, row):
            with set_recurrent_mode(True):
                return module(row.clone())["feat"].square().sum()

        def assert_found(engine):
            found = per_sample_grads(loss, module, data, keep_batch_dim=True, engine=engine)
            for i in range(4):
                alone = torch.autograd.grad(loss(module, data[i : i + 1]), list(module.parameters()))
                assert_trees_close([g[i] for g in found.values()], list(alone), 1e-4)

        assert_found("eager")
        starts[1, 3] = starts[2, 2] = True
        with pytest.raises(LossError, match=r"reads values of a sample.*_split_and_pad_for_reset.*engine='loop'"):
            per_sample_grads(loss, module, data, keep_batch_dim=True)
        with pytest.warns(FallbackWarning, match="engine='auto' computed 4 samples one after another"):
            assert_found("auto")

    def test_networks_in_containers_of_parameters(self):
        """Nested ``TensorDictParams``, with a frozen one and one that is tied to a layer."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer, scale = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(4), requires_grad=False)
                inner = {"w": self.layer.weight, "scale": scale, "shift": torch.ones(4)}
                self.kept = TensorDictParams(TensorDict({"a": inner, "b": torch.randn(4)}), no_convert=True)

            def forward(self, x):
                held = self.kept["a"]
                return (held["w"] @ self.layer(x) * held["scale"] + held["shift"]) @ self.kept["b"].sin()

        model, x = Model(), torch.randn(5, 4)
        found = per_sample_grads(lambda m, x: m(x), model, x, engine="eager")
        plain = [torch.autograd.grad(model(row), model.layer.weight)[0] for row in x]
        torch.testing.assert_close(found["layer.weight"], torch.stack(plain))


class TestSolvers:
    """``odeint`` writes the solution into a new tensor; its adjoint differentiates in a backward pass."""

    def loss(self, method, step_size=None, adjoint=False):
        times = torch.linspace(0, 1, 3, dtype=torch.float64)
        options = {"method": method, "options": {"step_size": step_size} if step_size else None}

        def loss(field, y):
            if not adjoint:
                return torchdiffeq.odeint(lambda t, y: field(y), y, times, **options)[-1].square().sum()
            params = {"adjoint_params": tuple(field.parameters())}
            return torchdiffeq.odeint_adjoint(lambda t, y: field(y), y, times, **options, **params)[-1].square().sum()

        return loss

    def assert_found(self, loss, engine):
        torch.manual_seed(0)
        field, y = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(4, 3).double()
        found = per_sample_grads(loss, field, y, engine=engine)
        assert_trees_close(list(found.values()), oracle(loss, field, (y,)).grads, 1e-9)

    @ENGINES
    @pytest.mark.parametrize("method", ["euler", "midpoint", "rk4"])
    def test_steps_of_a_fixed_size(self, method, engine):
        self.assert_found(self.loss(method, step_size=0.2), engine)

    @pytest.mark.parametrize("adjoint", [False, True])
    def test_adaptive_steps_and_adjoints_run_on_the_loop(self, adjoint):
        loss = self.loss("dopri5", adjoint=adjoint)
        self.assert_found(loss, "loop")
        with pytest.raises(LossError, match=r"vmap cannot batch.*engine='loop'"):
            self.assert_found(loss, "eager")


class TestStableBaselines:
    def policy(self, envs):
        torch.manual_seed(0)
        space, actions = envs.single_observation_space, envs.single_action_space
        return ActorCriticPolicy(space, actions, lambda _: 1e-3, net_arch=[6]).eval()

    @ENGINES
    def test_a_policy_acts_in_vector_environments_and_is_differentiated(self, engine):
        envs = RecordEpisodeStatistics(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync"))
        policy = self.policy(envs)

        def act(observations, generator):
            probabilities = policy.get_distribution(observations).distribution.probs
            return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

        episodes = collect_episodes(envs, act, 5, seed=0)
        return_t = discounted_returns(episodes.r_t, episodes.discount_t, 0.0, time_dim=1)

        def loss(policy, obs_t, a_t, return_t, mask_t):
            _, log_pi_a_t, _ = policy.evaluate_actions(obs_t, a_t)
            return -torch.where(mask_t, log_pi_a_t * return_t, 0).sum()

        batch = (episodes.obs_t, episodes.a_t, return_t, episodes.mask_t)

        def plain_loss(policy, obs_t, a_t, return_t, mask_t):
            features = policy.mlp_extractor.policy_net(obs_t)  # the policy itself insists on float32
            log_pi = policy.action_net(features).log_softmax(-1)
            return -(log_pi[torch.arange(len(a_t)), a_t] * return_t)[mask_t].sum()

        assert_is_the_loop(loss, policy, batch, engine, plain_loss, batch)

    def test_a_rollout_buffer_is_a_batch(self):
        """A NamedTuple of transitions, collected by the library's own algorithm in a gymnasium environment."""
        env, small = gymnasium.make("CartPole-v1"), {"net_arch": [6]}
        model = A2C("MlpPolicy", env, n_steps=16, seed=0, device="cpu", policy_kwargs=small)
        model.learn(16)
        (data,) = model.rollout_buffer.get(batch_size=None)

        def loss(policy, sample):
            action = sample.actions[0].long()
            value, log_pi_a, entropy = policy.evaluate_actions(sample.observations[None], action[None])
            critic = (sample.returns - value.squeeze()).square() / 2
            return (critic - log_pi_a * sample.advantages - 0.01 * entropy).squeeze()

        rows, losses = per_sample_grads(loss, model.policy, data, (None, Norm()))
        looped, norms = per_sample_grads(loss, model.policy, data, (None, Norm()), engine="loop")
        assert losses.shape == (16,)
        assert_trees_close(rows, looped, 1e-4)
        torch.testing.assert_close(losses, norms)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_gymnasiums_vector_environments_and_wrappers_are_batches(mode):
    """Arrays as they come from ``step``, without a word of conversion."""
    options = {"autoreset_mode": gymnasium.vector.AutoresetMode(mode)}
    envs = RecordEpisodeStatistics(
        gymnasium.make_vec("Pendulum-v1", 4, vectorization_mode="sync", vector_kwargs=options)
    )
    s_tm1, _ = envs.reset(seed=0)
    s_t, r_t, terminated, _, _ = envs.step(np.zeros((4, 1), np.float32))
    model = nn.Linear(3, 1)

    def loss(model, s_tm1, r_t, terminated, s_t):
        return td_loss(model(s_tm1).squeeze(), r_t, torch.where(terminated, 0.0, 0.99), model(s_t).squeeze())

    norms = per_sample_grads(loss, model, (s_tm1, r_t, terminated, s_t), Norm())
    assert norms.shape == (4,)
    looped = per_sample_grads(loss, model, (s_tm1, r_t, terminated, s_t), Norm(), engine="loop")
    torch.testing.assert_close(norms, looped)


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Three episodes of random actions, as a data set on disk: none can be downloaded here."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, generator, buffers = gymnasium.make("CartPole-v1"), np.random.default_rng(0), []
    for seed in range(3):
        observations, steps = [env.reset(seed=seed)[0]], []
        while not steps or not (steps[-1][2] or steps[-1][3]):
            action = int(generator.integers(2))
            observation, reward, terminated, truncated, _ = env.step(action)
            observations.append(observation)
            steps.append((action, reward, terminated, truncated))
        columns = [np.array(column) for column in zip(*steps, strict=True)]
        buffers.append(EpisodeBuffer(None, seed, None, np.array(observations), *columns))
    minari.create_dataset_from_buffers(
        "cartpole/random-v0",
        buffers,
        env="CartPole-v1",
        eval_env="CartPole-v1",
        algorithm_name="random",
        author="persample",
        author_email="nobody@example.org",
        code_permalink="tests/public/test_ecosystem.py",
        description="Random actions.",
    )
    return minari.load_dataset("cartpole/random-v0")


@ENGINES
def test_episodes_of_a_minari_dataset(dataset, engine):
    """Offline REINFORCE: the episodes padded to one length, and a mask."""
    episodes = list(dataset.iterate_episodes())
    assert len(episodes) == 3
    lengths = torch.tensor([len(episode) for episode in episodes])
    assert len(set(lengths.tolist())) > 1

    def padded(columns):
        return pad_sequence([torch.as_tensor(column) for column in columns], batch_first=True)

    obs_t = padded([episode.observations[:-1] for episode in episodes])
    a_t, r_t = padded([e.actions for e in episodes]), padded([e.rewards for e in episodes]).float()
    mask_t = torch.arange(int(lengths.max())) < lengths[:, None]
    return_t = discounted_returns(r_t, 0.99, 0.0, mask_t=mask_t, time_dim=1)
    batch = (obs_t, a_t, return_t, mask_t)

    def loss(policy, obs_t, a_t, return_t, mask_t):
        return reinforce_loss(policy(obs_t), a_t, return_t, mask_t)

    def plain_loss(policy, obs_t, a_t, return_t, mask_t):
        log_pi = policy(obs_t[mask_t]).log_softmax(-1)
        return -(log_pi[torch.arange(len(log_pi)), a_t[mask_t]] * return_t[mask_t]).sum()

    assert_is_the_loop(loss, network(2), batch, engine, plain_loss, batch)


@ENGINES
def test_one_episode_of_a_minari_dataset_is_a_batch_of_steps(dataset, engine):
    """Its NumPy arrays as they are: behaviour cloning, a sample per step."""
    episode = dataset[1]
    batch = (episode.observations[:-1], episode.actions)

    def loss(policy, obs, action):
        return policy_gradient_loss(policy(obs)[None], action[None], torch.ones(1))

    def plain_loss(policy, obs, action):
        return -policy(obs).log_softmax(-1)[action]

    assert_is_the_loop(loss, network(2), batch, engine, plain_loss, pytree.tree_map(torch.as_tensor, batch))
