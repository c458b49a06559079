"""A folder of the `harmon` set and the policy made from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mar_grpo.diffusion.respaced import RespacedSchedule
from mar_grpo.models.harmon import Harmon, HarmonConfig, HarmonPolicy
from mar_grpo.models.kl16 import Kl16, Kl16Config
from mar_grpo.models.mar import MarConfig
from mar_grpo.models.text import make_word_tokenizer
from mar_grpo.models.vae import harmon_bytes
from mar_grpo.rollout import Guided, SamplingConfig
from tests.conformance.checks import Comparison

FORWARD: dict[str, float] = {"atol": 2e-5, "rtol": 1e-4}
GENERATED = {"of_max": 1e-3}
GRADIENT = {"of_max": 1e-3}


def make_policy(compare: Comparison) -> HarmonPolicy:
    manifest = compare.manifest
    sizes = {key: value for key, value in manifest["mar_arch"].items() if key != "note"}
    mar = MarConfig.from_dict({key: value for key, value in manifest["mar"].items() if key != "type"} | sizes)
    pixels = mar.vae_stride * mar.patch_size
    rows, columns = manifest["image_shape"]
    network = Harmon(HarmonConfig(manifest["llm"], mar, (rows * pixels, columns * pixels)))
    network.llm.to_empty(device="cpu")
    compare.load(network)
    if (head := "weights.llm.lm_head.weight") in compare:
        compare.equal(head, network.llm.model.embed_tokens.weight)  # tied; the folder may leave it out
    levels = (1,) * mar.vae_stride.bit_length()
    vae = Kl16(
        Kl16Config(ch=32, ch_mult=levels, z_channels=mar.vae_embed_dim, embed_dim=mar.vae_embed_dim), harmon_bytes
    )
    policy = HarmonPolicy(network.eval(), vae, make_word_tokenizer([]))
    policy.requires_grad_(False)
    for parameter in policy.trunk_parameters():
        parameter.requires_grad_(True)
    return policy


@dataclass
class Case:
    """A folder, the policy made from it, and what its parts share."""

    compare: Comparison
    policy: HarmonPolicy

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return self.compare.manifest

    @cached_property
    def prompts(self) -> Tensor:
        """Packed prompts [2 B, P, F], the second half negative."""
        ids, given = self.compare.input("prompt.input_ids"), self.compare.input("prompt.attention_mask")
        return self.policy.transformer.llm.prefill(ids, given)[1]

    @cached_property
    def schedule(self) -> RespacedSchedule:
        spacing = self.manifest["mar"]["num_sampling_steps"]
        return self.policy.schedule(spacing).at_temperature(self.manifest["temperature"])

    @cached_property
    def counts(self) -> list[int]:
        """Tokens that each AR step predicts, by our schedule; the recorded one also lists steps without any."""
        recorded = [step["predicted"] for step in self.manifest["mask_schedule"]]
        ours = self.policy.mask_schedule(self.manifest["num_iter"])
        self.compare.same("rollout.mask_schedule", ours, [count for count in recorded if count])
        return recorded

    @cached_property
    def diffusion_steps(self) -> list[int]:
        return self.compare.input("loss.diff_idx").tolist()

    def guided(self, policy: HarmonPolicy | None = None) -> Guided:
        batch = len(self.prompts) // 2
        sampling = SamplingConfig(
            ar_steps=self.manifest["num_iter"],
            diffusion_steps=self.manifest["mar"]["num_sampling_steps"],
            guidance_scale=self.manifest["cfg"],
            guidance_schedule=self.manifest["cfg_schedule"],
            temperature=self.manifest["temperature"],
        )
        return Guided(policy or self.policy, self.prompts[:batch], self.prompts[batch : batch + 1], sampling)

    def canvas(self, i: int) -> tuple[Tensor, Tensor, int, Tensor]:
        """(tokens, known, number known, all places) before AR step i of the recorded rollout."""
        tokens = self.compare.input("rollout.tokens")
        order = self.compare.golden("rollout.orders")
        before = tokens[i - 1] if i else torch.zeros_like(tokens[0])
        done = sum(self.counts[:i])
        known = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order.flip(1)[:, :done], True)
        return before, known, done, torch.arange(order.shape[1]).expand_as(order)

    def deviation(self, j: int, prediction: Tensor) -> Tensor:
        """The learned deviation, of the last step too (ours is then deterministic; the public code records one)."""
        return (0.5 * self.schedule.log_variance(j, prediction)).exp() * self.schedule.temperature
