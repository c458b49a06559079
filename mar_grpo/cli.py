"""The command line: parse, call one function, print. Errors are one line on stderr and the documented exit code."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mar_grpo.commands import prompts as prompt_commands
from mar_grpo.commands.options import CheckpointOption, RecipeOption, SetOption, WorkOption, interruptible
from mar_grpo.errors import InputError, MarGrpoError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # a help text may hold brackets, which are markup otherwise; so for every app below
    add_completion=False,
    help="Reinforcement-learning fine-tuning of autoregressive-plus-diffusion image generators. "
    "Exit codes: 2 wrong input or recipe, 3 unhealthy training, 75 try again, 130 interrupted.",
)
recipe_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Recipes that ship with the package, and what they resolve to."
)
app.add_typer(recipe_app, name="recipe")
checkpoint_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="What a checkpoint is, and the same in another layout."
)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(prompt_commands.app, name="prompts")


@app.command()
def run(
    recipe: RecipeOption = "emoji",
    set_: SetOption = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on with this run, a name or STORE/runs/NAME, and its own recipe, changed by --set."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Your own store, s3://BUCKET[/PREFIX] or file:///FOLDER; else one is started here."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what an earlier run of this recipe left.")] = False,
    work: WorkOption = Path(".mar-grpo"),
) -> None:
    """Run the whole pipeline here. The same command goes on where an interrupted run stopped."""
    from mar_grpo.config import load_recipe
    from mar_grpo.launch import processes
    from mar_grpo.launch.object_store import serve
    from mar_grpo.launch.pipeline import run_pipeline
    from mar_grpo.progress import View
    from mar_grpo.runs import Run
    from mar_grpo.steps import locate_run
    from mar_grpo.store import Store
    from mar_grpo.summary import collect

    if resume and fresh:
        raise InputError("--resume and --fresh do not fit", where=resume)
    if resume and "/runs/" in resume:
        store, _, resume = resume.rstrip("/").rpartition("/runs/")
    text, overrides, work = "", set_ or [], work.resolve()
    if not resume:
        text, overrides = load_recipe(recipe, overrides).model_dump_json(), []
    options = ["--resume", resume] if resume else ["--recipe", recipe]
    options += [part for override in set_ or [] for part in ("--set", override)]
    command = shlex.join(["mar-grpo", "run", *options, *(["--store", store] if store else [])])
    with interruptible(), processes.locked(work), contextlib.ExitStack() as stack:
        own = store is None
        uri = stack.enter_context(serve(work / "store")).uri() if store is None else store
        text = Run(Store(uri), resume).uri if resume else text
        opened, loaded = locate_run(text, uri, overrides)
        grace = loaded.training.stop_grace_seconds
        parameters = {"recipe": text, "overrides": overrides, "store": uri, "fresh": fresh, "command": command}
        with View() as view:
            run_pipeline(parameters, work=work, show=view.show, grace_seconds=grace)
        print(collect(opened, work, with_checkpoint=own))


@app.command()
def train(
    run: Annotated[str, typer.Argument(help="URI of the run, STORE/runs/NAME.")],
    checkpoint: Annotated[str, typer.Option(help="Checkpoint document, URI#SHA256.")],
    prompts: Annotated[str, typer.Option(help="Training prompt set, URI#SHA256.")],
    evaluation: Annotated[str, typer.Option(help="Held-out prompt set, URI#SHA256.")],
    folder: Annotated[Path, typer.Option(help="Local folder for files that come from the store.")],
) -> None:
    """One training process; torchrun starts as many as the recipe says. Goes on from the last saved state."""
    from mar_grpo.launch.worker import work
    from mar_grpo.runs import Run
    from mar_grpo.steps import recipe_of

    opened = Run.open(run)
    work(
        recipe_of(opened),
        opened.store,
        f"{opened.prefix}/training",
        checkpoint=_reference(checkpoint),
        prompts=_reference(prompts),
        evaluation=_reference(evaluation),
        folder=folder,
    )


@app.command()
def sft(
    recipe: RecipeOption,
    out: Annotated[Path, typer.Option(help="Folder of the new checkpoint (published layout).")],
    set_: SetOption = None,
    work: Annotated[Path, typer.Option(help="Local folder for state and shards; resumes from it.")] = Path(
        ".mar-grpo/sft"
    ),
) -> None:
    """Supervised fine-tuning of a NOVA-family checkpoint on captioned pictures."""
    from mar_grpo.config import parse, read_mapping
    from mar_grpo.progress import View
    from mar_grpo.training.sft_run import SftRecipe, run_sft

    loaded = parse(SftRecipe, *read_mapping(recipe, set_ or []))
    with interruptible(), View() as view:
        run_sft(
            loaded,
            out,
            work / loaded.name,
            lambda row: view.show(
                {"event": "progress", "step": "sft", "done": row["update"], "total": loaded.sft.updates}
                | {name: value for name, value in row.items() if name != "update"}
            ),
        )
    print(out)


@app.command()
def ablate(
    recipe: Annotated[str, typer.Argument(help="Name, path or URI of a recipe; it is the arm `full`.")],
    seeds: Annotated[str, typer.Option(help="Seeds of training, N,N,...")] = "0,1,2,3,4",
    arms: Annotated[str | None, typer.Option(help="Arms, NAME,NAME,...; all without.")] = None,
    set_: SetOption = None,
    store: Annotated[str | None, typer.Option(help="s3://BUCKET[/PREFIX] or file:///FOLDER; else in --work.")] = None,
    gradient_batches: Annotated[
        int, typer.Option(help="Batches behind each figure of gradient noise, at least 3; 0 measures none.")
    ] = 24,
    out: Annotated[Path | None, typer.Option(help="Folder of results.json, tables.md, page.html.")] = None,
    work: WorkOption = Path(".mar-grpo"),
) -> None:
    """Train a recipe with parts of the method left out, several seeds of each; write tables and a page.

    The same command goes on where an interrupted one stopped."""
    from mar_grpo.launch.terminal import run_shown

    with interruptible():
        if sys.stdout.isatty():
            raise SystemExit(run_shown(sys.argv[1:]))
        from mar_grpo.ablation.run import ablate_here

        work = work.resolve()
        options = [
            recipe,
            "--seeds",
            seeds,
            *(["--arms", arms] if arms else []),
            "--gradient-batches",
            str(gradient_batches),
        ]
        options += [part for override in set_ or [] for part in ("--set", override)]
        text = shlex.join(["mar-grpo", "ablate", *options])
        print(
            ablate_here(
                recipe, set_ or [], arms=arms, seeds=seeds, store=store, batches=gradient_batches, out=out, work=work,
                command=text,
            )
        )  # fmt: skip


@app.command()
def evaluate(
    checkpoint: CheckpointOption = "package://emoji-nova",
    recipe: RecipeOption = "emoji",
    set_: SetOption = None,
    work: WorkOption = Path(".mar-grpo"),
) -> None:
    """Draw the recipe's held-out prompts and print each judge's accuracy per tag with n and standard error."""
    from mar_grpo.summary import evaluation_table

    with interruptible():
        print(evaluation_table(checkpoint, recipe, set_ or [], work))


@app.command()
def sample(
    out: Annotated[Path, typer.Option(help="Folder of the pictures; new, or empty.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts, beside those of --prompts.")] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt file (.json, .jsonl or .csv), path or URI.")] = None,
    checkpoint: CheckpointOption = "package://emoji-nova",
    with_: Annotated[
        list[str] | None, typer.Option("--with", help="What the checkpoint lacks: an autoencoder.")
    ] = None,
    recipe: RecipeOption = "emoji",
    set_: SetOption = None,
    count: Annotated[int, typer.Option(min=1, help="Pictures of each prompt, with the seeds from --seed on.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Processes that share the work, one CPU thread each.")] = 1,
    work: WorkOption = Path(".mar-grpo"),
) -> None:
    """Draw prompts of your own, sampled as the recipe's evaluation is. A picture depends on prompt and seed only."""
    from mar_grpo.launch.sampling import sample_files

    given = (prompt or [], prompts, checkpoint, with_ or [], recipe, set_ or [])
    with interruptible():
        sample_files(*given, out=out, seeds=range(seed, seed + count), processes=processes, work=work)


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="Name, path or URI of a recipe.")],
    gpu_memory_gib: Annotated[float, typer.Option(min=0.001, help="Memory of one GPU, GiB.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, a process each.")] = 1,
    checkpoint: Annotated[str | None, typer.Option(help="Else the recipe's; published://NAME for a size.")] = None,
    set_: SetOption = None,
    json_: Annotated[Path | None, typer.Option("--json", help="File for the numbers.")] = None,
    work: WorkOption = Path(".mar-grpo"),
) -> None:
    """Memory that training a recipe takes, from shapes alone, and what to change (exit code 2 where nothing fits)."""
    from rich.console import Console

    from mar_grpo.commands import plan as planning
    from mar_grpo.config import load_recipe
    from mar_grpo.models.outlines import outline

    loaded, memory = load_recipe(recipe, set_ or []), int(gpu_memory_gib * 2**30)
    policy = outline(checkpoint or loaded.checkpoint.uri, work / "checkpoints")
    estimate, advice = planning.choose(loaded, policy, gpus=gpus, memory_bytes=memory)
    planning.show(estimate, advice, memory, Console(), json_)
    raise SystemExit(0 if estimate.bytes <= memory else 2)


