"""Choose instruction data for a task from a few examples of it: inner products with its validation gradient.

The pool mixes four tasks on five digits: copy, reverse, sort, add one. The wanted one is known by 16 examples. A step
on sample i lowers their loss by the inner product of the two gradients, to first order (Xia et al., "LESS", 2024).
Lines of an ordinary program that go away begin with "# -"; those that replace them follow.
"""

import torch
import transformers

from persample import Dot, Mean, Norm, accumulate, per_sample_grads

DIGITS, POOL, CHOSEN, WANTED = 5, 800, 80, "reverse"
TASKS = {
    "copy": lambda x: x,
    "reverse": lambda x: x.flip(1),
    "sort": lambda x: x.sort(1).values,
    "add one": lambda x: (x + 1) % 10,
}


def examples(kinds):  # an instruction (10 and the number of the task), digits, the answer
    digits = torch.randint(10, (len(kinds), DIGITS))
    answers = torch.stack([solve(digits) for solve in TASKS.values()])[kinds, torch.arange(len(kinds))]
    tokens = torch.cat([10 + kinds[:, None], digits, answers], 1)
    return tokens, tokens.masked_fill(torch.arange(tokens.shape[1]) <= DIGITS, -100)


def loss(model, tokens, labels):  # of the answers
    return model(input_ids=tokens, labels=labels, use_cache=False).loss


def train(model, tokens, labels, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.randint(len(tokens), (32,))
        optimizer.zero_grad()
        loss(model, tokens[rows], labels[rows]).backward()
        optimizer.step()


def warmed_up(tokens, labels):  # a short training on everything, so that gradients mean something
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=14, **sizes))
    train(model, tokens, labels, 100)
    return model


def main():
    torch.manual_seed(0)
    wanted = list(TASKS).index(WANTED)
    kinds = torch.randint(len(TASKS), (POOL,))
    tokens, labels = examples(kinds)
    few, test = (examples(torch.full((count,), wanted)) for count in (16, 500))
    model = warmed_up(tokens, labels)
    # - chosen = torch.randperm(POOL)[:CHOSEN]
    direction = per_sample_grads(loss, model, few, Mean(), keep_batch_dim=True)
    batches = zip(tokens.split(200), labels.split(200), strict=True)
    found = accumulate(loss, model, batches, {"dots": Dot(direction), "norms": Norm()}, keep_batch_dim=True)
    chosen = (found["dots"] / found["norms"]).topk(CHOSEN).indices  # cosines: long gradients are no better samples
    start = {name: x.clone() for name, x in model.state_dict().items()}
    report = {"right": (kinds[chosen] == wanted).double().mean().item()}
    for name, rows in {"chosen": chosen, "random": torch.randperm(POOL)[:CHOSEN]}.items():
        model.load_state_dict(start)
        train(model, tokens[rows], labels[rows], 30)
        report[name] = loss(model, *test).item()
    return report


if __name__ == "__main__":
    found = main()
    print(f"{found['right']:.0%} of the chosen samples are of the wanted task, as a quarter of the pool is")
    print(
        f"test loss after 30 steps: {found['chosen']:.2f} on the chosen, {found['random']:.2f} on as many random ones"
    )
