"""``penstock export``: write a checkpoint as a Hugging Face folder with a model card, locally or to the hub."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from penstock.cli.jobs.checkpoints import choose
from penstock.cli.jobs.serving import reference_of
from penstock.cli.printing import Json, note, number, show_json
from penstock.client import Client
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import text_job, trains
from penstock.shared.config.model import parse_reference
from penstock.shared.errors import CheckpointError, ConfigError, Conflict, Unavailable
from penstock.shared.protocol.jobs import JobRecord

__all__ = ["export", "model_card"]

Row = dict[str, Any]
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
INTERNAL_FILES = ("manifest.json", "COMMIT")
"""Files of a checkpoint that only Penstock uses."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export(
    job: Annotated[str, typer.Argument(metavar="JOB[@WHICH]", help="Like addition, addition@best or addition@8.")],
    to: Annotated[Path, typer.Option("--to", help="Directory to write, new or empty.")],
    *,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Add an adapter to the weights under it; needs torch here.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push-to-hub", metavar="REPO", help="Also upload to this repository.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Create a public repository; default: private.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder: weights or adapter, tokenizer, chat template, model card."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise CheckpointError(f"{to} is not empty: name a new directory")
    name, which = parse_reference(reference_of(job))
    with Client() as client:
        record = _trained(client, name)
        row = choose(client.checkpoints(record.id), _flag(which))
        config = text_job(record.spec)
        if merge_lora and row["format"] == "lora":
            _merge(client, record, row, config, to)
        else:
            client.download_checkpoint(record.id, row["number"], to, names=exported(row))
        pins, is_adapter = _pins(client, record, row), (to / "adapter_config.json").exists()
        curves = {name: client.metrics(record.id, names=name)["series"].get(name, []) for name in _METRICS}
    _add_generation_config(to)
    (to / "README.md").write_text(model_card(record, row, curves, pins, is_adapter=is_adapter), encoding="utf-8")
    url = _push(to, push, private=not public) if push is not None else None
    if as_json:
        show_json({**row, "job": record.id, "directory": str(to), "url": url})
        return
    note(f"checkpoint {row['number']} of {record.id} is in {to}" + (f" and at {url}" if url else ""))
    typer.echo(str(to))


_METRICS = ("reward/mean", "eval/greedy")


def _trained(client: Client, job: str) -> JobRecord:
    """Return the newest training job named ``job``. If no training job has this name, return ``client.find(job)``.

    ``client.find`` alone could return a deployment with the same name.
    """
    named = client.list(name=job, limit=50)
    return next((record for record in named if trains(record.spec)), None) or client.find(job)


def _flag(which: str) -> str:
    return {"latest": "newest"}.get(which, which.removeprefix("step:"))


def exported(row: Row) -> list[str]:
    """Return the names of the files of a checkpoint that belong in a Hugging Face folder.

    Optimizer state, reference model, random generators, shards and critic do not.

    Raises:
        Conflict: the files are not on the coordinator's host.
    """
    if not row["available"]:
        raise Conflict(f"the files of checkpoint {row['number']} ({row['path']}) are not on the coordinator's host")
    names = [str(file["name"]) for file in row["files"]]
    plain = [name for name in names if "/" not in name and name not in INTERNAL_FILES]
    return [name for name in plain if not name.endswith(".safetensors") or name in (WEIGHTS, ADAPTER)]


def _merge(client: Client, record: JobRecord, row: Row, config: JobConfig, to: Path) -> None:
    """Merge a checkpoint's adapter into the weights of its base model, and write the result to ``to``.

    The base model is read from the path that the job used.

    Raises:
        ConfigError: torch or peft is not installed here, or the base model is not on this machine.
    """
    try:
        from penstock.services.trainer.checkpoint.export import write_whole
    except ImportError as error:
        raise ConfigError(f"--merge-lora needs torch and peft here: install penstock[torch,lora] ({error})") from None
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        client.download_checkpoint(record.id, row["number"], Path(folder), names=exported(row))
        write_whole(Path(folder), to, config.model)


