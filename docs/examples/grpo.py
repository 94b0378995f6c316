"""GRPO (Shao et al., "DeepSeekMath", 2024) with every completion's gradient clipped, and what the gradient is made of.

A small Llama is to continue a digit by the next two; the reward is the share of right ones. Lines of an ordinary loop
that go away begin with "# -"; those that replace them follow.
"""

import torch
import transformers

from persample import ClippedMean, Norm, per_sample_grads, set_grads
from persample.losses import clipped_surrogate_pg_loss
from persample.rl.diagnostics import policy_gradients

PROMPTS, COMPLETIONS, STEPS, BOUND = 10, 16, 2, 5.0
questions = torch.arange(10)[:, None]
answers = (questions + torch.tensor([1, 2])) % 10


def log_probs(model, tokens):  # of the two tokens of each completion
    logits = model(tokens[:, :-1], use_cache=False).logits[:, -2:]
    return logits.log_softmax(-1).gather(-1, tokens[:, -2:, None])[..., 0]


def loss(model, tokens, old_t, advantage):  # of a batch of completions, or of one as a batch of one
    ratio_t = (log_probs(model, tokens) - old_t).exp()
    return clipped_surrogate_pg_loss(ratio_t, advantage[:, None].expand_as(ratio_t), 0.2, reduction="mean").mean()


@torch.no_grad()
def generate(model, rows):
    tokens = questions[rows]
    for _ in range(2):
        probs = model(tokens, use_cache=False).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1)], 1)
    rewards = (tokens[:, -2:] == answers[rows]).float().mean(1).view(PROMPTS, COMPLETIONS)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return (tokens, log_probs(model, tokens), advantages.flatten()), rewards.mean().item()


def diagnosed(model, batch):  # the numbers of docs/policy-gradients.md, before the first step on new data
    tokens, old, advantages = batch
    ones = torch.ones_like(advantages)
    found = policy_gradients(loss, model, (tokens, old, ones), advantages, unit=COMPLETIONS, keep_batch_dim=True)
    conflicts = (found.cosines < 0).double().mean()  # completions that pull against the update
    return {"within": found.within.item(), "between": found.between.item(), "conflicts": conflicts.item()}


def main(updates=40):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=10, **sizes))
    optimizer, history = torch.optim.Adam(model.parameters(), 3e-3), []
    for _ in range(updates):
        batch, reward = generate(model, torch.randint(10, (PROMPTS,)).repeat_interleave(COMPLETIONS))
        history.append({"reward": reward, **diagnosed(model, batch)})
        for _ in range(STEPS):
            # - optimizer.zero_grad()
            # - loss(model, *batch).backward()
            # - torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND)
            wanted = {"update": ClippedMean(BOUND), "norms": Norm()}
            found = per_sample_grads(loss, model, batch, wanted, keep_batch_dim=True)
            set_grads(model, found["update"])
            optimizer.step()
        history[-1]["clipped"] = (found["norms"] > BOUND).double().mean().item()
    return history


if __name__ == "__main__":
    for update in main():
        print(", ".join(f"{name} {value:.3g}" for name, value in update.items()))
