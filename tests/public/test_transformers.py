"""Models of Hugging Face, made from a configuration, as they are trained: masks, LoRA, bfloat16, checkpoints."""

from __future__ import annotations

from collections import UserDict

import peft
import pytest
import torch
import transformers
from oracle import assert_trees_close
from torch import nn
from torch.utils.data import DataLoader

from persample import ClippedMean, FallbackWarning, Loss, Mean, Norm, Sum, accumulate, check, explain, per_sample_grads

V, T = 11, 6
ATTENTION = ["eager", "sdpa"]


def t5(attention):
    sizes = {"vocab_size": V, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, attn_implementation=attention)
    return transformers.T5ForConditionalGeneration(config)


def vit(attention):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    images = {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 3}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **images, attn_implementation=attention)
    )


def llama(attention):
    sizes = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": T}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, attn_implementation=attention, loss_type="ForCausalLM")
    )


def tokens(batch):
    return torch.randint(1, V, (batch, T))


def translation(model, source, target):
    return model(input_ids=source[None], labels=target[None]).loss.double()


def classification(model, image, label):
    return model(pixel_values=image[None], labels=label[None]).loss.double()


def language(model, ids, allowed):
    """``allowed`` is 1 where a key may be seen: a mask with four axes, which transformers takes as it is."""
    hidden = (1 - allowed[None, None].double()) * torch.finfo(torch.float64).min
    return model(input_ids=ids[None], attention_mask=hidden, labels=ids[None]).loss.double()


def padded(batch):
    """Causal, and the last tokens of each sample are padding."""
    seen = torch.arange(T) < torch.randint(2, T + 1, (batch, 1))
    return torch.ones(T, T).tril().bool() & seen[:, None]


CASES = {
    "T5": (t5, translation, lambda: (tokens(3), tokens(3))),
    "ViT": (vit, classification, lambda: (torch.randn(3, 2, 8, 8, dtype=torch.float64), torch.tensor([0, 2, 1]))),
    "Llama": (llama, language, lambda: (tokens(3), padded(3))),
}


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop(case, attention):
    make, loss, batch = CASES[case]
    torch.manual_seed(0)
    model, samples = make(attention).double().eval(), batch()
    wanted = {"mean": ClippedMean(0.1), "norms": Norm(per_param=True)}
    found, expected = (per_sample_grads(loss, model, samples, wanted, engine=engine) for engine in ("eager", "loop"))
    assert_trees_close(found, expected, 1e-6)  # transformers computes losses of language models in float32


