"""A policy and a value over the same observations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foresight.data.trajectory import Tree
from foresight.nets.heads import CategoricalHead, PolicyHead, ScalarHead
from foresight.nets.mlp import Encoder, orthogonal
from foresight.nets.normalize import ObsNormalizer
from foresight.nets.outputs import Output, Scalar
from foresight.nets.scored_actions import ScoredActions
from foresight.nets.stacked_mlp import StackedMLP
from foresight.ops.fused.mlp import Member


class SharedTrunk(nn.Module):
    """One trunk (pixels) for policy and value, with a linear layer each (PPO detail 21).

    With `bfloat16` the trunk runs under autocast; the last layers stay float32, and so do log-probabilities. If
    `appended`, the first output is followed by the trunk's features.
    """

    def __init__(
        self,
        trunk: Encoder,
        outputs: tuple[int, ...],
        gains: tuple[float, ...],
        bfloat16: bool = False,
        appended: bool = False,
    ) -> None:
        super().__init__()
        self.trunk, self.autocast, self.appended = trunk, bfloat16, appended
        self.last = nn.ModuleList(orthogonal(nn.Linear(trunk.size, n), g) for n, g in zip(outputs, gains, strict=True))

    def forward(self, obs: Tree) -> Sequence[Tensor]:
        """The inputs of the policy head and of the value head."""
        h = self._features(obs)
        return [self._output(i, h) for i in range(len(self.last))]

    def single(self, index: int, obs: Tree) -> Tensor:
        """The input of head `index`."""
        return self._output(index, self._features(obs))

    def last_layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of the layer that makes the input of head `index`."""
        return self.last[index].weight, self.last[index].bias  # type: ignore[return-value]

    def _output(self, index: int, h: Tensor) -> Tensor:
        y: Tensor = self.last[index](h)
        return torch.cat([y, h], -1) if self.appended and index == 0 else y

    def vjp(self, obs: Tree) -> None:
        """Not supported: use autograd."""

    def _features(self, obs: Tree) -> Tensor:
        if not self.autocast:
            return self.trunk(obs)
        with torch.autocast(self.last[0].weight.device.type, torch.bfloat16):  # type: ignore[arg-type]
            return self.trunk(obs).float()


class VectorizedMLP(nn.Module):
    """A `StackedMLP` on observations that `vectorizer` flattens to vectors."""

    def __init__(self, vectorizer: nn.Module, mlp: StackedMLP) -> None:
        super().__init__()
        self.vectorizer, self.mlp = vectorizer, mlp

    def forward(self, obs: Tree) -> Sequence[Tensor]:
        """The inputs of the policy head and of the value head."""
        return self.mlp(self.vectorizer(obs))

    def single(self, index: int, obs: Tree) -> Tensor:
        """The input of head `index`."""
        return self.mlp.single(index, self.vectorizer(obs))

    def last_layer(self, index: int) -> tuple[Tensor, Tensor]:
        """See `StackedMLP.last_layer`."""
        return self.mlp.last_layer(index)

    def vjp(self, obs: Tree) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], None]] | None:
        """See `StackedMLP.vjp`."""
        return self.mlp.vjp(self.vectorizer(obs))


Body = SharedTrunk | VectorizedMLP | StackedMLP | ScoredActions


