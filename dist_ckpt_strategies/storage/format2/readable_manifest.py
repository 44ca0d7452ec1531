"""The manifest as far as it can be read, and what is wrong with the rest. Loads no torch."""

from __future__ import annotations

from dist_ckpt_strategies.errors import CheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.spec.manifest import ArrayRecord, ManifestIndex, ObjectRecord
from dist_ckpt_strategies.storage.file_store import FileStore
from dist_ckpt_strategies.storage.findings import NO_FILE, Finding, Problem
from dist_ckpt_strategies.storage.format2.manifest import INDEX_NAME
from dist_ckpt_strategies.storage.format2.manifest_reader import Manifest


class ReadableManifest:
    """The manifest, as far as it can be read, and what is wrong with the rest.

    Args:
        file_store: the checkpoint.

    Attributes:
        index: its table of contents; None where it is missing or damaged.
        arrays: without those of parts that are damaged.
        objects: the same.
        findings: what is missing or damaged.

    Raises:
        IncompatibleVersionError: a later version of this package wrote it.
    """

    def __init__(self, file_store: FileStore) -> None:
        self.index: ManifestIndex | None = None
        self.arrays: tuple[ArrayRecord, ...] = ()
        self.objects: tuple[ObjectRecord, ...] = ()
        self.findings: list[Finding] = []
        try:
            manifest = Manifest(file_store)
        except IncompleteCheckpointError:
            expected = "the manifest's table of contents"
            self.findings.append(
                Finding(Problem.MISSING_MANIFEST, None, INDEX_NAME, expected, NO_FILE)
            )
            return
        except CheckpointError as error:
            if error.path is None:
                raise  # of a later version
            self.findings.append(_bad_manifest(INDEX_NAME, error))
            return
        self.index = manifest.index
        arrays: list[ArrayRecord] = []
        objects: list[ObjectRecord] = []
        for entry in manifest.index.parts:
            try:
                of_part = manifest.contents_of(entry)
            except CheckpointError as error:
                self.findings.append(_bad_manifest(entry.name, error))
                continue
            arrays += of_part[0]
            objects += of_part[1]
        self.arrays, self.objects = tuple(arrays), tuple(objects)

    @property
    def is_whole(self) -> bool:
        """Whether all of it could be read."""
        return self.index is not None and not self.findings


def _bad_manifest(name: str, error: CheckpointError) -> Finding:
    text = error.message.removeprefix(f"{error.path} ")
    return Finding(Problem.BAD_MANIFEST, None, name, "what the save wrote", text)
