"""The declared objective: which modules run, with which weights, on which channels.

Nothing here has a default. A module entry must state all five of its fields and every key of its `config`, so that
a file means the same in every version of the package.
"""

from functools import partial
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from coordexp.errors import UserError
from coordexp.extensions import find_extensions, load_extension


class SettingsSection(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # A value may be a secret. `wording.quote_value` knows which.
    )


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _null_to_defaults(value: Any) -> Any:
    """Read `server:` with nothing under it as the defaults of that section."""
    return {} if value is None else value


from_list = BeforeValidator(_list_to_tuple)  # Settings are frozen, so a YAML list becomes a tuple.
from_null = BeforeValidator(_null_to_defaults)

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Text = Annotated[str, Field(min_length=1)]


Channel = Literal["A", "B"]


class TokenCEConfig(SettingsSection):
    struct_ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy on structure tokens: braces, quotes, keys, commas.", examples=[1.0]
    )
    desc_ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy on supervised `desc` values. 0 masks them.", examples=[1.0]
    )
    eos_ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy on the end-of-turn token, which teaches the model to stop.",
        examples=[1.0],
    )


class CoordRegConfig(SettingsSection):
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
        description="Weight of the penalty on the probability of text tokens at coordinate positions.",
        examples=[1.0],
    )
    text_gate_weight: NonNegativeFloat = Field(
        description="Weight of the penalty on the probability of coordinate tokens at supervised text positions.",
        examples=[0.1],
    )
    temperature: PositiveFloat = Field(
        description="Temperature of the softmax over coordinate bins.", examples=[1.0]
    )
    target_sigma: PositiveFloat = Field(
        description="Standard deviation, in bins, of the Gaussian soft target.", examples=[2.0]
    )
    target_truncate: Annotated[int, Field(ge=1)] | None = Field(
        description="The soft target is 0 at more than this many bins from its centre. null: no limit.",
        examples=[8],
    )


class BBoxGeoConfig(SettingsSection):
    smoothl1_weight: NonNegativeFloat = Field(
        description="Weight of the smooth L1 loss on boxes decoded as expectations over the bins.", examples=[1.0]
    )
    ciou_weight: NonNegativeFloat = Field(
        description="Weight of the complete-IoU loss on boxes decoded as expectations over the bins.",
        examples=[1.0],
    )


class DuplicateULConfig(SettingsSection):
    ul_weight: NonNegativeFloat = Field(
        description="Weight of the unlikelihood of tokens that would begin a duplicate. The sum over these tokens "
        "is divided by the number of answers of the step.",
        examples=[1.0],
    )


class NumberCEConfig(SettingsSection):
    ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy on the digits of coordinates in native answers.", examples=[1.0]
    )


class ChatCEConfig(SettingsSection):
    answer_ce_weight: NonNegativeFloat = Field(
        description="Weight of cross entropy on the answers of chat records and their end-of-turn tokens. The sum "
        "over these tokens is divided by their number in the step.",
        examples=[1.0],
    )


class CoordDiagConfig(SettingsSection):
    """Empty: this diagnostic has no settings."""


class ModuleSpec(SettingsSection):
    kind: ClassVar[str] = ""  # of a module of another package: the `ModuleKind` that computes it, as `module:name`
    enabled: bool = Field(description="Whether the module runs at all.", examples=[True])
    weight: NonNegativeFloat = Field(
        description="Factor on the module's whole contribution to the loss.", examples=[1.0]
    )
    channels: Annotated[tuple[Channel, ...], Field(min_length=1), from_list] = Field(
        description="Channels that the module runs on: A trains on the ground truth, B on corrected rollouts.",
        examples=[["A", "B"]],
    )


class TokenCE(ModuleSpec):
    name: Literal["token_ce"] = Field(description="Cross entropy on text tokens.")
    config: TokenCEConfig = Field(description="Weights of the three text terms. All keys are required.")


class CoordReg(ModuleSpec):
    name: Literal["coord_reg"] = Field(description="Distribution losses on coordinate tokens.")
    config: CoordRegConfig = Field(description="Weights and target shape. All keys are required.")