class SeparateNetworks(nn.Module):
    """Two networks, one for the policy and one for the value: they share no parameters.

    For algorithms that train the two differently. Uses the first output of each; call `policy.single` for further
    outputs of the policy's body.
    """

    def __init__(self, policy: Body, value: Body) -> None:
        super().__init__()
        self.policy, self.value = policy, value

    def forward(self, obs: Tree) -> Sequence[Tensor]:
        """The inputs of the policy head and of the value head."""
        return [self.policy.single(0, obs), self.value.single(0, obs)]

    def single(self, index: int, obs: Tree) -> Tensor:
        """The input of head `index`."""
        return (self.policy, self.value)[index].single(0, obs)

    def last_layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of the layer that makes the input of head `index`."""
        return (self.policy, self.value)[index].last_layer(0)

    def vjp(self, obs: Tree) -> None:
        """Not supported: use autograd."""


class ActorCritic(nn.Module):
    """A body with a policy head and a value head: one trunk for both (`SharedTrunk`, `ScoredActions`), or one each
    (`StackedMLP`, `SeparateNetworks`).

    `normalizer` is applied to every observation and saved with the weights. Dict observations may have the key
    `mask_key` (`[..., A]`, nonzero where an action is allowed).
    """

    def __init__(
        self,
        body: Body | SeparateNetworks,
        policy_head: PolicyHead,
        value_head: nn.Module,
        normalizer: ObsNormalizer | None = None,
        mask_key: str | None = None,
    ) -> None:
        super().__init__()
        self.body, self.policy_head, self.value_head = body, policy_head, value_head
        self.normalizer, self.mask_key = normalizer, mask_key

    def policy(self, obs: Tree) -> Output:
        """The `Output` over actions."""
        return self._actions(self.body.single(0, self._normal(obs)), obs)

    def value(self, obs: Tree, carry: Tree = None) -> Scalar:
        """The value. `carry` is ignored: there is no memory."""
        return self.value_head(self.body.single(1, self._normal(obs)))

    def forward(self, obs: Tree) -> tuple[Output, Scalar]:
        """Policy and value in one pass."""
        policy, value = self.body(self._normal(obs))
        return self._actions(policy, obs), self.value_head(value)

    def value_layer(self) -> tuple[Tensor, Tensor]:
        """Weight `[1, D]` and bias `[1]` of the layer that makes the input of the value head."""
        return self.body.last_layer(1)

    def initial(self, batch: int) -> None:
        """The initial carry: None, as there is no memory."""

    def step(self, obs: Tree, carry: Tree = None) -> tuple[Output, None]:
        """`policy`, with the signature of `MemoryActorCritic.step`; the carry is None."""
        return self.policy(obs), None

    def read(self, obs: Tree, carry: Tree = None, start: Tensor | None = None) -> tuple[Output, Scalar, None]:
        """`forward`, with the signature of `MemoryActorCritic.read`."""
        return *self(obs), None

    def vjp(self, obs: Tree) -> tuple[Output, Scalar, Callable[[Tensor, Tensor], None]] | None:
        """`forward` without autograd, and its backward pass: a function of the gradients of the heads' inputs.

        For heads without weights. None where the body does not support it. See `StackedMLP.vjp`.
        """
        found = self.body.vjp(self._normal(obs))
        if found is None:
            return None
        (policy, value), back = found
        return self._actions(policy, obs), self.value_head(value), lambda p, v: back([p, v.unsqueeze(-1)])

    def small_members(self, obs: Tree) -> tuple[Tensor, Member, Member, bool] | None:
        """The flat parameter, policy and value in it, and whether they have ReLU, for compiled loops over `obs`.

        None unless that is all there is: two small MLPs over vectors, one choice of several, and a value.
        """
        if type(self.value_head) is not ScalarHead or not isinstance(self.body, StackedMLP):
            return None
        if self.small_policy(obs) is None or (members := self.body.small_members(obs)) is None:
            return None
        policy, value = members
        return self.body.flat, policy, value, self.body.activation == "relu"

    def small_policy(self, obs: Tree) -> tuple[Member, bool] | None:
        """The policy and whether it has ReLU, for compiled loops over `obs`.

        None unless it is one small MLP over vectors and one choice of several.
        """
        body = self.body.policy if isinstance(self.body, SeparateNetworks) else self.body
        plain = self.normalizer is None and self.mask_key is None and isinstance(self.policy_head, CategoricalHead)
        if not plain or not isinstance(body, StackedMLP) or (members := body.small_members(obs)) is None:
            return None
        return members[0], body.activation == "relu"

    def policy_parameters(self) -> list[nn.Parameter]:
        """The parameters of the policy alone. The body must be `SeparateNetworks`."""
        assert isinstance(self.body, SeparateNetworks)
        return [*self.body.policy.parameters(), *self.policy_head.parameters()]

    def value_parameters(self) -> list[nn.Parameter]:
        """The parameters of the value alone. The body must be `SeparateNetworks`."""
        assert isinstance(self.body, SeparateNetworks)
        return [*self.body.value.parameters(), *self.value_head.parameters()]

    def _normal(self, obs: Tree) -> Tree:
        return obs if self.normalizer is None else self.normalizer(obs)

    def _actions(self, y: Tensor, obs: Tree) -> Output:
        if self.mask_key is None:
            return self.policy_head(y)
        return self.policy_head(y, obs[self.mask_key] > 0)


class Sampled:
    """Acts by what a network samples, by default independently at every step: the `choose` of `envs.collect`.

    If `noted`, the extras have the `logprob` of the actions, except of steps in a compiled loop.
    """

    def __init__(
        self,
        network: Any,
        generator: torch.Generator,
        sample: Callable[[Any], Tensor] | None = None,
        noted: bool = False,
    ) -> None:
        self.network, self.generator, self.noted = network, generator, noted
        self.sample = sample or (lambda output: output.sample(generator))

    def __call__(self, obs: Tree, carry: Tree) -> tuple[Tensor, dict[str, Tensor], Tree]:
        """Actions `[B, ...]` for observations, extras, and the next memory."""
        output, carry = self.network.step(obs, carry)
        action = self.sample(output)
        return action, {"logprob": output.logp(action)} if self.noted else {}, carry

    def unroll(self, env: Any, obs: Tree, steps: int) -> Any:
        """The same for `steps` steps in a compiled loop; None if policy or environment have none."""
        # not what a wrapper of one's own forwards, whose `step` would be passed over
        if inspect.getattr_static(env, "unroll", None) is None or not isinstance(self.network, ActorCritic):
            return None
        if (found := self.network.small_policy(obs)) is None:
            return None
        policy, relu = found
        noise = torch.empty(steps, len(obs), int(policy.sizes[-1])).exponential_(generator=self.generator).log_()
        return env.unroll(policy, relu, obs, noise)
