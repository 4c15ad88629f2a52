"""What each kind of job takes, stated once: for REST, commands, pages, offline programs and the handlers that do them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler  # pydantic itself has it from 2.10 on

from holdfast_formats import naming
from holdfast_formats.body import Body, message
from holdfast_formats.errors import InvalidRequest

if TYPE_CHECKING:
    from typing_extensions import Self

    from holdfast_formats.rest.operations import Job

Text = Annotated[str, StringConstraints(min_length=1)]
RunName = Annotated[str, AfterValidator(naming.check_run), Field(description="the run of the checkpoint")]
LEFT_OUT_MAX = 100  # patterns of an import
Int16 = Literal["integers", "bfloat16"]  # what a checkpoint's 16-bit integers are
Step = Annotated[int, Field(ge=0, le=naming.STEP_MAX, description="the step of the checkpoint")]

# The kinds of checkpoints that the wing `convert` reads and writes: their names, and what a page calls them.
IMPORT_KINDS = {
    "hf": "a Hugging Face model",
    "peft": "a PEFT adapter",
    "trainer": "a checkpoint of the Hugging Face Trainer",
    "accelerate": "a state that Accelerate saved",
    "diffusers": "a pipeline of diffusers",
    "deepspeed": "a DeepSpeed checkpoint with ZeRO",
    "megatron-torch": "a checkpoint of Megatron-LM in files of its ranks",
    "hf-bin": "a Hugging Face model in pytorch_model.bin",
    "torch": "a state dict in a torch file",
    "gguf": "a GGUF file of llama.cpp",
    "orbax": "a checkpoint of Orbax",
    "paddle-uc": "a unified checkpoint of Paddle",
    "paddle-flex": "a FlexCheckpoint of Paddle",
    "paddle-sharding-io": "a checkpoint of Paddle's sharding_io",
    "paddle-lora": "a LoRA adapter of Paddle",
    "dcp": "a checkpoint of torch.distributed.checkpoint",
    "megatron": "a checkpoint of Megatron-core (torch_dist)",
    "nemo": "a checkpoint of NeMo",
}
EXPORT_KINDS = {
    "hf": "a Hugging Face directory",
    "trainer": "a checkpoint of the Hugging Face Trainer",
    "peft": "a PEFT adapter",
    "diffusers": "a pipeline of diffusers",
    "dcp": "a directory of torch.distributed.checkpoint",
    "megatron": "a checkpoint of Megatron-core (torch_dist)",
    "deepspeed-universal": "a universal checkpoint of DeepSpeed",
    "gguf": "a GGUF file of llama.cpp",
    "paddle-uc": "a unified checkpoint of PaddleFormers",
    "paddle-flex": "a FlexCheckpoint of Paddle",
    "paddle-sharding-io": "a checkpoint of Paddle's sharding_io",
    "paddle-lora": "a LoRA adapter of Paddle",
}


class Arguments(Body):
    """What a kind of job takes besides run and step. Nothing is converted: a flag is true or false, and no text."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", populate_by_name=True)


class VerifyArguments(Arguments):
    repair: bool = Field(default=False, description="replace damaged bytes with verified ones")


class CompareArguments(Arguments):
    other: Text | int = Field(alias="with", description="RUN@STEP, or a step of the same run")


class ReadOptions(Arguments):
    """What a user may ask of an import or a conversion."""

    as_is: bool = Field(default=False, description="keep names and layouts unchanged")
    assemble_flat: bool = Field(
        default=False, description="join Paddle's flat slices that lack metadata, in the order of the files"
    )
    int16: Int16 | None = Field(default=None, description="how to read 16-bit integers: integers, or bfloat16")
    shards: int | None = Field(
        default=None, ge=1, description="number of ranks that wrote shards, if the source does not record it"
    )

    leave_out: tuple[Text, ...] = Field(
        default=(),
        strict=False,  # JSON has lists
        max_length=LEFT_OUT_MAX,
        description="patterns of keys, tensors (NAME or GROUP/NAME), values and files to leave out",
    )
    weights_only: bool = Field(default=False, description="import only the weights of the model or adapter")

    @property
    def chosen(self) -> dict[str, Any]:
        """What changes names, layouts or tensors of the source."""
        return self.model_dump(mode="json", include=set(ReadOptions.model_fields), exclude_defaults=True)


class ImportArguments(ReadOptions):
    source: Text = Field(alias="from", description="a path below the export root")
    kind: Text | None = Field(default=None, description="the kind of the source, if several fit")
    program: Text | None = Field(default=None, description="a mapping program: its name, or its text")
    dry_run: bool = Field(default=False, description="only report what would be made")

    @property
    def chosen(self) -> dict[str, Any]:
        """What changes names, layouts or tensors of the source."""
        return super().chosen | ({} if self.program is None else {"program": self.program})


class MergeArguments(Arguments):
    recipe: Text = Field(description="the text of a recipe")
    dry_run: bool = Field(default=False, description="only report what would be made")


class ExportTerms(Arguments):
    """How a checkpoint is exported for another program."""

    form: Text | None = Field(default=None, alias="as", description=f"the program: {', '.join(EXPORT_KINDS)}")
    weights: Text | None = Field(default=None, description="model, ema or master; model if not given")
    dtype: Text | None = Field(default=None, description="convert the weights, to bf16 for example")
    layout: Text | None = Field(
        default=None, description="key names for dcp: fsdp, torchtitan or plain; for megatron: stacked or by-number"
    )
    program: Text | None = Field(default=None, description="a mapping program: its name, or its text")


