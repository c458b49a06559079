"""python -m tests.benchmarks.precision: how far float32 and bfloat16 weights are from float64, family by family.

Random models of the recorded folders' sizes and of tens of millions of parameters. Each number is
|x - x64| / |x64| (Euclidean norms) where x64 is the same computation in float64 throughout: z of the trunk with half
of the tokens known; one prediction of the head under the float64 z; the mean of the transition in the middle of the
diffusion that the prediction stands for; and all tokens of a guided generation (8 AR steps, 10 diffusion steps).
Diffusion, guidance and densities are float32 in both columns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.mar import Mar, MarConfig, MarPolicy
from mar_grpo.models.policy import Policy
from mar_grpo.models.vae import Vae
from mar_grpo.rollout import Guided, SamplingConfig, roll_out, schedule_of
from tests.unit import test_harmon, tiny

PROMPTS = ("a photo of two red apples", "a dog")
COLUMNS = ("z", "prediction", "mean", "generation")


class Float64(TorchFunctionMode):
    """Inside, whatever asks for float32 gets float64; random numbers are drawn in float32 and widened."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        drawn = func in (torch.randn, torch.rand)
        wide = {key: value if drawn else _wide(value) for key, value in (kwargs or {}).items()}
        out = (Tensor.double if func is Tensor.float else func)(*map(_wide, args), **wide)
        return out.double() if isinstance(out, Tensor) and out.dtype == torch.float32 else out


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def nova(arch: Sequence[str], heads: int, grid: int) -> Policy:
    transformer = {"arch": list(arch), "num_heads": heads, "image_size": [16 * grid] * 2, "image_stride": 8}
    transformer |= {"image_base_size": [grid] * 2, "video_base_size": [1, grid // 2, grid // 2]}
    blocks = {"block_out_channels": [8] * 4, "down_block_types": ["DownEncoderBlock2D"] * 4}
    return tiny.policy(transformer=transformer, vae=blocks | {"up_block_types": ["UpDecoderBlock2D"] * 4})


def _mar(width: int, depth: int, heads: int, head: int, grid: int) -> dict[str, Any]:
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
             (("embed_dim", width), ("depth", depth), ("num_heads", heads))}  # fmt: skip
    return tiny.MAR | sizes | {"img_size": 4 * grid, "diffloss_d": 3, "diffloss_w": head, "buffer_size": 8}


def mar(*sizes: int) -> Policy:
    draw = torch.Generator().manual_seed(0)
    network = Mar(MarConfig.from_dict(_mar(*sizes)))
    network.initialise_parameters(draw)
    return MarPolicy(network, Vae.from_config(tiny.VAE, draw), {prompt: n for n, prompt in enumerate(PROMPTS)})


def harmon(width: int, layers: int, *sizes: int) -> Policy:
    draw = torch.Generator().manual_seed(0)
    llm = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    llm |= {"num_attention_heads": width // 12, "num_key_value_heads": width // 24, "max_position_embeddings": 512}
    config = HarmonConfig.from_dict({"model_type": "harmon", "llm": test_harmon.LLM | llm, "mar": _mar(*sizes)})
    return HarmonPolicy(Harmon(config, draw), Vae.from_config(tiny.VAE, draw), tiny.tokenizer())


MODELS: dict[str, Callable[[], Policy]] = {
    "nova": lambda: nova(["vit_d2w24", "vit_d4w24", "mlp_d2w28"], 4, 4),
    "nova mid": lambda: nova(["vit_d4w384", "vit_d8w384", "mlp_d3w384"], 6, 8),
    "mar": lambda: mar(64, 2, 4, 64, 4),
    "mar mid": lambda: mar(512, 6, 8, 512, 8),
    "harmon": lambda: harmon(48, 2, 32, 2, 4, 32, 4),
    "harmon mid": lambda: harmon(384, 6, 384, 6, 6, 384, 8),
}


def filled(policy: Policy) -> Policy:
    """Layers that training starts at zero say something."""
    draw = torch.Generator().manual_seed(1)
    for parameter in policy.transformer.parameters():
        if not parameter.any():
            scale = 0.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.data.normal_(0.0, scale, generator=draw)
    return policy.eval().requires_grad_(False)


@torch.no_grad()
def measure(policy: Policy, z: Tensor | None = None) -> dict[str, Tensor]:
    """The four quantities; `z` is what the head is given, by default this policy's own."""
    steps: int | str = 10 if "nova" in type(policy).__name__.lower() else "10"
    sampling = SamplingConfig(ar_steps=8, diffusion_steps=steps, guidance_scale=3.0)
    schedule, guided = schedule_of(policy, sampling), Guided.of(policy, policy.encode_prompts(PROMPTS), sampling)
    draw, shape = torch.Generator().manual_seed(2), (len(PROMPTS), policy.num_tokens, policy.token_dim)
    tokens, x = (torch.randn(shape, generator=draw) for _ in range(2))
    half = policy.num_tokens // 2
    known = (torch.arange(policy.num_tokens) % 2 == 0).expand(shape[:2])
    found = policy.ar_latents(tokens, known, guided.cond, num_known=half)
    j = schedule.num_steps // 2
    prediction = policy.head(x, schedule.timestep(j), (found if z is None else z).to(found.dtype))
    mean, _ = schedule.transition(j, x, prediction)
    made = roll_out(guided, [1, 2]).tokens
    return dict(zip(COLUMNS, (found, prediction, mean, made), strict=True))


def errors(policy: Policy) -> list[dict[str, float]]:
    """Of float32 and of bfloat16 weights."""
    with Float64():
        exact = measure(copy.deepcopy(policy).to(torch.float64))
    assert all(value.dtype == torch.float64 for value in exact.values())
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        other = copy.deepcopy(policy)
        other.transformer.to(dtype)
        found = measure(other, exact["z"])
        rows.append({name: ((found[name].double() - x).norm() / x.norm()).item() for name, x in exact.items()})
    return rows


def main() -> None:
    torch.set_num_threads(1)
    print(f"| model | parameters | weights | {' | '.join(COLUMNS)} |")
    print(f"|---|---|---|{'---|' * len(COLUMNS)}")
    started = time.process_time()
    for name, make in MODELS.items():
        policy = filled(make())
        count = sum(parameter.numel() for parameter in policy.transformer.parameters())
        for weights, row in zip(("float32", "bfloat16"), errors(policy), strict=True):
            numbers = " | ".join(f"{row[column]:.1e}" for column in COLUMNS)
            print(f"| {name} | {count:,} | {weights} | {numbers} |", flush=True)
    print(f"\n{time.process_time() - started:.0f} CPU seconds, one thread")


if __name__ == "__main__":
    main()
