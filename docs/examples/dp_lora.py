"""Fine-tune a small Llama by LoRA with differential privacy: DP-SGD (Abadi et al., 2016) on the adapters alone.

The model has learned a public language, in which every token has a successor. The private texts are of another one.
Lines of an ordinary loop that go away begin with "# -"; those that replace them follow.
"""

import dp_accounting
import peft
import torch
import transformers
from dp_accounting.rdp import RdpAccountant

from persample import ClippedSum, per_sample_grads, set_grads

WORDS, LENGTH, TEXTS = 16, 10, 2000
EPSILON, DELTA, RATE, STEPS, BOUND = 4.0, 1e-5, 0.05, 40, 1.0


def texts(count, step):  # token t + 1 is token t plus a step; a tenth of the tokens is noise
    tokens = torch.randint(WORDS, (count, LENGTH))
    for t in range(1, LENGTH):
        tokens[:, t] = torch.where(torch.rand(count) < 0.9, (tokens[:, t - 1] + step) % WORDS, tokens[:, t])
    return tokens


def loss(model, tokens):  # of a batch, or of one text as a batch of one
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def events(sigma):  # what the accountant is told: Poisson samples, Gaussian noise, so many steps
    step = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(step, STEPS)


def pretrained():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model, texts(64, step=1)).backward()
        optimizer.step()
    return model


def main():
    torch.manual_seed(0)
    model = peft.get_peft_model(pretrained(), peft.LoraConfig(r=8, target_modules="all-linear"))
    private, test = texts(TEXTS, step=3), texts(500, step=3)
    sigma = dp_accounting.calibrate_dp_mechanism(RdpAccountant, events, EPSILON, DELTA)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    before = loss(model, test).item()
    for _ in range(STEPS):
        # - batch = private[torch.randint(TEXTS, (100,))]
        batch = private[torch.rand(TEXTS) < RATE]  # Poisson sampling, as the accountant assumes
        # - optimizer.zero_grad()
        # - loss(model, batch).backward()
        total = per_sample_grads(loss, model, (batch,), ClippedSum(BOUND), keep_batch_dim=True)
        noisy = {name: g + sigma * BOUND * torch.randn_like(g) for name, g in total.items()}
        set_grads(model, {name: g / (RATE * TEXTS) for name, g in noisy.items()})  # the expected size, which is public
        optimizer.step()
    accountant = RdpAccountant().compose(events(sigma))
    return {"before": before, "after": loss(model, test).item(), "epsilon": accountant.get_epsilon(DELTA)}


if __name__ == "__main__":
    found = main()
    print(f"loss {found['before']:.2f} → {found['after']:.2f} at ε = {found['epsilon']:.2f}, δ = {DELTA}")