def causal(name, **more):
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": T}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def gpt2():
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert():
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=T, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def experts(implementation):
    model = causal("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation(implementation)  # experts are 3-D parameters
    return model


MODELS = {  # a model, and the layers that LoRA adapts
    "GPT-2": (gpt2, ["c_attn"]),
    "Llama": (lambda: causal("Llama"), ["q_proj", "v_proj"]),
    "Qwen2": (lambda: causal("Qwen2"), ["q_proj", "v_proj"]),
    "BERT": (bert, ["query", "value"]),
    "T5": (lambda: t5("sdpa"), ["q", "v"]),
    "ViT": (lambda: vit("sdpa"), ["q_proj", "v_proj"]),
    "experts by batched products": (lambda: experts("batched_mm"), ["q_proj", "v_proj"]),
}


def batch_of(name):
    """Padded sentences with a mask of two axes, one of them without padding; or images."""
    generator = torch.Generator().manual_seed(0)
    if name == "ViT":
        return {"pixel_values": torch.randn(3, 2, 8, 8, generator=generator), "labels": torch.tensor([0, 2, 1])}
    ids = torch.randint(1, V, (3, T), generator=generator)
    mask = (torch.arange(T) < torch.tensor([[3], [T], [4]])).long()
    labels = {"BERT": torch.tensor([0, 2, 1]), "T5": ids.flip(0)}.get(name, ids.masked_fill(mask == 0, -100))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_of(model, inputs):
    kind = next(model.parameters()).dtype
    return model(**{name: x.to(kind) if x.is_floating_point() else x for name, x in inputs.items()}).loss.double()


def adapted(model, targets, **more):
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **more)
    return peft.get_peft_model(model, config)


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing(_enable)?. is deprecated:FutureWarning")
@pytest.mark.parametrize("variant", ["whole", "LoRA", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_take_masks_adapters_and_half_precision(name, variant):
    torch.manual_seed(0)
    make, targets = MODELS[name]
    model = make().double().eval()
    if variant == "LoRA":
        model = adapted(model, targets, fan_in_fan_out=name == "GPT-2")
    if variant == "bfloat16":
        model = model.bfloat16()
    wanted, options = {"norms": Norm(), "mean": ClippedMean(0.1), "losses": Loss()}, {"keep_batch_dim": True}
    found, looped = (
        per_sample_grads(loss_of, model, batch_of(name), wanted, engine=engine, **options)
        for engine in ("eager", "loop")
    )
    if variant == "bfloat16":
        torch.testing.assert_close(found["norms"], looped["norms"], rtol=0.05, atol=1e-3)
    else:
        torch.testing.assert_close(found, looped, rtol=1e-5, atol=1e-8)
    for i in range(3):  # and a loop without this library
        params = [p for p in model.parameters() if p.requires_grad]
        alone = loss_of(model, {key: x[i : i + 1] for key, x in batch_of(name).items()})
        grads = torch.autograd.grad(alone, params, allow_unused=True)
        norm = torch.stack([g.double().norm() for g in grads if g is not None]).norm()
        torch.testing.assert_close(
            found["norms"][i].double(), norm, rtol=0.05 if variant == "bfloat16" else 1e-4, atol=1e-3
        )


SLOW = pytest.mark.slow
COMPILED = [pytest.param(name, "compiled", marks=SLOW) for name in MODELS if name != "experts by batched products"]
TRACED = [pytest.param(name, "traced", marks=() if name == "Llama" else SLOW) for name in MODELS]


@pytest.mark.parametrize(("name", "engine"), [*TRACED, *COMPILED])
def test_masks_of_two_axes_in_a_program(name, engine):
    torch.manual_seed(0)
    model, options = MODELS[name][0]().double().eval(), {"keep_batch_dim": True}
    found, looped = (
        per_sample_grads(loss_of, model, batch_of(name), Norm(), engine=kind, **options) for kind in (engine, "loop")
    )
    torch.testing.assert_close(found, looped, rtol=1e-5, atol=1e-8)


def test_any_mapping_is_a_dict():
    torch.manual_seed(0)
    model, plain = gpt2().eval(), batch_of("GPT-2")
    kinds = [transformers.BatchEncoding(plain), UserDict(plain), transformers.utils.ModelOutput(plain)]
    expected = per_sample_grads(loss_of, model, plain, Mean(), keep_batch_dim=True)
    for batch in [*kinds, (kinds[0],)]:
        for engine in ("eager", "loop"):
            found = per_sample_grads(loss_of, model, batch, Mean(), keep_batch_dim=True, engine=engine)
            assert_trees_close(found, expected, 1e-4)
    assert check(loss_of, model, kinds[0], engines=(), keep_batch_dim=True).ok
    rows = [{key: x[i] for key, x in plain.items()} for i in range(3)]

    def collate(rows):
        return transformers.BatchEncoding(torch.utils.data.default_collate(rows))

    loader = DataLoader(rows, batch_size=2, collate_fn=collate)
    total = accumulate(loss_of, model, loader, Sum(), keep_batch_dim=True)
    assert_trees_close(total, {key: 3 * g for key, g in expected.items()}, 1e-4)


def without_dropout(model):
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing(_enable)?. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_gradient_checkpointing(name, reentrant):
    torch.manual_seed(0)
    model = without_dropout(MODELS[name][0]().double()).train()
    expected = per_sample_grads(loss_of, model, batch_of(name), Norm(), keep_batch_dim=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for chunk_size in (None, 1):
        found = per_sample_grads(loss_of, model, batch_of(name), Norm(), keep_batch_dim=True, chunk_size=chunk_size)
        torch.testing.assert_close(found, expected)
    assert model.is_gradient_checkpointing
    assert explain(loss_of, model, batch_of(name), Norm(), keep_batch_dim=True).rows
    with pytest.warns(FallbackWarning, match=r"is off in the call.*chunk_size=.*engine='traced'"):
        found = per_sample_grads(
            lambda *args: loss_of(*args)[None], model, batch_of(name), Norm(), keep_batch_dim=True, outputs="rows"
        )
    torch.testing.assert_close(found.squeeze(-1), expected)
    if reentrant:  # torch allows it no torch.autograd.grad
        return
    for engine in ("loop", "traced"):
        found = per_sample_grads(loss_of, model, batch_of(name), Norm(), keep_batch_dim=True, engine=engine)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
