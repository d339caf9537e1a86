"""The command line: options as dataclasses, `fcp.yaml`, known and retired names."""
