"""`mar-grpo prompts`: make, show and check prompt sets."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

from mar_grpo.commands.options import RecipeOption, SetOption

app = typer.Typer(no_args_is_help=True, help="Prompt sets: WebDataset shards and the document that lists them.")
SetArgument = Annotated[str, typer.Argument(help="Path or URI of a prompt set document.")]


@app.command()
def build(
    store: Annotated[str, typer.Option(help="Where to write, s3://BUCKET[/PREFIX] or file:///FOLDER.")],
    recipe: RecipeOption = "emoji",
    set_: SetOption = None,
    prefix: Annotated[str, typer.Option(help="Folder in the store.")] = "prompts",
) -> None:
    """Write a recipe's training and held-out prompts as WebDataset shards with their documents."""
    from mar_grpo.config import load_recipe
    from mar_grpo.data.build import build_prompt_set
    from mar_grpo.documents import write_document
    from mar_grpo.store import Store

    config, place = load_recipe(recipe, set_ or []).data, Store(store)
    if place.scheme == "file":
        place.make_root()
    train_set = build_prompt_set(place, f"{prefix}/train", config, "train")
    held_out = build_prompt_set(place, f"{prefix}/evaluation", config, "evaluation")
    for name, made in (("train", train_set), ("evaluation", held_out)):
        reference = write_document(place, f"{prefix}/{name}.json", made)
        print(f"{made.samples:6d} samples  {reference.uri}#{reference.sha256}")


@app.command()
def inspect(uri: SetArgument, examples: Annotated[int, typer.Option(min=0, help="Records to show.")] = 5) -> None:
    """Samples, shards, tags and the first records of a set. A table on a terminal, JSON lines elsewhere."""
    from itertools import islice

    from rich.console import Console
    from rich.table import Table

    from mar_grpo.data.shards import read_shards
    from mar_grpo.documents import PromptSet, read_document

    found = read_document(uri, PromptSet)
    about = {
        "uri": uri,
        "sha256": found.digest,
        "kind": found.kind,
        "samples": found.samples,
        "shards": len(found.shards),
        "bytes": sum(shard.bytes for shard in found.shards),
        "record_schema": found.record_schema,
        "source": found.source,
    }
    console = Console()
    if not console.is_terminal:
        print(json.dumps(about, ensure_ascii=False))
        for sample in islice(read_shards(found), examples):
            print(json.dumps({"key": sample.key} | sample.record.as_dict(), ensure_ascii=False))
        return
    head, table = Table(box=None, show_header=False), Table("key", "tag", "prompt")
    for name, value in about.items():
        head.add_row(name, str(value))
    for sample in islice(read_shards(found), examples):
        table.add_row(sample.key, sample.record.tag, sample.record.prompt)
    console.print(head)
    console.print(table)


@app.command()
def verify(uri: SetArgument) -> None:
    """Check every byte, digest, count and record (and picture) of a set; exit code 2 with what is wrong."""
    from mar_grpo.data.shards import read_shards
    from mar_grpo.documents import PromptSet, read_document

    found = read_document(uri, PromptSet)
    tags: Counter[str] = Counter()
    for sample in read_shards(found):
        if sample.png is not None:
            sample.image()
        tags[sample.record.tag] += 1
    sizes = {"samples": found.samples, "shards": len(found.shards), "bytes": sum(shard.bytes for shard in found.shards)}
    print(json.dumps({"uri": uri, "sha256": found.digest} | sizes | {"samples_by_tag": dict(sorted(tags.items()))}))
