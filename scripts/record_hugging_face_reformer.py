"""Records small Reformers of Hugging Face's `transformers`, for the tests of `interop/hugging_face.py`.

    python scripts/record_hugging_face_reformer.py [--folder tests/interop/hugging_face_reformer] [--json]

Needs torch and a `transformers` that still has the Reformer, which the project itself does not: install them into an
environment of their own (`--help` does without). Recorded with torch 2.13.0 (CPU) and transformers 4.57.6.

Every model has a folder: `config.json` and the weights as `save_pretrained` writes them, and `recorded.npz` with

    tokens          [B, T]
    logits          [B, T, V], float32, without dropout
    directions_<i>  what layer i hashed with, if it did: [H, K, hashes, half the sum of the factors of `num_buckets`]
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

SMALL = {
    "vocab_size": 19,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 24,
    "axial_pos_shape": [4, 8],
    "axial_pos_embds_dim": [6, 10],
    "max_position_embeddings": 32,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 8,
    "num_hashes": 2,
    "num_buckets": 4,
    "hidden_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
    "lsh_attention_probs_dropout_prob": 0.0,
    "is_decoder": True,
}

# Folder -> settings other than SMALL, and how to save: arguments of `save_pretrained`, or a word for `save`.
MODELS: dict[str, tuple[dict, dict | str]] = {
    "mixed": ({"attn_layers": ["local", "lsh", "local", "lsh"], "chunk_size_feed_forward": 8}, {}),
    "local": (
        {
            "attn_layers": ["local", "local"],
            "axial_pos_embds": False,
            "hidden_act": "gelu",
            "local_num_chunks_before": 2,
            "layer_norm_eps": 1e-3,
        },
        {"max_shard_size": "6KB"},
    ),
    "factored": (
        {
            "attn_layers": ["lsh", "lsh"],
            "num_buckets": [2, 4],
            "num_hashes": 3,
            "hash_seed": 5,
            "hidden_act": "gelu_new",
        },
        {"safe_serialization": False},
    ),
    "automatic": ({"attn_layers": ["lsh"], "num_buckets": None, "num_hashes": 1, "lsh_attn_chunk_length": 4}, {}),
    "narrow_heads": ({"attn_layers": ["local", "lsh"], "attention_head_size": 4}, {}),
    "one_chunk": (
        {"attn_layers": ["local", "lsh"], "local_attn_chunk_length": 32, "lsh_attn_chunk_length": 32},
        "as in 2020",
    ),
}


def make(settings: dict) -> Any:
    """A model of which no weight is zero or one, so that each has its part in the logits."""
    import torch
    import transformers

    model = transformers.ReformerModelWithLMHead(transformers.ReformerConfig(**{**SMALL, **settings})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm_scale = name.endswith("layer_norm.weight")
            size = 1.0 if "embeddings" in name else 0.3
            weight.copy_(norm_scale * 1.0 + size * torch.randn(weight.shape))
    return model


def run(model: Any, tokens: Any) -> dict[str, np.ndarray]:
    """Logits, and the directions that every LSH layer drew for them."""
    import torch
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    directions, original, randn = {}, LSHSelfAttention._hash_vectors, torch.randn

    def hash_vectors(self, *args, **kwargs):
        def drawn(*args, **kwargs):
            value = randn(*args, **kwargs)
            directions[f"directions_{self.layer_idx}"] = value.numpy()
            return value

        torch.randn = drawn
        try:
            return original(self, *args, **kwargs)
        finally:
            torch.randn = randn

    LSHSelfAttention._hash_vectors = hash_vectors
    try:
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
    finally:
        LSHSelfAttention._hash_vectors = original
    return {"tokens": tokens.numpy().astype(np.int32), "logits": logits.numpy(), **directions}


def save(model: Any, folder: Path, saving: dict | str) -> None:
    """Writes `config.json` and the weights."""
    import torch

    if saving == "as in 2020":  # the Reformers on the Hub are of then: no zip archive yet, and masks among the weights
        model.config.save_pretrained(folder)
        tensors = {**model.state_dict(), **dict(model.named_buffers())}
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        model.save_pretrained(folder, **saving)
        (folder / "generation_config.json").unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("tests/interop/hugging_face_reformer"))
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    rows = []
    for seed, (name, (settings, saving)) in enumerate(MODELS.items()):
        folder = arguments.folder / name
        torch.manual_seed(seed)
        model = make(settings)
        save(model, folder, saving)  # before it runs, which sets `num_buckets`
        recorded = run(model, torch.randint(SMALL["vocab_size"], (2, 32)))
        np.savez(folder / "recorded.npz", **recorded)
        shapes = {key: value.shape for key, value in recorded.items()}
        rows.append({"model": name, "largest_logit": float(abs(recorded["logits"]).max()), **shapes})
    if arguments.json:
        print(json.dumps(rows))
    else:
        print(*rows, sep="\n")


if __name__ == "__main__":
    main()