class ExportArguments(ExportTerms):
    to: Text = Field(description="a path below the export root")
    model_only: bool = Field(default=False, description="only the model and its assets")

    @model_validator(mode="after")
    def _check_fit(self) -> Self:
        alone = next((name for name in ("weights", "dtype", "layout", "program") if getattr(self, name) is not None), None)
        if self.form is None and alone is not None:
            raise InvalidRequest(
                f"the argument {alone!r} of an export needs `as`", hint="choose the program, for example --as hf"
            )
        if self.form is not None and self.model_only:
            raise InvalidRequest(
                "'model_only' and `as` of an export cannot be combined", hint="--as hf exports only the model as well"
            )
        return self


class ConvertArguments(ReadOptions, ExportTerms):
    """What a conversion from directory to directory takes, which is no job of the service."""

    source: Text
    to: Text
    kind: Text | None = None
    dry_run: bool = False


class JobRequest(Body):
    """A job to be done. While an identical job is queued or running, the request returns that job.

    A wrong request is `InvalidRequest`, which names the argument, wherever it is made or read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    wing: ClassVar[str] = ""  # that does jobs of this kind; the core does the others

    kind: str
    run: str | None
    step: int | None
    arguments: Body

    @classmethod
    def of(cls, job: Job) -> Self:
        """The request of a job of this kind."""
        return cls.model_validate(job.model_dump(include={"kind", "run", "step", "arguments"}))

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, dict):
            given = {"arguments": {}} | {name: value for name, value in given.items() if value is not None}
        try:
            return handler(given)
        except ValidationError as error:
            raise _refused(cls, error) from None

    @model_serializer
    def _document(self) -> dict[str, Any]:
        """One document for equal requests: what has its default is left out."""
        arguments = self.arguments.model_dump(by_alias=True, exclude_defaults=True)
        return {"kind": self.kind, "run": self.run, "step": self.step, "arguments": arguments}


class CheckpointJob(JobRequest):
    """A job about one checkpoint."""

    run: RunName
    step: Step


class VerifyJob(CheckpointJob):
    """Read a checkpoint back and check every byte."""

    kind: Literal["verify"] = "verify"
    arguments: VerifyArguments = Field(default_factory=VerifyArguments)


class CompareJob(CheckpointJob):
    """Compute how much two checkpoints differ."""

    kind: Literal["compare"] = "compare"
    arguments: CompareArguments


class ExportJob(CheckpointJob):
    """Write a checkpoint to a directory below the export root."""

    wing: ClassVar[str] = "convert"
    kind: Literal["export"] = "export"
    arguments: ExportArguments


class ImportJob(CheckpointJob):
    """Make a checkpoint of a directory below the export root."""

    wing: ClassVar[str] = "convert"
    kind: Literal["import"] = "import"
    arguments: ImportArguments


class MergeJob(CheckpointJob):
    """Make a checkpoint of others, by a recipe."""

    wing: ClassVar[str] = "merge"
    kind: Literal["merge"] = "merge"
    arguments: MergeArguments


class ScrubJob(JobRequest):
    """Verify all checkpoints of a run, or of the root."""

    kind: Literal["scrub"] = "scrub"
    run: RunName | None = None
    step: None = None
    arguments: Arguments = Field(default_factory=Arguments)


class RebuildJob(JobRequest):
    """Rebuild the catalog from the directories."""

    kind: Literal["rebuild"] = "rebuild"
    run: None = None
    step: None = None
    arguments: Arguments = Field(default_factory=Arguments)


AnyJob = Annotated[
    VerifyJob | ScrubJob | ExportJob | ImportJob | MergeJob | CompareJob | RebuildJob, Field(discriminator="kind")
]
_KINDS = (VerifyJob, ScrubJob, ExportJob, ImportJob, MergeJob, CompareJob, RebuildJob)
_MODELS: dict[str, type[JobRequest]] = {model.model_fields["kind"].default: model for model in _KINDS}


def parse(document: Mapping[str, Any]) -> JobRequest:
    """The request that a document describes."""
    kind = document.get("kind")
    if kind not in _MODELS:
        raise InvalidRequest(f"{kind!r} is not a kind of job", hint=f"one of {', '.join(_MODELS)}")
    return _MODELS[kind].model_validate(dict(document))


def _refused(model: type[JobRequest], error: ValidationError) -> InvalidRequest:
    wrong = error.errors()[0]
    kind, (outer, *inner) = model.model_fields["kind"].default, wrong["loc"]
    within: Any = model.model_fields["arguments"].annotation if inner else model
    fields = {field.alias or name: field for name, field in within.model_fields.items()}
    name = str(inner[0] if inner else outer)
    if wrong["type"] == "extra_forbidden":
        return InvalidRequest(
            f"a job of kind {kind!r} has no argument {name!r}", hint=f"it takes {', '.join(fields) or 'none'}"
        )
    meaning = fields[name].description or ""
    if wrong["type"] == "missing":
        return InvalidRequest(f"a job of kind {kind!r} needs {name!r}", hint=meaning)
    return InvalidRequest(f"the argument {name!r} of a job of kind {kind!r} is wrong: {message(error)}", hint=meaning)
