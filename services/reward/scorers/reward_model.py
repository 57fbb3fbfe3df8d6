"""Scorer that runs a sequence classifier as reward model.

Shape suffixes: B = texts of one forward pass, T = tokens, C = outputs of the model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.shared.config.rewards.scorers import RewardModelScorer
from penstock.shared.data.prompts import check_messages
from penstock.shared.errors import DataError, ScoringError

if TYPE_CHECKING:
    import torch

__all__ = ["RewardModel", "weights_digest"]

_CHUNK = 1 << 20


class RewardModel:
    """Returns the output of a reward model, loaded once, for each text. Texts that are too long fail, and are not
    truncated."""

    def __init__(self, config: RewardModelScorer) -> None:
        """Load the model. Raises ScoringError if the directory holds no usable classifier."""
        try:
            import torch
            from safetensors import SafetensorError
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
            from transformers.utils import logging as transformers_logging

            from penstock.shared.models.building import building
        except ImportError as error:
            raise ScoringError(f"scorer 'reward_model' needs the extra `penstock[torch]`: {error}") from None
        self._config = config
        folder = Path(config.path)
        if not (folder / "config.json").is_file():
            raise ScoringError(f"scorer 'reward_model': {folder} holds no config.json; is it a Hugging Face directory?")
        self._device = _device(config.device, torch.cuda.is_available())
        torch.set_num_threads(config.threads)
        transformers_logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            with building():
                model, report = AutoModelForSequenceClassification.from_pretrained(
                    folder, local_files_only=True, dtype=getattr(torch, config.dtype), output_loading_info=True
                )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise ScoringError(f"scorer 'reward_model' cannot load {folder}: {error}") from None
        if missing := sorted(report["missing_keys"]):
            raise ScoringError(
                f"scorer 'reward_model': {folder} lacks the weights {', '.join(missing[:4])}; a model without a "
                "trained head would score at random"
            )
        self._model = model.to(self._device).eval()
        self._check(model.config.num_labels, model.get_input_embeddings().num_embeddings)
        self.about = f"{folder} sha256:{weights_digest(folder)[:16]} on {self._device}"

    def score_group(
        self, prompt: str, completions: Sequence[str], answer: str | None, row: dict[str, Any]
    ) -> Sequence[float | ScoringError]:
        """Return the model's output for each completion, or an error.

        Empty texts, texts of more than `max_tokens` tokens and outputs that are not finite fail.

        Raises:
            ScoringError: the row lacks the messages, or the chat template rejects them.
        """
        tokens = [self._tokens(prompt, completion, row) for completion in completions]
        scores: list[float | ScoringError] = [self._refusal(len(ids)) for ids in tokens]
        fitting = [index for index, ids in enumerate(tokens) if 0 < len(ids) <= self._config.max_tokens]
        fitting.sort(key=lambda index: len(tokens[index]))  # texts of one batch have similar lengths
        for start in range(0, len(fitting), self._batch_size):
            chosen = fitting[start : start + self._batch_size]
            for index, value in zip(chosen, self._forward([tokens[i] for i in chosen]), strict=True):
                scores[index] = value if math.isfinite(value) else ScoringError(f"the reward model's output is {value}")
        return scores

    @property
    def _batch_size(self) -> int:
        """Batch size; 1 without a padding token, because the model then cannot find the end of a padded text."""
        return 1 if self._model.config.pad_token_id is None else self._config.batch_size

    def _check(self, num_labels: int, num_embeddings: int) -> None:
        config = self._config
        if config.label is None and num_labels != 1:
            raise ScoringError(f"scorer 'reward_model': the model has {num_labels} outputs; choose one by `label`")
        if config.label is not None and config.label >= num_labels:
            raise ScoringError(f"scorer 'reward_model': label {config.label} of a model with {num_labels} outputs")
        if len(self._tokenizer) > num_embeddings:
            raise ScoringError(
                f"scorer 'reward_model': the tokenizer has {len(self._tokenizer)} tokens, the model {num_embeddings}"
            )
        if config.format == "chat" and not self._tokenizer.chat_template:
            raise ScoringError("scorer 'reward_model': the tokenizer has no chat template; use `format: plain`")

    def _tokens(self, prompt: str, completion: str, row: dict[str, Any]) -> list[int]:
        if self._config.format == "plain":
            return list(self._tokenizer(prompt + completion)["input_ids"])
        messages = [{"role": "user", "content": prompt}]
        try:
            if self._config.messages is not None:
                messages = check_messages(row, self._config.messages, "the row")
            text = self._tokenizer.apply_chat_template(
                [*messages, {"role": "assistant", "content": completion}], tokenize=False
            )
        except (DataError, ValueError, TypeError, RuntimeError) as error:
            raise ScoringError(f"scorer 'reward_model': {error}") from None
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _refusal(self, length: int) -> ScoringError:
        if length == 0:
            return ScoringError("the text has no tokens")
        return ScoringError(f"{length} tokens, more than max_tokens {self._config.max_tokens} of the reward model")

    def _forward(self, texts: list[list[int]]) -> list[float]:
        import torch

        width, pad = max(map(len, texts)), self._model.config.pad_token_id or 0
        ids_BT = torch.tensor([ids + [pad] * (width - len(ids)) for ids in texts], device=self._device)
        mask_BT = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in texts], device=self._device)
        with torch.inference_mode():
            logits_BC = self._model(input_ids=ids_BT, attention_mask=mask_BT).logits.float()
        return [float(value) for value in self._output(logits_BC).tolist()]

    def _output(self, logits_BC: torch.Tensor) -> torch.Tensor:
        label = self._config.label or 0
        if self._config.output == "logit":
            return logits_BC[:, label]
        return logits_BC[:, 0].sigmoid() if logits_BC.shape[1] == 1 else logits_BC.softmax(-1)[:, label]


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 over names and content of the weight files and the configuration, in order of names."""
    digest = hashlib.sha256()
    files = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _device(wanted: str, has_gpu: bool) -> str:
    if wanted == "cuda" and not has_gpu:
        raise ScoringError("scorer 'reward_model': device is cuda, but torch sees no GPU in the reward service")
    return "cuda" if wanted == "cuda" or (wanted == "auto" and has_gpu) else "cpu"
