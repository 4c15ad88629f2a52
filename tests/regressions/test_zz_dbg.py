import faulthandler
faulthandler.dump_traceback_later(45, repeat=True)
from tests.regressions.test_peers_memory import saved, spoil, restored, site
import pytest
pytestmark = pytest.mark.usefixtures("forked_programs")
import logging
logging.basicConfig(level=logging.INFO)
def test_small(site):
    a, b = site.start("a"), site.start("b")
    saved(site, [a, b])
    spoil(site)
    print("saved", flush=True)
    try:
        print(restored([b, a], "again"))
        print(restored([b], "one"))
    finally:
        print((site.root.parent/"root.log").read_text()[-6000:])
