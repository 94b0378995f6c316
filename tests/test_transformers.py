"""Models of Hugging Face, made from a configuration: an encoder with a decoder, images, and grouped attention."""

from __future__ import annotations

import pytest
import torch
import transformers
from oracle import assert_trees_close

from persample import ClippedMean, Norm, per_sample_grads

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
