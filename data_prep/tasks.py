"""Text to shards as two lists of idempotent tasks, run by a local pool or as the elements of a Slurm array.

1. *tokenize*: one task per input split. Read, clean, cut into sentences, encode; each document's hash says
   which bucket it belongs to and whether it is held out. One file per task, the buckets as sections.
2. *instances*: one task per group of buckets. Gather its documents from all files, sort by hash, drop exact
   duplicates, build instances, permute them, write one shard.

A task writes under a temporary name and renames; done means that its file is there with the plan's fingerprint,
so workers, kills and restarts cannot change a byte of the result.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from data_prep.documents import document_hash, read_documents
from data_prep.errors import UserError
from data_prep.inputs import InputSplit
from data_prep.instances import TokenDocuments, assemble_blocks, build_pairs
from data_prep.plan import Plan, held_out, input_names
from data_prep.shards import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    SPLITS,
    TOKENIZER_FOLDER,
    Block,
    canonical_json,
    manifest_bytes,
    shard_name,
    sync,
    token_dtype,
    write_atomically,
    write_shard,
)

# One call of the encoder per batch of documents: large enough to be fast, small enough for memory.
BATCH_CHARACTERS = 1 << 18
COUNTS = (
    "documents",
    "characters",
    "sentences",
    "tokens",
    "unknown_tokens",
    "empty_sentences",
    "empty_documents",
)


# Stage 1: one task per input split


def tokenize(plan: Plan, task: int) -> int:
    """Run a tokenize task unless it is done; returns its input bytes."""
    split = plan.splits[task]
    path = plan.token_file(task)
    if not _is_tokenized(plan, task):
        _check_unchanged(plan, split)
        arrays, counts = _tokenize_split(plan, split)
        header = canonical_json({"fingerprint": plan.fingerprint, "counts": counts})
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            safetensors.numpy.save_file(arrays, temporary, metadata={"header": header})
        except safetensors.SafetensorError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"{path}: it could not be written ({error}); make room on the disk and run the same command again"
            ) from error
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    return split.end - split.start


def _is_tokenized(plan: Plan, task: int) -> bool:
    path = plan.token_file(task)
    return path.is_file() and _token_header(path)["fingerprint"] == plan.fingerprint


def _token_header(path: Path) -> dict:
    with safetensors.safe_open(path, "numpy") as file:
        return json.loads(file.metadata()["header"])


def _check_unchanged(plan: Plan, split: InputSplit) -> None:
    planned = next(file for file in plan.content["inputs"] if file["path"] == split.path)
    try:
        status = os.stat(split.path)
    except OSError as error:
        raise UserError(
            f"{split.path}: it was there when the work was planned ({error.strerror} now)"
        ) from None
    if (status.st_size, status.st_mtime_ns) != (planned["size"], planned["mtime_ns"]):
        raise UserError(
            f"{split.path}: it was changed after the work was planned; delete {plan.output} and run again"
        )


def _batches(documents: Iterator[list[str]]) -> Iterator[list[list[str]]]:
    batch, characters = [], 0
    for sentences in documents:
        batch.append(sentences)
        characters += sum(map(len, sentences))
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenize_split(plan: Plan, split: InputSplit) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    dtype = token_dtype(plan.tokenizer.vocab_size)
    tokens, sentence_tokens = [np.zeros(0, dtype)], [np.zeros(0, np.int64)]
    document_sentences, hashes = [np.zeros(0, np.int64)], []
    counts = dict.fromkeys(COUNTS, 0)
    for batch in _batches(read_documents(split, plan.settings.read)):
        sentences = [sentence for document in batch for sentence in document]
        encoded = plan.tokenizer.encode(sentences)
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        starts = np.cumsum([0] + [len(document) for document in batch[:-1]])
        kept = np.add.reduceat((lengths > 0).astype(np.int64), starts)
        hashes.extend(document_hash(batch[index]) for index in np.flatnonzero(kept))
        document_sentences.append(kept[kept > 0])
        sentence_tokens.append(lengths[lengths > 0])
        tokens.append(np.concatenate(encoded).astype(dtype))
        counts["documents"] += len(batch)
        counts["characters"] += sum(map(len, sentences))
        counts["sentences"] += len(sentences)
        counts["tokens"] += len(tokens[-1])
        counts["unknown_tokens"] += int((tokens[-1] == plan.tokenizer.unk_id).sum())
        counts["empty_sentences"] += int((lengths == 0).sum())
        counts["empty_documents"] += int((kept == 0).sum())
    documents = TokenDocuments.from_lengths(
        np.concatenate(tokens),
        np.concatenate(sentence_tokens),
        np.concatenate(document_sentences),
        np.frombuffer(b"".join(hashes), dtype=">u8").astype(np.uint64).reshape(-1, 2),
    )
    buckets = np.array([_bucket(plan, digest) for digest in hashes], dtype=np.int64)
    return _sections(documents, buckets, sum(plan.buckets.values())), counts


def _bucket(plan: Plan, digest: bytes) -> int:
    """Number of a document's bucket: those of training first, then those of evaluation."""
    split = "eval" if held_out(digest, plan.settings.eval_fraction) else "train"
    within = int.from_bytes(digest[:8], "big") * plan.buckets[split] >> 64
    return within + (plan.buckets["train"] if split == "eval" else 0)


