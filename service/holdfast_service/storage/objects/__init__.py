"""Checkpoints and control files in a bucket: the store, the records, uploads, and what a bucket honours."""

from holdfast_files.objects.probe import HONOURED, Honours, probe

from .conditional_puts import ConditionalPuts
from .object_records import ObjectRecords
from .object_store import ObjectStore
from .uploads import Uploads

__all__ = ["HONOURED", "ConditionalPuts", "Honours", "ObjectRecords", "ObjectStore", "Uploads", "probe"]
