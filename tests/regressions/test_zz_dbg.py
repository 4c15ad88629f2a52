import traceback
import pytest
from tests.regressions import joint_worlds
from tests.regressions.test_peers_memory import saved, spoil, restored, site

pytestmark = pytest.mark.usefixtures("forked_programs")
from holdfast import Checkpointer

old = Checkpointer.restore


def restore(self, *a, **k):
    try:
        found = old(self, *a, **k)
        print("ok", found, self.last_restore.bytes_by, flush=True)
        return found
    except BaseException:
        traceback.print_exc()
        raise


Checkpointer.restore = restore


def test_small(site):
    a, b = site.start("a"), site.start("b")
    saved(site, [a, a, b, b])
    spoil(site)
    for i in range(8):
        print(restored([a, a, b, b], f"again{i}"), flush=True)
