"""The declared objective: which modules run, with which weights, on which channels.

Nothing here has a default. A module entry must state all five of its fields and every key of its `config`, so that
a file means the same in every version of the package.
"""

from functools import partial, reduce
from importlib.metadata import EntryPoint
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from coordexp.errors import UserError
from coordexp.extensions import find_extensions, load_extension


class SettingsSection(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # A value may be a secret. `schema.quote_value` knows which.
        use_attribute_docstrings=True,  # The text under a setting is its description.
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


class ModuleSettings(SettingsSection):
    """The settings of a module, with what the rules and the objective have to know of it. A module of another
    package may state the same facts (docs/extending.md)."""

    kind: ClassVar[str]  # what computes it: a `ModuleKind` of the objective, as `module:name`
    is_diagnostic: ClassVar[bool] = False  # it only reports
    teaching: ClassVar[frozenset[str]] = frozenset()  # the weights that supervise a part of an answer
    answer_format: ClassVar[str | None] = None  # the only one in which it has an effect
    trains_chat: ClassVar[bool] = False  # on chat records, and on nothing else

    @property
    def masks_desc(self) -> bool:
        """Return whether no module uses the tokens of `desc` on the channels of this one."""
        return False


class TokenCEConfig(ModuleSettings):
    """Cross entropy on text tokens."""

    kind = "coordexp.objective.modules:TOKEN_CE"
    teaching = frozenset({"struct_ce_weight", "desc_ce_weight"})  # eos_ce_weight only ends what these teach
    struct_ce_weight: NonNegativeFloat
    """Weight of cross entropy on structure tokens: braces, quotes, keys, commas."""
    desc_ce_weight: NonNegativeFloat
    """Weight of cross entropy on supervised `desc` values. 0 masks them."""
    eos_ce_weight: NonNegativeFloat
    """Weight of cross entropy on the end-of-turn token, which teaches the model to stop."""

    @property
    def masks_desc(self) -> bool:
        return self.desc_ce_weight == 0


class CoordRegConfig(ModuleSettings):
    """Distribution losses on coordinate tokens."""

    kind = "coordexp.objective.modules:COORD_REG"
    teaching = frozenset({"coord_ce_weight", "soft_ce_weight", "w1_weight"})  # the gates only bound the others
    answer_format = "coord_tokens"
    coord_ce_weight: NonNegativeFloat = Field(examples=[0.02])
    """Weight of hard cross entropy on the true coordinate bin."""
    soft_ce_weight: NonNegativeFloat
    """Weight of cross entropy against the soft target over the 1,000 bins."""
    w1_weight: NonNegativeFloat
    """Weight of the Wasserstein-1 distance between predicted and target bins."""
    coord_gate_weight: NonNegativeFloat
    """Weight of the penalty on the probability of text tokens at coordinate positions."""
    text_gate_weight: NonNegativeFloat = Field(examples=[0.1])
    """Weight of the penalty on the probability of coordinate tokens at supervised text positions."""
    temperature: PositiveFloat
    """Temperature of the softmax over coordinate bins."""
    target_sigma: PositiveFloat = Field(examples=[2.0])
    """Standard deviation, in bins, of the Gaussian soft target."""
    target_truncate: Annotated[int, Field(ge=1)] | None = Field(examples=[8])
    """The soft target is 0 at more than this many bins from its centre. null: no limit."""


class BBoxGeoConfig(ModuleSettings):
    """Losses on decoded boxes. An ablation: of the shipped configs, only `stage2-bbox-geo.yaml` uses it."""

    kind = "coordexp.objective.modules:BBOX_GEO"
    teaching = frozenset({"smoothl1_weight", "ciou_weight"})
    answer_format = "coord_tokens"
    smoothl1_weight: NonNegativeFloat
    """Weight of the smooth L1 loss on boxes decoded as expectations over the bins."""
    ciou_weight: NonNegativeFloat
    """Weight of the complete-IoU loss on boxes decoded as expectations over the bins."""


class NumberCEConfig(ModuleSettings):
    """Cross entropy on the coordinates of native answers (`custom.answer_format: native`), which are ordinary
    tokens."""

    kind = "coordexp.objective.modules:NUMBER_CE"
    teaching = frozenset({"ce_weight"})
    answer_format = "native"
    ce_weight: NonNegativeFloat
    """Weight of cross entropy on the digits of coordinates in native answers."""


class ChatCEConfig(ModuleSettings):
    """Cross entropy on the answers of chat records, which need it. They are on channel A in every run."""

    kind = "coordexp.objective.modules:CHAT_CE"
    teaching = frozenset({"answer_ce_weight"})
    trains_chat = True
    answer_ce_weight: NonNegativeFloat
    """Weight of cross entropy on the answers of chat records and their end-of-turn tokens, per such token."""


class CoordDiagConfig(ModuleSettings):
    """Reports statistics of the coordinate distributions. It has no gradient, and no settings."""

    kind = "coordexp.objective.modules:COORD_DIAG"
    is_diagnostic = True
    answer_format = "coord_tokens"


class ModuleSpec(SettingsSection, use_attribute_docstrings=False):  # those made from it have no source
    enabled: bool = Field(description="Whether the module runs at all.")
    weight: NonNegativeFloat = Field(description="Factor on the module's whole contribution to the loss.")
    channels: Annotated[tuple[Channel, ...], Field(min_length=1), from_list] = Field(
        description="Channels that the module runs on: A trains on the ground truth, B on corrected rollouts.",
        examples=[["A", "B"]],
    )


def _make_module(name: str, config: Any, description: str, base: type[SettingsSection] = ModuleSpec) -> Any:
    """Return the form of an entry of a pipeline, or of another part (`base`) with a name and settings."""
    fields: dict[str, Any] = {
        "name": (Literal[name], Field(description=description)),
        "config": (config, Field(description="The settings of the module. All keys are required.")),
    }
    return create_model(name, __base__=base, **fields)


def make_added_module(
    entry: EntryPoint,
    base: type[SettingsSection] = ModuleSpec,
    settings_base: type[SettingsSection] = ModuleSettings,
) -> Any:
    """Return the form of a module, or of another part, that another package adds (docs/extending.md). One that
    fails refuses all settings."""
    try:
        given = load_extension(entry)
    except UserError as error:
        refused = Annotated[Any, BeforeValidator(partial(_refuse, str(error)))]
        return _make_module(entry.name, refused, str(error), base)
    settings = create_model(given.__name__, __base__=(given, settings_base))
    return _make_module(entry.name, settings, given.__doc__ or f"A module of {entry.module}.", base)


def _refuse(reason: str, _: Any) -> Any:
    raise ValueError(reason)


OWN: dict[str, type[ModuleSettings]] = {
    "token_ce": TokenCEConfig,
    "coord_reg": CoordRegConfig,
    "bbox_geo": BBoxGeoConfig,
    "number_ce": NumberCEConfig,
    "chat_ce": ChatCEConfig,
    "coord_diag": CoordDiagConfig,
}
ADDED_OBJECTIVES = find_extensions("objectives", taken=frozenset(OWN))

if TYPE_CHECKING:

    class Module(ModuleSpec):
        name: str
        config: Any
else:
    _own = [_make_module(name, config, config.__doc__) for name, config in OWN.items()]
    _modules = (*_own, *map(make_added_module, ADDED_OBJECTIVES.values()))
    Module = Annotated[reduce(or_, _modules), Field(discriminator="name")]


class Pipeline(SettingsSection):
    # Both lists accept all modules here. A rule checks the list, so that one in the wrong list gets one message.
    objective: Annotated[tuple[Module, ...], Field(min_length=1), from_list]
    """The modules whose weighted sum is the loss."""
    diagnostics: Annotated[tuple[Module, ...], from_list]
    """Modules that only report. `[]`: none."""
