"""torch.distributed.checkpoint on Holdfast: a storage writer and a storage reader.

dcp.save(state_dict, storage_writer=HoldfastStorageWriter("run", step=500, at="checkpoints"))
dcp.load(state_dict, storage_reader=HoldfastStorageReader("run", at="checkpoints"))
"""

from holdfast.integrations.dcp.reader import HoldfastStorageReader
from holdfast.integrations.dcp.writer import HoldfastStorageWriter

__all__ = ["HoldfastStorageReader", "HoldfastStorageWriter"]
