"""GRPO on sums of two digits: which 8 of 32 prompts to update on. Half an hour of one core; writes a JSON beside it.

Every update draws 32 prompts and generates 8 completions of each. Of these prompts the arms take 8 at random ("none"),
8 whose rewards vary most ("reward"), 8 whose gradients have the largest signal-to-noise ratio ("gradient"), or all 32
("all"). All arms generate the same number of completions, and all but "all" update on the same number.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
import transformers

from persample.rl.diagnostics import policy_gradients

ARMS, RATES, SEEDS, UPDATES, EVERY = ("none", "reward", "gradient", "all"), (3e-4, 1e-3), 10, 300, 10
PROMPTS, COMPLETIONS, CHOSEN = 32, 8, 8
A, B = torch.cartesian_prod(torch.arange(10), torch.arange(10)).T
QUESTIONS = torch.stack([A, torch.full_like(A, 10), B, torch.full_like(B, 11)], 1)  # "7+5=", tokens 10 and 11
ANSWERS = torch.stack([(A + B) // 10, (A + B) % 10], 1)  # "12"


def tiny_model():
    sizes = {"vocab_size": 12, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, attn_implementation="eager")
    return transformers.LlamaForCausalLM(config)


def log_probs(model, tokens):
    """Of the two tokens of each completion."""
    logits = model(tokens[:, :-1], use_cache=False).logits[:, -2:]
    return logits.log_softmax(-1).gather(-1, tokens[:, -2:, None])[..., 0]


def loss_fn(model, tokens):
    return -log_probs(model, tokens[None]).sum()


def pretrained(seed):
    """Return a network after 60 steps of supervised learning: it knows a quarter of the answers."""
    torch.manual_seed(seed)
    model = tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        rows = torch.randint(100, (32,))
        optimizer.zero_grad()
        (-log_probs(model, torch.cat([QUESTIONS[rows], ANSWERS[rows]], 1)).mean()).backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model):
    """The probability of a right answer, exactly, over all sums."""
    return log_probs(model, torch.cat([QUESTIONS, ANSWERS], 1)).sum(1).exp().mean().item()


@torch.no_grad()
def generate(model, rows):
    tokens = QUESTIONS[rows]
    for _ in range(2):
        probs = model(tokens, use_cache=False).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1)], 1)
    return tokens, (tokens[:, -2:] == ANSWERS[rows]).all(1).float()


def choose(arm, model, tokens, rewards, advantages):
    """Return the prompts to update on."""
    varies = rewards.var(1)
    if arm == "all":
        return torch.arange(PROMPTS)
    if arm == "none":
        return torch.randperm(PROMPTS)[:CHOSEN]
    scores = varies.double()
    if arm == "gradient":  # prompts of equal rewards last: their gradients are zero
        snr = policy_gradients(loss_fn, model, (tokens,), advantages, unit=COMPLETIONS).snr
        scores = torch.where(varies > 0, snr, -math.inf)
    order = torch.randperm(PROMPTS)  # so that ties are broken at random
    return order[scores[order].argsort(descending=True, stable=True)[:CHOSEN]]


def train(arm, rate, seed):
    model = pretrained(seed)
    torch.manual_seed(1000 + seed)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    curve, live = [accuracy(model)], []
    for update in range(1, UPDATES + 1):
        rows = torch.randint(100, (PROMPTS,)).repeat_interleave(COMPLETIONS)
        tokens, right = generate(model, rows)
        rewards = right.view(PROMPTS, COMPLETIONS)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        chosen = choose(arm, model, tokens, rewards, advantages)
        rows = (chosen[:, None] * COMPLETIONS + torch.arange(COMPLETIONS)).flatten()
        live.append((rewards[chosen].var(1) > 0).float().mean().item())
        optimizer.zero_grad()
        (-log_probs(model, tokens[rows]).sum(1) * advantages[rows]).mean().backward()
        optimizer.step()
        if update % EVERY == 0:
            curve.append(accuracy(model))
    return [round(x, 4) for x in curve], round(sum(live) / len(live), 4)


if __name__ == "__main__":
    torch.set_num_threads(1)
    runs, start = [], time.process_time()
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS):
        for rate in RATES:
            for arm in ARMS:
                curve, live = train(arm, rate, seed)
                runs.append({"arm": arm, "rate": rate, "seed": seed, "accuracy": curve, "live": live})
                print(arm, rate, seed, curve[0], curve[5], curve[10], curve[-1], live, flush=True)
    minutes = round((time.process_time() - start) / 60, 1)
    sizes = {"prompts": PROMPTS, "completions": COMPLETIONS, "chosen": CHOSEN, "every": EVERY, "minutes": minutes}
    lines = ",\n".join(json.dumps(run) for run in runs)
    text = f'{{"setting": {json.dumps(sizes)},\n"runs": [\n{lines}\n]}}\n'
    Path(__file__).with_suffix(".json").write_text(text)
