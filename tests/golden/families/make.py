"""Make the golden files of this folder with transformers and PyTorch, which no test needs.

Run in an environment of its own: `pip install torch transformers`, then `python make.py [NAME ...]`.
Each folder gets what `save_pretrained` writes, and `golden.safetensors`: `input_ids`, `labels`, `logits`, `loss`, and
the gradient of the loss for every parameter under "grad.NAME".
"""

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
LENGTH, WINDOW = 24, 7
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


EXPERTS = {
    "head_dim": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "router_aux_loss_coef": 0.25,
}


def sizes(**others: Any) -> dict[str, Any]:
    return SIZES | others


MODELS = {
    "llama2": transformers.LlamaConfig(**sizes(num_key_value_heads=4)),
    "llama3": transformers.LlamaConfig(**sizes(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})),
    "llama3_1": transformers.LlamaConfig(**sizes(rope_parameters=LLAMA3)),
    "smollm": transformers.LlamaConfig(**sizes(tie_word_embeddings=True, num_key_value_heads=1)),
    "mistral": transformers.MistralConfig(**sizes(sliding_window=WINDOW, head_dim=8)),
    "qwen2": transformers.Qwen2Config(**sizes(use_sliding_window=False)),
    "qwen2_window": transformers.Qwen2Config(
        **sizes(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0)
    ),
    "qwen3": transformers.Qwen3Config(**sizes(tie_word_embeddings=True, head_dim=8)),
    "qwen3_moe": transformers.Qwen3MoeConfig(**sizes(**EXPERTS, norm_topk_prob=True)),
    "qwen3_moe_plain": transformers.Qwen3MoeConfig(**sizes(**EXPERTS, norm_topk_prob=False, tie_word_embeddings=True)),
}


def load_balancing_loss(config: Any, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean of the layers' losses. transformers' own loss lets layers balance one another."""
    loss_of = transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func
    layers = [loss_of((logits,), config.num_experts, config.num_experts_per_tok) for logits in router_logits]
    return torch.stack(layers).mean()


def main(names: list[str]) -> None:
    for name, config in MODELS.items():
        if names and name not in names:
            continue
        torch.manual_seed(0)
        config = copy.deepcopy(config)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for path, x in model.named_parameters():
                if "norm" in path or path.endswith("bias"):  # which begin as ones and zeros
                    x += 0.3 * torch.randn_like(x)
        ids = torch.randint(3, 32, (2, LENGTH))
        labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
        mixture = "moe" in name
        output = model(ids, output_router_logits=True) if mixture else model(ids)
        logits = output.logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 32), labels.reshape(-1))
        if mixture:
            loss = loss + config.router_aux_loss_coef * load_balancing_loss(config, output.router_logits)
        loss.backward()
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        golden = {"input_ids": ids.int(), "labels": labels.int(), "logits": logits.detach(), "loss": loss.detach()}
        golden |= {f"grad.{path}": x.grad for path, x in model.named_parameters()}
        save_file({key: x.contiguous() for key, x in golden.items()}, folder / "golden.safetensors")
        (folder / "generation_config.json").unlink()
        print(f"{name}: {type(model).__name__}, loss {loss.item():.6f}")


if __name__ == "__main__":
    main(sys.argv[1:])
