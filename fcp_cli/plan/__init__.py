"""The plan file (`fcp-plan/1`): schema, write, read, check. The runtime reads plans through it; no torch here."""
