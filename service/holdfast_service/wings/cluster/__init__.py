"""Daemons that share a root and a catalog: membership, duties, and records that nodes exchange.

It gives no routes, jobs or running parts: `wiring/nodes.py` takes it where control is made.
"""

from holdfast_service.wing import Wing

WING = Wing("cluster")