def _pins(client: Client, record: JobRecord, row: Row) -> dict[str, str]:
    """Return the package versions with which the checkpoint was trained, read from its manifest."""
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        client.download_checkpoint(record.id, row["number"], Path(folder), names=["manifest.json"])
        manifest = json.loads((Path(folder) / "manifest.json").read_bytes())
    return {str(name): str(value) for name, value in manifest.get("environment", {}).items()}


def _add_generation_config(to: Path) -> None:
    """Write ``generation_config.json`` with the special tokens, if the checkpoint has no such file."""
    path, described = to / "generation_config.json", to / "config.json"
    if path.exists() or not described.exists():
        return
    config = json.loads(described.read_bytes())
    tokens = {key: config[key] for key in TOKENS if config.get(key) is not None}
    path.write_text(json.dumps(tokens, indent=2) + "\n", encoding="utf-8")


def model_card(
    record: JobRecord, row: Row, curves: dict[str, list[float | None]], pins: dict[str, str], *, is_adapter: bool
) -> str:
    """Return the README.md of a model: front matter for the hub, a table about the training, and a usage example.

    Args:
        row: the checkpoint.
        curves: values of metrics by name, oldest first.
        pins: versions of the packages that trained the checkpoint, by name.
    """
    config = text_job(record.spec)
    base = record.origin.model if record.origin is not None else config.model.path
    front: Row = {
        "library_name": "peft" if is_adapter else "transformers", "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", config.algorithm.type, "penstock"],
    }  # fmt: skip
    if base is not None and record.origin is None and not Path(base).is_absolute():
        front["base_model"] = base
    facts = [
        ("base", base or f"random weights ({config.model.config.arch})" if config.model.config else base),
        ("data", ", ".join(config.train_sources) or "live agents"),
        ("algorithm", f"{config.algorithm.type}, {config.algorithm.group_size} answers to a prompt"),
        ("optimizer", f"{config.optimizer.type}, learning rate {config.optimizer.learning_rate:g}, "
                      f"{config.optimizer.schedule}"),
        ("policy updates", f"{row['number']} (policy version {row['version']})"),
        *((f"`{name}`", _ends(values)) for name, values in curves.items() if any(v is not None for v in values)),
        ("job", f"{record.name} ({record.id}), seed {config.seed}"),
        ("digest of the weights", f"`{row['digest']}`"),
        *((name, version) for name, version in sorted(pins.items())),
    ]  # fmt: skip
    lines = ["---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "", f"# {record.name}", ""]
    lines += ["Post-trained by reinforcement learning with Penstock; the table lists how.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts), ""]
    return "\n".join([*lines, *_usage(is_adapter), ""])


def _ends(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{number(known[0])} at first, {number(known[-1])} at last, {number(max(known))} at best"


def _usage(is_adapter: bool) -> list[str]:
    load = "AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM"
    package = "peft" if is_adapter else "transformers"
    return [
        "```python", f"from {package} import {load}", "from transformers import AutoTokenizer", "",
        f'model = {load}.from_pretrained(".")', 'tokenizer = AutoTokenizer.from_pretrained(".")', "```",
    ]  # fmt: skip


def _push(directory: Path, repository: str, *, private: bool) -> str:
    """Upload a folder and return its address.

    Raises:
        ConfigError: huggingface_hub is not installed, or the name is not valid.
        Unavailable: the hub refused the upload or is unreachable: network, token, or permissions.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise ConfigError("--push-to-hub needs the package 'huggingface_hub' here: install penstock[torch]") from None
    # The hub's errors derive from those of its HTTP library; catching the bases also covers transport failures.
    failures: tuple[type[BaseException], ...] = (*HfHubHTTPError.__bases__, RuntimeError)
    api = HfApi()
    try:
        made = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=directory, commit_message="Export of a checkpoint")
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub: {error}") from None
    except failures as error:
        raise Unavailable(f"{directory} is written, but the hub did not take it as '{repository}': {error}") from None
    return str(made)