def _sections(
    documents: TokenDocuments, buckets: np.ndarray, number_of_buckets: int
) -> dict[str, np.ndarray]:
    """Arrays of a token file: documents ordered by bucket, and where each bucket's section begins."""
    ordered = documents.take(np.argsort(buckets, kind="stable"))
    document_border = np.searchsorted(np.sort(buckets), np.arange(number_of_buckets + 1))
    sentence_border = ordered.document_offsets[document_border]
    return {
        "tokens": ordered.tokens,
        "sentence_tokens": np.diff(ordered.sentence_offsets).astype(np.uint32),
        "document_sentences": np.diff(ordered.document_offsets).astype(np.uint32),
        "hashes": ordered.hashes,
        "document_border": document_border.astype(np.int64),
        "sentence_border": sentence_border,
        "token_border": ordered.sentence_offsets[sentence_border],
    }


# Stage 2: one task per group of buckets


def group_buckets(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Join neighbouring buckets until each group holds two different documents (NSP needs another document).

    Returns:
        For each split the half-open bucket ranges; each becomes one shard.
    Raises:
        UserError: the whole split has fewer than two different documents.
    """
    unique = _unique_documents(plan)
    first_eval = plan.buckets["train"]
    groups = {"train": _join(unique[:first_eval], 0)}
    if not groups["train"]:
        raise UserError(_too_few(plan, int(unique[:first_eval].sum()), int(unique.sum())))
    groups["eval"] = _join(unique[first_eval:], first_eval) if plan.settings.eval_fraction > 0 else []
    if plan.settings.eval_fraction > 0 and not groups["eval"]:
        documents = int(unique.sum())
        raise UserError(
            f"--eval_fraction {plan.settings.eval_fraction}: {int(unique[first_eval:].sum())} of {documents:,} documents "
            "would be held out, but next-sentence prediction needs at least two; "
            f"delete {plan.output} and raise it to {min(0.5, max(2 * plan.settings.eval_fraction, 5 / documents)):.2g} "
            "(for the tokenizer too), or give 0 for no evaluation set"
        )
    return groups


def _unique_documents(plan: Plan) -> np.ndarray:
    """Number of different documents in each bucket, counted over all token files."""
    borders, hashes = [], []
    for task in range(len(plan.splits)):
        path = plan.token_file(task)
        if not _is_tokenized(plan, task):
            raise UserError(f"{path}: tokenize task {task} is not done yet; run the tokenize stage first")
        with safetensors.safe_open(path, "numpy") as file:
            borders.append(file.get_tensor("document_border"))
            hashes.append(file.get_tensor("hashes"))
    count = []
    for bucket in range(sum(plan.buckets.values())):
        parts = [h[b[bucket] : b[bucket + 1]] for h, b in zip(hashes, borders, strict=True)]
        count.append(len(np.unique(np.concatenate(parts), axis=0)))
    return np.array(count, dtype=np.int64)


def _join(unique: np.ndarray, first: int) -> list[tuple[int, int]]:
    groups, start, documents = [], first, 0
    for bucket, count in enumerate(unique, first):
        documents += count
        if documents >= 2:
            groups.append((start, bucket + 1))
            start, documents = bucket + 1, 0
    if groups:
        groups[-1] = (groups[-1][0], first + len(unique))
    return groups


def _too_few(plan: Plan, training: int, total: int) -> str:
    where = ", ".join(file["path"] for file in plan.content["inputs"][:3])
    if total == 0:
        return f"{where}: no text was found in the input; check --format ({', '.join(sorted({s.format for s in plan.splits}))} was used)"
    return (
        f"{where}: {training} different documents for training ({total} in all), but next-sentence prediction needs "
        "at least two; give more text, or check --format (documents are separated by blank lines in `sentences`)"
    )


def build_shard(plan: Plan, split: str, number: int, buckets: tuple[int, int]) -> int:
    """Run an instances task unless it is done; returns the number of buckets in it."""
    if _finished_entry(plan, split, number) is None:
        documents, dropped = _load_documents(plan, buckets)
        pairs = build_pairs(documents, plan.settings.instances)
        statistics = _Statistics(plan.settings.instances.seq_len)
        special_ids = plan.content["tokenizer"]["special_ids"]
        blocks = assemble_blocks(documents, pairs, special_ids, plan.policy)
        shard = write_shard(plan.output / shard_name(split, number), map(statistics.observe, blocks))
        counts = {"documents": len(documents), "duplicate_documents": dropped} | statistics.counts
        entry = {"fingerprint": plan.fingerprint, "shard": shard, "counts": counts}
        entry["length_histogram"] = statistics.length_histogram.tolist()
        write_atomically(plan.entry_file(split, number), canonical_json(entry).encode())
    return buckets[1] - buckets[0]


def _finished_entry(plan: Plan, split: str, number: int) -> dict | None:
    """Manifest entry of a shard if this plan has finished it."""
    path = plan.entry_file(split, number)
    if not (path.is_file() and (plan.output / shard_name(split, number)).is_file()):
        return None
    entry = json.loads(path.read_text(encoding="utf-8"))
    return entry if entry["fingerprint"] == plan.fingerprint else None


def _load_documents(plan: Plan, buckets: tuple[int, int]) -> tuple[TokenDocuments, int]:
    """Documents of neighbouring buckets by ascending hash, exact duplicates dropped, and how many were."""
    columns = {
        "tokens": "token",
        "sentence_tokens": "sentence",
        "document_sentences": "document",
        "hashes": "document",
    }
    parts: dict[str, list[np.ndarray]] = {name: [] for name in columns}
    for task in range(len(plan.splits)):
        with safetensors.safe_open(plan.token_file(task), "numpy") as file:
            for name, unit in columns.items():
                border = file.get_slice(f"{unit}_border")
                low, high = (int(border[bucket : bucket + 1][0]) for bucket in buckets)
                if low < high:  # safetensors refuses an empty slice at the end of an array
                    parts[name].append(file.get_slice(name)[low:high])
    arrays = {name: np.concatenate(part) for name, part in parts.items()}
    documents = TokenDocuments.from_lengths(**arrays)
    order = np.lexsort((documents.hashes[:, 1], documents.hashes[:, 0]))
    ascending = documents.hashes[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (ascending[1:] != ascending[:-1]).any(axis=1)
    return documents.take(order[new]), int((~new).sum())


class _Statistics:
    """Counts over the blocks of a shard as they pass by."""

    def __init__(self, seq_len: int):
        self.length_histogram = np.zeros(seq_len + 1, dtype=np.int64)
        self.counts = {"instances": 0, "tokens": 0, "masked_tokens": 0, "random_next": 0}

    def observe(self, block: Block) -> Block:
        self.length_histogram += np.bincount(np.diff(block.offsets), minlength=len(self.length_histogram))
        self.counts["instances"] += len(block)
        self.counts["tokens"] += len(block.tokens)
        self.counts["masked_tokens"] += len(block.masked_lm_positions)
        self.counts["random_next"] += int(block.next_sentence_labels.sum())
        return block


def write_manifest(plan: Plan, groups: dict[str, list[tuple[int, int]]]) -> dict:
    """Write the manifest when every shard is there, and remove the work folder; returns the manifest."""
    splits = {}
    for split in SPLITS:
        entries = []
        for number in range(len(groups[split])):
            entry = _finished_entry(plan, split, number)
            if entry is None:
                raise UserError(
                    f"{plan.output / shard_name(split, number)}: this shard is not done yet; run the instances stage first"
                )
            entries.append(entry)
        splits[split] = _summary(entries)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "settings": plan.content["settings"],
        "inputs": input_names(plan.inputs),
        "tokenizer": plan.content["tokenizer"],
        "versions": plan.content["versions"],
        "read": _add(_token_header(plan.token_file(task))["counts"] for task in range(len(plan.splits))),
        "splits": splits,
    }
    for folder in (plan.output, plan.output / TOKENIZER_FOLDER):
        for path in folder.glob(".*.[0-9]*"):
            path.unlink()  # what a killed process left of a file that it was writing
    write_atomically(plan.output / MANIFEST, manifest_bytes(manifest))
    shutil.rmtree(plan.work)
    return manifest


def _summary(entries: list[dict]) -> dict:
    histograms = [entry["length_histogram"] for entry in entries]
    return {
        "counts": _add(entry["counts"] for entry in entries),
        "length_histogram": np.sum(histograms, axis=0).tolist() if histograms else [],
        "shards": [entry["shard"] for entry in entries],
    }


def _add(counts) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in counts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total
