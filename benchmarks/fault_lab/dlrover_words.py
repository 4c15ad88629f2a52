"""What the agent of DLRover and the lab say to each other. It stands apart as only the agent has DLRover to import."""

AGENT_READY, AGENT_DONE = "agent ready", "agent done"
