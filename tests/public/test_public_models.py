"""Models of public packages, small and with random weights, called as their users call them."""

from __future__ import annotations

import numpy as np
import peft
import pytest
import torch
import transformers
from factored import Case, assert_factors, assert_reductions, kinds, tokens
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor, NatureCNN

from persample import Norm

REDUCTIONS = ("Mean", "Norm", "ClippedMean", "Gram")
V, T = 60, 5
ROUNDED = 1e-6  # transformers computes the losses of language models in float32


def gpt2(attention="eager"):
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def bert(attention="sdpa"):
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=8,
        attn_implementation=attention,
    )
    return transformers.BertForMaskedLM(config).eval()


def lora():
    config = peft.LoraConfig(r=8, target_modules=["c_attn", "c_fc"], init_lora_weights=False, fan_in_fan_out=True)
    return peft.get_peft_model(gpt2(), config)


def lengths(batch):
    """A sequence of 2 tokens at least, the others are padding."""
    return torch.randint(2, T + 1, (batch,))


def language_loss(model, ids, length):
    mask = torch.arange(T) < length
    return model(ids[None], attention_mask=mask[None].long(), labels=ids.masked_fill(~mask, -100)[None]).loss


def language_loss_4d(model, ids, length):
    """The mask of the heads: ``model`` would look whether anything is padded at all, and vmap cannot tell."""
    mask = torch.arange(T) < length
    visible = mask & torch.ones(T, T, dtype=torch.bool).tril()
    return model(ids[None], attention_mask=visible[None, None], labels=ids.masked_fill(~mask, -100)[None]).loss


def masked_loss(model, ids, length):
    mask = torch.arange(T) < length
    visible = mask.expand(T, T)
    labels = ids.masked_fill(~mask | (torch.arange(T) % 2 == 1), -100)
    return model(ids[None], attention_mask=visible[None, None], labels=labels[None]).loss


def outer(layers, *names):
    return {f"{layers}.{layer}.{name}.weight": "Outer" for layer in range(2) for name in names}


SEQUENCES = (tokens(V, T), lengths)
GPT2 = outer("transformer.h", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
BERT = outer(
    "bert.encoder.layer",
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
LORA = outer(
    "base_model.model.transformer.h", *(f"{n}.lora_{x}.default" for n in ("attn.c_attn", "mlp.c_fc") for x in "AB")
)


class Flat(FlattenExtractor):
    def forward(self, observations):
        return super().forward(observations.double())  # the policy made it float32


class Pixels(NatureCNN):
    def forward(self, observations):
        return super().forward(observations.double())


def actor_critic(observations, actions, features=Flat, **options):
    return lambda: ActorCriticPolicy(
        observations, actions, lambda _: 1e-3, net_arch=[8, 7], features_extractor_class=features, **options
    )


def policy_loss(policy, observation, action, advantage, return_):
    value, log_prob, entropy = policy.evaluate_actions(observation[None], action[None])
    return (0.5 * (value[0] - return_) ** 2 - log_prob * advantage - 0.01 * entropy).sum()


BOX = spaces.Box(-1, 1, (9,))
PIXELS = spaces.Box(0, 255, (2, 36, 36), np.uint8)
POLICY = [f"mlp_extractor.{name}_net.{layer}" for name in ("policy", "value") for layer in (0, 2)]
POLICY = {f"{name}.weight": "Outer" for name in [*POLICY, "action_net", "value_net"]}
CNN = {"features_extractor.cnn.2.weight": "Conv", "features_extractor.cnn.4.weight": "Conv"}
CNN |= {"features_extractor.linear.0.weight": "Outer"}  # cnn.0 sees 64 patches of 128 numbers
GPT2 |= {"transformer.wte.weight": "Embedding+Outer", "transformer.wpe.weight": "Embedding"}
BERT |= {
    "bert.embeddings.word_embeddings.weight": "Embedding+Outer",
    "bert.embeddings.position_embeddings.weight": "Embedding",
    "cls.predictions.transform.dense.weight": "Outer",
}

CASES = {
    "GPT-2": Case(language_loss, gpt2, SEQUENCES, GPT2, ROUNDED),
    "GPT-2, SDPA": Case(language_loss_4d, lambda: gpt2("sdpa"), SEQUENCES, GPT2, ROUNDED),
    "BERT": Case(masked_loss, bert, SEQUENCES, BERT),
    "LoRA": Case(language_loss, lora, SEQUENCES, LORA, ROUNDED),
    "actor and critic": Case(policy_loss, actor_critic(BOX, spaces.Discrete(3)), ((9,), tokens(3), (), ()), POLICY),
    "Gaussian actor and critic": Case(
        policy_loss, actor_critic(BOX, spaces.Box(-1, 1, (3,))), ((9,), (3,), (), ()), POLICY
    ),
    "actor and critic of pixels": Case(
        policy_loss,
        actor_critic(PIXELS, spaces.Discrete(3), Pixels, features_extractor_kwargs={"features_dim": 16}),
        (lambda batch: torch.randint(256, (batch, 2, 36, 36), dtype=torch.uint8), tokens(3), (), ()),
        POLICY | CNN,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_equals_the_loop(case):
    assert_reductions(case, together=REDUCTIONS, alone=REDUCTIONS)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_is_found(case):
    assert kinds(*case.build(), Norm()) == case.kinds
    assert_factors(case)