class BBoxGeo(ModuleSpec):
    name: Literal["bbox_geo"] = Field(
        description="Losses on decoded boxes. An ablation: of the shipped configs, only `stage2-bbox-geo.yaml` "
        "uses it."
    )
    config: BBoxGeoConfig = Field(description="Weights of the two terms. All keys are required.")


class DuplicateUL(ModuleSpec):
    name: Literal["duplicate_ul"] = Field(
        description="Unlikelihood of duplicates. It needs `rollout_matching.correction.duplicates: unlikelihood`, "
        "which marks the tokens."
    )
    config: DuplicateULConfig = Field(description="Weight of the term. The key is required.")


class NumberCE(ModuleSpec):
    name: Literal["number_ce"] = Field(
        description="Cross entropy on the coordinates of native answers, which are numbers in ordinary tokens. It "
        "needs `custom.answer_format: native`."
    )
    config: NumberCEConfig = Field(description="Weight of the term. The key is required.")


class ChatCE(ModuleSpec):
    name: Literal["chat_ce"] = Field(
        description="Cross entropy on the answers of chat records, which are on channel A in every run. A run on "
        "chat records needs it."
    )
    config: ChatCEConfig = Field(description="Weight of the term. The key is required.")


class CoordDiag(ModuleSpec):
    name: Literal["coord_diag"] = Field(
        description="Reports statistics of the coordinate distributions. It has no gradient."
    )
    config: CoordDiagConfig = Field(description="Always `{}`.", examples=[{}])


# Both lists accept all modules here. A rule checks the list, so that a module in the wrong one gets one message.
OWN_OBJECTIVES = frozenset({"token_ce", "coord_reg", "bbox_geo", "duplicate_ul", "number_ce", "chat_ce"})
DIAGNOSTICS = frozenset({"coord_diag"})
ADDED_OBJECTIVES = find_extensions("objectives", taken=OWN_OBJECTIVES | DIAGNOSTICS)
OBJECTIVES = OWN_OBJECTIVES | frozenset(ADDED_OBJECTIVES)


def _make_module(entry: EntryPoint) -> Any:
    """Return the form of a module that another package adds (docs/extending.md)."""
    settings, kind, description = _load_module_settings(entry)
    fields: dict[str, Any] = {
        "name": (Literal[entry.name], Field(description=description)),
        "config": (settings, Field(description="The settings of the module.")),
    }
    module: Any = create_model(entry.name, __base__=ModuleSpec, **fields)
    module.kind = kind
    return module


def _load_module_settings(entry: EntryPoint) -> tuple[Any, str, str]:
    """Return the type of a module's settings, its kind and its description. If the package cannot be imported, all
    settings are refused with the reason."""
    try:
        given = load_extension(entry)
    except UserError as error:
        return Annotated[Any, BeforeValidator(partial(_refuse, str(error)))], "", str(error)
    description = given.__doc__ or f"A module of {entry.module}."
    return create_model(given.__name__, __base__=(given, SettingsSection)), given.kind, description


def _refuse(reason: str, _: Any) -> Any:
    raise ValueError(reason)


if TYPE_CHECKING:
    AnyModule = TokenCE | CoordReg | BBoxGeo | DuplicateUL | NumberCE | ChatCE | CoordDiag
else:
    AnyModule = Union[
        (
            *(TokenCE, CoordReg, BBoxGeo, DuplicateUL, NumberCE, ChatCE, CoordDiag),
            *map(_make_module, ADDED_OBJECTIVES.values()),
        )
    ]
Module = Annotated[AnyModule, Field(discriminator="name")]


class Pipeline(SettingsSection):
    objective: Annotated[tuple[Module, ...], Field(min_length=1), from_list] = Field(
        description="The modules whose weighted sum is the loss."
    )
    diagnostics: Annotated[tuple[Module, ...], from_list] = Field(
        description="Modules that only report. `[]`: none."
    )