@app.command()
def report(
    run: Annotated[str, typer.Option(help="URI of a finished run, STORE/runs/NAME.")],
    out: Annotated[Path, typer.Option(help="HTML file.")],
) -> None:
    """Write the page of a finished run anew."""
    from mar_grpo.runs import Run
    from mar_grpo.summary import rebuild_report

    print(rebuild_report(Run.open(run), out))


@recipe_app.command("list")
def recipe_list() -> None:
    """Names of the recipes that ship with the package."""
    from mar_grpo.config import recipe_names

    print("\n".join(recipe_names()))


@recipe_app.command("show")
def recipe_show(recipe: Annotated[str, typer.Argument(help="Name, path or URI.")], set_: SetOption = None) -> None:
    """A recipe with every default filled in, as YAML."""
    import yaml

    from mar_grpo.config import load_recipe

    print(yaml.safe_dump(load_recipe(recipe, set_ or []).model_dump(mode="json"), sort_keys=False), end="")


SourceArgument = Annotated[
    str, typer.Argument(help="Path or URI of a folder, a weights file or a Checkpoint document.")
]
WithOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with", help="Where what it lacks is: KL-16, a tokenizer, the Harmon around a MAR; may be repeated."
    ),
]


@checkpoint_app.command("inspect")
def checkpoint_inspect(uri: SourceArgument, with_: WithOption = None, work: WorkOption = Path(".mar-grpo")) -> None:
    """Check every tensor and print family, configuration, parameters, dtype and digest of each part, what is trained.

    A table on a terminal, JSON lines elsewhere."""
    from rich.console import Console

    from mar_grpo.models.inspect import describe, show

    show(describe(uri, work / "checkpoints", with_ or []), Console())


@checkpoint_app.command("convert")
def checkpoint_convert(
    source: SourceArgument,
    target: Annotated[str, typer.Argument(help="Path or URI of a new folder, or of a .pth file (published layout).")],
    layout: Annotated[Literal["ours", "published"], typer.Option(help="Ours has a Checkpoint document.")] = "ours",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Storage; as it is, to the bit, without.")
    ] = None,
    with_: WithOption = None,
    work: WorkOption = Path(".mar-grpo"),
) -> None:
    """Write a checkpoint in another layout; print where."""
    from mar_grpo.models.inspect import convert

    print(convert(source, target, work / "checkpoints", layout=layout, dtype=dtype, others=with_ or []))


def _reference(text: str):  # type: ignore[no-untyped-def]
    from mar_grpo.documents import DocumentRef

    uri, found, digest = text.rpartition("#")
    if not found:
        raise InputError("a reference has the form URI#SHA256", where=text)
    return DocumentRef(uri=uri, sha256=digest)


def main() -> None:
    """Entry point of `mar-grpo`."""
    from mar_grpo.launch import failures

    try:
        app()
    except MarGrpoError as error:
        failures.leave(error)
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        failures.leave(error)
        raise
