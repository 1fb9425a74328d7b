"""The declared objective: which modules run, with which weights, on which channels (D5, D6).

Nothing here has a default. A module entry states all five of its fields and every key of its `config`,
so that a run is what its file says, whatever the version of the package.
"""

from typing import Annotated, Literal

from pydantic import Field

from coordexp.config.section import NonNegativeFloat, PositiveFloat, Section, from_list

Channel = Literal["A", "B"]


class TokenCEConfig(Section):
    struct_ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy on structure tokens: braces, quotes, keys, commas.",
        examples=[1.0],
    )
    desc_ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy on supervised `desc` values. 0 masks them.",
        examples=[1.0],
    )
    eos_ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy on the end-of-turn token: what teaches the model to stop.",
        examples=[1.0],
    )


class CoordRegConfig(Section):
    coord_ce_weight: NonNegativeFloat = Field(
        description="Weight of hard cross entropy on the true coordinate bin.", examples=[0.02]
    )
    soft_ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy against the soft target over the 1,000 bins.", examples=[1.0]
    )
    w1_weight: NonNegativeFloat = Field(
        description="Weight of the Wasserstein-1 distance between predicted and target bins.", examples=[1.0]
    )
    coord_gate_weight: NonNegativeFloat = Field(
        description="Weight of the penalty on non-coordinate mass at coordinate positions.", examples=[1.0]
    )
    text_gate_weight: NonNegativeFloat = Field(
        description="Weight of the penalty on coordinate mass at supervised text positions.", examples=[0.1]
    )
    temperature: PositiveFloat = Field(
        description="Temperature of the softmax over coordinate bins.", examples=[1.0]
    )
    target_sigma: PositiveFloat = Field(
        description="Standard deviation, in bins, of the Gaussian soft target.", examples=[2.0]
    )
    target_truncate: Annotated[int, Field(ge=1)] | None = Field(
        description="The soft target is zero further than this many bins from its centre; null keeps all.",
        examples=[8],
    )


class BBoxGeoConfig(Section):
    smoothl1_weight: NonNegativeFloat = Field(
        description="Weight of smooth L1 on boxes decoded as expectations.", examples=[1.0]
    )
    ciou_weight: NonNegativeFloat = Field(
        description="Weight of the complete-IoU loss on boxes decoded as expectations.", examples=[1.0]
    )


class CoordDiagConfig(Section):
    """No keys: the diagnostic has nothing to set."""


class ModuleSpec(Section):
    enabled: bool = Field(description="Whether the module runs at all.", examples=[True])
    weight: NonNegativeFloat = Field(
        description="Factor on the module's whole contribution to the loss.", examples=[1.0]
    )
    channels: Annotated[tuple[Channel, ...], Field(min_length=1), from_list] = Field(
        description="Where it runs: A is the ground-truth sequence, B the rollout sequence.", examples=[["A", "B"]]
    )


class TokenCE(ModuleSpec):
    name: Literal["token_ce"] = Field(description="Cross entropy on text tokens.")
    config: TokenCEConfig = Field(description="Weights of the three text terms. All keys are required.")


class CoordReg(ModuleSpec):
    name: Literal["coord_reg"] = Field(description="Distribution losses on coordinate tokens.")
    config: CoordRegConfig = Field(description="Weights and target shape. All keys are required.")


class BBoxGeo(ModuleSpec):
    name: Literal["bbox_geo"] = Field(description="Losses on decoded boxes: an ablation, off by default (D7).")
    config: BBoxGeoConfig = Field(description="Weights of the two terms. All keys are required.")


class CoordDiag(ModuleSpec):
    name: Literal["coord_diag"] = Field(description="Reports how coordinate distributions look. No gradient.")
    config: CoordDiagConfig = Field(description="Always `{}`.", examples=[{}])


# Which of the two lists a module may stand in is a rule, so that one in the wrong list gets one message.
Module = Annotated[TokenCE | CoordReg | BBoxGeo | CoordDiag, Field(discriminator="name")]
OBJECTIVES = frozenset({"token_ce", "coord_reg", "bbox_geo"})
DIAGNOSTICS = frozenset({"coord_diag"})


class Pipeline(Section):
    objective: Annotated[tuple[Module, ...], Field(min_length=1), from_list] = Field(
        description="The modules whose weighted sum is the loss."
    )
    diagnostics: Annotated[tuple[Module, ...], from_list] = Field(
        description="Modules that only report. `[]` for none."
    )
