"""Three algorithms for the ``Trainer``: each a network, its batches, the loss of one sample, and an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from persample.errors import ArgumentError
from persample.inputs import Engine
from persample.losses import discounted_returns, td_loss, truncated_generalized_advantage_estimation
from persample.per_sample import per_sample_grads
from persample.reductions import ClippedMean, Dot, Loss, Mean, NaturalGradient, Norm
from persample.rl.environments import Envs, check_number
from persample.rl.policies import ActorCritic, Evaluation, count_actions, linear, log_prob, mlp
from persample.rl.rollouts import Episodes, collect_episodes, collect_transitions
from persample.rl.tabular import exact_values, optimal_actions, transition_table

_Network = TypeVar("_Network", bound=nn.Module)


class Batch(NamedTuple):
    """The data of one update.

    Attributes:
        samples: the arguments of the loss after the network, each with a leading axis of B samples.
        steps: the number of environment steps of the batch.
        returns: undiscounted returns of the episodes, for algorithms that collect whole ones.
    """

    samples: tuple[Tensor, ...]
    steps: int
    returns: Sequence[float] = ()


class Update(NamedTuple):
    """One update of the parameters.

    Attributes:
        directions: a tensor per parameter, by name, which the optimizer takes for its gradient.
        losses: the losses of the samples, ``[B]``.
        norms: the norms of their gradients, ``[B]``.
    """

    directions: dict[str, Tensor]
    losses: Tensor
    norms: Tensor


@dataclass(frozen=True)
class Algorithm(Generic[_Network]):
    """The base of algorithms: a subclass defines ``network``, ``collect`` and ``loss``.

    Args:
        discount: γ.
        hidden: width of the two hidden layers of each network.
        batch: episodes per update, or whatever ``collect`` counts.
        learning_rate: the initial learning rate, which decreases linearly to zero.

    Raises:
        ArgumentError: if a value is out of range.

    Examples:
        >>> from persample.rl.training import Reinforce
        >>> isinstance(Reinforce(batch=8), Algorithm)
        True
    """

    discount: float = 0.99
    hidden: int = 64
    batch: int = 16
    learning_rate: float = 0.005

    ranges: ClassVar[dict[str, tuple[float, float]]] = {
        "discount": (0.0, 1.0),
        "hidden": (1, 2**16),
        "batch": (1, 2**24),
        "lambda_": (0.0, 1.0),
        "epsilon": (0.0, 1.0),
    }
    optimizer: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.Adam

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(field.name, getattr(self, field.name), *self.ranges.get(field.name, (0.0, math.inf)))

    @property
    def num_envs(self) -> int:
        """Number of environments that are stepped together."""
        return min(16, self.batch)

    def network(self, envs: Envs) -> _Network:
        """Return the network to train, with parameters drawn from torch's global stream."""
        raise NotImplementedError

    def collect(self, network: _Network, envs: Envs, seed: int) -> Batch:
        """Return the data of one update; all randomness comes from the seed."""
        raise NotImplementedError

    def loss(self, network: _Network, *sample: Tensor) -> Tensor:
        """Return the loss of one sample, a row of each of the batch's ``samples``."""
        raise NotImplementedError

    def update(self, network: _Network, samples: tuple[Tensor, ...], engine: Engine) -> Update:
        """Return the update: the mean gradient, clipped sample by sample if there is a field ``max_norm``."""
        bound = getattr(self, "max_norm", math.inf)
        mean = ClippedMean(bound) if bound < math.inf else Mean()
        return Update(*per_sample_grads(self.loss, network, samples, (mean, Loss(), Norm()), engine=engine))

    def metrics(self, network: _Network) -> dict[str, float]:  # noqa: ARG002 (for subclasses)
        """Return further metrics of the network, with the same names at every call."""
        return {}


