"""The snippets of the manual, executed as written on one deployment: Python, commands and job files, page by page.

``tests/repo/test_snippets.py`` checks snippets without executing them; ``tests/manual.py`` names those not run here.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.shared.config.base import with_overrides
from tests.e2e.manual_reader import GRADER, KEY, ROWS, SMALLER, Deployments, Reader, Scene
from tests.manual import PAGES, ROOT, snippets, to_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


class Answers(BaseHTTPRequestHandler):
    """Server that stands for a scorer, a judge and a receiver of webhooks; its scores are always high."""

    def do_POST(self) -> None:
        """Send the same high score to every request."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        results = [{"score": 1.0} for _ in asked.get("completions", [])]
        message = {"role": "assistant", "content": "Score: 7"}
        body = json.dumps({"results": results, "choices": [{"index": 0, "message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of the server that replaces the hosts `*.example` of the manual."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def deployment(deploy: Callable[..., Any], stack_folder: Path) -> Iterator[Any]:
    """Deployment for this file alone: pages change its workers, and readers end the jobs that pages start."""
    folder = stack_folder
    deployment = deploy(folder / "stack")
    deployment.modules = folder / "modules"
    deployment.modules.mkdir()
    deployment.environment |= {
        "PENSTOCK_EXPERIENCE_BYTES": str(1 << 30),  # for the byte budgets that the pages leave out
        "PENSTOCK_SIMS_DIR": str(folder / "sims"), "PENSTOCK_SCORER_ENV": "GRADER_KEY,SIGNING_SECRET",
        "GRADER_KEY": "secret", "SIGNING_SECRET": "secret", "PENSTOCK_SCORER_PRIVATE": "true",
        "PYTHONPATH": f"{deployment.environment['PYTHONPATH']}:{deployment.modules}",
    }  # fmt: skip
    with deployment as stack:
        yield stack


@pytest.fixture(scope="module")
def own(stack_folder: Path) -> Iterator[Deployments]:
    """Deployments that pages start; the fixture stops them after the last page."""
    own = Deployments(stack_folder / "home")
    try:
        yield own
    finally:
        own.close()


def small() -> dict[str, Any]:
    """Return the first job file of the manual, made small."""
    first = next(one for one in snippets("docs/job-file.md") if one.kind == "job")
    return with_overrides(yaml.safe_load(first.text), SMALLER["rl"])


@pytest.fixture(scope="module")
def ended(deployment: Any) -> str:
    """Id of the small job, which has ended."""
    job: str = deployment.client.submit(small()).id
    assert deployment.finish(job, 180).status.phase == "succeeded"
    return job


@pytest.fixture(scope="module")
def models(deployment: Any, ended: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with Hugging Face models: the policy of the small job, a reward model with its weights, and a GPT-2."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("models")
    done = deployment.cli("export", f"{ended}@best", "--to", str(folder / "policy"))
    assert done.exit_code == 0, done.output
    config = json.loads((folder / "policy/config.json").read_text())
    (folder / "policy/config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    shutil.copytree(folder / "policy", folder / "reward")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1)
    model.save_pretrained(folder / "reward")
    for name in ("Qwen3-0.6B", "qwen3-0.6b"):
        (folder / name).symlink_to(folder / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    ends = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    size = {"vocab_size": len(tokenizer), "n_positions": 256, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**size, **ends)).save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    return folder


@pytest.fixture(scope="module")
def scene(deployment: Any, ended: str, own: Deployments, address: str, models: Path) -> Scene:
    """Resources that the readers share."""
    return Scene(deployment, ended, own, address, models)


@pytest.fixture
def reader(page: str, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """Reader of a page, in a folder with a job, data, a grader and the examples; the key is below the home folder."""
    keys = tmp_path / "home" / ".penstock"
    keys.mkdir(parents=True)
    (keys / "api.key").write_text(KEY + "\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PENSTOCK_URL", scene.stack.stack.url)
    monkeypatch.setenv("PENSTOCK_API_KEY", KEY)
    monkeypatch.setenv("PENSTOCK_SIMS_DIR", scene.stack.environment["PENSTOCK_SIMS_DIR"])
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "deploy"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for code in (ROOT / "examples").glob("*.py"):
        shutil.copy(code, tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "models").symlink_to(scene.models)
    Path("job.yaml").write_text(yaml.safe_dump(small()))
    Path("grader.yaml").write_text(yaml.safe_dump(GRADER))
    for name in ("train.jsonl", "held-out.jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    reader = Reader(page, scene)
    try:
        yield reader
    finally:
        reader.close()


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)])
def test_the_snippets_of_a_page_run(page: str, reader: Reader) -> None:
    for one in to_run(page):
        reader.do(one)