@dataclass(frozen=True)
class TD0(Algorithm[Evaluation]):
    """Semi-gradient TD(0) for the values of a fixed policy; a sample is a transition.

    The policy takes a random action with probability ε, otherwise the optimal action. The optimal action and the exact
    values are known if the environment has a transition table. Every update collects a new rollout of ``batch``
    transitions, beginning at start states.

    Args:
        discount: γ.
        hidden: width of two hidden layers; 0 gives a linear function (for Discrete observations, a table).
        batch: transitions per update B.
        learning_rate: the initial learning rate of Adam.
        max_norm: the bound C of clipped gradients; ∞ for their plain mean.
        epsilon: ε; 1 is the uniformly random policy.

    Raises:
        ArgumentError: if a value is out of range.

    Examples:
        >>> TD0(epsilon=0.1).batch
        512
    """

    hidden: int = 0
    batch: int = 512
    learning_rate: float = 0.02
    max_norm: float = math.inf
    epsilon: float = 1.0

    ranges: ClassVar[dict[str, tuple[float, float]]] = Algorithm.ranges | {"hidden": (0, 2**16)}

    @property
    def num_envs(self) -> int:
        """Number of environments, limited to allow rollouts of 32 steps: shorter ones would rarely end an episode."""
        return min(16, max(1, self.batch // 32))

    def network(self, envs: Envs) -> Evaluation:
        """Return the value function, with the policy that it evaluates."""
        space, table = envs.single_observation_space, transition_table(envs)
        actions = count_actions(envs.single_action_space)
        probabilities = torch.full((1, actions), 1 / actions)
        exact = torch.empty(0)
        if table is not None:
            greedy = torch.nn.functional.one_hot(optimal_actions(table, self.discount), actions)
            probabilities = self.epsilon * probabilities + (1 - self.epsilon) * greedy
            exact = exact_values(table, probabilities, self.discount)
        elif self.epsilon < 1:
            fix = "Use 1, the uniformly random policy, or one of gymnasium's toy environments."
            expected, received = "1 in environments without a table of transitions", f"{self.epsilon:g}"
            raise ArgumentError.about("epsilon", expected=expected, received=received, fix=fix)
        value = mlp(space, self.hidden, 1) if self.hidden else linear(space)
        return Evaluation(value, probabilities, exact)

    def collect(self, network: Evaluation, envs: Envs, seed: int) -> Batch:
        """Return transitions (s, r, γ, s′) of the policy."""
        rollout = collect_transitions(envs, network.policy, self.batch, discount=self.discount, seed=seed)
        return Batch((rollout.obs_tm1, rollout.r_t, rollout.discount_t, rollout.obs_t), self.batch)

    def loss(self, network: Evaluation, *sample: Tensor) -> Tensor:
        """Return the squared TD error."""
        obs_tm1, r_t, discount_t, obs_t = sample
        return td_loss(network(obs_tm1), r_t, discount_t, network(obs_t))

    def metrics(self, network: Evaluation) -> dict[str, float]:
        """Return ``value_error``, max |v − v_π| / max |v_π| over the states, if the exact values v_π are known.

        It is without the division if all v_π are 0.
        """
        if not len(network.exact):
            return {}
        with torch.no_grad():
            error = network(torch.arange(len(network.exact))) - network.exact
        largest = float(network.exact.abs().max())
        return {"value_error": float(error.abs().max()) / (largest or 1.0)}


@dataclass(frozen=True)
class Reinforce(Algorithm[ActorCritic]):
    """REINFORCE with a learned baseline (Sutton and Barto 2018, section 13.4); a sample is an episode.

    ℓ = Σₜ −log π(aₜ|sₜ) Aₜ + c (v(sₜ) − Gₜ)². Gₜ are the returns of the received rewards (a time limit ends an
    episode), Aₜ the advantages Gₜ − v(sₜ) before the update, standardized over all steps of the batch.

    Args:
        discount: γ.
        hidden: width of the two hidden layers of policy and value function.
        batch: episodes per update B.
        learning_rate: the initial learning rate of Adam.
        max_norm: the bound C of clipped gradients; ∞ for their plain mean.
        value_weight: c; small, because squared returns are larger than log-probabilities, which matters for clipping.

    Raises:
        ArgumentError: if a value is out of range.

    Examples:
        >>> Reinforce(batch=32).learning_rate
        0.005
    """

    max_norm: float = math.inf
    value_weight: float = 0.001

    def network(self, envs: Envs) -> ActorCritic:
        """Return policy and value function."""
        return ActorCritic(envs, self.hidden)

    def collect(self, network: ActorCritic, envs: Envs, seed: int) -> Batch:
        """Return observations, actions, returns, advantages and masks, ``[B, T, …]``."""
        episodes = collect_episodes(envs, network.policy, self.batch, discount=self.discount, seed=seed)
        obs_t, mask_t = episodes.obs_t, episodes.mask_t
        return_t = discounted_returns(episodes.r_t, episodes.discount_t, 0.0, time_dim=1)
        with torch.no_grad():
            adv_t = standardized(return_t - network.value(obs_t), mask_t)
        return _batch(episodes, obs_t, episodes.a_t, return_t, adv_t, mask_t)

    def loss(self, network: ActorCritic, *sample: Tensor) -> Tensor:
        """Return the loss of an episode."""
        obs_t, a_t, return_t, adv_t, mask_t = sample
        errors = torch.where(mask_t, network.value(obs_t) - return_t, 0)
        scores = log_prob(network.policy, obs_t, a_t) * adv_t  # of finite numbers, 0 at padding
        return self.value_weight * (errors**2).sum() - scores.sum()


@dataclass(frozen=True)
class NPG(Algorithm[ActorCritic]):
    """The natural policy gradient (Kakade 2001) with a normalized step; a sample is a step of an episode.

    The gradients are the scores ∇log π(a|s), the targets generalized advantages, standardized over the batch: the
    direction is the ridge regression of the advantages on the scores, the compatible function approximation of Sutton
    et al. (2000). Its length gives the policy a mean KL divergence of ``max_kl`` (to second order), as in Rajeswaran et
    al., "Towards Generalization and Simplicity in Continuous Control" (2017). The value function makes a Gauss–Newton
    step towards the λ-returns: gradients are those of its outputs, targets its errors.

    Args:
        discount: γ.
        hidden: width of the two hidden layers of policy and value function.
        batch: episodes per update.
        learning_rate: the initial fraction of both steps that is made; it decreases linearly to zero.
        lambda_: λ of the advantages.
        max_kl: δ.
        damping: λ of the policy's Fisher matrix.
        value_damping: λ of the value function's Gauss–Newton matrix.

    Raises:
        ArgumentError: if a value is out of range.

    Examples:
        >>> NPG(batch=8).max_kl
        0.02
    """

    batch: int = 4
    learning_rate: float = 1.0
    lambda_: float = 0.95
    max_kl: float = 0.02
    damping: float = 0.01
    value_damping: float = 0.1

    optimizer: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.SGD

    def network(self, envs: Envs) -> ActorCritic:
        """Return policy and value function."""
        return ActorCritic(envs, self.hidden)

    def collect(self, network: ActorCritic, envs: Envs, seed: int) -> Batch:
        """Return observations, actions, advantages and λ-returns of the steps, ``[B, …]``."""
        episodes = collect_episodes(envs, network.policy, self.batch, discount=self.discount, seed=seed)
        mask_t = bootstrapped(episodes)
        with torch.no_grad():
            v_t = network.value(episodes.obs_t)
        values = torch.nn.functional.pad(v_t, (0, 1))  # the last is read by terminated episodes only, at discount 0
        adv_t = truncated_generalized_advantage_estimation(
            episodes.r_t, episodes.discount_t, self.lambda_, values, mask_t=mask_t, time_dim=1
        )
        steps = (episodes.obs_t, episodes.a_t, standardized(adv_t, mask_t), adv_t + v_t)
        return _batch(episodes, *(x[mask_t] for x in steps))

    def loss(self, network: ActorCritic, *sample: Tensor) -> Tensor:
        """Return −log π(a|s) of a step, the negated score function."""
        obs, a, *_ = sample
        return _negative_score(network.policy, obs, a)

    def update(self, network: ActorCritic, samples: tuple[Tensor, ...], engine: Engine) -> Update:
        """Return the natural gradient of the policy and the Gauss–Newton step of the value function."""
        obs, a, adv, returns = samples
        with torch.no_grad():
            errors = network.value(obs) - returns
        natural = NaturalGradient(self.damping, adv), Loss(), Norm()
        policy, losses, norms = per_sample_grads(_negative_score, network.policy, (obs, a), natural, engine=engine)
        products = per_sample_grads(_negative_score, network.policy, (obs, a), Dot(policy), engine=engine)
        scale = (2 * self.max_kl / products.square().mean().clamp_min(1e-12)).sqrt()
        gauss_newton = NaturalGradient(self.value_damping, errors)
        critic = per_sample_grads(_value, network.critic, (obs,), gauss_newton, engine=engine)
        directions = {f"policy.{name}": scale * x for name, x in policy.items()}
        return Update(directions | {f"critic.{name}": x for name, x in critic.items()}, losses, norms)


def standardized(x_t: Tensor, mask_t: Tensor) -> Tensor:
    """Return the unmasked entries standardized to mean 0 and variance 1, and 0 for masked ones, ``[B, T]``."""
    real = x_t[mask_t]
    return torch.where(mask_t, (x_t - real.mean()) / real.std(correction=0).clamp(min=1e-8), 0)


def bootstrapped(episodes: Episodes) -> Tensor:
    """Return the mask of all steps but the last of episodes that did not terminate, ``[E, T]``."""
    following = torch.nn.functional.pad(episodes.mask_t, (0, 1))[:, 1:]
    return episodes.mask_t & (following | (episodes.discount_t == 0))


def _batch(episodes: Episodes, *samples: Tensor) -> Batch:
    return Batch(samples, int(episodes.mask_t.sum()), episodes.r_t.sum(1).tolist())


def _negative_score(policy: nn.Module, obs: Tensor, a: Tensor) -> Tensor:
    return -log_prob(policy, obs, a)


def _value(critic: nn.Module, obs: Tensor) -> Tensor:
    value: Tensor = critic(obs)
    return value.squeeze(-1)
